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
	// reason and problem are why the policy is not applied at all; empty if it is.
	reason, problem string
	// against are earlier policies, by key, with conflicting settings of the class pod, for pods that both
	// may select.
	against map[string]bool
}

// key identifies one version of a policy.
func (p policy) key() string { return fmt.Sprintf("%s@%d", p.Name, p.Generation) }

// devices returns the classes that an accelerator acts on. The fast path also attaches programs to others,
// but only if there is an overlay.
func devices(a v1alpha1.Accelerator) []string {
	if a.RPS != nil {
		return a.RPS.Devices
	}
	if a.RFS != nil {
		return a.RFS.Devices
	}
	if a.Fastpath != nil {
		return []string{v1alpha1.DeviceOverlay}
	}
	return nil
}

// names reports whether a policy acts on devices of a class.
func (p policy) names(class string) bool {
	return slices.ContainsFunc(p.Accelerate, func(a v1alpha1.Accelerator) bool { return slices.Contains(devices(a), class) })
}

func (p policy) ofFastpath() bool {
	return slices.ContainsFunc(p.Accelerate, func(a v1alpha1.Accelerator) bool { return a.Fastpath != nil })
}

func (p policy) ofPods() bool { return p.names(v1alpha1.DevicePod) }

// nodePart returns the part of accelerators that applies to the node: without the class pod, but with the
// machine's flow table, which the queues of pods index.
func nodePart(all []v1alpha1.Accelerator) []v1alpha1.Accelerator {
	out := v1alpha1.AcceleratorsFor(all, false)
	for _, a := range all {
		if a.RFS != nil && slices.Contains(a.RFS.Devices, v1alpha1.DevicePod) {
			out = append(out, v1alpha1.Accelerator{RFS: &v1alpha1.RFS{Entries: a.RFS.Entries}})
		}
	}
	return out
}

func podPart(all []v1alpha1.Accelerator) []v1alpha1.Accelerator {
	return v1alpha1.AcceleratorsFor(all, true)
}

// judge decides which policies are applied. A policy is applied as a whole or not at all, except to pods
// that a conflicting policy selects too: on those, the earlier one takes precedence.
func judge(policies []policy, check func([]v1alpha1.Accelerator) error) {
	var accepted []*policy
	for i := range policies {
		p := &policies[i]
		p.against = make(map[string]bool)
		p.reason, p.problem = p.ownProblem(check)
		for _, q := range accepted {
			if p.reason != "" {
				break
			}
			if err := p.conflict(q, check); err != nil {
				p.reason = v1alpha1.ReasonConflict
				p.problem = fmt.Sprintf("policy %s takes precedence, and conflicts with this one: %s; this policy is not applied", q.Name, err)
			}
		}
		if p.reason == "" {
			accepted = append(accepted, p)
		}
	}
}

// ownProblem returns why a policy cannot be applied, whatever others there are.
func (p *policy) ownProblem(check func([]v1alpha1.Accelerator) error) (reason, problem string) {
	switch err := check(p.Accelerate); {
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

// conflict returns why a policy cannot be applied beside an accepted one. If they conflict on some pods only,
// it records that: these pods decide.
func (p *policy) conflict(accepted *policy, check func([]v1alpha1.Accelerator) error) error {
	if err := check(slices.Concat(nodePart(accepted.Accelerate), nodePart(p.Accelerate))); err != nil {
		return err
	}
	err := check(slices.Concat(podPart(accepted.Accelerate), podPart(p.Accelerate)))
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
func (a *Agent) policiesOf(pod *Pod) (keys []string, clashes map[string]string) {
	for _, p := range a.policies {
		if p.reason != "" || !p.ofPods() || p.Pods != nil && (pod == nil || !p.Pods(pod.Labels)) {
			continue
		}
		if i := slices.IndexFunc(keys, func(k string) bool { return p.against[k] }); i >= 0 {
			if clashes == nil {
				clashes = make(map[string]string)
			}
			clashes[p.key()] = keys[i]
			continue
		}
		keys = append(keys, p.key())
	}
	return keys, clashes
}

// toAct returns the keys of policies that have something to act on. The others change nothing, not even the
// machine's flow table.
func (a *Agent) toAct() []string {
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
			func(class string) bool { return classes[class] && p.names(class) })
		if p.reason == "" && acts {
			keys = append(keys, p.key())
		}
	}
	return keys
}

// ofNode returns what the policies want on the node.
func (a *Agent) ofNode() []v1alpha1.Accelerator {
	var out []v1alpha1.Accelerator
	for _, p := range a.policies {
		if slices.Contains(a.acting, p.key()) {
			out = append(out, nodePart(p.Accelerate)...)
		}
	}
	return out
}

// ofPod returns what the policies with these keys want in a pod.
func (a *Agent) ofPod(keys []string) []v1alpha1.Accelerator {
	var out []v1alpha1.Accelerator
	for _, p := range a.policies {
		if slices.Contains(keys, p.key()) {
			out = append(out, podPart(p.Accelerate)...)
		}
	}
	return out
}
