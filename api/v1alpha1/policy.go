// +groupName=slipstream.dev

package v1alpha1

import (
	"cmp"
	"errors"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

//go:generate controller-gen crd object paths=. output:crd:dir=../../charts/slipstream/crds

// Kinds of what an agent reads and writes.
const (
	KindAccelerationPolicy = "AccelerationPolicy"
	KindNodeAcceleration   = "NodeAcceleration"
)

// GroupVersion is that of APIVersion, as the machinery wants it.
var GroupVersion = schema.GroupVersion{Group: "slipstream.dev", Version: "v1alpha1"}

// AddToScheme makes the kinds of a cluster known to a scheme.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion, &AccelerationPolicy{}, &AccelerationPolicyList{}, &NodeAcceleration{}, &NodeAccelerationList{})
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}

// AccelerationPolicy keeps accelerators on, on the nodes that it selects. In a
// cluster it is an object, on a host without one a file.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=ap
// +kubebuilder:printcolumn:name="Selected",type=string,JSONPath=`.status.conditions[?(@.type=="Selected")].status`
// +kubebuilder:printcolumn:name="Rollout",type=string,JSONPath=`.status.conditions[?(@.type=="RolledOut")].reason`
// +kubebuilder:printcolumn:name="Percent",type=integer,JSONPath=`.status.rollout.percent`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type AccelerationPolicy struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec AccelerationPolicySpec `json:"spec"`
	// +optional
	Status AccelerationPolicyStatus `json:"status,omitzero"`
}

// AccelerationPolicySpec says what is kept on, and where.
//
// +kubebuilder:object:generate=true
// +kubebuilder:validation:XValidation:rule="(has(self.nodeSelector) && self.nodeSelector.size() > 0) != (has(self.all) && self.all)",message="say which nodes: either nodeSelector with labels that they have, or all: true for every node"
type AccelerationPolicySpec struct {
	// NodeSelector are labels that a node must have.
	// +optional
	// +kubebuilder:validation:MaxProperties=64
	NodeSelector map[string]string `json:"nodeSelector,omitempty"`
	// All is true for a policy of every node, in place of NodeSelector.
	// +optional
	All bool `json:"all,omitempty"`
	// Rollout is how fast the policy, and every change of it, comes to its nodes.
	// +optional
	Rollout *Rollout `json:"rollout,omitempty"`
	// Accelerate are accelerators as an experiment's variant has them, and vf.
	//
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=8
	// +kubebuilder:validation:XValidation:rule="self.all(a, (has(a.rps) ? 1 : 0) + (has(a.rfs) ? 1 : 0) + (has(a.fastpath) ? 1 : 0) + (has(a.vf) ? 1 : 0) == 1)",message="each accelerator is exactly one of rps, rfs, fastpath and vf"
	// +kubebuilder:validation:XValidation:rule="self.filter(a, has(a.fastpath)).size() < 2",message="fastpath must not be listed twice"
	// +kubebuilder:validation:XValidation:rule="self.filter(a, has(a.vf)).size() < 2",message="vf must not be listed twice"
	// +kubebuilder:validation:XValidation:rule="self.all(a, !has(a.rps) || (a.rps.devices.size() > 0 && a.rps.devices.size() < 5))",message="rps.devices are one to four of nic, overlay, host-veth and pod"
	// +kubebuilder:validation:XValidation:rule="self.all(a, !has(a.rfs) || (a.rfs.devices.size() > 0 && a.rfs.devices.size() < 5))",message="rfs.devices are one to four of nic, overlay, host-veth and pod"
	// +kubebuilder:validation:XValidation:rule="self.all(a, !has(a.rfs) || !has(a.rfs.entries) || (a.rfs.entries > 0 && a.rfs.entries <= 536870912))",message="rfs.entries is a power of two up to 536870912"
	Accelerate []PolicyAccelerator `json:"accelerate"`
	// Pods select, by their labels and in every namespace, those whose own
	// interfaces get what accelerate says of the class pod; all of them if absent.
	// +optional
	Pods *metav1.LabelSelector `json:"pods,omitempty"`
}

// PolicyAccelerator is one accelerator of a policy: exactly one field is set.
//
// +kubebuilder:object:generate=true
type PolicyAccelerator struct {
	Accelerator `json:",inline"`
	// VF verifies that packets of the node's NICs take their virtual functions (SR-IOV,
	// Accelerated Networking). It changes nothing.
	VF *VF `json:"vf,omitempty"`
}

// VF has no fields.
//
// +kubebuilder:object:generate=true
type VF struct{}

// Accelerators are those that set something, and whether virtual functions are verified.
func (s *AccelerationPolicySpec) Accelerators() (set []Accelerator, vf bool) {
	for _, a := range s.Accelerate {
		if a.VF != nil {
			vf = true
			continue
		}
		set = append(set, a.Accelerator)
	}
	return set, vf
}

// Nodes are those that the policy selects. A policy that does not say which, as one
// may that a schema without this check let pass, is an error and no node's.
func (s *AccelerationPolicySpec) Nodes() (labels.Selector, error) {
	switch {
	case s.All && len(s.NodeSelector) > 0:
		return labels.Nothing(), errors.New("spec has both nodeSelector and all: true; take one of them out")
	case !s.All && len(s.NodeSelector) == 0:
		return labels.Nothing(), errors.New("spec does not say which nodes: write nodeSelector with labels that they have, or all: true for every node")
	}
	return labels.SelectorFromSet(s.NodeSelector), nil
}

// SelectsNode reports whether the policy selects a node with these labels. It allocates nothing: each agent
// asks it of every policy, again and again.
func (s *AccelerationPolicySpec) SelectsNode(labels map[string]string) bool {
	if s.All == (len(s.NodeSelector) > 0) {
		return false
	}
	for key, want := range s.NodeSelector {
		if value, ok := labels[key]; !ok || value != want {
			return false
		}
	}
	return true
}

// Rollout is how a policy comes to its nodes: to one of them first, then, after each
// pause without trouble, to as many more as a step has.
//
// +kubebuilder:object:generate=true
type Rollout struct {
	// StepPercent is how many of the nodes a step has, in percent, 10 if absent; 100 is
	// every node at once, with no first one.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100
	StepPercent int `json:"stepPercent,omitempty"`
	// PauseSeconds is how long the nodes that have it are watched before the next
	// step, 60 if absent.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=86400
	PauseSeconds int `json:"pauseSeconds,omitempty"`
}

// Steps are the policy's rollout with every default.
func (s *AccelerationPolicySpec) Steps() (percent int, pause time.Duration) {
	var r Rollout
	if s.Rollout != nil {
		r = *s.Rollout
	}
	return cmp.Or(r.StepPercent, 10), time.Duration(cmp.Or(r.PauseSeconds, 60)) * time.Second
}

// Conditions of an AccelerationPolicy, and their reasons.
const (
	// ConditionSelected tells whether the policy is any node's.
	ConditionSelected = "Selected"
	// ReasonNodes: at least one node is selected and has an agent.
	ReasonNodes = "Nodes"
	// ReasonNoNode: no agent's node has the labels.
	ReasonNoNode = "NoNode"
	// ReasonNoSelector: it has neither nodeSelector nor all: true, or both.
	ReasonNoSelector = "NoSelector"

	// ConditionRolledOut tells whether the policy's generation is on all its nodes.
	ConditionRolledOut = "RolledOut"
	// ReasonProgressing: it is on some, and goes on.
	ReasonProgressing = "Progressing"
	// ReasonHalted: it goes to no further node, as one had trouble.
	ReasonHalted = "Halted"
	// ReasonComplete: the last of them were watched for a pause as well.
	ReasonComplete = "Complete"
)

// AccelerationPolicyStatus is what can be said of a policy without counting
// nodes: how it fares on each is in the NodeAccelerations.
//
// +kubebuilder:object:generate=true
type AccelerationPolicyStatus struct {
	// Rollout is how far the policy has come.
	// +optional
	Rollout *RolloutStatus `json:"rollout,omitempty"`
	// Conditions tell whether the policy is any node's, and whether it is on all of them.
	//
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// MaxFailedNodes bounds RolloutStatus.FailedNodes.
const MaxFailedNodes = 64

// RolloutStatus is how far one generation of a policy has come. No field is left out when
// it is written: a patch that merges has to take back what an earlier generation set.
//
// +kubebuilder:object:generate=true
type RolloutStatus struct {
	// Generation is that of the policy that this is about.
	Generation int64 `json:"generation"`
	// Started is when the first node got it, by the clock of the API server.
	Started metav1.Time `json:"started"`
	// First is the node that got it before the others; empty if all got it at once.
	// +optional
	First string `json:"first"`
	// Percent of the nodes that have it now, besides the first.
	Percent int `json:"percent"`
	// FailedNodes had trouble after they got it, and gave it up. If there is any, the
	// rollout is halted.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=64
	FailedNodes []string `json:"failedNodes"`
	// Complete: the last of the nodes were watched for a pause as well.
	// +optional
	Complete bool `json:"complete"`
}

// AccelerationPolicyList is a list of them.
//
// +kubebuilder:object:root=true
type AccelerationPolicyList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []AccelerationPolicy `json:"items"`
}

// NodeAcceleration is what an agent has made of the policies on its node, whose
// name it bears.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=na
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Policies",type=string,JSONPath=`.status.observed[*].policy`
// +kubebuilder:printcolumn:name="States",type=string,JSONPath=`.status.observed[*].state`
// +kubebuilder:printcolumn:name="Settings",type=integer,JSONPath=`.status.settings`
// +kubebuilder:printcolumn:name="Verified",type=integer,JSONPath=`.status.verified`
type NodeAcceleration struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +optional
	Status NodeAccelerationStatus `json:"status,omitzero"`
}

// NodeAccelerationStatus is what the node's agent last saw.
//
// +kubebuilder:object:generate=true
type NodeAccelerationStatus struct {
	// Observed are the policies that select the node, the earliest first.
	// +optional
	// +listType=map
	// +listMapKey=policy
	Observed []ObservedPolicy `json:"observed,omitempty"`
	// Settings that are held on the node and in its pods.
	Settings int `json:"settings"`
	// Verified is how many of the settings read back what was wanted.
	Verified int `json:"verified"`
	// Conditions tell whether the node is as its policies want it.
	//
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// Conditions of a NodeAcceleration.
const (
	// ConditionReady tells whether a node is as its policies want it.
	ConditionReady = "Ready"
	// ConditionFastpath tells whether a node has the fast path, where a policy wants it.
	ConditionFastpath = "Fastpath"
	// ConditionVF tells whether packets take the virtual functions of a node's NICs, where a
	// policy verifies that. It is Unknown while nothing tells.
	ConditionVF = "VF"
)

// State of a policy on one node.
// +kubebuilder:validation:Enum=applied;pending;failed
type State string

// States of a policy on one node.
const (
	// StateApplied: all that it wants here reads back.
	StateApplied State = "applied"
	// StatePending: nothing is wrong, and nothing is there to be set.
	StatePending State = "pending"
	// StateFailed: it was refused, or not all of it reads back.
	StateFailed State = "failed"
)

// Reasons of a policy's state on a node, and of the node's condition Ready.
const (
	// ReasonApplied: all that is wanted reads back.
	ReasonApplied = "Applied"
	// ReasonNoPolicy: no policy selects the node, and it is as it was found.
	ReasonNoPolicy = "NoPolicy"
	// ReasonNoDevice: the node has no device of the classes named, or no pod that
	// is selected.
	ReasonNoDevice = "NoDevice"
	// ReasonWaiting: the policy's rollout has not come to the node.
	ReasonWaiting = "Waiting"
	// ReasonRolledBack: the node had trouble after it got the policy, and gave it up.
	ReasonRolledBack = "RolledBack"
	// ReasonConflict: an earlier policy wants the same setting at another value.
	ReasonConflict = "Conflict"
	// ReasonInvalid: the policy contradicts itself.
	ReasonInvalid = "Invalid"
	// ReasonImpossible: this machine cannot do it, as with CPUs that it lacks.
	ReasonImpossible = "Impossible"
	// ReasonHeld: somebody else, such as an experiment, holds a setting at
	// another value.
	ReasonHeld = "Held"
	// ReasonNotVerified: the kernel made something else of what was written.
	ReasonNotVerified = "NotVerified"
	// ReasonError: something on the node failed.
	ReasonError = "Error"
	// ReasonAttached: the fast path has its programs on all devices, or is idle as no connection is
	// eligible.
	ReasonAttached = "Attached"
	// ReasonSkipped: the fast path skips some devices that it does not support.
	ReasonSkipped = "Skipped"
	// ReasonVFUsed: packets take the virtual functions (VFs) of all NICs that may have one.
	ReasonVFUsed = "VFUsed"
	// ReasonVFPresent: a VF is up, and no window has told yet whether packets take it.
	ReasonVFPresent = "VFPresent"
	// ReasonVFIdle: a VF is up, and packets do not take it.
	ReasonVFIdle = "VFIdle"
	// ReasonVFAbsent: a NIC has no VF that packets can take.
	ReasonVFAbsent = "VFAbsent"
	// ReasonVFWithdrawn: a NIC has lost a VF that was up.
	ReasonVFWithdrawn = "VFWithdrawn"
)

// ObservedPolicy is one policy on one node.
//
// +kubebuilder:object:generate=true
type ObservedPolicy struct {
	// Policy is the name of the policy.
	Policy string `json:"policy"`
	// Generation of the policy that this is about.
	Generation int64 `json:"generation"`
	State      State `json:"state"`
	// Reason is why it is in the state.
	Reason string `json:"reason"`
	// Message is the same in a sentence.
	//
	// +optional
	Message string `json:"message,omitempty"`
	// Settings that the policy accounts for.
	Settings int `json:"settings"`
	// Verified is how many of the settings read back what was wanted.
	Verified int `json:"verified"`
}

// NodeAccelerationList is a list of them.
//
// +kubebuilder:object:root=true
type NodeAccelerationList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []NodeAcceleration `json:"items"`
}
