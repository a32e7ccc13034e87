package spec

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// switched is an experiment in periods. It has three states, and two variants share one
// of them.
const switched = `apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: switched}
spec:
  baseline: small
  variants:
  - {name: small}
  - {name: large, switch: {to: [resize, large], back: [resize, small], verify: [is, large], settle: 30s}}
  - {name: small-rps, accelerate: [{rps: {devices: [nic], cpus: all}}]}
  - {name: huge, switch: {to: [resize, huge], back: [resize, small], timeout: 1h}}
  - {name: large-rps, accelerate: [{rps: {devices: [nic], cpus: all}}], switch: {to: [resize, large], back: [resize, small], verify: [is, large], settle: 30s}}
  workloads:
  - {name: stream, stream: {duration: 1s}}
`

func TestSwitches(t *testing.T) {
	e := parse(t, switched)
	if diff := cmp.Diff(&Switch{
		To: []string{"resize", "large"}, Back: []string{"resize", "small"}, Verify: []string{"is", "large"},
		Settle: Duration(30 * time.Second), Timeout: Duration(10 * time.Minute),
	}, e.Spec.Variants[1].Switch); diff != "" {
		t.Errorf("switch (-want +got):\n%s", diff)
	}
	var states [][]string
	for _, s := range e.States() {
		var names []string
		for _, v := range s {
			names = append(names, v.Name)
		}
		states = append(states, names)
	}
	if diff := cmp.Diff([][]string{{"small", "small-rps"}, {"large", "large-rps"}, {"huge"}}, states); diff != "" {
		t.Errorf("states (-want +got):\n%s", diff)
	}
	if !e.Switches() || e.Repeats() != 3 || e.Spec.Runs != (Runs{N: 6}) {
		t.Errorf("switches %v, repeats %d, runs %+v", e.Switches(), e.Repeats(), e.Spec.Runs)
	}
	writtenAndRead(t, e.Metadata.Name, e)

	e = parse(t, services)
	if e.Switches() || e.Repeats() != 1 || len(e.States()) != 1 {
		t.Errorf("without a switch: switches %v, repeats %d, %d states", e.Switches(), e.Repeats(), len(e.States()))
	}
}

func TestSwitchErrors(t *testing.T) {
	const huge = "to: [resize, huge], back: [resize, small], timeout: 1h"
	for _, c := range []struct{ old, new, want string }{
		{huge, "back: [resize, small]", "spec.variants[3].switch.to: is missing"},
		{huge, "to: [resize, huge]", "spec.variants[3].switch.back: is missing"},
		{huge, "to: [], back: [x]", "spec.variants[3].switch.to: must be a program and its arguments, such as [ethtool, -K, eth0, gro, off], and has no program"},
		{huge, `to: [""], back: [x]`, "spec.variants[3].switch.to: must be a program and its arguments"},
		{huge, "to: [x], back: [x], verify: []", "spec.variants[3].switch.verify: must be a program and its arguments"},
		{huge, "to: resize huge, back: [x]", "spec.variants[3].switch.to: must be a list, is \"resize huge\""},
		{huge, "to: [x], back: [x], settle: 0s", "spec.variants[3].switch.settle: must be above 0s, is 0s"},
		{huge, "to: [x], back: [x], timeout: 0s", "spec.variants[3].switch.timeout: must be above 0s, is 0s"},
		{"  workloads:", "  runs: auto\n  workloads:", "spec.runs: must be an even number where a variant has a switch, is auto: its pilot alone takes 8 periods of each variant"},
		{"  workloads:", "  runs: 5\n  workloads:", "spec.runs: must be an even number where a variant has a switch, is 5: every second block has the periods of the one before in reverse order"},
		{"  workloads:", "  trialsPerPeriod: 0\n  workloads:", "spec.trialsPerPeriod: must be at least 1, is 0"},
	} {
		text := strings.Replace(switched, c.old, c.new, 1)
		if text == switched {
			t.Fatalf("%q is not in the experiment", c.old)
		}
		_, err := Parse("experiment.yaml", []byte(text), nil)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %s", c.new, err, c.want)
		}
	}

	const on = "switch: {to: [on], back: [off]}"
	for variants, want := range map[string]string{
		"[{name: a}, {name: b}]":                         "spec.trialsPerPeriod: is 2, but no variant has a switch, so there are no periods: spec.runs says how often each trial runs",
		"[{name: a, " + on + "}, {name: b, " + on + "}]": "spec.variants: must have one without a switch or with another one: all have the same switch, so the experiment does not compare it with anything",
	} {
		_, err := Parse("experiment.yaml", []byte(`apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: small}
spec: {baseline: a, variants: `+variants+`, workloads: [{name: w, stream: {duration: 1s}}], trialsPerPeriod: 2}
`), nil)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %s", variants, err, want)
		}
	}
}

// TestParameters: the values of parameters and the names of the variant's hosts are inserted into commands, and nothing else
// in braces changes. The experiment is written with the values, and reads back the same.
func TestParameters(t *testing.T) {
	const text = `apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: parameters}
spec:
  target: {hosts: [{name: vm1, labels: {zone: a}}, {name: vm2, labels: {zone: a}}, {name: vm3, labels: {zone: b}}]}
  baseline: small
  parameters: {group: "", size: large}
  variants:
  - {name: small}
  - {name: near, hosts: {client: {zone: a}, server: {zone: a}}, switch: {to: [resize, "{group}/{client}", "{group}/{server}", "{size}"], back: [resize, "{none} ${client} {size"]}}
  - {name: far, hosts: {client: {zone: a}, server: {zone: b}}, switch: {to: [resize, "{group}/{client}", "{group}/{server}", "{size}"], back: [resize], verify: ["{size}"]}}
  workloads:
  - {name: stream, stream: {duration: 1s}}
`
	e := parse(t, text)
	if diff := cmp.Diff([]string{"group"}, e.Unset()); diff != "" {
		t.Errorf("unset (-want +got):\n%s", diff)
	}
	e, err := Parse("test.yaml", []byte(text), []string{"spec.parameters.group=net"})
	if err != nil {
		t.Fatal(err)
	}
	near, far := e.Spec.Variants[1].Switch, e.Spec.Variants[2].Switch
	if diff := cmp.Diff([][]string{
		{"resize", "net/vm1", "net/vm2", "large"}, {"resize", "{none} $vm1 {size"}, {"resize", "net/vm1", "net/vm3", "large"}, {"large"},
	}, [][]string{near.To, near.Back, far.To, far.Verify}); diff != "" {
		t.Errorf("commands (-want +got):\n%s", diff)
	}
	if unset := e.Unset(); len(unset) > 0 {
		t.Errorf("unset: %v", unset)
	}
	writtenAndRead(t, "parameters", e)

	for set, want := range map[string]string{
		"spec.parameters.group='a; b'":    "spec.parameters.group: must be of letters, digits and . _ - / @ :",
		"spec.parameters.client=x":        "spec.parameters.client: must have another name: {client} is the name of a variant's host",
		"spec.parameters={Group: x}":      "spec.parameters.Group: must be of a-z, 0-9 and - within",
		"spec.parameters.group=[net]":     "spec.parameters.group: must be text",
		"spec.parameters.sizes=small":     "spec.parameters.sizes: no command of a switch refers to {sizes}",
		"spec.variants.near.switch.to=[]": "spec.variants[1].switch.to: must be a program and its arguments",
	} {
		if _, err := Parse("test.yaml", []byte(text), []string{set}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", set, err, want)
		}
	}
}
