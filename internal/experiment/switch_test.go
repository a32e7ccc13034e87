package experiment

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// switching is an experiment on a machine that is found small.
const switching = `
apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: test}
spec:
  path: {native: {}}
  baseline: small
  variants:
  - {name: small}
  - {name: small-rps, accelerate: [{rps: {devices: [nic], cpus: all}}]}
  - {name: large, switch: {to: [resize, large], back: [resize, small], verify: [is, large], settle: 30s}}
  - {name: huge, switch: {to: [resize, huge], back: [resize, small]}}
  workloads:
  - {name: stream, stream: {warmup: 1ms, duration: 1s}}
  pairs: [1, 2]
  runs: 4
  trialsPerPeriod: 2
  seed: 7
`

func parseSwitching(t *testing.T, overrides ...string) *spec.Experiment {
	t.Helper()
	exp, err := spec.Parse("test.yaml", []byte(switching), overrides)
	if err != nil {
		t.Fatal(err)
	}
	return exp
}

// exitCode is the error of a command that exited with it.
type exitCode int

func (e exitCode) Error() string { return fmt.Sprintf("exit status %d", int(e)) }
func (e exitCode) ExitCode() int { return int(e) }

// machine is the machine that the commands switch.
type machine struct {
	size string
	log  []string
	// fail is asked before each command.
	fail func(ctx context.Context, command string) error
}

func (m *machine) run(ctx context.Context, argv []string) error {
	text := strings.Join(argv, " ")
	m.log = append(m.log, text)
	if m.fail != nil {
		if err := m.fail(ctx, text); err != nil {
			return err
		}
	}
	switch {
	case argv[0] == "resize":
		m.size = argv[1]
	case m.size != argv[1]:
		return exitCode(1)
	}
	return nil
}

// on returns a fake target on the machine.
func (m *machine) on() *fakeTarget {
	f := newFake(2)
	f.run = m.run
	return f
}

// TestPeriods: two blocks form a round, whose second half is the reverse of the first. In each of its periods, every
// variant runs every cell as often as planned.
func TestPeriods(t *testing.T) {
	first := map[int]int{}
	for seed := range 30 {
		p := newFake(2).plan(parseSwitching(t, fmt.Sprintf("spec.seed=%d", seed+1)))
		var states []int
		for b := 1; b <= 4; b++ {
			for _, period := range p.Periods(b) {
				states = append(states, period.State)
				count := map[string]int{}
				for _, c := range period.Cells {
					count[c.String()+fmt.Sprint(c.Repeat)]++
					if c.Period != len(states) {
						t.Errorf("seed %d: %s is of period %d, want %d", seed, c, c.Period, len(states))
					}
				}
				if want := []int{8, 4, 4}[period.State]; len(count) != want || len(period.Cells) != want {
					t.Errorf("seed %d, block %d: %d trials, %d of them different, want %d", seed, b, len(period.Cells), len(count), want)
				}
			}
		}
		for round := range slices.Chunk(states, 6) {
			back := slices.Clone(round)
			slices.Reverse(back)
			if !slices.Equal(round, back) || !slices.Equal(slices.Sorted(slices.Values(round[:3])), []int{0, 1, 2}) {
				t.Errorf("seed %d: round %v", seed, round)
			}
			first[round[0]]++
		}
	}
	if len(first) != 3 {
		t.Errorf("rounds begin with %v only", first)
	}
}

func TestSteps(t *testing.T) {
	p := newFake(2).plan(parseSwitching(t))
	const small, large, huge = 0, 1, 2
	for _, c := range []struct {
		from, to int
		want     []string
	}{
		{asFound, small, nil},
		{asFound, large, []string{"resize large"}},
		{small, large, []string{"resize large"}},
		{large, small, []string{"resize small"}},
		{large, huge, []string{"resize small", "resize huge"}},
		{large, large, []string{"resize small", "resize large"}},
		{small, small, []string{"resize large", "resize small"}},
	} {
		var got []string
		for _, s := range p.steps(c.from, c.to) {
			got = append(got, strings.Join(s.argv(), " "))
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%d to %d: %v, want %v", c.from, c.to, got, c.want)
		}
	}
}

// TestSwitch runs to the end. Every trial runs on the state that its variant needs, no worker runs during a switch,
// every period but the first has a switch before it, and the original state is restored at the end.
func TestSwitch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, out := &machine{size: "small"}, new(memory)
		f := m.on()
		since, periods := 0, 0 // commands since the last trial
		m.fail = func(_ context.Context, text string) error {
			name, to, _ := strings.Cut(text, " ")
			if name == "resize" {
				since++
				if f.workers != 0 {
					t.Errorf("%s: there are %d workers", text, f.workers)
				}
				if to != "small" && out.switched != to {
					t.Errorf("%s: what is noted is %q", text, out.switched)
				}
			}
			return nil
		}
		last := 0
		trials, err := measure(t, t.Context(), f, parseSwitching(t), out, func(e Event) {
			if e.Kind != Begins {
				return
			}
			if want := map[string]string{"small-rps": "small"}[e.Trial.Variant]; m.size != want && m.size != e.Trial.Variant {
				t.Errorf("a trial of %s runs on %s", e.Trial.Variant, m.size)
			}
			if e.Trial.Period == last {
				return
			}
			periods++
			if since == 0 && periods > 1 {
				t.Errorf("period %d has no switch before it", e.Trial.Period)
			}
			since, last = 0, e.Trial.Period
		})
		if err != nil {
			t.Fatal(err)
		}
		if len(trials) != 4*4*2*2 || periods != 12 {
			t.Errorf("%d trials in %d periods", len(trials), periods)
		}
		if m.size != "small" || out.switched != "" {
			t.Errorf("it ends on %s, with %q noted", m.size, out.switched)
		}
	})
}

// TestMoved checks that a trial has a warning if a machine runs on another physical host than when its host was
// last known, and that every trial records the host.
func TestMoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &machine{size: "small"}
		f := m.on()
		sampled := 0
		f.physicalHost = func() string {
			if sampled++; sampled%4 == 0 { // the guest does not know it now
				return ""
			}
			return map[bool]string{true: "rack1", false: "rack2"}[m.size == "small"]
		}
		trials, err := measure(t, t.Context(), f, parseSwitching(t), new(memory), func(Event) {})
		if err != nil {
			t.Fatal(err)
		}
		was, moves, unknown := "", 0, 0
		for _, tr := range trials {
			now := tr.Hosts[0].PhysicalHost
			var want, got []string
			switch {
			case now == "":
				unknown++
			case was != "" && now != was:
				moves++
				want = []string{fmt.Sprintf("node0 and node1 moved from the physical host %q to %q", was, now)}
			}
			for _, w := range tr.Warnings {
				if w.Code == record.WarnMoved {
					got = append(got, w.Message)
				}
			}
			if !slices.Equal(got, want) {
				t.Errorf("trial %d on %q after %q: warnings %q, want %q", tr.Order, now, was, got, want)
			}
			if now != "" {
				was = now
			}
		}
		if moves == 0 || unknown == 0 {
			t.Errorf("the machine moved %d times, and was on an unknown host in %d trials", moves, unknown)
		}
	})
}

// TestSwitchFails makes commands fail, hang and lie. The run ends with an error that names the command and says what
// happened. The original state is restored, unless the command for that is the one that failed.
func TestSwitchFails(t *testing.T) {
	fail := errors.New("quota exceeded")
	for _, c := range []struct {
		name string
		fail func(m *machine, ctx context.Context, command string) error
		want string
		left string // what stays noted as switched
	}{
		{"to fails", func(_ *machine, _ context.Context, command string) error {
			if command == "resize large" {
				return fail
			}
			return nil
		}, "variant large: switch.to: quota exceeded", ""},
		{"to hangs", func(_ *machine, ctx context.Context, command string) error {
			if command == "resize large" {
				<-ctx.Done()
				return errors.New("signal: killed")
			}
			return nil
		}, "variant large: switch.to: it took longer than 10m0s, its timeout, and was killed: signal: killed", ""},
		{"to lies", func(m *machine, _ context.Context, command string) error {
			if command == "is large" {
				m.size = "small"
			}
			return nil
		}, "variant large: switch.to (resize large) has succeeded, but verify (is large) says that the change is not in force", ""},
		{"verify cannot tell", func(_ *machine, _ context.Context, command string) error {
			if command == "is large" {
				return exitCode(2)
			}
			return nil
		}, "variant large: switch.verify: exit status 2 (0 says that the change is in force, 1 that it is not)", ""},
		{"in force before", func(m *machine, _ context.Context, command string) error {
			if command == "is large" && len(m.log) == 1 {
				m.size = "large"
			}
			return nil
		}, "variant large: verify (is large) says that the change is in force, before anything was switched: undo it (resize small), or correct the command", ""},
		{"back fails", func(_ *machine, _ context.Context, command string) error {
			if command == "resize small" {
				return fail
			}
			return nil
		}, "undo the switch of large: variant large: switch.back: quota exceeded", "large"},
		{"back lies", func(m *machine, _ context.Context, command string) error {
			if command == "is large" && slices.Contains(m.log, "resize large") {
				m.size = "large"
			}
			return nil
		}, "undo the switch of large: variant large: switch.back (resize small) has succeeded, but verify (is large) says that the change still is in force", "large"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m, out := &machine{size: "small"}, new(memory)
				m.fail = func(ctx context.Context, command string) error { return c.fail(m, ctx, command) }
				exp := parseSwitching(t)
				exp.Spec.Variants = exp.Spec.Variants[:3]
				_, err := measure(t, t.Context(), m.on(), exp, out, nil)
				if err == nil || !strings.Contains(err.Error(), c.want) {
					t.Errorf("got %v, want %s", err, c.want)
				}
				if out.switched != c.left {
					t.Errorf("%q is noted as switched, want %q", out.switched, c.left)
				}
				if want := map[bool]string{true: "small", false: "large"}[c.left == ""]; m.size != want && c.name != "in force before" {
					t.Errorf("the machine is left %s, want %s", m.size, want)
				}
			})
		})
	}
}

// TestSwitchBackLies: a command back does nothing between two switched states, where the next command would hide that.
func TestSwitchBackLies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		exp := parseSwitching(t)
		for newFake(2).plan(exp).order(1)[0] != 1 || newFake(2).plan(exp).order(1)[1] != 2 { // large, then huge
			exp.Spec.Seed++
		}
		m, out := &machine{size: "small"}, new(memory)
		lied := false
		m.fail = func(_ context.Context, command string) error {
			if n := len(m.log); !lied && n > 1 && m.log[n-2] == "resize small" {
				m.size, lied = "large", true
			}
			return nil
		}
		trials, err := measure(t, t.Context(), m.on(), exp, out, nil)
		if want := "variant large: switch.back (resize small) has succeeded, but verify (is large) says that the change still is in force"; err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
		if len(trials) != 4 || m.size != "small" || out.switched != "" {
			t.Errorf("%d trials; it is left %s, with %q noted", len(trials), m.size, out.switched)
		}
	})
}

// TestSwitchRestarts: each command restarts the machines. The run waits for them, even for one that still answered at
// first, because it had not gone down yet.
func TestSwitchRestarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &machine{size: "small"}
		f := m.on()
		awaited, restarts := 0, 0
		f.await = func(context.Context, bool) error {
			if awaited++; awaited > 20 {
				f.away = false
			}
			return nil
		}
		m.fail = func(_ context.Context, command string) error {
			if strings.HasPrefix(command, "resize") {
				f.away, awaited = true, 0
				restarts++
			}
			return nil
		}
		trials, err := measure(t, t.Context(), f, parseSwitching(t), new(memory), nil)
		if err != nil {
			t.Fatal(err)
		}
		if len(trials) != 4*4*2*2 || restarts < 11 {
			t.Errorf("%d trials, %d restarts", len(trials), restarts)
		}
	})
}

// TestSwitchInterrupted stops a run in the middle of a period, after a command began: the
// command ends, the original state is restored, and the resumed run repeats the whole period.
func TestSwitchInterrupted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, out := &machine{size: "small"}, new(memory)
		ctx, cancel := context.WithCancel(t.Context())
		m.fail = func(command context.Context, text string) error {
			if len(out.trials) > 20 && text == "resize large" {
				cancel()
				if command.Err() != nil {
					t.Error("the command is stopped in the middle")
				}
			}
			return nil
		}
		if _, err := measure(t, ctx, m.on(), parseSwitching(t), out, nil); !errors.Is(err, context.Canceled) {
			t.Fatalf("got %v", err)
		}
		if m.size != "small" || out.switched != "" {
			t.Errorf("it is left %s, with %q noted", m.size, out.switched)
		}

		m.fail = nil
		ctx, cancel = context.WithCancel(t.Context())
		begun := 0
		_, err := measure(t, ctx, m.on(), parseSwitching(t), out, func(e Event) {
			if e.Kind != Begins {
				return
			}
			if begun++; begun == 3 { // in the middle of any period
				cancel()
			}
		})
		if !errors.Is(err, context.Canceled) || m.size != "small" {
			t.Fatalf("got %v, on %s", err, m.size)
		}
		cut := out.trials[len(out.trials)-1].Period
		before := len(out.trials)
		trials, err := measure(t, t.Context(), m.on(), parseSwitching(t), out, nil)
		if err != nil {
			t.Fatal(err)
		}
		again := 0
		for _, tr := range trials[before:] {
			if tr.Period < cut {
				t.Errorf("period %d, which was done, runs again", tr.Period)
			}
			if tr.Period == cut {
				again++
			}
		}
		p := new(fakeTarget).plan(parseSwitching(t))
		whole := 0
		for b := 1; b <= 4; b++ {
			for _, period := range p.Periods(b) {
				if period.Cells[0].Period == cut {
					whole = len(period.Cells)
				}
			}
		}
		if again != whole {
			t.Errorf("%d of %d trials of the period that was cut short run again", again, whole)
		}
	})
}

// TestSwitchInterruptedTwice interrupts a run before a failed trial is tried again, and the resumed run after that
// trial. Then every cell of the period has a good trial, but from before and after another switch. So the period runs
// once more.
func TestSwitchInterruptedTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, out := &machine{size: "small"}, new(memory)
		// The first of the period's four trials fails. The first run ends when that trial is tried again, the
		// second run after it.
		for run, at := range []int{5, 2} {
			ctx, cancel := context.WithCancel(t.Context())
			f, begun := m.on(), 0
			f.fail = func(call, _ string) error {
				if run == 0 && begun == 1 && call == "drive" {
					return errors.New("failed")
				}
				return nil
			}
			_, err := measure(t, ctx, f, parseSwitching(t), out, func(e Event) {
				if e.Kind != Begins {
					return
				}
				if begun++; begun == at {
					cancel()
				}
			})
			if !errors.Is(err, context.Canceled) {
				t.Fatalf("got %v", err)
			}
		}
		trials, err := measure(t, t.Context(), m.on(), parseSwitching(t), out, nil)
		if err != nil {
			t.Fatal(err)
		}
		entries := make(map[int]int)
		for _, tr := range record.LastEntries(trials) {
			if tr.Period == 1 {
				entries[tr.Entry]++
			}
		}
		if want := map[int]int{3: 4}; !maps.Equal(entries, want) {
			t.Errorf("trials of period 1 that count, by entry: %v, want %v", entries, want)
		}
	})
}

func TestUndoUnknownSwitch(t *testing.T) {
	err := UndoSwitch(t.Context(), parseSwitching(t), "small", nil, new(memory), func(string) {})
	if want := "undo the switch of small: the experiment has no such variant with a switch"; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

// TestSwitchPlan: the plan says what is switched, how often, and how long the run waits for it.
func TestSwitchPlan(t *testing.T) {
	p := newFake(2).plan(parseSwitching(t, "spec.variants=[{name: small}, {name: large, switch: {to: [resize, large], back: [resize, small], verify: [is, large], settle: 30s}}]", "spec.runs=2"))
	var b strings.Builder
	if err := p.Outline().Print(&b); err != nil {
		t.Fatal(err)
	}
	// A B B A runs the commands to, back, to and back. B A A B runs one more to, and one more back at the end.
	// Each of its switches waits.
	commands, settle := "4", 90*time.Second
	if p.order(1)[0] == 1 {
		commands, settle = "6", 120*time.Second
	}
	for _, want := range []string{
		"16 in 4 periods of a switch-back design", ", plus about " + commands + " switch commands\n",
		"large   to: resize large\n        back: resize small\n        verify: is large\n        then wait 30s\n",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("the plan does not say %q:\n%s", want, b.String())
		}
	}
	if got := p.Time() - startTime - 2*p.blockTime(); got != settle {
		t.Errorf("it waits %s, want %s", got, settle)
	}
}
