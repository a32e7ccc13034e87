//go:build linux

package lab

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

	"slipstream.dev/internal/target"
	"slipstream.dev/internal/testenv"
)

// BenchmarkServiceChange replaces one backend of a service by another, over and over
// (-benchtime 5x: five times), on both nodes of a lab at once. ms/change is the median
// time from writing the rules to the end of the command that loads them, or of the map's
// update; from then on no connection takes the backend that was (TestBackendChanges).
//
// ms/load is how long all rules of one node take to be loaded, and KiB/load what the
// kernel's memory grows by then (Slab, VmallocUsed and Percpu of /proc/meminfo): means
// of three, true to some hundred KiB on a quiet machine. In mode ebpf one load is for all
// nodes of the machine.
func BenchmarkServiceChange(b *testing.B) {
	testenv.NeedRoot(b)
	for _, mode := range serviceModes {
		for _, backends := range []int{1, 100, 1000, 5000, 10000, 16000} {
			b.Run(fmt.Sprintf("%s/%d", mode, backends), func(b *testing.B) { benchmarkChange(b, mode, backends) })
		}
	}
}

func benchmarkChange(b *testing.B, mode string, backends int) {
	c := config(labName(b))
	c.Pods = 1
	c.Services = &Services{Mode: mode, Backends: backends, Total: 1, Servers: []target.Seat{{Node: 1}}, Transports: []target.Transport{tcp4}}
	services := c.Services.services(layout(c))
	loading, memory := benchmarkLoad(b, c, services)
	l, err := Up(b.Context(), c, Options{Dir: b.TempDir()})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := l.Down(context.Background()); err != nil {
			b.Error(err)
		}
	})
	first, spare := services[0].backends[0].Addr(), block(backends)-1
	var took []float64 // ms
	for b.Loop() {
		begin := time.Now()
		change(b, l, services, backends/2, netip.AddrPortFrom(plus(first, spare-len(took)%2), servicePort))
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
func benchmarkLoad(b *testing.B, c Config, services []service) (each time.Duration, kib float64) {
	const times = 3
	var undo []func() error
	defer func() {
		for _, f := range undo {
			if err := f(); err != nil {
				b.Error(err)
			}
		}
	}()
	var namespaces [times]*namespace
	for i := range namespaces {
		name := fmt.Sprintf("slip-%s-load%d", c.Name, i)
		ns, err := createNamespace(name, func() error { return nil })
		if err != nil {
			b.Fatal(err)
		}
		undo = append(undo, func() error { ns.close(); return removeNamespace(name) })
		namespaces[i] = ns
	}
	var rules rules
	if !c.translated() {
		rules = kubeProxy(c.Services.Mode, services)[0]
	}
	before, begin := kernelMemory(b), time.Now()
	for i, ns := range namespaces {
		var err error
		if c.translated() {
			other := c
			other.Name = fmt.Sprintf("%s-load%d", c.Name, i)
			undo = append(undo, func() error { return removeCgroup(context.Background(), other) })
			err = makeTranslation(other, services)
		} else {
			err = rules.load(b.Context(), ns)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
	return time.Since(begin) / times, float64(kernelMemory(b)-before) / times
}

// kernelMemory is what the kernel has taken for itself, in KiB.
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
