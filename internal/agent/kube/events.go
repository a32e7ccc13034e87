package kube

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"slipstream.dev/internal/agent"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

const (
	// quiet is how long an equal event is not repeated.
	quiet = 10 * time.Minute
	// An agent writes up to eventsBurst events at once, and eventsRate a second in the long run; the log has all of them.
	eventsBurst = 10
	eventsRate  = 1.0 / 60
)

// writeEvents writes the events that Notify passes. One cause may produce events on every node at the same moment, so each agent
// first waits for a random time.
func (c *Cluster) writeEvents(ctx context.Context) {
	told := make(map[agent.Event]time.Time)
	limit := rate.NewLimiter(eventsRate, eventsBurst)
	var waited time.Time
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
		if !limit.Allow() {
			c.options.Log.Warn("too many events: this one is only logged", "reason", e.Reason, "message", e.Message)
			continue
		}
		told[e] = time.Now()
		if time.Since(waited) > c.pace.events && !pause(ctx, rand.N(c.pace.events)) {
			return
		}
		waited = time.Now()
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
	now := metav1.NewTime(c.clock.Now())
	event := &corev1.Event{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Event"},
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: fmt.Sprintf("%s.slipstream.%x", c.options.Node, now.UnixNano())},
		// The same reference as in the kubelet's events, so that `kubectl describe node` shows these too.
		InvolvedObject: corev1.ObjectReference{Kind: "Node", Name: c.options.Node, UID: types.UID(c.options.Node)},
		Reason:         e.Reason, Message: short(e.Message), Type: kind, Count: 1, FirstTimestamp: now, LastTimestamp: now,
		Source: corev1.EventSource{Component: "slipstream-agent", Host: c.options.Node}, ReportingController: "slipstream.dev/agent", ReportingInstance: c.options.Node,
	}
	return c.clients.events.Post().Namespace(event.Namespace).Resource("events").Body(event).Do(ctx).Error()
}
