//go:build linux

package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// The intervals at which a kubelet renews its node's lease and, if nothing changes, its status: the defaults of Kubernetes.
const (
	leaseTime  = 10 * time.Second
	statusTime = 5 * time.Minute
)

// startHeartbeats renews the leases and the statuses of all nodes, evenly spread, until stop is called. A renewal that fails
// while the API server is down is not retried early.
func (f *fleet) startHeartbeats(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var all sync.WaitGroup
	for i, h := range f.agents {
		all.Go(func() {
			var lease *coordinationv1.Lease
			wait := leaseTime * time.Duration(i) / time.Duration(len(f.agents))
			for beat := i; pause(ctx, wait) == nil; beat++ {
				lease, wait = f.renewLease(ctx, h.name, lease), leaseTime
				if beat%int(statusTime/leaseTime) == 0 {
					f.renewStatus(ctx, h.name)
				}
			}
		})
	}
	return func() { cancel(); all.Wait() }
}

// renewLease returns the lease that it has written, or nil.
func (f *fleet) renewLease(ctx context.Context, node string, last *coordinationv1.Lease) *coordinationv1.Lease {
	leases := f.admin.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	now := metav1.NowMicro()
	if last == nil {
		last, _ = leases.Get(ctx, node, metav1.GetOptions{}) // an error means that it does not exist
	}
	var err error
	if last == nil || last.Name == "" {
		last, err = leases.Create(ctx, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: node}, Spec: coordinationv1.LeaseSpec{HolderIdentity: &node, RenewTime: &now}}, metav1.CreateOptions{})
	} else {
		last.Spec.RenewTime = &now
		last, err = leases.Update(ctx, last, metav1.UpdateOptions{})
	}
	if err != nil {
		return nil
	}
	return last
}

func (f *fleet) renewStatus(ctx context.Context, node string) {
	patch := fmt.Appendf(nil, `{"status":{"conditions":[{"type":"Ready","lastHeartbeatTime":%q}]}}`, time.Now().UTC().Format(time.RFC3339))
	_, _ = f.admin.CoreV1().Nodes().Patch(ctx, node, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status") // errors: see startHeartbeats
}
