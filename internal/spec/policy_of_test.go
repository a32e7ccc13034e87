package spec

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"slipstream.dev/api/v1alpha1"
)

const policyExperiment = `
apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: test}
spec:
  path: {vxlan: {}}
  baseline: vxlan
  variants:
  - {name: vxlan}
  - {name: calico, path: {vxlan: {shape: calico}}}
  - {name: plain}
  - {name: one-side, accelerate: [{rfs: {devices: [nic]}}], on: server}
  - {name: rfs+/none, nic: {offload: none}, accelerate: [{rfs: {devices: [nic]}}]}
  - {name: rfs+/full, accelerate: [{rfs: {devices: [nic, pod]}}, {fastpath: {unseenBy: [tcx]}}]}
  - {name: half, accelerate: [{rfs: {devices: [nic]}}]}
  - {name: more, accelerate: [{rfs: {devices: [nic]}}, {fastpath: {}}], versus: half}
  workloads:
  - {name: stream, stream: {duration: 1s}}
`

// TestPolicyOf: kubectl, which refuses unknown fields, and the agent of a host read the
// policies that PolicyOf returns.
func TestPolicyOf(t *testing.T) {
	e, err := Parse("test.yaml", []byte(policyExperiment), nil)
	if err != nil {
		t.Fatal(err)
	}
	p, err := e.PolicyOf("rfs+/full")
	if err != nil {
		t.Fatal(err)
	}
	p.Annotations = map[string]string{"slipstream.dev/proof": "stream: throughput \"+5%\" (3–7), " + strings.Repeat("x", 200), "slipstream.dev/blocks": "6"}
	host, err := MarshalPolicy(p)
	if err != nil {
		t.Fatal(err)
	}
	read, err := ParsePolicy("policy.yaml", host)
	if err != nil {
		t.Fatalf("%v\n%s", err, host)
	}
	if diff := cmp.Diff(p, read); diff != "" {
		t.Errorf("an agent reads (-want +got):\n%s", diff)
	}
	p.Spec.NodeSelector = map[string]string{"kubernetes.io/arch": "amd64", "pool": "yes"}
	cluster, err := MarshalPolicy(p)
	if err != nil {
		t.Fatal(err)
	}
	var object v1alpha1.AccelerationPolicy
	if err := yaml.UnmarshalStrict(cluster, &object); err != nil {
		t.Fatalf("%v\n%s", err, cluster)
	}
	if diff := cmp.Diff(p, &object); diff != "" {
		t.Errorf("kubectl reads (-want +got):\n%s", diff)
	}
	if p.Name != "rfs-plus-full" {
		t.Errorf("the policy is called %q", p.Name)
	}
}

func TestPolicyOfWhatIsNone(t *testing.T) {
	e, err := Parse("test.yaml", []byte(policyExperiment), nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"vxlan": "is a baseline", "calico": "another path (vxlan/calico)", "plain": "no accelerators", "one-side": "accelerates the server's side only (on: server), and a policy would accelerate clients and servers alike", "rfs+/none": "NIC", "rfs+/ful": "did you mean rfs+/full",
		"more": "more is compared with half, which has accelerators itself",
	} {
		if _, err := e.PolicyOf(name); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
	}

	// Other ways in which a variant may differ from its baseline.
	full := &e.Spec.Variants[4]
	for name, change := range map[string]func(){
		"hosts":  func() { full.Hosts = &Ends{Client: map[string]string{"zone": "a"}} },
		"switch": func() { full.Switch = &Switch{To: []string{"on"}, Back: []string{"off"}} },
		"tools":  func() { full.Tools = map[string]string{"stream": ToolIperf3} },
	} {
		was := *full
		change()
		if _, err := e.PolicyOf(full.Name); err == nil || !strings.Contains(err.Error(), "in its NIC, hosts, tools or switch") {
			t.Errorf("with other %s: %v", name, err)
		}
		*full = was
	}
}
