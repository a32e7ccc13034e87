// Package topology lays an experiment out: which networks its variants run on, and where the ends
// of each pair are there, on nodes or in pods, behind a service, or with a balancer between. It
// makes nothing and runs on any system: internal/experiment plans with it, and the other packages of
// place make what it says.
package topology

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/words"
)

// Topology is the layout of an experiment.
type Topology struct {
	exp     *spec.Experiment
	fabrics []Fabric
	// pods that each node needs for the pairs that sit in pods.
	pods int
}

// Fabric has what distinguishes one network of a target from another. A cluster has only one network,
// and so do hosts: the zero Fabric, unless there are several clusters.
type Fabric struct {
	// Cluster is the name of one of several clusters.
	Cluster string
	Shape   string
	NIC     spec.NIC
	// Nodes that a lab has.
	Nodes int
	// Service has no mode if there are no services.
	Service spec.Service
	// Policies have no mode if there are none.
	Policies spec.Policies
	// Balancer has no backends if there is none. Pairs is the largest number of pairs that use it at
	// a time.
	Balancer spec.Balancer
	Pairs    int
}

// Of lays out an experiment, which is valid and has its defaults.
func Of(exp *spec.Experiment) *Topology {
	t := &Topology{exp: exp}
	for _, v := range exp.Spec.Variants {
		if f := t.fabricFor(v); !slices.Contains(t.fabrics, f) {
			t.fabrics = append(t.fabrics, f)
		}
	}
	for _, w := range exp.Spec.Workloads {
		for i := range slices.Max(exp.PairsOf(w)) {
			for _, v := range exp.Spec.Variants {
				if exp.PathOf(v).Balancer != nil {
					continue // its ends are on nodes, each in a place of its own
				}
				client, server := t.positionsOf(v, i)
				t.pods = max(t.pods, client.Pod+1, server.Pod+1)
			}
		}
	}
	return t
}

// FabricOf returns the index of the network that a variant runs on.
func (t *Topology) FabricOf(v spec.Variant) int { return slices.Index(t.fabrics, t.fabricFor(v)) }

// Fabrics returns the networks that the experiment needs, in order of first use.
func (t *Topology) Fabrics() []Fabric { return t.fabrics }

// Describe describes a network for a person.
func (t *Topology) Describe(i int) string {
	f := t.fabrics[i]
	switch {
	case t.exp.Spec.Target.Kubernetes != nil:
		return fmt.Sprintf("%d nodes of %s, %s each", t.exp.Nodes(), cmp.Or(f.where(), "a cluster"), words.Count(t.pods, "pod"))
	case t.exp.Spec.Target.Hosts != nil:
		var names []string
		for _, h := range t.Hosts() {
			names = append(names, h.Name)
		}
		return "hosts " + strings.Join(names, ", ")
	case f.Balancer.Backends > 0:
		return fmt.Sprintf("%d nodes, client → %s → %s, NIC offload %s, MTU %d%s", f.Nodes,
			cmp.Or(f.Balancer.Proxy, "proxy"), words.Count(f.Balancer.Backends, "backend"), f.NIC.Offload, f.NIC.MTU, f.rates())
	}
	text := fmt.Sprintf("%d nodes, %s each, %s, NIC offload %s, MTU %d", f.Nodes, words.Count(t.pods, "pod"), f.Shape, f.NIC.Offload, f.NIC.MTU)
	if f.NIC.Rate != "" {
		text += ", " + string(f.NIC.Rate)
	}
	if s := f.Service; s.Mode != "" {
		servers := len(t.Served(i).Positions)
		text += fmt.Sprintf(", services by %s: %d with %d backends each, %d in all", s.Mode, servers, s.Backends, max(servers, s.Services))
		if s.OtherBackends > 1 {
			text += fmt.Sprintf(", the others with %d", s.OtherBackends)
		}
	}
	if f.Policies.Mode != "" {
		text += ", " + f.Policies.String()
	}
	return text
}

// Hosts returns the hosts that variants run on, in the order of the experiment.
func (t *Topology) Hosts() (all []spec.Host) {
	if t.exp.Spec.Mesh != nil {
		return t.exp.Spec.Target.Hosts
	}
	used := make(map[int]bool)
	for _, v := range t.exp.Spec.Variants {
		client, server := t.exp.HostsOf(v)
		used[client], used[server] = true, true
	}
	for i, h := range t.exp.Spec.Target.Hosts {
		if used[i] {
			all = append(all, h)
		}
	}
	return all
}

func (t *Topology) fabricFor(v spec.Variant) Fabric {
	if t.exp.Spec.Target.Lab == nil {
		return Fabric{Cluster: v.Cluster}
	}
	f := Fabric{Shape: t.shapeFor(v), NIC: t.nicFor(v), Nodes: t.exp.Nodes()}
	if s := t.exp.PathOf(v).Service; s != nil {
		f.Service = *s
		f.Service.EndpointChanges = 0 // they are made while a variant's trials run
	}
	if p := t.exp.PathOf(v).Policies; p != nil {
		f.Policies = *p
	}
	if b := t.exp.PathOf(v).Balancer; b != nil {
		f.Shape, f.Balancer = spec.ShapeFlannel, *b
		f.Balancer.NICs.Client.Price, f.Balancer.NICs.Proxy.Price, f.Balancer.NICs.Backend.Price = "", "", ""
		f.Nodes, f.Pairs = t.extent()
	}
	return f
}

// nicFor returns the NIC profile of a variant, without the price, which does not affect a network.
func (t *Topology) nicFor(v spec.Variant) spec.NIC {
	nic := t.exp.NICOf(v)
	nic.Price = ""
	return nic
}

// shapeFor returns the overlay on whose nodes a variant runs. A native variant uses the nodes of another
// variant that has an overlay and the same NIC profile, so that the two differ in the path alone.
func (t *Topology) shapeFor(v spec.Variant) string {
	if shape := t.exp.PathOf(v).Shape(); shape != "" {
		return shape
	}
	for _, other := range t.exp.Spec.Variants {
		if shape := t.exp.PathOf(other).Shape(); shape != "" && t.nicFor(other) == t.nicFor(v) {
			return shape
		}
	}
	return spec.ShapeFlannel
}

// extent returns how many nodes a lab with a balancer has, and how many pairs at most. All such labs of
// an experiment have the same extent, so that their nodes have the same number of CPUs, however many
// backends there are.
func (t *Topology) extent() (nodes, pairs int) {
	for _, v := range t.exp.Spec.Variants {
		if b := t.exp.PathOf(v).Balancer; b != nil {
			nodes = max(nodes, 2+b.Backends)
		}
	}
	for _, w := range t.exp.Spec.Workloads {
		pairs = max(pairs, slices.Max(t.exp.PairsOf(w)))
	}
	return nodes, pairs
}

// Pods returns how many pods each node of a network needs.
func (t *Topology) Pods(fabric int) int {
	if t.fabrics[fabric].Balancer.Backends > 0 {
		return 0
	}
	return t.pods
}

// Served returns the positions of a network that have services in front of them, in the order of the pairs,
// and the transports of these services.
func (t *Topology) Served(fabric int) (all place.Served) {
	for _, v := range t.exp.Spec.Variants {
		if t.exp.PathOf(v).Service == nil || t.FabricOf(v) != fabric {
			continue
		}
		for _, w := range t.exp.Spec.Workloads {
			traffic := w.Traffic()
			if by := (place.Transport{IP: traffic.IP, Protocol: traffic.Protocol}); !slices.Contains(all.Transports, by) {
				all.Transports = append(all.Transports, by)
			}
			for i := range slices.Max(t.exp.PairsOf(w)) {
				if _, server := t.positionsOf(v, i); !slices.Contains(all.Positions, server) {
					all.Positions = append(all.Positions, server)
				}
			}
		}
	}
	return all
}

// Name distinguishes a network from the others of an experiment. It is empty for the only network of a cluster
// or of hosts.
func (f Fabric) Name() string {
	if f.Shape == "" {
		return f.Cluster
	}
	name := f.Shape + "-" + f.NIC.Offload
	if f.NIC.Rate != "" {
		name += "-" + string(f.NIC.Rate)
	}
	if s := f.Service; s.Mode != "" {
		name += fmt.Sprintf("-%s-%d-%d", s.Mode, s.Backends, s.Services)
		if s.OtherBackends > 1 {
			name += fmt.Sprintf("-%d", s.OtherBackends)
		}
	}
	if p := f.Policies; p.Mode != "" {
		name += fmt.Sprintf("-policies-%s-%d", p.Mode, p.Count)
	}
	if b := f.Balancer; b.Backends > 0 {
		name = strings.Join(slices.DeleteFunc([]string{
			"balancer", b.Proxy, strconv.Itoa(b.Backends), f.NIC.Offload, strings.ReplaceAll(strings.TrimPrefix(strings.ReplaceAll(f.rates(), ",", ""), " "), " ", "-"),
		}, func(s string) bool { return s == "" }), "-")
	}
	return name
}

// where names one of several clusters in a sentence, "" if there is only one.
func (f Fabric) where() string {
	if f.Cluster == "" {
		return ""
	}
	return "cluster " + f.Cluster
}

// In adds to an error in which of several clusters it happened.
func (f Fabric) In(err error) error {
	if f.Cluster == "" || err == nil {
		return err
	}
	return fmt.Errorf("%s: %w", f.where(), err)
}

// rates describes the rates of the NICs of a balancer's nodes.
func (f Fabric) rates() string {
	var text string
	for _, role := range []string{spec.RoleClient, spec.RoleProxy, spec.RoleBackend} {
		if rate := cmp.Or(f.Balancer.NICs.Of(role).Rate, f.NIC.Rate); rate != "" {
			text += ", " + role + " " + string(rate)
		}
	}
	return text
}
