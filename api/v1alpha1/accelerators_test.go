package v1alpha1

import (
	"fmt"
	"slices"
	"testing"
)

// TestKinds: what each kind of accelerator tells about itself.
func TestKinds(t *testing.T) {
	for _, c := range []struct {
		a    PolicyAccelerator
		want string // kind, label, devices, whether it steers, its parts on a node and in pods
	}{
		{ForPolicy(Accelerator{RPS: &RPS{Devices: []string{"nic", "pod"}, CPUs: "0"}})[0], "rps, RPS, [nic pod], true, [RPS on nic over CPUs 0], [RPS on pod over CPUs 0]"},
		{ForPolicy(Accelerator{RFS: &RFS{Devices: []string{"pod"}, Entries: 64}})[0], "rfs, RFS, [pod], true, [RFS on ], [RFS on pod]"}, // the machine's table
		{ForPolicy(Accelerator{RFS: &RFS{Devices: []string{"nic"}, Entries: 64}})[0], "rfs, RFS, [nic], true, [RFS on nic], []"},
		{ForPolicy(Accelerator{Fastpath: &Fastpath{}})[0], "fastpath, the fast path, [nic overlay], false, [the eBPF fast path], []"},
		{PolicyAccelerator{VF: &VF{}}, "vf, no accelerator, [], false, [], []"},
		{PolicyAccelerator{}, ", no accelerator, [], false, [], []"},
	} {
		all := []PolicyAccelerator{c.a}
		got := fmt.Sprintf("%s, %s, %s, %v, %s, %s", c.a.Kind(), c.a.Label(), c.a.Devices(), c.a.Steers(), PartOf(all, false), PartOf(all, true))
		if got != c.want {
			t.Errorf("%s, want %s", got, c.want)
		}
	}
	if got := KindNames[Accelerator](); !slices.Equal(got, []string{"rps", "rfs", "fastpath"}) {
		t.Errorf("kinds of a variant: %q", got)
	}
}
