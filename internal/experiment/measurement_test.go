package experiment

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// TestMachinesOf: only machines with an end of a pair are sampled, whichever of their nodes it is on. What the nodes of other
// variants do is no part of a trial.
func TestMachinesOf(t *testing.T) {
	n := &network{facts: []record.Node{{Name: "a", Boot: "1"}, {Name: "b", Boot: "2"}, {Name: "c", Boot: "3"}, {Name: "d", Boot: "1"}, {Name: "lost"}}}
	on := func(node string) end { return end{place: place.Place{Name: node + "/pod0", Node: node}} }
	busy := n.machinesOf([]pairEnds{{client: on("a"), servers: []end{on("b")}}, {client: on("lost"), servers: []end{on("b")}}})
	var sampled []string
	for _, node := range []string{"a", "b", "c", "d", "lost"} {
		if busy[n.machineOf(node)] {
			sampled = append(sampled, node)
		}
	}
	if diff := cmp.Diff([]string{"a", "b", "d", "lost"}, sampled); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestWorkloadBeside: a workload with another beside it has the traffic of both at every pair, by workers of their own. Its metrics are its own,
// without CPU time, and those of the other workload alone are as ever.
func TestWorkloadBeside(t *testing.T) {
	f := newFake(2)
	exp := parse(t, "spec.workloads=[{name: bulk, stream: {warmup: 1ms, duration: 2s}}, {name: both, stream: {warmup: 1ms, duration: 1s, size: 64}, beside: bulk}]", "spec.pairs=[2]", "spec.runs=1")
	trials, err := measure(t, t.Context(), f, exp, new(memory), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, trial := range trials {
		names := slices.Sorted(maps.Keys(trial.Metrics))
		loaded := trial.Workload == "both"
		if slices.Contains(names, metrics.CPUPerGB) == loaded || slices.Contains(names, metrics.BesideThroughput) != loaded {
			t.Errorf("%s has %v", trial.Workload, names)
		}
		for _, p := range trial.PerPair {
			if (p.Beside != nil) != loaded {
				t.Fatalf("%s: beside %+v", trial.Workload, p.Beside)
			}
			if loaded && (p.Beside.Server.Bytes != 1e9 || p.Beside.Client.Seconds != 1 || p.Beside.Client.Place != p.Client.Place || p.Beside.Server.Place != p.Server.Place) {
				t.Errorf("beside %+v of a pair %+v", p.Beside, p)
			}
		}
		if loaded && trial.Metrics[metrics.BesideThroughput] != 16e9 {
			t.Errorf("%v bit/s beside, want those of both pairs", trial.Metrics[metrics.BesideThroughput])
		}
	}
	if want := f.uses[place.ForTraffic]; want != 2*2*2*2 { // of two networks with two pairs, for both ends and both workloads
		t.Errorf("%d workers for traffic", want)
	}
}

// TestSilentBeside: without the traffic beside, the figures are those of a workload alone, so the trial fails.
func TestSilentBeside(t *testing.T) {
	traffic := func() *spec.Traffic { return &spec.Traffic{Tool: spec.ToolNative, Duration: spec.Duration(1e9)} }
	c := Cell{Workload: spec.Workload{PingPong: traffic()}, Beside: &spec.Workload{Name: "bulk", Stream: traffic()}}
	for silent, fails := range map[float64]bool{0.1: false, 0.9: true} {
		err := judgeBeside(c, []record.Pair{{Beside: &record.Beside{Server: record.Endpoint{Seconds: 1, Silent: silent}}}})
		if (err != nil) != fails || fails && !strings.Contains(err.Error(), "beside it, bulk: nothing arrived") {
			t.Errorf("silent for %v s: %v", silent, err)
		}
	}
}
