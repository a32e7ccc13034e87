//go:build linux

package collect

import (
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/testenv"
)

// threadProc returns a /proc whose net shows this thread's network namespace; that of the real one shows the main thread's.
func threadProc(t testing.TB) string {
	t.Helper()
	root := t.TempDir()
	for _, name := range []string{"stat", "softirqs", "sys", "self"} {
		if err := os.Symlink("/proc/"+name, filepath.Join(root, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("/proc/thread-self/net", filepath.Join(root, "net")); err != nil {
		t.Fatal(err)
	}
	return root
}

// mountSys mounts a sysfs that shows the devices of this thread's network
// namespace.
func mountSys(t testing.TB) string {
	t.Helper()
	sys := t.TempDir()
	if err := unix.Mount("sysfs", sys, "sysfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(sys, 0); err != nil {
			t.Error(err)
		}
	})
	return sys
}

// loop sends datagrams to itself over the loopback device, one at a time, and returns how many.
func loop(t testing.TB, until time.Time) (n uint64) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	self, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Connect(fd, self); err != nil {
		t.Fatal(err)
	}
	message := make([]byte, 64)
	for ; time.Now().Before(until); n++ {
		if _, err := unix.Write(fd, message); err != nil {
			t.Fatal(err)
		}
		if _, err := unix.Read(fd, message); err != nil {
			t.Fatal(err)
		}
	}
	return n
}

func cpuTime(t *testing.T) float64 {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return seconds(u.Utime.Nano() + u.Stime.Nano())
}

// TestLive makes real traffic, in known amounts.
func TestLive(t *testing.T) {
	testenv.EnterNamespace(t)
	testenv.PrivateMounts(t)
	c, err := New(Options{Proc: threadProc(t), CPUs: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })

	before, cpuBefore := snapshot(t, c), cpuTime(t)
	n := loop(t, time.Now().Add(time.Second))
	own := cpuTime(t) - cpuBefore
	after := snapshot(t, c)

	h := c.Host(before, after)
	if h.Source != record.SoftirqEBPF {
		t.Fatalf("softirq times are from %s: %v", h.Source, h.Warnings)
	}
	if h.Seconds < 1 { // on a busy machine it ends late
		t.Errorf("the window took %v s", h.Seconds)
	}
	const slack = .04 // what ticks may be off at two edges
	var busy, softirq, ticks, netRx float64
	var processed, runs uint64
	for _, cpu := range h.CPUs {
		busy, softirq, ticks, netRx = busy+cpu.Busy, softirq+cpu.Softirq, ticks+cpu.SoftirqTicks, netRx+cpu.SoftirqNetRx
		processed, runs = processed+cpu.Processed, runs+cpu.NetRx
		if off := cpu.Busy + cpu.Idle - h.Seconds; math.Abs(off) > slack {
			t.Errorf("CPU %d: busy and idle are off the window by %v s", cpu.ID, off)
		}
		sum := cpu.User + cpu.System + cpu.IRQ + cpu.Steal + cpu.Idle + cpu.SoftirqTicks
		if off := sum - h.Seconds; math.Abs(off) > .1*h.Seconds+slack {
			t.Errorf("CPU %d: all ticks are off the window by %v s", cpu.ID, off)
		}
		if cpu.Softirq > cpu.Busy || cpu.SoftirqNetRx+cpu.SoftirqNetTx > cpu.Softirq {
			t.Errorf("CPU %d: %v s of softirqs in %v s busy, %v s of them NET_RX", cpu.ID, cpu.Softirq, cpu.Busy, cpu.SoftirqNetRx)
		}
		// The kernel counts these softirqs in two places. The readings are some µs apart, and other softirqs may run in
		// between.
		for vector, counted := range map[int]uint64{netRxVector: cpu.NetRx, netTxVector: cpu.NetTx} {
			traced := after.exact[cpu.ID].Count[vector] - before.exact[cpu.ID].Count[vector]
			if off := math.Abs(float64(traced) - float64(counted)); off > 20+.002*float64(counted) {
				t.Errorf("CPU %d: softirq %d ran %d times by eBPF, %d by /proc/softirqs", cpu.ID, vector, traced, counted)
			}
		}
	}
	if busy < own-slack {
		t.Errorf("CPUs were busy %v s, this process alone %v s", busy, own)
	}
	if processed < n || runs < n {
		t.Errorf("%d packets processed in %d softirqs, %d sent", processed, runs, n)
	}
	if each := netRx / float64(n); each < 1e-7 || each > 1e-4 {
		t.Errorf("a packet took %v s of NET_RX", each)
	}
	t.Logf("%d packets; softirqs took %.4f s by eBPF, %.2f s by ticks", n, softirq, ticks)

	const size = 20 + 8 + 64 // IP, UDP, message; this device counts no Ethernet
	want := []record.Device{{Name: "lo", RxPackets: n, TxPackets: n, RxBytes: n * size, TxBytes: n * size}}
	if diff := cmp.Diff(want, c.Devices(before, after)); diff != "" {
		t.Error(diff)
	}
}

func TestDescribeLinks(t *testing.T) {
	testenv.EnterNamespace(t)
	testenv.PrivateMounts(t)
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.NumRxQueues, attrs.NumTxQueues = "over", 1450, 2, 3
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "under"}); err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "between"}}); err != nil {
		t.Fatal(err)
	}
	sys := mountSys(t)
	if err := os.WriteFile(filepath.Join(sys, "class/net/over/queues/rx-1/rps_cpus"), []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(sys, "class/net/over/queues/rx-0/rps_flow_cnt"), []byte("4096"), 0); err != nil {
		t.Fatal(err)
	}
	node, err := Describe(t.Context(), os.DirFS("testdata/place/proc"), os.DirFS(sys))
	if err != nil {
		t.Fatal(err)
	}
	got := make(map[string]record.Link)
	for _, l := range node.Links {
		got[l.Name] = l
	}
	over := got["over"]
	for _, name := range []string{"tx-tcp-segmentation", "tx-checksum-ip-generic"} {
		if !slices.Contains(over.Offloads, name) {
			t.Errorf("a veth is without %s: %v", name, over.Offloads)
		}
	}
	// The width of a mask depends on the number of CPUs; only its last digit
	// matters here.
	for i, mask := range over.RPS {
		over.RPS[i] = mask[len(mask)-1:]
	}
	over.Offloads = nil
	want := record.Link{
		Name: "over", Kind: "veth", MTU: 1450, RxQueues: 2, TxQueues: 3,
		RPS: []string{"0", "1"}, RFS: []string{"4096", "0"},
	}
	if diff := cmp.Diff(want, over); diff != "" {
		t.Error(diff)
	}
	if kinds := []string{got["lo"].Kind, got["between"].Kind}; kinds[0] != "device" || kinds[1] != "bridge" {
		t.Errorf("kinds of lo and the bridge are %v", kinds)
	}
}

// BenchmarkSnapshot measures a snapshot of a node with 64 pods, and so with as many
// devices. At the edges of a window it should not disturb the traffic.
func BenchmarkSnapshot(b *testing.B) {
	testenv.EnterNamespace(b)
	testenv.PrivateMounts(b)
	for i := range 32 {
		if err := netlink.LinkAdd(&netlink.Veth{
			LinkAttrs: netlink.LinkAttrs{Name: "a" + string(rune('A'+i))}, PeerName: "b" + string(rune('A'+i)),
		}); err != nil {
			b.Fatal(err)
		}
	}
	c, err := New(Options{Proc: threadProc(b), CPUs: true})
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	for b.Loop() {
		snapshot(b, c)
	}
}

// BenchmarkTicks compares the softirq time of /proc/stat with what eBPF measures in the same second: on a CPU that is busy with
// a process, and on one that only handles softirqs for RPS. On an otherwise quiet machine, ticks miss three quarters of the
// latter, because the tick stops on an idle CPU. With other work on that CPU, they count too much.
func BenchmarkTicks(b *testing.B) {
	for _, load := range []struct {
		name string
		rps  string // the loopback device's mask
		cpu  int    // where that puts the softirqs
	}{{"process", "0", 0}, {"steered", "2", 1}} {
		b.Run(load.name, func(b *testing.B) {
			testenv.EnterNamespace(b)
			testenv.PrivateMounts(b)
			if err := os.WriteFile(filepath.Join(mountSys(b), "class/net/lo/queues/rx-0/rps_cpus"), []byte(load.rps), 0); err != nil {
				b.Fatal(err)
			}
			var first unix.CPUSet
			first.Set(0)
			if err := unix.SchedSetaffinity(0, &first); err != nil {
				b.Fatal(err)
			}
			c, err := New(Options{Proc: threadProc(b), CPUs: true})
			if err != nil {
				b.Fatal(err)
			}
			defer c.Close()
			var busy, exact, ticks, n float64
			for b.Loop() {
				before := snapshot(b, c)
				loop(b, time.Now().Add(time.Second))
				cpu := c.Host(before, snapshot(b, c)).CPUs[load.cpu]
				busy, exact, ticks, n = busy+cpu.Busy, exact+cpu.Softirq, ticks+cpu.SoftirqTicks, n+1
			}
			b.ReportMetric(0, "ns/op") // the window's length
			b.ReportMetric(busy/n, "busy-s")
			b.ReportMetric(exact/n, "exact-s")
			b.ReportMetric(ticks/n, "ticks-s")
		})
	}
}
