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

	"slipstream.dev/internal/words"
)

// A run renews its lease every renewTime. It counts as dead if it has not done so for leaseTime.
const (
	renewTime = 10 * time.Second
	leaseTime = time.Minute
)

// downTime bounds the removal of a run's pods; lostTime if the cluster was unreachable already.
const (
	downTime = time.Minute
	lostTime = 10 * time.Second
)

// takeLease creates the lease that says that this run is alive, and renews it until Close.
func (p *Pods) takeLease(ctx context.Context) error {
	api := p.cluster.api.Leases(p.namespace)
	lease, err := api.Create(ctx, p.lease(holder(), nodesOf(p.spec), int32(leaseTime.Seconds()), p.cluster.now()), creation)
	if err != nil {
		return fmt.Errorf("create lease in namespace %s: %w", p.namespace, explain(err))
	}
	p.since = lease.CreationTimestamp.Time
	renewed := renewals{last: time.Now()}
	ctx, p.stopRenewing = context.WithCancel(context.WithoutCancel(ctx))
	p.renewing.Go(func() {
		tick := time.NewTicker(renewTime)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			now, err := json.Marshal(p.cluster.now())
			if err != nil {
				continue // a time always marshals
			}
			_, err = api.Patch(ctx, lease.Name, types.MergePatchType, fmt.Appendf(nil, `{"spec":{"renewTime":%s}}`, now), metav1.PatchOptions{})
			if apierrors.IsNotFound(err) {
				why := p.namespaceDeleted(ctx, p.namespace)
				if why == nil {
					why = errors.New("its lease was deleted, as by slipstream cleanup --all")
				}
				_ = p.lose(nil, why)
				return
			}
			if text := renewed.add(err); text != "" && ctx.Err() == nil {
				p.config.Note("the lease of run " + p.id + text)
			}
		}
	})
	return nil
}

// renewals records whether a lease is being renewed.
type renewals struct {
	// last is the time of the last renewal that succeeded. late means that the user was told that none does.
	last time.Time
	late bool
}

// add records the result of a renewal. It returns a note for the user, once when none has succeeded for a third of leaseTime, and once
// when one does again; otherwise "". A run uses open connections, so it may not notice by itself that the API server refuses it.
func (r *renewals) add(err error) string {
	if err == nil {
		late := r.late
		*r = renewals{last: time.Now()}
		if late {
			return " is renewed again"
		}
		return ""
	}
	since := time.Since(r.last)
	if r.late || since < leaseTime/3 {
		return ""
	}
	r.late = true
	return fmt.Sprintf(" has not been renewed for %s (%v). The run continues; but once the lease is older than %s, another run may use its nodes, and slipstream cleanup may remove its pods",
		since.Round(time.Second), explain(err), leaseTime)
}

// now is the time of a lease.
func (c *Cluster) now() metav1.MicroTime { return metav1.NewMicroTime(c.clock.Now()) }

// CloseTime bounds how long Close takes.
func (p *Pods) CloseTime() time.Duration { return downTime + p.endpointsTime() }

// Close removes all that the run created, and returns when it is gone. The error names what could not
// be removed.
func (p *Pods) Close(ctx context.Context) error {
	limit := p.CloseTime()
	if p.isLost(nil) != nil {
		limit = lostTime
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	defer p.renewing.Wait()
	defer p.stopRenewing() // only when all is gone, so that nobody else removes it meanwhile
	r := Run{ID: p.id, Own: []string{p.namespace, p.nodes}}
	if p.inNamedNamespace {
		r = Run{ID: p.id, Within: []string{p.namespace}}
	}
	r.More = p.endpointsTime()
	if err := p.cluster.Remove(ctx, r); err != nil {
		return fmt.Errorf("%w\n%s", err, p.left())
	}
	return nil
}

// left says what a run that could not clean up has left, with the command that removes it, and who can run that.
func (p *Pods) left() string {
	what := words.Count(len(p.traffic)+len(p.host)+p.nodePodCount(), "pod")
	if p.inNamedNamespace {
		return fmt.Sprintf("up to %s and a lease of run %s may be left in namespace %s. To remove them: slipstream cleanup%s -n %[3]s\n"+
			"whoever may list and delete pods, services and leases there can run it, such as with the role edit; the pods restore the settings of their nodes as they end",
			what, p.id, p.namespace, p.cluster.flags)
	}
	own := []string{p.namespace}
	if p.nodePods() {
		own = append(own, p.nodes)
	}
	return fmt.Sprintf("up to %s of run %s may be left in its namespaces %s. To remove them: slipstream cleanup%s\n"+
		"whoever may list and delete namespaces, pods, services and leases in the cluster can run it; the pods restore the settings of their nodes as they end",
		what, p.id, words.And(own), p.cluster.flags)
}

// nodePodCount is the number of pods on the nodes: pods for traffic share them.
func (p *Pods) nodePodCount() (n int) {
	for _, node := range nodesOf(p.spec) {
		if p.control[node] != nil {
			n++
		}
	}
	return n
}

// Run describes what a run has in the cluster.
type Run struct {
	ID string
	// Own are namespaces of the run; Within are others that it has objects in.
	Own, Within []string
	// Pods that it has.
	Pods int
	// Holder is the process that runs it, Nodes those that it measures.
	Holder string
	Nodes  []string
	// Alive means that its process has renewed its lease within the last minute, by the API server's clock.
	Alive bool
	// Since is when the API server created its lease.
	Since time.Time
	// More is how much longer than usual its removal may take.
	More time.Duration
}

func (r Run) String() string {
	return fmt.Sprintf("run %s: %d pods in %s", r.ID, r.Pods, strings.Join(slices.Concat(r.Own, r.Within), ", "))
}

// Runs returns the runs that have objects in the cluster, or in the one namespace that Access names.
// It also returns the objects that have the labels of a run and that no run created.
func (c *Cluster) Runs(ctx context.Context) ([]Run, []Foreign, error) {
	f := finding{byID: make(map[string]*Run)}
	list := metav1.ListOptions{LabelSelector: selector}
	if c.namespace == "" {
		namespaces, err := c.api.Namespaces().List(ctx, list)
		if err != nil {
			return nil, nil, fmt.Errorf("list namespaces: %w", explain(err))
		}
		for i := range namespaces.Items {
			n := &namespaces.Items[i]
			if r := f.of("namespace", n.ObjectMeta, foreignNamespace(n)); r != nil {
				r.Own = append(r.Own, n.Name)
				// A new one has no lease yet.
				r.Alive = r.Alive || n.DeletionTimestamp == nil && c.clock.Since(n.CreationTimestamp.Time) < leaseTime
			}
		}
	}
	pods, err := c.api.Pods(c.namespace).List(ctx, list)
	if err != nil {
		return nil, nil, fmt.Errorf("list pods: %w", explain(err))
	}
	for i := range pods.Items {
		if r := f.of("pod", pods.Items[i].ObjectMeta, foreignPod(&pods.Items[i])); r != nil {
			r.Pods++
		}
	}
	services, err := c.api.Services(c.namespace).List(ctx, list)
	if apierrors.IsForbidden(err) { // a run without services does not need the permission
		services, err = &corev1.ServiceList{}, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("list services: %w", explain(err))
	}
	for i := range services.Items {
		if r := f.of("service", services.Items[i].ObjectMeta, foreignService(&services.Items[i])); r != nil {
			r.More += time.Duration(backendsOf(services.Items[i].ObjectMeta)) * endpointTime
		}
	}
	leases, err := c.api.Leases(c.namespace).List(ctx, list)
	if err != nil {
		return nil, nil, fmt.Errorf("list leases: %w", explain(err))
	}
	for _, l := range leases.Items {
		r := f.of("lease", l.ObjectMeta, foreignLease(l.ObjectMeta))
		if r == nil {
			continue
		}
		r.Nodes = strings.Split(l.Annotations[annotationNodes], ",")
		if l.Spec.HolderIdentity != nil {
			r.Holder = *l.Spec.HolderIdentity
		}
		r.Since = l.CreationTimestamp.Time
		r.Alive = l.Spec.RenewTime != nil && c.clock.Since(l.Spec.RenewTime.Time) < leaseTime
	}
	var all []Run
	for _, r := range f.byID {
		all = append(all, *r)
	}
	slices.SortFunc(all, func(a, b Run) int { return cmp.Compare(a.ID, b.ID) })
	return all, f.foreign, nil
}

// finding collects what Runs finds.
type finding struct {
	byID    map[string]*Run
	foreign []Foreign
}

// of returns the run that an object belongs to; nil if no run created it.
func (f *finding) of(kind string, m metav1.ObjectMeta, foreign string) *Run {
	if foreign != "" {
		f.foreign = append(f.foreign, Foreign{kind, strings.TrimPrefix(m.Namespace+"/"+m.Name, "/"), foreign})
		return nil
	}
	id := m.Labels[labelRun]
	if f.byID[id] == nil {
		f.byID[id] = &Run{ID: id}
	}
	r := f.byID[id]
	if m.Namespace != "" && !slices.Contains(r.Own, m.Namespace) && !slices.Contains(r.Within, m.Namespace) {
		r.Within = append(r.Within, m.Namespace)
	}
	return r
}

// Remove removes the objects of a run: first the pods, which restore the settings of their nodes as
// they end, and last the lease. It skips objects with the run's labels that no run created, and a
// namespace of the run that has pods of somebody else.
func (c *Cluster) Remove(ctx context.Context, r Run) error {
	if !runID.MatchString(r.ID) {
		return fmt.Errorf("remove a run: %q is not the name of a run", r.ID)
	}
	ctx, cancel := context.WithTimeout(ctx, downTime+r.More)
	defer cancel()
	own, err := c.ownNamespaces(ctx, r)
	if err != nil {
		return err
	}
	if err := c.removePods(ctx, r); err != nil {
		if !errors.Is(err, errTerminating) {
			return err
		}
		// The pods of a dead node end when it comes back, or when it is removed; the rest need not wait for that.
		more, cancel := context.WithTimeout(context.WithoutCancel(ctx), restTime+r.More)
		defer cancel()
		return errors.Join(err, c.removeNamespaces(more, own), c.removeWithin(more, r))
	}
	if err := c.removeNamespaces(ctx, own); err != nil {
		return err
	}
	for _, n := range own {
		if err := c.waitGone(ctx, n); err != nil {
			return err
		}
	}
	return c.removeWithin(ctx, r)
}

// restTime bounds how long the removal of a run's other objects may take if some of its pods do not end.
const restTime = 20 * time.Second

// removeNamespaces deletes namespaces of the run, and does not wait until they are gone.
func (c *Cluster) removeNamespaces(ctx context.Context, own []*corev1.Namespace) error {
	for _, n := range own {
		if err := c.onlyOurs(ctx, n.Name); err != nil {
			return err
		}
		err := c.api.Namespaces().Delete(ctx, n.Name, only(n.ObjectMeta))
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("delete namespace %s: %w", n.Name, explain(err))
		}
	}
	return nil
}

// removeWithin removes what the run has in namespaces that it did not create.
func (c *Cluster) removeWithin(ctx context.Context, r Run) error {
	for _, n := range r.Within {
		if err := c.removeRest(ctx, n, r.ID); err != nil {
			return err
		}
	}
	return nil
}

// ownNamespaces returns the run's own namespaces that still exist.
func (c *Cluster) ownNamespaces(ctx context.Context, r Run) (own []*corev1.Namespace, err error) {
	for _, name := range r.Own {
		n, err := c.api.Namespaces().Get(ctx, name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			continue
		case err != nil:
			return nil, fmt.Errorf("get namespace %s: %w", name, explain(err))
		}
		if why := foreignNamespace(n); why != "" || n.Labels[labelRun] != r.ID {
			return nil, fmt.Errorf("namespace %s does not belong to run %s and is not deleted: %s", name, r.ID, cmp.Or(why, "its label names another run"))
		}
		own = append(own, n)
	}
	return own, nil
}

// onlyOurs returns an error if a namespace that is about to be deleted has pods of somebody else.
func (c *Cluster) onlyOurs(ctx context.Context, namespace string) error {
	pods, err := c.api.Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list pods of %s: %w", namespace, explain(err))
	}
	var others []string
	for i := range pods.Items {
		if why := foreignPod(&pods.Items[i]); why != "" {
			others = append(others, fmt.Sprintf("%s (%s)", pods.Items[i].Name, why))
		}
	}
	if len(others) > 0 {
		return fmt.Errorf("namespace %s is not deleted, because it has pods that no run created: %s; delete it when they are gone", namespace, strings.Join(others, ", "))
	}
	return nil
}

func (c *Cluster) waitGone(ctx context.Context, n *corev1.Namespace) error {
	waits := ""
	for {
		now, err := c.api.Namespaces().Get(ctx, n.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) || err == nil && now.UID != n.UID {
			return nil
		}
		if err != nil && !unreachable(err) {
			return fmt.Errorf("get namespace %s: %w", n.Name, explain(err))
		}
		if err == nil {
			waits = waitsFor(now)
		}
		if pause(ctx) != nil {
			return fmt.Errorf("namespace %s is still being deleted%s", n.Name, waits)
		}
	}
}

// waitsFor says what the deletion of a namespace waits for, as a continuation of a sentence; "" if the API server does not say.
func waitsFor(n *corev1.Namespace) string {
	var all []string
	for _, c := range n.Status.Conditions {
		if c.Status == corev1.ConditionTrue {
			all = append(all, c.Message)
		}
	}
	if len(all) == 0 {
		return ""
	}
	return ": " + strings.Join(all, "; ")
}

// removeRest removes a run's services, their slices, and its lease from a namespace that the run did not create.
func (c *Cluster) removeRest(ctx context.Context, namespace, id string) error {
	list := metav1.ListOptions{LabelSelector: labelRun + "=" + id}
	services, err := c.api.Services(namespace).List(ctx, list)
	if err != nil && !apierrors.IsForbidden(err) { // a run without services does not need the permission
		return fmt.Errorf("list services of %s: %w", namespace, explain(err))
	}
	if err == nil {
		if err := c.removeSlices(ctx, namespace, id, services.Items); err != nil { // a slice would outlive its service
			return err
		}
		for i := range services.Items {
			s := &services.Items[i]
			if foreignService(s) != "" {
				continue
			}
			if err := c.api.Services(namespace).Delete(ctx, s.Name, only(s.ObjectMeta)); err != nil && !apierrors.IsNotFound(err) {
				return fmt.Errorf("delete service %s/%s: %w", namespace, s.Name, explain(err))
			}
		}
	}
	leases, err := c.api.Leases(namespace).List(ctx, list)
	if err != nil {
		return fmt.Errorf("list leases of %s: %w", namespace, explain(err))
	}
	for _, l := range leases.Items {
		if foreignLease(l.ObjectMeta) != "" {
			continue
		}
		if err := c.api.Leases(namespace).Delete(ctx, l.Name, only(l.ObjectMeta)); err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("delete lease %s/%s: %w", namespace, l.Name, explain(err))
		}
	}
	return nil
}

// errTerminating means that removePods gave up although all pods had been told to end.
var errTerminating = errors.New("pods are still terminating")

// removePods deletes a run's pods and waits until they are gone. It tries again where the API server does not answer.
func (c *Cluster) removePods(ctx context.Context, r Run) error {
	told := make(map[string]bool)
	var left []string
	for {
		now, err := c.deletePods(ctx, r, told)
		if err == nil {
			left = now
		}
		switch {
		case err == nil && len(left) == 0:
			return nil
		case err != nil && !unreachable(err):
			return err
		}
		if pause(ctx) == nil {
			continue
		}
		if err != nil && len(left) == 0 {
			return err
		}
		return fmt.Errorf("%w: %s", errTerminating, strings.Join(left, ", "))
	}
}

// deletePods deletes the pods of a run that have not been told to end yet, and returns all that still
// exist.
func (c *Cluster) deletePods(ctx context.Context, r Run, told map[string]bool) (left []string, err error) {
	for _, n := range slices.Concat(r.Own, r.Within) {
		pods, err := c.api.Pods(n).List(ctx, metav1.ListOptions{LabelSelector: labelRun + "=" + r.ID})
		if err != nil {
			return nil, fmt.Errorf("list pods of %s: %w", n, explain(err))
		}
		for i := range pods.Items {
			p := &pods.Items[i]
			if foreignPod(p) != "" {
				continue
			}
			name := n + "/" + p.Name
			left = append(left, fmt.Sprintf("%s on node %s", name, p.Spec.NodeName))
			if told[name] || p.DeletionTimestamp != nil {
				continue
			}
			if err := c.api.Pods(n).Delete(ctx, p.Name, only(p.ObjectMeta)); err != nil && !apierrors.IsNotFound(err) {
				return nil, fmt.Errorf("delete pod %s: %w", name, explain(err))
			}
			told[name] = true
		}
	}
	return left, nil
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
