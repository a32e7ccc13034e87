package cluster

import (
	"context"
	"time"

	"k8s.io/client-go/kubernetes"
)

// New returns a cluster behind a test's client. The agents' report is a list of NodeAccelerations as JSON.
func New(client kubernetes.Interface, agents func(context.Context) ([]byte, error), poll time.Duration) *Cluster {
	return &Cluster{client: client, agents: agents, poll: poll}
}
