package report

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/testenv/golden"
)

// balancer is a result of four balancers. With 1 and 2 backends their NICs are the
// limit, from 4 on the NIC of the proxy.
func balancer(t *testing.T) *Model {
	t.Helper()
	exp := &spec.Experiment{
		APIVersion: v1alpha1.APIVersion, Kind: spec.KindExperiment,
		Metadata: spec.Metadata{Name: "balancer", Description: "A load balancer with 1 to 8 backends."},
		Spec: spec.Spec{
			Target: spec.Target{Lab: &spec.Lab{Nodes: 2}}, Baseline: "1", Pairs: []int{1}, Margin: 0.02, Runs: spec.Runs{N: 6},
			Workloads: []spec.Workload{{Name: "stream", Stream: &spec.Traffic{Protocol: "tcp", Connections: 8, Duration: spec.Duration(2 * time.Second)}}},
		},
	}
	exp.Spec.Series = []spec.Series{{Name: "haproxy", Axis: spec.AxisBackends, Of: []string{"1", "2", "4", "8"}}}
	var trials []record.Trial
	for _, c := range []struct {
		backends int
		through  float64
		core     float64
	}{{1, 0.38e9, 0.3}, {2, 0.76e9, 0.5}, {4, 0.94e9, 0.7}, {8, 0.941e9, 0.93}} {
		name := fmt.Sprint(c.backends)
		exp.Spec.Variants = append(exp.Spec.Variants, spec.Variant{Name: name, Path: &spec.Path{Balancer: &spec.Balancer{
			Backends: c.backends, Proxy: spec.ProxyHAProxy, NICs: spec.RoleNICs{
				Client: spec.RoleNIC{Rate: "10Gbit"}, Proxy: spec.RoleNIC{Rate: "1Gbit", Price: "0.1 USD"}, Backend: spec.RoleNIC{Rate: "400Mbit", Price: "0.05 USD"},
			},
		}}})
		for block := range 6 {
			through := c.through * (1 + 0.002*float64(block*block%5-2))
			t := record.Trial{
				Block: block + 1, Order: len(trials) + 1, Variant: name, Workload: "stream", Pairs: 1, Attempt: 1, Window: 2, Status: record.StatusOK,
				Metrics: map[string]float64{metrics.Throughput: through},
				Loads: []record.Load{
					{Node: "node0", Role: spec.RoleClient, Send: 1.04 * through, Rate: 10e9, Core: 0, Busy: 0.6, Shared: true},
					{Node: "node1", Role: spec.RoleProxy, Receive: 1.04 * through, Send: 1.03 * through, Rate: 1e9, Core: 1, Busy: c.core, Shared: true},
				},
			}
			for i := range c.backends {
				t.Loads = append(t.Loads, record.Load{
					Node: fmt.Sprintf("node%d", 2+i), Role: spec.RoleBackend, Receive: 1.03 * through / float64(c.backends), Send: 1e6, Rate: 0.4e9, Core: 0, Busy: 0.6, Shared: true,
				})
			}
			trials = append(trials, t)
		}
	}
	summary, err := stats.Analyze(exp, trials)
	if err != nil {
		t.Fatal(err)
	}
	env := record.Environment{Version: "0.1.0", Command: "slipstream run load-balancer", Nodes: []record.Node{
		{Name: "node0", Role: spec.RoleClient, NICRate: 10e9},
		{Name: "node1", Role: spec.RoleProxy, Proxy: "haproxy 2.6.12", NICRate: 1e9},
		{Name: "node2", Role: spec.RoleBackend, NICRate: 0.4e9}, {Name: "node3", Role: spec.RoleBackend, NICRate: 0.4e9},
	}}
	return New(exp, summary, trials, env)
}

// TestGoldenBalancer: the report says what the limit is, beyond which number of backends
// more do not help, what each variant achieves for its price, and which variants are
// dominated.
func TestGoldenBalancer(t *testing.T) {
	m := balancer(t)
	for ending, write := range writers() {
		t.Run(ending, func(t *testing.T) {
			golden.Compare(t, "testdata/balancer."+ending, render(t, write, m))
		})
	}
}

// TestBalancerPage: the page has the same content for readers who cannot see.
func TestBalancerPage(t *testing.T) {
	page := render(t, HTML, balancer(t))
	count := func(pattern string) int { return len(regexp.MustCompile(pattern).FindAllString(page, -1)) }
	for _, tag := range []string{"table", "section", "div", "tr", "td", "th", "p", "nav"} {
		if open, closed := count(`<`+tag+`[\s>]`), count(`</`+tag+`>`); open != closed {
			t.Errorf("%d <%s> and %d </%s>", open, tag, closed, tag)
		}
	}
	if tables, captions := count(`<table`), count(`<caption`); tables != captions {
		t.Errorf("%d tables have %d captions", tables, captions)
	}
	for _, id := range []string{"limit", "price"} {
		if !strings.Contains(page, `href="#`+id+`"`) || !strings.Contains(page, `id="`+id+`"`) {
			t.Errorf("the section %s is not there, or cannot be gone to", id)
		}
	}
}

// TestBounds checks what the report says about a series of balancers, for different
// limits and effects of more backends.
func TestBounds(t *testing.T) {
	m := balancer(t)
	limits, series := m.summary.Limits, &m.summary.Series[0]
	const four = "stream, 1 pair, series haproxy: from 4 backends on, the limit is the proxy: the proxy's NIC receives 98% of 1.00 Gb/s"
	if got, want := m.bounds(), []string{four + "; more backends do not help: 8 have 1.00 (1.00–1.00) times the throughput of 4."}; !cmp.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	series.Points[3].Step.Verdict = stats.Faster
	if got, want := m.bounds()[0], four+"; more backends help nevertheless: "; !strings.HasPrefix(got, want) {
		t.Errorf("%q, want it to begin %q", got, want)
	}
	series.Points[3].Step.Verdict = stats.Inconclusive
	if got, want := m.bounds()[0], four+"; whether more backends help is inconclusive: "; !strings.HasPrefix(got, want) {
		t.Errorf("%q, want it to begin %q", got, want)
	}
	series.Points[3].Step = nil
	if got, want := m.bounds()[0], four+"; whether more backends help is inconclusive."; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	series.Points = series.Points[:3]
	if got, want := m.bounds()[0], four+"; no more were tried."; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	series.Points = series.Points[:2]
	if got, want := m.bounds()[0], "stream, 1 pair, series haproxy: with 2 backends, the most that were tried, the limit is not the proxy: the NICs of 2 backends receive 98% of 0.400 Gb/s."; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	limits[1].Reached = false
	if got, want := m.bounds()[0], "stream, 1 pair, series haproxy: with 2 backends, the most that were tried, no NIC and no core is at its limit."; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	m.summary.Limits = nil
	if got := m.bounds(); got != nil {
		t.Errorf("where nobody knows what held it back: %q", got)
	}
	m.summary.Limits, m.summary.Series = limits, nil
	if got := m.bounds(); got != nil {
		t.Errorf("of no series: %q", got)
	}
}

func TestUse(t *testing.T) {
	for want, r := range map[string]stats.Resource{
		"node1's NIC sends 91% of 2.50 Gb/s":                  {Kind: stats.ResourceNIC, Nodes: []string{"node1"}, Share: 0.91, Rate: 2.5e9, Sends: true},
		"the client's NIC receives 91% of 1.00 Gb/s":          {Kind: stats.ResourceNIC, Nodes: []string{"node0"}, Roles: []string{"client"}, Share: 0.91, Rate: 1e9},
		"the NIC of the backend node3 sends 91% of 1.00 Gb/s": {Kind: stats.ResourceNIC, Nodes: []string{"node3"}, Roles: []string{"backend"}, Share: 0.91, Rate: 1e9, Sends: true},
		"core 1 of the proxy is 97% busy":                     {Kind: stats.ResourceCore, Nodes: []string{"node1"}, Roles: []string{"proxy"}, Share: 0.97, Cores: []int{1}, Shared: true},
		"core 0 of the client and the backends is 97% busy":   {Kind: stats.ResourceCore, Nodes: []string{"node0", "node2", "node3"}, Roles: []string{"client", "backend"}, Share: 0.97, Cores: []int{0}, Shared: true},
		"a core of the backends node2 and node4 is 97% busy":  {Kind: stats.ResourceCore, Nodes: []string{"node2", "node4"}, Roles: []string{"backend"}, Share: 0.97, Cores: []int{4, 9}},
		"a core of all nodes is 97% busy":                     {Kind: stats.ResourceCore, Nodes: []string{"node0", "node1"}, Share: 0.97, Cores: []int{0, 1}, Shared: true},
		"core 5 of node1 is 97% busy":                         {Kind: stats.ResourceCore, Nodes: []string{"node1"}, Share: 0.97, Cores: []int{5}},
	} {
		if got := resourceText(r); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// TestLocalPodsAreNotTheOverlay checks that a report does not attribute the results of pods on one node to VXLAN, which their packets
// do not use.
func TestLocalPodsAreNotTheOverlay(t *testing.T) {
	f := demo(t)
	for i, v := range f.exp.Spec.Variants {
		if v.Name == "vxlan" {
			f.exp.Spec.Variants[i].Path = &spec.Path{VXLAN: &spec.VXLAN{Shape: spec.ShapeCalico}, Local: true}
		}
	}
	if got := (&Model{exp: f.exp}).overlayName("vxlan"); got != "vxlan" {
		t.Errorf("the overlay's name is %q, want that of the variant", got)
	}
}
