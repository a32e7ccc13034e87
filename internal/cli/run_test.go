package cli

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/examples"
	"slipstream.dev/internal/spec"
)

// TestRunLeavesOut: on a machine without the fast path, a run says so and measures the rest, unless a
// flag names the missing variant.
func TestRunLeavesOut(t *testing.T) {
	at := &site{probe: func(context.Context) func(v1alpha1.Accelerator) error {
		return func(a v1alpha1.Accelerator) error {
			if a.Fastpath != nil {
				return errors.New("this kernel lacks tcx (since Linux 6.6)")
			}
			return nil
		}
	}}
	for set, want := range map[string]string{
		"":                                     "",
		"spec.pairs=[1]":                       "",
		"spec.variants.rps.nic.mtu=9000":       "",
		"spec.variants.fastpath.nic.mtu=9000":  "--set spec.variants.fastpath.nic.mtu=9000 names variant fastpath",
		"spec.variants[fastpath].nic.mtu=9000": "--set spec.variants[fastpath].nic.mtu=9000 names variant fastpath",
		"spec.variants[0].nic.mtu=9000":        "",
		"spec.variants=[{name: vxlan}, {name: rps, accelerate: [{rps: {devices: [nic], cpus: all}}]}, {name: fastpath, accelerate: [{fastpath: {}}]}]": "names variant fastpath",
	} {
		var o runOptions
		if set != "" {
			o.set = []string{set}
		}
		exp, err := o.load([]string{"demo"})
		if err != nil {
			t.Fatal(err)
		}
		var said []string
		out, err := leaveOut(t.Context(), at, exp, o.set, func(text string) { said = append(said, text) })
		if want != "" {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("--set %s: error %v, want %q", set, err, want)
			}
			continue
		}
		if err != nil || len(out) != 1 || strings.Join(said, "\n") != "left out here: fastpath: this kernel lacks tcx (since Linux 6.6)" {
			t.Errorf("--set %s: left out %v, said %q, error %v", set, out, said, err)
		}
	}
	exp, err := runOptions{}.load([]string{"demo"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // as by Ctrl-C during the probe, which then fails
	if _, err := leaveOut(ctx, at, exp, nil, func(text string) { t.Errorf("says %q of a run that was stopped", text) }); !errors.Is(err, context.Canceled) {
		t.Errorf("stopped: error %v", err)
	}
}

// TestOn: an experiment can run on a target other than its file's, if that target has its paths. Hosts take the labels
// and prices of the file's hosts.
func TestOn(t *testing.T) {
	file := filepath.Join(t.TempDir(), "native.yaml")
	text := "apiVersion: slipstream.dev/v1alpha1\nkind: Experiment\nmetadata: {name: native}\nspec:\n  path: {native: {}}\n  baseline: plain\n" +
		"  variants: [{name: plain}]\n  workloads: [{name: stream, stream: {duration: 1s}}]\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, on string
		set      []string
		want     string // text of the error
		hosts    []spec.Host
	}{
		{name: file, on: "hosts:a,me@b", hosts: []spec.Host{{Name: "a"}, {Name: "b", User: "me"}}},
		{name: file, on: "hosts:a,b", set: []string{"spec.target.hosts.b.port=2222"}, hosts: []spec.Host{{Name: "a"}, {Name: "b", Port: 2222}}},
		{name: "zones", on: "hosts:x,me@y,z", hosts: []spec.Host{
			{Name: "x", Labels: map[string]string{"zone": "a"}}, {Name: "y", User: "me", Labels: map[string]string{"zone": "a"}}, {Name: "z", Labels: map[string]string{"zone": "b"}},
		}},
		{name: "instances-hosts", on: "hosts:x,y,z,w", set: []string{"spec.target.hosts.y.price=0.07 USD"}, hosts: []spec.Host{
			{Name: "x", Labels: map[string]string{"type": "small"}, Price: "0.05 USD"}, {Name: "y", Labels: map[string]string{"type": "small"}, Price: "0.07 USD"},
			{Name: "z", Labels: map[string]string{"type": "large"}, Price: "0.1 USD"}, {Name: "w", Labels: map[string]string{"type": "large"}, Price: "0.1 USD"},
		}},
		{name: "zones", on: "hosts:x,y", want: "one with zone=b is missing"},
		{name: "page", on: "hosts:a,b", set: []string{"spec.variants=[{name: direct}]"}, hosts: []spec.Host{{Name: "a"}, {Name: "b"}}},
		{name: "an-linux", on: "hosts:x,y,z,w", hosts: []spec.Host{
			{Name: "x", Labels: map[string]string{"accelerated-networking": "off"}}, {Name: "y", Labels: map[string]string{"accelerated-networking": "off"}},
			{Name: "z", Labels: map[string]string{"accelerated-networking": "on"}}, {Name: "w", Labels: map[string]string{"accelerated-networking": "on"}},
		}},
		{name: file, on: "kubernetes"},
		{name: "kubernetes", on: "lab", want: "spec.path.pod: is for kubernetes; a lab has the paths native"},
		{name: "demo", on: "hosts:a,b", want: "spec.path.vxlan: hosts have no such path; they have native"},
		{name: file, on: "hosts:a", want: "--on hosts:a: must have at least two hosts, one for clients and one for servers, has one"},
		{name: file, on: "hosts:a,-oProxyCommand=x", want: "must be of letters, digits"},
		{name: file, on: "vm", want: "--on vm: must be lab, kubernetes or hosts:CLIENT,SERVER"},
	} {
		exp, err := runOptions{on: c.on, set: c.set}.load([]string{c.name})
		switch {
		case c.want != "":
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s --on %s: %v, want %s", c.name, c.on, err, c.want)
			}
		case err != nil:
			t.Errorf("%s --on %s: %v", c.name, c.on, err)
		default:
			if diff := cmp.Diff(c.hosts, exp.Spec.Target.Hosts); diff != "" || exp.Spec.Target.Lab != nil {
				t.Errorf("%s --on %s (-want +got):\n%s", c.name, c.on, diff)
			}
		}
	}
}

// TestPresetsOn: every preset runs on a target, or the error says which ones do. In a cluster, the pod network takes the
// place of VXLAN.
func TestPresetsOn(t *testing.T) {
	runs := map[string]string{ // L: lab, K: kubernetes, H: hosts
		"an-linux": "KH", "an-vms": "LKH", "an-windows": "KH", "applications": "LK", "cloud-2015": "L", "cni": "K", "demo": "LK", "endpoint-changes": "L", "engine-parity": "L", "fastpath": "L", "fastpath-local": "L", "fastpath-routed": "L", "fastpath-tools": "L",
		"instances": "L", "instances-hosts": "KH", "kubernetes": "K", "kubernetes-short": "K", "load-balancer": "L", "mesh": "LKH", "message-sizes": "LK", "mixed": "LK", "mtu": "L", "overlay-cost": "L",
		"overlays": "L", "overlays-by-rate": "L", "page": "L", "placement": "KH", "policies": "L", "rps-rfs": "LK", "script": "L", "service-routing": "L", "service-routing-short": "L", "service-routing-kubernetes": "K",
		"tool-parity": "LK", "underload-parity": "LK", "zones": "KH",
	}
	for _, name := range examples.Names() {
		for letter, on := range map[string]string{"L": "lab", "K": "kubernetes", "H": "hosts:a,b,c,d"} {
			exp, err := runOptions{on: on}.load([]string{name})
			if strings.Contains(runs[name], letter) {
				if err != nil {
					t.Errorf("%s --on %s: %v", name, on, err)
					continue
				}
				for _, v := range exp.Spec.Variants {
					if path := exp.PathOf(v); on == "kubernetes" && path.Pod == nil && path.Native == nil && path.Service == nil {
						t.Errorf("%s --on %s: %s has the path %s", name, on, v.Name, path)
					}
				}
				continue
			}
			if err == nil {
				t.Errorf("%s --on %s: no error", name, on)
				continue
			}
			_, named, _ := strings.Cut(err.Error(), name+" does not run with --on "+on+"; presets that do: ")
			named, rest, many := strings.Cut(named, ", and ")
			if n := strings.Count(named, ", ") + 1; n > 8 || many && (!strings.HasPrefix(named, "demo") || !strings.HasSuffix(rest, " others (slipstream run --list)")) {
				t.Errorf("%s --on %s: names %d presets:\n%v", name, on, n, err)
			}
			for _, other := range strings.Split(named, ", ") {
				if !strings.Contains(runs[other], letter) {
					t.Errorf("%s --on %s: names %q:\n%v", name, on, other, err)
				}
			}
		}
	}
	_, err := runOptions{on: "kubernetes", set: []string{"spec.pairs=[0]"}}.load([]string{"rps-rfs"})
	if err == nil || strings.Contains(err.Error(), "presets that do") {
		t.Errorf("a mistake in another flag: %v", err)
	}
}

// TestLocalPodsOnACluster checks that pods of one node do not become pods of two in a cluster.
func TestLocalPodsOnACluster(t *testing.T) {
	exp := &spec.Experiment{}
	exp.Spec.Variants = []spec.Variant{
		{Name: "between", Path: &spec.Path{VXLAN: &spec.VXLAN{Shape: spec.ShapeFlannel}}},
		{Name: "local", Path: &spec.Path{VXLAN: &spec.VXLAN{Shape: spec.ShapeFlannel}, Local: true}},
	}
	if got := vxlanPaths(exp); !slices.Equal(got, []string{"spec.variants.between.path"}) {
		t.Errorf("these fields become the path pod: %q", got)
	}
}
