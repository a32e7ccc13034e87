package kube

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/words"
)

// marking is an agent's knowledge of the condition Selected of one policy.
type marking struct {
	// selected means that the policy selected this node at the last look.
	selected bool
	// left is when this node left the policy, by the API server's clock. It is zero again once it is known whether another node
	// is selected.
	left time.Time
	// due is the condition that this agent would write, and since is when it became due.
	due   string
	since time.Time
}

// markPolicies maintains the conditions Selected and Ready of every policy, and the counts of its nodes, until ctx is done.
func (c *Cluster) markPolicies(ctx context.Context) {
	all := make(map[types.UID]*marking)
	for {
		node, seen, look := c.node(), make(map[types.UID]bool), timer(c.pace.look)
		for _, o := range c.rules.List() {
			p, ok := o.(*v1alpha1.AccelerationPolicy)
			if !ok || p.DeletionTimestamp != nil {
				continue
			}
			seen[p.UID] = true
			if all[p.UID] == nil {
				all[p.UID] = &marking{}
			}
			err := c.markPolicy(ctx, p, all[p.UID], node != nil && p.Spec.SelectsNode(node.Labels), &look)
			if err == nil {
				err = c.tally(ctx, p, &look)
			}
			if err != nil && !outdone(err) && ctx.Err() == nil {
				c.options.Log.Warn("write a policy's condition", "policy", p.Name, "error", err)
			}
		}
		maps.DeleteFunc(all, func(uid types.UID, _ *marking) bool { return !seen[uid] })
		if !pause(ctx, time.Duration(look)) {
			return
		}
	}
}

// markPolicy writes the condition if it is wrong and no other agent has corrected it within this agent's writeDelay.
func (c *Cluster) markPolicy(ctx context.Context, p *v1alpha1.AccelerationPolicy, m *marking, selected bool, look *timer) error {
	if m.selected && !selected {
		m.left = c.clock.Now()
	}
	m.selected = selected
	status, reason, message, wait := c.verdict(p, m)
	if due := string(status) + reason; m.due != due {
		m.due, m.since = due, time.Now()
	}
	if m.due == "" || !look.due(wait+c.writeDelay(p.UID)-time.Since(m.since)) || !c.gate.caughtUp() {
		return nil
	}
	m.since = time.Now() // do not try again at once if this fails
	if reason == v1alpha1.ReasonNoNode {
		var err error
		if status, reason, message, err = c.anyNode(ctx, p); err != nil {
			return err
		}
	}
	return c.mark(ctx, p, status, reason, message)
}

// anyNode asks the API server whether a policy can select a node with an agent, and returns the condition that follows. Only an agent
// that would otherwise claim that there is none asks.
func (c *Cluster) anyNode(ctx context.Context, p *v1alpha1.AccelerationPolicy) (status metav1.ConditionStatus, reason, message string, err error) {
	if err := c.mayWrite(p); err != nil {
		return "", "", "", err // before listing nodes
	}
	nodes, err := c.peers(ctx, p)
	if err != nil {
		return "", "", "", err
	}
	var names []string
	for _, n := range nodes {
		names = append(names, n.name)
	}
	slices.Sort(names)
	if len(names) == 0 {
		return metav1.ConditionFalse, v1alpha1.ReasonNoNode, noNode, nil
	}
	const most = 5
	runs, known, err := c.agentsOn(ctx)
	switch {
	case err != nil:
		return "", "", "", err
	case known && !slices.ContainsFunc(names, func(name string) bool { return runs[name] }):
		return metav1.ConditionFalse, v1alpha1.ReasonNoNode, "no agent runs on the nodes with the labels: " + words.First(names, most), nil
	}
	return metav1.ConditionUnknown, v1alpha1.ReasonNoReport, "the labels are on " + words.First(names, most) + ", and no agent there has said yet that its node is selected", nil
}

// verdict returns the condition that this agent would write, and how long it leaves that to others.
// The status is empty if the condition is right as far as this agent knows.
func (c *Cluster) verdict(p *v1alpha1.AccelerationPolicy, m *marking) (status metav1.ConditionStatus, reason, message string, wait time.Duration) {
	at := meta.FindStatusCondition(p.Status.Conditions, v1alpha1.ConditionSelected)
	current := at != nil && at.ObservedGeneration == p.Generation
	_, unclear := p.Spec.Nodes()
	if m.selected || current && (at.Status != metav1.ConditionTrue || at.LastTransitionTime.After(m.left) && !c.clock.Future(at.LastTransitionTime.Time)) {
		m.left = time.Time{} // there is nothing to doubt, or another agent has answered
	}
	switch {
	case m.selected && (!current || at.Status != metav1.ConditionTrue):
		return metav1.ConditionTrue, v1alpha1.ReasonNodes, "a node with an agent has the labels; for the state of each node, see its NodeAcceleration", 0
	case unclear != nil && (!current || at.Reason != v1alpha1.ReasonNoSelector):
		return metav1.ConditionFalse, v1alpha1.ReasonNoSelector, unclear.Error(), 0
	case !m.selected && unclear == nil && (!current || at.Reason == v1alpha1.ReasonPending):
		return metav1.ConditionFalse, v1alpha1.ReasonNoNode, noNode, c.pace.patience
	case !m.left.IsZero():
		// Agents of other selected nodes will set it again. That is two writes, and every agent receives both. So if many nodes
		// are relabelled one after another, it happens only once per pace.doubt.
		wait = max(c.pace.patience, min(c.pace.doubt, at.LastTransitionTime.Add(c.pace.doubt).Sub(m.left)))
		return metav1.ConditionUnknown, v1alpha1.ReasonPending, "a node has lost the labels; agents of others that have them will say so", wait
	}
	return "", "", "", 0
}

const noNode = "no node has the labels of nodeSelector; kubectl get nodes --show-labels lists them"

// mark writes the condition, unless another agent has done so first.
func (c *Cluster) mark(ctx context.Context, p *v1alpha1.AccelerationPolicy, status metav1.ConditionStatus, reason, message string) error {
	_, err := c.patchPolicy(ctx, p, metav1.Condition{
		Type: v1alpha1.ConditionSelected, Status: status, Reason: reason, Message: message, ObservedGeneration: p.Generation,
	}, p.Status.Rollout, nil)
	return err
}

// Errors of writes that are not attempted.
var (
	errResting = errors.New("the API server has just refused a write")
	errOutdone = errors.New("the policy has changed meanwhile, or this agent has just written to it")
)

// policyWrite is a write to a policy: the version that it named, and when it was sent.
type policyWrite struct {
	version string
	at      time.Time
}

// mayWrite returns why a policy's status cannot be written now, or nil. The API server would refuse the second of two writes that
// name the same version. So an agent that still sees that version, because events come late, does not send a second one. After a
// minute it does: versions may repeat when etcd is restored, and the API server refuses writes for other reasons too.
func (c *Cluster) mayWrite(p *v1alpha1.AccelerationPolicy) error {
	if until := c.restUntil.Load(); until != nil && time.Now().Before(*until) {
		return errResting
	}
	outdated := c.isOutdated(p)
	c.mu.Lock()
	defer c.mu.Unlock()
	last := c.lastWrites[p.UID]
	if outdated || last.version == p.ResourceVersion && time.Since(last.at) < time.Minute {
		return errOutdone
	}
	return nil
}

// isOutdated reports whether the watch has brought another version of a policy by now.
func (c *Cluster) isOutdated(p *v1alpha1.AccelerationPolicy) bool {
	known, ok, _ := c.rules.GetByKey(p.Name)
	return ok && known.(*v1alpha1.AccelerationPolicy).ResourceVersion != p.ResourceVersion
}

// noteWrite records that a write that names this version of a policy is being sent.
func (c *Cluster) noteWrite(p *v1alpha1.AccelerationPolicy) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lastWrites[p.UID] = policyWrite{p.ResourceVersion, time.Now()}
}

// forgetWrite allows another write that names the same version: the last one has failed.
func (c *Cluster) forgetWrite(p *v1alpha1.AccelerationPolicy) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.lastWrites, p.UID)
}

// patchPolicy writes a policy's status with a condition, and counts if they are not nil, unless the status has changed meanwhile, and
// returns the resulting policy. If a write fails, all agents would try, because none sees that another has done it; so each agent then waits for a
// while.
func (c *Cluster) patchPolicy(ctx context.Context, p *v1alpha1.AccelerationPolicy, condition metav1.Condition, rollout *v1alpha1.RolloutStatus, nodes *v1alpha1.NodeCounts) (now v1alpha1.AccelerationPolicy, err error) {
	if err := c.mayWrite(p); err != nil {
		return now, err // before it uses up the limit
	}
	if err := c.sharedLimit.Wait(ctx); err != nil {
		return now, err
	}
	if err := c.mayWrite(p); err != nil {
		return now, err // while it waited, another agent may have written
	}
	c.noteWrite(p)
	conditions := p.DeepCopy().Status.Conditions
	condition.LastTransitionTime = metav1.NewTime(c.clock.Now())
	meta.SetStatusCondition(&conditions, condition)
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"resourceVersion": p.ResourceVersion},
		"status":   v1alpha1.AccelerationPolicyStatus{Rollout: rollout, Nodes: nodes, Conditions: conditions},
	})
	if err != nil {
		return now, err
	}
	err = c.clients.shared.Patch(types.MergePatchType).Resource("accelerationpolicies").Name(p.Name).SubResource("status").MaxRetries(0).Body(patch).Do(ctx).Into(&now)
	if err != nil && !outdone(err) {
		c.forgetWrite(p)
		until := time.Now().Add(c.pace.retry + rand.N(c.pace.retry))
		c.restUntil.Store(&until)
	}
	return now, err
}

// outdone reports whether a write was refused or skipped because another agent or a user was faster, or because the agent has to
// wait.
func outdone(err error) bool {
	return apierrors.IsConflict(err) || apierrors.IsNotFound(err) || errors.Is(err, errResting) || errors.Is(err, errOutdone)
}
