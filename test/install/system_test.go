//go:build linux

// Package install tests what a release consists of, as users get it: packages in a system of Debian that has nothing else of
// slipstream, once under systemd, archives, and what is pushed to a registry.
package install

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"slipstream.dev/internal/testenv"
)

// debian makes the file tree of a small system of the machine's release of Debian: what is always there, systemd, and what the
// tests use. It takes the packages from where this machine's apt gets them. Other tests do not see what it mounts meanwhile.
func debian(ctx context.Context, dir string) error {
	cmd := exec.CommandContext(ctx, "bash", "-euc", `
		unshare --mount mmdebstrap --quiet --mode=root --variant=minbase --include=systemd,man-db,bash-completion,iproute2,rpm \
			"$(. /etc/os-release && echo "$VERSION_CODENAME")" "$1" \
			"$(find /etc/apt -name '*.sources' -path '*debian*' -o -name sources.list | head -1)"`, "bash", dir)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("make a system of Debian: %w: %s", err, out)
	}
	return nil
}

// begin is what the first process of a system does before it executes the given init. The system is an overlay, in memory, over a
// file tree that all systems share, and sees the releases in /mnt.
const begin = `
set -eu
work=$1/system base=$2 releases=$3
shift 3
mount --make-rprivate /
mkdir "$work"
mount -t tmpfs tmpfs "$work"
mkdir "$work/upper" "$work/work" "$work/root"
mount -t overlay -o "lowerdir=$base,upperdir=$work/upper,workdir=$work/work" overlay "$work/root"
cd "$work/root"
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs tmpfs tmp
mount -t tmpfs -o mode=755 tmpfs dev
for device in null zero full random urandom; do
	touch dev/$device
	mount --bind /dev/$device dev/$device
done
mkdir dev/shm dev/pts
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
mount --bind "$releases" mnt
pivot_root . .
umount -l .
cd /
exec env -i container=test PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"
`

// keep starts a system in namespaces and in a control group of its own, and removes both when its input ends, which it does
// however the test's process ends.
const keep = `
set -eu
cgroup=$1/cgroup
mkdir "$cgroup"
mount -t cgroup2 cgroup2 "$cgroup"
group=$cgroup/slipstream-install-$$
mkdir "$group"
bash -c 'echo $$ >"$1/cgroup.procs"; shift; exec unshare --mount --pid --fork --kill-child --uts --ipc --net --cgroup -- "$@"' \
	bash "$group" bash -c "$BEGIN" bash "$@" </dev/null &
above=$!
echo $above
cat
kill -KILL $(cat /proc/$above/task/$above/children) || true
wait $above || true
find "$group" -depth -type d -exec rmdir {} \;
`

// system is a running system.
type system struct {
	t *testing.T
	// init is its first process.
	init int
}

// start starts a system with a first process.
func start(t *testing.T, base, releases string, init ...string) *system {
	t.Helper()
	cmd := exec.Command("unshare", append([]string{"--mount", "bash", "-c", keep, "bash", t.TempDir(), base, releases}, init...)...)
	cmd.Env = append(os.Environ(), "BEGIN="+begin)
	var console bytes.Buffer
	cmd.Stderr = &console
	input, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	output, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = input.Close()
		if err := cmd.Wait(); err != nil || t.Failed() {
			t.Logf("the system ended: %v\n%s", err, console.String())
		}
	})
	var above int
	if _, err := fmt.Fscan(output, &above); err != nil {
		t.Fatal(err)
	}
	go func() { _, _ = io.Copy(&console, output) }()
	s := &system{t: t}
	testenv.Eventually(t, 20*time.Second, "the system has started", func() string {
		children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", above))
		if err != nil {
			return err.Error()
		}
		if s.init, err = strconv.Atoi(strings.TrimSpace(string(children))); err != nil {
			return "no first process"
		}
		if program, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", s.init)); err != nil || filepath.Base(program) != filepath.Base(init[0]) {
			return fmt.Sprintf("its first process is %s, %v", program, err)
		}
		return ""
	})
	return s
}

// try runs a command in the system and returns what it printed.
func (s *system) try(command ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	enter := []string{"--target=" + strconv.Itoa(s.init), "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--root", "--wd=/", "--",
		"env", "-i", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C.UTF-8"}
	out, err := exec.CommandContext(ctx, "nsenter", append(enter, command...)...).CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("%s: %w:\n%s", strings.Join(command, " "), err, out)
	}
	return string(out), nil
}

func (s *system) run(command ...string) string {
	s.t.Helper()
	out, err := s.try(command...)
	if err != nil {
		s.t.Fatal(err)
	}
	return out
}

// has checks that a command prints a text.
func (s *system) has(text string, command ...string) {
	s.t.Helper()
	if out := s.run(command...); !strings.Contains(out, text) {
		s.t.Errorf("%s: no %q in\n%s", strings.Join(command, " "), text, out)
	}
}

// volatile are folders that differ without slipstream too: file systems in memory, logs, caches and databases of packages.
var volatile = []string{"proc", "sys", "dev", "run", "tmp", "mnt", "var/log", "var/cache", "var/lib/systemd", "var/lib/rpm", "root/.rpmdb"}

// databases are files of dpkg that list packages, which it may write in another order.
var databases = []string{"var/lib/dpkg/status", "var/lib/dpkg/status-old", "var/lib/dpkg/lock", "var/lib/dpkg/lock-frontend", "var/lib/dpkg/triggers/Lock"}

// files lists the files of the system, one a line, with their permissions, sizes and targets.
func (s *system) files() (all []string) {
	s.t.Helper()
	root := fmt.Sprintf("/proc/%d/root", s.init)
	err := fs.WalkDir(os.DirFS(root), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if slices.Contains(volatile, name) {
			return fs.SkipDir
		}
		if slices.Contains(databases, name) {
			return nil
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		line := fmt.Sprintf("%s %s", info.Mode(), name)
		switch {
		case info.Mode().IsRegular():
			line += fmt.Sprintf(" %d", info.Size())
		case info.Mode()&fs.ModeSymlink != 0:
			target, err := os.Readlink(filepath.Join(root, name))
			if err != nil {
				return err
			}
			line += " " + target
		}
		all = append(all, line)
		return nil
	})
	if err != nil {
		s.t.Fatal(err)
	}
	return all
}

// build builds the program with a version, and makes a release of it. The programs for other platforms, and slipstream-azure,
// are stand-ins: the tests only need them to exist.
func build(ctx context.Context, checkout, dir, version string, platforms ...string) error {
	from, out := filepath.Join(dir, "built"), filepath.Join(dir, version)
	if err := errors.Join(os.RemoveAll(from), os.MkdirAll(out, 0o755)); err != nil {
		return err
	}
	standIn, err := os.Executable()
	if err != nil {
		return err
	}
	for _, platform := range platforms {
		suffix := ""
		if strings.HasPrefix(platform, "windows") {
			suffix = ".exe"
		}
		if err := os.MkdirAll(filepath.Join(from, platform), 0o755); err != nil {
			return err
		}
		for _, name := range []string{"slipstream", "slipstream-azure"} {
			if err := os.Link(standIn, filepath.Join(from, platform, name+suffix)); err != nil {
				return err
			}
		}
	}
	program := filepath.Join(from, "linux_"+runtime.GOARCH, "slipstream")
	if err := os.Remove(program); err != nil {
		return err
	}
	for _, argv := range [][]string{
		{"go", "build", "-trimpath", "-ldflags", "-s -w -X main.version=" + version, "-o", program, "./cmd/slipstream"},
		{"go", "run", "./docs/generate", from},
		{"go", "run", "-C", "tools", "./image", "-o", filepath.Join(out, "slipstream_"+version+"_image.tar"), "-ref", "slipstream.dev/slipstream:" + version, "linux/" + runtime.GOARCH + "=" + program},
		{filepath.Join(dir, "release"), "-from", from, "-o", out, "-version", version, "-date", "1700000000"},
	} {
		cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
		cmd.Dir = checkout
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "SOURCE_DATE_EPOCH=1700000000")
		if output, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, output)
		}
	}
	return nil
}
