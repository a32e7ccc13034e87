package stats

import (
	"cmp"
	"fmt"
	"maps"
	"reflect"
	"slices"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/record"
)

// Limit is what held a cell back, as far as the NICs and cores of its nodes tell. There
// are limits where a NIC's rate is capped or nodes have roles.
type Limit struct {
	Variant  string `json:"variant"`  // name of the variant
	Workload string `json:"workload"` // name of the workload
	Pairs    int    `json:"pairs"`    // number of pairs
	N        int    `json:"n"`        // trials
	// Reached tells that the resources were used to nine tenths or more, the fullest
	// first. If not, they are the one that was fullest.
	Reached   bool       `json:"reached"`
	Resources []Resource `json:"resources"` // what was used most
	// More is what came of more backends; nil where there is nothing to compare.
	More *More `json:"more,omitempty"`
}

// Kinds of resources.
const (
	ResourceNIC  = "nic"
	ResourceCore = "core"
)

// Resource is a NIC or a core, or several that are alike.
type Resource struct {
	Kind string `json:"kind"` // nic or core
	// Nodes that have it, each once.
	Nodes []string `json:"nodes"`
	Roles []string `json:"roles,omitempty"` // their roles in a load balancer
	// Share of a NIC's rate, or of a core's time, that was used: mean of the trials.
	Share float64 `json:"share"`
	Rate  float64 `json:"rate,omitempty"`  // cap of a NIC
	Sends bool    `json:"sends,omitempty"` // whether what fills a NIC is sent, or received
	// Cores are the numbers of a core in the trials.
	Cores  []int `json:"cores,omitempty"`
	Shared bool  `json:"shared,omitempty"` // whether processes of other nodes run on the core too
}

// More compares a cell with that of the next fewer backends.
type More struct {
	Backends int `json:"backends"` // how many the cell has
	// Fewer is how many the variant has that versus names.
	Fewer  int    `json:"fewer"`
	Metric string `json:"metric"` // what they are compared by
	// Versus has the verdict of this one comparison.
	Versus *Versus `json:"versus"`
}

// full is the share from which a resource is a limit. What a NIC counts is a little less
// than what its rate allows: a packet that is to be segmented has its headers once.
const full = 0.9

// limits of all cells that have any.
func (t *table) limits() []Limit {
	var all []Limit
	for _, c := range t.cells {
		if l, ok := c.limit(); ok {
			l.More = t.more(c)
			all = append(all, l)
		}
	}
	return all
}

func (c *cell) limit() (Limit, bool) {
	l := Limit{Variant: c.variant.Name, Workload: c.workload.Name, Pairs: c.pairs}
	type key struct {
		kind, where string
		sends       bool
	}
	sums := make(map[key]*Resource)
	asked := false
	for _, tr := range c.trials {
		if tr == nil || len(tr.Loads) == 0 {
			continue
		}
		l.N++
		add := func(k key, share float64, load record.Load) {
			r := sums[k]
			if r == nil {
				r = &Resource{Kind: k.kind, Sends: k.sends, Rate: load.Rate, Shared: load.Shared}
				if k.kind == ResourceCore {
					r.Rate = 0
				} else {
					r.Shared = false
				}
				sums[k] = r
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
		counted := make(map[key]bool) // a core that nodes share counts once
		for _, load := range tr.Loads {
			asked = asked || load.Rate > 0 || load.Role != ""
			if load.Rate > 0 {
				add(key{ResourceNIC, load.Node, true}, load.Send/load.Rate, load)
				add(key{ResourceNIC, load.Node, false}, load.Receive/load.Rate, load)
			}
			at := key{kind: ResourceCore, where: load.Node}
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
			add(at, share, load)
		}
	}
	if !asked || len(sums) == 0 {
		return l, false
	}
	for _, r := range sums {
		r.Share /= float64(l.N)
		slices.Sort(r.Cores)
	}
	// Of a NIC's two directions the fuller one counts; they are told in the nodes' order.
	var found []Resource
	for k, r := range sums {
		if other := sums[key{k.kind, k.where, !k.sends}]; k.kind == ResourceNIC && (other.Share > r.Share || other.Share == r.Share && k.sends) {
			continue
		}
		found = append(found, *r)
	}
	slices.SortFunc(found, func(a, b Resource) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Nodes[0], b.Nodes[0]))
	})
	// Nodes that are alike are one resource, as long as they are alike in this too.
	for _, r := range found {
		if r.Share < full {
			continue
		}
		l.Reached = true
		alike := slices.IndexFunc(l.Resources, func(o Resource) bool {
			return o.Kind == r.Kind && !o.Shared && !r.Shared && o.Sends == r.Sends && o.Rate == r.Rate && slices.Equal(o.Roles, r.Roles) && len(o.Roles) > 0
		})
		if alike < 0 {
			l.Resources = append(l.Resources, r)
			continue
		}
		o := &l.Resources[alike]
		n := float64(len(o.Nodes))
		o.Share = (o.Share*n + r.Share) / (n + 1)
		o.Nodes = append(o.Nodes, r.Nodes...)
		for _, core := range r.Cores {
			o.Cores = with(o.Cores, core)
		}
	}
	byShare := func(a, b Resource) int { return cmp.Compare(b.Share, a.Share) }
	if slices.SortStableFunc(found, byShare); !l.Reached {
		l.Resources = found[:1]
	}
	slices.SortStableFunc(l.Resources, byShare)
	return l, true
}

// with is a set with one more.
func with[T comparable](all []T, one T) []T {
	if slices.Contains(all, one) {
		return all
	}
	return append(all, one)
}

// capacity is the metric of how much a workload gets through, empty for one that has a
// rate of its own.
func capacity(w v1alpha1.Workload) string {
	switch {
	case w.Stream != nil:
		return record.Throughput
	case w.HTTP != nil && w.HTTP.Requests > 0:
		return record.Completion
	case w.Connect != nil, w.HTTP != nil && !w.HTTP.Page:
		return record.Rate
	}
	return ""
}

// more compares a cell with that of the variant that has the next fewer backends, and
// else nothing of its own.
func (t *table) more(c *cell) *More {
	own := t.exp.PathOf(c.variant).Balancer
	metric := capacity(c.workload)
	if own == nil || metric == "" {
		return nil
	}
	alike := func(v v1alpha1.Variant) bool {
		b := t.exp.PathOf(v).Balancer
		return b != nil && b.Proxy == own.Proxy && b.NICs == own.NICs && t.exp.NICOf(v) == t.exp.NICOf(c.variant) &&
			reflect.DeepEqual(v.Accelerate, c.variant.Accelerate) && maps.Equal(v.Tools, c.variant.Tools)
	}
	var base *cell
	m := &More{Backends: own.Backends, Metric: metric}
	for _, v := range t.exp.Spec.Variants {
		other := t.byKey[key{v.Name, c.workload.Name, c.pairs}]
		if other == nil || !alike(v) {
			continue
		}
		if n := t.exp.PathOf(v).Balancer.Backends; n < own.Backends && n > m.Fewer {
			base, m.Fewer = other, n
		}
	}
	if base == nil {
		return nil
	}
	blocks, ratios, err := logRatios(c, base, metric)
	if err != nil {
		return nil
	}
	r := &Row{Metric: metric, Versus: versus(base.variant.Name, t.mean(blocks, ratios))}
	judge([]*Row{r}, t.exp.Spec.Margin)
	m.Versus = r.Versus
	return m
}
