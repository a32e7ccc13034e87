package kube

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/words"
)

// A policy's status counts its nodes, and says in its condition Ready whether all are as it wants them. No agent watches the others, so
// whoever has just reported that its own node has changed counts all of them anew. A count that began after a report includes it, so
// one agent counts for all, at most once in pace.tally, or in pace.doubt while nodes only come and go.

// summaryOf returns the policies of a node in one line, which kubectl prints and tally reads. Those that failed come first.
func summaryOf(all []v1alpha1.ObservedPolicy) string {
	rank := func(o v1alpha1.ObservedPolicy) int {
		return slices.Index([]v1alpha1.State{v1alpha1.StateFailed, v1alpha1.StatePending, v1alpha1.StateApplied}, stateIn(o))
	}
	all = slices.Clone(all)
	slices.SortStableFunc(all, func(a, b v1alpha1.ObservedPolicy) int { return rank(a) - rank(b) })
	var texts []string
	for _, o := range all {
		text := fmt.Sprintf("%s %s", o.Policy, stateIn(o))
		switch {
		case o.RolledBack != 0:
			text += " (" + v1alpha1.ReasonRolledBack + ")"
		case o.State != v1alpha1.StateApplied:
			text += " (" + o.Reason + ")"
		}
		texts = append(texts, text)
	}
	return short(strings.Join(texts, ", "))
}

// stateIn returns the state of a policy on a node. A node that rolled a version back may still have the one before applied.
func stateIn(o v1alpha1.ObservedPolicy) v1alpha1.State {
	if o.RolledBack != 0 {
		return v1alpha1.StateFailed
	}
	return o.State
}

// inSummary finds a policy in a node's summary, with its state and reason.
func inSummary(summary, policy string) (state v1alpha1.State, reason string, ok bool) {
	for entry := range strings.SplitSeq(summary, ", ") {
		if name, rest, _ := strings.Cut(entry, " "); name == policy {
			state, reason, _ := strings.Cut(rest, " ")
			return v1alpha1.State(state), strings.Trim(reason, "()"), true
		}
	}
	return "", "", false
}

// uncounted says that this agent has reported something that the counts of a policy do not include yet, and when. It is urgent if it is
// about a failure, or the end of a rollout.
type uncounted struct {
	// at is the time by the API server's clock, which also dates the counts, and since by this machine's monotonic clock; after a
	// count that failed, since is when to try again.
	at, since time.Time
	urgent    bool
}

// standings of a policy on a node, of which a change is counted. Between them a rollout moves, and pods come and go.
const (
	absent = iota
	good
	bad
)

// noteStandings records which policies have to be counted, because this agent has reported another standing of its node.
func (c *Cluster) noteStandings(was, is []v1alpha1.ObservedPolicy) {
	of := func(all []v1alpha1.ObservedPolicy, policy string) int {
		i := slices.IndexFunc(all, func(o v1alpha1.ObservedPolicy) bool { return o.Policy == policy })
		switch {
		case i < 0:
			return absent
		case stateIn(all[i]) == v1alpha1.StateFailed:
			return bad
		}
		return good
	}
	for _, o := range slices.Concat(was, is) {
		if before, after := of(was, o.Policy), of(is, o.Policy); before != after {
			c.noteReport(o.Policy, before == bad || after == bad)
		}
	}
}

// noteReport records a report. An urgent one that no count includes yet stays urgent.
func (c *Cluster) noteReport(policy string, urgent bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.summarized {
		return
	}
	c.reported[policy] = uncounted{c.clock.Now(), time.Now(), urgent || c.reported[policy].urgent}
}

// tally counts the nodes of a policy, if this agent has reported something that no count includes yet.
func (c *Cluster) tally(ctx context.Context, p *v1alpha1.AccelerationPolicy, look *timer) error {
	c.mu.Lock()
	reported, ok := c.reported[p.Name]
	c.mu.Unlock()
	if !ok {
		return nil
	}
	var counted time.Time
	if n := p.Status.Nodes; n != nil && !c.clock.Future(n.Counted.Time) {
		counted = n.Counted.Time
	}
	// The clock of the API server is known to a second, and a list may be a little out of date.
	if counted.After(reported.at.Add(2 * time.Second)) {
		c.forgetReport(p.Name, reported)
		return nil
	}
	// Agents report that a policy has reached them within pace.counts.
	wait, rest := c.pace.counts, c.pace.doubt
	if reported.urgent {
		wait, rest = c.pace.spread, c.pace.tally
	}
	if !look.due(max(wait-time.Since(reported.since), rest-c.clock.Since(counted))+c.writeDelay(p.UID)) || !c.gate.caughtUp() {
		return nil
	}
	return c.count(ctx, p, reported)
}

// count counts the nodes of a policy and writes the counts.
func (c *Cluster) count(ctx context.Context, p *v1alpha1.AccelerationPolicy, reported uncounted) error {
	if err := c.mayWrite(p); err != nil {
		return err // before listing all nodes
	}
	counts := v1alpha1.NodeCounts{Counted: metav1.NewTime(c.clock.Now())}
	var failed []string
	waiting := 0
	request := c.clients.reports.Get().Resource("nodeaccelerations")
	err := eachRow(ctx, request, []string{"Name", "Policies"}, func(cells []string) {
		state, reason, ok := inSummary(cells[1], p.Name)
		if !ok {
			return
		}
		counts.Selected++
		switch {
		case state == v1alpha1.StateFailed:
			counts.Failed++
			failed = append(failed, fmt.Sprintf("%s (%s)", cells[0], reason))
		case reason == v1alpha1.ReasonWaiting:
			waiting++
		default:
			counts.Ready++
		}
	})
	if err != nil {
		rest := c.pace.retry
		if apierrors.IsForbidden(err) {
			rest = c.pace.unknown // older roles do not let agents list
		}
		c.postponeReport(p.Name, reported, rest+rand.N(rest))
		return fmt.Errorf("count the nodes of policy %s: %w", p.Name, err)
	}
	slices.Sort(failed)
	if _, err := c.patchPolicy(ctx, p, readiness(p, counts, failed, waiting), p.Status.Rollout, &counts); err != nil {
		return err
	}
	c.forgetReport(p.Name, reported)
	return nil
}

// readiness returns the condition Ready of a policy.
func readiness(p *v1alpha1.AccelerationPolicy, n v1alpha1.NodeCounts, failed []string, waiting int) metav1.Condition {
	const most = 5
	is := metav1.Condition{Type: v1alpha1.ConditionReady, ObservedGeneration: p.Generation}
	rollout := meta.FindStatusCondition(p.Status.Conditions, v1alpha1.ConditionRolledOut)
	switch current := rollout != nil && rollout.ObservedGeneration == p.Generation; {
	case n.Failed > 0:
		is.Status, is.Reason = metav1.ConditionFalse, v1alpha1.ReasonFailed
		is.Message = fmt.Sprintf("it failed on %d of %s: %s", n.Failed, words.Count(n.Selected, "node"), words.First(failed, most))
	case current && rollout.Reason == v1alpha1.ReasonHalted:
		is.Status, is.Reason, is.Message = metav1.ConditionFalse, v1alpha1.ReasonHalted, rollout.Message
	case n.Selected == 0:
		is.Status, is.Reason, is.Message = metav1.ConditionUnknown, v1alpha1.ReasonNoNode, "it selects no node with an agent"
	case waiting > 0 || !current || rollout.Status != metav1.ConditionTrue:
		is.Status, is.Reason = metav1.ConditionUnknown, v1alpha1.ReasonProgressing
		is.Message = fmt.Sprintf("%d of %s have it, and its rollout continues", n.Ready, words.Count(n.Selected, "node"))
	default:
		is.Status, is.Reason, is.Message = metav1.ConditionTrue, v1alpha1.ReasonApplied, fmt.Sprintf("%s of %d are as it wants them", words.Count(n.Ready, "node"), n.Selected)
	}
	is.Message = short(is.Message)
	return is
}

// forgetReport records that a count includes a report. A later report stays.
func (c *Cluster) forgetReport(policy string, r uncounted) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reported[policy] == r {
		delete(c.reported, policy)
	}
}

// postponeReport makes this agent wait, at least for a time, before it counts again.
func (c *Cluster) postponeReport(policy string, r uncounted, rest time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reported[policy] == r {
		r.since = time.Now().Add(rest)
		c.reported[policy] = r
	}
}
