package cluster

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	resourcehelpers "k8s.io/component-helpers/resource"
	corehelpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"
	"k8s.io/kubectl/pkg/drain"

	"slipstream.dev/internal/azure"
)

// PoolLabel is the label that AKS sets on the nodes of a pool.
const PoolLabel = "kubernetes.azure.com/agentpool"

// What a drain destroys, and a user may agree to lose.
const (
	BarePods     = "bare-pods"     // nothing creates them again
	LocalStorage = "local-storage" // emptyDir volumes, whose data is lost
)

// Pool gives access to the node pools of a cluster, and drains them.
type Pool struct {
	*Cluster
	// Accept lists what the user agrees to lose: BarePods, LocalStorage, both or neither.
	Accept []string
	// Timeout bounds the drain of one node; 0 means no limit.
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

// Of returns the nodes of a pool.
func (p Pool) Of(ctx context.Context, pool string) (all []azure.Node, err error) {
	nodes, err := p.nodes(ctx, pool)
	for _, n := range nodes {
		ready := slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
		})
		all = append(all, azure.Node{Name: n.Name, Machine: strings.TrimPrefix(n.Spec.ProviderID, providerScheme), Ready: ready, Cordoned: n.Spec.Unschedulable})
	}
	return all, err
}

// Cordon keeps new pods off a node, or allows them again.
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

func (p Pool) helper(ctx context.Context, note func(string)) *drain.Helper {
	return &drain.Helper{Ctx: ctx, Client: p.client, Force: slices.Contains(p.Accept, BarePods), DeleteEmptyDirData: slices.Contains(p.Accept, LocalStorage),
		IgnoreAllDaemonSets: true, GracePeriodSeconds: -1, Timeout: p.Timeout, Out: io.Discard, ErrOut: &notes{note: note}}
}

// notes passes on each line once, because kubectl repeats every five seconds that it is waiting.
type notes struct {
	note func(string)
	mu   sync.Mutex
	said map[string]bool
}

func (n *notes) Write(b []byte) (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for line := range strings.Lines(string(b)) {
		if line = strings.TrimSpace(line); line != "" && !n.said[line] {
			if n.said == nil {
				n.said = make(map[string]bool)
			}
			n.said[line] = true
			n.note(line)
		}
	}
	return len(b), nil
}

// Drain evicts the pods of a node as kubectl does, and waits for PodDisruptionBudgets. It returns when no pod that
// can be evicted is left on the node.
func (p Pool) Drain(ctx context.Context, node string, note func(string)) error {
	h := p.helper(ctx, note)
	list, errs := h.GetPodsForDeletion(node)
	if len(errs) > 0 {
		return fmt.Errorf("drain %s: %w", node, errors.Join(errs...))
	}
	if err := h.DeleteOrEvictPods(list.Pods()); err != nil {
		// kubectl reports an interrupted eviction as a timeout after 292 years.
		return fmt.Errorf("drain %s: %w", node, cmp.Or(context.Cause(ctx), err))
	}
	if list, errs = h.GetPodsForDeletion(node); len(errs) > 0 {
		return fmt.Errorf("drain %s: look for pods that are left: %w", node, errors.Join(errs...))
	}
	if left := len(list.Pods()); left > 0 {
		return fmt.Errorf("drain %s: %d pods are left, or were created meanwhile", node, left)
	}
	return nil
}

// Waiting returns the pods that have no node yet.
func (p Pool) Waiting(ctx context.Context) (all []string, err error) {
	pods, err := p.client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName="})
	if err != nil {
		return nil, fmt.Errorf("list pods without a node: %w", err)
	}
	for _, pod := range pods.Items {
		if pod.Spec.NodeName == "" && pod.DeletionTimestamp == nil && len(pod.Spec.SchedulingGates) == 0 && pod.Status.Phase == corev1.PodPending {
			all = append(all, pod.Namespace+"/"+pod.Name)
		}
	}
	return all, nil
}

// Blockers names each pod that cannot move from one pool to another, and why.
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
	moving := make(corev1.ResourceList)
	for _, n := range nodes {
		pods, err := p.podsOf(ctx, n.Name)
		if err != nil {
			return nil, err
		}
		for _, pod := range pods {
			if !moves(&pod) {
				continue
			}
			add(moving, requests(&pod), 1)
			for _, why := range p.holds(&pod, fresh, budgets.Items) {
				all = append(all, fmt.Sprintf("pod %s/%s on %s: %s", pod.Namespace, pod.Name, n.Name, why))
			}
		}
	}
	short, err := p.short(ctx, moving, fresh)
	if err != nil {
		return nil, err
	}
	for _, what := range short {
		all = append(all, fmt.Sprintf("all pods of %s: %s has %s; scale it first (az aks nodepool scale)", pool, to, what))
	}
	return all, nil
}

func (p Pool) podsOf(ctx context.Context, node string) ([]corev1.Pod, error) {
	pods, err := p.client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + node})
	if err != nil {
		return nil, fmt.Errorf("list pods of %s: %w", node, err)
	}
	return pods.Items, nil
}

// requests returns the resources that a pod requests, and one of the pods that its node may run.
func requests(pod *corev1.Pod) corev1.ResourceList {
	r := resourcehelpers.PodRequests(pod, resourcehelpers.PodResourcesOptions{})
	r[corev1.ResourcePods] = *resource.NewQuantity(1, resource.DecimalSI)
	return r
}

// add adds sign times the resources to a sum.
func add(sum, resources corev1.ResourceList, sign int64) {
	for name, q := range resources {
		q.Mul(sign)
		total := sum[name]
		total.Add(q)
		sum[name] = total
	}
}

// short names the resources of which all nodes together have too little left for the pods.
func (p Pool) short(ctx context.Context, moving corev1.ResourceList, fresh []corev1.Node) (short []string, err error) {
	if len(fresh) == 0 {
		return nil, nil // the new nodes do not exist yet
	}
	left := make(corev1.ResourceList)
	for _, n := range fresh {
		add(left, n.Status.Allocatable, 1)
		pods, err := p.podsOf(ctx, n.Name)
		if err != nil {
			return nil, err
		}
		for _, pod := range pods {
			if !ended(&pod) {
				add(left, requests(&pod), -1)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(moving)) {
		need, has := moving[name], left[name]
		if need.Cmp(has) > 0 {
			short = append(short, fmt.Sprintf("%s %s left, and they need %s", has.String(), name, need.String()))
		}
	}
	return short, nil
}

// moves reports whether a pod must move to another node. Pods of a DaemonSet, static pods and pods that have ended
// do not.
func moves(pod *corev1.Pod) bool {
	if owner := metav1.GetControllerOf(pod); owner != nil && owner.Kind == "DaemonSet" {
		return false
	}
	return pod.Annotations[corev1.MirrorPodAnnotationKey] == "" && !ended(pod)
}

// ended reports whether a pod has ended and no longer uses resources of its node.
func ended(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
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
	var of []string
	for _, b := range budgets {
		selector, err := metav1.LabelSelectorAsSelector(b.Spec.Selector)
		if err != nil || b.Namespace != pod.Namespace || !selector.Matches(labels.Set(pod.Labels)) {
			continue
		}
		of = append(of, b.Name)
		if never(b) {
			why = append(why, fmt.Sprintf("PodDisruptionBudget %s never allows an eviction (%d of %d pods must be healthy)", b.Name, b.Status.DesiredHealthy, b.Status.ExpectedPods))
		}
	}
	if len(of) > 1 {
		why = append(why, "Kubernetes evicts no pod with several PodDisruptionBudgets ("+strings.Join(of, ", ")+")")
	}
	if len(fresh) == 0 {
		return why // the new nodes do not exist yet
	}
	affinity, silent := nodeaffinity.GetRequiredNodeAffinity(pod), klog.Logger{}
	reason := "no new node matches its node selector or affinity"
	for _, n := range fresh {
		if ok, err := affinity.Match(&n); !ok || err != nil {
			continue
		}
		if taint, found := corehelpers.FindMatchingUntoleratedTaint(silent, n.Spec.Taints, pod.Spec.Tolerations, hard, true); found {
			reason = "it does not tolerate the taint " + taint.Key + " of the new nodes"
			continue
		}
		return why
	}
	return append(why, reason)
}

func hard(t *corev1.Taint) bool { return t.Effect != corev1.TaintEffectPreferNoSchedule }

// never reports whether a budget can never allow an eviction, because all its pods must be healthy. A budget that
// allows none right now, because a pod is not healthy, is worth waiting for.
func never(b policyv1.PodDisruptionBudget) bool {
	return b.Status.ObservedGeneration == b.Generation && b.Status.ExpectedPods > 0 && b.Status.DesiredHealthy >= b.Status.ExpectedPods
}
