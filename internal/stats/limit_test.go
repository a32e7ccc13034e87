package stats

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// loaded adds loads to trials.
func loaded(ts []record.Trial, loads ...record.Load) []record.Trial {
	for i := range ts {
		ts[i].Loads = loads
	}
	return ts
}

// nic returns the load of a node that receives and sends at the given shares of 1 Gbit/s.
func nic(node, role string, receive, send float64) record.Load {
	return record.Load{Node: node, Role: role, Receive: receive * 1e9, Send: send * 1e9, Rate: 1e9}
}

func limitsOf(t *testing.T, exp *spec.Experiment, ts ...[]record.Trial) []Limit {
	t.Helper()
	var all []record.Trial
	for _, one := range ts {
		all = append(all, one...)
	}
	s, err := Analyze(exp, all)
	if err != nil {
		t.Fatal(err)
	}
	return s.Limits
}

func TestLimits(t *testing.T) {
	exp := experiment("base")
	core := func(l record.Load, core int, busy float64, shared bool) record.Load {
		l.Core, l.Busy, l.Shared = core, busy, shared
		return l
	}
	for name, c := range map[string]struct {
		loads   []record.Load
		reached bool
		want    []Resource
	}{
		"the fuller direction, the fullest first": {
			[]record.Load{nic("node0", "client", 0.1, 0.91), nic("node1", "proxy", 0.97, 0.95), nic("node2", "backend", 0.89, 0)}, true,
			[]Resource{
				{Kind: ResourceNIC, Nodes: []string{"node1"}, Roles: []string{"proxy"}, Share: 0.97, Rate: 1e9},
				{Kind: ResourceNIC, Nodes: []string{"node0"}, Roles: []string{"client"}, Share: 0.91, Rate: 1e9, Sends: true},
			},
		},
		"backends are one": {
			[]record.Load{nic("node1", "proxy", 0, 0.5), nic("node2", "backend", 0.1, 0.94), nic("node3", "backend", 0.1, 0.96)}, true,
			[]Resource{{Kind: ResourceNIC, Nodes: []string{"node2", "node3"}, Roles: []string{"backend"}, Share: 0.95, Rate: 1e9, Sends: true}},
		},
		"nodes without roles are not": {
			[]record.Load{nic("node0", "", 0, 0.95), nic("node1", "", 0.95, 0)}, true,
			[]Resource{
				{Kind: ResourceNIC, Nodes: []string{"node0"}, Share: 0.95, Rate: 1e9, Sends: true},
				{Kind: ResourceNIC, Nodes: []string{"node1"}, Share: 0.95, Rate: 1e9},
			},
		},
		"a core that is shared is one": {
			[]record.Load{core(nic("node0", "client", 0, 0.2), 0, 0.95, true), core(nic("node1", "proxy", 0, 0.2), 1, 0.4, true), core(nic("node2", "backend", 0, 0.2), 0, 0.95, true)}, true,
			[]Resource{{Kind: ResourceCore, Nodes: []string{"node0", "node2"}, Roles: []string{"client", "backend"}, Share: 0.95, Cores: []int{0}, Shared: true}},
		},
		"a core of one's own": {
			[]record.Load{core(nic("node0", "client", 0, 0.2), 1, 0.5, false), core(nic("node1", "proxy", 0, 0.2), 3, 0.99, false)}, true,
			[]Resource{{Kind: ResourceCore, Nodes: []string{"node1"}, Roles: []string{"proxy"}, Share: 0.99, Cores: []int{3}}},
		},
		"none": {
			[]record.Load{nic("node0", "client", 0, 0.3), nic("node1", "proxy", 0.6, 0.3)}, false,
			[]Resource{{Kind: ResourceNIC, Nodes: []string{"node1"}, Roles: []string{"proxy"}, Share: 0.6, Rate: 1e9}},
		},
	} {
		got := limitsOf(t, exp, loaded(trials("base", "stream", 1, metrics.Throughput, 1, 1, 1), c.loads...))
		want := []Limit{{Variant: "base", Workload: "stream", Pairs: 1, N: 3, Reached: c.reached, Resources: c.want}}
		if diff := cmp.Diff(want, got, cmpopts.EquateApprox(0, 1e-9)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	// If no NIC has a rate limit and no node has a role, cores are not reported
	// either.
	if got := limitsOf(t, exp, loaded(trials("base", "stream", 1, metrics.Throughput, 1), record.Load{Node: "node0", Busy: 1})); got != nil {
		t.Errorf("limits without a cap: %+v", got)
	}
}
