package report

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/report/draw"
)

// tenths returns steps of 100 ms.
func tenths(values ...float64) (all draw.Steps) {
	for i, v := range values {
		all = append(all, draw.Step{From: float64(i) / 10, To: float64(i+1) / 10, Value: v})
	}
	return all
}

func TestTimelineFindings(t *testing.T) {
	flat := slices.Repeat([]float64{1e9}, 10)
	spiky := []float64{2e9, 0, 2e9, 0, 2e9, 0, 2e9, 0, 2e9, 0}
	for _, tt := range []struct {
		name string
		c    timeline
		want []string
	}{
		{"flat at the cap", timeline{rate: tenths(flat...), limit: 1.05e9}, []string{"NIC at its cap"}},
		{"at the cap but for some readings", timeline{rate: tenths(1, 1, 1, 0.89, 1, 1, 1, 0.89, 1), limit: 1}, []string{"NIC at its cap"}},
		{"at the cap for less time", timeline{rate: tenths(1, 1, 1, 0.89, 1, 1, 0.89), limit: 1}, nil},
		{"flat below the cap", timeline{rate: tenths(flat...), limit: 2e9}, nil},
		{"flat without a known cap", timeline{rate: tenths(flat...)}, []string{"NIC flat"}},
		{"the same mean in bursts", timeline{rate: tenths(spiky...)}, nil},
		{"idle", timeline{rate: tenths(make([]float64, 10)...)}, nil},
		{"a core with one tick idle now and then", timeline{core: "core 3", busy: tenths(1, 0.9, 0.8999, 1, 1)}, []string{"core 3 full"}},
		{"a core that is full for half of the time", timeline{core: "core 3", busy: tenths(1, 0.5, 1, 0.5)}, nil},
		{"a VF that goes", timeline{rate: tenths(spiky...), vf: tenths(2e9, 0, 2e9, 0, 0, 0, 0, 0, 0, 0)}, []string{"VF unused from 0.3 s"}},
		{"a VF that rests with its NIC", timeline{rate: tenths(2e9, 2e9, 2e9, 0, 0, 0), vf: tenths(2e9, 2e9, 2e9, 0, 0, 0)}, nil},
		{"a VF that is never used", timeline{rate: tenths(spiky...), vf: tenths(make([]float64, 10)...)}, nil},
	} {
		if diff := cmp.Diff(tt.want, tt.c.findings()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}

// TestTimelineFigure: a panel shows the median trial's busiest NIC, whose VF is a part of it, and the busiest
// core of all machines.
func TestTimelineFigure(t *testing.T) {
	f := demo(t)
	ten := func(v uint64) []uint64 { return slices.Repeat([]uint64{v}, 10) }
	at := make([]int64, 11)
	for i := range at {
		at[i] = int64(i) * 100_000
	}
	vf := append(slices.Repeat([]uint64{12e6}, 4), make([]uint64, 6)...)
	client := record.Series{
		At:   at,
		NICs: []record.NICSeries{{Name: "eth0", Rx: ten(1e3), Tx: ten(12e6)}, {Name: "eth1", Rx: ten(0), Tx: vf}},
		CPUs: []record.CPUSeries{{ID: 0, Idle: ten(5), Softirq: ten(1)}, {ID: 7, Idle: ten(10), Softirq: ten(0)}},
	}
	server := record.Series{At: at, NICs: []record.NICSeries{{Name: "eth0", Rx: ten(11e6), Tx: ten(1e3)}}, CPUs: []record.CPUSeries{{ID: 2, Idle: ten(0), Softirq: ten(9)}}}
	for i := range f.trials {
		tr := &f.trials[i]
		tr.VFs = []record.VFUse{{Place: "node0", NIC: "eth0", VF: "eth1"}}
		tr.Loads = []record.Load{{Node: "node0", Rate: 1e9}, {Node: "node1", Rate: 5e9}}
		tr.Series = map[string]string{"node0": record.EncodeSeries(client), "node1": record.EncodeSeries(server)}
		tr.Metrics[metrics.Throughput] = []float64{0, 5, 1, 6, 3, 2, 4}[tr.Block] // block 4 has the median
	}
	m := f.model()
	figures := m.Section(SectionTimeline)
	if len(figures) != 2 {
		t.Fatalf("%d figures", len(figures))
	}
	got := figures[0]
	want := []string{"vxlan", "4", "eth0 of node0, sent; its VF unused from 0.4 s", "0.960", "0.960", "0.960", "100%", "core 2 of node1", "100%"}
	if diff := cmp.Diff(want, got.Data.Rows[1]); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if text := "vxlan (VF unused from 0.4 s, NIC at its cap, core 2 of node1 full)"; !strings.Contains(got.Alt, text) {
		t.Errorf("%q is not in %q", text, got.Alt)
	}
	svg := got.Picture.SVG()
	for _, text := range []string{">by its VF<", ">cap<", ">1.00 s<"} {
		if !strings.Contains(svg, text) {
			t.Errorf("%s is not in the figure", text)
		}
	}
}

// TestTimelineUnreadable: an unreadable series of a node is reported, and the others are drawn.
func TestTimelineUnreadable(t *testing.T) {
	f := demo(t)
	for i := range f.trials {
		f.trials[i].Series["node0"] = "?"
	}
	m := f.model()
	i := slices.IndexFunc(m.Warnings, func(w Warning) bool { return w.Code == record.WarnSeriesUnreadable })
	if i < 0 || !strings.Contains(m.Warnings[i].Entries[0].Message, "node0: decode series") {
		t.Fatalf("warnings %+v", m.Warnings)
	}
	figures := m.Section(SectionTimeline)
	if len(figures) != 2 || figures[0].Data.Rows[0][2] != "eth0 of node1, received" || figures[0].Data.Rows[0][7] != "–" {
		t.Errorf("%+v", figures)
	}
}

// TestTimelineOfVF: a NIC counts all bytes of its virtual function, so the panel shows the NIC.
func TestTimelineOfVF(t *testing.T) {
	s := record.Series{At: []int64{0, 100_000}, NICs: []record.NICSeries{
		{Name: "eth0", Rx: []uint64{9}, Tx: []uint64{0}}, {Name: "eth1", Rx: []uint64{9}, Tx: []uint64{0}},
	}}
	tr := record.Trial{VFs: []record.VFUse{{Place: "node0", NIC: "eth1", VF: "eth0"}}}
	var c timeline
	if c.findNIC(tr, map[string]record.Series{"node0": s}); c.nic != "eth1 of node0, received" || len(c.vf) != 1 {
		t.Errorf("%+v", c)
	}
}

// TestTimelineCapFarAbove: a cap far above the rates is not drawn, because they would all be at the bottom.
func TestTimelineCapFarAbove(t *testing.T) {
	for _, tt := range []struct {
		limit float64
		drawn bool
	}{{2.4e9, true}, {10e9, false}, {0, false}} {
		c := timeline{variant: "v", rate: tenths(1e9, 2e9), limit: tt.limit}
		svg := timelinesChart([]timeline{c}).Picture().SVG()
		if drawn := strings.Contains(svg, ">cap<"); drawn != tt.drawn {
			t.Errorf("a cap of %g is drawn: %v", tt.limit, drawn)
		}
	}
}
