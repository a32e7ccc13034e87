//go:build linux

package collect

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/nic/nictest"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/testenv"
)

// machine is a procfs that a test changes between readings.
type machine struct {
	t    *testing.T
	proc string
	c    *Collector
}

func newMachine(t *testing.T, stat, dev string) machine {
	t.Helper()
	m := machine{t: t, proc: t.TempDir()}
	testenv.WriteFile(t, filepath.Join(m.proc, "softirqs"), "CPU0 CPU1\nNET_TX: 0 0\nNET_RX: 0 0\n")
	testenv.WriteFile(t, filepath.Join(m.proc, "net/softnet_stat"), "0 0 0 0 0 0 0 0 0 0 0 0 0\n0 0 0 0 0 0 0 0 0 0 0 0 1\n")
	testenv.WriteFile(t, filepath.Join(m.proc, bootID), "b\n")
	m.now(stat, dev)
	m.c = newTestCollector(t, Options{Proc: m.proc, Cgroup: t.TempDir(), CPUs: true})
	return m
}

func (m machine) now(stat, dev string) {
	m.t.Helper()
	testenv.WriteFile(m.t, filepath.Join(m.proc, "stat"), stat)
	testenv.WriteFile(m.t, filepath.Join(m.proc, "net/dev"), "\n\n"+dev)
}

// times returns a /proc/stat with the idle and softirq times of CPUs.
func times(idleAndSoftirq ...int) string {
	var b strings.Builder
	for i := 0; i < len(idleAndSoftirq); i += 2 {
		fmt.Fprintf(&b, "cpu%d 0 0 0 %d 0 0 %d 0 0 0\n", i/2, idleAndSoftirq[i], idleAndSoftirq[i+1])
	}
	return b.String()
}

func dev(name string, rx, tx int) string {
	return fmt.Sprintf("%s: %d 1 0 0 0 0 0 0 %d 1 0 0 0 0 0 0\n", name, rx, tx)
}

// read takes a reading and gives it a time.
func (m machine) read(s *Series, at int64) {
	m.t.Helper()
	if err := s.Read(); err != nil {
		m.t.Fatal(err)
	}
	s.at[len(s.at)-1] = at
}

const ms = int64(1e6)

// TestSeriesIntervals checks that neither late readings nor a window that ends early cause short intervals.
func TestSeriesIntervals(t *testing.T) {
	m := newMachine(t, times(0, 0), dev("eth0", 0, 0))
	first := snapshot(t, m.c)
	first.at = 0
	s := m.c.Series([]string{"eth0"}, 0, 1000*ms, first)
	for _, read := range []struct{ at, due int64 }{{149, 200}, {250, 400}, {399, 500}, {500, 600}} {
		if m.read(s, read.at*ms); s.Due() != read.due*ms {
			t.Errorf("after a reading at %d ms the next is due at %d ms, want %d", read.at, s.Due()/ms, read.due)
		}
	}
	last := snapshot(t, m.c)
	last.at, last.devices[0].RxBytes = 549*ms, 7
	want := record.Series{
		At:   []int64{0, 149_000, 250_000, 399_000, 549_000},
		NICs: []record.NICSeries{{Name: "eth0", Rx: []uint64{0, 0, 0, 7}, Tx: make([]uint64, 4)}},
		CPUs: []record.CPUSeries{{Idle: make([]uint64, 4), Softirq: make([]uint64, 4)}},
	}
	if diff := cmp.Diff(want, s.End(last)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestSeries(t *testing.T) {
	m := newMachine(t, times(100, 10, 200, 20), dev("lo", 5, 5)+dev("eth0", 1000, 2000)+dev("eth1", 7, 7))
	first := snapshot(t, m.c)
	const from = 1e12
	first.at = from + 20_000
	s := m.c.Series([]string{"eth0", "gone"}, from, from+500*ms, first)
	if due := s.Due(); due != from+100*ms {
		t.Errorf("the first reading is due at %d", due-from)
	}
	m.now(times(105, 12, 200, 30), dev("eth0", 1500, 2001)+dev("lo", 6, 6))
	m.read(s, from+100*ms+70_000)
	if due := s.Due(); due != from+200*ms {
		t.Errorf("the second reading is due at %d", due-from)
	}
	// This reading comes late, so the one at 300 ms is skipped.
	m.now(times(108, 12, 201, 49), dev("eth0", 1900, 2001))
	m.read(s, from+310*ms)
	if due := s.Due(); due != from+400*ms {
		t.Errorf("the reading after a late one is due at %d", due-from)
	}
	// The NIC disappears, a CPU goes offline for a while, and idle time falls.
	m.now(times(107, 12), dev("lo", 6, 6))
	m.read(s, from+400*ms)
	m.now(times(117, 12, 201, 49), dev("eth0", 30, 10))
	last := snapshot(t, m.c)
	last.at = from + 500*ms
	want := record.Series{
		At:   []int64{20, 100_070, 310_000, 400_000, 500_000},
		NICs: []record.NICSeries{{Name: "eth0", Rx: []uint64{500, 400, 0, 0}, Tx: []uint64{1, 0, 0, 0}}},
		CPUs: []record.CPUSeries{
			{ID: 0, Idle: []uint64{5, 3, 0, 10}, Softirq: []uint64{2, 0, 0, 0}},
		},
	}
	if diff := cmp.Diff(want, s.End(last)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestSeriesHasVF checks that the virtual function of a NIC has a series of its own, which shows when it disappeared.
func TestSeriesHasVF(t *testing.T) {
	m := newMachine(t, times(0, 0), dev("eth0", 0, 0)+dev("eth1", 0, 0)+dev("eth2", 0, 0))
	m.c.at = nictest.Load(t, "netvsc-mlx5").Source()
	m.c.nics = m.c.at.Read()
	var names []string
	for _, n := range m.c.Series([]string{"eth0"}, 0, 1e9, snapshot(t, m.c)).End(snapshot(t, m.c)).NICs {
		names = append(names, n.Name)
	}
	if diff := cmp.Diff([]string{"eth0", "eth1"}, names); diff != "" {
		t.Error(diff)
	}
}

// TestSeriesOfLongWindow checks that if there are too many readings, every second one is dropped, and no counts are lost.
func TestSeriesOfLongWindow(t *testing.T) {
	m := newMachine(t, times(0, 0), dev("eth0", 0, 0))
	first := snapshot(t, m.c)
	first.at = 0
	s := m.c.Series([]string{"eth0"}, 0, 3600e9, first)
	readings := 0
	for at := s.Due(); at < 300e9; at = s.Due() {
		readings++
		m.now(times(0, 0), dev("eth0", int(at/ms), 0))
		m.read(s, at)
	}
	last := snapshot(t, m.c)
	last.at = 300e9
	last.devices[0].RxBytes = 300_000
	got := s.End(last)
	if readings != 1200+600+149 {
		t.Errorf("%d readings", readings)
	}
	if n := len(got.At); n != 601+150 || got.At[0] != 0 || got.At[n-1] != 300e6 {
		t.Errorf("%d are kept, from %d to %d µs", n, got.At[0], got.At[n-1])
	}
	for i, bytes := range got.NICs[0].Rx {
		if want := 400; int(bytes) != want || int(got.At[i+1]-got.At[i]) != 1000*want {
			t.Fatalf("interval %d has %d bytes in %d µs", i, bytes, got.At[i+1]-got.At[i])
		}
	}
}

// TestSeriesAllocatesNothing checks that a series allocates nothing between its beginning and its end.
func TestSeriesAllocatesNothing(t *testing.T) {
	m := newMachine(t, times(100, 10, 200, 20), dev("lo", 5, 5)+dev("eth0", 1000, 2000))
	s := m.c.Series([]string{"eth0"}, 0, 100e9, snapshot(t, m.c))
	if n := testing.AllocsPerRun(2*mostReadings, func() {
		if err := s.Read(); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("a reading allocates %.2g times", n)
	}
}

// BenchmarkSeries measures the CPU time of a reading on this machine. A Series takes ten per second.
func BenchmarkSeries(b *testing.B) {
	c, err := newCollector(Options{CPUs: true}, withoutEBPF)
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	s := c.Series([]string{"lo"}, 0, 3600e9, snapshot(b, c))
	b.ReportAllocs()
	for b.Loop() {
		if err := s.Read(); err != nil {
			b.Fatal(err)
		}
	}
}
