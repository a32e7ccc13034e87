package agent

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel"
	"slipstream.dev/internal/record"
)

// toy is an accelerator that only this file knows. It has a setting on every queue, and a runner. In the API it replaces rps.
type toy struct {
	*toyRunner
}

type toyRunner struct {
	broken, running bool
}

// The kind.

func (toy) Plan(p *accel.Plan, a v1alpha1.PolicyAccelerator) error {
	for _, class := range a.RPS.Devices {
		other := p.Queues(class, "rps_flow_cnt", a.RPS.CPUs, func(accel.Device, string) (string, error) { return a.RPS.CPUs, nil })
		if other != "" {
			return accel.Conflict(fmt.Sprintf("wants %s toys, another %s", a.RPS.CPUs, other))
		}
	}
	p.Run(a)
	return nil
}

func (toy) Probe(context.Context) error         { return nil }
func (t toy) Open(accel.Host) accel.Runner      { return t.toyRunner }
func (toy) Metrics() []*accel.Metric            { return []*accel.Metric{toyPlayed} }
func toyOf(n string) v1alpha1.PolicyAccelerator { return v1alpha1.ForPolicy(rps(n, "nic"))[0] }

var toyPlayed = &accel.Metric{Name: "slipstream_toy_played_total", Help: "Times that it played.", Labels: []string{"game"}}

// Its runner.

func (t *toyRunner) settings() []record.Setting {
	return []record.Setting{{Place: "node0", Path: "toy/eth0", Want: "plays", Got: "plays"}}
}

func (t *toyRunner) Plan(v1alpha1.PolicyAccelerator) ([]record.Setting, error) {
	return t.settings(), nil
}

func (t *toyRunner) Start(v1alpha1.PolicyAccelerator) error {
	t.running = true
	return nil
}

func (t *toyRunner) Keep(_ context.Context, want *v1alpha1.PolicyAccelerator, kept *accel.Kept) error {
	if want != nil && !t.running {
		kept.Set++
	}
	t.running = want != nil
	return nil
}

func (t *toyRunner) Stop() error {
	t.running = false
	return nil
}

func (t *toyRunner) Verify(time.Time) {}

func (t *toyRunner) State() *accel.State {
	switch {
	case !t.running:
		return nil
	case t.broken:
		return &accel.State{Condition: "Toy", Status: accel.StatusFalse, Failed: true, Reason: "Broken", Message: "it broke", Detail: "toy: it broke"}
	}
	return &accel.State{Condition: "Toy", Status: accel.StatusTrue, Reason: "Playing", Message: "it plays", Detail: "toy: it plays",
		Attached: t.settings(), Notices: []accel.Event{{Reason: "Playing", Message: "the toy plays"}}}
}

func (t *toyRunner) Samples(s *accel.State, emit func(accel.Sample)) {
	if s != nil {
		emit(accel.Sample{Metric: toyPlayed, Value: 7, Values: []string{"chess"}})
	}
}

func (t *toyRunner) Counts() (map[string]uint64, error) { return map[string]uint64{"played": 7}, nil }

// TestToy checks that an agent, its status, metrics and events, and an Applier handle an accelerator that they do not know.
func TestToy(t *testing.T) {
	t.Parallel()
	p := newTestNode(t)
	p.nic()
	before := p.snapshot()
	is := new(toyRunner)
	kinds := map[string]accel.Kind{"rps": toy{is}}
	o := p.options()
	o.Kinds = kinds
	a := p.start(o)
	a.Set(one(Policy{Name: "toys", Generation: 1, Accelerate: []v1alpha1.PolicyAccelerator{toyOf("64")}},
		Policy{Name: "others", Generation: 1, Accelerate: []v1alpha1.PolicyAccelerator{toyOf("128")}}))
	if s := a.wantState("toys", v1alpha1.StateApplied, v1alpha1.ReasonApplied); s.Settings != 2 || s.Verified != 2 || s.Message != "2 settings read back; toy: it plays" {
		t.Errorf("%+v", s)
	}
	a.wantState("others", v1alpha1.StateFailed, v1alpha1.ReasonConflict)
	a.wantEvent("Playing", "the toy plays")
	if s := a.Status(); s.Settings != 2 || s.Verified != 2 || s.state("rps").Condition != "Toy" {
		t.Errorf("%+v", s)
	}
	if n := a.metric(`slipstream_toy_played_total{game="chess"}`); n != 7 {
		t.Errorf("metric: %g", n)
	}
	restored := func() {
		t.Helper()
		a.Set(one())
		eventually(t, "all is restored", func() string {
			if s := a.Status(); s.Reason != v1alpha1.ReasonNoPolicy || s.Settings != 0 || len(s.Accelerators) != 0 {
				return fmt.Sprintf("%+v", s)
			}
			return ""
		})
		if n := a.metric(`slipstream_toy_played_total{game="chess"}`); n != -1 {
			t.Errorf("metric: %g", n)
		}
		a.stop()
		if d := cmp.Diff(before, p.snapshot()); is.running || d != "" {
			t.Errorf("it runs: %v; not as before: %s", is.running, d)
		}
	}
	restored()

	is.broken = true
	a = p.start(o)
	a.Set(one(Policy{Name: "toys", Generation: 2, Accelerate: []v1alpha1.PolicyAccelerator{toyOf("64")}}))
	if s := a.wantState("toys", v1alpha1.StateFailed, "Broken"); s.Message != "toy: it broke" || s.Settings != 1 {
		t.Errorf("%+v", s)
	}
	restored()

	is.broken = false
	s, err := accel.OpenApplier(accel.Options{Place: node0, JournalDir: p.journal, Owner: "test", Kinds: kinds})
	must(t, err)
	defer s.Close()
	accelerators := []v1alpha1.Accelerator{rps("64", "nic")}
	planned, err := s.Plan(t.Context(), accelerators)
	must(t, err)
	applied, err := s.Apply(t.Context(), accelerators)
	must(t, err)
	paths := func(all []record.Setting) (out []string) {
		for _, set := range all {
			out = append(out, set.Path+" "+set.Want)
		}
		return out
	}
	want := []string{"class/net/eth0/queues/rx-0/rps_flow_cnt 64", "toy/eth0 plays"}
	if !slices.Equal(paths(planned), want) || !slices.Equal(paths(applied), want) || !slices.Equal(paths(s.Settings()), want) {
		t.Errorf("planned %q, applied %q, settings %q, want %q", paths(planned), paths(applied), paths(s.Settings()), want)
	}
	if counts, err := s.Counts(); err != nil || counts["rps"]["played"] != 7 {
		t.Errorf("counts: %v, %v", counts, err)
	}
	if n, err := s.Revert(t.Context()); n != 1 || err != nil || is.running {
		t.Errorf("reverted %d, %v", n, err)
	}
	if d := cmp.Diff(before, p.snapshot()); d != "" {
		t.Errorf("not as before: %s", d)
	}
}

// TestToyEndsAnyway checks that a runner ends with its policy, even if settings cannot be kept or devices cannot be listed.
func TestToyEndsAnyway(t *testing.T) {
	p := newTestNode(t)
	p.nic()
	is := new(toyRunner)
	o := p.options()
	o.Kinds = map[string]accel.Kind{"rps": toy{is}}
	a, err := New(o)
	must(t, err)
	defer a.Close()
	set := func(policies ...Policy) error {
		a.Set(one(policies...))
		a.take()
		return a.pass(t.Context(), true)
	}
	toys := Policy{Name: "toys", Generation: 1, Accelerate: []v1alpha1.PolicyAccelerator{toyOf("64")}}
	withheld := toys
	withheld.Withheld = Withheld{Reason: v1alpha1.ReasonRolledBack, Message: "it was rolled back"}
	damaged := filepath.Join(p.journal, "machine.json")
	for what, try := range map[string]func(...Policy) error{
		"a damaged journal": func(policies ...Policy) error {
			must(t, os.WriteFile(damaged, []byte("{"), 0o600))
			defer func() { must(t, os.Remove(damaged)) }()
			return set(policies...)
		},
		"no files can be opened": func(policies ...Policy) error {
			var before unix.Rlimit
			must(t, unix.Prlimit(0, unix.RLIMIT_NOFILE, nil, &before))
			must(t, unix.Prlimit(0, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 0, Max: before.Max}, nil))
			defer func() { must(t, unix.Prlimit(0, unix.RLIMIT_NOFILE, &before, nil)) }()
			return set(policies...)
		},
	} {
		for _, without := range [][]Policy{nil, {withheld}} {
			must(t, set(toys))
			if err := try(toys); err == nil || !is.running {
				t.Errorf("%s: %v, and it runs: %t, want an error and that it does", what, err, is.running)
			}
			if err := try(without...); err == nil || is.running {
				t.Errorf("%s: %v, and it runs: %t, want an error and that it does not", what, err, is.running)
			}
		}
	}
	must(t, set())
}
