package report

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// TestNICsFigure: a trial with more than two NICs has them all drawn, in the order of its nodes and each in its busier
// direction: here a proxy flat at its cap, and backends that take turns. An idle NIC does not count.
func TestNICsFigure(t *testing.T) {
	f := demo(t)
	at := make([]int64, 11)
	for i := range at {
		at[i] = int64(i) * 100_000
	}
	nics := func(rx, tx []uint64) string {
		return record.EncodeSeries(record.Series{At: at, NICs: []record.NICSeries{
			{Name: "eth0", Rx: rx, Tx: tx}, {Name: "eth1", Rx: make([]uint64, 10), Tx: make([]uint64, 10)},
		}})
	}
	steady := func(v uint64) []uint64 { return slices.Repeat([]uint64{v}, 10) }
	turns := func(first bool) (all []uint64) {
		for i := range 10 {
			all = append(all, map[bool]uint64{true: 4e6, false: 1e3}[(i%2 == 0) == first])
		}
		return all
	}
	for i := range f.trials {
		tr := &f.trials[i]
		tr.Loads = []record.Load{{Node: "node9", Role: spec.RoleClient, Rate: 1e9}, {Node: "node10", Role: spec.RoleProxy, Rate: 33e6}, {Node: "node1", Role: spec.RoleBackend}, {Node: "node2", Role: spec.RoleBackend}}
		tr.Series = map[string]string{"node9": nics(steady(1e3), steady(4e5)), "node10": nics(steady(399e3), steady(4e5))}
		if tr.Variant == "vxlan" {
			tr.Series["node1"], tr.Series["node2"] = nics(turns(true), steady(1e3)), nics(turns(false), steady(1e3))
		}
	}
	w := f.exp.Spec.Workloads[0]
	figure, ok := f.model().nicsFigure(w, 4)
	if !ok {
		t.Fatal("no figure")
	}
	want := [][]string{
		{"vxlan", "eth0 of node9, sent", "client", "0.0320", "0.0320", "0.0320", "0%", "0%"},
		{"vxlan", "eth0 of node10, sent", "proxy", "0.0320", "0.0320", "0.0320", "100%", "0%"},
		{"vxlan", "eth0 of node1, received", "backend", "0.000080", "0.000080", "0.320", "–", "50%"},
		{"vxlan", "eth0 of node2, received", "backend", "0.000080", "0.000080", "0.320", "–", "50%"},
	}
	if diff := cmp.Diff(want, figure.Data.Rows); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if text := "vxlan, 1 of 4 NICs at the cap"; !strings.Contains(figure.Alt, text) {
		t.Errorf("%q is not in %q", text, figure.Alt)
	}
	for _, text := range []string{
		"all on one scale; the highest is 0.320 Gb/s.", "(the 16 busiest, if there are more)", "NICs with less than 1% of the busiest one's traffic are left out.",
	} {
		if !strings.Contains(figure.Caption, text) {
			t.Errorf("%q is not in %q", text, figure.Caption)
		}
	}
	svg := figure.Picture.SVG()
	for _, text := range []string{">proxy node10, sent<", ">backend node2, received<", ">cap of the NIC<", ">1.00 s<"} {
		if !strings.Contains(svg, text) {
			t.Errorf("%s is not in the figure", text)
		}
	}
	if strings.Contains(svg, ">native<") {
		t.Error("a variant with two NICs has a panel")
	}
	for i := range f.trials {
		delete(f.trials[i].Series, "node1")
		delete(f.trials[i].Series, "node2")
	}
	if _, ok := f.model().nicsFigure(w, 4); ok {
		t.Error("two NICs have a figure of their own")
	}
}
