//go:build linux

package collect

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
	"gonum.org/v1/gonum/stat"
	"gonum.org/v1/gonum/stat/distuv"

	"slipstream.dev/internal/testenv"
)

// loopRate sends n datagrams from a socket to itself over the loopback device, one at a time, and returns their rate per second
// of CPU time of the thread. This time includes the softirq of each datagram, but no other load of the machine.
func loopRate(b *testing.B, n int) float64 {
	b.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		b.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		b.Fatal(err)
	}
	self, err := unix.Getsockname(fd)
	if err != nil {
		b.Fatal(err)
	}
	if err := unix.Connect(fd, self); err != nil {
		b.Fatal(err)
	}
	cpuTime := func() int64 {
		var t unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
			b.Fatal(err)
		}
		return t.Nano()
	}
	message := make([]byte, 64)
	begin := cpuTime()
	for range n {
		if _, err := unix.Write(fd, message); err != nil {
			b.Fatal(err)
		}
		if _, err := unix.Read(fd, message); err != nil {
			b.Fatal(err)
		}
	}
	return float64(n) / float64(cpuTime()-begin) * 1e9
}

// BenchmarkSoftirq measures the overhead of the probe where it is highest: on packets that cause
// one softirq each. A block is such traffic with and without the probe, in random order. The ratio
// of rates comes with its 95% interval over the blocks, so give it -benchtime 1000x. ns/packet is
// the difference between the two. ns/softirq is the kernel's own account of both programs; it has
// one more clock reading for each, and lacks the cost of calling them.
func BenchmarkSoftirq(b *testing.B) {
	testenv.EnterNamespace(b)
	const packets = 5000 // some 20 ms
	rate := func(attached bool) float64 {
		if attached {
			s, err := openSoftirqTimes()
			if err != nil {
				b.Fatal(err)
			}
			defer s.Close()
		}
		return loopRate(b, packets)
	}
	loopRate(b, packets) // warm caches
	var ratios []float64
	var extra float64 // seconds per packet
	for b.Loop() {
		var with, without float64
		if rand.IntN(2) == 0 {
			with, without = rate(true), rate(false)
		} else {
			without, with = rate(false), rate(true)
		}
		ratios = append(ratios, math.Log(with/without))
		extra += 1/with - 1/without
	}
	b.ReportMetric(0, "ns/op") // would be the length of the blocks
	if n := float64(len(ratios)); n > 1 {
		b.ReportMetric(extra/n*1e9, "ns/packet")
		mean, sd := stat.MeanStdDev(ratios, nil)
		half := distuv.StudentsT{Mu: 0, Sigma: 1, Nu: n - 1}.Quantile(.975) * sd / math.Sqrt(n)
		b.ReportMetric(math.Exp(mean), "rate-ratio")
		b.ReportMetric(math.Exp(mean-half), "rate-ratio-lo95")
		b.ReportMetric(math.Exp(mean+half), "rate-ratio-hi95")
	}

	s, err := openSoftirqTimes()
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	accounting, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		b.Fatal(err)
	}
	defer accounting.Close()
	loopRate(b, 10*packets)
	var cost float64
	for _, p := range []*ebpf.Program{s.objects.SoftirqEntry, s.objects.SoftirqExit} {
		stats, err := p.Stats()
		if err != nil {
			b.Fatal(err)
		}
		cost += float64(stats.Runtime.Nanoseconds()) / float64(max(1, stats.RunCount))
	}
	b.ReportMetric(cost, "ns/softirq")
}
