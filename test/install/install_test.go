//go:build linux

package install

import (
	"context"
	"fmt"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/registry"
	"golang.org/x/sync/errgroup"

	"slipstream.dev/internal/testenv"
)

// The versions of two releases: the second is an upgrade, because a candidate follows what was built before it.
const (
	older = "9.8.7-dev.1.gabc"
	newer = "9.8.7-rc.1"
)

// made has what all tests share. It is made once.
var made struct {
	once sync.Once
	dir  string
	// base is the file tree of the system, and releases has a folder for each version.
	base, releases string
	err            error
}

func TestMain(m *testing.M) {
	os.Exit(func() int {
		defer func() {
			if made.dir != "" {
				os.RemoveAll(made.dir)
			}
		}()
		return m.Run()
	}())
}

// need makes the releases and the system, or skips the test.
func need(t *testing.T) (base, releases string) {
	t.Helper()
	testenv.NeedRoot(t)
	testenv.NeedProgram(t, "mmdebstrap", "apt-get install mmdebstrap")
	made.once.Do(func() { made.err = prepare(context.Background()) })
	if made.err != nil {
		t.Fatal(made.err)
	}
	return made.base, made.releases
}

func prepare(ctx context.Context) error {
	checkout, err := filepath.Abs("../..")
	if err != nil {
		return err
	}
	if made.dir, err = os.MkdirTemp("", "slipstream-install"); err != nil {
		return err
	}
	made.base, made.releases = filepath.Join(made.dir, "base"), filepath.Join(made.dir, "releases")
	if err := os.Mkdir(made.releases, 0o755); err != nil {
		return err
	}
	var all errgroup.Group
	all.Go(func() error { return debian(ctx, made.base) })
	all.Go(func() error { return buildAll(ctx, checkout) })
	return all.Wait()
}

func buildAll(ctx context.Context, checkout string) error {
	tool := exec.CommandContext(ctx, "go", "build", "-C", filepath.Join(checkout, "tools/release"), "-o", filepath.Join(made.releases, "release"), ".")
	if out, err := tool.CombinedOutput(); err != nil {
		return fmt.Errorf("build tools/release: %w: %s", err, out)
	}
	if err := build(ctx, checkout, made.releases, older, "linux_"+runtime.GOARCH); err != nil {
		return err
	}
	return build(ctx, checkout, made.releases, newer, "linux_amd64", "linux_arm64", "darwin_amd64", "darwin_arm64", "windows_amd64", "windows_arm64")
}

// deb and rpm return the names of a version's package in a system.
func deb(version string) string {
	return fmt.Sprintf("/mnt/%s/slipstream_%[1]s_%s.deb", version, runtime.GOARCH)
}

func rpm(version string) string {
	return fmt.Sprintf("/mnt/%s/slipstream-%[1]s-1.%s.rpm", version, map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[runtime.GOARCH])
}

// unchanged checks that the files of a system are those of before.
func unchanged(s *system, before []string) {
	s.t.Helper()
	if diff := cmp.Diff(before, s.files()); diff != "" {
		s.t.Errorf("something is left:\n%s", diff)
	}
}

// works checks that what a package has installed can be used.
func works(s *system, version string) {
	s.t.Helper()
	s.has("slipstream version "+version+" (linux/", "slipstream", "version")
	s.has("kubectl slipstream [", "kubectl-slipstream", "--help")
	s.has("slipstream agent [flags]", "man", "slipstream-agent")
	s.has("run demo", "man", "slipstream")
	// What bash runs when somebody types slipstream preset d and tab.
	s.has("demo", "bash", "-c", `. /usr/share/bash-completion/bash_completion
		_completion_loader slipstream
		COMP_WORDS=(slipstream preset dem) COMP_CWORD=2 COMP_LINE="slipstream preset dem" COMP_POINT=${#COMP_LINE} COMP_TYPE=9 COMP_KEY=9
		__start_slipstream
		echo "${COMPREPLY[@]}"`)
	if out, err := s.try("slipstream", "doctor"); err != nil && !strings.Contains(err.Error(), "exit status 3") { // it has found something
		s.t.Errorf("%v\n%s", err, out)
	}
}

// nic makes a device by which packets leave the system, and returns a function that reads what the accelerator rps sets there.
func nic(s *system) (rps func() string) {
	s.t.Helper()
	s.run("ip", "link", "add", "nic0", "type", "veth", "peer", "name", "wire0")
	s.run("ip", "address", "add", "192.0.2.1/24", "dev", "nic0")
	s.run("ip", "link", "set", "nic0", "up")
	return func() string {
		s.t.Helper()
		return strings.TrimSpace(s.run("cat", "/sys/class/net/nic0/queues/rx-0/rps_cpus"))
	}
}

// TestDebUnderSystemd walks through the life of the package on a host that runs the agent.
func TestDebUnderSystemd(t *testing.T) {
	t.Parallel()
	base, releases := need(t)
	s := start(t, base, releases, "/usr/lib/systemd/systemd", "--show-status=no", "--log-target=console", "--log-level=warning")
	testenv.Eventually(t, 30*time.Second, "systemd has started the system", func() string {
		if out, _ := s.try("systemctl", "is-system-running"); !strings.Contains(out, "running") && !strings.Contains(out, "degraded") {
			return out
		}
		return ""
	})
	rps := nic(s)
	value, before := rps(), s.files()

	s.run("dpkg", "--install", deb(older))
	works(s, older)
	if out, err := s.try("systemctl", "is-enabled", "slipstream-agent"); err == nil {
		t.Errorf("the package enables the agent: %s", out)
	}
	s.run("mkdir", "/etc/slipstream")
	s.run("cp", "/usr/share/doc/slipstream/examples/policy.yaml", "/etc/slipstream/")
	s.run("systemctl", "enable", "--now", "slipstream-agent")
	applied := func() {
		t.Helper()
		s.has("active (running)", "systemctl", "status", "slipstream-agent")
		testenv.Eventually(t, 20*time.Second, "the policy is applied", func() string {
			if now := rps(); now == value {
				return "rps_cpus is " + now
			}
			return ""
		})
	}
	applied()
	first := s.run("systemctl", "show", "--property=MainPID", "slipstream-agent")

	s.run("dpkg", "--install", deb(newer))
	works(s, newer)
	applied()
	if next := s.run("systemctl", "show", "--property=MainPID", "slipstream-agent"); next == first {
		t.Errorf("the older agent still runs: %s", next)
	}
	s.has("NRestarts=0", "systemctl", "show", "--property=NRestarts", "slipstream-agent")

	s.run("systemctl", "stop", "slipstream-agent")
	if now := rps(); now == value {
		t.Error("an agent that is stopped restores rps_cpus, which one that is upgraded must not")
	}
	s.run("systemctl", "start", "slipstream-agent")
	applied()

	s.run("dpkg", "--remove", "slipstream")
	if now := rps(); now != value {
		t.Errorf("rps_cpus is %s after the package is removed, and was %s", now, value)
	}
	s.run("test", "-e", "/etc/slipstream/policy.yaml") // is the administrator's until the package is purged
	s.run("dpkg", "--purge", "slipstream")
	unchanged(s, before)
}

// TestDebWithoutSystemd: the package also installs where no systemd runs, as in an image.
func TestDebWithoutSystemd(t *testing.T) {
	t.Parallel()
	testWithoutSystemd(t, func(s *system, version string) { s.run("dpkg", "--install", deb(version)) }, "dpkg", "--purge", "slipstream")
}

// TestRPM uses Debian's rpm, which does not know what dpkg has installed, so it must not check dependencies (--nodeps).
func TestRPM(t *testing.T) {
	t.Parallel()
	testWithoutSystemd(t, func(s *system, version string) {
		s.has("digests OK", "rpm", "--checksig", rpm(version))
		s.has("/usr/share/zsh/site-functions/_slipstream", "rpm", "--query", "--package", "--list", rpm(version))
		s.run("rpm", "--upgrade", "--nodeps", rpm(version))
	}, "rpm", "--erase", "--nodeps", "slipstream")
}

// testWithoutSystemd installs a package, applies an accelerator, and upgrades and removes the package, which restores the system.
func testWithoutSystemd(t *testing.T, install func(s *system, version string), remove ...string) {
	t.Helper()
	base, releases := need(t)
	s := start(t, base, releases, "/usr/bin/sleep", "infinity")
	rps := nic(s)
	value, before := rps(), s.files()
	install(s, older)
	works(s, older)
	s.run("slipstream", "accel", "apply", "demo", "rps")
	if rps() == value {
		t.Errorf("accel apply leaves rps_cpus at %s", value)
	}
	install(s, newer)
	works(s, newer)
	if rps() == value {
		t.Error("the upgrade restores rps_cpus")
	}
	s.run(remove...)
	if now := rps(); now != value {
		t.Errorf("rps_cpus is %s after the package is removed, and was %s", now, value)
	}
	unchanged(s, before)
}

func TestArchive(t *testing.T) {
	t.Parallel()
	base, releases := need(t)
	s := start(t, base, releases, "/usr/bin/sleep", "infinity")
	name := "slipstream_" + newer + "_linux_" + runtime.GOARCH
	s.run("bash", "-c", "cd /mnt/"+newer+" && sha256sum --quiet --check checksums.txt")
	s.run("tar", "--extract", "--gzip", "--directory=/root", "--file=/mnt/"+newer+"/"+name+".tar.gz")
	s.has("slipstream version "+newer, "/root/"+name+"/slipstream", "version")
}

// TestKrew installs the plugin for every system from the manifest and the archives, as krew does, after the validation of
// krew's index.
func TestKrew(t *testing.T) {
	t.Parallel()
	_, releases := need(t)
	krew, validate := testenv.NeedProgram(t, "krew", "make bin/tools/krew"), testenv.NeedProgram(t, "validate-krew-manifest", "make bin/tools/krew")
	manifest := filepath.Join(releases, newer, "slipstream.yaml")
	if out, err := exec.Command(validate, "-skip-install", "-manifest", manifest).CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	for _, platform := range []string{"linux_amd64", "linux_arm64", "darwin_amd64", "darwin_arm64", "windows_amd64", "windows_arm64"} {
		system, arch, _ := strings.Cut(platform, "_")
		suffix, program := ".tar.gz", "kubectl-slipstream"
		if system == "windows" {
			suffix, program = ".zip", "kubectl-slipstream.exe"
		}
		dir := t.TempDir()
		cmd := exec.Command(krew, "install", "--manifest="+manifest, "--archive="+filepath.Join(releases, newer, "slipstream_"+newer+"_"+platform+suffix))
		cmd.Env = append(os.Environ(), "KREW_ROOT="+dir, "KREW_OS="+system, "KREW_ARCH="+arch)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", platform, err, out)
			continue
		}
		if platform != "linux_"+runtime.GOARCH {
			if _, err := os.Stat(filepath.Join(dir, "bin", program)); err != nil {
				t.Errorf("%s: %v", platform, err)
			}
			continue
		}
		if out, err := exec.Command(filepath.Join(dir, "bin", program), "version").CombinedOutput(); err != nil || !strings.Contains(string(out), newer) {
			t.Errorf("%s: %v: %s", program, err, out)
		}
	}
}

// TestRegistry pushes the image and the chart to a registry, and finds there what the chart asks for.
func TestRegistry(t *testing.T) {
	t.Parallel()
	_, releases := need(t)
	helm := testenv.NeedProgram(t, "helm", "make bin/tools/helm")
	server := httptest.NewServer(registry.New(registry.Logger(log.New(t.Output(), "", 0))))
	defer server.Close()
	address, release := strings.TrimPrefix(server.URL, "http://"), filepath.Join(releases, newer)
	run := func(name string, args ...string) string {
		t.Helper()
		cmd := exec.Command(name, args...)
		dir := t.TempDir()
		cmd.Dir, cmd.Env = release, append(os.Environ(), "HELM_CACHE_HOME="+dir, "HELM_CONFIG_HOME="+dir, "HELM_DATA_HOME="+dir, "DOCKER_CONFIG="+dir)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s %v: %v: %s", name, args, err, out)
		}
		return string(out)
	}
	pushed := run(filepath.Join(releases, "built", "linux_"+runtime.GOARCH, "slipstream"), "image", "push", address+"/slipstream")
	lines := strings.Split(pushed, "\n")
	if lines[0] != address+"/slipstream:"+newer || !strings.HasPrefix(lines[1], address+"/slipstream@sha256:") {
		t.Fatalf("image push prints\n%s", pushed)
	}
	_, digest, _ := strings.Cut(lines[1], "@")
	run(helm, "push", "slipstream-"+newer+".tgz", "oci://"+address+"/charts", "--plain-http")
	for set, want := range map[string]string{
		"": "image: \"slipstream.dev/slipstream:" + newer + "\"",
		"image.repository=" + address + "/slipstream":                             "image: \"" + address + "/slipstream:" + newer + "\"",
		"image.repository=" + address + "/slipstream" + ",image.digest=" + digest: "image: \"" + lines[1] + "\"",
	} {
		out := run(helm, "template", "slipstream", "oci://"+address+"/charts/slipstream", "--version", newer, "--plain-http", "--kube-version", "v1.34.0", "--set", set)
		if !strings.Contains(out, want) {
			t.Errorf("with --set %q there is no %q in\n%s", set, want, out)
		}
	}
}
