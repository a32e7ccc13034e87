package kube

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"slipstream.dev/internal/agent"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"slipstream.dev/api/v1alpha1"
)

// A policy is rolled out to one node first and then to more, step by step (docs/adr/0012), without a
// controller. The policy's status says how far the rollout is. Each agent reads there whether its node
// gets the policy, and an agent that has had it for a while without problems makes the next step.

// pace of a rollout.
type pace struct {
	// look is how often an agent checks for something to do.
	look time.Duration
	// baseline is for how long, at least, a node's dropped packets are counted before it gets a policy,
	// for comparison.
	baseline time.Duration
	// spread is the time over which agents that could make the same step are spread: the others see that
	// the first has made it.
	spread time.Duration
	// lasting is after how long a failure counts as permanent.
	lasting time.Duration
	// silence, in addition to three pauses, is after how long without a step the rollout counts as failed
	// on the first node.
	silence time.Duration
}

var rolloutPace = pace{look: time.Second, baseline: 2 * time.Second, spread: 3 * time.Second, lasting: 10 * time.Second, silence: time.Minute}

// nodesAtOnce bounds how many of a cluster's nodes are in memory at once.
const nodesAtOnce = 50

// turn is what an agent knows about the rollout of one policy.
type turn struct {
	generation int64
	// version is this generation, base the version that this node had before; nil for none.
	version agent.Policy
	base    *agent.Policy
	// seen is when this agent first saw the generation, moved when it last saw the
	// rollout move, and taken when the node got it.
	seen, moved, taken time.Time
	status             v1alpha1.RolloutStatus
	// before is read when the generation is seen, start when it is taken.
	before, start losses
	// watched: it has been applied for a pause without problems.
	watched bool
	// failing is since when the agent has published a failure.
	failing time.Time
	// trouble is why this node rolled it back.
	trouble string
}

// position returns a node's position in the order of a policy's rollout, in [0, 1). Each policy has its own
// order, so that the first node is not always the same.
func position(policy types.UID, node string) float64 {
	sum := sha256.Sum256([]byte(string(policy) + "/" + node))
	return float64(binary.BigEndian.Uint64(sum[:])>>11) / (1 << 53)
}

func percentOf(policy types.UID, node string) int { return int(100 * position(policy, node)) }

// begun reports whether a rollout has reached a node.
func begun(r *v1alpha1.RolloutStatus, policy types.UID, node string) bool {
	return r.First == node || percentOf(policy, node) < r.Percent
}

// rolloutOf returns the rollout of the policy's generation, nil if it has not begun.
func rolloutOf(p *v1alpha1.AccelerationPolicy) *v1alpha1.RolloutStatus {
	if r := p.Status.Rollout; r != nil && r.Generation == p.Generation {
		return r
	}
	return nil
}

// turnOf returns the turn of a policy. The caller holds mu.
func (c *Cluster) turnOf(p *v1alpha1.AccelerationPolicy) *turn {
	t := c.turns[p.UID]
	if t == nil || t.generation != p.Generation {
		now := time.Now()
		next := &turn{generation: p.Generation, seen: now, moved: now, before: c.losses()}
		if t != nil {
			next.base = t.base
			if !t.taken.IsZero() && t.trouble == "" {
				version := t.version // a copy, not to keep the whole turn and those before it
				next.base = &version
			}
		}
		t = next
		c.turns[p.UID] = t
	}
	if r := rolloutOf(p); r != nil && (r.Percent != t.status.Percent || r.First != t.status.First) {
		t.status, t.moved = *r, time.Now()
	}
	return t
}

// atItsTurn returns the version of a policy that this node has now.
func (c *Cluster) atItsTurn(p *v1alpha1.AccelerationPolicy, version agent.Policy) agent.Policy {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := c.turnOf(p)
	t.version = version
	withhold := func(reason, message string) agent.Policy {
		if t.base != nil {
			return *t.base
		}
		version.Withheld = agent.Withheld{Reason: reason, Message: message}
		return version
	}
	r := rolloutOf(p)
	switch {
	case t.trouble != "":
		return withhold(v1alpha1.ReasonRolledBack, t.trouble)
	case r != nil && slices.Contains(r.FailedNodes, c.options.Node):
		return withhold(v1alpha1.ReasonRolledBack, "this version of the policy failed on the node and was rolled back; a change of the policy starts a new rollout")
	case r == nil || !begun(r, p.UID, c.options.Node):
		return withhold(v1alpha1.ReasonWaiting, "the rollout has not reached this node yet")
	case t.taken.IsZero() && !r.Complete && !ready(c.node()):
		return withhold(v1alpha1.ReasonWaiting, "the node is not Ready; the rollout waits until it is")
	}
	if t.taken.IsZero() {
		t.taken, t.start = time.Now(), c.losses()
	}
	return version
}

// forget drops the turns of policies that no longer select the node.
func (c *Cluster) forget(all []*v1alpha1.AccelerationPolicy, node *corev1.Node) {
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.DeleteFunc(c.turns, func(uid types.UID, _ *turn) bool {
		return !slices.ContainsFunc(all, func(p *v1alpha1.AccelerationPolicy) bool { return p.UID == uid && selects(p, node) })
	})
}

func (c *Cluster) readLosses() losses {
	l, err := readLosses(cmp.Or(c.options.Proc, "/proc"))
	if err != nil {
		c.options.Log.Warn("count the packets that the node drops", "error", err)
	}
	return l
}

// ready reports whether a node is Ready; one without that condition counts as Ready.
func ready(n *corev1.Node) bool {
	if n == nil {
		return true
	}
	at := readyCondition(n)
	return at == nil || at.Status == corev1.ConditionTrue
}

func readyCondition(n *corev1.Node) *corev1.NodeCondition {
	i := slices.IndexFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == corev1.NodeReady })
	if i < 0 {
		return nil
	}
	return &n.Status.Conditions[i]
}

// rollOut takes part in all rollouts until ctx is done.
func (c *Cluster) rollOut(ctx context.Context) {
	for {
		node := c.node()
		for _, p := range c.policies() {
			if node == nil || !selects(p, node) {
				continue
			}
			if err := c.advance(ctx, p); err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) && ctx.Err() == nil {
				c.options.Log.Warn("roll a policy out", "policy", p.Name, "error", err)
			}
		}
		if !pause(ctx, c.pace.look) {
			return
		}
	}
}

// advance does what is due in the rollout of one policy.
func (c *Cluster) advance(ctx context.Context, p *v1alpha1.AccelerationPolicy) error {
	if _, err := p.Complete(); err != nil {
		return nil //nolint:nilerr // an invalid policy is applied nowhere, and each node's status says so
	}
	step, rest := p.Spec.Steps()
	share := time.Duration(position(p.UID, c.options.Node) * float64(c.pace.spread))
	c.mu.Lock()
	t := *c.turnOf(p)
	c.mu.Unlock()
	r := rolloutOf(p)
	switch {
	case r == nil && time.Since(t.seen) > c.pace.baseline+share && ready(c.node()):
		return c.begin(ctx, p, step)
	case r == nil || r.Complete:
		return nil
	}
	if !t.taken.IsZero() && !t.watched && t.trouble == "" {
		if t.trouble = c.trouble(ctx, p, &t, rest); t.trouble != "" {
			c.giveUp(p, t.trouble)
		}
	}
	quiet := time.Since(t.moved)
	switch {
	case t.trouble != "" && !slices.Contains(r.FailedNodes, c.options.Node):
		return c.halt(ctx, p, []string{c.options.Node}, fmt.Sprintf("node %s %s", c.options.Node, t.trouble))
	case len(r.FailedNodes) > 0:
		return nil
	case t.watched && quiet > rest+share:
		return c.next(ctx, p, step)
	case r.First != "" && quiet > 3*rest+c.pace.silence+share:
		return c.halt(ctx, p, []string{r.First}, fmt.Sprintf("the rollout has made no progress for %s: check node %s, which got the policy first", quiet.Round(time.Second), r.First))
	}
	return nil
}

// trouble checks the node after it got a policy, and says what is wrong. After a pause without problems it
// marks the policy as watched.
func (c *Cluster) trouble(ctx context.Context, p *v1alpha1.AccelerationPolicy, t *turn, rest time.Duration) string {
	if !ready(c.node()) {
		return "has not been Ready since it got the policy"
	}
	if message := c.failure(p, t); message != "" {
		return "could not apply it: " + message
	}
	// An agent that has restarted has no earlier counts.
	if t.taken.Sub(t.seen) >= c.pace.baseline {
		before, after := t.start.since(t.before), c.losses().since(t.start)
		if risen(before, after) {
			return fmt.Sprintf("drops more packets since it got the policy: %d of %d, before %d of %d", after.lost, after.packets, before.lost, before.packets)
		}
	}
	if time.Since(t.taken) < rest {
		return ""
	}
	// A node that has lost its network cannot report that, so the agent checks for it here.
	err := c.ours.Get().Resource("nodeaccelerations").Name(c.options.Node).Timeout(c.pace.lasting).Do(ctx).Error()
	if err != nil && !apierrors.IsNotFound(err) && ctx.Err() == nil {
		if time.Since(t.taken) > rest+3*c.pace.lasting {
			return fmt.Sprintf("cannot reach the API server since it got the policy: %s", err)
		}
		return ""
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if now := c.turns[p.UID]; now != nil && now.generation == t.generation {
		now.watched, t.watched = true, true
	}
	return ""
}

// failure returns the failure that the agent has published for a policy for a while. A policy that was
// rejected has changed nothing, and is no failure.
func (c *Cluster) failure(p *v1alpha1.AccelerationPolicy, t *turn) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.turns[p.UID]
	if c.status == nil || now == nil || now.generation != t.generation {
		return ""
	}
	i := slices.IndexFunc(c.status.Policies, func(o v1alpha1.ObservedPolicy) bool {
		return o.Policy == p.Name && o.Generation == p.Generation && (o.Reason == v1alpha1.ReasonError || o.Reason == v1alpha1.ReasonNotVerified)
	})
	switch {
	case i < 0:
		now.failing = time.Time{}
		return ""
	case now.failing.IsZero():
		now.failing = time.Now()
	}
	if time.Since(now.failing) < c.pace.lasting {
		return ""
	}
	return c.status.Policies[i].Message
}

// giveUp rolls a policy back on this node, before it is reported.
func (c *Cluster) giveUp(p *v1alpha1.AccelerationPolicy, trouble string) {
	c.mu.Lock()
	if t := c.turns[p.UID]; t != nil && t.generation == p.Generation {
		t.trouble = trouble
	}
	c.mu.Unlock()
	c.options.Log.Error("a policy is rolled back on this node", "policy", p.Name, "generation", p.Generation, "trouble", trouble)
	c.Notify(agent.Event{Warning: true, Reason: v1alpha1.ReasonRolledBack, Message: fmt.Sprintf("policy %s: the node %s; its settings are restored", p.Name, trouble)})
	poke(c.changed)
}

// begin makes this node the first, or includes all nodes if the policy says so.
func (c *Cluster) begin(ctx context.Context, p *v1alpha1.AccelerationPolicy, step int) error {
	r := v1alpha1.RolloutStatus{Generation: p.Generation, Started: metav1.NewTime(c.clock.now()), First: c.options.Node}
	message := fmt.Sprintf("node %s is the first to get it", c.options.Node)
	if step == 100 {
		r.First, r.Percent, message = "", 100, "all nodes get it at once, because stepPercent is 100"
	}
	return c.write(ctx, p, r, metav1.ConditionFalse, v1alpha1.ReasonProgressing, message)
}

// halt stops a rollout because of nodes that had problems.
func (c *Cluster) halt(ctx context.Context, p *v1alpha1.AccelerationPolicy, nodes []string, why string) error {
	r := *p.DeepCopy().Status.Rollout
	first := len(r.FailedNodes) == 0
	for _, n := range nodes {
		if !slices.Contains(r.FailedNodes, n) && len(r.FailedNodes) < v1alpha1.MaxFailedNodes {
			r.FailedNodes = append(r.FailedNodes, n)
		}
	}
	if at := meta.FindStatusCondition(p.Status.Conditions, v1alpha1.ConditionRolledOut); !first && at != nil {
		why = at.Message // the first reason matters most
	} else {
		why += "; it is taken back there, stays where it is on, and goes to no further node until the policy is changed"
	}
	return c.write(ctx, p, r, metav1.ConditionFalse, v1alpha1.ReasonHalted, why)
}

// next makes the next step that includes a further node, if the nodes of earlier steps are Ready.
func (c *Cluster) next(ctx context.Context, p *v1alpha1.AccelerationPolicy, step int) error {
	r := *p.DeepCopy().Status.Rollout
	nearest := 100
	var down []string
	err := c.eachNode(ctx, p, func(n *corev1.Node) {
		if !begun(&r, p.UID, n.Name) {
			nearest = min(nearest, percentOf(p.UID, n.Name))
			return
		}
		at := readyCondition(n)
		if at != nil && at.Status != corev1.ConditionTrue && at.LastTransitionTime.After(r.Started.Time) && n.CreationTimestamp.Time.Before(r.Started.Time) {
			down = append(down, n.Name)
		}
	})
	switch {
	case err != nil:
		return err
	case len(down) > 0:
		slices.Sort(down)
		return c.halt(ctx, p, down, fmt.Sprintf("node %s has not been Ready since it got the policy", down[0]))
	case nearest == 100:
		r.Percent, r.Complete = 100, true
		return c.write(ctx, p, r, metav1.ConditionTrue, v1alpha1.ReasonComplete, "all nodes have it, and none reported a problem")
	}
	r.Percent = min(100, (nearest/step+1)*step)
	return c.write(ctx, p, r, metav1.ConditionFalse, v1alpha1.ReasonProgressing, fmt.Sprintf("%d %% of the nodes have it", r.Percent))
}

// eachNode calls fn for every node that a policy selects. It lists nodes by pages. One agent calls it per
// step.
func (c *Cluster) eachNode(ctx context.Context, p *v1alpha1.AccelerationPolicy, fn func(*corev1.Node)) error {
	selector, err := p.Spec.Nodes()
	if err != nil {
		return err
	}
	next := ""
	for {
		var page corev1.NodeList
		request := c.core.Get().Resource("nodes").Param("labelSelector", selector.String()).Param("limit", strconv.Itoa(nodesAtOnce))
		if next != "" {
			request.Param("continue", next)
		}
		if err := request.Do(ctx).Into(&page); err != nil {
			return fmt.Errorf("list nodes: %w", err)
		}
		for i := range page.Items {
			if selects(p, &page.Items[i]) {
				fn(&page.Items[i])
			}
		}
		if next = page.Continue; next == "" {
			return nil
		}
	}
}

// write writes the progress of a rollout, unless another agent has done so first.
func (c *Cluster) write(ctx context.Context, p *v1alpha1.AccelerationPolicy, r v1alpha1.RolloutStatus, status metav1.ConditionStatus, reason, message string) error {
	var now v1alpha1.AccelerationPolicy
	err := c.patchPolicy(ctx, p, metav1.Condition{
		Type: v1alpha1.ConditionRolledOut, Status: status, Reason: reason, Message: short(message), ObservedGeneration: p.Generation,
	}, &r).Into(&now)
	if err == nil && now.Status.Rollout == nil {
		err = fmt.Errorf("the cluster's CRD of kind %s is too old for rollouts: apply the files in charts/slipstream/crds", v1alpha1.KindAccelerationPolicy)
	}
	return err
}

// serverClock is the API server's clock, which all agents share.
type serverClock struct{ ahead atomic.Int64 }

func (s *serverClock) now() time.Time { return time.Now().Add(time.Duration(s.ahead.Load())) }

// follow reads the time from the header of each response.
func (s *serverClock) follow(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		answer, err := next.RoundTrip(r)
		if err == nil {
			if at, err := http.ParseTime(answer.Header.Get("Date")); err == nil {
				s.ahead.Store(int64(time.Until(at)))
			}
		}
		return answer, err
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
