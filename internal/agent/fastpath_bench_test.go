package agent

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/accel"
)

// load is traffic between the pods: streams in both directions, in which every byte is checked, and round trips, of which the
// longest is recorded.
type load struct {
	received atomic.Uint64 // bytes of all streams
	longest  atomic.Int64  // round trip, ns
	closing  atomic.Bool
	failed   chan error
}

const streams = 4

func (p *testNode) load() *load {
	p.t.Helper()
	l := &load{failed: make(chan error, 2*streams+1)}
	var conns []net.Conn
	var all sync.WaitGroup
	run := func(what string, fn func() error) {
		all.Go(func() {
			if err := fn(); err != nil && !l.closing.Load() {
				l.failed <- fmt.Errorf("%s: %w", what, err)
			}
		})
	}
	connect := func() (near, far net.Conn) {
		p.t.Helper()
		near, far = p.connect()
		conns = append(conns, near, far)
		return near, far
	}
	for i := range streams {
		from, to := connect()
		if i%2 == 1 {
			from, to = to, from
		}
		run("send", func() error { return count64(from) })
		run("receive", func() error { return l.check(to) })
	}
	near, far := connect()
	run("answer", func() error { _, err := io.Copy(far, far); return err })
	run("round trip", func() error { return l.trips(near) })
	p.t.Cleanup(func() {
		l.closing.Store(true)
		for _, c := range conns {
			c.Close()
		}
		all.Wait()
	})
	return l
}

// count64 sends consecutive numbers, at a rate that leaves the machine enough CPU time.
func count64(c net.Conn) error {
	block := make([]byte, 16<<10)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for n := uint64(0); ; <-tick.C {
		for i := 0; i < len(block); i += 8 {
			binary.NativeEndian.PutUint64(block[i:], n)
			n++
		}
		if _, err := c.Write(block); err != nil {
			return err
		}
	}
}

func (l *load) check(c net.Conn) error {
	block := make([]byte, 16<<10)
	for n := uint64(0); ; {
		if _, err := io.ReadFull(c, block); err != nil {
			return err
		}
		for i := 0; i < len(block); i += 8 {
			if got := binary.NativeEndian.Uint64(block[i:]); got != n {
				return fmt.Errorf("%d where %d was sent", got, n)
			}
			n++
		}
		l.received.Add(uint64(len(block)))
	}
}

func (l *load) trips(c net.Conn) error {
	for message := make([]byte, 64); ; {
		began := time.Now()
		if _, err := c.Write(message); err != nil {
			return err
		}
		if _, err := io.ReadFull(c, message); err != nil {
			return err
		}
		if took := int64(time.Since(began)); took > l.longest.Load() {
			l.longest.Store(took)
		}
	}
}

// killed starts agents that run the fast path under load, and kills each of them. Every byte must
// arrive, packets must take the slow path within 2 s, and only the programs of the next agent may
// be attached then.
func killed(t testing.TB, p *testNode, kills int) (longest, free time.Duration) {
	before := programs(t)
	l := p.load()
	accelerated := func() uint64 {
		held, err := accel.Fastpaths(accel.Options{JournalDir: p.journal})
		must(t, err)
		if len(held) != 1 {
			return 0
		}
		return held[0].Packets["fast-out-vxlan"]
	}
	slow := 0
	for kill := range kills {
		c := p.child(time.Hour, fastPolicy.Accelerate)
		c.until(t, 6)
		eventually(t, "packets are accelerated", func() string {
			if n := accelerated(); n < 500 {
				return fmt.Sprint(n)
			}
			return ""
		})
		time.Sleep(time.Duration(rand.Int64N(int64(100 * time.Millisecond)))) // at any moment between two lease renewals
		l.longest.Store(0)
		at := l.received.Load()
		must(t, c.Process.Kill())
		began := time.Now()
		_ = c.Wait()
		eventually(t, "nothing is attached", func() string {
			if now := programs(t); !slices.Equal(now, before) {
				return fmt.Sprint(now)
			}
			return ""
		})
		free = max(free, time.Since(began))
		eventually(t, "the streams go on", func() string {
			select {
			case err := <-l.failed:
				t.Fatalf("kill %d: %v", kill+1, err)
			default:
			}
			if now := l.received.Load(); now < at+streams*1<<20 {
				return fmt.Sprintf("%d bytes since", now-at)
			}
			return ""
		})
		took := time.Duration(l.longest.Load())
		longest = max(longest, took)
		if took > 2*time.Second {
			slow++
		}
	}
	if slow > 1+kills/100 { // a round trip may also wait for a CPU
		t.Errorf("after %d of %d kills a round trip took more than 2s, the longest %s", slow, kills, longest)
	}
	return longest, free
}

func TestFastpathKilled(t *testing.T) {
	t.Parallel()
	longest, free := killed(t, newOverlay(t), 3)
	t.Logf("longest round trip %s, nothing attached after %s", longest, free)
}

// BenchmarkFastpathKilled runs TestFastpathKilled for longer: -benchtime 200x.
func BenchmarkFastpathKilled(b *testing.B) {
	p := newOverlay(b)
	b.ResetTimer()
	longest, free := killed(b, p, b.N)
	b.ReportMetric(longest.Seconds()*1e3, "longest-trip-ms")
	b.ReportMetric(free.Seconds()*1e3, "longest-until-off-ms")
}

// shipped starts the program that users get, built by `make build`, as an agent in this thread's network namespace.
func (p *testNode) shipped(policy string) *child {
	p.t.Helper()
	dir := p.t.TempDir()
	program, file := filepath.Join(dir, "slipstream"), filepath.Join(dir, "policy.yaml")
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", program, "slipstream.dev/cmd/slipstream")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		p.t.Fatalf("%v: %s", err, out)
	}
	must(p.t, os.WriteFile(file, []byte(policy), 0o600))
	c := &child{Cmd: exec.Command(program, "agent", "--policy", file, "--journal", p.journal, "--listen", "", "--health", "")}
	c.Stderr = os.Stderr
	must(p.t, c.Start())
	p.t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	})
	return c
}

const shippedPolicy = `{apiVersion: slipstream.dev/v1alpha1, kind: AccelerationPolicy, metadata: {name: fast}, spec: {accelerate: [{fastpath: {}}]}}`

// BenchmarkFastpathIdle measures the CPU time of an agent whose fast path has no traffic.
// -benchtime 1x.
func BenchmarkFastpathIdle(b *testing.B) {
	const window = time.Minute
	p := newOverlay(b)
	c := p.shipped(shippedPolicy)
	eventually(b, "it is held", func() string {
		held, err := accel.Fastpaths(accel.Options{JournalDir: p.journal})
		must(b, err)
		if len(held) != 1 || held[0].Problem != "" {
			return fmt.Sprintf("%+v", held)
		}
		return ""
	})
	var used time.Duration
	for b.Loop() {
		before, _ := c.usage(b)
		time.Sleep(window)
		after, _ := c.usage(b)
		used += after - before
	}
	b.ReportMetric(used.Seconds()/(window.Seconds()*float64(b.N))*1000, "millicores")
}

// BenchmarkFastpathFlows measures an agent with 10,000 connections on the fast path: its resident
// memory (the maximum in the window and the maximum ever, both with the pages of its program, and
// its private memory), the memory of the kernel's maps, and its CPU time. -benchtime 1x.
func BenchmarkFastpathFlows(b *testing.B) {
	const flows, window = 10_000, 20 * time.Second
	p := newOverlay(b)
	c := p.shipped(shippedPolicy)

	p.flows(flows, 100*time.Millisecond, flows*9/10)
	var used time.Duration
	var rss float64
	for b.Loop() {
		before, _ := c.usage(b)
		for range int(window / time.Second) {
			time.Sleep(time.Second)
			_, now := c.usage(b)
			rss = max(rss, now)
		}
		after, _ := c.usage(b)
		used += after - before
	}
	held, err := accel.Fastpaths(accel.Options{JournalDir: p.journal})
	must(b, err)
	b.ReportMetric(float64(held[0].Connections), "flows")
	b.ReportMetric(float64(held[0].Fast), "fast")
	peak, own := c.memory(b)
	if peak > 30 {
		b.Errorf("%.1f MiB were resident, want at most 30", peak)
	}
	b.ReportMetric(rss, "resident-MiB")
	b.ReportMetric(peak, "most-resident-MiB")
	b.ReportMetric(own, "own-MiB")
	b.ReportMetric(float64(c.maps(b))/(1<<20), "maps-MiB")
	b.ReportMetric(used.Seconds()/(window.Seconds()*float64(b.N))*1000, "millicores")
}

// flows opens this many connections from a pod, sends on each of them at this interval until the test ends, and waits until
// fast of them take the fast path.
func (p *testNode) flows(flows int, every time.Duration, fast int) {
	p.t.Helper()
	var server *net.UDPConn
	var err error
	p.in("n1p0", func() { server, err = net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(10, 244, 1, 2)}) })
	must(p.t, err)
	p.t.Cleanup(func() { server.Close() })
	go func() {
		for buf := make([]byte, 64); ; {
			n, from, err := server.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			_, _ = server.WriteToUDPAddrPort(buf[:n], from)
		}
	}()
	// Use plain sockets: nobody reads the answers, and the poller of package net would wake up for each of them.
	to := &unix.SockaddrInet4{Port: server.LocalAddr().(*net.UDPAddr).Port, Addr: [4]byte{10, 244, 1, 2}}
	var sockets []int
	p.in("n0p0", func() {
		for range flows {
			s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			must(p.t, err)
			sockets = append(sockets, s)
			must(p.t, unix.Connect(s, to))
		}
	})
	stop, sent := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(sent)
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for n := 0; ; {
			for range flows / int(every/time.Millisecond) {
				_, _ = unix.Write(sockets[n%flows], []byte("datagram"))
				n++
			}
			select {
			case <-stop:
				return
			case <-tick.C:
			}
		}
	}()
	p.t.Cleanup(func() {
		close(stop)
		<-sent
		for _, s := range sockets {
			_ = unix.Close(s)
		}
	})
	var held []accel.Fastpath
	for deadline := time.Now().Add(2 * time.Minute); len(held) != 1 || held[0].Fast < fast; {
		if time.Now().After(deadline) {
			p.t.Fatalf("%+v", held)
		}
		time.Sleep(500 * time.Millisecond)
		held, err = accel.Fastpaths(accel.Options{JournalDir: p.journal})
		must(p.t, err)
	}
}

// memory returns the peak resident memory of a process, and its private memory without files, in
// MiB.
func (c *child) memory(t testing.TB) (peak, own float64) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.Process.Pid))
	must(t, err)
	for line := range strings.Lines(string(text)) {
		key, value, _ := strings.Cut(line, ":")
		kib, _ := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 64)
		switch key {
		case "VmHWM":
			peak = kib / 1024
		case "RssAnon":
			own = kib / 1024
		}
	}
	return peak, own
}

// maps returns the number of bytes that the kernel accounts for the eBPF maps of a process.
func (c *child) maps(t testing.TB) (bytes uint64) {
	t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fdinfo/*", c.Process.Pid))
	must(t, err)
	seen := make(map[string]bool)
	for _, file := range files {
		text, err := os.ReadFile(file)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		must(t, err)
		fields := make(map[string]string)
		for line := range strings.Lines(string(text)) {
			key, value, _ := strings.Cut(line, ":")
			fields[key] = strings.TrimSpace(value)
		}
		if id := fields["map_id"]; id != "" && !seen[id] {
			seen[id] = true
			n, err := strconv.ParseUint(fields["memlock"], 10, 64)
			must(t, err)
			bytes += n
		}
	}
	return bytes
}
