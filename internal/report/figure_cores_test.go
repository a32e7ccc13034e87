package report

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
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
		{"native", "0", "30.0 (5.2–54.8)", "70.0 (45.2–94.8)"}, {"native", "1", "50.0 (50.0–50.0)", "50.0 (50.0–50.0)"},
		{"vxlan", "0", "30.0 (5.2–54.8)", "70.0 (45.2–94.8)"}, {"vxlan", "1", "0.0 (0.0–0.0)", "100.0 (100.0–100.0)"},
	}
	if diff := cmp.Diff(want, figure.Data.Rows); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if !strings.Contains(figure.Alt, "core 1 of native: 50%") {
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
	if !ok || !strings.Contains(figure.Caption, "the 12 of 96 cores with the most softirq time") {
		t.Fatalf("%v, caption %q", ok, figure.Caption)
	}
	if rows := figure.Data.Rows; rows[0][1] != "84" || rows[len(rows)-1][1] != "95" || len(rows) != 12*len(f.exp.Spec.Variants) {
		t.Errorf("%d rows, from core %s to core %s", len(rows), rows[0][1], rows[len(rows)-1][1])
	}
}

// TestCoreNumbers: the title of the axis has a range of cores only if all of them are drawn.
func TestCoreNumbers(t *testing.T) {
	for want, of := range map[string][]int{"7": {7}, "0 to 1": {0, 1}, "0 to 3": {0, 1, 2, 3}, "0, 2 and 63": {0, 2, 63}} {
		c := coresChart{hosts: []record.Host{{}}}
		for _, cpu := range of {
			c.cores = append(c.cores, coreID{0, cpu})
		}
		if got := c.order(); got != "cores "+want+", from left to right in each variant" {
			t.Errorf("%v: %q", of, got)
		}
	}
}

// TestPublishedCores: published shares are rings at the cores of the server's host. Cores that only the other machine has
// are in the figure too, and those of another number of pairs are not.
func TestPublishedCores(t *testing.T) {
	f := demo(t)
	f.exp.Spec.Target = spec.Target{Kubernetes: &spec.Kubernetes{ClientNode: "a", ServerNode: "b"}}
	f.exp.Spec.Variants = f.exp.Spec.Variants[:2]
	f.exp.Spec.Workloads, f.exp.Spec.Pairs = f.exp.Spec.Workloads[:1], []int{1, 4}
	w := f.exp.Spec.Workloads[0]
	f.exp.Spec.Published = []spec.Published{
		{Source: "a paper", Figure: "soft", Variant: "vxlan", Workload: w.Name, Pairs: 4, Metric: spec.CoreSoftirq, Cores: []float64{11.1, 87.1}},
		{Source: "a paper", Figure: "soft", Variant: "vxlan", Workload: w.Name, Pairs: 1, Metric: spec.CoreSoftirq, Cores: []float64{3}},
		{Source: "a paper", Figure: "idle", Variant: "native", Workload: w.Name, Pairs: 4, Metric: spec.CoreIdle, Cores: []float64{62.5}},
	}
	f.trials = nil
	for i, variant := range []string{"native", "vxlan"} {
		var hosts []record.Host
		for _, node := range []string{"a", "b"} {
			hosts = append(hosts, record.Host{Boot: node, Nodes: []string{node}, Seconds: 1, CPUs: []record.CPU{{ID: 0, Softirq: 0.25, Busy: 0.5}}})
		}
		f.trials = append(f.trials, record.Trial{
			Block: 1, Order: i + 1, Variant: variant, Workload: w.Name, Pairs: 4, Attempt: 1, Window: 1,
			Status: record.StatusOK, Metrics: map[string]float64{metrics.Throughput: 1e9}, Hosts: hosts,
		})
	}
	m := f.model()
	figure, ok := m.coresFigure(w, 4)
	if !ok {
		t.Fatal("no figure")
	}
	want := [][]string{
		{"native", "a, 0", "25.0", "50.0"}, {"native", "b, 0", "25.0", "50.0, published 62.5"},
		{"vxlan", "a, 0", "25.0", "50.0"}, {"vxlan", "b, 0", "25.0, published 11.1", "50.0"}, {"vxlan", "b, 1", "published 87.1", "–"},
	}
	if diff := cmp.Diff(want, figure.Data.Rows); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	for _, text := range []string{"cores 0 of a and 0 to 1 of b, from left to right in each variant", ">vxlan<"} {
		if svg := figure.Picture.SVG(); !strings.Contains(svg, text) {
			t.Errorf("%q is not in the figure", text)
		}
	}
	if !strings.HasSuffix(figure.Caption, "A ring is a published share of the core with that number in another machine: a paper.") {
		t.Errorf("caption %q", figure.Caption)
	}
	if m.PublishedCount != "" {
		t.Errorf("shares of cores are compared: %s", m.PublishedCount)
	}
	f.exp.Spec.Published = nil
	without, _ := f.model().coresFigure(w, 4)
	if rings := strings.Count(figure.Picture.SVG(), "<path") - strings.Count(without.Picture.SVG(), "<path"); rings != 3 {
		t.Errorf("%d paths more with published shares, want 3 rings", rings)
	}
}

// TestEndsSideBySide: the figures of the cores with the fewest and the most pairs begin a row of the page.
func TestEndsSideBySide(t *testing.T) {
	var got []string
	for _, f := range demo(t).model().Section(SectionCPU) {
		got = append(got, fmt.Sprintf("%s %v", f.Name, f.First))
	}
	want := []string{
		"stream-cpu-1 true", "stream-cpu-4 false", "pingpong-cpu-1 true", "pingpong-cpu-4 false",
		"stream-cores-1 true", "stream-cores-4 false", "pingpong-cores-1 true", "pingpong-cores-4 false",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
