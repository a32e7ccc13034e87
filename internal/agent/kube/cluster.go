// Package kube connects an agent to a cluster: it watches the policies that select the node and the
// pods that run there, rolls policies out together with the agents of other nodes, writes statuses
// and events, and asks the API server who may read metrics. internal/agent applies the policies;
// without a cluster it reads a policy from a file and does not need this package.
package kube

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel/journal"
	"slipstream.dev/internal/agent"
	"slipstream.dev/internal/serverclock"
	"slipstream.dev/internal/spec"
)

// Options configures an agent in a cluster.
type Options struct {
	// Node is the node's name in the cluster.
	Node string
	// DaemonSet is the agent's DaemonSet, as NAMESPACE/NAME. If it is empty, the agent never
	// considers itself uninstalled.
	DaemonSet string
	// Proc is the root of the host's procfs, /proc if empty.
	Proc string
	Log  *slog.Logger
}

// Cluster reads an agent's policies from a cluster, and writes their state there: the NodeAcceleration of the node, which only
// this agent writes; events on the Node; and each policy's conditions and counts. An agent whose node is selected sets the condition
// Selected, or, after a while, any agent that finds it unset. An agent whose node has changed counts the nodes of a policy, unless
// another one has done so since.
//
// Every cost is multiplied by the number of nodes (docs/adr/0015). An agent watches its own node and the policies, and its node's
// pods while a policy selects pods. Writes that all agents would make at the same moment are spread over time.
//
// While the API server does not answer, nothing changes on the node.
type Cluster struct {
	options      Options
	clients      clients
	gate         *gate
	nodes, rules cache.Store
	synced       []cache.InformerSynced
	informers    []cache.Controller
	changed      chan struct{}
	events       chan agent.Event
	reviewer     *reviewer

	mu     sync.Mutex
	status *agent.Status
	dirty  chan struct{}
	// turns has the rollouts of the policies that select the node, by UID.
	turns map[types.UID]*turn
	// inherited has the node's policies from the NodeAcceleration when this agent started. It is kept until the agent has looked
	// at its policies once.
	inherited []v1alpha1.ObservedPolicy
	// started means that inherited is known, and turns may begin.
	started bool
	// complete caches policies that select the node, with all defaults filled in.
	complete map[policyVersion]completePolicy
	// lastWrites has this agent's last write to each policy, by UID.
	lastWrites map[types.UID]policyWrite
	// reported has what the counts of policies do not include yet, by policy.
	reported map[string]uncounted
	// summarized means that the CRD keeps summaries, from which nodes are counted.
	summarized bool
	clock      serverclock.Clock // the API server's, which all agents share
	pace       pace
	// sharedLimit limits the rate of writes to policies.
	sharedLimit *rate.Limiter
	// restUntil is the time before which no write to a policy is tried, after one failed; nil if none has.
	restUntil atomic.Pointer[time.Time]
	// losses reads the node's counters.
	losses func() losses
	boot   string // the ID of the machine's boot
}

// Connect calls New with the configuration from a kubeconfig file or, if its name is empty, from the pod in which the agent runs.
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
	c := &Cluster{
		options: o, changed: make(chan struct{}, 1), dirty: make(chan struct{}, 1), events: make(chan agent.Event, 32), turns: make(map[types.UID]*turn), complete: make(map[policyVersion]completePolicy),
		lastWrites: make(map[types.UID]policyWrite), reported: make(map[string]uncounted), pace: usualPace,
		sharedLimit: rate.NewLimiter(2, 5),
	}
	c.losses = c.readLosses
	var err error
	if c.boot, err = journal.Boot(c.proc()); err != nil {
		return nil, err
	}
	if err = c.connect(config); err != nil {
		return nil, fmt.Errorf("connect to the cluster: %w", err)
	}
	c.reviewer = newReviewer(c.clients.authn, c.clients.authz)
	c.nodes = c.inform(c.clients.watchCore, "nodes", fields.OneTermEqualSelector("metadata.name", o.Node), &corev1.Node{}, slimNode)
	c.rules = c.inform(c.clients.watchOurs, "accelerationpolicies", fields.Everything(), &v1alpha1.AccelerationPolicy{}, slimPolicy)
	return c, nil
}

// inform watches a resource for as long as Run runs.
func (c *Cluster) inform(client rest.Interface, resource string, which fields.Selector, of runtime.Object, slim cache.TransformFunc) cache.Store {
	store, controller := c.informer(client, resource, which, of, slim)
	c.informers = append(c.informers, controller)
	c.synced = append(c.synced, controller.HasSynced)
	return store
}

// informer makes a watch of a resource. It keeps only the fields that are needed, so that a thousand pods take little memory.
func (c *Cluster) informer(client rest.Interface, resource string, which fields.Selector, of runtime.Object, slim cache.TransformFunc) (cache.Store, cache.Controller) {
	options := func(o *metav1.ListOptions) {
		o.FieldSelector = which.String()
		// Bookmarks come every minute, so that a watch can be resumed without a list. These watches last so long that a list
		// costs less than the bookmarks.
		o.AllowWatchBookmarks = false
	}
	return cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: listsFirst{cache.NewFilteredListWatchFromClient(client, resource, "", options)},
		ObjectType:    of,
		Transform:     slim,
		// The default is five minutes: with a thousand agents, that is seven requests a second.
		MinWatchTimeout: 30 * time.Minute,
		// Compute the desired state anew from time to time. Without a period, reflectors wait for a channel of their package,
		// which cannot be used in tests with a clock of their own (testing/synctest).
		ResyncPeriod: time.Hour,
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc:    func(o any) { c.note(o); poke(c.changed) },
			UpdateFunc: func(_, o any) { c.note(o); poke(c.changed) },
			DeleteFunc: func(any) { poke(c.changed) },
		},
	})
}

// listsFirst makes a reflector list before it watches. By default it first asks for both in one request, which Kubernetes before
// 1.34 rejects by default: each agent that comes back after an outage would then send three requests for each resource, not two.
type listsFirst struct{ *cache.ListWatch }

// IsWatchListSemanticsUnSupported implements an interface of client-go's package watchlist.
func (listsFirst) IsWatchListSemanticsUnSupported() bool { return true }

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

func slimPolicy(o any) (any, error) {
	if p, ok := o.(*v1alpha1.AccelerationPolicy); ok {
		kernels, proven := p.Annotations[v1alpha1.AnnotationKernel]
		p.ManagedFields, p.Annotations, p.Labels = nil, nil, nil
		if proven {
			p.Annotations = map[string]string{v1alpha1.AnnotationKernel: kernels}
		}
	}
	return o, nil
}

// Uninstalled reports, when the agent stops, whether its DaemonSet or its namespace is deleted or being deleted. A refusal (401,
// 403) means the same, because deleting the chart removes the agent's permissions too. If the API server does not answer,
// Uninstalled asks again until ctx is done, and then returns false. Asking once costs less than a watch: the status of a
// DaemonSet changes with each of its agents, and every agent would receive every change.
func (c *Cluster) Uninstalled(ctx context.Context) bool {
	namespace, name, ok := c.daemonSet()
	if !ok {
		return false
	}
	for {
		gone, err := c.daemonSetGone(ctx, namespace, name)
		if err == nil {
			return gone
		}
		c.options.Log.Warn("ask whether the agent is uninstalled", "error", err)
		if !pause(ctx, c.pace.between) {
			return false
		}
	}
}

// daemonSetGone reports whether a DaemonSet or its namespace is deleted or being deleted.
func (c *Cluster) daemonSetGone(ctx context.Context, namespace, name string) (bool, error) {
	askDaemonSet := func() (bool, error) {
		var d appsv1.DaemonSet
		return gone(&d, c.clients.apps.Get().Namespace(namespace).Resource("daemonsets").Name(name).Do(ctx).Into(&d))
	}
	if deleted, err := askDaemonSet(); deleted || err != nil {
		return deleted, err
	}
	// If the namespace is being deleted, the DaemonSet may be deleted after its pods have ended (KEP-5080), or in any order, so
	// look at the namespace too.
	var n corev1.Namespace
	err := c.clients.nodes.Get().Resource("namespaces").Name(namespace).Do(ctx).Into(&n)
	if apierrors.IsForbidden(err) {
		// The role is already deleted, or an older chart did not grant this permission: the DaemonSet decides.
		return askDaemonSet()
	}
	return gone(&n, err)
}

// gone reports whether an object, or the error of a request for it, means that the object is deleted or being deleted.
func gone(o metav1.Object, err error) (bool, error) {
	switch {
	case apierrors.IsNotFound(err), apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
		return true, nil
	case err != nil:
		return false, err
	}
	return o.GetDeletionTimestamp() != nil, nil
}

func (c *Cluster) daemonSet() (namespace, name string, ok bool) {
	return strings.Cut(c.options.DaemonSet, "/")
}

// Forget deletes the node's NodeAcceleration. It is the last action of an uninstalled agent.
func (c *Cluster) Forget(ctx context.Context) error {
	err := c.clients.status.Delete().Resource("nodeaccelerations").Name(c.options.Node).Do(ctx).Error()
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// Publish passes the status to Run. It serves as agent.Options.Publish.
func (c *Cluster) Publish(s agent.Status) {
	c.mu.Lock()
	c.status = &s
	c.mu.Unlock()
	poke(c.dirty)
}

// Notify passes an event to Run. It serves as agent.Options.Notify. If there are too many events, it drops some; the log has all
// of them.
func (c *Cluster) Notify(e agent.Event) {
	select {
	case c.events <- e:
	default:
	}
}

// Run calls set whenever the policies or pods change, and writes the statuses and events of Publish and Notify, until ctx is
// done.
func (c *Cluster) Run(ctx context.Context, set func(agent.Desired)) {
	var all sync.WaitGroup
	defer all.Wait()
	defer c.gate.close()
	for _, informer := range c.informers {
		all.Go(func() { informer.RunWithContext(ctx) })
	}
	if !cache.WaitForCacheSync(ctx.Done(), c.synced...) {
		return
	}
	written, err := c.readInherited(ctx)
	if err != nil {
		return // ctx is done
	}
	all.Go(func() { c.writeStatus(ctx, written) })
	all.Go(func() { c.writeEvents(ctx) })
	all.Go(func() { c.markPolicies(ctx) })
	all.Go(func() { c.rollOut(ctx) })
	var last *agent.Desired
	var pods *podWatch
	defer func() {
		if pods != nil {
			pods.stop()
		}
	}()
	for {
		d, wantsPods := c.desired()
		c.mu.Lock()
		c.inherited = nil
		c.mu.Unlock()
		switch {
		case wantsPods && pods == nil:
			pods = c.watchPods(ctx, last == nil)
		case !wantsPods && pods != nil:
			pods.stop()
			pods = nil
		}
		// Before the pods are listed, the agent would restore their settings.
		if pods == nil || pods.synced() {
			if pods != nil {
				d.Pods = pods.list()
			}
			if last == nil || !same(*last, d) {
				set(d)
				last = &d
			}
		}
		// Handle a burst of changes as one.
		if !pause(ctx, c.pace.burst) {
			return
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
		return p.Name == q.Name && p.UID == q.UID && p.Generation == q.Generation && p.Selector == q.Selector && p.Withheld == q.Withheld &&
			p.Halted == q.Halted && p.Kernels == q.Kernels &&
			reflect.DeepEqual(p.Accelerate, q.Accelerate) && fmt.Sprint(p.Invalid) == fmt.Sprint(q.Invalid) && p.LaterInvalid == q.LaterInvalid
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
	return n != nil && p.Spec.SelectsNode(n.Labels)
}

// policyVersion identifies a version of a policy's spec.
type policyVersion struct {
	name       string
	uid        types.UID
	generation int64
}

func versionOf(p *v1alpha1.AccelerationPolicy) policyVersion {
	return policyVersion{p.Name, p.UID, p.Generation}
}

// completePolicy is a policy with all defaults filled in, or the error that makes it invalid.
type completePolicy struct {
	*v1alpha1.AccelerationPolicy
	err error
}

// completed returns spec.CompletePolicy(p), but parses each version of a policy only once: rollouts look at each policy once a second.
func (c *Cluster) completed(p *v1alpha1.AccelerationPolicy) (*v1alpha1.AccelerationPolicy, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	of, ok := c.complete[versionOf(p)]
	if !ok {
		of.AccelerationPolicy, of.err = spec.CompletePolicy(p)
		c.complete[versionOf(p)] = of
	}
	return of.AccelerationPolicy, of.err
}

// desired returns the desired state of this node, without the pods, and whether a policy selects pods.
func (c *Cluster) desired() (d agent.Desired, wantsPods bool) {
	node, all := c.node(), c.policies()
	c.forget(all, node)
	for _, p := range all {
		if !selects(p, node) {
			continue
		}
		policy := agent.Policy{Name: p.Name, UID: string(p.UID), Generation: p.Generation}
		if complete, err := c.completed(p); err != nil {
			policy = c.withoutInvalid(p, policy, err)
		} else {
			policy.Accelerate = complete.Spec.Accelerators()
			if selector := complete.Spec.Pods; selector != nil {
				s, err := metav1.LabelSelectorAsSelector(selector) // Complete has checked it
				if err == nil {
					policy.Selector = s.String()
					policy.Pods = func(l map[string]string) bool { return s.Matches(labels.Set(l)) }
				}
			}
			policy = c.atItsTurn(p, policy)
		}
		policy.Halted, policy.Kernels = isHalted(p), p.Annotations[v1alpha1.AnnotationKernel] // of this version, even if another one is applied
		wantsPods = wantsPods || policy.Pods != nil
		d.Policies = append(d.Policies, policy)
	}
	return d, wantsPods
}

// podWatch follows the pods of the node.
type podWatch struct {
	store  cache.Store
	synced func() bool
	// stop ends the watch, and waits until it has ended.
	stop func()
}

// watchPods begins to watch the node's pods, at once or after a random delay: a new policy makes all agents
// do so at the same moment.
func (c *Cluster) watchPods(ctx context.Context, atOnce bool) *podWatch {
	// A pod without an address cannot be recognised yet, and its status changes often.
	which := fields.AndSelectors(fields.OneTermEqualSelector("spec.nodeName", c.options.Node), fields.OneTermNotEqualSelector("status.podIP", ""))
	store, controller := c.informer(c.clients.watchCore, "pods", which, &corev1.Pod{}, slimPod)
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() {
		if atOnce || pause(ctx, rand.N(c.pace.spread)) {
			controller.RunWithContext(ctx)
		}
	})
	running.Go(func() {
		if cache.WaitForCacheSync(ctx.Done(), controller.HasSynced) {
			poke(c.changed) // a node may have no pods, and then no event comes
		}
	})
	return &podWatch{store: store, synced: controller.HasSynced, stop: func() {
		cancel()
		running.Wait()
	}}
}

// list returns the pods with addresses of their own, by name.
func (w *podWatch) list() (all []agent.Pod) {
	for _, o := range w.store.List() {
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
			all = append(all, pod)
		}
	}
	slices.SortFunc(all, func(p, q agent.Pod) int { return strings.Compare(p.Name, q.Name) })
	return all
}

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
