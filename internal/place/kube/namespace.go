package kube

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// A namespace that the user names may limit a run by quotas and network policies. Those that the user may not read are not
// checked beforehand; the API server and the network enforce them anyway.

// hasRoom returns an error if a quota of the namespace has no room for all of the pods. The API server checks quotas for one pod at a
// time.
func (p *Pods) hasRoom(ctx context.Context, pods []*corev1.Pod) error {
	if !p.inNamedNamespace {
		return nil
	}
	quotas, err := p.cluster.api.Quotas(p.namespace).List(ctx, metav1.ListOptions{})
	if apierrors.IsForbidden(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list resourcequotas of %s: %w", p.namespace, explain(err))
	}
	for _, q := range quotas.Items {
		if len(q.Spec.Scopes) > 0 || q.Spec.ScopeSelector != nil {
			continue // it is for some pods only
		}
		for name, hard := range q.Status.Hard {
			need, what := p.needOf(pods, name)
			room := hard.DeepCopy()
			room.Sub(q.Status.Used[name])
			if need.Cmp(room) <= 0 {
				continue
			}
			return fmt.Errorf("ResourceQuota %s of namespace %s has room for %s%s, and the run needs %s: take fewer pairs (spec.pairs) or less for each pod (spec.target.kubernetes.resources), or leave out -n, so that the run creates its own namespaces",
				q.Name, p.namespace, room.String(), what, need.String())
		}
	}
	return nil
}

// needOf returns how much a run with these pods needs of a resource that a quota limits, and what that is; 0 if it is unknown.
func (p *Pods) needOf(pods []*corev1.Pod, name corev1.ResourceName) (need resource.Quantity, what string) {
	count := func(n int, what string) (resource.Quantity, string) {
		return *resource.NewQuantity(int64(n), resource.DecimalSI), what
	}
	switch name {
	case corev1.ResourcePods, "count/pods":
		return count(len(pods), " pods")
	case corev1.ResourceServices, "count/services":
		return count(p.services(pods), " services")
	}
	of := corev1.ResourceName(strings.TrimPrefix(strings.TrimPrefix(string(name), "limits."), "requests."))
	for _, pod := range pods {
		need.Add(pod.Spec.Containers[0].Resources.Limits[of]) // requests are the same
	}
	return need, " of " + string(name)
}

// services is the number of services in front of pods.
func (p *Pods) services(pods []*corev1.Pod) (n int) {
	for _, pod := range pods {
		if listens(pod) {
			n += 1 + len(p.config.Backends)
		}
	}
	return n
}

// meshed returns a note if the pods of a namespace that the user names are in a service mesh that changes nothing in them, "" if not.
func (p *Pods) meshed(ctx context.Context) string {
	if !p.inNamedNamespace {
		return ""
	}
	n, err := p.cluster.api.Namespaces().Get(ctx, p.namespace, metav1.GetOptions{})
	if err != nil || n.Labels[ambient] != "ambient" { // a run needs no permission to get it
		return ""
	}
	return fmt.Sprintf("namespace %s is in Istio's ambient mesh (label %s=ambient), so what is measured passes through a proxy on each node (ztunnel): leave out -n to measure the network alone", p.namespace, ambient)
}

// ambient is the label by which a namespace is in Istio's ambient mesh.
const ambient = "istio.io/dataplane-mode"

// isolated returns a note if network policies of the namespace keep the pods of a run apart, "" if not.
func (p *Pods) isolated(ctx context.Context) (string, error) {
	if !p.inNamedNamespace || !p.config.Pod && !p.config.Service {
		return "", nil
	}
	list, err := p.cluster.api.NetworkPolicies(p.namespace).List(ctx, metav1.ListOptions{})
	if apierrors.IsForbidden(err) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("list networkpolicies of %s: %w", p.namespace, explain(err))
	}
	own := labels.Set(p.labels())
	var names []string
	for _, direction := range []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress} {
		var closed []string
		open := false
		for _, n := range list.Items {
			if !matches(&n.Spec.PodSelector, own) || !slices.Contains(n.Spec.PolicyTypes, direction) { // the API server fills in types
				continue
			}
			closed = append(closed, n.Name)
			open = open || admitsPods(n.Spec, direction, own)
		}
		if !open {
			names = append(names, closed...)
		}
	}
	if len(names) == 0 {
		return "", nil
	}
	slices.Sort(names)
	return fmt.Sprintf("NetworkPolicy %s of namespace %s admits no traffic between the pods of a run, if the network plug-in enforces it: add one that admits pods with the label %s=%s from and to each other, or leave out -n",
		strings.Join(slices.Compact(names), ", "), p.namespace, labelName, appName), nil
}

// admitsPods reports whether a policy admits traffic of pods with these labels in its own namespace. Blocks of addresses may.
func admitsPods(spec networkingv1.NetworkPolicySpec, direction networkingv1.PolicyType, own labels.Set) bool {
	admits := func(peers []networkingv1.NetworkPolicyPeer) bool {
		return len(peers) == 0 || slices.ContainsFunc(peers, func(peer networkingv1.NetworkPolicyPeer) bool {
			return peer.IPBlock != nil || peer.NamespaceSelector != nil && peer.PodSelector == nil || matches(peer.PodSelector, own)
		})
	}
	if direction == networkingv1.PolicyTypeIngress {
		return slices.ContainsFunc(spec.Ingress, func(r networkingv1.NetworkPolicyIngressRule) bool { return len(r.Ports) == 0 && admits(r.From) })
	}
	return slices.ContainsFunc(spec.Egress, func(r networkingv1.NetworkPolicyEgressRule) bool { return len(r.Ports) == 0 && admits(r.To) })
}

func matches(selector *metav1.LabelSelector, set labels.Set) bool {
	s, err := metav1.LabelSelectorAsSelector(selector)
	return err == nil && s.Matches(set)
}
