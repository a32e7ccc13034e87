package accel

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/words"
)

// Kind is one kind of accelerator, such as RPS. Applier, Keeper and the agent know kinds only by this interface.
type Kind interface {
	// Plan adds what an accelerator of this kind wants to a plan. All settings of a plan are written, read back, counted
	// and journalled the same way.
	Plan(p *Plan, a v1alpha1.PolicyAccelerator) error
	// Probe returns nil, or why this machine cannot apply it. It changes nothing.
	Probe(ctx context.Context) error
	// Open returns the part that runs in this process, or nil if the kind consists of settings only.
	Open(h Host) Runner
	// Metrics describes the samples of its Runner.
	Metrics() []*Metric
}

// Runner is the part of an accelerator that runs in this process, in one place, and ends with it. Only Samples may be called
// concurrently with another method.
type Runner interface {
	// Plan returns what Start would attach, in the form of settings.
	Plan(want v1alpha1.PolicyAccelerator) ([]record.Setting, error)
	// Start starts it for an Applier, or returns why it cannot.
	Start(want v1alpha1.PolicyAccelerator) error
	// Keep starts or reconfigures it for a Keeper, or stops it if want is nil. If it cannot run, State says why, and Keep
	// returns no error.
	Keep(ctx context.Context, want *v1alpha1.PolicyAccelerator, kept *Kept) error
	// Verify is called from time to time between two calls of Keep.
	Verify(at time.Time)
	Stop() error
	// State returns nil while it is not wanted.
	State() *State
	// Samples emits the metrics of a state, which may be nil.
	Samples(s *State, emit func(Sample))
	// Counts returns its counters since the start, by name, or nil if it has none. A trial reads them at both edges of its
	// window.
	Counts() (map[string]uint64, error)
}

// Host is where a Runner runs.
type Host struct {
	Options Options
	// Changed must be called when State changes other than by Keep.
	Changed   func()
	namespace *namespace
}

// State is the state of a wanted Runner.
type State struct {
	// Kind is the name of the kind; the Keeper fills it in.
	Kind string
	// Condition is the type of the condition that shows the state. Status is True, False or Unknown. Reason is one of
	// v1alpha1's.
	Condition, Status, Reason, Message string
	// Failed means that the policies that want it have failed for Reason.
	Failed bool
	// Detail is shown beside the number of settings; it may be empty.
	Detail string
	// Attached lists its attachments, as settings.
	Attached []record.Setting
	// Notices are events, each to be reported when it first appears in a state.
	Notices []Event
}

// Event is something that a user should know.
type Event struct {
	Warning bool
	// Reason is one of v1alpha1's, or "Repaired".
	Reason, Message string
}

// Statuses of a condition, the same as in Kubernetes.
const (
	StatusTrue    = "True"
	StatusFalse   = "False"
	StatusUnknown = "Unknown"
)

// Metric describes a metric. The name of a counter ends in _total; the others are gauges.
type Metric struct {
	Name, Help string
	Labels     []string
}

// Sample is a value of a metric, or the error of reading it.
type Sample struct {
	*Metric
	Value  float64
	Values []string // of the labels
	Err    error
}

// Flag returns the value of a boolean metric.
func Flag(is bool) float64 {
	if is {
		return 1
	}
	return 0
}

// Kinds maps the fields of the API to the kinds of accelerators.
func Kinds() map[string]Kind {
	return map[string]Kind{"rps": rpsKind{}, "rfs": rfsKind{}, "fastpath": fastKind{}, "vf": vfKind{}}
}

// kindOf returns the kind of an accelerator.
func kindOf(kinds map[string]Kind, a v1alpha1.PolicyAccelerator) (Kind, error) {
	k := kinds[a.Kind()]
	if k == nil {
		return nil, fmt.Errorf("want exactly one of %s", words.And(v1alpha1.KindNames[v1alpha1.Accelerator]()))
	}
	return k, nil
}

// Metrics describes the metrics of all kinds.
func Metrics(kinds map[string]Kind) (all []*Metric) {
	for _, name := range slices.Sorted(maps.Keys(kinds)) {
		all = append(all, kinds[name].Metrics()...)
	}
	return all
}

// running is the Runner of a kind in a place.
type running struct {
	kind string
	Runner
}

// openRunners opens the runners of all kinds, in the order of their names.
func (n *namespace) openRunners() {
	n.changes = make(chan struct{}, 1)
	changed := func() {
		select {
		case n.changes <- struct{}{}:
		default:
		}
	}
	for _, name := range slices.Sorted(maps.Keys(n.options.Kinds)) {
		if r := n.options.Kinds[name].Open(Host{n.options, changed, n}); r != nil {
			n.runners = append(n.runners, running{name, r})
		}
	}
}

func (n *namespace) stopRunners() error {
	var errs []error
	for _, r := range n.runners {
		errs = append(errs, r.Stop())
	}
	return errors.Join(errs...)
}

// attached lists what the runners have attached.
func (n *namespace) attached() (all []record.Setting) {
	for _, r := range n.runners {
		if s := r.State(); s != nil {
			all = append(all, s.Attached...)
		}
	}
	return all
}

// checkLifetime returns an error if settings are to outlive this process, and one of the accelerators cannot.
func (n *namespace) checkLifetime(accelerators []v1alpha1.Accelerator) error {
	for _, a := range accelerators {
		if n.options.Persistent && slices.ContainsFunc(n.runners, func(r running) bool { return r.kind == a.Kind() }) {
			return fmt.Errorf("%s lasts as long as the process that runs it, and this one is about to end: "+
				"write it into a policy for the agent (slipstream agent --policy FILE), or measure it (slipstream run)", a.Label())
		}
	}
	return nil
}

// States returns the states of the runners that the last Keep wanted.
func (k *Keeper) States() (all []State) {
	for _, r := range k.runners {
		if s := r.State(); s != nil {
			s.Kind = r.kind
			all = append(all, *s)
		}
	}
	return all
}

// Changes receives a value when States change without Keep.
func (k *Keeper) Changes() <-chan struct{} { return k.changes }

// Verify calls Verify of every Runner.
func (k *Keeper) Verify(at time.Time) {
	for _, r := range k.runners {
		r.Verify(at)
	}
}

// Samples calls emit for every sample of the runners, given their published states.
func (k *Keeper) Samples(states []State, emit func(Sample)) {
	for _, r := range k.runners {
		var state *State
		if i := slices.IndexFunc(states, func(s State) bool { return s.Kind == r.kind }); i >= 0 {
			state = &states[i]
		}
		r.Samples(state, emit)
	}
}

// Counts returns the counters of the runners that have any, by kind.
func (a *Applier) Counts() (map[string]map[string]uint64, error) {
	all := make(map[string]map[string]uint64)
	for _, r := range a.runners {
		n, err := r.Counts()
		if err != nil {
			return nil, err
		}
		if n != nil {
			all[r.kind] = n
		}
	}
	return all, nil
}
