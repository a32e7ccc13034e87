package experiment

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/examples"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// lacking returns the probe of a machine that cannot apply these kinds of accelerators.
func lacking(kinds ...string) func(v1alpha1.Accelerator) error {
	return func(a v1alpha1.Accelerator) error {
		is := map[string]bool{"rps": a.RPS != nil, "rfs": a.RFS != nil, "fastpath": a.Fastpath != nil}
		for _, k := range kinds {
			if is[k] {
				return errors.New("this kernel lacks " + k)
			}
		}
		return nil
	}
}

func preset(t *testing.T, name string, set ...string) *spec.Experiment {
	t.Helper()
	data, ok := examples.Preset(name)
	if !ok {
		t.Fatalf("no preset %s", name)
	}
	exp, err := spec.Parse(name, data, set)
	if err != nil {
		t.Fatal(err)
	}
	return exp
}

func variantNames(exp *spec.Experiment) string {
	var all []string
	for _, v := range exp.Spec.Variants {
		all = append(all, v.Name)
	}
	return strings.Join(all, " ")
}

func TestLeaveOut(t *testing.T) {
	for _, c := range []struct {
		preset string
		lacks  []string
		rest   string
		out    []record.LeftOut
	}{
		{"demo", nil, "native vxlan rps rfs rfs+ fastpath", nil},
		{"demo", []string{"fastpath"}, "native vxlan rps rfs rfs+", []record.LeftOut{{Variant: "fastpath", Why: "this kernel lacks fastpath"}}},
		{"demo", []string{"rfs", "fastpath"}, "native vxlan rps", []record.LeftOut{
			{Variant: "rfs", Why: "this kernel lacks rfs"}, {Variant: "rfs+", Why: "this kernel lacks rfs"}, {Variant: "fastpath", Why: "this kernel lacks fastpath"},
		}},
	} {
		exp := preset(t, c.preset)
		out, err := LeaveOut(exp, nil, lacking(c.lacks...), nil)
		if err != nil {
			t.Errorf("%s without %v: %v", c.preset, c.lacks, err)
		}
		if diff := cmp.Diff(c.out, out); diff != "" {
			t.Errorf("%s without %v leaves out (-want +got):\n%s", c.preset, c.lacks, diff)
		}
		if got := variantNames(exp); got != c.rest {
			t.Errorf("%s without %v has %s, want %s", c.preset, c.lacks, got, c.rest)
		}
	}
}

// TestLeaveOutKeepsComparisons: the rest of an experiment makes the same comparisons as the whole,
// and is a valid experiment by itself, because a resumed run reads it back.
func TestLeaveOutKeepsComparisons(t *testing.T) {
	for _, name := range examples.Names() {
		for _, lacks := range []string{"rps", "rfs", "fastpath"} {
			exp := preset(t, name)
			all := *exp
			out, err := LeaveOut(exp, nil, lacking(lacks), nil)
			if err != nil || len(out) == 0 {
				continue // it has nothing left to compare, or nothing to leave out
			}
			if len(out)+len(exp.Spec.Variants) != len(all.Spec.Variants) {
				t.Errorf("%s without %s: %d of %d variants are left, and %d are left out", name, lacks, len(exp.Spec.Variants), len(all.Spec.Variants), len(out))
			}
			for _, v := range exp.Spec.Variants {
				if was, is := all.BaselineOf(v), exp.BaselineOf(v); was != is {
					t.Errorf("%s without %s compares %s with %q, and with %q before", name, lacks, v.Name, is, was)
				}
			}
			text, err := spec.Marshal(exp)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := spec.Parse(name, text, nil); err != nil {
				t.Errorf("%s without %s: %v", name, lacks, err)
			}
		}
	}
}

func TestLeaveOutFollowsComparisons(t *testing.T) {
	exp := preset(t, "demo", `spec.variants=[{name: vxlan}, {name: rps, accelerate: [{rps: {devices: [nic], cpus: all}}]},
		{name: rfs, accelerate: [{rfs: {devices: [nic]}}]}, {name: rfs+, versus: rfs, accelerate: [{rps: {devices: [nic], cpus: all}}]},
		{name: calico, path: {vxlan: {shape: calico}}}, {name: calico-rfs, versus: calico, path: {vxlan: {shape: calico}}, accelerate: [{rfs: {devices: [nic]}}]}]`)
	out, err := LeaveOut(exp, nil, lacking("rfs"), nil)
	if err != nil {
		t.Fatal(err)
	}
	want := []record.LeftOut{
		{Variant: "rfs", Why: "this kernel lacks rfs"},
		{Variant: "rfs+", Why: "its baseline rfs is left out"},
		{Variant: "calico", Why: "all variants that are compared with it are left out"},
		{Variant: "calico-rfs", Why: "this kernel lacks rfs"},
	}
	if diff := cmp.Diff(want, out); diff != "" {
		t.Errorf("left out (-want +got):\n%s", diff)
	}
	if got := variantNames(exp); got != "vxlan rps" {
		t.Errorf("left: %s", got)
	}
}

func TestLeaveOutFails(t *testing.T) {
	for _, c := range []struct {
		what  string
		set   []string
		named map[string]string
		want  string
	}{
		{"nothing but the baseline", []string{"spec.variants=[{name: vxlan}, {name: fast, accelerate: [{fastpath: {}}]}]"}, nil,
			"demo has nothing left to compare: fast: this kernel lacks fastpath"},
		{"the only variant", []string{"spec.variants=[{name: vxlan, accelerate: [{fastpath: {}}]}]"}, nil, "nothing left to compare"},
		{"a baseline", []string{"spec.baseline=fastpath"}, nil, "nothing left to compare"},
		{"a variant of a flag", nil, map[string]string{"fastpath": "--set spec.variants.fastpath.nic.mtu=9000"},
			"--set spec.variants.fastpath.nic.mtu=9000 names variant fastpath, which cannot be applied here: this kernel lacks fastpath"},
		{"an expectation", []string{"spec.expect=[{variant: fastpath, faster: vxlan}]"}, nil, "spec.expect[0] names variant fastpath"},
		{"an expectation's reference", []string{"spec.expect=[{variant: rps, faster: fastpath}]"}, nil, "spec.expect[0] names variant fastpath"},
	} {
		exp := preset(t, "demo", c.set...)
		before := variantNames(exp)
		if _, err := LeaveOut(exp, c.named, lacking("fastpath"), nil); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want %q", c.what, err, c.want)
		}
		if got := variantNames(exp); got != before {
			t.Errorf("%s: the experiment has %s, had %s", c.what, got, before)
		}
	}
}

// TestLeaveOutPublished: a variant that is left out takes its published figures and its place in
// series along, and the rest is a valid experiment.
func TestLeaveOutPublished(t *testing.T) {
	exp := preset(t, "rps-rfs")
	if _, err := LeaveOut(exp, nil, lacking("rfs"), nil); err != nil {
		t.Fatal(err)
	}
	text, err := spec.Marshal(exp)
	if err != nil {
		t.Fatal(err)
	}
	again, err := spec.Parse("again.yaml", text, nil)
	if err != nil {
		t.Fatal(err)
	}
	// Four values of the baseline, ratios of RPS and RPS-7 with and without "+", and shares of cores: four figures of the
	// baseline, RPS and RPS+, one of RPS-7 and RPS-7+.
	if got := len(again.Spec.Published); got != 4+4*5+3*4+2 {
		t.Errorf("%d published figures are left, want 38", got)
	}
	if got := len(again.Spec.Series); got != 5 {
		t.Errorf("%d series are left, want 5", got)
	}
}

// TestLeaveOutPaths: variants with a path that the target cannot make are left out, and their series are shorter.
func TestLeaveOutPaths(t *testing.T) {
	exp := preset(t, "policies")
	out, err := LeaveOut(exp, nil, lacking(), func(p spec.Path) error {
		if p.Policies != nil && p.Policies.Mode == spec.PolicyIPSet {
			return errors.New("this kernel lacks ipset")
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := variantNames(exp), "vxlan/0 vxlan/iptables/200 vxlan/iptables/2000 vxlan/nftables/200 vxlan/nftables/2000 vxlan/ebpf/200 vxlan/ebpf/2000 "+
		"routed/0 ebpf/0 ebpf/200 ebpf/2000 fastpath/0"; got != want {
		t.Errorf("left are %s, want %s", got, want)
	}
	if len(out) != 6 || out[0] != (record.LeftOut{Variant: "vxlan/ipset/200", Why: "this kernel lacks ipset"}) {
		t.Errorf("left out are %v", out)
	}
	if n := len(exp.Spec.Series); n != 4 {
		t.Errorf("%d series, want iptables, nftables, ebpf and ebpf-routed: %v", n, exp.Spec.Series)
	}
}
