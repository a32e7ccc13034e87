package stats

import (
	"math"
	"slices"
	"testing"

	"slipstream.dev/api/metrics"
	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/record"
)

// TestAgreement: theirs agrees where it meets our interval, widened by the margin.
func TestAgreement(t *testing.T) {
	ours := Figure{1.1, []float64{1.0, 1.2}}
	for name, c := range map[string]struct {
		theirs Figure
		margin float64
		want   Agreement
		times  float64
	}{
		"a point within":                      {Figure{Value: 1.15}, 0, Agrees, 1.1 / 1.15},
		"a point at the end":                  {Figure{Value: 1.2}, 0, Agrees, 1.1 / 1.2},
		"a point above":                       {Figure{Value: 1.21}, 0, Differs, 1.1 / 1.21},
		"a point below":                       {Figure{Value: 0.99}, 0, Differs, 1.1 / 0.99},
		"above, by less than the margin":      {Figure{Value: 1.21}, 0.02, Agrees, 1.1 / 1.21},
		"above, by more than the margin":      {Figure{Value: 1.23}, 0.02, Differs, 1.1 / 1.23},
		"below, by less than the margin":      {Figure{Value: 0.99}, 0.02, Agrees, 1.1 / 0.99},
		"below, by more than the margin":      {Figure{Value: 0.97}, 0.02, Differs, 1.1 / 0.97},
		"intervals overlap, points are apart": {Figure{1.3, []float64{1.15, 1.5}}, 0, Agrees, 1.1 / 1.3},
		"intervals are apart":                 {Figure{1.4, []float64{1.3, 1.5}}, 0.02, Differs, 1.1 / 1.4},
		"an interval around ours":             {Figure{1.4, []float64{0.5, 3}}, 0, Agrees, 1.1 / 1.4},
		"a range around ours":                 {Figure{Interval: []float64{0.5, 3}}, 0, Agrees, 1},
		"a range above: its nearer end":       {Figure{Interval: []float64{2.2, 3}}, 0.02, Differs, 0.5},
		"a range below: its nearer end":       {Figure{Interval: []float64{0.2, 0.55}}, 0.02, Differs, 2},
	} {
		if got, times := agreement(c.theirs, ours, c.margin); got != c.want || math.Abs(times-c.times) > 1e-12 {
			t.Errorf("%s: %s, ours is %g times theirs; want %s, %g", name, got, times, c.want, c.times)
		}
	}
}

// TestPublishedFigures: what of ours a figure is set beside, and why there is nothing.
func TestPublishedFigures(t *testing.T) {
	exp := experiment("base", "fast", "faster", "never")
	exp.Spec.Runs.N, exp.Spec.Margin = 6, 0.02
	exp.Spec.Workloads = exp.Spec.Workloads[:1]
	exp.Spec.Pairs = []int{1, 2}
	values := func(f float64) []float64 { return []float64{f * 100, f * 101, f * 99, f * 100, f * 102, f * 98} }
	var all []record.Trial
	for name, f := range map[string]float64{"base": 1, "fast": 1.5, "faster": 3} {
		all = slices.Concat(all, trials(name, "stream", 1, metrics.Throughput, values(f*1e6)...))
	}
	all = slices.Concat(all, trials("fast", "stream", 2, metrics.Throughput, values(1.5e6)...))
	all = slices.Concat(all, trials("faster", "stream", 2, metrics.Throughput, 3e8))
	figure := func(variant string, pairs int, p v1alpha1.Published) v1alpha1.Published {
		p.Source, p.Figure, p.Note = "a paper", "Table 1", "by hand"
		p.Variant, p.Workload, p.Pairs, p.Metric = variant, "stream", pairs, metrics.Throughput
		return p
	}
	for name, c := range map[string]struct {
		p       v1alpha1.Published
		want    Agreement
		ours    float64
		unit    string
		why     string
		theirs  float64
		inUnits []float64
	}{
		"a ratio to the baseline":             {figure("fast", 1, v1alpha1.Published{Ratio: 1.5, Versus: "base"}), Agrees, 1.5, "1", "", 1.5, nil},
		"another ratio":                       {figure("fast", 1, v1alpha1.Published{Ratio: 1.1, Versus: "base"}), Differs, 1.5, "1", "", 1.1, nil},
		"a ratio to another variant":          {figure("faster", 1, v1alpha1.Published{Ratio: 2, Versus: "fast"}), Agrees, 2, "1", "", 2, nil},
		"a ratio of the baseline":             {figure("base", 1, v1alpha1.Published{Ratio: 0.5, Versus: "fast"}), Differs, 2. / 3, "1", "", 0.5, nil},
		"a value, in its unit":                {figure("fast", 1, v1alpha1.Published{Value: "150 Mb/s", Interval: []float64{140, 160}}), Agrees, 150e6, "bit/s", "", 150e6, []float64{140e6, 160e6}},
		"another value":                       {figure("fast", 1, v1alpha1.Published{Value: "2 Gb/s"}), Differs, 150e6, "bit/s", "", 2e9, nil},
		"another unit":                        {figure("fast", 1, v1alpha1.Published{Value: "87.1 %"}), NotComparable, 150e6, "%", "theirs is in %, ours in bit/s", 87.1, nil},
		"the cell was not measured":           {figure("never", 1, v1alpha1.Published{Ratio: 1.5, Versus: "base"}), NotComparable, 0, "1", "never was not measured with stream at 1 pair", 1.5, nil},
		"a number of pairs that nobody chose": {figure("fast", 16, v1alpha1.Published{Ratio: 1.5, Versus: "base"}), NotComparable, 0, "1", "fast was not measured with stream at 16 pairs", 1.5, nil},
		"what theirs is relative to was not":  {figure("fast", 2, v1alpha1.Published{Ratio: 1.5, Versus: "base"}), NotComparable, 0, "1", "theirs is relative to base, which was not measured with stream at 2 pairs", 1.5, nil},
		"one block alone":                     {figure("faster", 2, v1alpha1.Published{Value: "300 Mb/s"}), NotComparable, 3e8, "bit/s", "ours was measured once, and has no interval", 3e8, nil},
	} {
		exp.Spec.Published = []v1alpha1.Published{c.p}
		s, err := Analyze(exp, all)
		if err != nil {
			t.Fatal(err)
		}
		b, ours := s.Published[0], 0.0
		if b.Ours != nil {
			ours = b.Ours.Value
		}
		if b.Verdict != c.want || b.Why != c.why || b.Unit != c.unit || math.Abs(ours-c.ours) > 0.001*c.ours ||
			b.Theirs.Value != c.theirs || c.inUnits != nil && !slices.Equal(b.Theirs.Interval, c.inUnits) {
			t.Errorf("%s: %+v, ours %g; want %s, %q, ours %g %s, theirs %g", name, b, ours, c.want, c.why, c.ours, c.unit, c.theirs)
		}
		if b.Note != "by hand" || (b.Times == 0) != (c.want == NotComparable) {
			t.Errorf("%s: %+v", name, b)
		}
	}
}
