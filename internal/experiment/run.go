package experiment

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/stats"
)

// restoreTime bounds how long restoring the machine may take, however the run ended.
const restoreTime = 90 * time.Second

// Run is an experiment under way.
type Run struct {
	plan    *Plan
	target  Target
	observe func(Event)
	// owner holds this run's settings in the journals.
	owner    string
	networks []*network // by fabric
	// clusters are those of the networks, as they are now. lasting are the warnings that every further trial carries.
	clusters []record.Cluster
	lasting  []record.Warning
	// done has the trials on record. Those of an earlier run that is resumed come first. They have no time
	// series: nothing here reads those, and a large mesh has many.
	done []record.Trial
	// finished is how many of them will not be run again. It is stored because every event reports it.
	finished int
	began    time.Time
	// fresh counts the trials of this run, to estimate how long one takes.
	fresh int
	total int
	// runCommand runs the commands of switches.
	runCommand RunCommand
	switched   *switcher
}

// Start brings up the networks of a plan, starts a worker in every place that the plan uses, and describes the
// nodes. done has the trials of a run that is resumed. The caller closes the run.
func Start(ctx context.Context, p *Plan, t Target, run RunCommand, owner string, done []record.Trial, observe func(Event)) (*Run, error) {
	r := &Run{plan: p, target: t, runCommand: run, owner: owner, observe: observe}
	for _, trial := range done {
		r.remember(trial)
	}
	r.finished = Finished(r.done)
	for i, f := range p.topology.Fabrics() {
		n, err := openNetwork(ctx, t, i, p)
		if err != nil {
			what := p.topology.Describe(i)
			if name := f.Name(); name != "" && f.Cluster == "" {
				what = "network " + name
			}
			return nil, errors.Join(fmt.Errorf("bring up %s: %w", what, err), r.Close())
		}
		r.networks = append(r.networks, n)
	}
	var err error
	if r.clusters, err = r.describeClusters(ctx); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	r.lasting = r.clustersDiffer()
	r.noteHeld()
	return r, nil
}

// noteHeld says before the first trial which nodes others accelerate. Each trial warns of it too. In a cluster, the place has said so.
func (r *Run) noteHeld() {
	if r.plan.exp.Spec.Target.Kubernetes != nil {
		return
	}
	said := make(map[string]bool) // a node may be in several networks
	for _, n := range r.networks {
		for _, w := range n.heldWarnings() {
			if !said[w.Message] {
				r.note(w.Message)
			}
			said[w.Message] = true
		}
	}
}

// ErrMissing means that a run has ended, but some trials failed twice.
var ErrMissing = errors.New("some trials failed twice; the report lists them")

// Measure runs the trials that are not on record yet, block by block, and appends each to out. It returns all trials on record,
// without their time series, even with an error: if the context ended, a trial could not be recorded, a whole block failed, or
// some trials failed twice (ErrMissing).
//
// Before it returns, Measure undoes the current switch; an error says so if that fails.
func (r *Run) Measure(ctx context.Context, out Results) (trials []record.Trial, err error) {
	r.began = time.Now()
	missing := false
	r.switched = &switcher{plan: r.plan, run: r.runCommand, results: out, note: r.note, at: asFound}
	defer func() {
		if r.switched.inForce != nil {
			err = errors.Join(err, r.switched.restore(context.WithoutCancel(ctx)))
		}
	}()
	blocks := r.plan.Blocks
	if r.plan.Auto {
		blocks = min(stats.PilotBlocks, r.plan.Blocks)
	}
	for b := 1; b <= blocks; b++ {
		r.total = blocks * r.plan.trials()
		if err := r.pause(ctx, out); err != nil {
			return r.done, err
		}
		r.noteChanges(ctx)
		for _, p := range r.plan.Periods(b) {
			ok, err := r.runPeriod(ctx, b, p, out)
			if err != nil {
				return r.done, err
			}
			missing = missing || !ok
		}
		if r.plan.Auto && b == blocks && b < r.plan.Blocks {
			var err error
			if blocks, err = r.blocksWanted(b); err != nil {
				return r.done, err
			}
		}
	}
	if missing {
		return r.done, ErrMissing
	}
	return r.done, nil
}

// ErrStopped means that somebody wanted the run to stop.
var ErrStopped = errors.New("the run was stopped by slipstream serve")

// askEvery is how often a run that pauses asks whether to go on.
const askEvery = time.Second

// pause waits as long as somebody wants the run to pause. A run pauses between blocks, because the trials of a block are
// compared with each other and must not be apart.
func (r *Run) pause(ctx context.Context, out Results) error {
	paused := time.Time{}
	for {
		wanted, err := out.Wanted()
		if err == nil && wanted == record.WantedStop {
			err = ErrStopped
		}
		if err != nil {
			return err
		}
		if wanted != record.WantedPause {
			if !paused.IsZero() {
				r.began = r.began.Add(time.Since(paused)) // which tells how long a trial takes
				r.note("the run goes on")
			}
			return nil
		}
		if paused.IsZero() {
			paused = time.Now()
			r.note("the run pauses: slipstream serve resumes it")
		}
		select {
		case <-time.After(askEvery):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// blocksWanted returns how many blocks the run needs, according to the variances of the pilot.
func (r *Run) blocksWanted(after int) (int, error) {
	wanted, why, err := stats.BlocksWanted(r.plan.exp, r.done)
	if err != nil {
		return 0, err
	}
	if wanted > after {
		r.observe(Event{Kind: Note, Text: fmt.Sprintf("after %d blocks: %d are needed for %s", after, wanted, why)})
	}
	return max(after, min(wanted, r.plan.Blocks)), nil
}

// attempt is a trial that is to be run.
type attempt struct {
	Cell
	number int
}

// runPeriod runs the missing trials of a period of block b. At the end it runs those that failed once more. It
// reports whether every cell has a good trial.
func (r *Run) runPeriod(ctx context.Context, b int, p Period, out Results) (bool, error) {
	good, entry := 0, 0
	done := record.LastEntries(r.done)
	for _, t := range done {
		if t.Period == p.Cells[0].Period {
			entry = t.Entry
		}
	}
	var first, again, anew []attempt
	for _, c := range p.Cells {
		attempts, ok := attemptsOf(done, b, c)
		switch {
		case ok:
			good++
		case attempts == 0:
			first = append(first, attempt{c, 1})
		case attempts == 1:
			again = append(again, attempt{c, 2})
		}
		anew = append(anew, attempt{c, 1})
	}
	if r.plan.states != nil && len(first)+len(again) > 0 {
		// Trials from before an interruption were made after another switch.
		good, first, again = 0, anew, nil
		entry++
		if err := r.enterPeriod(ctx, p.State); err != nil {
			return false, err
		}
	}
	for _, t := range first {
		ok, err := r.runTrial(ctx, b, entry, t, out)
		if err != nil {
			return false, err
		}
		if ok {
			good++
		} else {
			again = append(again, attempt{t.Cell, t.number + 1})
		}
	}
	if len(first) > 0 && good == 0 && len(again) == len(p.Cells) {
		where := fmt.Sprintf("block %d", b)
		if r.plan.states != nil {
			where = fmt.Sprintf("period %d", p.Cells[0].Period)
		}
		last := r.done[len(r.done)-1].Error
		if strings.Contains(last, "no answer within") { // which internal/traffic says of a handshake
			last += ": are the two ends kept apart by a network policy, possibly a cluster-wide one, or by a firewall?"
		}
		return false, fmt.Errorf("every trial of %s failed; the last one: %s", where, last)
	}
	for _, t := range again {
		ok, err := r.runTrial(ctx, b, entry, t, out)
		if err != nil {
			return false, err
		}
		if ok {
			good++
		}
	}
	return good == len(p.Cells), nil
}

// attemptsOf returns how often the trials tried a cell of a block, and whether one succeeded.
func attemptsOf(trials []record.Trial, b int, c Cell) (attempts int, ok bool) {
	for _, t := range trials {
		if t.Block == b && t.Repeat == c.Repeat && t.Round == c.Round && t.Variant == c.Variant.Name && t.Workload == c.Workload.Name && t.Pairs == c.Pairs {
			attempts++
			ok = ok || t.Status == record.StatusOK
		}
	}
	return attempts, ok
}

// enterPeriod begins a period. A switch may restart the machines, so the workers end before it and start
// again after it.
func (r *Run) enterPeriod(ctx context.Context, state int) error {
	steps := r.plan.steps(r.switched.at, state)
	if len(steps) > 0 {
		for _, n := range r.networks {
			if err := n.stop(); err != nil {
				if _, ok := n.Network.(Reconnector); !ok {
					return err
				}
				r.note(err.Error()) // the machine may have dropped off
			}
		}
	}
	if err := r.switched.enter(ctx, state, steps); err != nil || len(steps) == 0 {
		return err
	}
	for i, n := range r.networks {
		if err := n.restart(ctx, r.plan, i); err != nil {
			return cmp.Or(context.Cause(ctx), err)
		}
	}
	return nil
}

// runTrial runs one trial and records it. An error ends the run.
func (r *Run) runTrial(ctx context.Context, b, entry int, c attempt, out Results) (bool, error) {
	if wanted, err := out.Wanted(); err != nil || wanted == record.WantedStop {
		return false, cmp.Or(err, ErrStopped)
	}
	if n, ok := r.networks[c.Fabric].Network.(Reconnector); ok {
		if err := awaitMachines(ctx, n, r.plan); err != nil {
			return false, cmp.Or(context.Cause(ctx), err)
		}
	}
	trial := record.Trial{
		Block: b, Period: c.Period, Entry: entry, Repeat: c.Repeat, Round: c.Round, Order: len(r.done) + 1, Variant: c.Variant.Name, Workload: c.Workload.Name,
		Pairs: c.Pairs, Attempt: c.number, Started: time.Now().UTC(), Status: record.StatusOK,
	}
	atStart := trial // workers fill in trial while it moves
	r.event(Event{Kind: Begins, Trial: atStart})
	begin := time.Now()
	fabric := r.plan.topology.Fabrics()[c.Fabric]
	err := fabric.In(r.networks[c.Fabric].trial(ctx, r.owner, c.Cell, &trial, func(bytes, messages uint64) {
		r.event(Event{Kind: Moves, Trial: atStart, Bytes: bytes, Messages: messages})
	}))
	// The trial was interrupted. It is not recorded, so a resumed run repeats it.
	if ctx.Err() != nil {
		return false, context.Cause(ctx)
	}
	if lost := new(place.LostError); errors.As(err, &lost) {
		return false, fabric.In(lost) // every worker reports it in its own words
	}
	if errors.Is(err, place.ErrNoSpace) {
		return false, err // a trial that has failed twice is not run again on resume
	}
	trial.Took = time.Since(begin).Seconds()
	if err != nil {
		trial.Status, trial.Error = record.StatusFailed, err.Error()
		_, trial.Stalled = errors.AsType[record.StalledError](err)
		trial.Metrics = nil
	}
	trial.Warnings = slices.Concat(trial.Warnings, r.movedWarnings(c.Fabric, trial.Hosts), r.lasting)
	if err := out.Append(trial); err != nil {
		return false, err
	}
	r.remember(trial)
	r.noteChangedSettings(err)
	r.finished = Finished(r.done)
	r.fresh++
	r.event(Event{Kind: Ends, Trial: trial})
	return trial.Status == record.StatusOK, nil
}

// awaitMachines waits for machines that have become unreachable. A mesh continues without them, and tries to connect to
// them once before each trial.
func awaitMachines(ctx context.Context, n Reconnector, p *Plan) error {
	if p.exp.Spec.Mesh == nil {
		return n.Await(ctx, true)
	}
	_ = n.Await(ctx, false) // the trial says who is away
	return ctx.Err()
}

func (r *Run) remember(trial record.Trial) {
	trial.Series = nil
	r.done = append(r.done, trial)
}

func (r *Run) event(e Event) {
	e.Done, e.Total = r.finished, r.total
	each := r.plan.blockTime() / time.Duration(r.plan.trials())
	if r.fresh >= r.plan.trials() { // a whole block: its mean is the plan's mix
		each = time.Since(r.began) / time.Duration(r.fresh)
	}
	e.Left = max(0, time.Duration(e.Total-e.Done)*each)
	r.observe(e)
}

// Finished counts the trials that are not run again: a failed one is repeated once.
func Finished(trials []record.Trial) (n int) {
	for _, t := range record.LastEntries(trials) {
		if t.Status == record.StatusOK || t.Attempt > 1 {
			n++
		}
	}
	return n
}

func (r *Run) note(text string) { r.observe(Event{Kind: Note, Text: text}) }

// Environment describes what the run runs on.
func (r *Run) Environment() record.Environment {
	env := record.Environment{Clusters: slices.Clone(r.clusters)}
	var placements []string
	fabrics := r.plan.topology.Fabrics()
	for i, n := range r.networks {
		env.Placement = n.setup.Placement
		if name := fabrics[i].Cluster; name != "" {
			placements = append(placements, fmt.Sprintf("Cluster %s: %s", name, n.setup.Placement))
		}
		for _, node := range n.facts {
			if len(fabrics) > 1 {
				node.Name = fabrics[i].Name() + "/" + node.Name
			}
			env.Nodes = append(env.Nodes, node)
		}
	}
	if len(placements) > 0 {
		env.Placement = strings.Join(placements, " ")
	}
	return env
}

// Close takes the networks down. By then, everything that was applied has been reverted: each trial reverts its
// own, and a worker reverts what is left when its stream closes.
func (r *Run) Close() error {
	var errs []error
	for _, n := range r.networks {
		errs = append(errs, n.close())
	}
	r.networks = nil
	return errors.Join(errs...)
}
