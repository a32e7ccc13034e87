package v1alpha1

import (
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// The copies that Kubernetes' machinery asks of what it keeps in a cache. They
// are few, so they are written and not generated; a test compares them with a
// copy by way of JSON and looks for what they share.

// DeepCopy of an accelerator.
func (a Accelerator) DeepCopy() Accelerator {
	if a.RPS != nil {
		rps := *a.RPS
		rps.Devices = slices.Clone(rps.Devices)
		a.RPS = &rps
	}
	if a.RFS != nil {
		rfs := *a.RFS
		rfs.Devices = slices.Clone(rfs.Devices)
		a.RFS = &rfs
	}
	if a.Fastpath != nil {
		fastpath := *a.Fastpath
		fastpath.UnseenBy = slices.Clone(fastpath.UnseenBy)
		a.Fastpath = &fastpath
	}
	return a
}

// DeepCopy of a policy.
func (p *AccelerationPolicy) DeepCopy() *AccelerationPolicy {
	out := *p
	p.ObjectMeta.DeepCopyInto(&out.ObjectMeta)
	out.Spec.NodeSelector = maps.Clone(p.Spec.NodeSelector)
	if p.Spec.Rollout != nil {
		rollout := *p.Spec.Rollout
		out.Spec.Rollout = &rollout
	}
	out.Spec.Accelerate = copies(p.Spec.Accelerate, Accelerator.DeepCopy)
	out.Spec.Pods = p.Spec.Pods.DeepCopy()
	if p.Status.Rollout != nil {
		rollout := *p.Status.Rollout
		rollout.FailedNodes = slices.Clone(rollout.FailedNodes)
		out.Status.Rollout = &rollout
	}
	out.Status.Conditions = copyConditions(p.Status.Conditions)
	return &out
}

// DeepCopy of a node's state.
func (n *NodeAcceleration) DeepCopy() *NodeAcceleration {
	out := *n
	n.ObjectMeta.DeepCopyInto(&out.ObjectMeta)
	out.Status.Observed = slices.Clone(n.Status.Observed)
	out.Status.Conditions = copyConditions(n.Status.Conditions)
	return &out
}

func copies[T any](from []T, one func(T) T) []T {
	if from == nil {
		return nil
	}
	out := make([]T, len(from))
	for i, v := range from {
		out[i] = one(v)
	}
	return out
}

func copyConditions(from []metav1.Condition) []metav1.Condition {
	return copies(from, func(c metav1.Condition) metav1.Condition { return *c.DeepCopy() })
}

// DeepCopyObject makes it a runtime.Object.
func (p *AccelerationPolicy) DeepCopyObject() runtime.Object { return p.DeepCopy() }

// DeepCopyObject makes it a runtime.Object.
func (n *NodeAcceleration) DeepCopyObject() runtime.Object { return n.DeepCopy() }

// DeepCopyObject makes it a runtime.Object.
func (l *AccelerationPolicyList) DeepCopyObject() runtime.Object {
	out := *l
	l.ListMeta.DeepCopyInto(&out.ListMeta)
	out.Items = copies(l.Items, func(p AccelerationPolicy) AccelerationPolicy { return *p.DeepCopy() })
	return &out
}

// DeepCopyObject makes it a runtime.Object.
func (l *NodeAccelerationList) DeepCopyObject() runtime.Object {
	out := *l
	l.ListMeta.DeepCopyInto(&out.ListMeta)
	out.Items = copies(l.Items, func(n NodeAcceleration) NodeAcceleration { return *n.DeepCopy() })
	return &out
}
