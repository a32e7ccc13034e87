//go:build linux

package collect

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/testenv"
)

var errNoEBPF = errors.New("no eBPF in this test")

func withoutEBPF() (*softirqTimes, error) { return nil, errNoEBPF }

// near compares sums of ticks.
var near = cmpopts.EquateApprox(0, 1e-9)

func newTestCollector(t *testing.T, o Options) *Collector {
	t.Helper()
	c, err := newCollector(o, withoutEBPF)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

func snapshot(t testing.TB, c *Collector) Snapshot {
	t.Helper()
	s, err := c.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// edges reads both edges of a two-second window from a tree of testdata.
func edges(t *testing.T, tree string) (c *Collector, before, after Snapshot) {
	t.Helper()
	read := func(edge string) (*Collector, Snapshot) {
		c := newTestCollector(t, Options{Proc: filepath.Join("testdata", tree, edge), Cgroup: t.TempDir(), CPUs: true})
		return c, snapshot(t, c)
	}
	_, before = read("before")
	c, after = read("after")
	after.at = before.at + 2e9
	return c, before, after
}

func TestHost(t *testing.T) {
	c, before, after := edges(t, "4cpu")
	want := record.Host{
		Boot: "9f6b1c52-3f7e-4b55-9d37-6e1f6f1a7b11", Seconds: 2, Source: record.SoftirqTicks, Switches: 500,
		CPUs: []record.CPU{
			{
				ID: 0, User: .7, System: .3, IRQ: .01, Steal: .1, Idle: .6, Busy: 1.4, Softirq: .2, SoftirqTicks: .2,
				NetRx: 100, NetTx: 1, Processed: 100, Dropped: 1, ReceivedRPS: 9, Interrupts: 208,
			},
			{ID: 1, Idle: 2},
			// Its idle time fell: the kernel corrected iowait.
			{
				ID: 2, User: 1, System: .5, Busy: 2, Softirq: .5, SoftirqTicks: .5,
				NetRx: 5, Processed: 50, Dropped: 3, Squeezed: 4, ReceivedRPS: 6, Interrupts: 102,
			},
			// 32-bit counters that wrapped.
			{ID: 3, User: .1, Idle: 1.85, Busy: .15, NetRx: 16, Processed: 32, Interrupts: 11},
		},
		Warnings: []record.Warning{{
			Code: record.WarnDrops,
			Message: "connection tracking dropped 6 packets and deleted 11 entries early, as it does when its table is full: closed connections, " +
				"also of earlier trials, stay in it for two minutes (net.netfilter.nf_conntrack_max limits it)",
		}, {
			Code:    record.WarnNoEBPF,
			Message: "softirq time was measured by clock ticks, which miss most of it on idle cores: no eBPF in this test",
		}},
	}
	if diff := cmp.Diff(want, c.Host(before, after), near); diff != "" {
		t.Error(diff)
	}
}

// /proc/softirqs has a column for each possible CPU; the other files have only those that are online.
func TestHostWithCPUOffline(t *testing.T) {
	c, before, after := edges(t, "offline")
	var got [][]uint64
	for _, cpu := range c.Host(before, after).CPUs {
		got = append(got, []uint64{uint64(cpu.ID), cpu.NetRx, cpu.NetTx, cpu.Processed, cpu.Dropped, cpu.Squeezed, cpu.ReceivedRPS, cpu.Interrupts})
	}
	want := [][]uint64{{0, 10, 10, 10, 0, 0, 0, 1}, {1, 20, 10, 20, 0, 0, 0, 2}, {3, 40, 10, 40, 10, 20, 30, 3}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// A CPU that went offline, or came online, after /proc/stat was read.
func TestSoftnetGoesByNumber(t *testing.T) {
	s := Snapshot{cpus: []cpu{{id: 0}, {id: 1}, {id: 3}}}
	if err := s.parseSoftnet([]byte("1 0 0 0 0 0 0 0 0 0 0 0 0\n2 0 0 0 0 0 0 0 0 0 0 0 2\n3 0 0 0 0 0 0 0 0 0 0 0 3\n")); err != nil {
		t.Fatal(err)
	}
	if got := [3]uint32{s.cpus[0].processed, s.cpus[1].processed, s.cpus[2].processed}; got != [3]uint32{1, 0, 3} {
		t.Errorf("got %v", got)
	}
}

// TestFlowLimited sums over the CPUs that were online at both edges. One counter wraps.
func TestFlowLimited(t *testing.T) {
	before := Snapshot{cpus: []cpu{{id: 0, flowLimited: 1<<32 - 2}, {id: 1, flowLimited: 5}, {id: 2}}}
	after := Snapshot{cpus: []cpu{{id: 0, flowLimited: 1}, {id: 2, flowLimited: 4}, {id: 3, flowLimited: 100}}}
	if got := new(Collector).FlowLimited(before, after); got != 7 {
		t.Errorf("%d packets, want 7", got)
	}
}

func TestNoEBPF(t *testing.T) {
	open := func() (*softirqTimes, error) {
		t.Error("loads programs")
		return withoutEBPF()
	}
	c, err := newCollector(Options{Proc: filepath.Join("testdata", "4cpu", "before"), Cgroup: t.TempDir(), CPUs: true, NoEBPF: true}, open)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	h := c.Host(snapshot(t, c), snapshot(t, c))
	if h.Source != record.SoftirqTicks || len(h.Warnings) > 0 {
		t.Errorf("source %s, warnings %v", h.Source, h.Warnings)
	}
}

func TestHostLeavesOutCPUsThatCameOrWent(t *testing.T) {
	c, before, after := edges(t, "4cpu")
	before.cpus = before.cpus[1:]
	after.cpus = after.cpus[:3]
	var ids []int
	for _, cpu := range c.Host(before, after).CPUs {
		ids = append(ids, cpu.ID)
	}
	if diff := cmp.Diff([]int{1, 2}, ids); diff != "" {
		t.Error(diff)
	}
}

func TestHostExact(t *testing.T) {
	c, before, after := edges(t, "4cpu")
	before.exact, after.exact = make([]softirqCPU, 4), make([]softirqCPU, 4)
	before.exact[0].Ns = [10]uint64{0: 1, netRxVector: 5e9}
	after.exact[0].Ns = [10]uint64{0: 1e8 + 1, netTxVector: 2e8, netRxVector: 5.5e9}
	after.exact[1].Ns = [10]uint64{netRxVector: 3e9} // began before the window
	after.conntrack = before.conntrack
	c.exact = new(softirqTimes)
	h := c.Host(before, after)
	c.exact = nil
	if h.Source != record.SoftirqEBPF || h.Warnings != nil {
		t.Errorf("source %s, warnings %v", h.Source, h.Warnings)
	}
	type times struct{ Busy, Softirq, Ticks, NetRx, NetTx float64 }
	var got []times
	for _, cpu := range h.CPUs[:2] {
		got = append(got, times{cpu.Busy, cpu.Softirq, cpu.SoftirqTicks, cpu.SoftirqNetRx, cpu.SoftirqNetTx})
	}
	if diff := cmp.Diff([]times{{1.4, .8, .2, .5, .2}, {2, 2, 0, 2, 0}}, got, near); diff != "" {
		t.Error(diff)
	}
}

func TestDevices(t *testing.T) {
	c, before, after := edges(t, "4cpu")
	// One device appeared, one disappeared, and one was created again.
	want := []record.Device{
		{
			Name: "eth0", RxBytes: 18446744073709550615, RxPackets: 100, RxErrors: 10, RxDropped: 20,
			TxBytes: 300, TxPackets: 400, TxErrors: 30, TxDropped: 40,
		},
		{Name: "lo"},
	}
	if diff := cmp.Diff(want, c.Devices(before, after)); diff != "" {
		t.Error(diff)
	}
}

// A collector without CPUs needs none of the machine's files.
func TestDevicesOnly(t *testing.T) {
	proc := t.TempDir()
	testenv.WriteFile(t, filepath.Join(proc, "net/dev"), "Inter-|\n face |\n  a:1: 5 6 0 0 0 0 0 0 7 8 0 0 0 0 0 0\n")
	c := newTestCollector(t, Options{Proc: proc})
	before := snapshot(t, c)
	testenv.WriteFile(t, filepath.Join(proc, "net/dev"), "Inter-|\n face |\n  a:1: 6 8 0 0 0 0 0 0 17 28 0 0 0 0 0 0\n")
	want := []record.Device{{Name: "a:1", RxBytes: 1, RxPackets: 2, TxBytes: 10, TxPackets: 20}}
	if diff := cmp.Diff(want, c.Devices(before, snapshot(t, c))); diff != "" {
		t.Error(diff)
	}
}

// Every counter of the last of 256 CPUs lands where it belongs, in files larger
// than the first buffer.
func TestManyCPUs(t *testing.T) {
	const n = 256
	var stat, heading, tx, rx, softnet, interrupts strings.Builder
	for i := range uint64(n) {
		fmt.Fprintf(&stat, "cpu%d %d 0 0 0 0 0 0 %d 0 0\n", i, i, i+1)
		fmt.Fprintf(&heading, "    CPU%d", i)
		fmt.Fprintf(&tx, " %10d", i+2)
		fmt.Fprintf(&rx, " %10d", i+3)
		fmt.Fprintf(&interrupts, " %10d", i+9)
		fmt.Fprintf(&softnet, "%08x %08x %08x 0 0 0 0 0 0 %08x %08x 0 %08x 0 0\n", i+4, i+5, i+6, i+7, i+8, i)
	}
	var s Snapshot
	for _, f := range []struct {
		name, content string
		parse         func([]byte) error
	}{
		{"stat", "cpu  0 0 0 0 0 0 0 0 0 0\n" + stat.String() + "intr 1\n", s.parseStat},
		{"softirqs", heading.String() + "\n      NET_TX:" + tx.String() + "\n      NET_RX:" + rx.String() + "\n", s.parseSoftirqs},
		{"softnet_stat", softnet.String(), s.parseSoftnet},
		{"interrupts", heading.String() + "\n 1:" + interrupts.String() + "  PCI-MSIX-0000:00:04.0   1-edge      virtio3-rx\n", s.parseInterrupts},
	} {
		path := filepath.Join(t.TempDir(), f.name)
		testenv.WriteFile(t, path, f.content)
		src, err := openSource(path)
		if err != nil {
			t.Fatal(err)
		}
		defer src.file.Close()
		if err := src.read(f.parse); err != nil {
			t.Fatal(err)
		}
	}
	if len(s.cpus) != n {
		t.Fatalf("%d CPUs", len(s.cpus))
	}
	for i, got := range s.cpus {
		u, w := uint64(i), uint32(i)
		want := cpu{
			id: i, user: u, steal: u + 1, netTx: w + 2, netRx: w + 3,
			processed: w + 4, dropped: w + 5, squeezed: w + 6, receivedRPS: w + 7, flowLimited: w + 8,
		}
		if got != want {
			t.Fatalf("got %+v, want %+v", got, want)
		}
		if n := s.interrupts["1"][i]; n != w+9 {
			t.Fatalf("CPU %d took %d interrupts, want %d", i, n, w+9)
		}
	}
}

// TestInterruptsOfDevices checks that the counts of a removed device are not subtracted, and that those of a device that
// replaces it start at 0.
func TestInterruptsOfDevices(t *testing.T) {
	read := func(rows string) Snapshot {
		s := online()
		if err := s.parseInterrupts([]byte("CPU0 CPU1 CPU3\n" + rows)); err != nil {
			t.Fatal(err)
		}
		return s
	}
	before := read("41: 9000 0 0 mlx5\n42: 500 7 0 mlx5\nLOC: 4294967295 2 3 Local timer interrupts\n")
	after := read("42: 20 0 0 virtio3-rx\n43: 0 5 0 virtio3-tx\nLOC: 4 2 4 Local timer interrupts\n")
	for i, want := range []uint64{20 + 5, 5, 1} {
		if got := interrupts(before, after, i, i); got != want {
			t.Errorf("CPU at %d took %d interrupts, want %d", i, got, want)
		}
	}
}

func TestParseErrors(t *testing.T) {
	s := Snapshot{cpus: []cpu{{id: 0}, {id: 1}}}
	for _, test := range []struct {
		name  string
		parse func([]byte) error
		in    string
	}{
		{"no CPU", s.parseStat, "intr 1 2 3\n"},
		{"empty", s.parseStat, ""},
		{"columns missing", s.parseStat, "cpu0 1 2 3 4 5 6 7\n"},
		{"no number", s.parseStat, "cpu0 1 2 3 4 5 x 7 8\n"},
		{"a CPU twice", s.parseStat, "cpu0 1 2 3 4 5 6 7 8\ncpu0 1 2 3 4 5 6 7 8\n"},
		{"no number", s.parseStat, "cpu0 1 2 3 4 5 6 7 8 9\nctxt x\n"},
		{"heading", s.parseInterrupts, "CPU0 CPUx\n1: 1 2\n"},
		{"no row", s.parseSoftirqs, "CPU0 CPU1\nNET_TX: 1 2\n"},
		{"too few counts", s.parseSoftirqs, "CPU0 CPU1\nNET_TX: 1 2\nNET_RX: 1\n"},
		{"too many counts", s.parseSoftirqs, "CPU0 CPU1\nNET_TX: 1 2 3\nNET_RX: 1 2\n"},
		{"heading", s.parseSoftirqs, "CPUx CPU1\nNET_TX: 1 2\nNET_RX: 1 2\n"},
		{"not hexadecimal", s.parseSoftnet, "0000000g 0 0 0 0 0 0 0 0 0 0\n"},
		{"columns missing", s.parseSoftnet, "1 0 0 0 0 0 0 0 0\n"},
		{"empty", s.parseSoftnet, ""},
		{"no heading", s.parseDevices, ""},
		{"no name", s.parseDevices, "\n\nlo 1 2 3\n"},
		{"columns missing", s.parseDevices, "\n\nlo: 1 2 3\n"},
		{"no number", s.parseThrottled, "nr_throttled x\n"},
	} {
		if test.parse([]byte(test.in)) == nil {
			t.Errorf("%s: no error for %q", test.name, test.in)
		}
	}
}

func TestNewNamesWhatIsMissing(t *testing.T) {
	proc := t.TempDir()
	testenv.WriteFile(t, filepath.Join(proc, "net/dev"), "\n\n")
	_, err := newCollector(Options{Proc: proc, CPUs: true}, withoutEBPF)
	if !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), filepath.Join(proc, "stat")) {
		t.Errorf("got %v", err)
	}
}
