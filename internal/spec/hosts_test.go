package spec

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/testenv/golden"
)

// onHosts is an experiment on hosts that sets every field about them.
const onHosts = `apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: hosts}
spec:
  target:
    hosts:
    - {name: east1, address: east1.example, user: me, port: 2222, identityFile: ~/.ssh/lab, labels: {zone: east}, price: 0.1 USD, addresses: {weave: 10.32.0.1}}
    - {name: west1, labels: {zone: west}, price: 0.25 USD, addresses: {native: 192.0.2.7, weave: 10.32.0.2}}
    - {name: east2, labels: {zone: east, type: large}, price: 1 USD}
  baseline: plain
  variants:
  - {name: plain}
  - {name: weave, path: {address: weave}}
  - {name: within, hosts: {client: {zone: east}, server: {zone: east}}}
  - {name: back, hosts: {client: {zone: west}}}
  - {name: large, hosts: {server: {type: large}}, accelerate: [{rps: {devices: [nic], cpus: all}}]}
  workloads:
  - {name: bulk, stream: {duration: 10s}}
`

func TestHosts(t *testing.T) {
	e := parse(t, onHosts)
	want := Host{
		Name: "east1", Address: "east1.example", User: "me", Port: 2222, IdentityFile: "~/.ssh/lab",
		Labels: map[string]string{"zone": "east"}, Price: "0.1 USD", Addresses: map[string]string{"weave": "10.32.0.1"},
	}
	if diff := cmp.Diff(want, e.Spec.Target.Hosts[0]); diff != "" {
		t.Errorf("the first host (-want +got):\n%s", diff)
	}
	type found struct {
		client, server int
		path           string
		price          float64
	}
	got := map[string]found{}
	for _, v := range e.Spec.Variants {
		f := found{path: e.PathOf(v).String()}
		f.client, f.server = e.HostsOf(v)
		f.price, _ = e.PriceOf(v)
		got[v.Name] = f
	}
	if diff := cmp.Diff(map[string]found{
		"plain": {0, 1, "native", 0.35}, "weave": {0, 1, "weave", 0.35}, "within": {0, 2, "native", 1.1},
		"back": {1, 0, "native", 0.35}, "large": {0, 2, "native", 1.1},
	}, got, cmp.AllowUnexported(found{})); diff != "" {
		t.Errorf("variants (-want +got):\n%s", diff)
	}
	writtenAndRead(t, e.Metadata.Name, e)
	// Only one host has the client's labels, and that host has the server's labels
	// too.
	narrow := parse(t, onHosts, "spec.variants.within.hosts={client: {zone: east}, server: {type: large}}", "spec.variants.back.hosts={client: {}, server: {zone: west}}")
	if client, server := narrow.HostsOf(narrow.Spec.Variants[2]); client != 0 || server != 2 {
		t.Errorf("narrow: %d to %d", client, server)
	}
}

// TestHostsErrors compares the messages for one change each.
func TestHostsErrors(t *testing.T) {
	var got strings.Builder
	for _, c := range []struct {
		name     string
		old, new string
		set      []string
	}{
		{name: "two targets", set: []string{"spec.target.kubernetes={}"}},
		{name: "one host", set: []string{"spec.target.hosts=[{name: a}]", "spec.variants=[{name: plain}]"}},
		{name: "no name", old: "name: west1, ", new: ""},
		{name: "one name twice", old: "name: west1", new: "name: east1"},
		{name: "name of an option", old: "name: west1", new: "name: -oProxyCommand=x"},
		{name: "name with a port", old: "name: west1", new: `name: "west1:2222"`},
		{name: "address of an option", old: "east1.example", new: "-oProxyCommand=x"},
		{name: "user with a space", old: "user: me", new: "user: me too"},
		{name: "port", old: "2222", new: "70000"},
		{name: "label", old: "{zone: west}", new: `{"a b": c}`},
		{name: "address", old: "10.32.0.1", new: "weave.example"},
		{name: "address of no host", old: "192.0.2.7", new: "0.0.0.0"},
		{name: "price", old: "0.25 USD", new: "0.25 EUR"},
		{name: "path of a lab", old: "{address: weave}", new: "{vxlan: {}}"},
		{name: "path of a cluster", old: "{address: weave}", new: "{service: {}}"},
		{name: "no such address", old: "{address: weave}", new: "{address: flannel}"},
		{name: "an address that one host lacks", set: []string{"spec.variants.large.path={address: weave}"}},
		{name: "no such label", old: "server: {type: large}", new: "server: {type: small}"},
		{name: "one host for both ends", old: "server: {type: large}", new: "client: {type: large}, server: {type: large}"},
		{name: "nic", old: "{name: plain}", new: "{name: plain, nic: {mtu: 1500}}"},
		{name: "devices of pods", old: "devices: [nic]", new: "devices: [pod]"},
		{name: "in a lab", set: []string{"spec.target={lab: {}}", "spec.path={native: {}}"}},
	} {
		text := onHosts
		if c.old != "" {
			if text = strings.Replace(onHosts, c.old, c.new, 1); text == onHosts {
				t.Fatalf("%s: the experiment has no %q", c.name, c.old)
			}
		}
		_, err := Parse("experiment.yaml", []byte(text), c.set)
		if err == nil {
			t.Errorf("%s: no error", c.name)
			continue
		}
		got.WriteString("# " + c.name + "\n" + err.Error() + "\n")
	}
	golden.Compare(t, "testdata/hosts-errors.txt", got.String())
}
