package kube

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	"slipstream.dev/internal/place"
)

// Observe returns the pods on a node that the experiment observes. They are looked up for each trial, because a DaemonSet may
// replace its pods during a run.
func (p *Pods) Observe(ctx context.Context, node string) []place.Observed {
	all, err := p.cluster.observed(ctx, p.spec.Observe, node)
	for i := range all {
		if err != nil {
			all[i] = place.Observed{DaemonSet: all[i].DaemonSet, Missing: err.Error()}
		}
	}
	return all
}

// canObserve returns an error if one of the DaemonSets has no pod on one of the nodes.
func (c *Cluster) canObserve(ctx context.Context, daemonSets, nodes []string) error {
	for _, node := range nodes {
		all, err := c.observed(ctx, daemonSets, node)
		if err != nil {
			return err
		}
		for _, o := range all {
			if o.Missing != "" {
				return fmt.Errorf("spec.target.kubernetes.observe: %s", o.Missing)
			}
		}
	}
	return nil
}

// observed returns the pods of DaemonSets on a node, or why a DaemonSet has none.
func (c *Cluster) observed(ctx context.Context, daemonSets []string, node string) ([]place.Observed, error) {
	all := make([]place.Observed, len(daemonSets))
	for i, name := range daemonSets {
		all[i].DaemonSet = name
	}
	onNode := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("spec.nodeName", node).String()}
	lists := make(map[string]*corev1.PodList) // by namespace
	for i, o := range all {
		namespace, name, _ := strings.Cut(o.DaemonSet, "/")
		if lists[namespace] == nil {
			list, err := c.api.Pods(namespace).List(ctx, onNode)
			if err != nil {
				return all, fmt.Errorf("list pods of %s on node %s: %w", namespace, node, explain(err))
			}
			lists[namespace] = list
		}
		switch pods, others := podsOfDaemonSet(lists[namespace].Items, name); len(pods) {
		case 1:
			all[i].UID, all[i].Containers = string(pods[0].UID), runningContainers(pods[0])
		case 0:
			all[i].Missing = fmt.Sprintf("DaemonSet %s has no running pod on node %s; the DaemonSets of its namespace that have one there: %s",
				o.DaemonSet, node, cmp.Or(strings.Join(others, ", "), "none"))
		default: // while it replaces its pods
			all[i].Missing = fmt.Sprintf("DaemonSet %s has %d running pods on node %s", o.DaemonSet, len(pods), node)
		}
	}
	return all, nil
}

// runningContainers returns the IDs of the running containers of a pod. Its status may be late; the worker fails for a container that
// does not run any more.
func runningContainers(p corev1.Pod) (ids []string) {
	for _, s := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) { // sidecars are init containers
		if _, id, ok := strings.Cut(s.ContainerID, "://"); ok && s.State.Running != nil {
			ids = append(ids, id)
		}
	}
	return ids
}

// notRunning reports whether a container waits to be started again.
func notRunning(s corev1.ContainerStatus) bool { return s.State.Running == nil }

// podsOfDaemonSet returns a DaemonSet's pods among those of its namespace on a node, and the names of other
// DaemonSets that have pods there. It leaves out pods that do not run or are being deleted.
func podsOfDaemonSet(all []corev1.Pod, name string) (pods []corev1.Pod, others []string) {
	for _, p := range all {
		at := slices.IndexFunc(p.OwnerReferences, func(o metav1.OwnerReference) bool { return o.Kind == "DaemonSet" })
		switch {
		case at < 0 || p.DeletionTimestamp != nil || p.Status.Phase != corev1.PodRunning || slices.ContainsFunc(p.Status.ContainerStatuses, notRunning):
		case p.OwnerReferences[at].Name == name:
			pods = append(pods, p)
		default:
			others = append(others, p.OwnerReferences[at].Name)
		}
	}
	slices.Sort(others)
	return pods, slices.Compact(others)
}
