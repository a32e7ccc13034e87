//go:build linux

package services_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"slipstream.dev/internal/place/lab"
	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/place/lab/services"
	"slipstream.dev/internal/testenv"
)

// BenchmarkServiceChange replaces one backend of a service by another, again and again (-benchtime 5x: five times), on both
// nodes of a lab at once. ms/change is the median time from writing the rules to the end of the command that loads them, or of
// the map update. From then on no connection takes the old backend (TestBackendChanges).
//
// ms/load is the time to load all rules of one node, and KiB/load the growth of the kernel's memory (Slab, VmallocUsed and
// Percpu of /proc/meminfo): means of three, exact to some hundred KiB on a quiet machine. In mode ebpf, one load is for all
// nodes of the machine.
func BenchmarkServiceChange(b *testing.B) {
	testenv.NeedRoot(b)
	for _, mode := range modes {
		for _, backends := range []int{1, 100, 1000, 5000, 10000, 16000} {
			b.Run(fmt.Sprintf("%s/%d", mode, backends), func(b *testing.B) { benchmarkChange(b, mode, backends) })
		}
	}
}

func benchmarkChange(b *testing.B, mode string, backends int) {
	c := config(b, mode, 1, backends, tcp4)
	all := c.Services.All(1)
	loading, memory := benchmarkLoad(b, c, all)
	l := up(b, c)
	first, spare := all[0].Backends()[0].Addr(), services.Block(backends)-1
	var took []float64 // ms
	for b.Loop() {
		begin := time.Now()
		l.Services.Change(b, l.Name, l.nodes(), all, backends/2, netip.AddrPortFrom(network.Plus(first, spare-len(took)%2), services.Port))
		took = append(took, float64(time.Since(begin).Microseconds())/1000)
	}
	slices.Sort(took)
	b.ReportMetric((took[(len(took)-1)/2]+took[len(took)/2])/2, "ms/change")
	b.ReportMetric(took[0], "ms/change-least")
	b.ReportMetric(took[len(took)-1], "ms/change-most")
	b.ReportMetric(float64(loading.Microseconds())/1000, "ms/load")
	b.ReportMetric(memory, "KiB/load")
	b.ReportMetric(0, "ns/op")
}

// benchmarkLoad loads the rules of one node three times, side by side.
func benchmarkLoad(b *testing.B, c lab.Config, all []services.Service) (each time.Duration, kib float64) {
	const times = 3
	var undo []func() error
	defer func() {
		for _, f := range undo {
			if err := f(); err != nil {
				b.Error(err)
			}
		}
	}()
	var namespaces [times]*network.Namespace
	name := func(i int) string { return fmt.Sprintf("slip-%s-load%d", c.Name, i) }
	for i := range namespaces {
		ns, err := network.Create(name(i), func() error { return nil })
		if err != nil {
			b.Fatal(err)
		}
		undo = append(undo, func() error { ns.Close(); return network.Remove(name(i)) })
		namespaces[i] = ns
	}
	load := services.Loader(c.Services.Mode, all)
	before, begin := kernelMemory(b), time.Now()
	for i, ns := range namespaces {
		cgroup := fmt.Sprintf("%s-load%d", c.Name, i)
		undo = append(undo, func() error { return services.RemoveCgroup(context.Background(), cgroup) })
		if err := load(b.Context(), ns, cgroup); err != nil {
			b.Fatal(err)
		}
	}
	return time.Since(begin) / times, float64(kernelMemory(b)-before) / times
}

// kernelMemory returns the memory that the kernel uses for itself, in KiB.
func kernelMemory(b *testing.B) (kib int) {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		b.Fatal(err)
	}
	found := 0
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(line, ":")
		if name == "Slab" || name == "VmallocUsed" || name == "Percpu" {
			var n int
			if _, err := fmt.Sscan(value, &n); err != nil {
				b.Fatal(err)
			}
			kib += n
			found++
		}
	}
	if found != 3 {
		b.Fatal(errors.New("/proc/meminfo lacks Slab, VmallocUsed or Percpu"))
	}
	return kib
}
