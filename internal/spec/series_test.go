package spec

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const seriesExperiment = `apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: test}
spec:
  baseline: i/1
  variants:
  - {name: i/1, path: {service: {mode: iptables, backends: 1}}, nic: {rate: 1Gbit, price: 0.1 USD}}
  - {name: i/9, path: {service: {mode: iptables, backends: 9}}, nic: {rate: 2Gbit, price: 0.2 USD}}
  - {name: e/1, path: {service: {mode: ebpf}}}
  - {name: e/9, path: {service: {mode: ebpf, backends: 9}}}
  - {name: lb, path: {balancer: {backends: 2}}}
  - {name: vxlan}
  workloads: [{name: stream, stream: {duration: 1s, connections: 2}}]
  series: `

// TestSeries: every error names what the file says, and there is one for each mistake.
func TestSeries(t *testing.T) {
	for text, want := range map[string]string{
		"[{name: i, axis: backends, of: [i/1, i/9]}, {name: e, axis: backends, of: [e/9, e/1, lb], versus: i}]": "",
		"[{name: i, axis: rate, of: [i/1, i/9]}, {name: price, axis: price, of: [i/9, i/1]}]":                   "",
		"[{name: a, axis: pairs, of: [vxlan]}, {name: b, axis: pairs, of: [i/1], versus: a}]":                   "",
		"[{name: a, axis: size, of: [vxlan]}, {name: b, axis: connections, of: [vxlan]}]":                       "",

		"[{axis: pairs, of: [vxlan]}]":                                                           "spec.series[0].name: is missing",
		"[{name: A b, axis: pairs, of: [vxlan]}]":                                                `spec.series[0].name: must be of A-Z, a-z, 0-9 and + / . _ -, the first a letter or digit, is "A b"`,
		"[{name: a, axis: pairs, of: [vxlan]}, {name: a, axis: pairs, of: [lb]}]":                `spec.series[1].name: must be unique, "a" is spec.series[0].name too`,
		"[{name: a, axis: pairs, of: [vxlan]}, {name: A, axis: pairs, of: [lb]}]":                `spec.series[1].name: must be unique, "A" is spec.series[0].name too`,
		"[{name: a, of: [vxlan]}]":                                                               "spec.series[0].axis: is missing",
		"[{name: a, axis: pods, of: [vxlan]}]":                                                   `spec.series[0].axis: must be backends, policies, rate, price, size, connections or pairs, is "pods"`,
		"[{name: a, axis: backends}]":                                                            "spec.series[0].of: is missing",
		"[{name: a, axis: backends, of: []}]":                                                    "spec.series[0].of: must have at least one variant, is empty",
		"[{name: a, axis: backends, of: {i/1: 1}}]":                                              "spec.series[0].of: must be a list, is a mapping",
		"[{name: a, axis: backends, of: [i/1, i/8]}]":                                            `spec.series[0].of[1]: no variant has the name "i/8"; did you mean i/1 or i/9?`,
		"[{name: a, axis: backends, of: [i/1, i/9, e/9]}]":                                       "spec.series[0].of[2]: variant e/9 has the same backends as i/9: 9",
		"[{name: a, axis: backends, of: [i/1, i/1]}]":                                            "spec.series[0].of[1]: is variant i/1 again",
		"[{name: a, axis: backends, of: [i/1, vxlan]}]":                                          "spec.series[0].of[1]: variant vxlan has no backends: its path is vxlan/flannel",
		"[{name: a, axis: rate, of: [i/1, vxlan]}]":                                              "spec.series[0].of[1]: variant vxlan has no rate of its NIC",
		"[{name: a, axis: price, of: [i/1, vxlan]}]":                                             "spec.series[0].of[1]: variant vxlan has no price",
		"[{name: a, axis: pairs, of: [i/1, i/9]}]":                                               "spec.series[0].of: must be one variant, as the pairs do not differ from variant to variant, is 2: make a series of each",
		"[{name: a, axis: size, of: [i/1, i/9]}]":                                                "spec.series[0].of: must be one variant, as the sizes do not differ from variant to variant, is 2: make a series of each",
		"[{name: ab, axis: pairs, of: [vxlan], versus: ac}]":                                     `spec.series[0].versus: no series has the name "ac"; did you mean ab?`,
		"[{name: a, axis: pairs, of: [vxlan], versus: a}]":                                       "spec.series[0].versus: must be another series, is the same",
		"[{name: a, axis: pairs, of: [vxlan]}, {name: b, axis: backends, of: [i/1], versus: a}]": `spec.series[1].versus: must be a series over backends, "a" is over pairs`,
		"[{name: a, axis: pairs, of: [vxlan], over: 3}]":                                         "spec.series[0].over: unknown field",
	} {
		e, err := Parse("test.yaml", []byte(seriesExperiment+text+"\n"), nil)
		if want != "" {
			if err == nil || !strings.Contains(err.Error(), want) || len(strings.Split(err.Error(), "\n")) > 1 {
				t.Errorf("%s:\n%v\nwant only %q", text, err, want)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		writtenAndRead(t, text, e)
	}
}

// TestSeriesOfWhatWasReplaced: an override that replaces variants removes those that are gone from the
// series, and with the last of them the series.
func TestSeriesOfWhatWasReplaced(t *testing.T) {
	const series = "[{name: i, axis: backends, of: [i/1, i/9]}, {name: e, axis: backends, of: [e/1, e/9], versus: i}, {name: v, axis: pairs, of: [vxlan]}]"
	const left = "spec.variants=[{name: i/1, path: {service: {mode: iptables}}}, {name: e/9, path: {service: {mode: ebpf, backends: 9}}}]"
	read := func(set ...string) ([]Series, error) {
		e, err := Parse("test.yaml", []byte(seriesExperiment+series+"\n"), set)
		if err != nil {
			return nil, err
		}
		return e.Spec.Series, nil
	}
	got, err := read(left)
	if diff := cmp.Diff([]Series{{Name: "i", Axis: AxisBackends, Of: []string{"i/1"}}, {Name: "e", Axis: AxisBackends, Of: []string{"e/9"}, Versus: "i"}}, got); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	got, err = read("spec.variants=[{name: e/1, path: {service: {mode: ebpf}}}]", "spec.baseline=e/1")
	if diff := cmp.Diff([]Series{{Name: "e", Axis: AxisBackends, Of: []string{"e/1"}}}, got); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	if got, err := read(left, "spec.series=[{name: v, axis: pairs, of: [vxlan]}]"); err == nil || !strings.Contains(err.Error(), `no variant has the name "vxlan"`) {
		t.Errorf("a series that was set by hand: %v, %v", got, err)
	}
}

// TestSeriesOfMistakes: if a mistake elsewhere in the file leaves a variant without a value, only that
// mistake is reported.
func TestSeriesOfMistakes(t *testing.T) {
	const onHosts = `apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: test}
spec:
  target: {hosts: [{name: a, price: 0.1 USD}, {name: b, price: 0.1 USD}, {name: c, labels: {type: large}, price: 0.3 USD}]}
  baseline: small
  variants: [{name: small}, {name: large, hosts: {client: {type: large}}}]
  workloads: [{name: stream, stream: {duration: 1s}}]
  series: [{name: types, axis: price, of: [small, large]}]
`
	e := parse(t, onHosts)
	for i, want := range []float64{0.2, 0.4} {
		if got := e.ValueOn(AxisPrice, e.Spec.Variants[i], Workload{}, 0); got != want {
			t.Errorf("the price of %s is %g, want %g", e.Spec.Variants[i].Name, got, want)
		}
	}
	for _, c := range []struct{ old, new, want string }{
		{", labels: {type: large}", "", "spec.variants[1].hosts: needs one host with the labels of client and another with those of server; one with type=large is missing"},
		{", {name: b, price: 0.1 USD}, {name: c, labels: {type: large}, price: 0.3 USD}", "", "spec.target.hosts: must have at least two hosts, one for clients and one for servers, has one"},
		{"0.3 USD", "'0.3'", `spec.target.hosts[2].price: must be an amount and its currency such as 0.085 USD, is "0.3"`},
	} {
		_, err := Parse("test.yaml", []byte(strings.Replace(onHosts, c.old, c.new, 1)), nil)
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "spec.series") {
			t.Errorf("%q in place of %q:\n%v\nwant %q alone", c.new, c.old, err, c.want)
		}
	}
}

// TestValueOn checks the positions of trials on each axis.
func TestValueOn(t *testing.T) {
	e := parse(t, seriesExperiment+"[]\n")
	w := e.Spec.Workloads[0]
	for _, c := range []struct {
		variant int
		axis    string
		want    float64
	}{
		{1, AxisBackends, 9}, {2, AxisBackends, 1}, {4, AxisBackends, 2}, {5, AxisBackends, 0}, {1, AxisRate, 2e9}, {5, AxisRate, 0},
		{1, AxisPrice, 0.4}, {5, AxisPrice, 0}, {5, AxisSize, 131072}, {5, AxisConnections, 2}, {5, AxisPairs, 16}, {5, "", 0},
	} {
		if got := e.ValueOn(c.axis, e.Spec.Variants[c.variant], w, 16); got != c.want {
			t.Errorf("%s of %s is %g, want %g", c.axis, e.Spec.Variants[c.variant].Name, got, c.want)
		}
	}
}
