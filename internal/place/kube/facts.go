package kube

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/doctor"
	"slipstream.dev/internal/words"
)

// Facts returns what the API server reports about a cluster's nodes and agents, as far as the user may read
// it.
func (c *Cluster) Facts(ctx context.Context) (found doctor.Cluster, err error) {
	nodes, err := c.api.Nodes().List(ctx, metav1.ListOptions{})
	if apierrors.IsForbidden(err) {
		found.Unread = append(found.Unread, "list nodes")
		nodes, err = &corev1.NodeList{}, nil
	}
	if err != nil {
		return found, fmt.Errorf("list nodes: %w", explain(err))
	}
	pods, mayList, err := c.hostPods(ctx)
	if err != nil {
		return found, err
	}
	if !mayList {
		found.Unread = append(found.Unread, "list pods in all namespaces")
	}
	var denied bool
	if found.Cilium, denied, err = c.cilium(ctx, pods, mayList); err != nil {
		return found, err
	}
	if denied {
		found.Unread = append(found.Unread, readsCilium(metav1.NamespaceSystem).String())
	}
	plugins := networkPlugins(pods)
	agents, proxies := nodesWith(pods, func(p corev1.Pod) bool { return ciliumOf(p) != nil }), nodesWith(pods, isKubeProxy)
	for _, n := range nodes.Items {
		if os := n.Labels[corev1.LabelOSStable]; os != "" && os != "linux" {
			continue
		}
		has := map[string]string{
			"architecture": n.Status.NodeInfo.Architecture, "kernel": n.Status.NodeInfo.KernelVersion,
			"kubelet": n.Status.NodeInfo.KubeletVersion, "container runtime": n.Status.NodeInfo.ContainerRuntimeVersion,
		}
		if len(plugins) > 0 {
			has["network plugin"] = cmp.Or(strings.Join(plugins[n.Name], ", "), "none of those that other nodes have")
		}
		node := doctor.ClusterNode{Name: n.Name, Has: has, Address: internalAddress(n), System: n.Status.NodeInfo.OSImage, Cilium: agents[n.Name], KubeProxy: proxies[n.Name]}
		node.Provider, _, _ = strings.Cut(n.Spec.ProviderID, "://")
		found.Nodes = append(found.Nodes, node)
	}
	accelerations, err := c.api.Accelerations(ctx)
	if apierrors.IsForbidden(err) {
		found.Unread = append(found.Unread, "list nodeaccelerations.slipstream.dev")
		return found, nil
	}
	if apierrors.IsNotFound(err) { // the cluster has no agents
		return found, nil
	}
	if err != nil {
		return found, fmt.Errorf("list the states of agents: %w", explain(err))
	}
	found.Agents = agentConditions(accelerations.Items)
	for _, n := range accelerations.Items {
		if policies := policiesOn(n); len(policies) > 0 {
			found.Accelerated = append(found.Accelerated, doctor.Accelerated{Node: n.Name, Policies: policies})
		}
	}
	if mayList {
		found.Gone = agentsGone(accelerations.Items, pods)
	}
	return found, nil
}

// nodesWith returns the nodes that have a pod of a kind.
func nodesWith(pods []corev1.Pod, is func(corev1.Pod) bool) map[string]bool {
	nodes := make(map[string]bool)
	for _, p := range pods {
		if is(p) {
			nodes[p.Spec.NodeName] = true
		}
	}
	return nodes
}

// internalAddress returns a node's first internal address of IPv4, or else of IPv6; the zero Addr if it has none.
func internalAddress(n corev1.Node) (first netip.Addr) {
	for _, a := range n.Status.Addresses {
		ip, err := netip.ParseAddr(a.Address)
		switch {
		case err != nil || a.Type != corev1.NodeInternalIP:
		case ip.Is4():
			return ip
		case !first.IsValid():
			first = ip
		}
	}
	return first
}

// pluginNames are words that the DaemonSets of network plugins have in their names.
var pluginNames = []string{"antrea", "aws-node", "azure-cni", "calico-node", "canal", "cilium", "flannel", "kindnet", "kube-router", "ovnkube-node", "weave-net"}

// podsPage is the number of pods that are requested at a time: a large cluster has tens of thousands.
const podsPage = 500

// hostPods returns the pods in the network namespaces of their nodes. ok is false if the user may not list pods.
func (c *Cluster) hostPods(ctx context.Context) (pods []corev1.Pod, ok bool, err error) {
	for page := (metav1.ListOptions{Limit: podsPage}); ; {
		list, err := c.api.Pods("").List(ctx, page)
		if apierrors.IsForbidden(err) {
			return nil, false, nil
		}
		if err != nil {
			return nil, false, fmt.Errorf("list pods: %w", explain(err))
		}
		pods = append(pods, slices.DeleteFunc(list.Items, func(p corev1.Pod) bool { return !p.Spec.HostNetwork })...)
		if page.Continue = list.Continue; page.Continue == "" {
			return pods, true, nil
		}
	}
}

// networkPlugin returns the name of the network plugin that a pod is of, "" if it is of none. It knows only those of a DaemonSet with one
// of the well-known names.
func networkPlugin(p corev1.Pod) string {
	for _, o := range p.OwnerReferences {
		i := slices.IndexFunc(pluginNames, func(name string) bool { return strings.Contains(o.Name, name) })
		if o.Kind == "DaemonSet" && i >= 0 && p.DeletionTimestamp == nil {
			return strings.TrimSuffix(pluginNames[i], "-node")
		}
	}
	return ""
}

// networkPlugins returns the images of the network plugin's pod by node.
func networkPlugins(pods []corev1.Pod) map[string][]string {
	images := make(map[string][]string)
	for _, p := range pods {
		if networkPlugin(p) == "" {
			continue
		}
		for _, container := range p.Spec.Containers {
			images[p.Spec.NodeName] = append(images[p.Spec.NodeName], container.Image)
		}
	}
	for _, all := range images {
		slices.Sort(all)
	}
	return images
}

// agentConditions returns the conditions of agents that are not met.
func agentConditions(all []v1alpha1.NodeAcceleration) (found []doctor.AgentCondition) {
	for _, n := range all {
		for _, at := range n.Status.Conditions {
			// It is no fault if no window has shown a virtual function yet, or if the node
			// cannot have one.
			if at.Status != metav1.ConditionFalse || at.Reason == v1alpha1.ReasonVFPresent || at.Reason == v1alpha1.ReasonNoDevice {
				continue
			}
			found = append(found, doctor.AgentCondition{Node: n.Name, Type: at.Type, Reason: at.Reason, Message: at.Message})
		}
	}
	return found
}

// accelerated looks for nodes of a run that an agent accelerates: every variant would be measured with that, the baseline too. It is an
// error if variants of the run apply accelerators themselves, and otherwise something to note.
func (c *Cluster) accelerated(ctx context.Context, config Config, nodes []string) (notes []string, err error) {
	if config.Switch {
		return nil, nil
	}
	all, err := c.api.Accelerations(ctx)
	if apierrors.IsForbidden(err) || apierrors.IsNotFound(err) { // the cluster has no agents
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list the states of agents: %w", explain(err))
	}
	var found []string
	for _, n := range all.Items {
		if policies := policiesOn(n); slices.Contains(nodes, n.Name) && len(policies) > 0 {
			found = append(found, fmt.Sprintf("node %s is accelerated already, by policy %s", n.Name, words.And(policies)))
		}
	}
	if len(found) == 0 {
		return nil, nil
	}
	text := strings.Join(found, "; ")
	if !config.Accelerate {
		return []string{text + ": what is measured includes that"}, nil
	}
	return nil, fmt.Errorf("%s: every variant would be measured with that, the baseline too. Name other nodes (--client-node, --server-node, --selector), "+
		"remove the labels of the policy's nodeSelector from these (kubectl label node NODE KEY-), or delete the policy for the duration of the run (kubectl delete accelerationpolicy NAME)", text)
}

// policiesOn returns the policies of which an agent has applied settings on a node.
func policiesOn(n v1alpha1.NodeAcceleration) (policies []string) {
	for _, o := range n.Status.Observed {
		if o.Settings > 0 {
			policies = append(policies, o.Policy)
		}
	}
	return policies
}

// agentsGone returns the nodes whose agent has no pod. An agent whose pod is not ready is restarting, and
// may come back.
func agentsGone(all []v1alpha1.NodeAcceleration, pods []corev1.Pod) (found []doctor.AgentGone) {
	type where struct{ agent, node string }
	runs, anywhere := make(map[where]bool), make(map[string]bool)
	for _, p := range pods {
		for _, o := range p.OwnerReferences {
			if agent := p.Namespace + "/" + o.Name; o.Kind == "DaemonSet" && p.DeletionTimestamp == nil {
				runs[where{agent, p.Spec.NodeName}], anywhere[agent] = true, true
			}
		}
	}
	for _, n := range all {
		if agent := n.Status.Agent; agent != "" && !runs[where{agent, n.Name}] { // earlier versions do not report it
			found = append(found, doctor.AgentGone{Node: n.Name, Agent: agent, Uninstalled: !anywhere[agent]})
		}
	}
	return found
}
