package topology

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"slipstream.dev/internal/place"
)

var own = netip.MustParseAddr("192.0.2.1")

// Over all rounds of a mesh each node is the client of every other one once, and in no round is a node in
// two pairs. In the next block a link runs beside other links.
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
		var places []place.Place
		for i := range n {
			name := fmt.Sprintf("h%d", i)
			places = append(places, place.Place{Name: name, Node: name, Kind: place.Node, IPv4: own})
		}
		assignment := Of(exp).Assign(0, places)
		const blocks = 3
		company := make(map[[2]string][]string) // of a link, in each block
		for round := range blocks * rounds {
			busy := make(map[string]bool)
			var links [][2]string
			for i := range size {
				p, err := assignment.Pair(exp.Spec.Variants[0], round*size+i, 4)
				if err != nil {
					t.Fatal(err)
				}
				client, server := p.Client.Name, p.Servers[0].Name
				met[[2]string{client, server}]++
				if busy[client] || busy[server] || client == server {
					t.Errorf("%d nodes, round %d: %s → %s, and one of them is in another pair", n, round, client, server)
				}
				busy[client], busy[server] = true, true
				links = append(links, [2]string{client, server})
			}
			slices.SortFunc(links, func(a, b [2]string) int { return cmp.Or(strings.Compare(a[0], b[0]), strings.Compare(a[1], b[1])) })
			for _, l := range links {
				company[l] = append(company[l], fmt.Sprint(links))
			}
		}
		for pair, times := range met {
			if times != blocks {
				t.Errorf("%d nodes: %v met %d times in %d blocks", n, pair, times, blocks)
			}
		}
		kept := 0
		for _, of := range company {
			if of[0] == of[1] || of[1] == of[2] {
				kept++
			}
		}
		if n >= 8 && kept > len(company)/4 {
			t.Errorf("%d nodes: %d of %d links run beside the same links in the next block", n, kept, len(company))
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
	var places []place.Place
	for i := range 5 {
		name := fmt.Sprintf("node%d", i)
		places = append(places, place.Place{Name: name, Node: name, Kind: place.Node, IPv4: own})
	}
	for i := range 5 {
		name := fmt.Sprintf("node%d", i)
		places = append(places, place.Place{Name: name + "/pod0", Node: name, Kind: place.Pod, IPv4: own})
	}
	assignment := topology.Assign(0, places)
	pods, err := assignment.Pair(exp.Spec.Variants[0], 0, 4)
	if err != nil {
		t.Fatal(err)
	}
	nodes, err := assignment.Pair(exp.Spec.Variants[1], 0, 4)
	if err != nil {
		t.Fatal(err)
	}
	if pods.Client.Name != nodes.Client.Name+"/pod0" || pods.Servers[0].Name != nodes.Servers[0].Name+"/pod0" {
		t.Errorf("the first pair is %s to %s of pods, %s to %s of nodes", pods.Client.Name, pods.Servers[0].Name, nodes.Client.Name, nodes.Servers[0].Name)
	}
}

func hostList(n int) (text string) {
	for i := range n {
		text += fmt.Sprintf("{name: h%d}, ", i)
	}
	return text
}
