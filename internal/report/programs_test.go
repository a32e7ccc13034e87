package report

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
)

// TestProgramSentences: the report names ratios whose intervals do not overlap, with the
// overlay above the host network, and no others.
func TestProgramSentences(t *testing.T) {
	of := func(name, io, tool string) spec.Workload {
		return spec.Workload{Name: name, Stream: &spec.Traffic{Protocol: "tcp", IO: io, Tool: tool}}
	}
	exp := &spec.Experiment{Spec: spec.Spec{
		Target: spec.Target{Lab: &spec.Lab{Nodes: 2}}, Path: spec.Path{VXLAN: &spec.VXLAN{}}, Baseline: "vxlan",
		Variants: []spec.Variant{
			{Name: "vxlan"}, {Name: "native", Path: &spec.Path{Native: &spec.Plain{}}},
			{Name: "fastpath", Accelerate: []v1alpha1.Accelerator{{Fastpath: &v1alpha1.Fastpath{}}}},
		},
		Workloads: []spec.Workload{of("a", "blocking", "native"), of("b", "epoll", "native"), of("c", "", "iperf3")},
		Pairs:     []int{1}, Margin: 0.02,
	}}
	summary := &stats.Summary{}
	add := func(variant, workload string, ratio, low, high float64) {
		r := stats.Row{Variant: variant, Workload: workload, Pairs: 1, Metric: metrics.Throughput, Unit: "bit/s", Primary: true, N: 12, Mean: 1e9, CI95: [2]float64{1e9, 1e9}}
		if ratio > 0 {
			r.Versus = &stats.Versus{Baseline: "vxlan", N: 12, Ratio: ratio, CI95: [2]float64{low, high}, P: 0.001, Verdict: stats.Faster}
		}
		summary.Rows = append(summary.Rows, r)
	}
	for _, w := range []string{"a", "b", "c"} {
		add("vxlan", w, 0, 0, 0)
	}
	add("native", "a", 2, 1.9, 2.1)
	add("native", "b", 4, 3.8, 4.2)
	add("native", "c", 4.1, 3.8, 4.4)
	add("fastpath", "a", 1.5, 1.4, 1.6)
	add("fastpath", "b", 1.6, 1.5, 1.7)
	add("fastpath", "c", 1.5, 1.3, 1.7)
	want := []string{
		"The ratio depends on the program: vxlan / native throughput at 1 pair: 0.50 (0.48–0.53) for blocking programs, 0.25 (0.24–0.26) for event loops, 0.24 (0.23–0.26) for iperf3.",
	}
	got := New(exp, summary, nil, record.Environment{}).programSentences()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("three programs (-want +got):\n%s", diff)
	}

	// With another workload beside it, a stream is other traffic, so the difference is not the program's.
	beside := of("b", "blocking", "native")
	beside.Beside = "a"
	exp.Spec.Workloads = []spec.Workload{of("a", "blocking", "native"), beside}
	want = []string{"The traffic came from blocking programs (a and b); ratios may differ for programs that read and write in another way."}
	if diff := cmp.Diff(want, New(exp, summary, nil, record.Environment{}).programSentences()); diff != "" {
		t.Errorf("beside another (-want +got):\n%s", diff)
	}

	// With a single program, the sentence names it.
	exp.Spec.Workloads = []spec.Workload{
		of("a", "blocking", "native"),
		{Name: "h", HTTP: &spec.Traffic{Protocol: "tcp", IO: "epoll", Tool: "native"}},
		{Name: "p", PingPong: &spec.Traffic{Protocol: "tcp", Tool: "sockperf"}},
	}
	m := New(exp, summary, nil, record.Environment{})
	want = []string{"The traffic came from blocking programs (a) and event loops (h); ratios may differ for programs that read and write in another way."}
	if diff := cmp.Diff(want, m.programSentences()); diff != "" {
		t.Errorf("one program each (-want +got):\n%s", diff)
	}
	if last := m.conclusion[len(m.conclusion)-1]; last != want[0] || m.Headline == want[0] {
		t.Errorf("conclusion %q, headline %q", m.conclusion, m.Headline)
	}
}
