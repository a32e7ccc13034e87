package kube

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// A run renews its lease every beatTime; one that has not for leaseTime is dead.
const (
	beatTime  = 10 * time.Second
	leaseTime = time.Minute
)

// downTime is how long taking a run's pods down may take; lostTime where the
// cluster was out of reach already.
const (
	downTime = time.Minute
	lostTime = 10 * time.Second
)

// beat takes the lease that says that this run is alive, and keeps it until Close.
func (p *Pods) beat(ctx context.Context) error {
	api := p.cluster.api.Leases(p.namespace)
	lease, err := api.Create(ctx, p.lease(holder(), p.spec.ClientNode, p.spec.ServerNode, int32(leaseTime.Seconds()), metav1.NowMicro()), metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("create lease in namespace %s: %w", p.namespace, explain(err))
	}
	ctx, p.stopBeating = context.WithCancel(context.WithoutCancel(ctx))
	p.beating.Go(func() {
		tick := time.NewTicker(beatTime)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			now, err := json.Marshal(metav1.NowMicro())
			if err != nil {
				continue // a time always has a form in JSON
			}
			_, err = api.Patch(ctx, lease.Name, types.MergePatchType, fmt.Appendf(nil, `{"spec":{"renewTime":%s}}`, now), metav1.PatchOptions{})
			if apierrors.IsNotFound(err) {
				_ = p.lose(errors.New("somebody has removed this run from the cluster (slipstream cleanup --all)"))
				return
			}
			// An API server that is away is noticed where it is needed.
		}
	})
	return nil
}

// Close removes all that the run made, and returns when it is gone. What could
// not be removed is the error's matter.
func (p *Pods) Close(ctx context.Context) error {
	limit := downTime
	if p.hopeless() != nil {
		limit = lostTime
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	defer p.beating.Wait()
	defer p.stopBeating() // alive until all is gone, so that nobody else removes it meanwhile
	r := Run{ID: p.id, Own: []string{p.namespace, p.nodes}}
	if p.theirs {
		r = Run{ID: p.id, Within: []string{p.namespace}}
	}
	if err := p.cluster.Remove(ctx, r); err != nil {
		return fmt.Errorf("%w\nslipstream cleanup removes what is left, once the cluster lets it", err)
	}
	return nil
}

// Run is what a run has in the cluster.
type Run struct {
	ID string
	// Own are namespaces of the run; Within are others that it has objects in.
	Own, Within []string
	// Pods that it has.
	Pods int
	// Holder is the process that runs it, Nodes those that it measures.
	Holder string
	Nodes  []string
	// Alive tells that its process has renewed its lease within the last minute,
	// by this machine's clock.
	Alive bool
}

func (r Run) String() string {
	return fmt.Sprintf("run %s: %d pods in %s", r.ID, r.Pods, strings.Join(slices.Concat(r.Own, r.Within), ", "))
}

// Runs are all that runs have in the cluster, or in the one namespace that Access
// names.
func (c *Cluster) Runs(ctx context.Context) ([]Run, error) {
	byID := make(map[string]*Run)
	of := func(m metav1.ObjectMeta) *Run {
		id := m.Labels[labelRun]
		if byID[id] == nil {
			byID[id] = &Run{ID: id}
		}
		return byID[id]
	}
	list := metav1.ListOptions{LabelSelector: selector}
	if c.namespace == "" {
		namespaces, err := c.api.Namespaces().List(ctx, list)
		if err != nil {
			return nil, fmt.Errorf("list namespaces: %w", explain(err))
		}
		for _, n := range namespaces.Items {
			r := of(n.ObjectMeta)
			r.Own = append(r.Own, n.Name)
			// One that was made just now has no lease yet.
			r.Alive = r.Alive || n.DeletionTimestamp == nil && time.Since(n.CreationTimestamp.Time) < leaseTime
		}
	}
	within := func(m metav1.ObjectMeta) *Run {
		r := of(m)
		if !slices.Contains(r.Own, m.Namespace) && !slices.Contains(r.Within, m.Namespace) {
			r.Within = append(r.Within, m.Namespace)
		}
		return r
	}
	pods, err := c.api.Pods(c.namespace).List(ctx, list)
	if err != nil {
		return nil, fmt.Errorf("list pods: %w", explain(err))
	}
	for _, p := range pods.Items {
		within(p.ObjectMeta).Pods++
	}
	services, err := c.api.Services(c.namespace).List(ctx, list)
	if err != nil {
		return nil, fmt.Errorf("list services: %w", explain(err))
	}
	for _, s := range services.Items {
		within(s.ObjectMeta)
	}
	leases, err := c.api.Leases(c.namespace).List(ctx, list)
	if err != nil {
		return nil, fmt.Errorf("list leases: %w", explain(err))
	}
	for _, l := range leases.Items {
		r := within(l.ObjectMeta)
		r.Nodes = strings.Split(l.Annotations[annotationNodes], ",")
		if l.Spec.HolderIdentity != nil {
			r.Holder = *l.Spec.HolderIdentity
		}
		r.Alive = l.Spec.RenewTime != nil && time.Since(l.Spec.RenewTime.Time) < leaseTime
	}
	var all []Run
	for _, r := range byID {
		all = append(all, *r)
	}
	slices.SortFunc(all, func(a, b Run) int { return cmp.Compare(a.ID, b.ID) })
	return all, nil
}

// Remove removes what a run has: the pods first, whose end restores what they had
// set on their nodes, and the lease last.
func (c *Cluster) Remove(ctx context.Context, r Run) error {
	if r.ID == "" {
		return errors.New("remove a run: it has no name") // every object would be its
	}
	ctx, cancel := context.WithTimeout(ctx, downTime)
	defer cancel()
	list := metav1.ListOptions{LabelSelector: labelRun + "=" + r.ID}
	if err := c.removePods(ctx, slices.Concat(r.Own, r.Within), list); err != nil {
		return err
	}
	for _, n := range r.Own {
		err := c.api.Namespaces().Delete(ctx, n, metav1.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("delete namespace %s: %w", n, explain(err))
		}
	}
	for _, n := range r.Own {
		for {
			_, err := c.api.Namespaces().Get(ctx, n, metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				break
			}
			if err != nil && !unreachable(err) {
				return fmt.Errorf("look at namespace %s: %w", n, explain(err))
			}
			if pause(ctx) != nil {
				return fmt.Errorf("namespace %s is still being deleted", n)
			}
		}
	}
	for _, n := range r.Within {
		services, err := c.api.Services(n).List(ctx, list)
		if err != nil && !apierrors.IsForbidden(err) { // a run without services does not need the right
			return fmt.Errorf("list services of %s: %w", n, explain(err))
		}
		if err == nil {
			for _, s := range services.Items {
				if err := c.api.Services(n).Delete(ctx, s.Name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
					return fmt.Errorf("delete service %s/%s: %w", n, s.Name, explain(err))
				}
			}
		}
		leases, err := c.api.Leases(n).List(ctx, list)
		if err != nil {
			return fmt.Errorf("list leases of %s: %w", n, explain(err))
		}
		for _, l := range leases.Items {
			if err := c.api.Leases(n).Delete(ctx, l.Name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
				return fmt.Errorf("delete lease %s/%s: %w", n, l.Name, explain(err))
			}
		}
	}
	return nil
}

// removePods deletes pods and waits until they are gone.
func (c *Cluster) removePods(ctx context.Context, namespaces []string, list metav1.ListOptions) error {
	told := make(map[string]bool)
	for {
		var left []string
		for _, n := range namespaces {
			pods, err := c.api.Pods(n).List(ctx, list)
			if err != nil {
				return fmt.Errorf("list pods of %s: %w", n, explain(err))
			}
			for _, p := range pods.Items {
				name := n + "/" + p.Name
				left = append(left, fmt.Sprintf("%s on node %s", name, p.Spec.NodeName))
				if told[name] || p.DeletionTimestamp != nil {
					continue
				}
				if err := c.api.Pods(n).Delete(ctx, p.Name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
					return fmt.Errorf("delete pod %s: %w", name, explain(err))
				}
				told[name] = true
			}
		}
		if len(left) == 0 {
			return nil
		}
		if pause(ctx) != nil {
			return fmt.Errorf("pods are told to end and have not: %s", strings.Join(left, ", "))
		}
	}
}

// remove deletes some of the run's pods.
func (p *Pods) remove(ctx context.Context, pods []*corev1.Pod) error {
	for _, pod := range pods {
		err := p.cluster.api.Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("delete pod %s/%s: %w", pod.Namespace, pod.Name, explain(err))
		}
	}
	return nil
}
