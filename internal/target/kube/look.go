package kube

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/doctor"
)

// Look returns what the API server tells of a cluster's nodes and agents, as far as the user may read it.
func (c *Cluster) Look(ctx context.Context) (found doctor.Cluster, err error) {
	nodes, err := c.api.Nodes().List(ctx, metav1.ListOptions{})
	if apierrors.IsForbidden(err) {
		nodes, err = &corev1.NodeList{}, nil
	}
	if err != nil {
		return found, fmt.Errorf("list nodes: %w", explain(err))
	}
	plugins, err := c.networkPlugins(ctx)
	if err != nil {
		return found, err
	}
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
		found.Nodes = append(found.Nodes, doctor.ClusterNode{Name: n.Name, Has: has})
	}
	found.Agents, err = c.agents(ctx)
	return found, err
}

// pluginNames are words that the DaemonSets of network plugins have in their names.
var pluginNames = []string{"antrea", "aws-node", "azure-cni", "calico-node", "canal", "cilium", "flannel", "kindnet", "kube-router", "ovnkube-node", "weave-net"}

// podsPage is how many pods are asked for at a time: a large cluster has tens of thousands.
const podsPage = 500

// networkPlugins returns the images of the network plugin's pod by node. It knows only those of a DaemonSet
// with one of the well-known names.
func (c *Cluster) networkPlugins(ctx context.Context) (map[string][]string, error) {
	images := make(map[string][]string)
	var pods []corev1.Pod
	for page := (metav1.ListOptions{Limit: podsPage}); ; {
		list, err := c.api.Pods("").List(ctx, page)
		if apierrors.IsForbidden(err) {
			return images, nil
		}
		if err != nil {
			return nil, fmt.Errorf("list pods: %w", explain(err))
		}
		pods = append(pods, slices.DeleteFunc(list.Items, func(p corev1.Pod) bool { return !p.Spec.HostNetwork })...)
		if page.Continue = list.Continue; page.Continue == "" {
			break
		}
	}
	for _, p := range pods {
		daemon := slices.ContainsFunc(p.OwnerReferences, func(o metav1.OwnerReference) bool {
			return o.Kind == "DaemonSet" && slices.ContainsFunc(pluginNames, func(name string) bool { return strings.Contains(o.Name, name) })
		})
		if !daemon || p.DeletionTimestamp != nil {
			continue
		}
		for _, container := range p.Spec.Containers {
			images[p.Spec.NodeName] = append(images[p.Spec.NodeName], container.Image)
		}
	}
	for _, all := range images {
		slices.Sort(all)
	}
	return images, nil
}

// agents returns the conditions of agents that are not met.
func (c *Cluster) agents(ctx context.Context) (found []doctor.AgentCondition, err error) {
	list, err := c.api.Accelerations(ctx)
	if apierrors.IsForbidden(err) || apierrors.IsNotFound(err) { // the cluster has no agents
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list the states of agents: %w", explain(err))
	}
	for _, n := range list.Items {
		for _, at := range n.Status.Conditions {
			// A virtual function that no window has told of yet, or that the node cannot have, is no fault.
			if at.Status != metav1.ConditionFalse || at.Reason == v1alpha1.ReasonVFPresent || at.Reason == v1alpha1.ReasonNoDevice {
				continue
			}
			found = append(found, doctor.AgentCondition{Node: n.Name, Type: at.Type, Reason: at.Reason, Message: at.Message})
		}
	}
	return found, nil
}
