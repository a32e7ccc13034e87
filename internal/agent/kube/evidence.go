package kube

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"slipstream.dev/api/v1alpha1"
)

// Every agent may write a policy's status, so anybody who steals a token from one node can write anything there. For other agents
// the status is only a hint when to look. Their changes on their nodes follow from what they did and saw themselves, and from
// NodeAccelerations, each of which only the agent of its node may write (charts/slipstream/templates/admission.yaml). See
// docs/adr/0012.

const (
	// enoughPassed is the number of nodes that have to report that they passed. It is two, so that one node that lies does not
	// suffice.
	enoughPassed = 2
	// reportsAtMost limits the number of NodeAccelerations that are read at a time.
	reportsAtMost = 8
)

// peer is a node that a policy selects.
type peer struct {
	name    string
	percent int
	ready   bool
}

// report is the content of a node's NodeAcceleration about one version of a policy.
type report struct {
	// exists: there is a NodeAcceleration. has: the node has the version. passed: the node had the version for a pause without
	// a failed check.
	exists, has, passed bool
	step                int
}

// hasVersion reports whether the node of a NodeAcceleration has the version of a policy that an entry describes.
func hasVersion(o v1alpha1.ObservedPolicy) bool {
	return o.Reason != v1alpha1.ReasonWaiting && o.Reason != v1alpha1.ReasonRolledBack && o.RolledBack != o.Generation
}

// inquiry collects reports about one version of a policy.
type inquiry struct {
	*Cluster
	policy *v1alpha1.AccelerationPolicy
	asked  map[string]bool
	// passed has the nodes that report that they passed. anyHas means that at least one node has the version.
	passed []string
	anyHas bool
}

func (c *Cluster) inquire(p *v1alpha1.AccelerationPolicy) *inquiry {
	return &inquiry{Cluster: c, policy: p, asked: make(map[string]bool)}
}

// ask reads the NodeAcceleration of a node.
func (q *inquiry) ask(ctx context.Context, node string) (r report, err error) {
	q.asked[node] = true
	if len(validation.IsDNS1123Subdomain(node)) > 0 {
		return r, nil // no node has such a name
	}
	var n v1alpha1.NodeAcceleration
	err = q.clients.reports.Get().Resource("nodeaccelerations").Name(node).Param("resourceVersion", "0").Do(ctx).Into(&n)
	if apierrors.IsNotFound(err) {
		return r, nil
	}
	if err != nil {
		return r, fmt.Errorf("read the NodeAcceleration of %s: %w", node, err)
	}
	r.exists = true
	i := slices.IndexFunc(n.Status.Observed, func(o v1alpha1.ObservedPolicy) bool {
		return o.Policy == q.policy.Name && o.UID == q.policy.UID && o.Generation == q.policy.Generation
	})
	if i >= 0 && hasVersion(n.Status.Observed[i]) {
		r.has, r.passed, r.step = true, n.Status.Observed[i].Passed, n.Status.Observed[i].Step
	}
	q.anyHas = q.anyHas || r.has
	return r, nil
}

// askNamed asks nodes by name, and reports whether enough of them passed. A node counts only if it got the version at the
// percentage before, or at a later one. The first node has step 0, so it counts only if before is 0.
func (q *inquiry) askNamed(ctx context.Context, names []string, before int) (enough bool, err error) {
	for _, name := range names {
		if len(q.asked) == reportsAtMost {
			break
		}
		if q.asked[name] || name == q.options.Node {
			continue
		}
		r, err := q.ask(ctx, name)
		if err != nil {
			return false, err
		}
		if r.passed && r.step >= before {
			q.passed = append(q.passed, name)
		}
	}
	return len(q.passed) >= enoughPassed, nil
}

// askBefore asks the nodes of the steps before a percentage, and reports whether enough of them passed. It begins with the
// nearest step, and asks the nodes of a step in random order. The answer is no if one of these nodes is Ready, runs an agent and
// has not passed.
func (q *inquiry) askBefore(ctx context.Context, nodes []peer, first string, step, before int) (enough bool, err error) {
	q.passed, q.asked = nil, make(map[string]bool)
	ahead := slices.DeleteFunc(slices.Clone(nodes), func(n peer) bool { return n.percent >= before && n.name != first })
	rank := func(n peer) int {
		if n.percent >= before {
			return -1 // the first node, which gets it before all steps
		}
		return n.percent / step
	}
	rand.Shuffle(len(ahead), func(i, j int) { ahead[i], ahead[j] = ahead[j], ahead[i] })
	slices.SortStableFunc(ahead, func(a, b peer) int { return cmp.Compare(rank(b), rank(a)) })
	for _, n := range ahead {
		if len(q.asked) == reportsAtMost {
			return false, nil
		}
		r, err := q.ask(ctx, n.name)
		if err != nil {
			return false, err
		}
		if r.passed {
			if q.passed = append(q.passed, n.name); len(q.passed) == enoughPassed {
				return true, nil
			}
			continue
		}
		if !r.exists || !n.ready {
			continue // it is not in the rollout
		}
		if runs, err := q.agentRuns(ctx, n.name); runs || err != nil {
			return false, err
		}
	}
	return len(q.passed) > 0, nil
}

// askOthers asks random nodes of any step that have not been asked yet. It finds nodes that have the version even if all nodes of
// earlier steps have left the cluster.
func (q *inquiry) askOthers(ctx context.Context, nodes []peer, before int) (enough bool, err error) {
	names := make([]string, len(nodes))
	for i, at := range rand.Perm(len(nodes)) {
		names[i] = nodes[at].name
	}
	return q.askNamed(ctx, names, before)
}

// agentRuns reports whether the agent's pod on a node is ready.
func (c *Cluster) agentRuns(ctx context.Context, node string) (bool, error) {
	namespace, daemonSet, ok := c.daemonSet()
	if !ok {
		return true, nil
	}
	var pods corev1.PodList
	err := c.clients.nodes.Get().Namespace(namespace).Resource("pods").Param("fieldSelector", "spec.nodeName="+node).Param("resourceVersion", "0").Do(ctx).Into(&pods)
	if err != nil {
		return false, fmt.Errorf("look for the agent of %s: %w", node, err)
	}
	return slices.ContainsFunc(pods.Items, func(p corev1.Pod) bool { return isReadyAgent(p, daemonSet) }), nil
}

// isReadyAgent reports whether a pod belongs to a DaemonSet, and is ready.
func isReadyAgent(p corev1.Pod, daemonSet string) bool {
	return slices.ContainsFunc(p.OwnerReferences, func(o metav1.OwnerReference) bool { return o.Kind == "DaemonSet" && o.Name == daemonSet }) &&
		slices.ContainsFunc(p.Status.Conditions, func(at corev1.PodCondition) bool {
			return at.Type == corev1.PodReady && at.Status == corev1.ConditionTrue
		})
}

// stepOf returns the percentages at which the step of a node begins and ends.
func stepOf(percent, step int) (from, to int) {
	from = percent / step * step
	return from, min(100, from+step)
}

// seekEvidence looks for evidence that this node may get a policy, if the status says that it is the node's turn. The first look
// is at a random moment, because many nodes are in the same step; the time between further looks doubles.
func (c *Cluster) seekEvidence(ctx context.Context, p *v1alpha1.AccelerationPolicy, t *turn, look *timer) error {
	r, step := rolloutOf(p), t.stepPercent
	if !t.taken.IsZero() || t.trouble != "" || !t.reached(r, p.UID, c.options.Node) || t.mayTake(r, p.UID, c.options.Node) {
		return nil
	}
	if t.ask.IsZero() {
		c.change(p, func(now *turn) { now.ask, now.askAgain = time.Now().Add(rand.N(c.pace.spread)), c.pace.retry })
		return nil
	}
	if !look.due(time.Until(t.ask)) {
		return nil
	}
	c.change(p, func(now *turn) {
		now.ask = time.Now().Add(now.askAgain + rand.N(now.askAgain))
		now.askAgain = min(2*now.askAgain, max(t.rest, c.pace.silence))
	})
	from, _ := stepOf(percentOf(p.UID, c.options.Node), step)
	enough, none, err := c.evidence(ctx, p, t, from)
	switch {
	case err != nil:
		return err
	case enough:
		c.change(p, func(now *turn) { now.proven = true })
		poke(c.changed)
	case none && c.mayBegin(t):
		// The nodes that had it have left the cluster, or their NodeAccelerations were deleted.
		return c.begin(ctx, p, step)
	}
	return nil
}

// evidence reports whether enough nodes of the steps before a percentage passed. none means that no node that it asked has the
// version.
func (c *Cluster) evidence(ctx context.Context, p *v1alpha1.AccelerationPolicy, t *turn, before int) (enough, none bool, err error) {
	r, q := rolloutOf(p), c.inquire(p)
	if enough, err := q.askNamed(ctx, r.Passed, before); enough || err != nil {
		return enough, false, err
	}
	// One report is enough only after a pause: a first node that lies must not shorten the first step.
	rested := time.Since(t.seen) >= t.rest
	if before == 0 && len(q.passed) > 0 {
		return rested, false, nil // only the first node got it before
	}
	// The status names too few nodes: some steps have no node, or some nodes have left, or somebody has forged the status.
	nodes, err := c.peers(ctx, p)
	if err != nil {
		return false, false, err
	}
	nodes = slices.DeleteFunc(nodes, func(n peer) bool { return n.name == c.options.Node })
	enough, err = q.askBefore(ctx, nodes, r.First, t.stepPercent, before)
	if enough || err != nil {
		return enough && (rested || len(q.passed) >= enoughPassed), false, err
	}
	if len(q.passed) == 0 {
		if enough, err = q.askOthers(ctx, nodes, before); enough || err != nil {
			return enough, false, err
		}
		if !q.asked[r.First] && r.First != "" {
			if _, err := q.ask(ctx, r.First); err != nil {
				return false, false, err
			}
		}
	}
	return false, !q.anyHas, nil
}
