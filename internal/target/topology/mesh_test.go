package topology

import (
	"fmt"
	"net/netip"
	"testing"

	"slipstream.dev/internal/target"
)

var own = netip.MustParseAddr("192.0.2.1")

// Over all rounds of a mesh each node is the client of every other one once, and in no round is a node in
// two pairs.
func TestMesh(t *testing.T) {
	for n := 2; n <= 17; n++ {
		exp := parse(t, fmt.Sprintf(`
  target: {hosts: [%s]}
  baseline: mesh
  mesh: {}
  variants: [{name: mesh}]
  workloads: [{name: bulk, stream: {duration: 1s}}]
`, hostList(n)))
		rounds, size := exp.Rounds(), exp.PairsOf(exp.Spec.Workloads[0])[0]
		met := make(map[[2]string]int)
		var places []target.Place
		for i := range n {
			name := fmt.Sprintf("h%d", i)
			places = append(places, target.Place{Name: name, Node: name, Kind: target.Node, IPv4: own})
		}
		seating := Of(exp).Seat(0, places)
		for round := range rounds {
			busy := make(map[string]bool)
			for i := range size {
				p, err := seating.Pair(exp.Spec.Variants[0], round*size+i, 4)
				if err != nil {
					t.Fatal(err)
				}
				client, server := p.Client.Name, p.Servers[0].Name
				met[[2]string{client, server}]++
				if busy[client] || busy[server] || client == server {
					t.Errorf("%d nodes, round %d: %s → %s, and one of them is in another pair", n, round, client, server)
				}
				busy[client], busy[server] = true, true
			}
		}
		for pair, times := range met {
			if times != 1 {
				t.Errorf("%d nodes: %v met %d times", n, pair, times)
			}
		}
		if len(met) != n*(n-1) {
			t.Errorf("%d nodes: %d links, want %d", n, len(met), n*(n-1))
		}
	}
}

// In a lab a round's pairs are in the first pod of their nodes, so a node needs no other.
func TestMeshInPods(t *testing.T) {
	exp := parse(t, `
  target: {lab: {nodes: 5}}
  baseline: pods
  mesh: {}
  variants: [{name: pods}, {name: nodes, path: {native: {}}}]
  workloads: [{name: bulk, stream: {duration: 1s}}]
`)
	topology := Of(exp)
	if got := topology.Pods(0); got != 1 {
		t.Errorf("%d pods a node, want 1", got)
	}
	var places []target.Place
	for i := range 5 {
		name := fmt.Sprintf("node%d", i)
		places = append(places, target.Place{Name: name, Node: name, Kind: target.Node, IPv4: own})
	}
	for i := range 5 {
		name := fmt.Sprintf("node%d", i)
		places = append(places, target.Place{Name: name + "/pod0", Node: name, Kind: target.Pod, IPv4: own})
	}
	seating := topology.Seat(0, places)
	for i, want := range []string{"node1/pod0 to node4/pod0", "node1 to node4"} {
		p, err := seating.Pair(exp.Spec.Variants[i], 0, 4)
		if err != nil {
			t.Fatal(err)
		}
		if got := p.Client.Name + " to " + p.Servers[0].Name; got != want {
			t.Errorf("variant %d: first pair is %s, want %s", i, got, want)
		}
	}
}

func hostList(n int) (text string) {
	for i := range n {
		text += fmt.Sprintf("{name: h%d}, ", i)
	}
	return text
}
