// Package kube connects an agent to a cluster: it watches the policies that select the node and the
// pods that run there, rolls policies out together with the agents of other nodes, writes statuses
// and events, and asks who may get metrics. internal/agent applies what is wanted; without a cluster
// it reads a file, and nothing of this is needed.
package kube

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"slipstream.dev/internal/agent"

	appsv1 "k8s.io/api/apps/v1"
	authentication "k8s.io/api/authentication/v1"
	authorization "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"slipstream.dev/api/v1alpha1"
)

// Options of an agent in a cluster.
type Options struct {
	// Node is the node's name in the cluster.
	Node string
	// DaemonSet is NAMESPACE/NAME of the agent's DaemonSet. If it is empty, the agent is never
	// uninstalled.
	DaemonSet string
	// Proc is the host's /proc if empty.
	Proc string
	Log  *slog.Logger
}

// Cluster reads an agent's policies from a cluster, and writes their state there: the NodeAcceleration of
// the node, which only this agent writes; events on the Node; and each policy's condition Selected. The
// condition does not count nodes, as that would need a controller that watches all of them. The first
// agent whose node is selected sets it, or, after a while, one that finds it unset.
//
// While the API server does not answer, nothing changes on the node.
type Cluster struct {
	options            Options
	core, ours, apps   rest.Interface
	nodes, pods, rules cache.Store
	synced             []cache.InformerSynced
	informers          []cache.Controller
	changed            chan struct{}
	events             chan agent.Event
	reviewer           *reviewer

	mu     sync.Mutex
	status *agent.Status
	// deleted: the deletion of the DaemonSet was observed.
	deleted bool
	dirty   chan struct{}
	// turns are the policies that select the node, by UID.
	turns map[types.UID]*turn
	clock serverClock
	pace  pace
	// losses reads the node's counters.
	losses func() losses
}

// Connect is New by a kubeconfig file, or in a pod if that is empty.
func Connect(kubeconfig string, o Options) (*Cluster, error) {
	var config *rest.Config
	var err error
	if kubeconfig == "" {
		config, err = rest.InClusterConfig()
	} else {
		config, err = clientcmd.BuildConfigFromFlags("", kubeconfig)
	}
	if err != nil {
		return nil, fmt.Errorf("connect to the cluster: %w", err)
	}
	klog.SetSlogLogger(o.Log)
	return New(config, o)
}

// New prepares the watches. It sends no request yet.
func New(config *rest.Config, o Options) (*Cluster, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, appsv1.AddToScheme, authentication.AddToScheme, authorization.AddToScheme, v1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	c := &Cluster{
		options: o, changed: make(chan struct{}, 1), dirty: make(chan struct{}, 1), events: make(chan agent.Event, 32), turns: make(map[types.UID]*turn), pace: rolloutPace,
	}
	c.losses = c.readLosses
	client := func(gv schema.GroupVersion, path string) (rest.Interface, error) {
		config := rest.CopyConfig(config)
		config.Wrap(c.clock.follow)
		config.GroupVersion, config.APIPath = &gv, path
		config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
		return rest.RESTClientFor(config)
	}
	var err error
	if c.core, err = client(corev1.SchemeGroupVersion, "/api"); err != nil {
		return nil, fmt.Errorf("connect to the cluster: %w", err)
	}
	if c.ours, err = client(v1alpha1.GroupVersion, "/apis"); err != nil {
		return nil, fmt.Errorf("connect to the cluster: %w", err)
	}
	if c.apps, err = client(appsv1.SchemeGroupVersion, "/apis"); err != nil {
		return nil, fmt.Errorf("connect to the cluster: %w", err)
	}
	authn, err := client(authentication.SchemeGroupVersion, "/apis")
	if err != nil {
		return nil, fmt.Errorf("connect to the cluster: %w", err)
	}
	authz, err := client(authorization.SchemeGroupVersion, "/apis")
	if err != nil {
		return nil, fmt.Errorf("connect to the cluster: %w", err)
	}
	c.reviewer = newReviewer(authn, authz)
	c.nodes = c.inform(c.core, "nodes", "", fields.OneTermEqualSelector("metadata.name", o.Node), &corev1.Node{}, slimNode)
	c.pods = c.inform(c.core, "pods", "", fields.OneTermEqualSelector("spec.nodeName", o.Node), &corev1.Pod{}, slimPod)
	c.rules = c.inform(c.ours, "accelerationpolicies", "", fields.Everything(), &v1alpha1.AccelerationPolicy{}, nil)
	if namespace, name, ok := strings.Cut(o.DaemonSet, "/"); ok {
		c.inform(c.apps, "daemonsets", namespace, fields.OneTermEqualSelector("metadata.name", name), &appsv1.DaemonSet{}, slimDaemonSet)
	}
	return c, nil
}

// inform watches a resource. It keeps only the needed fields, so that a thousand pods take little memory.
func (c *Cluster) inform(client rest.Interface, resource, namespace string, which fields.Selector, of runtime.Object, slim cache.TransformFunc) cache.Store {
	signal := func(any) { poke(c.changed) }
	store, controller := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.NewListWatchFromClient(client, resource, namespace, which),
		ObjectType:    of,
		Transform:     slim,
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc: func(now any) {
				c.watchDaemonSet(now, false)
				signal(nil)
			},
			UpdateFunc: func(_, now any) {
				c.watchDaemonSet(now, false)
				signal(nil)
			},
			DeleteFunc: func(was any) {
				c.watchDaemonSet(was, true)
				signal(nil)
			},
		},
	})
	c.informers = append(c.informers, controller)
	c.synced = append(c.synced, controller.HasSynced)
	return store
}

func poke(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

func slimNode(o any) (any, error) {
	if n, ok := o.(*corev1.Node); ok {
		slim := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name, UID: n.UID, Labels: n.Labels, ResourceVersion: n.ResourceVersion}}
		if at := readyCondition(n); at != nil {
			slim.Status.Conditions = []corev1.NodeCondition{{Type: at.Type, Status: at.Status}}
		}
		return slim, nil
	}
	return o, nil
}

func slimPod(o any) (any, error) {
	p, ok := o.(*corev1.Pod)
	if !ok {
		return o, nil
	}
	slim := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name, UID: p.UID, Labels: p.Labels, ResourceVersion: p.ResourceVersion}}
	slim.Spec.HostNetwork, slim.Status.Phase, slim.Status.PodIPs = p.Spec.HostNetwork, p.Status.Phase, p.Status.PodIPs
	return slim, nil
}

func slimDaemonSet(o any) (any, error) {
	if d, ok := o.(*appsv1.DaemonSet); ok {
		return &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: d.Namespace, Name: d.Name, ResourceVersion: d.ResourceVersion, DeletionTimestamp: d.DeletionTimestamp}}, nil
	}
	return o, nil
}

func (c *Cluster) watchDaemonSet(o any, gone bool) {
	if unknown, ok := o.(cache.DeletedFinalStateUnknown); ok {
		o = unknown.Obj
	}
	d, ok := o.(*appsv1.DaemonSet)
	if !ok {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.deleted = gone || d.DeletionTimestamp != nil; c.deleted {
		poke(c.dirty) // while the agent still has permission
	}
}

// Uninstalled reports, when the agent stops, whether its DaemonSet is deleted or being deleted. Deleting
// the chart removes the agent's permissions too, so missing permissions mean the same; no answer does not.
func (c *Cluster) Uninstalled(ctx context.Context) bool {
	namespace, name, ok := strings.Cut(c.options.DaemonSet, "/")
	if !ok {
		return false
	}
	c.mu.Lock()
	deleted := c.deleted
	c.mu.Unlock()
	if deleted {
		return true
	}
	var d appsv1.DaemonSet
	err := c.apps.Get().Namespace(namespace).Resource("daemonsets").Name(name).Do(ctx).Into(&d)
	if err == nil {
		return d.DeletionTimestamp != nil
	}
	return apierrors.IsNotFound(err) || apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err)
}

// Forget deletes the node's NodeAcceleration, the last thing that an uninstalled agent does.
func (c *Cluster) Forget(ctx context.Context) error {
	err := c.ours.Delete().Resource("nodeaccelerations").Name(c.options.Node).Do(ctx).Error()
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// Publish is the agent's Options.Publish: it passes the status to Run.
func (c *Cluster) Publish(s agent.Status) {
	c.mu.Lock()
	c.status = &s
	c.mu.Unlock()
	poke(c.dirty)
}

// Notify is the agent's Options.Notify: it passes an event to Run. If there are too many, it drops some;
// the log has them all.
func (c *Cluster) Notify(e agent.Event) {
	select {
	case c.events <- e:
	default:
	}
}

// Run calls set whenever the policies or pods change, and writes what Publish and Notify passed, until ctx
// is done.
func (c *Cluster) Run(ctx context.Context, set func(agent.Desired)) {
	var all sync.WaitGroup
	defer all.Wait()
	for _, informer := range c.informers {
		all.Go(func() { informer.RunWithContext(ctx) })
	}
	if !cache.WaitForCacheSync(ctx.Done(), c.synced...) {
		return
	}
	all.Go(func() { c.writeStatus(ctx) })
	all.Go(func() { c.writeEvents(ctx) })
	all.Go(func() { c.markPolicies(ctx) })
	all.Go(func() { c.rollOut(ctx) })
	var last *agent.Desired
	for {
		if d := c.desired(); last == nil || !same(*last, d) {
			set(d)
			last = &d
		}
		select {
		case <-ctx.Done():
			return
		case <-c.changed:
		}
	}
}

// same reports whether two Desired are equal.
func same(a, b agent.Desired) bool {
	return reflect.DeepEqual(a.Pods, b.Pods) && slices.EqualFunc(a.Policies, b.Policies, func(p, q agent.Policy) bool {
		return p.Name == q.Name && p.Generation == q.Generation && p.Selector == q.Selector && p.Withheld == q.Withheld &&
			reflect.DeepEqual(p.Accelerate, q.Accelerate) && p.VF == q.VF && fmt.Sprint(p.Invalid) == fmt.Sprint(q.Invalid)
	})
}

// node returns this node, nil if the cluster does not have it.
func (c *Cluster) node() *corev1.Node {
	for _, o := range c.nodes.List() {
		if n, ok := o.(*corev1.Node); ok {
			return n
		}
	}
	return nil
}

// policies returns the cluster's policies that are not being deleted, the oldest first.
func (c *Cluster) policies() []*v1alpha1.AccelerationPolicy {
	var all []*v1alpha1.AccelerationPolicy
	for _, o := range c.rules.List() {
		if p, ok := o.(*v1alpha1.AccelerationPolicy); ok && p.DeletionTimestamp == nil {
			all = append(all, p)
		}
	}
	slices.SortFunc(all, func(p, q *v1alpha1.AccelerationPolicy) int {
		return cmp.Or(p.CreationTimestamp.Compare(q.CreationTimestamp.Time), strings.Compare(p.Name, q.Name))
	})
	return all
}

func selects(p *v1alpha1.AccelerationPolicy, n *corev1.Node) bool {
	selector, err := p.Spec.Nodes()
	return err == nil && n != nil && selector.Matches(labels.Set(n.Labels))
}

func (c *Cluster) desired() agent.Desired {
	var d agent.Desired
	node, wantsPods := c.node(), false
	all := c.policies()
	c.forget(all, node)
	for _, p := range all {
		if !selects(p, node) {
			continue
		}
		policy := agent.Policy{Name: p.Name, Generation: p.Generation}
		complete, err := p.Complete()
		if err != nil {
			policy.Invalid = err
			d.Policies = append(d.Policies, policy)
			continue
		}
		policy.Accelerate, policy.VF = complete.Spec.Accelerators()
		if selector := complete.Spec.Pods; selector != nil {
			s, err := metav1.LabelSelectorAsSelector(selector) // Complete has checked it
			if err == nil {
				policy.Selector = s.String()
				policy.Pods = func(l map[string]string) bool { return s.Matches(labels.Set(l)) }
			}
		}
		policy = c.atItsTurn(p, policy)
		wantsPods = wantsPods || policy.Pods != nil
		d.Policies = append(d.Policies, policy)
	}
	if !wantsPods {
		return d // so that pods that come and go make no difference
	}
	for _, o := range c.pods.List() {
		p, ok := o.(*corev1.Pod)
		if !ok || p.Spec.HostNetwork || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
			continue
		}
		pod := agent.Pod{Name: p.Namespace + "/" + p.Name, Labels: p.Labels}
		for _, ip := range p.Status.PodIPs {
			if address, err := netip.ParseAddr(ip.IP); err == nil {
				pod.Addresses = append(pod.Addresses, address)
			}
		}
		if len(pod.Addresses) > 0 {
			d.Pods = append(d.Pods, pod)
		}
	}
	slices.SortFunc(d.Pods, func(p, q agent.Pod) int { return strings.Compare(p.Name, q.Name) })
	return d
}

// Intervals of writing to the cluster.
const (
	// between two writes of the status, so that thirty starting pods cause only one.
	between = time.Second
	// retry after the API server rejected a write.
	retry = 10 * time.Second
	// patience before an agent says that a policy selects no node. Each agent waits for another part of
	// it, so that mostly only the first writes.
	patience = 10 * time.Second
	// quiet is for how long an equal event is not repeated.
	quiet = 10 * time.Minute
)

// pause waits, and reports whether to continue.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

func (c *Cluster) writeStatus(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.dirty:
		}
		c.mu.Lock()
		s, deleted := c.status, c.deleted
		c.mu.Unlock()
		wait := between
		var err error
		switch {
		case deleted:
			err = c.Forget(ctx)
		case s != nil:
			err = c.patchStatus(ctx, *s)
		}
		if err != nil {
			if ctx.Err() != nil {
				return
			}
			c.options.Log.Warn("write the node's status", "error", err)
			if !deleted {
				poke(c.dirty)
			}
			wait = retry
		}
		if !pause(ctx, wait) {
			return
		}
	}
}

func (c *Cluster) patchStatus(ctx context.Context, s agent.Status) error {
	var n v1alpha1.NodeAcceleration
	err := c.ours.Get().Resource("nodeaccelerations").Name(c.options.Node).Do(ctx).Into(&n)
	if apierrors.IsNotFound(err) {
		n = v1alpha1.NodeAcceleration{
			TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.APIVersion, Kind: v1alpha1.KindNodeAcceleration},
			ObjectMeta: metav1.ObjectMeta{Name: c.options.Node},
		}
		if node := c.node(); node != nil { // it is deleted with its node
			n.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID}}
		}
		err = c.ours.Post().Resource("nodeaccelerations").Body(&n).Do(ctx).Into(&n)
	}
	if err != nil {
		return err
	}
	status := v1alpha1.NodeAccelerationStatus{Observed: s.Policies, Settings: s.Settings, Verified: s.Verified, Conditions: n.Status.Conditions}
	setConditions(&status.Conditions, s)
	for i := range status.Observed {
		status.Observed[i].Message = short(status.Observed[i].Message)
	}
	if status.Observed == nil {
		status.Observed = []v1alpha1.ObservedPolicy{}
	}
	// null, not omitted: a patch must say that the list is empty now.
	patch, err := json.Marshal(map[string]any{"status": map[string]any{
		"observed": status.Observed, "settings": status.Settings, "verified": status.Verified, "conditions": status.Conditions,
	}})
	if err != nil {
		return err
	}
	return c.ours.Patch(types.MergePatchType).Resource("nodeaccelerations").Name(c.options.Node).SubResource("status").Body(patch).Do(ctx).Error()
}

// setConditions sets the conditions of a node, and removes Fastpath and VF where no policy wants them.
func setConditions(all *[]metav1.Condition, s agent.Status) {
	set := func(kind string, status metav1.ConditionStatus, reason, message string) {
		meta.SetStatusCondition(all, metav1.Condition{Type: kind, Status: status, Reason: reason, Message: short(message)})
	}
	is := map[bool]metav1.ConditionStatus{true: metav1.ConditionTrue, false: metav1.ConditionFalse}
	set(v1alpha1.ConditionReady, is[s.Ready], s.Reason, s.Message)
	if f := s.Fastpath; f == nil {
		meta.RemoveStatusCondition(all, v1alpha1.ConditionFastpath)
	} else {
		set(v1alpha1.ConditionFastpath, is[f.On], f.Reason, f.Message)
	}
	switch v := s.VF; {
	case v == nil:
		meta.RemoveStatusCondition(all, v1alpha1.ConditionVF)
	case v.Reason == v1alpha1.ReasonNoDevice, v.Reason == v1alpha1.ReasonVFPresent:
		set(v1alpha1.ConditionVF, metav1.ConditionUnknown, v.Reason, v.Message)
	default:
		set(v1alpha1.ConditionVF, is[v.Reason == v1alpha1.ReasonVFUsed], v.Reason, v.Message)
	}
}

// short truncates a message to what the field of an object may hold.
func short(message string) string {
	const limit = 1000
	if len(message) > limit {
		return strings.ToValidUTF8(message[:limit], "") + " …"
	}
	return message
}

func (c *Cluster) writeEvents(ctx context.Context) {
	told := make(map[agent.Event]time.Time)
	for {
		var e agent.Event
		select {
		case <-ctx.Done():
			return
		case e = <-c.events:
		}
		if time.Since(told[e]) < quiet {
			continue
		}
		for old, at := range told {
			if time.Since(at) >= quiet {
				delete(told, old)
			}
		}
		told[e] = time.Now()
		if err := c.writeEvent(ctx, e); err != nil && ctx.Err() == nil {
			c.options.Log.Warn("write an event", "error", err)
		}
	}
}

func (c *Cluster) writeEvent(ctx context.Context, e agent.Event) error {
	kind := corev1.EventTypeNormal
	if e.Warning {
		kind = corev1.EventTypeWarning
	}
	now := metav1.Now()
	event := &corev1.Event{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Event"},
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: fmt.Sprintf("%s.slipstream.%x", c.options.Node, now.UnixNano())},
		// As the kubelet writes its own, so that `kubectl describe node` has them.
		InvolvedObject: corev1.ObjectReference{Kind: "Node", Name: c.options.Node, UID: types.UID(c.options.Node)},
		Reason:         e.Reason, Message: short(e.Message), Type: kind, Count: 1, FirstTimestamp: now, LastTimestamp: now,
		Source: corev1.EventSource{Component: "slipstream-agent", Host: c.options.Node}, ReportingController: "slipstream.dev/agent", ReportingInstance: c.options.Node,
	}
	return c.core.Post().Namespace(event.Namespace).Resource("events").Body(event).Do(ctx).Error()
}

// markPolicies maintains the condition Selected of every policy.
func (c *Cluster) markPolicies(ctx context.Context) {
	// since when a policy, by name and generation, lacks the condition.
	since := make(map[string]time.Time)
	// mine are policies that selected this node at the last check.
	mine := make(map[string]bool)
	share := time.Duration(rand.Int64N(int64(patience)))
	for {
		node := c.node()
		for _, p := range c.policies() {
			at := meta.FindStatusCondition(p.Status.Conditions, v1alpha1.ConditionSelected)
			current := at != nil && at.ObservedGeneration == p.Generation
			is := selects(p, node)
			_, unclear := p.Spec.Nodes()
			was := mine[p.Name]
			key := fmt.Sprintf("%s@%d", p.Name, p.Generation)
			var err error
			switch {
			case is && (!current || at.Status != metav1.ConditionTrue):
				err = c.mark(ctx, p, metav1.ConditionTrue, v1alpha1.ReasonNodes, "a node with an agent has the labels; for the state of each node, see its NodeAcceleration")
			case !is && was && unclear == nil && current && at.Status == metav1.ConditionTrue:
				// Agents of other nodes that it selects will set it.
				err = c.mark(ctx, p, metav1.ConditionFalse, v1alpha1.ReasonNoNode, noNode)
			case !is && unclear != nil && (!current || at.Reason != v1alpha1.ReasonNoSelector):
				err = c.mark(ctx, p, metav1.ConditionFalse, v1alpha1.ReasonNoSelector, unclear.Error())
			case !is && !current:
				if since[key].IsZero() {
					since[key] = time.Now()
				}
				if time.Since(since[key]) > patience+share {
					err = c.mark(ctx, p, metav1.ConditionFalse, v1alpha1.ReasonNoNode, noNode)
				}
			}
			mine[p.Name] = is
			if err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) && ctx.Err() == nil {
				c.options.Log.Warn("write a policy's condition", "policy", p.Name, "error", err)
			}
		}
		if !pause(ctx, patience/5) {
			return
		}
	}
}

const noNode = "no node with an agent has the labels of nodeSelector; kubectl get nodes --show-labels lists them"

// mark writes the condition, unless another agent has done so first.
func (c *Cluster) mark(ctx context.Context, p *v1alpha1.AccelerationPolicy, status metav1.ConditionStatus, reason, message string) error {
	return c.patchPolicy(ctx, p, metav1.Condition{
		Type: v1alpha1.ConditionSelected, Status: status, Reason: reason, Message: message, ObservedGeneration: p.Generation,
	}, p.Status.Rollout).Error()
}

// patchPolicy writes a policy's status with a condition, unless the status has changed meanwhile.
func (c *Cluster) patchPolicy(ctx context.Context, p *v1alpha1.AccelerationPolicy, condition metav1.Condition, rollout *v1alpha1.RolloutStatus) rest.Result {
	conditions := p.DeepCopy().Status.Conditions
	meta.SetStatusCondition(&conditions, condition)
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"resourceVersion": p.ResourceVersion},
		"status":   v1alpha1.AccelerationPolicyStatus{Rollout: rollout, Conditions: conditions},
	})
	if err != nil {
		panic(err) // strings and numbers always marshal
	}
	return c.ours.Patch(types.MergePatchType).Resource("accelerationpolicies").Name(p.Name).SubResource("status").Body(patch).Do(ctx)
}
