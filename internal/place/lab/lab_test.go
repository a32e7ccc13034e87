//go:build linux

package lab

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/place/lab/overlay"
	"slipstream.dev/internal/place/lab/services"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
)

// machine returns what a lab could leave behind: names of network namespaces with its prefix, and devices of this namespace.
func machine(t *testing.T, prefix string) (all []string) {
	t.Helper()
	names, err := filepath.Glob(network.Path(prefix + "*"))
	if err != nil {
		t.Fatal(err)
	}
	links, err := netlink.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		names = append(names, l.Attrs().Name)
	}
	if path, err := services.CgroupPath(""); err == nil {
		cgroups, err := filepath.Glob(filepath.Join(filepath.Dir(path), prefix+"*"))
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, cgroups...)
	}
	return names
}

func files(t *testing.T, dir string) (all []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

// TestMostPods checks that a lab with the maximum number of pods comes up, and that its first pod reaches its last.
// BenchmarkUpDown measures how long that takes for every path.
func TestMostPods(t *testing.T) {
	l := up(t, func(c *Config) { c.Pods = 64 })
	for _, version := range []int{4, 6} {
		echo(t, connect(t, l, "node0/pod0", "node1/pod63", version, 1)[0])
	}
}

func BenchmarkUpDown(b *testing.B) {
	testenv.NeedRoot(b)
	for _, shape := range overlay.Shapes() {
		for _, pods := range []int{1, 16, 32, 64} {
			b.Run(fmt.Sprintf("%s/pods=%d", shape, 2*pods), func(b *testing.B) {
				c := config(labName(b))
				c.Pods, c.Shape = pods, shape
				var up time.Duration
				for b.Loop() {
					begin := time.Now()
					l, err := Up(b.Context(), c, Options{Dir: b.TempDir(), Forwarder: forwarderCommand})
					if err != nil {
						b.Fatal(err)
					}
					up += time.Since(begin)
					if err := l.Down(b.Context()); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(up.Seconds()/float64(b.N)*1e3, "ms-up/op")
			})
		}
	}
}

// TestStart checks that a command runs in the namespace and on the CPUs of its place, and that this process stays in its own.
func TestStart(t *testing.T) {
	l := up(t, func(*Config) {})
	cores, err := availableCPUs("/sys")
	if err != nil {
		t.Fatal(err)
	}
	cpus := slices.Concat(cores...)
	last := cpus[len(cpus)-1:]
	at := placeOf(t, l, "node1/pod1")
	at.Affinity = formatCPUs(last)
	cmd := exec.Command("sh", "-c", "readlink /proc/self/ns/net; grep Cpus_allowed_list: /proc/self/status; cat")
	cmd.Stdin = strings.NewReader("input\n")
	var out strings.Builder
	cmd.Stdout = &out
	if err := l.In(at)(cmd); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Stat(network.Path("slip-"+l.state.Config.Name+"-n1p1"), &st); err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("net:[%d]\nCpus_allowed_list:\t%s\ninput\n", st.Ino, formatCPUs(last))
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("output (-want +got):\n%s", diff)
	}
	home, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	threads, err := filepath.Glob("/proc/self/task/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, thread := range threads {
		if ns, err := os.Readlink(thread + "/ns/net"); err == nil && ns != home {
			t.Errorf("a thread is in %s, the process in %s", ns, home)
		}
		if status, err := os.ReadFile(thread + "/status"); err == nil && !strings.Contains(string(status), "Cpus_allowed_list:\t"+formatCPUs(cpus)+"\n") {
			t.Errorf("a thread does not run on all of %s", formatCPUs(cpus))
		}
	}
}

// TestRun checks that Run returns the exit code of a command.
func TestRun(t *testing.T) {
	l := up(t, func(*Config) {})
	run := func(place string, argv ...string) (int, error) {
		return l.Run(t.Context(), place, argv, nil, nil, nil)
	}
	for _, code := range []int{0, 7} {
		if got, err := run("node0", "sh", "-c", fmt.Sprintf("exit %d", code)); got != code || err != nil {
			t.Errorf("exit code %d, %v, want %d", got, err, code)
		}
	}
	if _, err := run("node0", "sh", "-c", "kill -9 $$"); err == nil {
		t.Error("a command that was killed is no error")
	}
	if _, err := run("node7", "true"); err == nil || !strings.Contains(err.Error(), "node0 to node1") {
		t.Errorf("in a place that is not there: %v", err)
	}
}

// TestDownEndsProcesses checks that Down kills the processes in the lab, and no others.
func TestDownEndsProcesses(t *testing.T) {
	testenv.NeedRoot(t)
	l, err := Up(t.Context(), config(labName(t)), Options{Dir: t.TempDir(), Forwarder: forwarderCommand})
	if err != nil {
		t.Fatal(err)
	}
	inLab, outside := exec.Command("cat"), exec.Command("cat")
	for _, cmd := range []*exec.Cmd{inLab, outside} {
		stdin, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		defer stdin.Close()
	}
	if err := outside.Start(); err != nil {
		t.Fatal(err)
	}
	if err := l.In(placeOf(t, l, "node0/pod0"))(inLab); err != nil {
		t.Fatal(err)
	}
	if err := l.Down(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := inLab.Wait(); err == nil || inLab.ProcessState.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Errorf("the process in the lab ended with %v, want killed", err)
	}
	if err := outside.Process.Signal(syscall.SIGTERM); err != nil {
		t.Error("the process outside was ended, too")
	}
	_ = outside.Wait()
}

// TestDownWithUnansweredConnections checks that closed connections whose peer does not answer hold their namespaces for seconds
// only.
func TestDownWithUnansweredConnections(t *testing.T) {
	l := up(t, func(*Config) {})
	conns := connect(t, l, "node0", "node1", 4, 4)
	in(t, l, "switch", func() error {
		port, err := netlink.LinkByName("node1")
		if err == nil {
			err = netlink.LinkSetDown(port)
		}
		return err
	})
	for _, ends := range conns {
		ends[0].Close()
		ends[1].Close()
	}
}

// TestKeep checks that a lab with Keep outlives its owner and sweeps, until it is taken down.
func TestKeep(t *testing.T) {
	testenv.NeedRoot(t)
	dir, c := t.TempDir(), config(labName(t))
	first, err := Up(t.Context(), c, Options{Dir: dir, Keep: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = first.Down(context.Background()) })
	if swept, err := Sweep(t.Context(), dir); err != nil || len(swept) > 0 {
		t.Errorf("swept %v, %v", swept, err)
	}
	if _, err := Up(t.Context(), c, Options{Dir: dir}); !errors.Is(err, ErrExists) {
		t.Errorf("the same lab again: %v, want %v", err, ErrExists)
	}
	infos, err := List(dir)
	if err != nil {
		t.Fatal(err)
	}
	for i := range infos {
		infos[i].Created = time.Time{}
	}
	if diff := cmp.Diff([]Info{{Config: c, PID: os.Getpid(), Keep: true, Up: true}}, infos); diff != "" {
		t.Errorf("labs (-want +got):\n%s", diff)
	}
	l, err := Open(dir, c.Name)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.In(placeOf(t, l, "node0/pod0"))(exec.Command("true")); err != nil {
		t.Error(err)
	}
	before := machine(t, "slip-"+c.Name)
	if err := l.Down(t.Context()); err != nil {
		t.Fatal(err)
	}
	if after := machine(t, "slip-"+c.Name); len(before)-len(after) != len(namespaces(c)) {
		t.Errorf("of %v is left %v", before, after)
	}
	if left := files(t, dir); left != nil {
		t.Errorf("files left: %v", left)
	}
	if _, err := Open(dir, c.Name); !errors.Is(err, ErrNotFound) {
		t.Errorf("open it again: %v, want %v", err, ErrNotFound)
	}
	if err := l.Down(t.Context()); !errors.Is(err, ErrNotFound) {
		t.Errorf("take it down again: %v, want %v", err, ErrNotFound)
	}
}

// TestInUse checks that while one process uses a lab, no other can create, remove or sweep it.
func TestInUse(t *testing.T) {
	testenv.NeedRoot(t)
	dir, name := t.TempDir(), labName(t)
	child := startUp(t, dir, name)
	if line, err := bufio.NewReader(child.out).ReadString('\n'); err != nil || line != "up\n" {
		t.Fatalf("child says %q, %v", line, err)
	}
	if _, err := Up(t.Context(), config(name), Options{Dir: dir}); !errors.Is(err, ErrInUse) {
		t.Errorf("make it: %v, want %v", err, ErrInUse)
	} else if want := fmt.Sprintf("by process %d", child.cmd.Process.Pid); !strings.Contains(err.Error(), want) {
		t.Errorf("%q does not say %q", err, want)
	}
	l, err := Open(dir, name)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Down(t.Context()); !errors.Is(err, ErrInUse) {
		t.Errorf("take it down: %v, want %v", err, ErrInUse)
	}
	if swept, err := Sweep(t.Context(), dir); err != nil || len(swept) > 0 {
		t.Errorf("swept %v, %v", swept, err)
	}
	if err := child.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = child.cmd.Wait()
	swept, err := Sweep(t.Context(), dir)
	if diff := cmp.Diff([]string{name}, swept); diff != "" || err != nil {
		t.Errorf("swept after its end, %v (-want +got):\n%s", err, diff)
	}
}

type child struct {
	cmd *exec.Cmd
	out io.Reader
}

// startUp starts another process, which creates a lab and uses it until it is killed.
func startUp(t *testing.T, dir, name string, env ...string) child {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), append(env, childUp+"="+name, childDir+"="+dir)...)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stdin.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return child{cmd, out}
}

// TestSweepForked checks that a sweep waits for a process between fork and exec, which holds the lock of its dead parent.
func TestSweepForked(t *testing.T) {
	testenv.NeedRoot(t)
	dir, name := t.TempDir(), labName(t)
	before := machine(t, "slip-"+name)
	c := startUp(t, dir, name)
	if line, err := bufio.NewReader(c.out).ReadString('\n'); err != nil || line != "up\n" {
		t.Fatalf("child says %q, %v", line, err)
	}
	if err := c.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = c.cmd.Wait()
	held, err := acquire(dir, name)
	if err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(50*time.Millisecond, held.release)
	if swept, err := Sweep(t.Context(), dir); err != nil || !slices.Equal(swept, []string{name}) {
		t.Errorf("swept %v, %v", swept, err)
	}
	if diff := cmp.Diff(before, machine(t, "slip-"+name)); diff != "" {
		t.Errorf("left (-before +after):\n%s", diff)
	}
}

// TestKilled checks that whenever a process that creates a lab is killed, a sweep removes everything that it has created.
func TestKilled(t *testing.T) {
	testenv.NeedRoot(t)
	var partly atomic.Int64
	run := func(t *testing.T, name, shape string, kills int, env ...string) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			partly.Add(int64(killed(t, kills, append(env, childShape+"="+shape)...)))
		})
	}
	t.Run("labs", func(t *testing.T) {
		for shape, kills := range map[string]int{spec.ShapeFlannel: 30, overlay.ShapeUDP: 15, overlay.ShapeWeave: 10, overlay.ShapeVXLANFlow: 10, overlay.ShapeEBPF: 10} {
			run(t, shape, shape, kills)
		}
		for _, mode := range []string{spec.ServiceIPTables, spec.ServiceEBPF} {
			run(t, "services by "+mode, spec.ShapeFlannel, 10, childMode+"="+mode)
		}
		for _, proxy := range proxies {
			run(t, "balancer by "+proxy, spec.ShapeFlannel, 10, childProxy+"="+proxy)
		}
	})
	if partly.Load() == 0 {
		t.Error("no kill hit a lab in the making")
	}
}

// killed creates labs in other processes, with env in their environment, kills these and sweeps the labs, kills times. It
// returns how many labs were incomplete when their process was killed.
func killed(t *testing.T, kills int, env ...string) (partly int) {
	t.Helper()
	dir, name := t.TempDir(), labName(t)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	before := machine(t, "slip-"+name)

	// Kill within the time that a lab takes to come up.
	begin := time.Now()
	c := startUp(t, dir, name, env...)
	if line, err := bufio.NewReader(c.out).ReadString('\n'); err != nil || line != "up\n" {
		t.Fatalf("child says %q, %v", line, err)
	}
	whole := time.Since(begin)
	for i := range kills {
		if i > 0 {
			c = startUp(t, dir, name, env...)
			time.Sleep(time.Duration(random.Int64N(int64(whole)))) // a random point, not a signal
		}
		if err := c.cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = c.cmd.Wait()
		if n := len(machine(t, "slip-"+name)) - len(before); n > 0 && n < len(namespaces(config(name))) {
			partly++
		}
		if _, err := Sweep(t.Context(), dir); err != nil {
			t.Fatalf("kill %d: sweep: %v", i, err)
		}
		if diff := cmp.Diff(before, machine(t, "slip-"+name)); diff != "" {
			t.Fatalf("kill %d left (-before +after):\n%s", i, diff)
		}
		if left := files(t, dir); left != nil {
			t.Fatalf("kill %d left %v", i, left)
		}
	}
	t.Logf("%d kills, %d of them with part of the lab made", kills, partly)
	return partly
}

// TestForeign checks that something with a name like a lab's that does not belong to it stays.
func TestForeign(t *testing.T) {
	testenv.NeedRoot(t)
	name := labName(t)
	foreign := []string{"slip-" + name, "slip-" + name + "-n0x", "slip-" + name + "-n2", "slip-" + name + "-n0p2", "slip-" + name + "-n0-n0"}
	for _, f := range foreign {
		ns, err := network.Create(f, func() error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			ns.Close()
			if err := network.Remove(f); err != nil {
				t.Error(err)
			}
		})
		veth := netlink.NewVeth(network.LinkAttrs(network.NIC))
		veth.PeerName = "peer"
		if err := ns.Netlink.LinkAdd(veth); err != nil {
			t.Fatal(err)
		}
	}
	before := machine(t, "slip-"+name)
	dir := t.TempDir()
	l, err := Up(t.Context(), config(name), Options{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Down(t.Context()); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, machine(t, "slip-"+name)); diff != "" {
		t.Errorf("a lab that came and went changed (-before +after):\n%s", diff)
	}
	for _, f := range foreign {
		if err := network.Inside(f, func() error {
			_, err := netlink.LinkByName(network.NIC)
			return err
		}); err != nil {
			t.Errorf("device of %s: %v", f, err)
		}
	}
	// A lab that needs such a name is refused, and nothing is touched.
	c := config(name)
	c.Nodes = 3
	if _, err := Up(t.Context(), c, Options{Dir: dir}); !errors.Is(err, ErrExists) || !strings.Contains(err.Error(), "slip-"+name+"-n2") {
		t.Errorf("a lab over a foreign namespace: %v, want %v", err, ErrExists)
	}
	if diff := cmp.Diff(before, machine(t, "slip-"+name)); diff != "" {
		t.Errorf("a lab that was refused changed (-before +after):\n%s", diff)
	}
	if left := files(t, dir); left != nil {
		t.Errorf("files left: %v", left)
	}
}

// TestTornState checks that an unreadable state is reported, and that nothing is removed.
func TestTornState(t *testing.T) {
	testenv.NeedRoot(t)
	dir, c := t.TempDir(), config(labName(t))
	l, err := Up(t.Context(), c, Options{Dir: dir, Keep: true})
	if err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(statePath(dir, c.Name))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(os.WriteFile(statePath(dir, c.Name), whole, 0o644), l.Down(context.Background())); err != nil {
			t.Error(err)
		}
	})
	before := machine(t, "slip-"+c.Name)
	for what, text := range map[string]string{
		"empty": "", "half": string(whole[:len(whole)/2]), "another's": strings.Replace(string(whole), c.Name, "other", 1),
		"of more nodes": strings.Replace(string(whole), `"nodes": 2`, `"nodes": 16`, 1),
	} {
		if err := os.WriteFile(statePath(dir, c.Name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := Sweep(t.Context(), dir); err == nil || !strings.Contains(err.Error(), statePath(dir, c.Name)) {
			t.Errorf("%s: sweep says %v", what, err)
		}
		if err := l.Down(t.Context()); err == nil {
			t.Errorf("%s: no error", what)
		}
		if diff := cmp.Diff(before, machine(t, "slip-"+c.Name)); diff != "" {
			t.Errorf("%s: changed (-before +after):\n%s", what, diff)
		}
	}
}

// TestUpCancelled checks that a lab is taken down again if its creation is cancelled.
func TestUpCancelled(t *testing.T) {
	testenv.NeedRoot(t)
	dir, c := t.TempDir(), config(labName(t))
	before := machine(t, "slip-"+c.Name)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Up(ctx, c, Options{Dir: dir}); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want %v", err, context.Canceled)
	}
	if diff := cmp.Diff(before, machine(t, "slip-"+c.Name)); diff != "" {
		t.Errorf("changed (-before +after):\n%s", diff)
	}
	if left := files(t, dir); left != nil {
		t.Errorf("files left: %v", left)
	}
}

// TestNotRoot checks that without root, or without capabilities of root, the error says so, and nothing is touched.
func TestNotRoot(t *testing.T) {
	testenv.NeedRoot(t)                    // to change its user
	self, err := os.Open("/proc/self/exe") // whose folder another user may not enter
	if err != nil {
		t.Fatal(err)
	}
	defer self.Close()
	for as, want := range map[string]string{
		"--reuid=65534":             "no permission to create network namespaces: run as root (in a container: privileged)",
		"--bounding-set=-net_admin": "no permission to use veth devices: run as root with all capabilities (in a container: privileged)",
		"--bounding-set=-sys_admin": "no permission to create network namespaces: run as root (in a container: privileged)",
	} {
		dir := filepath.Join(t.TempDir(), "lab")
		cmd := exec.Command("setpriv", as, "/proc/self/fd/3")
		cmd.ExtraFiles = []*os.File{self}
		cmd.Env = append(os.Environ(), childProbe+"=x", childDir+"="+dir)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v: %s", as, err, out)
		}
		if !strings.Contains(string(out), want) {
			t.Errorf("%s: says %q, want %q", as, out, want)
		}
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: folder for labs: %v", as, err)
		}
	}
}
