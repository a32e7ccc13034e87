package experiment

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/record"
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
