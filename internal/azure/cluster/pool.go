package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	corehelpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/kubectl/pkg/drain"

	"slipstream.dev/internal/azure"
)

// PoolLabel is AKS's, on the nodes of a pool.
const PoolLabel = "kubernetes.azure.com/agentpool"

// Things that a drain destroys, which a user may accept.
const (
	BarePods     = "bare-pods"     // nothing creates them again
	LocalStorage = "local-storage" // emptyDir volumes, whose data is lost
)

// Pool is a cluster whose pools are drained.
type Pool struct {
	*Cluster
	// Accept has BarePods and LocalStorage, where a user does.
	Accept []string
	// Timeout of the drain of a node; 0 is none.
	Timeout time.Duration
}

func (p Pool) nodes(ctx context.Context, pool string) ([]corev1.Node, error) {
	list, err := p.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{LabelSelector: PoolLabel + "=" + pool})
	if err != nil {
		return nil, fmt.Errorf("list nodes of %s: %w", pool, err)
	}
	slices.SortFunc(list.Items, func(a, b corev1.Node) int { return strings.Compare(a.Name, b.Name) })
	return list.Items, nil
}

// Of are the nodes of a pool, by name.
func (p Pool) Of(ctx context.Context, pool string) (all []azure.Node, err error) {
	nodes, err := p.nodes(ctx, pool)
	for _, n := range nodes {
		ready := slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
		})
		all = append(all, azure.Node{Name: n.Name, Ready: ready, Cordoned: n.Spec.Unschedulable})
	}
	return all, err
}

// Cordon keeps new pods from a node, or lets them on it again.
func (p Pool) Cordon(ctx context.Context, node string, on bool) error {
	patch, err := json.Marshal(map[string]any{"spec": map[string]any{"unschedulable": on}})
	if err != nil {
		return err
	}
	_, err = p.client.CoreV1().Nodes().Patch(ctx, node, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	if apierrors.IsNotFound(err) {
		return nil // a node that is gone gets no pods
	}
	if err != nil {
		return fmt.Errorf("cordon %s: %w", node, err)
	}
	return nil
}

func (p Pool) helper(ctx context.Context) *drain.Helper {
	return &drain.Helper{Ctx: ctx, Client: p.client, Force: slices.Contains(p.Accept, BarePods), DeleteEmptyDirData: slices.Contains(p.Accept, LocalStorage),
		IgnoreAllDaemonSets: true, GracePeriodSeconds: -1, Timeout: p.Timeout, Out: io.Discard, ErrOut: io.Discard}
}

// Drain evicts the pods of a node as kubectl does: PodDisruptionBudgets are waited for. It returns when the node has
// none left that it can be rid of.
func (p Pool) Drain(ctx context.Context, node string) error {
	h := p.helper(ctx)
	list, errs := h.GetPodsForDeletion(node)
	if len(errs) > 0 {
		return fmt.Errorf("drain %s: %w", node, errors.Join(errs...))
	}
	if err := h.DeleteOrEvictPods(list.Pods()); err != nil {
		return fmt.Errorf("drain %s: %w", node, err)
	}
	if list, errs = h.GetPodsForDeletion(node); len(errs) > 0 || len(list.Pods()) > 0 {
		return fmt.Errorf("drain %s: %d pods are left, or were created meanwhile: %w", node, len(list.Pods()), errors.Join(errs...))
	}
	return nil
}

// Blockers name each pod that cannot move from one pool to another, and why.
func (p Pool) Blockers(ctx context.Context, pool, to string) (all []string, err error) {
	nodes, err := p.nodes(ctx, pool)
	if err != nil {
		return nil, err
	}
	fresh, err := p.nodes(ctx, to)
	if err != nil {
		return nil, err
	}
	budgets, err := p.client.PolicyV1().PodDisruptionBudgets(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list poddisruptionbudgets: %w", err)
	}
	for _, n := range nodes {
		pods, err := p.client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + n.Name})
		if err != nil {
			return nil, fmt.Errorf("list pods of %s: %w", n.Name, err)
		}
		for _, pod := range pods.Items {
			if pod.Spec.NodeName == n.Name && moves(&pod) {
				for _, why := range p.holds(&pod, fresh, budgets.Items) {
					all = append(all, fmt.Sprintf("pod %s/%s on %s: %s", pod.Namespace, pod.Name, n.Name, why))
				}
			}
		}
	}
	return all, nil
}

// moves tells whether a pod must run elsewhere: not one of a DaemonSet or of the node itself, nor one that has ended.
func moves(pod *corev1.Pod) bool {
	if owner := metav1.GetControllerOf(pod); owner != nil && owner.Kind == "DaemonSet" {
		return false
	}
	return pod.Annotations[corev1.MirrorPodAnnotationKey] == "" && pod.Status.Phase != corev1.PodSucceeded && pod.Status.Phase != corev1.PodFailed
}

func (p Pool) holds(pod *corev1.Pod, fresh []corev1.Node, budgets []policyv1.PodDisruptionBudget) (why []string) {
	if metav1.GetControllerOf(pod) == nil && !slices.Contains(p.Accept, BarePods) {
		why = append(why, "no controller would create it again (--accept "+BarePods+" deletes it)")
	}
	for _, v := range pod.Spec.Volumes {
		if v.EmptyDir != nil && !slices.Contains(p.Accept, LocalStorage) {
			why = append(why, "its volume "+v.Name+" is on the node, and would be lost (accept that with --accept "+LocalStorage+")")
		}
	}
	for _, b := range budgets {
		selector, err := metav1.LabelSelectorAsSelector(b.Spec.Selector)
		if err == nil && b.Namespace == pod.Namespace && !selector.Empty() && selector.Matches(labels.Set(pod.Labels)) && never(b) {
			why = append(why, fmt.Sprintf("PodDisruptionBudget %s never allows an eviction (%d of %d pods must be healthy)", b.Name, b.Status.DesiredHealthy, b.Status.ExpectedPods))
		}
	}
	if len(fresh) == 0 {
		return why // what the new nodes will be is not known yet
	}
	affinity := nodeaffinity.GetRequiredNodeAffinity(pod)
	reason := "no new node matches its node selector or affinity"
	for _, n := range fresh {
		if ok, err := affinity.Match(&n); !ok || err != nil {
			continue
		}
		if taint, found := corehelpers.FindMatchingUntoleratedTaint(n.Spec.Taints, pod.Spec.Tolerations, hard); found {
			reason = "it does not tolerate the taint " + taint.Key + " of the new nodes"
			continue
		}
		return why
	}
	return append(why, reason)
}

func hard(t *corev1.Taint) bool { return t.Effect != corev1.TaintEffectPreferNoSchedule }

// never tells a budget that allows no eviction however long one waits: all its pods must be healthy. One that allows
// none now, as a pod is not healthy, is waited for.
func never(b policyv1.PodDisruptionBudget) bool {
	return b.Status.ObservedGeneration == b.Generation && b.Status.ExpectedPods > 0 && b.Status.DesiredHealthy >= b.Status.ExpectedPods
}
