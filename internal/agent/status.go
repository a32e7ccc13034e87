package agent

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel"
	"slipstream.dev/internal/accel/journal"
)

// Status is the status of an agent.
type Status struct {
	Policies []v1alpha1.ObservedPolicy
	// Settings is the number of settings on the node and in its pods. Verified counts those that read back as written.
	Settings, Verified int
	// Ready means that no policy has failed. Reason is one of v1alpha1's.
	Ready           bool
	Reason, Message string
	// Devices counts devices by class. Pods is the number of pods' namespaces. Missing counts those that could not be found.
	Devices       map[string]int
	Pods, Missing int
	// Accelerators are the states of the runners that a policy wants.
	Accelerators []accel.State
}

// Status returns the last status.
func (a *Agent) Status() Status {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.status
}

// publish computes the status. If it has changed, it publishes it and notifies of what is new.
func (a *Agent) publish() {
	now := a.observe()
	a.mu.Lock()
	was := a.status
	a.status = now
	a.mu.Unlock()
	if reflect.DeepEqual(was, now) {
		return
	}
	for _, p := range now.Policies {
		before := slices.IndexFunc(was.Policies, func(q v1alpha1.ObservedPolicy) bool { return q.Policy == p.Policy })
		if p.State == v1alpha1.StateFailed && (before < 0 || was.Policies[before].Reason != p.Reason || was.Policies[before].Generation != p.Generation) {
			a.notify(Event{Warning: true, Reason: p.Reason, Message: fmt.Sprintf("policy %s: %s", p.Policy, p.Message)})
		}
	}
	for _, is := range now.Accelerators {
		before := slices.IndexFunc(was.Accelerators, func(s accel.State) bool { return s.Kind == is.Kind })
		for _, e := range is.Notices {
			if before < 0 || !slices.Contains(was.Accelerators[before].Notices, e) {
				a.notify(e)
			}
		}
	}
	a.options.Publish(now)
}

func (a *Agent) observe() Status {
	s := Status{Ready: true, Reason: v1alpha1.ReasonNoPolicy, Message: "no policy selects this node", Devices: make(map[string]int), Pods: len(a.groups)}
	for _, l := range a.links {
		if l.class != "" {
			s.Devices[l.class]++
		}
	}
	for _, g := range a.groups {
		if g.missing {
			s.Missing++
		}
		add(&s.Settings, &s.Verified, g.kept.Counts, func(accel.SettingOf) bool { return true })
	}
	add(&s.Settings, &s.Verified, a.counts, func(accel.SettingOf) bool { return true })
	s.Accelerators = a.host.States()
	for _, is := range s.Accelerators {
		s.Settings += len(is.Attached)
		s.Verified += len(is.Attached)
	}
	for i, p := range a.policies {
		o := a.observePolicy(p, s)
		s.Policies = append(s.Policies, o)
		switch {
		case s.Ready && o.State == v1alpha1.StateFailed:
			s.Ready, s.Reason, s.Message = false, o.Reason, "policy "+p.Name+": "+o.Message
		case s.Ready && (i == 0 || o.State == v1alpha1.StateApplied):
			s.Reason, s.Message = o.Reason, o.Message
		}
	}
	if a.failure != nil {
		s.Ready, s.Reason, s.Message = false, v1alpha1.ReasonError, a.failure.Error()
	}
	return s
}

func add(settings, verified *int, counts map[accel.SettingOf]accel.Count, of func(accel.SettingOf) bool) {
	for setting, n := range counts {
		if of(setting) {
			*settings += n.Held
			*verified += n.Verified
		}
	}
}

// accounts returns two functions, which report whether a setting of the node, or of a pod, belongs to a policy.
func (a *Agent) accounts(p *policy) (ofNode, ofPod func(accel.SettingOf) bool) {
	ofNode = func(s accel.SettingOf) bool { return p.plan.Sets(a.links[s.Link].class, s) }
	return ofNode, func(s accel.SettingOf) bool { return p.plan.Sets(v1alpha1.DevicePod, s) }
}

// of returns the states of those accelerators of a policy that change something, or of those that only verify.
func (s Status) of(p *policy, changes bool) (all []accel.State) {
	for _, is := range s.Accelerators {
		if c, wanted := p.kinds[is.Kind]; wanted && c == changes {
			all = append(all, is)
		}
	}
	return all
}

func failed(all []accel.State) (reason, message string) {
	for _, is := range all {
		if is.Failed {
			return is.Reason, is.Detail
		}
	}
	return "", ""
}

func (a *Agent) observePolicy(p *policy, s Status) v1alpha1.ObservedPolicy {
	o := v1alpha1.ObservedPolicy{Policy: p.Name, Generation: p.Generation}
	acts := slices.Contains(a.acting, p.key())
	if acts {
		a.count(p, s, &o)
	}
	o.State, o.Reason, o.Message = v1alpha1.StateFailed, p.reason, p.problem
	if p.reason == v1alpha1.ReasonWaiting {
		o.State = v1alpha1.StatePending
	}
	if o.Reason == "" && a.failure != nil {
		o.Reason, o.Message = v1alpha1.ReasonError, a.failure.Error()
	}
	if o.Reason == "" && acts {
		o.Reason, o.Message = a.problem(p, s, o)
	}
	if o.Reason == "" {
		o.Reason, o.Message = failed(s.of(p, false))
	}
	absent := slices.IndexFunc(s.of(p, false), func(is accel.State) bool { return is.Reason == v1alpha1.ReasonNoDevice })
	switch {
	case o.Reason != "":
	case !acts && p.changes():
		o.State, o.Reason = v1alpha1.StatePending, v1alpha1.ReasonNoDevice
		o.Message = "the node has no device of the policy's classes, or no pod that the policy selects; the policy is applied as soon as one appears"
	case !acts && absent >= 0:
		o.State, o.Reason, o.Message = v1alpha1.StatePending, v1alpha1.ReasonNoDevice, s.of(p, false)[absent].Message
	default:
		o.State, o.Reason, o.Message = v1alpha1.StateApplied, v1alpha1.ReasonApplied, p.success(o, s)
	}
	if p.LaterInvalid != "" && o.State != v1alpha1.StateFailed {
		o.State, o.Reason, o.Message = v1alpha1.StateFailed, v1alpha1.ReasonInvalid, p.LaterInvalid
	}
	return o
}

// success returns the message for an applied policy: how many settings read back, and the states of its runners.
func (p *policy) success(o v1alpha1.ObservedPolicy, s Status) string {
	var is []string
	switch {
	case o.Verified == 1:
		is = append(is, "1 setting read back")
	case o.Verified > 1:
		is = append(is, fmt.Sprintf("%d settings read back", o.Verified))
	}
	for _, state := range slices.Concat(s.of(p, true), s.of(p, false)) {
		if state.Detail != "" {
			is = append(is, state.Detail)
		}
	}
	return strings.Join(is, "; ")
}

// count fills in the numbers of settings of a policy.
func (a *Agent) count(p *policy, s Status, o *v1alpha1.ObservedPolicy) {
	ofNode, ofPod := a.accounts(p)
	add(&o.Settings, &o.Verified, a.counts, ofNode)
	for _, is := range s.of(p, true) {
		o.Settings += len(is.Attached)
		o.Verified += len(is.Attached)
	}
	for _, g := range a.groups {
		if slices.Contains(g.policies, p.key()) {
			add(&o.Settings, &o.Verified, g.kept.Counts, ofPod)
		}
	}
}

// problem returns the worst problem of a policy that acts on something. The others are only logged.
func (a *Agent) problem(p *policy, s Status, o v1alpha1.ObservedPolicy) (reason, message string) {
	ofNode, ofPod := a.accounts(p)
	if reason, message = refusal(a.refused, ofNode); reason != "" {
		return reason, message
	}
	if reason, message = failed(s.of(p, true)); reason != "" {
		return reason, message
	}
	missing, conflicting := 0, 0
	for _, g := range a.groups {
		if g.conflicts[p.key()] != "" {
			conflicting++
		}
		if !slices.Contains(g.policies, p.key()) {
			continue
		}
		if reason, message = refusal(g.kept.Refused, ofPod); reason != "" {
			return reason, message
		}
		switch {
		case g.missing:
			missing++
		case g.err != nil:
			return v1alpha1.ReasonError, g.err.Error()
		}
	}
	switch {
	case conflicting > 0:
		return v1alpha1.ReasonConflict, fmt.Sprintf("in %d pods another policy that takes precedence conflicts with this one", conflicting)
	case o.Verified < o.Settings:
		return v1alpha1.ReasonNotVerified, fmt.Sprintf("%d of %d settings read back another value than was written", o.Settings-o.Verified, o.Settings)
	case missing > 0:
		return v1alpha1.ReasonError, fmt.Sprintf("the network namespaces of %d veths were not found; the agent needs the host's PID namespace and CAP_SYS_PTRACE, or the folder where the container runtime pins them", missing)
	}
	return "", ""
}

// refusal returns the reason and message of the first refused setting that of accepts.
func refusal(all []accel.Refusal, of func(accel.SettingOf) bool) (reason, message string) {
	for _, r := range all {
		switch {
		case r.File == "" || !of(r.SettingOf):
		case errors.Is(r.Err, journal.ErrHeld):
			return v1alpha1.ReasonHeld, r.Err.Error()
		case errors.As(r.Err, new(accel.Impossible)):
			return v1alpha1.ReasonImpossible, r.Err.Error()
		default:
			return v1alpha1.ReasonError, r.Err.Error()
		}
	}
	return "", ""
}
