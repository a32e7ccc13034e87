package kube

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"slipstream.dev/api/v1alpha1"
)

// Fleet is what the agents of a cluster report.
type Fleet struct {
	Policies []v1alpha1.AccelerationPolicy
	Nodes    []v1alpha1.NodeAcceleration
	// Repairs are the newest first, as far back as the cluster keeps events. Unread says why there are none, if the user may
	// not read events.
	Repairs []Repair
	Unread  string
}

// Repair tells that an agent has restored settings that something else had changed.
type Repair struct {
	Node, Text string
	At         time.Time
}

// repaired selects the events of repairs, as internal/agent writes them. Those about nodes are in the namespace default.
const repaired = "reason=Repaired,source=slipstream-agent"

// Fleet reads what the agents report.
func (c *Cluster) Fleet(ctx context.Context) (f Fleet, err error) {
	policies, err := c.api.Policies(ctx)
	if apierrors.IsNotFound(err) {
		return f, fmt.Errorf("this cluster has no accelerationpolicies: install the chart first: %w", err)
	}
	if err != nil {
		return f, fmt.Errorf("list policies: %w", explain(err))
	}
	nodes, err := c.api.Accelerations(ctx)
	if err != nil {
		return f, fmt.Errorf("list the states of agents: %w", explain(err))
	}
	f.Policies, f.Nodes = policies.Items, nodes.Items
	events, err := c.api.Events(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{FieldSelector: repaired})
	if apierrors.IsForbidden(err) {
		f.Unread = "you may not list events in the namespace default"
		return f, nil
	}
	if err != nil {
		return f, fmt.Errorf("list events: %w", explain(err))
	}
	for _, e := range events.Items {
		f.Repairs = append(f.Repairs, Repair{e.InvolvedObject.Name, e.Message, e.LastTimestamp.Time})
	}
	slices.SortStableFunc(f.Repairs, func(a, b Repair) int { return cmp.Or(b.At.Compare(a.At), cmp.Compare(a.Node, b.Node)) })
	return f, nil
}
