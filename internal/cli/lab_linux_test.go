package cli

import (
	"context"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/place/topology"
	"slipstream.dev/internal/spec"
)

// TestLabNetworksAfterLeaveOut: a lab makes the networks of the remaining variants, which the plan counts
// from 0.
func TestLabNetworksAfterLeaveOut(t *testing.T) {
	o := runOptions{set: []string{
		"spec.baseline=vxlan",
		"spec.variants=[{name: fastpath, nic: {mtu: 9000}, accelerate: [{fastpath: {}}]}, {name: vxlan}, {name: rps, accelerate: [{rps: {devices: [nic], cpus: all}}]}]",
	}}
	exp, err := o.load([]string{"demo"})
	if err != nil {
		t.Fatal(err)
	}
	lab := &labTarget{exp: exp}
	at := &site{target: lab, probe: func(context.Context) func(v1alpha1.Accelerator) error {
		return func(a v1alpha1.Accelerator) error {
			if a.Fastpath != nil {
				return errors.New("this kernel lacks tcx (since Linux 6.6)")
			}
			return nil
		}
	}}
	if n := len(lab.topology().Fabrics()); n != 2 {
		t.Fatalf("%d networks before, want 2", n)
	}
	if _, err := leaveOut(t.Context(), at, exp, nil, func(string) {}); err != nil {
		t.Fatal(err)
	}
	plan := topology.Of(exp)
	if d := cmp.Diff(plan.Fabrics(), lab.topology().Fabrics()); d != "" || len(plan.Fabrics()) != 1 {
		t.Errorf("networks of the plan and of the lab (-plan +lab):\n%s", d)
	}
	if mtu := lab.topology().Fabrics()[0].NIC.MTU; mtu != 1500 {
		t.Errorf("the lab's network has an MTU of %d, want that of the variants that are left, 1500", mtu)
	}
}

// TestProbePaths: the packets between two pods of a node must pass netfilter if that implements their services or policies.
func TestProbePaths(t *testing.T) {
	policies := func(mode string) *spec.Policies { return &spec.Policies{Count: 1, Mode: mode} }
	for name, c := range map[string]struct {
		path spec.Path
		want string // the shape that netfilter must see
	}{
		"no services and no policies": {spec.Path{Bridge: &spec.Plain{}}, ""},
		"iptables policies":           {spec.Path{Bridge: &spec.Plain{}, Policies: policies(spec.PolicyIPTables)}, "bridge"},
		"nftables policies":           {spec.Path{Routed: &spec.Plain{}, Local: true, Policies: policies(spec.PolicyNFTables)}, "routed"},
		"between nodes":               {spec.Path{Routed: &spec.Plain{}, Policies: policies(spec.PolicyNFTables)}, ""},
		"eBPF policies":               {spec.Path{Bridge: &spec.Plain{}, Policies: policies(spec.PolicyEBPF)}, ""},
		"iptables services":           {spec.Path{Service: &spec.Service{Mode: spec.ServiceIPTables}, Local: true}, spec.ShapeFlannel},
		"services between nodes":      {spec.Path{Service: &spec.Service{Mode: spec.ServiceIPTables}}, ""},
		"eBPF services":               {spec.Path{Service: &spec.Service{Mode: spec.ServiceEBPF}, Local: true}, ""},
	} {
		asked := ""
		missing := errors.New("br_netfilter is missing")
		err := probePaths(func(shape string) error { asked = shape; return missing })(c.path)
		if asked != c.want || errors.Is(err, missing) != (c.want != "") {
			t.Errorf("%s: asked for shape %q, want %q; error %v", name, asked, c.want, err)
		}
	}
}
