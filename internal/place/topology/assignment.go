package topology

import (
	"fmt"
	"net/netip"
	"slices"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/spec"
)

// Assignment says which places of a network that is up are the ends of pairs.
type Assignment struct {
	topology *Topology
	fabric   Fabric
	places   []place.Place
	nodes    []place.Place
	pods     map[place.Position]place.Place
}

// Assign takes the places of a network that is up: the nodes first, in order, then the pods of each.
func (t *Topology) Assign(fabric int, places []place.Place) *Assignment {
	s := &Assignment{topology: t, fabric: t.fabrics[fabric], pods: make(map[place.Position]place.Place)}
	for _, p := range places {
		if p.Kind == place.Node {
			if b := s.fabric.Balancer.Backends; b > 0 && len(s.nodes) == 2+b {
				continue // the others have nothing to do
			}
			s.nodes = append(s.nodes, p)
		} else {
			position := place.Position{Node: slices.IndexFunc(s.nodes, func(at place.Place) bool { return at.Name == p.Node })}
			for s.pods[position].Name != "" {
				position.Pod++
			}
			s.pods[position] = p
		}
		s.places = append(s.places, p)
	}
	return s
}

// Places returns the places that the experiment uses.
func (s *Assignment) Places() []place.Place { return s.places }

// Pair returns where the ends of pair i of a variant are, for traffic of an IP version.
func (s *Assignment) Pair(v spec.Variant, i, ip int) (place.Pair, error) {
	path := s.topology.exp.PathOf(v)
	var p place.Pair
	var by place.Place // the place whose address the clients are given
	switch {
	case s.topology.exp.Spec.Target.Hosts != nil:
		client, server := s.topology.exp.HostsOf(v)
		if s.topology.exp.Spec.Mesh != nil {
			client, server = s.topology.meshEnds(i)
		}
		p.Client, p.Servers = s.host(client, path), []place.Place{s.host(server, path)}
		by = p.Servers[0]
	case path.Balancer != nil:
		p.Client, p.Servers, p.Backends = s.nodes[0], s.nodes[2:], true
		by = s.nodes[1]
		by.Service.Port += uint16(i)
	default:
		from, to := s.topology.positionsOf(v, i)
		p.Client, p.Servers = s.at(from, path), []place.Place{s.at(to, path)}
		by = p.Servers[0]
	}
	p.To = netip.AddrPortFrom(by.IP(ip), 0)
	if path.Service != nil && path.Service.Mode == "" && path.Service.Backends > 1 {
		by.Service = by.Services[path.Service.Backends]
	}
	if path.Service != nil || path.Balancer != nil {
		p.To, p.Ports = by.Service.AddrPort(ip), by.Service.Ports
	}
	p.Everywhere = path.Service != nil && by.Service.Everywhere
	if !by.IP(ip).IsValid() || !p.To.Addr().IsValid() {
		return p, fmt.Errorf("%s has no IPv%d address on the path %s: choose the other version (ip: %d)", by.Name, ip, nameOfPath(path), 10-ip)
	}
	return p, nil
}

// at returns the place of a position: the pod or, for native traffic, the node itself on the CPUs
// that the pod in this position would have, so that only the path differs.
func (s *Assignment) at(position place.Position, path spec.Path) place.Place {
	pod := s.pods[position]
	if path.Native == nil {
		return pod
	}
	node := s.nodes[position.Node]
	node.Affinity, node.StandsFor = pod.Affinity, pod.Name
	return node
}

// host returns the place of a host by its index in the experiment, with its address on a path.
func (s *Assignment) host(i int, path spec.Path) place.Place {
	name := s.topology.exp.Spec.Target.Hosts[i].Name
	place := s.nodes[slices.IndexFunc(s.nodes, func(at place.Place) bool { return at.Name == name })]
	if path.Address != "" {
		place.IPv4, place.IPv6 = netip.Addr{}, netip.Addr{}
		if at := place.Addresses[path.Address]; at.Is4() {
			place.IPv4 = at
		} else {
			place.IPv6 = at
		}
	}
	return place
}

func nameOfPath(p spec.Path) string {
	switch {
	case p.Address != "":
		return p.Address
	case p.Native != nil:
		return "native"
	case p.Service != nil:
		return "service"
	case p.Balancer != nil:
		return "balancer"
	}
	return "from pod to pod"
}

// positionsOf returns the positions of pair i of a variant. Pairs of a mesh use the first pod of each node. Variants that choose
// their nodes have two.
func (t *Topology) positionsOf(v spec.Variant, i int) (client, server place.Position) {
	switch path := t.exp.PathOf(v); {
	case t.exp.Spec.Mesh != nil:
		client.Node, server.Node = t.meshEnds(i)
	case len(t.exp.Pools()) > 0:
		client, server = positions(path, i, 2)
		first := 2 * t.exp.PoolOf(v)
		client.Node, server.Node = first+client.Node, first+server.Node
	default:
		client, server = positions(path, i, t.exp.Nodes())
	}
	return client, server
}

// positions returns the positions of pair i. Ends take turns on the nodes: the client has an even turn,
// and its server the next one. So the two ends are never on the same node. Between pods of one
// node they always are, in neighbouring pods.
func positions(path spec.Path, i, nodes int) (client, server place.Position) {
	if path.OneNode() {
		pod := 2 * (i / nodes)
		return place.Position{Node: i % nodes, Pod: pod}, place.Position{Node: i % nodes, Pod: pod + 1}
	}
	// Turns go round the nodes. After n ends, a node gives the next one its pod n.
	at := func(turn int) place.Position { return place.Position{Node: turn % nodes, Pod: turn / nodes} }
	return at(2 * i), at(2*i + 1)
}
