package doctor

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"slipstream.dev/internal/words"
)

// Cluster holds the facts that the API server of a cluster reports.
type Cluster struct {
	// Denied lists the permissions that a run needs and the user does not have. Lacks lists whatever else
	// would make a run fail, with the remedy.
	Denied, Lacks []string
	// Unread lists the permissions without which facts were left out.
	Unread []string
	Nodes  []ClusterNode
	// Cilium is nil if it is no network plugin of the cluster, or if that is not known.
	Cilium *Cilium
	// Agents are the conditions of agents that are not met.
	Agents []AgentCondition
	// Accelerated lists the nodes on which an agent has applied settings.
	Accelerated []Accelerated
	// Gone lists the nodes with a report of an agent that no longer has a pod there.
	Gone []AgentGone
}

// ClusterNode is a Linux node as its kubelet describes it.
type ClusterNode struct {
	Name string
	// Has maps properties that may differ between nodes, such as "kernel", to this node's values.
	Has map[string]string
	// Address is its first internal address of IPv4, or of IPv6 if it has none of IPv4.
	Address netip.Addr
	// Provider is the scheme of its provider ID, such as "azure", and System the name of its operating system's image.
	Provider, System string
	// Cilium and KubeProxy report whether an agent of Cilium and a kube-proxy run here in pods.
	Cilium, KubeProxy bool
	// Machine is nil if the machine itself was not examined.
	Machine *Facts
}

// See adds the facts of a node's machine.
func (c *Cluster) See(node string, f Facts) {
	if i := slices.IndexFunc(c.Nodes, func(n ClusterNode) bool { return n.Name == node }); i >= 0 {
		c.Nodes[i].Machine = &f
	}
}

// AgentCondition is a condition of a NodeAcceleration.
type AgentCondition struct{ Node, Type, Reason, Message string }

// Accelerated is a node on which an agent has applied settings of policies.
type Accelerated struct {
	Node     string
	Policies []string
}

// AgentGone is a node whose NodeAcceleration is the last report of an agent. Agent names the DaemonSet
// as NAMESPACE/NAME.
type AgentGone struct {
	Node, Agent string
	// Uninstalled means that the DaemonSet has no pod on any node.
	Uninstalled bool
}

// clusterRules are the rules for clusters, by name.
var clusterRules = []struct {
	name string
	find func(Cluster) []Finding
}{
	{"permission", permission},
	{"run-lacks", runLacks},
	{"nodes-differ", nodesDiffer},
	{"agent", agent},
	{"accelerated", accelerated},
	{"agent-gone", agentGone},
	{"cilium-host-routing", ciliumHostRouting},
	{"cilium-kube-proxy", ciliumKubeProxy},
	{"cilium-socket-lb", ciliumSocketLB},
	{"cilium-tunnel", ciliumTunnel},
	{"cilium-mtu", ciliumMTU},
}

// ExamineCluster applies all rules for clusters.
func ExamineCluster(c Cluster) (all []Finding) {
	for _, r := range clusterRules {
		for _, found := range r.find(c) {
			found.Rule = r.name
			all = append(all, found)
		}
	}
	return all
}

func permission(c Cluster) []Finding {
	if len(c.Denied) == 0 {
		return nil
	}
	f := Finding{
		Severity: Serious,
		What:     "You lack permissions that a run needs.",
		Cost:     "A run fails before it creates anything.",
		Do:       "Get a role that grants them, or use another --kubeconfig, --context or namespace (-n).",
	}
	for _, p := range c.Denied {
		f.Evidence = append(f.Evidence, evidence("SelfSubjectAccessReview", "may not %s", p))
	}
	return []Finding{f}
}

func runLacks(c Cluster) (found []Finding) {
	for _, lack := range c.Lacks {
		lines := strings.Split(lack, "\n")
		for i := range lines {
			lines[i] = strings.TrimSpace(lines[i])
		}
		found = append(found, Finding{
			Severity: Serious,
			What:     "A run in this cluster would fail.",
			Evidence: []Evidence{evidence("slipstream run kubernetes --dry-run", "%s", strings.Join(lines, "; "))},
			Cost:     "A run fails before its first block.",
			Do:       "Correct what the evidence names; then slipstream run kubernetes --dry-run",
		})
	}
	return found
}

// nodesDiffer finds properties that differ between nodes, and names the nodes.
func nodesDiffer(c Cluster) (found []Finding) {
	by := make(map[string]map[string][]string) // what, value, nodes
	for _, n := range c.Nodes {
		for what, value := range n.Has {
			if by[what] == nil {
				by[what] = make(map[string][]string)
			}
			by[what][value] = append(by[what][value], n.Name)
		}
	}
	for _, what := range slices.Sorted(maps.Keys(by)) {
		if len(by[what]) < 2 {
			continue
		}
		f := Finding{
			Severity: Note,
			What:     fmt.Sprintf("The nodes differ in their %s.", what),
			Cost:     "A result holds for the two measured nodes. On other kinds of nodes the same setting may have another effect.",
			Do:       "slipstream run kubernetes --selector KEY=VALUE   # or --client-node and --server-node, for each kind of node; and a policy for each: spec.nodeSelector",
		}
		for _, value := range slices.Sorted(maps.Keys(by[what])) {
			f.Evidence = append(f.Evidence, evidence(some(by[what][value]), "%s", value))
		}
		found = append(found, f)
	}
	return found
}

// some names only a few of the nodes, because a cluster may have thousands.
func some(nodes []string) string {
	const most = 5
	slices.Sort(nodes)
	return words.First(nodes, most)
}

func agent(c Cluster) (found []Finding) {
	for _, a := range c.Agents {
		found = append(found, Finding{
			Severity: Warning,
			Where:    a.Node,
			What:     fmt.Sprintf("The agent reports that its condition %s is not met.", a.Type),
			Evidence: []Evidence{evidence("NodeAcceleration "+a.Node+", condition "+a.Type, "%s: %s", a.Reason, a.Message)},
			Cost:     "The node lacks accelerators that its policies want.",
			Do:       "kubectl describe nodeacceleration " + a.Node,
		})
	}
	return found
}

// accelerated makes one finding, because a policy is usually for many nodes. That they are accelerated is no fault.
func accelerated(c Cluster) []Finding {
	if len(c.Accelerated) == 0 {
		return nil
	}
	nodes := make(map[string][]string)
	for _, a := range c.Accelerated {
		for _, policy := range a.Policies {
			nodes[policy] = append(nodes[policy], a.Node)
		}
	}
	f := Finding{
		Severity: Note,
		What:     "Agents accelerate nodes of this cluster.",
		Cost:     "A run that compares accelerators refuses these nodes: every variant would be measured with the policy, the baseline too.",
		Do: "Before such a run: name other nodes with --client-node and --server-node, remove the labels of the policy's nodeSelector from two, " +
			"or delete the policy for the duration of the run (kubectl delete accelerationpolicy NAME)",
	}
	for _, policy := range slices.Sorted(maps.Keys(nodes)) {
		f.Evidence = append(f.Evidence, evidence("NodeAccelerations, policy "+policy, "applied on %s", some(nodes[policy])))
	}
	return []Finding{f}
}

// agentGone makes one finding for each DaemonSet, because all its agents may be gone.
func agentGone(c Cluster) (found []Finding) {
	nodes, uninstalled := make(map[string][]string), make(map[string]bool)
	for _, a := range c.Gone {
		nodes[a.Agent] = append(nodes[a.Agent], a.Node)
		uninstalled[a.Agent] = a.Uninstalled
	}
	for _, agent := range slices.Sorted(maps.Keys(nodes)) {
		namespace, _, _ := strings.Cut(agent, "/")
		f := Finding{
			Severity: Warning,
			Where:    some(nodes[agent]),
			What:     "No agent runs on these nodes any more; their NodeAccelerations are its last reports.",
			Evidence: []Evidence{evidence("pods", "none of DaemonSet %s on %s", agent, some(nodes[agent]))},
			Cost:     "Settings that the agent applied stay, nothing verifies them, and policies have no effect there.",
			Do:       fmt.Sprintf("kubectl get daemonset,pods -n %s -o wide   # or, for nodes that should have no agent: slipstream agent --revert on each, and kubectl delete nodeacceleration NODE", namespace),
		}
		if uninstalled[agent] {
			f.What = "The agents are gone from all nodes; these NodeAccelerations are their last reports."
			f.Do = "Install the agents again, or remove what is left: slipstream agent --revert on each of the nodes, kubectl delete nodeaccelerations --all, and the roles and the admission policy (docs/how-to/agent.md)"
		}
		found = append(found, f)
	}
	return found
}
