package cli

import (
	"context"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/place/topology"
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
