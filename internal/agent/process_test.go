package agent

import (
	"bufio"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/netns"
)

// childEnv makes the test binary run an agent, with the options in its value.
const childEnv = "SLIPSTREAM_TEST_AGENT"

type childOptions struct {
	JournalDir, NetnsDir string
	Verify               time.Duration
	Accelerate           []v1alpha1.PolicyAccelerator
	Metrics, Health      string   // addresses to serve at
	Deny                 []uint32 // system calls to refuse, as a seccomp profile does
}

func TestMain(m *testing.M) {
	if text := os.Getenv(childEnv); text != "" {
		if err := runChild(text); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// runChild runs an agent until standard input ends. It prints a line for each
// change of the status.
func runChild(text string) error {
	var o childOptions
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		return err
	}
	if err := deny(o.Deny); err != nil {
		return err
	}
	a, err := New(Options{
		Node: "node0", JournalDir: o.JournalDir, NetnsDirs: []string{o.NetnsDir}, Verify: o.Verify,
		Publish: func(s Status) {
			fmt.Printf("%d %d %s missing=%d %q\n", s.Settings, s.Verified, s.Reason, s.Missing, s.Message)
		},
	})
	if err != nil {
		return err
	}
	defer a.Close()
	d := Desired{}
	if o.Accelerate != nil {
		d.Policies = []Policy{{Name: "child", Generation: 1, Accelerate: o.Accelerate}}
	}
	a.Set(d)
	ctx, cancel := context.WithCancelCause(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel(nil)
	}()
	servers, err := a.Serve(ServeOptions{Metrics: o.Metrics, Health: o.Health}, cancel)
	if err != nil {
		return err
	}
	defer servers.Close()
	return a.Run(ctx)
}

// child starts an agent in a process of its own, in this thread's network namespace. by is a command that starts it, if given.
type child struct {
	*exec.Cmd
	in  io.Closer
	out *bufio.Scanner
}

func (p *testNode) child(verify time.Duration, accelerate []v1alpha1.PolicyAccelerator, by ...string) *child {
	p.t.Helper()
	return p.childWith(childOptions{Verify: verify, Accelerate: accelerate}, by...)
}

func (p *testNode) childWith(o childOptions, by ...string) *child {
	p.t.Helper()
	o.JournalDir, o.NetnsDir = p.journal, p.netns
	text, err := json.Marshal(o)
	must(p.t, err)
	program, err := os.Executable()
	must(p.t, err)
	by = append(by, program)
	c := &child{Cmd: exec.Command(by[0], by[1:]...)}
	c.Env = append(os.Environ(), childEnv+"="+string(text))
	c.Stderr = os.Stderr
	c.in, err = c.StdinPipe()
	must(p.t, err)
	out, err := c.StdoutPipe()
	must(p.t, err)
	c.out = bufio.NewScanner(out)
	must(p.t, c.Start())
	p.t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	})
	return c
}

// until reads statuses up to the first in which this many settings are set, and all of them read back.
func (c *child) until(t testing.TB, settings int) {
	t.Helper()
	// The output ends with the process.
	late := time.AfterFunc(time.Minute, func() { _ = c.Process.Kill() })
	defer late.Stop()
	last := ""
	for c.out.Scan() {
		last = c.out.Text()
		if strings.HasPrefix(last, fmt.Sprintf("%d %d ", settings, settings)) {
			return
		}
	}
	t.Fatalf("the agent ended, or was ended after a minute; it said last %q, want %d settings", last, settings)
}

const kills = 20

// TestKill kills the agent while pods come and go, at random moments around writes to its journal, because settings change
// right after these. A setting must always have its value from the policy or from the snapshot, and once the policy is gone,
// all settings must be as before.
func TestKill(t *testing.T) {
	t.Parallel()
	p := newTestNode(t)
	p.nic()
	for i := range 4 {
		p.pod(fmt.Sprintf("stays%d", i))
	}
	// The values at the start need not be zero.
	p.in("stays1", func() { write(t, "class/net/eth0/queues/rx-0/rps_cpus", "2") })
	write(t, "class/net/veth-stays2/queues/rx-0/rps_cpus", "2")
	before := p.snapshot()

	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	must(t, os.MkdirAll(p.journal, 0o700))
	for kill := range kills {
		changes := changesOf(t, p.journal)
		// Successive agents get different policies, or none.
		accelerate := [][]v1alpha1.PolicyAccelerator{plus.Accelerate, v1alpha1.ForPolicy(rps("0-1", "nic", "pod")), plus.Accelerate, nil}[kill%4]
		allowed := []string{"1", "3"}
		c := p.child(time.Hour, accelerate)
		come := fmt.Sprintf("comes%d", kill)
		p.pod(come)
		changes(1+random.IntN(12), time.Second)
		time.Sleep(time.Duration(random.Int64N(int64(2 * time.Millisecond))))
		must(t, c.Process.Kill())
		_ = c.Wait()
		for place, values := range p.snapshot() {
			for path, value := range values {
				was := before[place][path]
				if was == "" {
					was = values["class/net/lo/queues/rx-0/rps_cpus"] // a pod that is not in the snapshot had nothing set
					if strings.HasSuffix(path, "rps_flow_cnt") {
						was = "0\n"
					}
				}
				if now := strings.TrimLeft(strings.TrimSpace(value), "0,"); value != was && !slices.Contains(allowed, now) {
					t.Fatalf("kill %d: %s of %q reads %q: neither the policy nor the snapshot", kill, path, place, value)
				}
			}
		}
		p.remove(come)
	}
	c := p.child(time.Hour, nil)
	if !c.out.Scan() {
		t.Fatal("the last agent ended")
	}
	eventually(t, "no policy", func() string { return gocmp.Diff(before, p.snapshot()) })
	p.wantJournal(0)
}

// changesOf returns a function that waits until n files in a folder have changed, but no longer than limit.
func changesOf(t testing.TB, dir string) func(n int, limit time.Duration) {
	t.Helper()
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	must(t, err)
	f := os.NewFile(uintptr(fd), "inotify")
	t.Cleanup(func() { _ = f.Close() })
	_, err = unix.InotifyAddWatch(fd, dir, unix.IN_CREATE|unix.IN_CLOSE_WRITE|unix.IN_MOVED_TO|unix.IN_DELETE)
	must(t, err)
	return func(n int, limit time.Duration) {
		t.Helper()
		must(t, f.SetReadDeadline(time.Now().Add(limit)))
		for buf := make([]byte, 4096); n > 0; {
			got, err := f.Read(buf)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				return
			}
			must(t, err)
			for b := buf[:got]; len(b) > 0; n-- {
				length := binary.NativeEndian.Uint32(b[12:]) // the length of the name behind the event, inotify(7)
				b = b[unix.SizeofInotifyEvent+length:]
			}
		}
	}
}

func write(t testing.TB, path, value string) {
	t.Helper()
	sys, err := netns.Sysfs()
	must(t, err)
	defer sys.Close()
	must(t, sys.WriteFile(path, []byte(value), 0))
}

// TestFlood makes and removes 500 links in a loop.
func TestFlood(t *testing.T) {
	p := newTestNode(t)
	const pods, links, rounds = 10, 500, 2
	for i := range pods {
		p.namespace(fmt.Sprint(i))
	}
	flood := func() {
		for i := range links {
			must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprintf("flood%d", i)},
				PeerName: fmt.Sprintf("end%d", i), PeerNamespace: netlink.NsFd(p.pods[fmt.Sprint(i%pods)].handle)}))
		}
	}
	drain := func() {
		for i := range links {
			l, err := netlink.LinkByName(fmt.Sprintf("flood%d", i))
			must(t, err)
			must(t, netlink.LinkDel(l))
		}
	}
	a := p.start(p.options())
	a.Set(one(plus))
	a.wantState("plus", v1alpha1.StatePending, v1alpha1.ReasonNoDevice)
	threads, fds := count(t, "/proc/self/task"), count(t, "/proc/self/fd")
	goroutines := runtime.NumGoroutine()
	began := time.Now()
	for round := range rounds {
		flood()
		if round < rounds-1 {
			drain()
		}
	}
	made := time.Now()
	eventually(t, "every link of the last flood", func() string {
		if s := a.Status(); s.Settings != 2*links || s.Verified != 2*links {
			return fmt.Sprintf("%d settings, %d verified, want %d", s.Settings, s.Verified, 2*links)
		}
		return ""
	})
	t.Logf("%d links made and %d removed in %s; all there is was accelerated %s later", rounds*links, (rounds-1)*links, made.Sub(began).Round(time.Millisecond), time.Since(made).Round(time.Millisecond))
	if masks := p.masks(); len(masks) != 2*links {
		t.Errorf("%d masks, want %d", len(masks), 2*links)
	}
	drain()
	eventually(t, "drained", func() string {
		if s := a.Status(); s.Settings != 0 || s.Pods != 0 {
			return fmt.Sprintf("%+v", s)
		}
		return ""
	})
	eventually(t, "leaks", func() string {
		var leaks []string
		if n := count(t, "/proc/self/fd"); n > fds {
			leaks = append(leaks, fmt.Sprintf("%d files, were %d", n, fds))
		}
		if n := runtime.NumGoroutine(); n > goroutines {
			leaks = append(leaks, fmt.Sprintf("%d goroutines, were %d", n, goroutines))
		}
		if n := count(t, "/proc/self/task"); n > threads+4 {
			leaks = append(leaks, fmt.Sprintf("%d threads, were %d", n, threads))
		}
		return strings.Join(leaks, "; ")
	})
	// The node's own ledger may stay until it is next opened.
	a.Set(one())
	p.wantJournal(0)
}

func count(t testing.TB, dir string) int {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	return len(entries)
}

// usage returns the CPU time and the resident memory, in MiB, of a process.
func (c *child) usage(t testing.TB) (cpu time.Duration, rss float64) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", c.Process.Pid))
	must(t, err)
	f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	pages, err := strconv.Atoi(f[21])
	must(t, err)
	// The sum over threads of schedstat is exact to the nanosecond, where stat counts
	// ticks.
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", c.Process.Pid))
	must(t, err)
	for _, task := range tasks {
		if b, err = os.ReadFile(task); err != nil {
			continue
		}
		ns, err := strconv.ParseInt(strings.Fields(string(b))[0], 10, 64)
		must(t, err)
		cpu += time.Duration(ns)
	}
	return cpu, float64(pages*os.Getpagesize()) / (1 << 20)
}

// BenchmarkIdle measures an agent that only verifies: with 30 pods, and with 1,000 veths on the
// node. BenchmarkAgent of test/cluster includes the watches of an API server.
func BenchmarkIdle(b *testing.B) {
	for _, bb := range []struct {
		name              string
		pods, links, held int
	}{
		{"pods=30", 30, 30, 60},
		{"veths=1000", 1, 1000, 2000},
		{"pods=300", 300, 300, 600},
	} {
		b.Run(bb.name, func(b *testing.B) {
			p := newTestNode(b)
			for i := range bb.pods {
				p.namespace(fmt.Sprint(i))
			}
			for i := range bb.links {
				must(b, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprintf("idle%d", i)},
					PeerName: fmt.Sprintf("end%d", i), PeerNamespace: netlink.NsFd(p.pods[fmt.Sprint(i%bb.pods)].handle)}))
			}
			c := p.child(0, plus.Accelerate)
			c.until(b, bb.held)
			time.Sleep(firstVerify + 5*time.Second) // skip the start's garbage and the first verification
			const window, windows = 10 * time.Second, 12
			var used, most time.Duration
			var rss float64
			for b.Loop() {
				for range windows {
					before, _ := c.usage(b)
					time.Sleep(window)
					after, resident := c.usage(b)
					used += after - before
					most = max(most, after-before)
					rss = max(rss, resident)
				}
			}
			b.ReportMetric(used.Seconds()/(window.Seconds()*windows*float64(b.N))*1000, "millicores")
			b.ReportMetric(float64(most.Milliseconds()), "ms-in-the-worst-10s")
			b.ReportMetric(rss, "resident-MiB")
		})
	}
}

// applied is a slog.Handler that records when the agent logs that it has accelerated a pod.
type applied struct {
	mu sync.Mutex
	at map[string]time.Time
}

func (l *applied) Enabled(_ context.Context, level slog.Level) bool { return level == slog.LevelInfo }
func (l *applied) WithAttrs([]slog.Attr) slog.Handler               { return l }
func (l *applied) WithGroup(string) slog.Handler                    { return l }
func (l *applied) Handle(_ context.Context, r slog.Record) error {
	if r.Message == "accelerated a pod" {
		r.Attrs(func(a slog.Attr) bool {
			if a.Key == "place" {
				l.mu.Lock()
				l.at[a.Value.String()] = r.Time
				l.mu.Unlock()
			}
			return true
		})
	}
	return nil
}

// BenchmarkNewPod starts 30 pods at once, again and again, on a node that has
// some veths already. It measures the time from the moment before a veth is
// made until its end in the pod has the wanted value.
func BenchmarkNewPod(b *testing.B) {
	for _, links := range []int{0, 1000} {
		b.Run(fmt.Sprintf("veths=%d", links), func(b *testing.B) {
			p := newTestNode(b)
			p.namespace("other")
			for i := range links {
				must(b, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprintf("idle%d", i)},
					PeerName: fmt.Sprintf("end%d", i), PeerNamespace: netlink.NsFd(p.pods["not-tcp-udp"].handle)}))
			}
			const pods = 30
			log := &applied{at: make(map[string]time.Time)}
			o := p.options()
			o.Log = slog.New(log)
			a := p.start(o)
			a.Set(one(plus))
			eventually(b, "start", func() string {
				if s := a.Status(); s.Verified < 2*links || len(s.Policies) == 0 {
					return fmt.Sprintf("%+v", s)
				}
				return ""
			})
			var latencies []time.Duration
			for round := 0; b.Loop(); round++ {
				b.StopTimer()
				name := func(i int) string { return fmt.Sprintf("p%d-%d", round, i) }
				for i := range pods {
					p.namespace(name(i))
				}
				made := make(map[string]time.Time)
				b.StartTimer()
				for i := range pods {
					at := time.Now()
					p.veth(name(i), "veth-"+name(i))
					l, err := netlink.LinkByName("veth-" + name(i))
					must(b, err)
					made[fmt.Sprintf("node0/pod of link %d", l.Attrs().Index)] = at
				}
				eventually(b, "pods", func() string {
					log.mu.Lock()
					defer log.mu.Unlock()
					if len(log.at) < pods {
						return fmt.Sprintf("%d of %d", len(log.at), pods)
					}
					return ""
				})
				b.StopTimer()
				for place, at := range made {
					latencies = append(latencies, log.at[place].Sub(at))
				}
				clear(log.at)
				for i := range pods {
					p.remove(name(i))
				}
				eventually(b, "removed", func() string {
					if s := a.Status(); s.Settings > 2*links {
						return fmt.Sprintf("%+v", s)
					}
					return ""
				})
				b.StartTimer()
			}
			slices.SortFunc(latencies, cmp.Compare[time.Duration])
			ms := func(q float64) float64 { return latencies[int(q*float64(len(latencies)-1))].Seconds() * 1e3 }
			b.ReportMetric(ms(.5), "p50-ms")
			b.ReportMetric(ms(.99), "p99-ms")
			b.ReportMetric(ms(1), "max-ms")
		})
	}
}

// TestHostile checks that the agent survives what a pod can do to it, and whoever can write to the folders of container
// runtimes.
func TestHostile(t *testing.T) {
	t.Parallel()
	p := newTestNode(t)
	target := filepath.Join(t.TempDir(), "target")
	must(t, os.WriteFile(target, []byte("mine"), 0o666))

	// In the folder of namespaces: a file that is not one, and one that blocks for ever.
	must(t, unix.Mkfifo(filepath.Join(p.netns, "0fifo"), 0o666))
	must(t, os.WriteFile(filepath.Join(p.netns, "0file"), nil, 0o666))
	must(t, os.Symlink("/proc/1/ns/net", filepath.Join(p.netns, "0link")))
	must(t, os.Mkdir(filepath.Join(p.netns, "0dir"), 0o777))

	// A process of the pod with a forged sysfs.
	p.pod("a")
	p.in("a", func() {
		rename(t, "eth0", "a*?[]~$(x)")
		for i := range 50 { // devices that the agent need not look at
			must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprintf("x%d", i)}, PeerName: fmt.Sprintf("y%d", i)}))
		}
		script := `mount -t tmpfs none /sys && mkdir -p '/sys/class/net/a*?[]~$(x)/queues/rx-0' &&
			ln -s ` + target + ` '/sys/class/net/a*?[]~$(x)/queues/rx-0/rps_cpus' && echo ready && exec sleep 1000`
		c := exec.Command("unshare", "--mount", "sh", "-c", script)
		out, err := c.StdoutPipe()
		must(t, err)
		c.Stderr = os.Stderr
		must(t, c.Start())
		t.Cleanup(func() {
			_ = c.Process.Kill()
			_ = c.Wait()
		})
		if s := bufio.NewScanner(out); !s.Scan() || s.Text() != "ready" {
			t.Fatal("the hostile pod did not start")
		}
	})
	// A namespace that is not pinned: only a process refers to it.
	must(t, unix.Unmount(p.pods["a"].file, unix.MNT_DETACH))
	before := p.snapshot()
	a := p.start(p.options())
	a.Set(one(plus))
	p.wantMasks("only what is asked for", map[string]string{"/veth-a": "1", "a/a*?[]~$(x)": "1"})
	if b, err := os.ReadFile(target); err != nil || string(b) != "mine" {
		t.Errorf("the target of a link in a pod's /sys reads %q, %v", b, err)
	}
	a.Set(one())
	p.wantMasks("policy off", map[string]string{})
	if d := gocmp.Diff(before, p.snapshot()); d != "" {
		t.Error(d)
	}
}
