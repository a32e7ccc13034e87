package stats

import (
	"cmp"
	"fmt"
	"slices"

	"slipstream.dev/internal/record"
)

// Limit says which NICs or cores limited a combination of variant, workload and pairs. It exists only if a
// NIC has a rate limit or nodes have roles.
type Limit struct {
	Variant  string `json:"variant"`  // name of the variant
	Workload string `json:"workload"` // name of the workload
	Pairs    int    `json:"pairs"`    // number of pairs
	N        int    `json:"n"`        // number of trials
	// Reached is true if a resource was used to nine tenths or more. Then Resources has all of these, the busiest
	// first; otherwise it has the busiest one.
	Reached   bool       `json:"reached"`
	Resources []Resource `json:"resources"` // the busiest NICs and cores
}

// Kinds of resources.
const (
	ResourceNIC  = "nic"
	ResourceCore = "core"
)

// Resource is a NIC or a core, or several equal ones.
type Resource struct {
	Kind string `json:"kind"` // what it is: nic or core
	// Nodes that have the resource, each once.
	Nodes []string `json:"nodes"`
	Roles []string `json:"roles,omitempty"` // their roles in a load balancer
	// Share is the used share of a NIC's rate, or of a core's time: mean of the trials.
	Share float64 `json:"share"`
	Rate  float64 `json:"rate,omitempty"`  // rate limit of a NIC
	Sends bool    `json:"sends,omitempty"` // true if the share of a NIC is that of sending, false if of receiving
	// Cores are the numbers of the core; they may differ between trials.
	Cores  []int `json:"cores,omitempty"`
	Shared bool  `json:"shared,omitempty"` // whether processes of other nodes run on the core too
}

// full is the share of use from which a resource counts as a limit. The counters of a NIC at its rate limit
// show a little less than that rate, because they count the headers of a GSO packet only once.
const full = 0.9

// limits returns the limits of all cells that have any.
func (t *table) limits() []Limit {
	var all []Limit
	for _, c := range t.cells {
		if l, ok := c.limit(); ok {
			all = append(all, l)
		}
	}
	return all
}

// limit returns the limit of a cell, or false if no NIC has a rate limit and no node has a role.
func (c *cell) limit() (Limit, bool) {
	l := Limit{Variant: c.variant.Name, Workload: c.workload.Name, Pairs: c.pairs}
	used, wanted := usage{}, false
	for _, tr := range c.all() {
		if len(tr.Loads) == 0 {
			continue
		}
		l.N++
		used.addTrial(tr.Loads)
		wanted = wanted || slices.ContainsFunc(tr.Loads, func(load record.Load) bool { return load.Rate > 0 || load.Role != "" })
	}
	if !wanted || len(used) == 0 {
		return l, false
	}
	all := used.resources(l.N)
	byShare := func(a, b Resource) int { return cmp.Compare(b.Share, a.Share) }
	if l.Resources = reached(all); len(l.Resources) == 0 {
		slices.SortStableFunc(all, byShare)
		l.Resources = all[:1]
		return l, true
	}
	l.Reached = true
	slices.SortStableFunc(l.Resources, byShare)
	return l, true
}

// usage adds up the resources that the trials of a cell used.
type usage map[resourceKey]*Resource

// resourceKey identifies a resource. A NIC is identified by its node, and has two directions. A core is
// identified by its node, or by its number if nodes share it.
type resourceKey struct {
	kind, where string
	sends       bool
}

func (u usage) addTrial(loads []record.Load) {
	counted := make(map[resourceKey]bool) // a core that nodes share counts once
	for _, load := range loads {
		if load.Rate > 0 {
			u.add(resourceKey{ResourceNIC, load.Node, true}, load.Send/load.Rate, load)
			u.add(resourceKey{ResourceNIC, load.Node, false}, load.Receive/load.Rate, load)
		}
		at := resourceKey{kind: ResourceCore, where: load.Node}
		switch {
		case load.Busy == 0:
			continue
		case load.Shared && load.Role != "":
			at.where = fmt.Sprint(load.Core)
		case load.Shared:
			at.where = ""
		}
		share := load.Busy
		if counted[at] {
			share = 0
		}
		counted[at] = true
		u.add(at, share, load)
	}
}

func (u usage) add(k resourceKey, share float64, load record.Load) {
	r := u[k]
	if r == nil {
		r = &Resource{Kind: k.kind, Sends: k.sends}
		if k.kind == ResourceCore {
			r.Shared = load.Shared
		} else {
			r.Rate = load.Rate
		}
		u[k] = r
	}
	r.Share += share
	r.Nodes = with(r.Nodes, load.Node)
	if load.Role != "" {
		r.Roles = with(r.Roles, load.Role)
	}
	if k.kind == ResourceCore {
		r.Cores = with(r.Cores, load.Core)
	}
}

// resources returns the mean use over n trials, in the order of the nodes. For a NIC, only the busier
// direction counts.
func (u usage) resources(n int) []Resource {
	for _, r := range u {
		r.Share /= float64(n)
		slices.Sort(r.Cores)
	}
	var all []Resource
	for k, r := range u {
		if other := u[resourceKey{k.kind, k.where, !k.sends}]; k.kind == ResourceNIC && (other.Share > r.Share || other.Share == r.Share && k.sends) {
			continue
		}
		all = append(all, *r)
	}
	slices.SortFunc(all, func(a, b Resource) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Nodes[0], b.Nodes[0]))
	})
	return all
}

// reached returns the resources that were a limit. It merges those of the same kind, direction and rate whose nodes
// have the same roles, unless nodes share them.
func reached(all []Resource) []Resource {
	var limits []Resource
	for _, r := range all {
		if r.Share < full {
			continue
		}
		alike := slices.IndexFunc(limits, func(o Resource) bool {
			return o.Kind == r.Kind && !o.Shared && !r.Shared && o.Sends == r.Sends && o.Rate == r.Rate && slices.Equal(o.Roles, r.Roles) && len(o.Roles) > 0
		})
		if alike < 0 {
			limits = append(limits, r)
			continue
		}
		o := &limits[alike]
		n := float64(len(o.Nodes))
		o.Share = (o.Share*n + r.Share) / (n + 1)
		o.Nodes = append(o.Nodes, r.Nodes...)
		for _, core := range r.Cores {
			o.Cores = with(o.Cores, core)
		}
	}
	return limits
}

// with adds an element to a set.
func with[T comparable](all []T, one T) []T {
	if slices.Contains(all, one) {
		return all
	}
	return append(all, one)
}
