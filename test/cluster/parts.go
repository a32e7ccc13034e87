//go:build linux

package cluster

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A part is a program built from a Go module.
type part struct {
	// module is a folder of this repository, and pkg the package to build there.
	// The default of name is the last element of pkg.
	module, pkg, name string
	// cgo means that the program contains C code.
	cgo bool
}

const (
	partsModule      = "test/cluster/parts"
	kubernetesModule = "k8s.io/kubernetes"
)

var parts = []part{
	{module: partsModule, pkg: kubernetesModule + "/cmd/kube-apiserver"},
	{module: partsModule, pkg: kubernetesModule + "/cmd/kube-controller-manager"},
	{module: partsModule, pkg: kubernetesModule + "/cmd/kube-scheduler"},
	{module: partsModule, pkg: kubernetesModule + "/cmd/kubelet"},
	{module: partsModule, pkg: kubernetesModule + "/cmd/kube-proxy"},
	{module: partsModule, pkg: kubernetesModule + "/cmd/kubectl"},
	{module: partsModule, pkg: "go.etcd.io/etcd/server/v3", name: "etcd"},
	// One of flanneld's backends forwards packets itself, in C.
	{module: partsModule, pkg: "github.com/flannel-io/flannel", name: "flanneld", cgo: true},
	{module: partsModule + "/cni", pkg: "github.com/containernetworking/plugins/plugins/meta/flannel"},
	{module: partsModule, pkg: "./pause"},
}

const pauseImage = "slipstream.dev/pause:cluster"

// Parts returns the folder with the programs of a cluster, including kubectl,
// and with the archive pause.tar. It builds them on first use, which takes
// minutes, and again when their sources change. Call it from within the module.
func Parts(ctx context.Context) (dir string, err error) {
	return buildParts(ctx, parts, io.Discard)
}

func buildParts(ctx context.Context, parts []part, log io.Writer) (string, error) {
	root, err := checkout(ctx)
	if err != nil {
		return "", err
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find a folder for the parts of a cluster: %w", err)
	}
	cache = filepath.Join(cache, "slipstream-cluster")
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", fmt.Errorf("make folder for the parts of a cluster: %w", err)
	}
	sum, err := partsSum(ctx, parts, root)
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, sum)
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	lock, err := flock(ctx, filepath.Join(cache, "lock"))
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if _, err := os.Stat(dir); err == nil {
		return dir, nil // another process built them meanwhile
	}
	fmt.Fprintln(log, "building the parts of a cluster, once: this takes some minutes")
	// Only the holder of the lock builds, so anything in this folder comes from a
	// build that was cut short.
	building := filepath.Join(cache, "building")
	if err := os.RemoveAll(building); err != nil {
		return "", fmt.Errorf("remove a build that was cut short: %w", err)
	}
	version, err := output(exec.CommandContext(ctx, "go", "list", "-C", filepath.Join(root, partsModule), "-m", "-f", "{{.Version}}", kubernetesModule))
	if err != nil {
		return "", fmt.Errorf("tell the version of Kubernetes: %w", err)
	}
	for _, p := range parts {
		name := cmp.Or(p.name, filepath.Base(p.pkg))
		fmt.Fprintln(log, "building", name)
		cmd := exec.CommandContext(ctx, "go", "build", "-C", filepath.Join(root, p.module), "-trimpath",
			"-ldflags", "-s -w"+stamp(version), "-o", filepath.Join(building, name), p.pkg)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS="+runtime.GOOS, "GOARCH="+runtime.GOARCH)
		if p.cgo {
			cmd.Env = append(cmd.Env, "CGO_ENABLED=1")
		}
		if _, err := output(cmd); err != nil {
			return "", fmt.Errorf("build %s: %w", name, err)
		}
	}
	if pause := filepath.Join(building, "pause"); slices.ContainsFunc(parts, func(p part) bool { return p.pkg == "./pause" }) {
		if err := packImage(ctx, root, pause+".tar", pauseImage, pause); err != nil {
			return "", err
		}
	}
	if err := os.Rename(building, dir); err != nil {
		return "", fmt.Errorf("keep the parts of a cluster: %w", err)
	}
	return dir, nil
}

// stamp returns linker flags that set the version of Kubernetes' programs. They
// do not work with their default, v0.0.0.
func stamp(version string) string {
	major, rest, _ := strings.Cut(strings.TrimPrefix(version, "v"), ".")
	minor, _, _ := strings.Cut(rest, ".")
	const in = " -X k8s.io/component-base/version."
	return in + "gitVersion=" + version + in + "gitMajor=" + major + in + "gitMinor=" + minor
}

// partsSum returns a name that depends on all inputs of the parts.
func partsSum(ctx context.Context, parts []part, root string) (string, error) {
	h := sha256.New()
	goVersion, err := output(exec.CommandContext(ctx, "go", "env", "GOVERSION"))
	if err != nil {
		return "", fmt.Errorf("tell Go's version: %w", err)
	}
	fmt.Fprintln(h, goVersion, runtime.GOARCH, parts, pauseImage)
	if err := fs.WalkDir(os.DirFS(root), partsModule, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := os.ReadFile(filepath.Join(root, path))
		fmt.Fprintf(h, "%s %d\n%s", path, len(data), data)
		return err
	}); err != nil {
		return "", fmt.Errorf("read what the parts of a cluster are built of: %w", err)
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:8]), nil
}

// checkout returns the folder of this repository, when called from within it.
func checkout(ctx context.Context) (string, error) {
	root, err := output(exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", "slipstream.dev"))
	if err != nil {
		return "", fmt.Errorf("find the checkout (parts of a cluster are built in it, so start there): %w", err)
	}
	return root, nil
}

// packImage creates an archive with an image of one program.
func packImage(ctx context.Context, checkout, archive, ref, program string) error {
	cmd := exec.CommandContext(ctx, "go", "run", "-C", filepath.Join(checkout, "tools"), "./image",
		"-o", archive, "-ref", ref, "linux/"+runtime.GOARCH+"="+program)
	if _, err := output(cmd); err != nil {
		return fmt.Errorf("pack image %s: %w", ref, err)
	}
	return nil
}

// output runs a command and returns its standard output. If the command fails,
// the error contains what it wrote to standard error.
func output(cmd *exec.Cmd) (string, error) {
	out, err := cmd.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		err = fmt.Errorf("%s: %w: %s", filepath.Base(cmd.Path), err, strings.TrimSpace(string(exit.Stderr)))
	}
	return strings.TrimSpace(string(out)), err
}

// flock takes a lock that the kernel releases when this process ends.
func flock(ctx context.Context, path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("lock: %w", err)
	}
	err = poll(ctx, 100*time.Millisecond, func() (bool, error) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if errors.Is(err, unix.EWOULDBLOCK) {
			return false, nil
		}
		return true, err
	})
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return f, nil
}

// poll calls done until it returns true.
func poll(ctx context.Context, every time.Duration, done func() (bool, error)) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		if ok, err := done(); ok || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
