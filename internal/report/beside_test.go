package report

import (
	"io"
	"slices"
	"strings"
	"testing"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/stats"
)

// TestBesideSharesScales: the same ratio stands at the same place on both sides.
func TestBesideSharesScales(t *testing.T) {
	before, after := demo(t), demo(t)
	for i := range after.trials {
		if tr := &after.trials[i]; tr.Variant == "rfs+" && tr.Workload == "stream" {
			tr.Metrics[metrics.Throughput] *= 3
		}
	}
	x, y := before.model(), after.model()
	one := func(m *Model) string { return m.Tables[0].Rows[2].Cells[0].Bar.One }
	own := one(x)
	b := NewBeside(x, y, &stats.Comparison{})
	if one(x) != own || own == one(y) {
		t.Errorf("the reports of one result have 1 at %s and %s, and first had it at %s", one(x), one(y), own)
	}
	if one(b.Sides[0]) != one(b.Sides[1]) || !slices.Equal(b.Sides[0].Tables[0].Ticks, b.Sides[1].Tables[0].Ticks) || !slices.Equal(b.Sides[0].Forest.Ticks, b.Sides[1].Forest.Ticks) {
		t.Error("the two sides have scales of their own")
	}
}

// TestBesideAnchors: two results in one page have no anchor in common, and every link leads
// somewhere.
func TestBesideAnchors(t *testing.T) {
	f, s := eventful(t)
	m := New(f.exp, s, f.trials, f.env)
	f.env.Version = "0.2.0"
	page := render(t, func(w io.Writer, m *Model) error {
		return NewBeside(m, New(f.exp, s, f.trials, f.env), &stats.Comparison{Before: stats.Side{Name: "a"}, After: stats.Side{Name: "b"}}).HTML(w)
	}, m)
	anchorsFit(t, page)
	for _, caption := range []string{"stream throughput in a <", "stream throughput in b <"} {
		if !strings.Contains(page, caption) {
			t.Errorf("no table has the caption %q", caption)
		}
	}
	if !strings.Contains(page, `data-label="a">0.1.0</td><td class="text wide" data-label="b">0.2.0`) || strings.Contains(page, "node0 and node1: Kernel") {
		t.Error("the page does not tell what differs from what does not")
	}
}
