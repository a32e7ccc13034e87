package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"slipstream.dev/internal/agent"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"slipstream.dev/api/v1alpha1"
)

// news determines how soon a change of the status is written.
type news int

const (
	noNews news = iota
	// smallNews are changes of figures and messages. With a hundred new pods a second on a thousand nodes, a write for each would
	// be a hundred writes a second. So they wait, longer each time as long as they keep changing.
	smallNews
	// goodNews means that a policy is applied, or no longer wanted. All nodes may have that at the same moment.
	goodNews
	// urgentNews means that something failed, or that other nodes need the report to continue a rollout, or this one.
	urgentNews
)

// countsAtMost limits how long small news wait, as a multiple of pace.counts.
const countsAtMost = 10

// statusWriter writes the NodeAcceleration. No other agent does, so the object is as this agent last wrote it.
type statusWriter struct {
	*Cluster
	// written is nil until the object has been read.
	written *v1alpha1.NodeAccelerationStatus
	// compared means that this agent has written, or found that there was nothing to write. Until then an earlier agent wrote
	// written.
	compared bool
	// wait is how long the unwritten small news wait, 0 if there are none. The previous small news were written at the time at,
	// after they had waited for last.
	wait, last time.Duration
	at         time.Time
}

// readInherited reads the status that an earlier agent of this node wrote, or nil. It tries until it succeeds or ctx is done: the
// agent must know which policies the node has or has rolled back before it decides anything.
func (c *Cluster) readInherited(ctx context.Context) (*v1alpha1.NodeAccelerationStatus, error) {
	for {
		if err := c.gate.wait(ctx); err != nil {
			return nil, err
		}
		was, err := c.readOwn(ctx)
		if err == nil {
			c.mu.Lock()
			defer c.mu.Unlock()
			if was != nil {
				c.inherited = was.Observed
			}
			c.started = true
			return was, nil
		}
		again := c.pace.retry + rand.N(c.pace.retry)
		c.options.Log.Warn("read what an earlier agent of this node reported; the node keeps its current settings until then", "error", err, "again", again.Round(time.Second))
		if !pause(ctx, again) {
			return nil, ctx.Err()
		}
	}
}

// readOwn reads the node's NodeAcceleration; it returns nil if there is none.
func (c *Cluster) readOwn(ctx context.Context) (*v1alpha1.NodeAccelerationStatus, error) {
	var n v1alpha1.NodeAcceleration
	err := c.clients.status.Get().Resource("nodeaccelerations").Name(c.options.Node).Do(ctx).Into(&n)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return &n.Status, nil
}

// writeStatus writes the statuses that Publish passes, each as soon as its news demand, until ctx is done.
func (c *Cluster) writeStatus(ctx context.Context, written *v1alpha1.NodeAccelerationStatus) {
	w := &statusWriter{Cluster: c, written: written}
	var due, earliest time.Time // due is zero if there is nothing to write
	timer := time.NewTimer(0)
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.dirty:
			if at := w.due(time.Now()); !at.IsZero() && (due.IsZero() || at.Before(due)) {
				due = at
			}
		case <-timer.C:
		}
		if due.IsZero() {
			continue
		}
		if due.Before(earliest) {
			due = earliest
		}
		if wait := time.Until(due); wait > 0 {
			timer.Reset(wait)
			continue
		}
		due, earliest = time.Time{}, time.Now().Add(c.pace.between)
		if err := w.write(ctx); err != nil {
			if ctx.Err() != nil {
				return
			}
			due = time.Now().Add(c.pace.retry + rand.N(c.pace.retry))
			earliest = due
			c.options.Log.Warn("write the node's status", "error", err, "again", time.Until(due).Round(time.Second))
			timer.Reset(time.Until(due))
		}
	}
}

// due returns when the status has to be written. It returns zero if nothing has changed, or if an earlier call has already
// returned the time.
func (w *statusWriter) due(now time.Time) time.Time {
	s, ok := w.wanted()
	if !ok {
		return time.Time{}
	}
	is := w.newsOf(s)
	if is != smallNews {
		w.wait = 0
	}
	switch is {
	case smallNews:
		if w.wait > 0 {
			return time.Time{} // an earlier call has returned the time
		}
		w.wait = w.pace.counts
		if now.Sub(w.at) < w.last {
			w.wait = min(2*w.last, countsAtMost*w.pace.counts)
		}
		return now.Add(w.wait*4/5 + rand.N(w.wait*2/5))
	case goodNews:
		return now.Add(rand.N(w.pace.spread))
	case urgentNews:
		return now.Add(rand.N(w.pace.between))
	}
	return time.Time{}
}

// wanted returns the status to write. ok is false if the agent has not published any.
func (w *statusWriter) wanted() (s v1alpha1.NodeAccelerationStatus, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	published := w.status
	if published == nil {
		return s, false
	}
	s = v1alpha1.NodeAccelerationStatus{Agent: w.options.DaemonSet, Observed: slices.Clone(published.Policies), Settings: published.Settings, Verified: published.Verified}
	for i := range s.Observed {
		s.Observed[i].Message = short(s.Observed[i].Message)
		w.addEvidence(&s.Observed[i])
	}
	s.Summary = summaryOf(s.Observed)
	if w.written != nil {
		s.Conditions = slices.Clone(w.written.Conditions)
	}
	setConditions(&s.Conditions, *published, metav1.NewTime(w.clock.Now()))
	return s, true
}

// newsOf compares a status with the written one. The first one is good news: the agents of a whole cluster may start at the same
// moment.
func (w *statusWriter) newsOf(s v1alpha1.NodeAccelerationStatus) news {
	if w.written == nil || !w.compared {
		return goodNews
	}
	is := noNews
	for _, c := range s.Conditions {
		was := meta.FindStatusCondition(w.written.Conditions, c.Type)
		switch {
		case was != nil && was.Status == c.Status && (was.Reason == c.Reason || c.Type == v1alpha1.ConditionReady):
			// The reasons of the condition Ready come from the policies.
		case c.Status == metav1.ConditionFalse:
			return urgentNews
		default:
			is = max(is, goodNews)
		}
	}
	for _, o := range s.Observed {
		var was v1alpha1.ObservedPolicy
		if i := slices.IndexFunc(w.written.Observed, func(was v1alpha1.ObservedPolicy) bool { return was.Policy == o.Policy }); i >= 0 {
			was = w.written.Observed[i]
		}
		switch {
		case o.Passed && !was.Passed, o.RolledBack != 0 && o.RolledBack != was.RolledBack, o.Tried != 0 && o.Tried != was.Tried:
			return urgentNews
		case was.State == o.State && was.Reason == o.Reason && was.Generation == o.Generation:
		case o.State == v1alpha1.StateFailed:
			return urgentNews
		case o.State == v1alpha1.StateApplied:
			is = max(is, goodNews)
		}
	}
	for _, was := range w.written.Observed {
		if !slices.ContainsFunc(s.Observed, func(o v1alpha1.ObservedPolicy) bool { return o.Policy == was.Policy }) {
			is = max(is, goodNews)
		}
	}
	if is == noNews && !equalStatus(*w.written, s) {
		is = smallNews
	}
	return is
}

// write writes the status with one request; at the start, others read or create the object. After an outage it waits for this
// agent's moment: all agents may have something to write.
func (w *statusWriter) write(ctx context.Context) error {
	if err := w.gate.wait(ctx); err != nil {
		return err
	}
	if w.written == nil {
		if err := w.read(ctx); err != nil {
			return err
		}
	}
	s, ok := w.wanted()
	if !ok || equalStatus(*w.written, s) {
		w.wait, w.compared = 0, w.compared || ok
		w.announce(s)
		return nil
	}
	if s.Observed == nil {
		s.Observed = []v1alpha1.ObservedPolicy{}
	}
	// null, not omitted: a patch must say that the list is empty now.
	patch, err := json.Marshal(map[string]any{"status": map[string]any{
		"agent": s.Agent, "observed": s.Observed, "summary": s.Summary, "settings": s.Settings, "verified": s.Verified, "conditions": s.Conditions,
	}})
	if err != nil {
		return err
	}
	var now v1alpha1.NodeAcceleration
	err = w.clients.status.Patch(types.MergePatchType).Resource("nodeaccelerations").Name(w.options.Node).SubResource("status").Body(patch).Do(ctx).Into(&now)
	if err != nil {
		w.written = nil // the object may have been deleted, or the write may have succeeded although no answer came
		return err
	}
	w.mu.Lock()
	w.summarized = now.Status.Summary == s.Summary
	w.mu.Unlock()
	w.noteStandings(w.written.Observed, s.Observed)
	w.written, w.compared = &s, true
	w.announce(s)
	hasUID := func(o v1alpha1.ObservedPolicy) bool { return o.UID != "" }
	hasTried := func(o v1alpha1.ObservedPolicy) bool { return o.Tried != 0 }
	for _, has := range []func(v1alpha1.ObservedPolicy) bool{hasUID, hasTried} {
		if slices.ContainsFunc(s.Observed, has) && !slices.ContainsFunc(now.Status.Observed, has) {
			w.options.Log.Warn(crdTooOld(v1alpha1.KindNodeAcceleration))
			break
		}
	}
	if w.wait > 0 {
		w.at, w.last, w.wait = time.Now(), w.wait, 0
	}
	return nil
}

// crdTooOld returns the message for a CRD whose schema made the API server drop what an agent wrote.
func crdTooOld(kind string) string {
	return "the cluster's CRD of kind " + kind + " is too old for rollouts: apply the files in charts/slipstream/crds"
}

// read reads the status that an earlier agent wrote, so that a restart writes nothing if nothing has changed. If there is no
// object, it creates one, but only for a node that the cluster has: deleting the node deletes the object, which stays for ever
// without it.
func (w *statusWriter) read(ctx context.Context) error {
	was, err := w.readOwn(ctx)
	if was != nil || err != nil {
		w.written = was
		return err
	}
	node := w.node()
	if node == nil {
		return fmt.Errorf("the cluster has no node %s: without it, no NodeAcceleration is created", w.options.Node)
	}
	n := v1alpha1.NodeAcceleration{
		TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.APIVersion, Kind: v1alpha1.KindNodeAcceleration},
		ObjectMeta: metav1.ObjectMeta{
			Name: w.options.Node, OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID}},
		},
	}
	if err := w.clients.status.Post().Resource("nodeaccelerations").Body(&n).Do(ctx).Into(&n); err != nil {
		return err
	}
	w.written = &n.Status
	return nil
}

// equalStatus reports whether two statuses are equal. An absent list is equal to an empty one.
func equalStatus(a, b v1alpha1.NodeAccelerationStatus) bool {
	return a.Agent == b.Agent && a.Summary == b.Summary && a.Settings == b.Settings && a.Verified == b.Verified && slices.Equal(a.Observed, b.Observed) &&
		slices.EqualFunc(a.Conditions, b.Conditions, func(c, d metav1.Condition) bool {
			return c.Type == d.Type && c.Status == d.Status && c.Reason == d.Reason && c.Message == d.Message
		})
}

// setConditions sets the conditions of a node, and removes those of accelerators that no policy wants.
func setConditions(all *[]metav1.Condition, s agent.Status, now metav1.Time) {
	wanted := map[string]bool{v1alpha1.ConditionReady: true}
	set := func(kind string, status metav1.ConditionStatus, reason, message string) {
		wanted[kind] = true
		meta.SetStatusCondition(all, metav1.Condition{Type: kind, Status: status, Reason: reason, Message: short(message), LastTransitionTime: now})
	}
	ready := metav1.ConditionFalse
	if s.Ready {
		ready = metav1.ConditionTrue
	}
	set(v1alpha1.ConditionReady, ready, s.Reason, s.Message)
	for _, is := range s.Accelerators {
		set(is.Condition, metav1.ConditionStatus(is.Status), is.Reason, is.Message)
	}
	*all = slices.DeleteFunc(*all, func(c metav1.Condition) bool { return !wanted[c.Type] })
}

// short truncates a message to the maximum length of a field.
func short(message string) string {
	const limit = 1000
	if len(message) > limit {
		return strings.ToValidUTF8(message[:limit], "") + " …"
	}
	return message
}
