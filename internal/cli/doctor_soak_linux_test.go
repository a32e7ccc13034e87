//go:build soak

package cli

import (
	"maps"
	"slices"
	"testing"
	"time"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/target/lab"
	"slipstream.dev/internal/testenv"
)

// TestSoakHealthyLooks checks a healthy lab, and the paths between its nodes, 100 times,
// and finds nothing. What is of the whole machine, such as a CPU that other programs keep busy, it only logs.
func TestSoakHealthyLooks(t *testing.T) {
	testenv.NeedRoot(t)
	l, err := lab.Up(t.Context(), lab.Config{
		Name: "looks", Nodes: 2, NIC: v1alpha1.NIC{Offload: v1alpha1.OffloadFull, MTU: 1500}, Shape: v1alpha1.ShapeFlannel,
	}, lab.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := l.Down(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	o := doctorOptions{window: 100 * time.Millisecond, probe: true}
	of := make(map[string]int)
	const looks = 100
	for range looks {
		var d diagnosis
		if err := o.probeLab(t.Context(), &d, l); err != nil {
			t.Fatal(err)
		}
		for _, f := range d.Findings {
			of[f.Rule]++
			t.Logf("%s %s %s: %s %v", f.Severity, f.Rule, f.Where, f.What, f.Evidence)
			if !slices.Contains([]string{"backlog-full", "flow-limit", "squeezed", "throttled"}, f.Rule) {
				t.Errorf("%s is invented", f.Rule)
			}
		}
	}
	t.Logf("%d looks at 2 nodes and 2 ways: findings %v", looks, slices.Collect(maps.Keys(of)))
}
