package agent

import (
	"errors"
	"fmt"
	"slices"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel"
)

// policy is a Policy and its state on this node.
type policy struct {
	Policy
	// kinds maps the kinds of its accelerators to whether they change something. classes holds the classes of the devices on
	// which they act.
	kinds   map[string]bool
	classes map[string]bool
	// onNode and inPods are the parts of its accelerators that act on the node and in pods.
	onNode, inPods []v1alpha1.PolicyAccelerator
	// plan holds the settings and runners of its accelerators on this node; nil if they cannot be applied.
	plan *accel.Plan
	// reason and problem say why the policy is not applied at all; empty if it is.
	reason, problem string
	// against holds the keys of earlier policies that conflict with it in pods that both select.
	against map[string]bool
}

// key identifies one version of a policy.
func (p Policy) key() string { return fmt.Sprintf("%s@%d of %s", p.Name, p.Generation, p.UID) }

func newPolicy(p Policy) *policy {
	out := &policy{
		Policy: p, kinds: make(map[string]bool), classes: make(map[string]bool),
		onNode: v1alpha1.PartOf(p.Accelerate, false), inPods: v1alpha1.PartOf(p.Accelerate, true),
	}
	for _, a := range p.Accelerate {
		classes := a.Devices()
		out.kinds[a.Kind()] = len(classes) > 0
		for _, class := range classes {
			out.classes[class] = true
		}
	}
	return out
}

// changes reports whether a policy changes anything; some only verify.
func (p *policy) changes() bool { return len(p.classes) > 0 }

func (p *policy) ofPods() bool { return p.classes[v1alpha1.DevicePod] }

// judge decides which policies are applied. A policy is applied as a whole or not at all. The exception are pods that an
// earlier, conflicting policy selects too: there the earlier one takes precedence.
func judge(policies []*policy, view accel.View) {
	var accepted []*policy
	for _, p := range policies {
		p.against = make(map[string]bool)
		p.reason, p.problem = p.ownProblem(view)
		for _, q := range accepted {
			if p.reason != "" {
				break
			}
			if err := p.conflict(q, view.Plan); err != nil {
				p.reason = v1alpha1.ReasonConflict
				p.problem = fmt.Sprintf("policy %s takes precedence, and conflicts with this one: %s; this policy is not applied", q.Name, err)
			}
		}
		if p.reason == "" {
			accepted = append(accepted, p)
		}
	}
}

// ownProblem plans a policy, and returns why it cannot be applied even without other policies.
func (p *policy) ownProblem(view accel.View) (reason, problem string) {
	var err error
	if p.plan, err = view.Plan(p.Accelerate); err == nil {
		if err = view.Fits(p.plan); err != nil {
			p.plan = nil
		}
	}
	switch {
	case p.Withheld != Withheld{}:
		return p.Withheld.Reason, p.Withheld.Message
	case p.Invalid != nil:
		return v1alpha1.ReasonInvalid, p.Invalid.Error()
	case errors.Is(err, accel.ErrConflict):
		return v1alpha1.ReasonInvalid, err.Error()
	case err != nil:
		return v1alpha1.ReasonImpossible, err.Error()
	}
	return "", ""
}

// conflict returns why a policy cannot be applied together with an accepted one. If they conflict only in pods that both may
// select, it records that and returns nil; policiesOf then decides for each pod.
func (p *policy) conflict(accepted *policy, plan func([]v1alpha1.PolicyAccelerator) (*accel.Plan, error)) error {
	if _, err := plan(slices.Concat(accepted.onNode, p.onNode)); err != nil {
		return err
	}
	_, err := plan(slices.Concat(accepted.inPods, p.inPods))
	if err == nil {
		return nil
	}
	p.against[accepted.key()] = true
	if p.Pods != nil && accepted.Pods != nil && p.Selector != accepted.Selector {
		return nil
	}
	return err
}

// policiesOf returns the policies that act on a pod's own interfaces, and those that conflict with an
// earlier one.
func (a *Agent) policiesOf(pod *Pod) (keys []string, conflicts map[string]string) {
	for _, p := range a.policies {
		if p.reason != "" || !p.ofPods() || p.Pods != nil && (pod == nil || !p.Pods(pod.Labels)) {
			continue
		}
		if i := slices.IndexFunc(keys, func(k string) bool { return p.against[k] }); i >= 0 {
			if conflicts == nil {
				conflicts = make(map[string]string)
			}
			conflicts[p.key()] = keys[i]
			continue
		}
		keys = append(keys, p.key())
	}
	return keys, conflicts
}

// active returns the keys of policies that have something to act on. The others change nothing, not even the machine's flow
// table.
func (a *Agent) active() []string {
	classes := make(map[string]bool)
	for _, l := range a.links {
		classes[l.class] = true
	}
	ofPods := make(map[string]bool)
	for _, g := range a.groups {
		for _, key := range g.policies {
			ofPods[key] = true
		}
	}
	var keys []string
	for _, p := range a.policies {
		acts := ofPods[p.key()] || slices.ContainsFunc([]string{v1alpha1.DeviceNIC, v1alpha1.DeviceOverlay, v1alpha1.DeviceHostVeth},
			func(class string) bool { return classes[class] && p.classes[class] })
		if p.reason == "" && acts {
			keys = append(keys, p.key())
		}
	}
	return keys
}

// ofNode returns the accelerators that the policies want on the node. Those that only verify need no device to act on.
func (a *Agent) ofNode() (out []v1alpha1.PolicyAccelerator) {
	for _, p := range a.policies {
		if slices.Contains(a.acting, p.key()) {
			out = append(out, p.onNode...)
		}
		for _, x := range p.Accelerate {
			if p.reason == "" && len(x.Devices()) == 0 {
				out = append(out, x)
			}
		}
	}
	return out
}

// wants reports whether a policy that is to be applied here has an accelerator of this kind.
func (a *Agent) wants(kind string) bool {
	return slices.ContainsFunc(a.policies, func(p *policy) bool {
		_, has := p.kinds[kind]
		return has && p.Withheld == Withheld{} && p.Invalid == nil
	})
}

// ofPod returns the accelerators that the policies with these keys want in a pod.
func (a *Agent) ofPod(keys []string) (out []v1alpha1.PolicyAccelerator) {
	for _, p := range a.policies {
		if slices.Contains(keys, p.key()) {
			out = append(out, p.inPods...)
		}
	}
	return out
}
