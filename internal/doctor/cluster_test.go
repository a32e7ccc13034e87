package doctor

import (
	"fmt"
	"strings"
	"testing"
)

// TestClusterRules checks that each fault is found, alone.
func TestClusterRules(t *testing.T) {
	alike := func() Cluster {
		c := Cluster{}
		for i := range 7 {
			c.Nodes = append(c.Nodes, ClusterNode{Name: fmt.Sprint("n", i), Has: map[string]string{"kernel": "6.12", "network plugin": "flannel:v1"}})
		}
		return c
	}
	for _, c := range []struct {
		name   string
		inject func(*Cluster)
		want   string
	}{
		{"nothing", func(*Cluster) {}, ""},
		{"permissions", func(c *Cluster) { c.Denied = []string{"create pods", "create pods/exec"} }, "serious permission: You lack permissions that a run needs. SelfSubjectAccessReview=may not create pods SelfSubjectAccessReview=may not create pods/exec"},
		{"image", func(c *Cluster) { c.Lacks = []string{"no image"} }, "serious run-lacks: A run in this cluster would fail. slipstream run kubernetes --dry-run=no image"},
		{"a reason of two lines", func(c *Cluster) { c.Lacks = []string{"one node\n  node b is tainted"} }, "serious run-lacks: A run in this cluster would fail. slipstream run kubernetes --dry-run=one node; node b is tainted"},
		{"kernels", func(c *Cluster) { c.Nodes[6].Has["kernel"] = "6.1" }, "note nodes-differ: The nodes differ in their kernel. n6=6.1 n0, n1, n2, n3, n4 and 1 more=6.12"},
		{"accelerated", func(c *Cluster) {
			c.Accelerated = []Accelerated{{"n2", []string{"rps"}}, {"n1", []string{"fast", "rps"}}}
		}, "note accelerated: Agents accelerate nodes of this cluster. NodeAccelerations, policy fast=applied on n1 NodeAccelerations, policy rps=applied on n1, n2"},
		{"agents gone", func(c *Cluster) {
			c.Gone = []AgentGone{{"n2", "system/slipstream", false}, {"n1", "system/slipstream", false}}
		}, "warning agent-gone: No agent runs on these nodes any more; their NodeAccelerations are its last reports. pods=none of DaemonSet system/slipstream on n1, n2"},
		{"all agents gone", func(c *Cluster) { c.Gone = []AgentGone{{"n1", "system/slipstream", true}} },
			"warning agent-gone: The agents are gone from all nodes; these NodeAccelerations are their last reports. pods=none of DaemonSet system/slipstream on n1"},
		{"agents", func(c *Cluster) { c.Agents = []AgentCondition{{"n1", "Ready", "Conflict", "policy a"}} }, "warning agent: The agent reports that its condition Ready is not met. NodeAcceleration n1, condition Ready=Conflict: policy a"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cluster := alike()
			c.inject(&cluster)
			found := ExamineCluster(cluster)
			got := strings.Join(summary(found), "\n")
			for _, f := range found {
				for _, e := range f.Evidence {
					got += " " + e.From + "=" + e.Value
				}
				if f.Cost == "" || f.Do == "" {
					t.Errorf("incomplete: %+v", f)
				}
			}
			if got != c.want {
				t.Errorf("found %q, want %q", got, c.want)
			}
		})
	}
}
