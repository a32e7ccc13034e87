package topology

import (
	"fmt"
	"net/netip"
	"slices"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/target"
)

// Seating is a network that is up, with its places.
type Seating struct {
	topology *Topology
	fabric   Fabric
	places   []target.Place
	nodes    []target.Place
	pods     map[target.Seat]target.Place
}

// Seat takes the places of a network: the nodes first, in order, then the pods of each.
func (t *Topology) Seat(fabric int, places []target.Place) *Seating {
	s := &Seating{topology: t, fabric: t.fabrics[fabric], pods: make(map[target.Seat]target.Place)}
	for _, place := range places {
		if place.Kind == target.Node {
			if b := s.fabric.Balancer.Backends; b > 0 && len(s.nodes) == 2+b {
				continue // the others have nothing to do
			}
			s.nodes = append(s.nodes, place)
		} else {
			seat := target.Seat{Node: slices.IndexFunc(s.nodes, func(at target.Place) bool { return at.Name == place.Node })}
			for s.pods[seat].Name != "" {
				seat.Pod++
			}
			s.pods[seat] = place
		}
		s.places = append(s.places, place)
	}
	return s
}

// Places returns the places that the experiment uses.
func (s *Seating) Places() []target.Place { return s.places }

// Pair returns where the ends of pair i of a variant are, for traffic of an IP version.
func (s *Seating) Pair(v v1alpha1.Variant, i, ip int) (target.Pair, error) {
	path := s.topology.exp.PathOf(v)
	var p target.Pair
	var by target.Place // the place whose address the clients are given
	switch {
	case s.topology.exp.Spec.Target.Hosts != nil:
		client, server := s.topology.exp.HostsOf(v)
		if s.topology.exp.Spec.Mesh != nil {
			client, server = s.topology.meshEnds(i)
		}
		p.Client, p.Servers = s.host(client, path), []target.Place{s.host(server, path)}
		by = p.Servers[0]
	case path.Balancer != nil:
		p.Client, p.Servers, p.Backends = s.nodes[0], s.nodes[2:], true
		by = s.nodes[1]
		by.Service.Port += uint16(i)
	default:
		from, to := s.topology.ends(path, i)
		p.Client, p.Servers = s.at(from, path), []target.Place{s.at(to, path)}
		by = p.Servers[0]
	}
	p.To = netip.AddrPortFrom(by.IP(ip), 0)
	if path.Service != nil || path.Balancer != nil {
		p.To = by.Service.AddrPort(ip)
	}
	p.Everywhere = path.Service != nil && by.Service.Everywhere
	if !by.IP(ip).IsValid() || !p.To.Addr().IsValid() {
		return p, fmt.Errorf("%s has no IPv%d address on the path %s: choose the other version (ip: %d)", by.Name, ip, name(path), 10-ip)
	}
	return p, nil
}

// at returns the place of a seat: the pod or, for native traffic, the node itself on the CPUs
// that the pod in this seat would have, so that only the path differs.
func (s *Seating) at(seat target.Seat, path v1alpha1.Path) target.Place {
	pod := s.pods[seat]
	if path.Native == nil {
		return pod
	}
	node := s.nodes[seat.Node]
	node.Affinity, node.Seat = pod.Affinity, pod.Name
	return node
}

// host returns the place of a host by its index in the experiment, with its address on a path.
func (s *Seating) host(i int, path v1alpha1.Path) target.Place {
	name := s.topology.exp.Spec.Target.Hosts[i].Name
	place := s.nodes[slices.IndexFunc(s.nodes, func(at target.Place) bool { return at.Name == name })]
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

func name(p v1alpha1.Path) string {
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

// ends returns the seats of pair i of the experiment. Pairs of a mesh use the first pod of each
// node.
func (t *Topology) ends(path v1alpha1.Path, i int) (client, server target.Seat) {
	if t.exp.Spec.Mesh == nil {
		return seats(path, i, t.exp.Nodes())
	}
	client.Node, server.Node = t.meshEnds(i)
	return client, server
}

// seats returns the seats of pair i. Ends take turns on the nodes: the client has an even turn,
// and its server the next one. So the two ends are never on the same node. On the path bridge
// they always are, in neighbouring pods.
func seats(path v1alpha1.Path, i, nodes int) (client, server target.Seat) {
	if path.Bridge != nil {
		pod := 2 * (i / nodes)
		return target.Seat{Node: i % nodes, Pod: pod}, target.Seat{Node: i % nodes, Pod: pod + 1}
	}
	// Turns go round the nodes. After n ends, a node gives the next one its pod n.
	at := func(turn int) target.Seat { return target.Seat{Node: turn % nodes, Pod: turn / nodes} }
	return at(2 * i), at(2*i + 1)
}
