package report

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
)

// TestCoreIntervals: the interval of a core's share is based on blocks, and the trials of a block count as
// their mean. A share is between 0 and 100 %.
func TestCoreIntervals(t *testing.T) {
	f := demo(t)
	f.exp.Spec.Variants = f.exp.Spec.Variants[:2]
	f.exp.Spec.Workloads = f.exp.Spec.Workloads[:1]
	f.exp.Spec.Pairs = []int{1}
	w := f.exp.Spec.Workloads[0]
	f.trials = nil
	add := func(block, repeat int, variant string, softirq ...float64) {
		h := record.Host{Boot: "b0", Seconds: 2, Source: record.SoftirqEBPF}
		for id, share := range softirq {
			h.CPUs = append(h.CPUs, record.CPU{ID: id, Softirq: 2 * share, Busy: 2 * share})
		}
		f.trials = append(f.trials, record.Trial{
			Block: block, Repeat: repeat, Order: len(f.trials) + 1, Variant: variant, Workload: w.Name, Pairs: 1, Attempt: 1, Window: 2,
			Status: record.StatusOK, Metrics: map[string]float64{metrics.Throughput: 1e9}, Hosts: []record.Host{h},
		})
	}
	for block, share := range []float64{0.2, 0.3, 0.4} {
		add(block+1, 0, "native", share, 0.5)
		add(block+1, 0, "vxlan", share+0.1, 0)
		add(block+1, 1, "vxlan", share-0.1, 0) // in the same period
	}
	figure, ok := f.model().coresFigure(w, 1)
	if !ok {
		t.Fatal("no figure")
	}
	// Student's t with two degrees of freedom: 4.303 × 0.1 / √3.
	want := [][]string{
		{"0", "native", "30.0 (5.2–54.8)", "70.0 (45.2–94.8)"}, {"0", "vxlan", "30.0 (5.2–54.8)", "70.0 (45.2–94.8)"},
		{"1", "native", "50.0 (50.0–50.0)", "50.0 (50.0–50.0)"}, {"1", "vxlan", "0.0 (0.0–0.0)", "100.0 (100.0–100.0)"},
	}
	if diff := cmp.Diff(want, figure.Data.Rows); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if !strings.Contains(figure.Alt, "core 1 of native: 50 %") {
		t.Errorf("alternative %q", figure.Alt)
	}
}

// TestCoresOfLargeMachines: if a page has no room for all cores, the figure shows those with the most softirq
// time, and its caption says so.
func TestCoresOfLargeMachines(t *testing.T) {
	f := demo(t)
	w := f.exp.Spec.Workloads[0]
	for i := range f.trials {
		h := &f.trials[i].Hosts[0]
		h.CPUs = nil
		for id := range 96 {
			h.CPUs = append(h.CPUs, record.CPU{ID: id, Softirq: float64(id) / 96, Busy: float64(id) / 96})
		}
	}
	figure, ok := f.model().coresFigure(w, 4)
	if !ok || !strings.Contains(figure.Caption, "the 16 of 96 cores with the most softirq time") {
		t.Fatalf("%v, caption %q", ok, figure.Caption)
	}
	if rows := figure.Data.Rows; rows[0][0] != "80" || rows[len(rows)-1][0] != "95" || len(rows) != 16*len(f.exp.Spec.Variants) {
		t.Errorf("%d rows, from core %s to core %s", len(rows), rows[0][0], rows[len(rows)-1][0])
	}
}
