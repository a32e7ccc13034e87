package spec

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/api/v1alpha1"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

const goodPolicy = `apiVersion: slipstream.dev/v1alpha1
kind: AccelerationPolicy
metadata: {name: rfs-plus, labels: {team: net}}
spec:
  accelerate:
  - rps: {devices: [nic], cpus: "0-3,8"}
  - vf: {}
  - rfs: {devices: [host-veth, pod]}
`

func TestParsePolicy(t *testing.T) {
	p, err := ParsePolicy("policy.yaml", []byte(goodPolicy))
	if err != nil {
		t.Fatal(err)
	}
	want := []v1alpha1.PolicyAccelerator{
		{Accelerator: v1alpha1.Accelerator{RPS: &v1alpha1.RPS{Devices: []string{"nic"}, CPUs: "0-3,8"}}},
		{VF: &v1alpha1.VF{}},
		{Accelerator: v1alpha1.Accelerator{RFS: &v1alpha1.RFS{Devices: []string{"host-veth", "pod"}, Entries: 32768}}},
	}
	if d := cmp.Diff(want, p.Spec.Accelerate); d != "" || p.Name != "rfs-plus" {
		t.Errorf("%s: %s", p.Name, d)
	}

	if d := cmp.Diff([]v1alpha1.PolicyAccelerator{want[0], want[2], want[1]}, p.Spec.Accelerators()); d != "" {
		t.Errorf("what changes something, and then what does not: %s", d)
	}

	for name, tt := range map[string]struct{ from, to, want string }{
		"empty":          {goodPolicy, "", "policy.yaml:1:1: must be an AccelerationPolicy, is empty"},
		"unknown field":  {"accelerate:", "acelerate:", `policy.yaml:5:3: spec.acelerate: unknown field; did you mean accelerate?`},
		"kind":           {"kind: AccelerationPolicy", "kind: Experiment", `policy.yaml:2:7: kind: must be AccelerationPolicy, is "Experiment"`},
		"name":           {"rfs-plus", "RFS_plus", `policy.yaml:3:18: metadata.name: must be a DNS name: a-z, 0-9, - and . within, at most 253, is "RFS_plus"`},
		"class":          {"[nic]", "[eth0]", `policy.yaml:6:21: spec.accelerate[0].rps.devices[0]: must be nic, overlay, host-veth or pod, is "eth0"`},
		"cpus":           {`"0-3,8"`, "some", `policy.yaml:6:33: spec.accelerate[0].rps.cpus: must be all, all-but-irq or a list such as 0-3,8, is "some"`},
		"entries":        {"[host-veth, pod]", "[pod], entries: 1000", "policy.yaml:8:36: spec.accelerate[2].rfs.entries: must be a power of two up to 1048576, is 1000"},
		"two of them":    {"- rfs:", "- rps: {devices: [pod], cpus: all}\n    rfs:", "policy.yaml:8:5: spec.accelerate[2]: must have only one of rps, rfs, fastpath or vf, has rps and rfs"},
		"fast path":      {"rfs: {devices: [host-veth, pod]}", "fastpath: {}\n  - fastpath: {}", "policy.yaml:9:15: spec.accelerate[3].fastpath: is listed twice"},
		"unseen by some": {"rfs: {devices: [host-veth, pod]}", "fastpath: {unseenBy: [queue, cilium]}", `policy.yaml:8:34: spec.accelerate[2].fastpath.unseenBy[1]: must be tcx, tc, queue, nftables-netdev or conntrack-accounting, is "cilium"`},
		"unseen twice":   {"rfs: {devices: [host-veth, pod]}", "fastpath: {unseenBy: [tc, tc]}", `policy.yaml:8:31: spec.accelerate[2].fastpath.unseenBy[1]: must be unique, "tc" is spec.accelerate[2].fastpath.unseenBy[0] too`},
		"fast and more":  {"- rfs: {devices: [host-veth, pod]}", "- {rfs: {devices: [pod]}, fastpath: {}}", "policy.yaml:8:5: spec.accelerate[2]: must have only one of rps, rfs, fastpath or vf, has rfs and fastpath"},
		"vf twice":       {"- rfs: {devices: [host-veth, pod]}", "- vf: {}", "policy.yaml:8:9: spec.accelerate[2].vf: is listed twice"},
		"vf and more":    {"- vf: {}", "- {fastpath: {}, vf: {}}", "policy.yaml:7:5: spec.accelerate[1]: must have only one of rps, rfs, fastpath or vf, has fastpath and vf"},
		"vf with fields": {"vf: {}", "vf: {nics: [eth0]}", "policy.yaml:7:10: spec.accelerate[1].vf.nics: unknown field; none is allowed"},
		"twice":          {"rfs: {devices: [host-veth, pod]}", "rps: {devices: [nic], cpus: all}", `policy.yaml:8:21: spec.accelerate[2].rps.devices[0]: must be unique, "nic" is spec.accelerate[0].rps.devices[0] too`},
		"nothing":        {"\n  - rps: {devices: [nic], cpus: \"0-3,8\"}\n  - vf: {}\n  - rfs: {devices: [host-veth, pod]}", " []", "policy.yaml:5:15: spec.accelerate: must have at least one accelerator, is empty"},
		"node selector":  {"spec:\n", "spec:\n  nodeSelector: {zone: a}\n", "policy.yaml:5:17: spec.nodeSelector: selects by labels, which only a cluster has; leave it out"},
		"pods":           {"spec:\n", "spec:\n  pods: {matchLabels: {app: web}}\n", "policy.yaml:5:9: spec.pods: selects by labels, which only a cluster has; leave it out"},
		"all":            {"spec:\n", "spec:\n  all: true\n", "policy.yaml:5:8: spec.all: selects nodes, but a policy file applies only to the machine that has it; leave it out"},
		"rollout":        {"spec:\n", "spec:\n  rollout: {stepPercent: 5}\n", "policy.yaml:5:12: spec.rollout: is for several nodes, but a policy file applies only to the machine that has it; leave it out"},
		"no spec at all": {goodPolicy[strings.Index(goodPolicy, "spec:"):], "", "policy.yaml:1:1: spec.accelerate: is missing"},
	} {
		t.Run(name, func(t *testing.T) {
			text := strings.Replace(goodPolicy, tt.from, tt.to, 1)
			if text == goodPolicy {
				t.Fatal("nothing was replaced")
			}
			_, err := ParsePolicy("policy.yaml", []byte(text))
			if err == nil || err.Error() != tt.want {
				t.Errorf("error\n%v\nwant\n%s", err, tt.want)
			}
			if !errors.As(err, new(*Error)) {
				t.Errorf("error is a %T", err)
			}
		})
	}
}

// TestSchemaOfPolicies checks that the schema of a cluster refuses the same devices, CPUs and entries as this package, when a policy is
// created. Patterns cannot compare numbers, so the schema admits ranges that run backwards and CPUs that no machine has.
func TestSchemaOfPolicies(t *testing.T) {
	text, err := os.ReadFile("../../charts/slipstream/crds/slipstream.dev_accelerationpolicies.yaml")
	if err != nil {
		t.Fatal(err)
	}
	type schema struct {
		Properties map[string]schema
		Items      *schema
		Pattern    string
		Enum       []any
	}
	var crd struct {
		Spec struct {
			Versions []struct {
				Schema struct{ OpenAPIV3Schema schema }
			}
		}
	}
	if err := yaml.Unmarshal(text, &crd); err != nil {
		t.Fatal(err)
	}
	accelerate := crd.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"].Properties["accelerate"].Items.Properties
	for _, kind := range []string{"rps", "rfs"} {
		field := accelerate[kind].Properties
		admits := func(s schema, value string) bool {
			return s.Pattern != "" && regexp.MustCompile(s.Pattern).MatchString(value) || slices.Contains(s.Enum, any(value))
		}
		valid := func(format, value string) bool {
			head, _, _ := strings.Cut(goodPolicy, "  - rps")
			_, err := ParsePolicy("p", []byte(head+fmt.Sprintf("  - "+kind+": "+format+"\n", value)))
			return err == nil
		}
		for _, cpus := range []string{"all", "all-but-irq", "0", "0-3,8", "0,2,4-7", "8191", "foo", "", " ", "all,0", "0-", "-1", "1,", ",1", "0x1", "1-2-3", "0 ", "all\\n", "65535"} {
			if got, want := admits(field["cpus"], strings.ReplaceAll(cpus, "\\n", "\n")), valid("{devices: [nic], cpus: \"%s\"}", cpus); got != want {
				t.Errorf("%s: the schema admits the CPUs %q: %t, a file %t", kind, cpus, got, want)
			}
		}
		for _, device := range []string{"nic", "overlay", "host-veth", "pod", "eth0", "NIC", ""} {
			if got, want := admits(*field["devices"].Items, device), valid("{devices: [\"%s\"], cpus: all}", device); got != want {
				t.Errorf("%s: the schema admits the device %q: %t, a file %t", kind, device, got, want)
			}
		}
		for n := 1; kind == "rfs" && n <= 2*entriesMax; n *= 2 {
			for _, entries := range []int{n, n + 1, n - 1} {
				if got, want := slices.Contains(field["entries"].Enum, any(float64(entries))), valid("{devices: [nic], entries: %s}", fmt.Sprint(entries)); got != want {
					t.Errorf("the schema admits %d entries: %t, a file %t", entries, got, want)
				}
			}
		}
	}
}

func TestCompletePolicy(t *testing.T) {
	p := fullPolicy()
	p.Spec.Accelerate[1].RFS.Entries = 0
	c, err := CompletePolicy(p)
	if err != nil {
		t.Fatal(err)
	}
	if got := c.Spec.Accelerate[1].RFS.Entries; got != 32768 || p.Spec.Accelerate[1].RFS.Entries != 0 {
		t.Errorf("completed to %d entries, want the default, and the object left alone", got)
	}
	if d := cmp.Diff(p.ObjectMeta, c.ObjectMeta); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff(p.Spec.Pods, c.Spec.Pods); d != "" {
		t.Error(d)
	}
	p.Spec.Accelerate[0].RPS.CPUs = "3-1"
	p.Spec.Rollout.StepPercent = 101
	p.Spec.Pods.MatchExpressions[0].Operator = "Near"
	_, err = CompletePolicy(p)
	want := "spec.rollout.stepPercent: must be at most 100, is 101\n" +
		"spec.accelerate[0].rps.cpus: must be all, all-but-irq or a list such as 0-3,8, is \"3-1\"\n" +
		"spec.pods: \"Near\" is not a valid label selector operator"
	if err == nil || err.Error() != want {
		t.Errorf("error\n%v\nwant\n%s", err, want)
	}
}

func fullPolicy() *v1alpha1.AccelerationPolicy {
	at := metav1.NewTime(time.Unix(1, 0).UTC())
	return &v1alpha1.AccelerationPolicy{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.APIVersion, Kind: v1alpha1.KindAccelerationPolicy},
		ObjectMeta: metav1.ObjectMeta{Name: "full", Labels: map[string]string{"a": "b"}, Generation: 3, CreationTimestamp: at},
		Spec: v1alpha1.AccelerationPolicySpec{
			NodeSelector: map[string]string{"zone": "a"},
			Rollout:      &v1alpha1.Rollout{StepPercent: 20},
			Accelerate: []v1alpha1.PolicyAccelerator{
				{Accelerator: v1alpha1.Accelerator{RPS: &v1alpha1.RPS{Devices: []string{"nic"}, CPUs: "all"}}},
				{Accelerator: v1alpha1.Accelerator{RFS: &v1alpha1.RFS{Devices: []string{"pod"}, CPUs: "0", Entries: 1024}}},
				{Accelerator: v1alpha1.Accelerator{Fastpath: &v1alpha1.Fastpath{UnseenBy: []string{v1alpha1.UnseenByQueue, v1alpha1.UnseenByTCX}}}},
				{VF: &v1alpha1.VF{}},
			},
			Pods: &metav1.LabelSelector{
				MatchLabels:      map[string]string{"app": "web"},
				MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "tier", Operator: "In", Values: []string{"x"}}},
			},
		},
		Status: v1alpha1.AccelerationPolicyStatus{Rollout: &v1alpha1.RolloutStatus{FailedNodes: []string{"node7"}}, Conditions: []metav1.Condition{{Type: "Selected", Status: "True", LastTransitionTime: at, Reason: "Nodes"}}},
	}
}

// TestExamplePolicy reads the example of the package, and all that it comments out.
func TestExamplePolicy(t *testing.T) {
	data, err := os.ReadFile(filepath.Join("..", "..", "packaging", "policy.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ParsePolicy("policy.yaml", data); err != nil {
		t.Error(err)
	}
	all := strings.ReplaceAll(string(data), "# - ", "- ")
	if p, err := ParsePolicy("policy.yaml", []byte(all)); err != nil || len(p.Spec.Accelerate) != 4 {
		t.Errorf("with what is commented out: %v", err)
	}
}

func FuzzParsePolicy(f *testing.F) {
	f.Add([]byte(goodPolicy))
	f.Fuzz(func(t *testing.T, data []byte) {
		p, err := ParsePolicy("policy.yaml", data)
		if err != nil {
			if err.Error() == "" {
				t.Error("an error without a message")
			}
			return
		}
		again, err := CompletePolicy(p)
		if err != nil {
			t.Fatalf("a policy that was read is not complete: %v", err)
		}
		if d := cmp.Diff(p.Spec, again.Spec); d != "" {
			t.Error(d)
		}
		if _, err := json.Marshal(p); err != nil {
			t.Error(err)
		}
	})
}
