package kube

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"slipstream.dev/internal/agent"
	"slipstream.dev/internal/words"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"slipstream.dev/api/v1alpha1"
)

// A policy is rolled out to one node first and then to more, step by step (docs/adr/0012), without a controller. The policy's
// status says how far the rollout is. Each agent reads there whether it is its node's turn, and an agent that has had the policy
// for a while without problems makes the next step. evidence.go checks whether the status is right.

// pace sets the intervals and delays of an agent's actions.
type pace struct {
	// look is how often an agent checks for something to do.
	look time.Duration
	// baseline is the minimum time for which a node's dropped packets are counted before it gets a
	// policy, for comparison.
	baseline time.Duration
	// spread is the time over which agents spread a write that only one of them has to make, so that the others see that the
	// first has made it. It also spreads the reports that a policy is applied.
	spread time.Duration
	// lasting is the time after which a failure counts as permanent.
	lasting time.Duration
	// silence is added to three pauses: if the rollout makes no step for that long, it counts as failed on the first node.
	silence time.Duration
	// burst is the time in which changes of policies, pods and the node are handled as one.
	burst time.Duration
	// between is the minimum time between two writes of the node's status. counts is how long changed figures wait to be written
	// (± 20%), if nothing else has changed. If they change again within that time after the write, they wait twice as long, and
	// so on. After a failed write, the next try comes after retry to twice that.
	between, counts, retry time.Duration
	// patience is how long an agent waits for others to say that they are selected.
	patience time.Duration
	// doubt is how old a condition Selected must be before an agent whose node has left the policy sets it to Unknown.
	doubt time.Duration
	// tally is the minimum time between two counts of a policy's nodes, while failures come and go.
	tally time.Duration
	// unknown, or up to twice that, is how long an agent waits before it tries again to begin a rollout that the CRD does not
	// know.
	unknown time.Duration
	// events is the time over which agents spread an event that all of them may have.
	events time.Duration
	// outage is the time over which agents spread their return after the API server was away.
	outage time.Duration
}

var usualPace = pace{
	look: time.Second, baseline: 2 * time.Second, spread: 5 * time.Second, lasting: 10 * time.Second, silence: time.Minute,
	burst: 100 * time.Millisecond, between: time.Second, counts: 30 * time.Second, retry: 10 * time.Second,
	patience: 10 * time.Second, doubt: 5 * time.Minute, tally: time.Minute, unknown: 5 * time.Minute, events: 10 * time.Second, outage: 55 * time.Second,
}

// turn is an agent's knowledge of the rollout of one policy.
type turn struct {
	generation int64
	// stepPercent and rest come from the policy.
	stepPercent int
	rest        time.Duration
	// version is this generation, and base the version that this node had before; nil for none.
	version agent.Policy
	base    *agent.Policy
	// seen is when this agent first saw the generation, moved when it last saw the rollout advance,
	// and taken when the node got the policy. After taken, no status takes the policy away.
	seen, moved, taken time.Time
	status             v1alpha1.RolloutStatus
	// step is the percentage that the rollout had to reach for this node, 0 if it was the first.
	step int
	// boot is the machine's boot in which the node was about to get the version in a step, empty before that. announced means that
	// the NodeAcceleration says so.
	boot      string
	announced bool
	// began: this agent made its node the first. proven: enough nodes of the previous step passed. ask is when to look for that
	// evidence next, and askAgain the pause after that.
	began, proven bool
	ask           time.Time
	askAgain      time.Duration
	// known means that the status has the rollout, and progressing that this agent saw it incomplete. others is when this agent
	// last saw another node become the first, or the rollout erased.
	known, progressing bool
	others             time.Time
	// halted means that this agent saw the rollout halted, at the percentage limit. A halted rollout never continues.
	halted bool
	limit  int
	// before is read when the generation is seen, start when the node gets the policy.
	before, start losses
	// passed means that the node has had the policy for a pause without a failed check. tried is when the node last failed to
	// find evidence for the next step, and tryAgain how long it waits after that.
	passed   bool
	tried    time.Time
	tryAgain time.Duration
	// failing is the time since which the agent has published a failure.
	failing time.Time
	// acted is when this agent last wrote for the rollout: it may not have received that change yet.
	acted time.Time
	// begins is the earliest time at which this agent begins the rollout. pruned is the policy's resourceVersion when the start
	// was last put off.
	begins time.Time
	pruned string
	// trouble says why this node rolled the policy back, and gaveUp when it did.
	trouble string
	gaveUp  time.Time
}

// position returns a node's position in the order of a policy's rollout, in [0, 1). Each policy has its own
// order, so that the first node is not always the same.
func position(policy types.UID, node string) float64 {
	sum := sha256.Sum256([]byte(string(policy) + "/" + node))
	return float64(binary.BigEndian.Uint64(sum[:])>>11) / (1 << 53)
}

// density determines how many delays are long: at the end of pace.spread they are e^density times as dense as at its beginning.
const density = 10

// writeDelay returns how long this agent waits before a write that any agent of a policy could make, and only one has to. It
// maps evenly distributed positions to times, only few of which are early. So the number of agents that write before they see
// the first write hardly depends on the number of agents (Nonnenmacher and Biersack, Scalable Feedback for Large Groups, 1999).
// Among a thousand nodes, the first one writes after a third of the time, and on average 0.2 others write within the tenth of a
// second in which they do not see its write yet.
func (c *Cluster) writeDelay(policy types.UID) time.Duration {
	at := math.Log1p(position(policy, c.options.Node)*math.Expm1(density)) / density
	return time.Duration(at * float64(c.pace.spread))
}

func percentOf(policy types.UID, node string) int { return int(100 * position(policy, node)) }

// begun reports whether a rollout has reached a node, according to the policy's status.
func begun(r *v1alpha1.RolloutStatus, policy types.UID, node string) bool {
	return r.First == node || percentOf(policy, node) < r.Percent
}

// reached reports whether the status says that it is the turn of this agent's node. Only the agent itself makes its node the first.
func (t *turn) reached(r *v1alpha1.RolloutStatus, policy types.UID, node string) bool {
	return r != nil && (t.began && r.First == node || percentOf(policy, node) < min(r.Percent, t.limit))
}

// mayTake reports whether the node may get the policy. A policy without steps is for all nodes at once, whatever others do.
func (t *turn) mayTake(r *v1alpha1.RolloutStatus, policy types.UID, node string) bool {
	return t.reached(r, policy, node) && (t.proven || t.stepPercent == 100 || t.began && r.First == node)
}

// mayBegin reports whether this agent may make its node the first. If somebody erases the status of a rollout that others have
// begun, only one further node may begin it in the time after which a rollout counts as failed.
func (c *Cluster) mayBegin(t *turn) bool {
	return t.trouble == "" && !t.halted && (!t.taken.IsZero() || time.Since(t.others) > 3*t.rest+c.pace.silence) &&
		ready(c.node()) && c.gate.caughtUp()
}

// rolloutOf returns the rollout of the policy's generation, or nil if it has not begun.
func rolloutOf(p *v1alpha1.AccelerationPolicy) *v1alpha1.RolloutStatus {
	if r := p.Status.Rollout; r != nil && r.Generation == p.Generation {
		return r
	}
	return nil
}

// turnOf returns the turn of a policy. The caller holds mu.
func (c *Cluster) turnOf(p *v1alpha1.AccelerationPolicy) *turn {
	r := rolloutOf(p)
	t := c.turns[p.UID]
	lost := t != nil && t.generation > p.Generation && !c.isOutdated(p) // an earlier state of etcd was restored
	if lost {
		maps.DeleteFunc(c.complete, func(v policyVersion, _ completePolicy) bool { return v.uid == p.UID })
	}
	if t == nil || t.generation < p.Generation || lost {
		now := time.Now()
		next := &turn{generation: p.Generation, seen: now, moved: now, before: c.losses(), limit: 100, tryAgain: c.pace.retry}
		next.stepPercent, next.rest = p.Spec.Steps()
		if r != nil {
			next.status = *r
			if !r.Complete {
				next.others = now
			}
		}
		if t != nil {
			next.base = t.base
			if !t.taken.IsZero() && t.trouble == "" {
				version := t.version // a copy, so that the old turn and those before it can be freed
				next.base = &version
			}
			if lost && next.base != nil {
				version := *next.base
				version.Generation = 0 // another version may get its number
				next.base = &version
			}
		} else {
			c.inherit(p, next)
		}
		t = next
		c.turns[p.UID] = t
	}
	if t.generation == p.Generation { // otherwise there is a newer one by now
		t.follow(r, c.options.Node)
	}
	return t
}

// note records each version of a policy when its event arrives. rollOut looks only once a second, and could miss that a rollout
// began and that somebody erased it.
func (c *Cluster) note(o any) {
	p, ok := o.(*v1alpha1.AccelerationPolicy)
	if !ok || !selects(p, c.node()) {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.started {
		c.turnOf(p)
	}
}

// follow records what the status says about the rollout; r is nil if it says nothing.
func (t *turn) follow(r *v1alpha1.RolloutStatus, node string) {
	if r == nil {
		if t.known {
			t.known, t.others = false, time.Now() // somebody has erased it
		}
		return
	}
	t.known = true
	if r.First != t.status.First && r.First != node {
		t.others = time.Now()
	}
	if r.Percent != t.status.Percent || r.First != t.status.First {
		t.status, t.moved = *r, time.Now()
	}
	if len(r.FailedNodes) > 0 && !r.Complete && !t.halted {
		t.halted, t.limit = true, r.Percent
	}
	t.progressing = t.progressing || !r.Complete
}

// inherit restores a turn from the report of an earlier agent of this node: the node still has the version, or has rolled it
// back.
func (c *Cluster) inherit(p *v1alpha1.AccelerationPolicy, t *turn) {
	i := slices.IndexFunc(c.inherited, func(o v1alpha1.ObservedPolicy) bool {
		return o.Policy == p.Name && (o.UID == p.UID || o.UID == "") // an earlier version of the agent reported none
	})
	if i < 0 {
		return
	}
	o, r := c.inherited[i], rolloutOf(p)
	complete := r != nil && r.Complete
	failed := r != nil && slices.Contains(r.FailedNodes, c.options.Node)
	switch {
	case o.RolledBack == p.Generation:
		t.trouble = "failed a health check before its agent restarted"
	case o.Tried == p.Generation && o.Boot != c.boot && !o.Passed:
		// The policy may have crashed the machine, and would crash it again.
		t.trouble, t.gaveUp = "restarted before it had had the policy for a pause", t.seen
		c.tellRolledBack(p, t)
	case failed && !o.Passed:
		// The policy may be the reason why the machine restarted. Nothing proves the opposite, so the node stays without it.
	case o.Generation == p.Generation && hasVersion(o) && o.Reason != v1alpha1.ReasonInvalid:
		t.taken, t.start, t.step = t.seen, t.before, o.Step
		if o.UID == "" && !(r != nil && r.First == c.options.Node) {
			_, t.step = stepOf(percentOf(p.UID, c.options.Node), t.stepPercent)
		}
		t.passed = o.Passed || complete && (o.UID == "" || t.stepPercent == 100)
		if t.boot = o.Boot; t.boot == "" && !t.passed && t.stepPercent < 100 {
			t.boot = c.boot // an earlier version of the agent reported none
		}
	}
}

// change changes the turn of a policy, unless its generation has changed meanwhile.
func (c *Cluster) change(p *v1alpha1.AccelerationPolicy, by func(*turn)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if t := c.turns[p.UID]; t != nil && t.generation == p.Generation {
		by(t)
	}
}

// addEvidence adds to the entry of a policy the fields that the agents of other nodes, and this node's agent after a restart,
// read: UID, step, passed, rolledBack, tried and boot. The caller holds mu.
func (c *Cluster) addEvidence(o *v1alpha1.ObservedPolicy) {
	for uid, t := range c.turns {
		if t.version.Name != o.Policy {
			continue
		}
		o.UID = uid
		switch {
		case t.trouble != "":
			o.RolledBack = t.generation
		case t.generation == o.Generation && !t.taken.IsZero() && t.stepPercent < 100: // without steps, nobody reads them
			o.Step, o.Passed = t.step, t.passed
		}
		if t.boot != "" && t.trouble == "" {
			o.Tried, o.Boot = t.generation, t.boot
		}
	}
}

// announce lets the node get the versions of which the written status says that the node is about to get them.
func (c *Cluster) announce(written v1alpha1.NodeAccelerationStatus) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, o := range written.Observed {
		if t := c.turns[o.UID]; t != nil && !t.announced && o.Tried == t.generation && o.Boot == t.boot {
			t.announced = true
			poke(c.changed)
		}
	}
}

// atItsTurn returns the version of a policy that this node has now.
func (c *Cluster) atItsTurn(p *v1alpha1.AccelerationPolicy, version agent.Policy) agent.Policy {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := c.turnOf(p)
	withhold := func(reason, message string) agent.Policy {
		if t.base != nil {
			return *t.base
		}
		version.Withheld = agent.Withheld{Reason: reason, Message: message}
		return version
	}
	if t.generation != p.Generation {
		return withhold(v1alpha1.ReasonWaiting, "the policy is being changed") // the caller will see the change in a moment
	}
	t.version = version
	r := rolloutOf(p)
	switch {
	case t.trouble != "":
		return withhold(v1alpha1.ReasonRolledBack, "the node "+t.trouble+"; a change of the policy starts a new rollout")
	case !t.taken.IsZero():
		return version
	case r != nil && slices.Contains(r.FailedNodes, c.options.Node):
		return withhold(v1alpha1.ReasonRolledBack, "the policy's status names this node among those that failed with this version; a change of the policy starts a new rollout")
	case !t.mayTake(r, p.UID, c.options.Node):
		return withhold(v1alpha1.ReasonWaiting, t.waitsFor(r, p.UID, c.options.Node))
	case !ready(c.node()):
		return withhold(v1alpha1.ReasonWaiting, "the node is not Ready; the rollout waits until it is")
	case t.stepPercent < 100 && !t.announced:
		t.boot = c.boot
		poke(c.dirty)
		return withhold(v1alpha1.ReasonWaiting, "the node gets it as soon as its NodeAcceleration says so")
	}
	t.taken, t.start = time.Now(), c.losses()
	if r.First != c.options.Node || !t.began {
		_, t.step = stepOf(percentOf(p.UID, c.options.Node), t.stepPercent)
	}
	return version
}

// withoutInvalid returns the version of a policy that this node keeps while the current version is invalid. If the node has none, it is
// the current one, which is not applied.
func (c *Cluster) withoutInvalid(p *v1alpha1.AccelerationPolicy, version agent.Policy, err error) agent.Policy {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := c.turnOf(p)
	if t.generation == p.Generation {
		t.version, t.taken = version, time.Time{} // an earlier version of the agent may have taken it for valid
	}
	if t.base == nil {
		version.Invalid = err
		return version
	}
	base := *t.base
	base.LaterInvalid = fmt.Sprintf("generation %d is invalid, so the node keeps the version that it has: %s", p.Generation, err)
	return base
}

// waitsFor returns why the node does not have the policy yet.
func (t *turn) waitsFor(r *v1alpha1.RolloutStatus, policy types.UID, node string) string {
	if t.reached(r, policy, node) {
		return "the policy's status says that it is this node's turn, but its agent has not found enough nodes of the previous step that passed"
	}
	return "the rollout has not reached this node yet"
}

// forget drops the turns of policies that no longer select the node, versions of policies that are not current, and the last
// writes to policies that no longer exist and reports about them.
func (c *Cluster) forget(all []*v1alpha1.AccelerationPolicy, node *corev1.Node) {
	exist, turns, versions, names := make(map[types.UID]bool), make(map[types.UID]bool), make(map[policyVersion]bool), make(map[string]bool)
	for _, p := range all {
		exist[p.UID], names[p.Name] = true, true
		if selects(p, node) {
			turns[p.UID], versions[versionOf(p)] = true, true
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.DeleteFunc(c.reported, func(name string, _ uncounted) bool { return !names[name] })
	maps.DeleteFunc(c.lastWrites, func(uid types.UID, _ policyWrite) bool { return !exist[uid] })
	maps.DeleteFunc(c.turns, func(uid types.UID, _ *turn) bool { return !turns[uid] })
	maps.DeleteFunc(c.complete, func(v policyVersion, _ completePolicy) bool { return !versions[v] })
}

func (c *Cluster) proc() string { return cmp.Or(c.options.Proc, "/proc") }

func (c *Cluster) readLosses() losses {
	l, err := readLosses(c.proc())
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

// timer is the time until an agent looks again.
type timer time.Duration

// due reports whether the time has come. If not, it makes the agent look again at exactly that time: looking once a second would
// undo the spread of delays.
func (t *timer) due(in time.Duration) bool {
	if in > 0 {
		*t = min(*t, timer(in))
	}
	return in <= 0
}

// rollOut advances all rollouts until ctx is done.
func (c *Cluster) rollOut(ctx context.Context) {
	for {
		node, look := c.node(), timer(c.pace.look)
		for _, p := range c.policies() {
			if node == nil || !selects(p, node) {
				continue
			}
			if err := c.advance(ctx, p, &look); err != nil && !outdone(err) && ctx.Err() == nil {
				c.options.Log.Warn("roll a policy out", "policy", p.Name, "error", err)
			}
		}
		if !pause(ctx, time.Duration(look)) {
			return
		}
	}
}

// advance does the work that is due in the rollout of one policy.
func (c *Cluster) advance(ctx context.Context, p *v1alpha1.AccelerationPolicy, look *timer) error {
	if _, err := c.completed(p); err != nil {
		return nil //nolint:nilerr // an invalid policy is applied nowhere, and each node's status says so
	}
	delay := c.writeDelay(p.UID)
	c.mu.Lock()
	t := *c.turnOf(p)
	c.mu.Unlock()
	r := rolloutOf(p)
	c.checkSelf(ctx, p, &t, look)
	if !look.due(c.pace.look - time.Since(t.acted)) {
		return nil
	}
	switch {
	case r == nil && isPruned(p) && t.pruned != p.ResourceVersion:
		return c.putOff(p)
	case r == nil && look.due(time.Until(t.begins)) && look.due(c.pace.baseline+delay-time.Since(t.seen)) && c.mayBegin(&t):
		return c.begin(ctx, p, t.stepPercent)
	case r == nil:
		return nil
	}
	if err := c.seekEvidence(ctx, p, &t, look); err != nil {
		return err
	}
	quiet := time.Since(t.moved)
	switch {
	case t.trouble != "" && (!r.Complete || t.progressing) && c.mayReport(p, r, &t):
		return c.halt(ctx, p, []string{c.options.Node}, fmt.Sprintf("node %s %s", c.options.Node, t.trouble))
	case t.halted || r.Complete:
		return nil
	case t.passed && look.due(t.rest+c.toReport(t.stepPercent)+delay-quiet) && look.due(t.tryAgain-time.Since(t.tried)) && c.gate.caughtUp():
		return c.next(ctx, p, &t)
	case r.First != "" && quiet > 3*t.rest+c.pace.silence+delay && c.gate.caughtUp() && time.Since(c.gate.allBack()) > c.pace.silence:
		// The first node may have been the last to come back after an outage.
		return c.halt(ctx, p, []string{r.First}, fmt.Sprintf("the rollout has made no progress for %s: check node %s, which got the policy first", quiet.Round(time.Second), r.First))
	}
	return nil
}

// toReport is the time that the nodes of a step take, after the status has advanced, to announce that they get the policy, to get it
// and to report that. They look for evidence at random moments.
func (c *Cluster) toReport(step int) time.Duration {
	if step == 100 {
		return 0
	}
	return c.pace.spread + 3*c.pace.between
}

// checkSelf checks this node for a pause after it got a policy, whatever the policy's status says, and gives the policy up if a
// check fails.
func (c *Cluster) checkSelf(ctx context.Context, p *v1alpha1.AccelerationPolicy, t *turn, look *timer) {
	if t.taken.IsZero() || t.passed || t.trouble != "" {
		return
	}
	if t.trouble = c.trouble(ctx, p, t, look); t.trouble != "" {
		t.gaveUp = time.Now()
		c.giveUp(p, t)
	}
}

// act records that this agent writes for a rollout.
func (c *Cluster) act(p *v1alpha1.AccelerationPolicy) {
	c.change(p, func(t *turn) { t.acted = time.Now() })
}

// isHalted reports whether the rollout of a policy's current version halted.
func isHalted(p *v1alpha1.AccelerationPolicy) bool {
	at := meta.FindStatusCondition(p.Status.Conditions, v1alpha1.ConditionRolledOut)
	return at != nil && at.Reason == v1alpha1.ReasonHalted && at.ObservedGeneration == p.Generation
}

// isPruned reports whether an agent has begun the rollout in vain: the CRD does not know rollouts, so the API server dropped
// everything that the agent wrote except for the condition.
func isPruned(p *v1alpha1.AccelerationPolicy) bool {
	at := meta.FindStatusCondition(p.Status.Conditions, v1alpha1.ConditionRolledOut)
	return rolloutOf(p) == nil && at != nil && at.ObservedGeneration == p.Generation
}

// putOff makes this agent wait before it tries to begin a rollout that the CRD does not know, and returns that as an error.
func (c *Cluster) putOff(p *v1alpha1.AccelerationPolicy) error {
	wait := c.pace.unknown + rand.N(c.pace.unknown)
	c.change(p, func(t *turn) { t.begins, t.pruned = time.Now().Add(wait), p.ResourceVersion })
	return fmt.Errorf("%s; next try within %s", crdTooOld(v1alpha1.KindAccelerationPolicy), wait.Round(time.Second))
}

// mayReport reports whether this node may add itself to the failed nodes now. One failed node halts the
// rollout, so the others wait longer: all nodes may fail at the same time.
func (c *Cluster) mayReport(p *v1alpha1.AccelerationPolicy, r *v1alpha1.RolloutStatus, t *turn) bool {
	switch {
	case slices.Contains(r.FailedNodes, c.options.Node), len(r.FailedNodes) >= v1alpha1.MaxFailedNodes:
		return false
	case len(r.FailedNodes) == 0:
		return time.Since(t.gaveUp) > c.writeDelay(p.UID)
	}
	return time.Since(t.gaveUp) > c.writeDelay(p.UID)+time.Duration(position(p.UID, c.options.Node)*float64(c.pace.lasting))
}

// trouble checks the node after it got a policy, and returns the problem that it finds. After a pause without problems it marks
// the policy as passed.
func (c *Cluster) trouble(ctx context.Context, p *v1alpha1.AccelerationPolicy, t *turn, look *timer) string {
	delay := c.writeDelay(p.UID)
	if t.stepPercent < 100 {
		delay = 0 // the nodes of a step got the policy at random moments anyway
	}
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
	if !look.due(t.rest + delay - time.Since(t.taken)) {
		return ""
	}
	if r := rolloutOf(p); t.stepPercent < 100 || r == nil || !r.Complete {
		// A node that has lost its network cannot report that, so the agent checks for it here. Any answer will do, also one that
		// the server is overloaded or that the agent's rights are gone: that is no fault of the node, and of no use to restore it.
		err := c.clients.status.Get().Resource("nodeaccelerations").Name(c.options.Node).Timeout(c.pace.lasting).MaxRetries(0).Do(ctx).Error()
		switch {
		case err == nil, errors.As(err, new(apierrors.APIStatus)), ctx.Err() != nil:
		case time.Since(t.taken) > t.rest+3*c.pace.lasting:
			return fmt.Sprintf("cannot reach the API server since it got the policy: %s", err)
		default:
			return ""
		}
	}
	t.passed = true
	c.change(p, func(now *turn) { now.passed = true })
	poke(c.dirty) // other agents read it
	return ""
}

// failure returns the failure that the agent has been publishing for a policy for pace.lasting. A
// rejected policy has changed nothing, and does not count as failed.
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

// giveUp rolls a policy back on this node. The report to others follows.
func (c *Cluster) giveUp(p *v1alpha1.AccelerationPolicy, gone *turn) {
	c.change(p, func(t *turn) { t.trouble, t.gaveUp = gone.trouble, gone.gaveUp })
	c.tellRolledBack(p, gone)
	poke(c.changed)
}

// tellRolledBack logs and notifies that this node rolled a policy back.
func (c *Cluster) tellRolledBack(p *v1alpha1.AccelerationPolicy, gone *turn) {
	c.options.Log.Error("a policy is rolled back on this node", "policy", p.Name, "generation", p.Generation, "trouble", gone.trouble)
	c.Notify(agent.Event{Warning: true, Reason: v1alpha1.ReasonRolledBack, Message: fmt.Sprintf("policy %s: the node %s; its settings are restored", p.Name, gone.trouble)})
}

// begin makes this node the first, or includes all nodes if the policy says so.
func (c *Cluster) begin(ctx context.Context, p *v1alpha1.AccelerationPolicy, step int) error {
	c.act(p)
	r := v1alpha1.RolloutStatus{Generation: p.Generation, Started: metav1.NewTime(c.clock.Now()), First: c.options.Node}
	message := fmt.Sprintf("node %s is the first to get it", c.options.Node)
	if step == 100 {
		r.First, r.Percent, message = "", 100, "all nodes get it at once, because stepPercent is 100"
	}
	err := c.write(ctx, p, r, metav1.ConditionFalse, v1alpha1.ReasonProgressing, message)
	if err == nil || !outdone(err) { // the write may have succeeded although no answer came
		c.change(p, func(t *turn) { t.began = true })
		poke(c.changed)
	}
	return err
}

// halt stops a rollout because of nodes that had problems.
func (c *Cluster) halt(ctx context.Context, p *v1alpha1.AccelerationPolicy, nodes []string, why string) error {
	r := *p.DeepCopy().Status.Rollout
	r.Complete = false
	first := len(r.FailedNodes) == 0
	for _, n := range nodes {
		if !slices.Contains(r.FailedNodes, n) && len(r.FailedNodes) < v1alpha1.MaxFailedNodes {
			r.FailedNodes = append(r.FailedNodes, n)
		}
	}
	if at := meta.FindStatusCondition(p.Status.Conditions, v1alpha1.ConditionRolledOut); !first && at != nil {
		why = at.Message // the first reason matters most
	} else {
		why += "; it is rolled back on that node, other nodes that have it keep it, and no further node gets it until the policy is changed"
	}
	return c.write(ctx, p, r, metav1.ConditionFalse, v1alpha1.ReasonHalted, why)
}

// next makes the next step that includes at least one more node, if the nodes of earlier steps are Ready and enough nodes of the
// last step passed.
func (c *Cluster) next(ctx context.Context, p *v1alpha1.AccelerationPolicy, t *turn) error {
	c.act(p)
	if err := c.mayWrite(p); err != nil {
		return err // return before listing all nodes
	}
	r, step := *p.DeepCopy().Status.Rollout, t.stepPercent
	nodes, err := c.peers(ctx, p)
	if err != nil {
		return err
	}
	nearest := 100
	var notReady []string
	for _, n := range nodes {
		switch {
		case !begun(&r, p.UID, n.name):
			nearest = min(nearest, n.percent)
		case !n.ready:
			notReady = append(notReady, n.name)
		}
	}
	down, err := c.downSince(ctx, notReady, r.Started.Time)
	switch {
	case err != nil:
		return err
	case len(down) > 0:
		slices.Sort(down)
		return c.halt(ctx, p, down, fmt.Sprintf("node %s has not been Ready since it got the policy", down[0]))
	}
	from, to := 100, 100
	if nearest < 100 {
		from, to = stepOf(nearest, step)
	}
	r.Percent = to
	if step < 100 {
		q := c.inquire(p)
		if enough, err := q.askBefore(ctx, nodes, r.First, step, from); !enough || err != nil {
			c.change(p, func(t *turn) { t.tried, t.tryAgain = time.Now(), 2*t.tryAgain })
			return err
		}
		r.Passed = q.passed
	}
	if nearest == 100 {
		without, err := c.withoutAgent(ctx, nodes)
		if err != nil {
			return err
		}
		r.Complete = true
		return c.write(ctx, p, r, metav1.ConditionTrue, v1alpha1.ReasonComplete, "all nodes have it, and none reported a problem"+without)
	}
	return c.write(ctx, p, r, metav1.ConditionFalse, v1alpha1.ReasonProgressing, fmt.Sprintf("%d%% of the nodes have it", r.Percent))
}

// peers lists the nodes that a policy selects. It asks for the table that kubectl prints: some 300 bytes a node, from the API
// server's memory. A thousand Node objects would take megabytes, or many pages, and meanwhile other agents would begin the same
// step.
func (c *Cluster) peers(ctx context.Context, p *v1alpha1.AccelerationPolicy) (all []peer, err error) {
	selector, err := p.Spec.Nodes()
	if err != nil {
		return nil, err
	}
	request := c.clients.nodes.Get().Resource("nodes").Param("labelSelector", selector.String())
	err = eachRow(ctx, request, []string{"Name", "Status"}, func(cells []string) {
		all = append(all, peer{cells[0], percentOf(p.UID, cells[0]), !strings.HasPrefix(cells[1], "NotReady")})
	})
	return all, err
}

// eachRow requests the table that kubectl prints, and calls fn with the given columns of each row.
func eachRow(ctx context.Context, request *rest.Request, columns []string, fn func(cells []string)) error {
	var table metav1.Table
	text, err := request.Param("resourceVersion", "0").Param("includeObject", "None").SetHeader("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io").Do(ctx).Raw()
	if err == nil {
		err = json.Unmarshal(text, &table)
	}
	if err != nil {
		return fmt.Errorf("list %s: %w", request.URL().Path, err)
	}
	var at []int
	for _, name := range columns {
		at = append(at, slices.IndexFunc(table.ColumnDefinitions, func(d metav1.TableColumnDefinition) bool { return d.Name == name }))
	}
	cells := make([]string, len(columns))
	for _, row := range table.Rows {
		for i, column := range at {
			if column < 0 || column >= len(row.Cells) {
				return fmt.Errorf("list %s: the API server's table has no column %s", request.URL().Path, columns[i])
			}
			cells[i] = fmt.Sprint(row.Cells[column])
		}
		fn(cells)
	}
	return nil
}

// agentsOn returns the nodes on which an agent runs. ok is false if the agent does not know its DaemonSet.
func (c *Cluster) agentsOn(ctx context.Context) (runs map[string]bool, ok bool, err error) {
	namespace, daemonSet, ok := c.daemonSet()
	if !ok {
		return nil, false, nil
	}
	runs = make(map[string]bool)
	request := c.clients.nodes.Get().Namespace(namespace).Resource("pods")
	err = eachRow(ctx, request, []string{"Name", "Status", "Node"}, func(cells []string) {
		if cells[1] == "Running" && strings.HasPrefix(cells[0], daemonSet+"-") {
			runs[cells[2]] = true
		}
	})
	return runs, true, err
}

// withoutAgent returns a sentence about the given nodes on which no agent runs, or "". Only the agent that completes a rollout
// asks for that.
func (c *Cluster) withoutAgent(ctx context.Context, nodes []peer) (string, error) {
	runs, ok, err := c.agentsOn(ctx)
	if !ok || err != nil {
		return "", err
	}
	var without []string
	for _, n := range nodes {
		if !runs[n.name] {
			without = append(without, n.name)
		}
	}
	if len(without) == 0 {
		return "", nil
	}
	const most = 10
	slices.Sort(without)
	return fmt.Sprintf("; no agent runs on %s: what their NodeAccelerations say is out of date", words.First(without, most)), nil
}

// downSince returns those of the given nodes that were Ready at a time and are not now. It looks at as many nodes as a status can
// name.
func (c *Cluster) downSince(ctx context.Context, names []string, at time.Time) (down []string, err error) {
	for _, name := range names[:min(len(names), v1alpha1.MaxFailedNodes)] {
		var one corev1.NodeList
		if err := c.clients.nodes.Get().Resource("nodes").Param("fieldSelector", "metadata.name="+name).Param("resourceVersion", "0").Do(ctx).Into(&one); err != nil {
			return nil, fmt.Errorf("look at node %s: %w", name, err)
		}
		for _, n := range one.Items {
			ready := readyCondition(&n)
			if ready == nil || ready.Status == corev1.ConditionTrue || !ready.LastTransitionTime.After(at) || !n.CreationTimestamp.Time.Before(at) {
				continue
			}
			// A kubelet that reports this itself has a clock of its own, by which it may have done so for longer.
			if ready.LastHeartbeatTime.Sub(ready.LastTransitionTime.Time) <= c.clock.Since(at) {
				down = append(down, name)
			}
		}
	}
	return down, nil
}

// write writes the progress of a rollout, unless another agent has done so first.
func (c *Cluster) write(ctx context.Context, p *v1alpha1.AccelerationPolicy, r v1alpha1.RolloutStatus, status metav1.ConditionStatus, reason, message string) error {
	now, err := c.patchPolicy(ctx, p, metav1.Condition{
		Type: v1alpha1.ConditionRolledOut, Status: status, Reason: reason, Message: short(message), ObservedGeneration: p.Generation,
	}, &r, nil)
	if err == nil && isPruned(&now) {
		return c.putOff(&now)
	}
	if err == nil && reason != v1alpha1.ReasonProgressing {
		c.noteReport(p.Name, true) // the condition Ready follows from this one too
	}
	return err
}
