package topology

import "math/rand/v2"

// meshEnds returns the nodes of pair i of a mesh, counted over all its blocks. Each block has every ordered pair of nodes
// once, and its own order of the nodes. So a link runs beside other links in every block. If some of them share an
// uplink, they slow the link down in some blocks, which shows as scatter, and not in all, which would look like a slow
// link.
func (t *Topology) meshEnds(i int) (client, server int) {
	n := t.exp.Nodes()
	block := n * (n - 1)
	order := rand.New(rand.NewPCG(t.exp.Spec.Seed, uint64(i/block))).Perm(n)
	client, server = meshPair(i%block, n)
	return order[client], order[server]
}

// meshPair returns the nodes of the client and the server of pair i of a mesh of n nodes, counted over its rounds of n/2
// pairs. The rounds are those of a round-robin tournament by the circle method: one node stays in its place, and the
// others move round it by one place per round. With an odd n the fixed place is empty, and the node opposite has a break.
// The second half of the rounds is the first with clients and servers exchanged.
func meshPair(i, n int) (client, server int) {
	turning := n - 1 + n%2
	round, k := i/(n/2), i%(n/2)
	turn := round % turning
	if n%2 == 1 {
		k++ // past the node that has a break
	}
	client, server = (turn+k)%turning, (turn-k+turning)%turning
	if k == 0 {
		server = n - 1
	}
	if round >= turning {
		client, server = server, client
	}
	return client, server
}
