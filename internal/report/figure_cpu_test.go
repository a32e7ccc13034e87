package report

import (
	"testing"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
)

// TestSleepCaption: the end that hardly ever waits for the other one is the limit. A failed trial does not
// count, nor does a tool that counts no sleeps.
func TestSleepCaption(t *testing.T) {
	stream := spec.Workload{Name: "s", Stream: &spec.Traffic{Protocol: "tcp"}}
	exp := &spec.Experiment{Spec: spec.Spec{
		Target: spec.Target{Lab: &spec.Lab{Nodes: 2}}, Path: spec.Path{VXLAN: &spec.VXLAN{}}, Baseline: "vxlan",
		Variants: []spec.Variant{{Name: "vxlan"}, {Name: "native"}, {Name: "slow"}, {Name: "tool"}}, Workloads: []spec.Workload{stream}, Pairs: []int{1},
	}}
	trial := func(variant string, status record.Status, sender, receiver uint64) record.Trial {
		return record.Trial{Variant: variant, Workload: "s", Pairs: 1, Status: status, PerPair: []record.Pair{{
			Client: record.Endpoint{Messages: 500, Sleeps: sender}, Server: record.Endpoint{Messages: 1000, Sleeps: receiver},
		}}}
	}
	m := New(exp, &stats.Summary{}, []record.Trial{
		trial("vxlan", record.StatusOK, 0, 900), trial("vxlan", record.StatusOK, 20, 940), trial("vxlan", record.StatusFailed, 500, 0),
		trial("native", record.StatusOK, 200, 100), trial("slow", record.StatusOK, 600, 0), trial("tool", record.StatusOK, 0, 0),
	}, record.Environment{})
	const want = " Sleeps per read of the receiver and per write of the sender: vxlan 0.92 and 0.02 (the sender was the limit); " +
		"native 0.10 and 0.40; slow 0.00 and 1.20 (the receiver was the limit)."
	if got := m.sleepCaption(stream, 1); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := m.sleepCaption(spec.Workload{Name: "s", PingPong: &spec.Traffic{}}, 1); got != "" {
		t.Errorf("of round trips: %q", got)
	}
}
