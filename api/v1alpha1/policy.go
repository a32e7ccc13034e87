// Package v1alpha1 defines the objects of a cluster that an agent reads and writes: AccelerationPolicy and
// NodeAcceleration.
//
// +groupName=slipstream.dev
package v1alpha1

import (
	"cmp"
	"errors"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

//go:generate controller-gen crd object paths=. output:crd:dir=../../charts/slipstream/crds

// APIVersion is the group and version of every object and file.
const APIVersion = "slipstream.dev/v1alpha1"

// Kinds of the objects that an agent reads and writes.
const (
	KindAccelerationPolicy = "AccelerationPolicy"
	KindNodeAcceleration   = "NodeAcceleration"
)

// GroupVersion is APIVersion in the form that the API machinery wants.
var GroupVersion = schema.GroupVersion{Group: "slipstream.dev", Version: "v1alpha1"}

// AddToScheme registers the kinds of a cluster with a scheme.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion, &AccelerationPolicy{}, &AccelerationPolicyList{}, &NodeAcceleration{}, &NodeAccelerationList{})
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}

// AccelerationPolicy says which accelerators the agents apply, and to which nodes. In a
// cluster it is an object, on a host without Kubernetes a file.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=ap
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Selected",type=string,JSONPath=`.status.conditions[?(@.type=="Selected")].status`
// +kubebuilder:printcolumn:name="Nodes",type=integer,JSONPath=`.status.nodes.selected`
// +kubebuilder:printcolumn:name="Failed",type=integer,JSONPath=`.status.nodes.failed`
// +kubebuilder:printcolumn:name="Rollout",type=string,JSONPath=`.status.conditions[?(@.type=="RolledOut")].reason`
// +kubebuilder:printcolumn:name="Percent",type=integer,JSONPath=`.status.rollout.percent`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type AccelerationPolicy struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec AccelerationPolicySpec `json:"spec"`
	// +optional
	// +kubebuilder:default:={conditions: {{type: "Selected", status: "Unknown", reason: "Pending", message: "no agent has said yet whether a node is selected", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Ready", status: "Unknown", reason: "Pending", message: "no agent has counted the nodes yet", lastTransitionTime: "1970-01-01T00:00:00Z"}}}
	Status AccelerationPolicyStatus `json:"status,omitzero"`
}

// AccelerationPolicySpec says which accelerators to apply, and where.
//
// +kubebuilder:object:generate=true
// +kubebuilder:validation:XValidation:rule="(has(self.nodeSelector) && self.nodeSelector.size() > 0) != (has(self.all) && self.all)",message="say which nodes: either nodeSelector with labels that they have, or all: true for every node"
type AccelerationPolicySpec struct {
	// NodeSelector are labels that a node must have.
	// +optional
	// +kubebuilder:validation:MaxProperties=64
	NodeSelector map[string]string `json:"nodeSelector,omitempty"`
	// All selects every node, in place of nodeSelector.
	// +optional
	All bool `json:"all,omitempty"`
	// Rollout is how fast the agents roll out the policy, and every change of it.
	// +optional
	Rollout *Rollout `json:"rollout,omitempty"`
	// Accelerate are accelerators as in a variant of an experiment, and vf.
	//
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=8
	// +kubebuilder:validation:XValidation:rule="self.all(a, (has(a.rps) ? 1 : 0) + (has(a.rfs) ? 1 : 0) + (has(a.fastpath) ? 1 : 0) + (has(a.vf) ? 1 : 0) == 1)",message="each accelerator is exactly one of rps, rfs, fastpath and vf"
	// +kubebuilder:validation:XValidation:rule="self.filter(a, has(a.fastpath)).size() < 2",message="fastpath must not be listed twice"
	// +kubebuilder:validation:XValidation:rule="self.filter(a, has(a.vf)).size() < 2",message="vf must not be listed twice"
	Accelerate []PolicyAccelerator `json:"accelerate"`
	// Pods selects, by labels and in every namespace, the pods to whose own interfaces the
	// accelerators of the device class pod apply. The default is every pod.
	// +optional
	Pods *metav1.LabelSelector `json:"pods,omitempty"`
}

// PolicyAccelerator is one accelerator of a policy: exactly one field is set.
//
// +kubebuilder:object:generate=true
type PolicyAccelerator struct {
	Accelerator `json:",inline"`
	// VF verifies that packets use the virtual functions of the node's NICs (SR-IOV,
	// Accelerated Networking). It changes nothing.
	VF *VF `json:"vf,omitempty"`
}

// VF has no fields.
//
// +kubebuilder:object:generate=true
type VF struct{}

// Accelerators returns the policy's accelerators. Those that change nothing come last, because messages number the others.
func (s *AccelerationPolicySpec) Accelerators() []PolicyAccelerator {
	changes := func(a PolicyAccelerator) bool { return len(a.Devices()) > 0 }
	return slices.Concat(
		slices.DeleteFunc(slices.Clone(s.Accelerate), func(a PolicyAccelerator) bool { return !changes(a) }),
		slices.DeleteFunc(slices.Clone(s.Accelerate), changes))
}

// Nodes returns a selector of the policy's nodes. It is an error if the policy does not say which nodes. An older schema admitted
// such policies; they select no node.
func (s *AccelerationPolicySpec) Nodes() (labels.Selector, error) {
	switch {
	case s.All && len(s.NodeSelector) > 0:
		return labels.Nothing(), errors.New("spec has both nodeSelector and all: true; take one of them out")
	case !s.All && len(s.NodeSelector) == 0:
		return labels.Nothing(), errors.New("spec does not say which nodes: write nodeSelector with labels that they have, or all: true for every node")
	}
	return labels.SelectorFromSet(s.NodeSelector), nil
}

// SelectsNode reports whether the policy selects a node with these labels. It allocates nothing, because each
// agent often calls it for every policy.
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

// Rollout sets the pace at which the agents roll out a policy: first to one node, then, after each pause without a failed health
// check, to the nodes of the next step.
//
// +kubebuilder:object:generate=true
type Rollout struct {
	// StepPercent is the percentage of the nodes that each step adds. The default is 10; with 100 all
	// nodes get the policy at once.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100
	StepPercent int `json:"stepPercent,omitempty"`
	// PauseSeconds is how long the nodes that have the policy are checked before the next
	// step. The default is 60.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=86400
	PauseSeconds int `json:"pauseSeconds,omitempty"`
}

// Steps returns the policy's rollout with every default: the nodes that each step adds, in percent, and the pause.
func (s *AccelerationPolicySpec) Steps() (percent int, pause time.Duration) {
	var r Rollout
	if s.Rollout != nil {
		r = *s.Rollout
	}
	return cmp.Or(r.StepPercent, 10), time.Duration(cmp.Or(r.PauseSeconds, 60)) * time.Second
}

// Conditions of an AccelerationPolicy, and their reasons.
const (
	// ConditionSelected tells whether the policy selects any node.
	ConditionSelected = "Selected"
	// ReasonNodes: at least one node is selected and has an agent.
	ReasonNodes = "Nodes"
	// ReasonNoNode: no node has the labels, or no agent runs on those that have them.
	ReasonNoNode = "NoNode"
	// ReasonPending: it is not known yet. The API server sets it when a policy is created, and an agent whose node the policy has
	// ceased to select.
	ReasonPending = "Pending"
	// ReasonNoReport: nodes with the labels run agents, and none of these has said that its node is selected.
	ReasonNoReport = "NoReport"
	// ReasonNoSelector: it has neither nodeSelector nor all: true, or both.
	ReasonNoSelector = "NoSelector"

	// ConditionRolledOut tells whether all nodes have the policy's generation.
	ConditionRolledOut = "RolledOut"
	// ReasonProgressing: some nodes have it, and the rollout continues.
	ReasonProgressing = "Progressing"
	// ReasonHalted: no further node gets it, because one failed a health check.
	ReasonHalted = "Halted"
	// ReasonComplete: all nodes have it, and passed the checks for a pause.
	ReasonComplete = "Complete"

	// A policy has the condition ConditionReady too: whether it is applied on all nodes that it selects. Its further reasons are
	// ReasonProgressing, ReasonHalted and ReasonApplied.

	// ReasonFailed: it failed on at least one node.
	ReasonFailed = "Failed"
)

// AccelerationPolicyStatus is the state of a policy. The NodeAccelerations have the state on each node.
//
// +kubebuilder:object:generate=true
type AccelerationPolicyStatus struct {
	// Rollout is the progress of the rollout.
	// +optional
	Rollout *RolloutStatus `json:"rollout,omitempty"`
	// Nodes counts the nodes that have an agent, as of the time counted. After a failure, or when a rollout ends, agents count anew
	// within about a minute; while nodes come and go, every five minutes.
	// +optional
	Nodes *NodeCounts `json:"nodes,omitempty"`
	// Conditions are Ready (whether all nodes that the policy selects are as it wants them), Selected (whether the policy selects any
	// node) and RolledOut (whether all of them have it).
	//
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// NodeCounts counts the nodes of a policy by what their agents report.
//
// +kubebuilder:object:generate=true
type NodeCounts struct {
	// Selected nodes.
	Selected int `json:"selected"`
	// Ready is the number of nodes on which it is applied, or has nothing to act on.
	Ready int `json:"ready"`
	// Failed is the number of nodes that refused it, could not apply it, or rolled it back.
	Failed int `json:"failed"`
	// Counted is when the nodes were counted, by the clock of the API server.
	Counted metav1.Time `json:"counted"`
}

// Annotations with a policy's proof begin with AnnotationPrefix. AnnotationKernel has the kernels of the nodes that were measured,
// with KernelSeparator between them.
const (
	AnnotationPrefix = "slipstream.dev/"
	AnnotationKernel = AnnotationPrefix + "kernel"
	KernelSeparator  = ", "
)

// MaxFailedNodes bounds RolloutStatus.FailedNodes.
const MaxFailedNodes = 64

// RolloutStatus is the progress of the rollout of one generation of a policy. Every field is always
// written: a merge patch has to overwrite what an earlier generation set.
//
// +kubebuilder:object:generate=true
type RolloutStatus struct {
	// Generation is the generation of the policy that is being rolled out.
	Generation int64 `json:"generation"`
	// Started is when the first node got it, by the clock of the API server.
	Started metav1.Time `json:"started"`
	// First is the node that got it before the others; empty if all got it at once.
	// +optional
	First string `json:"first"`
	// Percent is the percentage of the nodes that have it now, besides the first.
	Percent int `json:"percent"`
	// FailedNodes are nodes that failed a health check after they got it, and reverted it. If there is
	// any, the rollout is halted.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=64
	FailedNodes []string `json:"failedNodes"`
	// Complete is true if all nodes have it, and passed the health checks for a pause.
	// +optional
	Complete bool `json:"complete"`
	// Passed are nodes of earlier steps that have had the version for a pause without a failed check. An agent
	// reads their NodeAccelerations before it applies the policy.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=8
	Passed []string `json:"passed"`
}

// AccelerationPolicyList is a list of policies.
//
// +kubebuilder:object:root=true
type AccelerationPolicyList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []AccelerationPolicy `json:"items"`
}

// NodeAcceleration is the state of the policies on one node, as the node's agent reports it. It has the
// name of the node.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=na
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Policies",type=string,JSONPath=`.status.summary`
// +kubebuilder:printcolumn:name="Settings",type=integer,JSONPath=`.status.settings`
// +kubebuilder:printcolumn:name="Verified",type=integer,JSONPath=`.status.verified`
// +kubebuilder:printcolumn:name="Agent",type=string,JSONPath=`.status.agent`,priority=1
type NodeAcceleration struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +optional
	Status NodeAccelerationStatus `json:"status,omitzero"`
}

// NodeAccelerationStatus is the latest report of the node's agent.
//
// +kubebuilder:object:generate=true
type NodeAccelerationStatus struct {
	// Agent is the DaemonSet of the agent, NAMESPACE/NAME. If the DaemonSet has no pod on the node,
	// this is the last report of an agent that no longer runs.
	// +optional
	Agent string `json:"agent,omitempty"`
	// Observed are the policies that select the node, the earliest first.
	// +optional
	// +listType=map
	// +listMapKey=policy
	Observed []ObservedPolicy `json:"observed,omitempty"`
	// Summary has the policies and their states in one line, those that failed first: "fast failed (Conflict), rps applied".
	// +optional
	Summary string `json:"summary,omitempty"`
	// Settings is the number of settings that the agent keeps on the node and in its pods.
	Settings int `json:"settings"`
	// Verified is how many of the settings have the value that the agent wrote.
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
	// ConditionReady tells whether a node is as its policies want it, or all nodes of a policy are as it wants them.
	ConditionReady = "Ready"
	// ConditionFastpath tells whether the fast path runs on a node, if a policy wants it.
	ConditionFastpath = "Fastpath"
	// ConditionVF tells whether packets use the virtual functions of a node's NICs, if a
	// policy verifies that.
	ConditionVF = "VF"
)

// State of a policy on one node.
// +kubebuilder:validation:Enum=applied;pending;failed
type State string

// States of a policy on one node.
const (
	// StateApplied: every setting has the value that the policy wants.
	StateApplied State = "applied"
	// StatePending: nothing is wrong, but there is nothing to set yet.
	StatePending State = "pending"
	// StateFailed: the agent refused the policy, or some settings have other values.
	StateFailed State = "failed"
)

// Reasons of a policy's state on a node, and of the node's condition Ready.
const (
	// ReasonApplied: every setting has the value that the policies want.
	ReasonApplied = "Applied"
	// ReasonNoPolicy: no policy selects the node, and it has its original settings.
	ReasonNoPolicy = "NoPolicy"
	// ReasonNoDevice: the node has no device of the classes named, or no pod that
	// is selected.
	ReasonNoDevice = "NoDevice"
	// ReasonWaiting: the policy's rollout has not reached the node.
	ReasonWaiting = "Waiting"
	// ReasonRolledBack: the node failed a health check after it got the policy, and reverted it.
	ReasonRolledBack = "RolledBack"
	// ReasonConflict: an earlier policy wants the same setting at another value.
	ReasonConflict = "Conflict"
	// ReasonInvalid: the policy contradicts itself.
	ReasonInvalid = "Invalid"
	// ReasonImpossible: this machine cannot do it, for example because it lacks a CPU that is named.
	ReasonImpossible = "Impossible"
	// ReasonHeld: another process, such as an experiment, holds a setting at
	// another value.
	ReasonHeld = "Held"
	// ReasonNotVerified: a setting has another value than the agent wrote.
	ReasonNotVerified = "NotVerified"
	// ReasonError: something on the node failed.
	ReasonError = "Error"
	// ReasonAttached: the fast path has its programs on all devices, or is idle as no connection is
	// eligible.
	ReasonAttached = "Attached"
	// ReasonSkipped: the fast path skips some devices that it does not support.
	ReasonSkipped = "Skipped"
	// ReasonVFUsed: packets use the virtual functions (VFs) of all NICs that can have one.
	ReasonVFUsed = "VFUsed"
	// ReasonVFPresent: a VF is up, and it is not known yet whether packets use it.
	ReasonVFPresent = "VFPresent"
	// ReasonVFIdle: a VF is up, and packets do not use it.
	ReasonVFIdle = "VFIdle"
	// ReasonVFAbsent: a NIC has no VF that packets can use.
	ReasonVFAbsent = "VFAbsent"
	// ReasonVFWithdrawn: a NIC has lost a VF that was up.
	ReasonVFWithdrawn = "VFWithdrawn"
)

// ObservedPolicy is the state of one policy on one node.
//
// +kubebuilder:object:generate=true
type ObservedPolicy struct {
	// Policy is the name of the policy.
	Policy string `json:"policy"`
	// Generation of the policy that the state is about. It is 0 if the cluster has lost that version, because an earlier state of
	// its database was restored.
	Generation int64 `json:"generation"`
	State      State `json:"state"`
	// Reason is why the policy is in this state.
	Reason string `json:"reason"`
	// Message explains the reason in a sentence.
	//
	// +optional
	Message string `json:"message,omitempty"`
	// Settings is the number of settings that the policy wants.
	Settings int `json:"settings"`
	// Verified is how many of the settings have the value that the agent wrote.
	Verified int `json:"verified"`
	// UID of the policy. A policy that was deleted and created again under the same name has another one.
	// +optional
	UID types.UID `json:"uid,omitempty"`
	// Step is the percentage that the rollout had to reach for this node to get the generation. It is 0 for
	// the first node.
	// +optional
	Step int `json:"step,omitempty"`
	// Passed: the node has had the generation for a pause, and failed no health check. Nodes of later steps
	// apply the policy only if nodes of earlier steps say this.
	// +optional
	Passed bool `json:"passed,omitempty"`
	// RolledBack is the generation that failed a health check on this node. The node does not apply it again.
	// +optional
	RolledBack int64 `json:"rolledBack,omitempty"`
	// Tried is the last generation that the node was about to get in a step. It is written before the generation is applied,
	// because that may crash the machine.
	// +optional
	Tried int64 `json:"tried,omitempty"`
	// Boot is the ID of the machine's boot when tried was written. If the machine boots again before the node has passed, that
	// counts as a failed health check.
	// +optional
	Boot string `json:"boot,omitempty"`
}

// NodeAccelerationList is a list of NodeAccelerations.
//
// +kubebuilder:object:root=true
type NodeAccelerationList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []NodeAcceleration `json:"items"`
}
