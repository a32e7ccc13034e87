package stats

import (
	"math"
	"slices"
	"testing"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// TestAgreement: their figure agrees if it overlaps with our interval, widened by the margin, and our interval is
// precise enough.
func TestAgreement(t *testing.T) {
	gain, loss, wide, nothing := Figure{1.1, []float64{1.05, 1.2}}, Figure{0.9, []float64{0.8, 0.95}}, Figure{0.91, []float64{0.47, 1.74}}, Figure{1, []float64{0.9, 1.1}}
	for name, c := range map[string]struct {
		theirs, ours Figure
		margin       float64
		want         Agreement
		times        float64
	}{
		"a point within":                       {Figure{Value: 1.15}, gain, 0, Agrees, 1.1 / 1.15},
		"a point at the end":                   {Figure{Value: 1.2}, gain, 0, Agrees, 1.1 / 1.2},
		"a point above":                        {Figure{Value: 1.21}, gain, 0, Differs, 1.1 / 1.21},
		"a point below":                        {Figure{Value: 1.04}, gain, 0, Differs, 1.1 / 1.04},
		"above, by less than the margin":       {Figure{Value: 1.21}, gain, 0.02, Agrees, 1.1 / 1.21},
		"above, by more than the margin":       {Figure{Value: 1.23}, gain, 0.02, Differs, 1.1 / 1.23},
		"below, by less than the margin":       {Figure{Value: 1.04}, gain, 0.02, Agrees, 1.1 / 1.04},
		"below, by more than the margin":       {Figure{Value: 1.02}, gain, 0.02, Differs, 1.1 / 1.02},
		"intervals overlap, points are apart":  {Figure{1.3, []float64{1.15, 1.5}}, gain, 0, Agrees, 1.1 / 1.3},
		"intervals are apart":                  {Figure{1.4, []float64{1.3, 1.5}}, gain, 0.02, Differs, 1.1 / 1.4},
		"an interval around ours":              {Figure{1.4, []float64{0.5, 3}}, gain, 0, Agrees, 1.1 / 1.4},
		"a range around ours":                  {Figure{Interval: []float64{0.5, 3}}, gain, 0, Agrees, 1},
		"a range above: its nearer end":        {Figure{Interval: []float64{2.2, 3}}, gain, 0.02, Differs, 0.5},
		"a range below: its nearer end":        {Figure{Interval: []float64{0.2, 0.55}}, gain, 0.02, Differs, 2},
		"below a bound":                        {Figure{Interval: []float64{0, 0.95}}, loss, 0.02, Agrees, 1},
		"above a bound":                        {Figure{Interval: []float64{0, 0.5}}, loss, 0.02, Differs, 1.8},
		"a loss":                               {Figure{Value: 0.85}, loss, 0.02, Agrees, 0.9 / 0.85},
		"too wide to agree":                    {Figure{Value: 1.4}, wide, 0.02, TooImprecise, 0.91 / 1.4},
		"wide, and yet it excludes theirs":     {Figure{Value: 2}, wide, 0.02, Differs, 0.91 / 2},
		"ours holds theirs and no effect":      {Figure{Value: 1.08}, nothing, 0.02, TooImprecise, 1 / 1.08},
		"ours holds a loss and no effect":      {Figure{Value: 0.92}, nothing, 0.02, TooImprecise, 1 / 0.92},
		"ours holds a range and no effect":     {Figure{Interval: []float64{1.05, 1.3}}, nothing, 0.02, TooImprecise, 1 / 1.05},
		"no effect, neither theirs nor ours":   {Figure{Value: 1.01}, nothing, 0.02, Agrees, 1 / 1.01},
		"no effect of theirs, and ours is one": {Figure{Value: 1}, gain, 0.02, Differs, 1.1},
	} {
		b := Published{Versus: "base", Theirs: c.theirs, Ours: &c.ours}
		b.judge(spec.Spec{Margin: c.margin, Precision: 1.5})
		if b.Verdict != c.want || math.Abs(b.Times-c.times) > 1e-12 || (b.Why != "") != (c.want == TooImprecise) {
			t.Errorf("%s: %s, %q, ours is %g times theirs; want %s, %g", name, b.Verdict, b.Why, b.Times, c.want, c.times)
		}
	}
	// A value has no effect that could be missing: 1 is a number like any other.
	b := Published{Theirs: Figure{Value: 1.08}, Ours: &nothing}
	if b.judge(spec.Spec{Margin: 0.02, Precision: 1.5}); b.Verdict != Agrees {
		t.Errorf("a value: %s, %s", b.Verdict, b.Why)
	}
}

// TestValuesOnLogs: the interval of values that scatter by a factor does not reach below 0.
func TestValuesOnLogs(t *testing.T) {
	exp := experiment("base")
	exp.Spec.Runs.N, exp.Spec.Precision, exp.Spec.Workloads, exp.Spec.Pairs = 2, 1.5, exp.Spec.Workloads[:1], []int{1}
	exp.Spec.Published = []spec.Published{{Variant: "base", Workload: "stream", Pairs: 1, Metric: metrics.Throughput, Value: "0.784 Gb/s"}}
	s := analyzed(t, exp, trials("base", "stream", 1, metrics.Throughput, 14e9, 16e9))
	p := s.Published[0]
	if p.Ours.Interval[0] < 6e9 || math.Abs(p.Ours.Value/math.Sqrt(14e9*16e9)-1) > 1e-9 || p.Verdict != Differs {
		t.Errorf("%+v, ours %+v", p, p.Ours)
	}
	s = analyzed(t, exp, trials("base", "stream", 1, metrics.Throughput, 0.5e9, 16e9))
	if p := s.Published[0]; p.Ours.Interval[0] <= 0 || p.Verdict != TooImprecise {
		t.Errorf("%+v, ours %+v", p, p.Ours)
	}
	s = analyzed(t, exp, trials("base", "stream", 1, metrics.Throughput, 0, 16e9))
	if p := s.Published[0]; p.Ours != nil || p.Verdict != NotComparable || p.Why != "some block of base with stream at 1 pair has the value 0" {
		t.Errorf("%+v", p)
	}
}

func analyzed(t *testing.T, exp *spec.Experiment, all []record.Trial) *Summary {
	t.Helper()
	s, err := Analyze(exp, all)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestPublishedFigures: which of our figures is compared with a published one, or why there is none.
func TestPublishedFigures(t *testing.T) {
	exp := experiment("base", "fast", "faster", "never")
	exp.Spec.Runs.N, exp.Spec.Margin, exp.Spec.Precision = 6, 0.02, 1.5
	exp.Spec.Workloads = exp.Spec.Workloads[:1]
	exp.Spec.Pairs = []int{1, 2}
	values := func(f float64) []float64 { return []float64{f * 100, f * 101, f * 99, f * 100, f * 102, f * 98} }
	var all []record.Trial
	for name, f := range map[string]float64{"base": 1, "fast": 1.5, "faster": 3} {
		all = slices.Concat(all, trials(name, "stream", 1, metrics.Throughput, values(f*1e6)...))
	}
	all = slices.Concat(all, trials("fast", "stream", 2, metrics.Throughput, values(1.5e6)...))
	all = slices.Concat(all, trials("faster", "stream", 2, metrics.Throughput, 3e8))
	figure := func(variant string, pairs int, p spec.Published) spec.Published {
		p.Source, p.Figure, p.Note = "a paper", "Table 1", "by hand"
		p.Variant, p.Workload, p.Pairs, p.Metric = variant, "stream", pairs, metrics.Throughput
		return p
	}
	for name, c := range map[string]struct {
		p       spec.Published
		want    Agreement
		ours    float64
		unit    string
		why     string
		theirs  float64
		inUnits []float64
	}{
		"a ratio to the baseline":             {figure("fast", 1, spec.Published{Ratio: 1.5, Versus: "base"}), Agrees, 1.5, "1", "", 1.5, nil},
		"another ratio":                       {figure("fast", 1, spec.Published{Ratio: 1.1, Versus: "base"}), Differs, 1.5, "1", "", 1.1, nil},
		"a ratio to another variant":          {figure("faster", 1, spec.Published{Ratio: 2, Versus: "fast"}), Agrees, 2, "1", "", 2, nil},
		"a ratio of the baseline":             {figure("base", 1, spec.Published{Ratio: 0.5, Versus: "fast"}), Differs, 2. / 3, "1", "", 0.5, nil},
		"a value, in its unit":                {figure("fast", 1, spec.Published{Value: "150 Mb/s", Interval: []float64{140, 160}}), Agrees, 150e6, "bit/s", "", 150e6, []float64{140e6, 160e6}},
		"another value":                       {figure("fast", 1, spec.Published{Value: "2 Gb/s"}), Differs, 150e6, "bit/s", "", 2e9, nil},
		"a value in bytes":                    {figure("fast", 1, spec.Published{Value: "18.75 MB/s"}), Agrees, 150e6, "bit/s", "", 150e6, nil},
		"the cell was not measured":           {figure("never", 1, spec.Published{Ratio: 1.5, Versus: "base"}), NotComparable, 0, "1", "never was not measured with stream at 1 pair", 1.5, nil},
		"a number of pairs that nobody chose": {figure("fast", 16, spec.Published{Ratio: 1.5, Versus: "base"}), NotComparable, 0, "1", "fast was not measured with stream at 16 pairs", 1.5, nil},
		"what theirs is relative to was not":  {figure("fast", 2, spec.Published{Ratio: 1.5, Versus: "base"}), NotComparable, 0, "1", "theirs is relative to base, which was not measured with stream at 2 pairs", 1.5, nil},
		"one block alone":                     {figure("faster", 2, spec.Published{Value: "300 Mb/s"}), NotComparable, 3e8, "bit/s", "ours was measured once, and has no interval", 3e8, nil},
	} {
		exp.Spec.Published = []spec.Published{c.p}
		s := analyzed(t, exp, all)
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
