package experiment

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"slipstream.dev/internal/shell"
	"slipstream.dev/internal/spec"
)

// Period is a series of trials without a switch in between: a whole block, unless variants have a switch.
type Period struct {
	// State is the index in Plan.states of the state that its variants need.
	State int
	Cells []Cell
}

// order returns the order of the states in block b. Two blocks form a round: the first has a random order, the
// second its reverse, A B B A or B A A B. So the periods of all states have the same mean time, and linear drift
// cancels.
func (p *Plan) order(b int) []int {
	round := uint64(b+1) / 2
	// The high bit distinguishes this seed from those that order the trials of a block.
	order := rand.New(rand.NewPCG(p.exp.Spec.Seed, 1<<63|round)).Perm(len(p.states))
	if b%2 == 0 {
		slices.Reverse(order)
	}
	return order
}

func (p *Plan) cellsOf(state int) (cells []Cell) {
	for _, c := range p.Cells {
		if slices.ContainsFunc(p.states[state], func(v spec.Variant) bool { return v.Name == c.Variant.Name }) {
			cells = append(cells, c)
		}
	}
	return cells
}

// step is one command of a switch, to or back.
type step struct {
	variant spec.Variant
	back    bool
}

// field returns the name of the field that has the step's command.
func (s step) field() string {
	if s.back {
		return "back"
	}
	return "to"
}

func (s step) argv() []string {
	if s.back {
		return s.variant.Switch.Back
	}
	return s.variant.Switch.To
}

// asFound is the state before the first period: the machine as it was found.
const asFound = -1

// steps returns the steps from a period of one state into the next. Every period but the first follows a switch,
// even between two of the same state, so that each is an independent observation.
func (p *Plan) steps(from, to int) []step {
	variant := func(state int) spec.Variant {
		if state == asFound {
			return spec.Variant{}
		}
		return p.states[state][0]
	}
	was, is := variant(from), variant(to)
	if from == to && is.Switch == nil {
		away := p.states[slices.IndexFunc(p.states, func(s []spec.Variant) bool { return s[0].Switch != nil })][0]
		return []step{{away, false}, {away, true}}
	}
	var steps []step
	if was.Switch != nil {
		steps = append(steps, step{was, true})
	}
	if is.Switch != nil {
		steps = append(steps, step{is, false})
	}
	return steps
}

// waitsAfter reports whether the run waits after a step, and verifies it: after the last one, and after one back whose
// failure the next step would hide.
func waitsAfter(steps []step, i int) bool {
	return i == len(steps)-1 || steps[i].back && steps[i].variant.Switch.Verify != nil
}

// switching returns how many switch commands the plan runs, and how long it waits after them.
func (p *Plan) switching() (commands int, settle time.Duration) {
	if p.states == nil {
		return 0, 0
	}
	at := asFound
	for b := 1; b <= p.Blocks; b++ {
		for _, next := range p.order(b) {
			steps := p.steps(at, next)
			commands += len(steps)
			for i, step := range steps {
				if waitsAfter(steps, i) {
					settle += time.Duration(step.variant.Switch.Settle)
				}
			}
			at = next
		}
	}
	if p.states[at][0].Switch != nil {
		commands++
	}
	return commands, settle
}

// CommandLines returns the commands of a switch, each after the name of its field.
func CommandLines(s *spec.Switch) []string {
	lines := []string{"to: " + shell.Join(s.To), "back: " + shell.Join(s.Back)}
	if s.Verify != nil {
		lines = append(lines, "verify: "+shell.Join(s.Verify))
	}
	return lines
}

// switcher makes the switches of a run.
type switcher struct {
	plan    *Plan
	run     RunCommand
	results interface{ Switched(variant string) error }
	note    func(string)
	// inForce is the variant whose switch has been made, at least in part; nil if the machine is as it was found.
	inForce *spec.Variant
	// at is the state of the period that was entered last; asFound before the first.
	at int
}

// enter makes the steps into a period, waits, and verifies.
func (s *switcher) enter(ctx context.Context, state int, steps []step) error {
	if s.at == asFound {
		if err := s.checkUntouched(ctx); err != nil {
			return err
		}
	}
	for i, step := range steps {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := s.runStep(ctx, step); err != nil {
			return err
		}
		if !waitsAfter(steps, i) {
			continue
		}
		if err := s.wait(ctx, step.variant); err != nil {
			return err
		}
		if err := s.checkEffect(ctx, step); err != nil {
			return err
		}
	}
	s.at = state
	return nil
}

// checkUntouched checks that no switch is in force before the first one is made.
func (s *switcher) checkUntouched(ctx context.Context) error {
	for _, state := range s.plan.states {
		v := state[0]
		if v.Switch == nil || v.Switch.Verify == nil {
			continue
		}
		inForce, err := s.isInForce(ctx, v)
		if err != nil {
			return err
		}
		if inForce {
			return fmt.Errorf("variant %s: verify (%s) says that the change is in force, before anything was switched: undo it (%s), or correct the command",
				v.Name, shell.Join(v.Switch.Verify), shell.Join(v.Switch.Back))
		}
	}
	return nil
}

// runStep runs a step's command. First it records on disk that it is about to.
func (s *switcher) runStep(ctx context.Context, st step) error {
	if !st.back {
		if err := s.results.Switched(st.variant.Name); err != nil {
			return err
		}
		s.inForce = &st.variant
	}
	s.note(fmt.Sprintf("switch %s, %s: %s", st.variant.Name, st.field(), shell.Join(st.argv())))
	if err := s.command(ctx, st.variant.Switch, st.argv()); err != nil {
		return fmt.Errorf("variant %s: switch.%s: %w", st.variant.Name, st.field(), err)
	}
	return nil
}

// command runs a command of a switch to its end. A change that is cut short would leave an unknown state, so an
// interrupted run waits for the command.
func (s *switcher) command(ctx context.Context, sw *spec.Switch, argv []string) error {
	limit := time.Duration(sw.Timeout)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
	defer cancel()
	err := s.run(ctx, argv)
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("it took longer than %s, its timeout, and was killed: %w", limit, err)
	}
	return err
}

// wait lets a switch settle.
func (s *switcher) wait(ctx context.Context, v spec.Variant) error {
	settle := time.Duration(v.Switch.Settle)
	if settle == 0 {
		return nil
	}
	s.note(fmt.Sprintf("switch %s: waiting %s", v.Name, settle))
	select {
	case <-time.After(settle):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// checkEffect checks that a step took effect. Only then does it record that a switch was undone.
func (s *switcher) checkEffect(ctx context.Context, last step) error {
	v := last.variant
	if v.Switch.Verify != nil {
		inForce, err := s.isInForce(ctx, v)
		if err != nil {
			return err
		}
		if inForce == last.back {
			is := "is not"
			if last.back {
				is = "still is"
			}
			return fmt.Errorf("variant %s: switch.%s (%s) has succeeded, but verify (%s) says that the change %s in force",
				v.Name, last.field(), shell.Join(last.argv()), shell.Join(v.Switch.Verify), is)
		}
	}
	if !last.back {
		return nil
	}
	s.inForce = nil
	return s.results.Switched("")
}

// isInForce asks whether a variant's change is in force.
func (s *switcher) isInForce(ctx context.Context, v spec.Variant) (bool, error) {
	err := s.command(ctx, v.Switch, v.Switch.Verify)
	var exit interface{ ExitCode() int }
	switch {
	case err == nil:
		return true, nil
	case errors.As(err, &exit) && exit.ExitCode() == 1:
		return false, nil
	}
	return false, fmt.Errorf("variant %s: switch.verify: %w (0 says that the change is in force, 1 that it is not)", v.Name, err)
}

// restore undoes the current switch.
func (s *switcher) restore(ctx context.Context) error {
	last := step{*s.inForce, true}
	err := s.runStep(ctx, last)
	if err == nil && last.variant.Switch.Verify != nil { // without verify nothing needs it settled
		err = s.wait(ctx, last.variant)
	}
	if err == nil {
		err = s.checkEffect(ctx, last)
	}
	if err != nil {
		return fmt.Errorf("undo the switch of %s: %w", last.variant.Name, err)
	}
	return nil
}

// UndoSwitch undoes the switch of a killed run to a variant. It is not known how far that run got, so the variant's
// command back runs in any case.
func UndoSwitch(ctx context.Context, exp *spec.Experiment, variant string, run RunCommand, notes interface{ Switched(variant string) error }, tell func(string)) error {
	v, err := SwitchedVariant(exp, variant)
	if err != nil {
		return err
	}
	s := &switcher{run: run, results: notes, note: tell, inForce: v}
	return s.restore(ctx)
}

// SwitchedVariant returns the variant that a results folder names as switched.
func SwitchedVariant(exp *spec.Experiment, variant string) (*spec.Variant, error) {
	v, err := exp.VariantOf(variant)
	if err != nil || v.Switch == nil {
		return nil, fmt.Errorf("undo the switch of %s: the experiment has no such variant with a switch", variant)
	}
	return v, nil
}
