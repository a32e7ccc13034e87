package experiment

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
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
	// done has the trials on record. Those of an earlier run that is resumed come first. They have no time
	// series: nothing here reads those, and a large mesh has many.
	done  []record.Trial
	began time.Time
	// fresh counts the trials of this run, to estimate how long one takes.
	fresh int
	total int
	// commands runs those of switches.
	commands Commands
	switched *switcher
}

// Start brings up the networks of a plan, starts a worker in every place that the plan uses, and describes the
// nodes. done has the trials of a run that is resumed. The caller closes the run.
func Start(ctx context.Context, p *Plan, t Target, run Commands, owner string, done []record.Trial, observe func(Event)) (*Run, error) {
	r := &Run{plan: p, target: t, commands: run, owner: owner, observe: observe}
	for _, trial := range done {
		r.remember(trial)
	}
	for i, f := range p.Fabrics {
		n, err := openNetwork(ctx, t, i, p)
		if err != nil {
			what := f.Text
			if f.Name != "" {
				what = "network " + f.Name
			}
			return nil, errors.Join(fmt.Errorf("bring up %s: %w", what, err), r.Close())
		}
		r.networks = append(r.networks, n)
	}
	return r, nil
}

// Environment describes what the run runs on.
func (r *Run) Environment() record.Environment {
	var env record.Environment
	for i, n := range r.networks {
		env.Placement = n.setup.Placement
		for _, node := range n.facts {
			if len(r.plan.Fabrics) > 1 {
				node.Name = r.plan.Fabrics[i].Name + "/" + node.Name
			}
			env.Nodes = append(env.Nodes, node)
		}
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

// ErrMissing means that a run has ended, but some trials failed twice.
var ErrMissing = errors.New("some trials failed twice; the report lists them")

// Measure runs the trials that are not on record yet, block by block, and appends each to out. It returns all
// trials on record, without their time series. It also does so with an error: if the context ended, a trial could
// not be recorded, a whole block failed, or some trials failed twice (ErrMissing).
//
// Before it returns, Measure undoes the current switch; an error says so if that fails.
func (r *Run) Measure(ctx context.Context, out Results) (trials []record.Trial, err error) {
	r.began = time.Now()
	missing := false
	r.switched = &switcher{plan: r.plan, run: r.commands, notes: out, tell: r.note, at: begun}
	defer func() {
		if r.switched.now != nil {
			err = errors.Join(err, r.switched.restore(context.WithoutCancel(ctx)))
		}
	}()
	blocks := r.plan.Blocks
	if r.plan.Auto {
		blocks = min(stats.PilotBlocks, r.plan.Blocks)
	}
	for b := 1; b <= blocks; b++ {
		r.total = blocks * r.plan.trials()
		for _, p := range r.plan.Periods(b) {
			ok, err := r.period(ctx, b, p, out)
			if err != nil {
				return r.done, err
			}
			missing = missing || !ok
		}
		if r.plan.Auto && b == blocks && b < r.plan.Blocks {
			var err error
			if blocks, err = r.more(b); err != nil {
				return r.done, err
			}
		}
	}
	if missing {
		return r.done, ErrMissing
	}
	return r.done, nil
}

// more returns how many blocks the run needs, according to the variances of the pilot.
func (r *Run) more(after int) (int, error) {
	wanted, why, err := stats.BlocksWanted(r.plan.exp, r.done)
	if err != nil {
		return 0, err
	}
	if wanted > after {
		r.observe(Event{Kind: Note, Text: fmt.Sprintf("after %d blocks: %d are needed for %s", after, wanted, why)})
	}
	return max(after, min(wanted, r.plan.Blocks)), nil
}

// try is a trial that is to be run.
type try struct {
	Cell
	attempt int
}

// period runs the missing trials of a period of block b. At the end it runs those that failed once more. It
// reports whether every cell has a good trial.
func (r *Run) period(ctx context.Context, b int, p Period, out Results) (bool, error) {
	good, entry := 0, 0
	done := record.LastEntries(r.done)
	for _, t := range done {
		if t.Period == p.Cells[0].Period {
			entry = t.Entry
		}
	}
	var first, again, anew []try
	for _, c := range p.Cells {
		attempts, ok := recorded(done, b, c)
		switch {
		case ok:
			good++
		case attempts == 0:
			first = append(first, try{c, 1})
		case attempts == 1:
			again = append(again, try{c, 2})
		}
		anew = append(anew, try{c, 1})
	}
	if r.plan.states != nil && len(first)+len(again) > 0 {
		// Trials from before an interruption were made after another switch.
		good, first, again = 0, anew, nil
		entry++
		if err := r.enter(ctx, p.State); err != nil {
			return false, err
		}
	}
	for _, t := range first {
		ok, err := r.attempt(ctx, b, entry, t, out)
		if err != nil {
			return false, err
		}
		if ok {
			good++
		} else {
			again = append(again, try{t.Cell, t.attempt + 1})
		}
	}
	if len(first) > 0 && good == 0 && len(again) == len(p.Cells) {
		where := fmt.Sprintf("block %d", b)
		if r.plan.states != nil {
			where = fmt.Sprintf("period %d", p.Cells[0].Period)
		}
		return false, fmt.Errorf("every trial of %s failed; the last one: %s", where, r.done[len(r.done)-1].Error)
	}
	for _, t := range again {
		ok, err := r.attempt(ctx, b, entry, t, out)
		if err != nil {
			return false, err
		}
		if ok {
			good++
		}
	}
	return good == len(p.Cells), nil
}

// enter begins a period. A switch may restart the machines, so the workers end before it and start
// again after it.
func (r *Run) enter(ctx context.Context, state int) error {
	steps := r.plan.steps(r.switched.at, state)
	if len(steps) > 0 {
		for _, n := range r.networks {
			if err := n.stop(); err != nil {
				if _, ok := n.Network.(Returning); !ok {
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

// downTime bounds how long a machine may still answer after a switch that restarts it.
const downTime = time.Minute

// restart starts the workers again after a switch, which may restart the machines.
func (n *network) restart(ctx context.Context, p *Plan, fabric int) error {
	returning, ok := n.Network.(Returning)
	if !ok {
		return n.start(ctx, p, fabric)
	}
	for deadline := time.Now().Add(downTime); ; {
		if err := await(ctx, returning, p); err != nil {
			return err
		}
		err := n.start(ctx, p, fabric)
		if err == nil || time.Now().After(deadline) {
			return err
		}
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (r *Run) note(text string) { r.observe(Event{Kind: Note, Text: text}) }

// recorded returns how often the trials tried a cell of a block, and whether one succeeded.
func recorded(trials []record.Trial, b int, c Cell) (attempts int, ok bool) {
	for _, t := range trials {
		if t.Block == b && t.Repeat == c.Repeat && t.Round == c.Round && t.Variant == c.Variant.Name && t.Workload == c.Workload.Name && t.Pairs == c.Pairs {
			attempts++
			ok = ok || t.Status == record.StatusOK
		}
	}
	return attempts, ok
}

// attempt runs one trial and records it. An error ends the run.
func (r *Run) attempt(ctx context.Context, b, entry int, c try, out Results) (bool, error) {
	if n, ok := r.networks[c.Fabric].Network.(Returning); ok {
		if err := await(ctx, n, r.plan); err != nil {
			return false, cmp.Or(context.Cause(ctx), err)
		}
	}
	trial := record.Trial{
		Block: b, Period: c.Period, Entry: entry, Repeat: c.Repeat, Round: c.Round, Order: len(r.done) + 1, Variant: c.Variant.Name, Workload: c.Workload.Name,
		Pairs: c.Pairs, Attempt: c.attempt, Started: time.Now().UTC(), Status: record.StatusOK,
	}
	begun := trial // workers fill in trial while it moves
	r.event(Event{Kind: Begins, Trial: begun})
	begin := time.Now()
	err := r.networks[c.Fabric].trial(ctx, r.owner, c.Cell, &trial, func(bytes, messages uint64) {
		r.event(Event{Kind: Moves, Trial: begun, Bytes: bytes, Messages: messages})
	})
	// The trial was interrupted. It is not recorded, so a resumed run makes it again.
	if ctx.Err() != nil {
		return false, context.Cause(ctx)
	}
	if lost := new(place.LostError); errors.As(err, &lost) {
		return false, lost // every worker reports it in its own words
	}
	if errors.Is(err, place.ErrNoSpace) {
		return false, err // a trial that has failed twice is not run again on resume
	}
	trial.Took = time.Since(begin).Seconds()
	if err != nil {
		trial.Status, trial.Error = record.StatusFailed, err.Error()
		trial.Metrics = nil
	}
	trial.Warnings = append(trial.Warnings, r.movedWarnings(trial.Hosts)...)
	if err := out.Append(trial); err != nil {
		return false, err
	}
	r.remember(trial)
	r.fresh++
	r.event(Event{Kind: Ends, Trial: trial})
	return trial.Status == record.StatusOK, nil
}

func (r *Run) remember(trial record.Trial) {
	trial.Series = nil
	r.done = append(r.done, trial)
}

// await waits for machines that have become unreachable. A mesh continues without them, and tries to connect to
// them once before each trial.
func await(ctx context.Context, n Returning, p *Plan) error {
	if p.exp.Spec.Mesh == nil {
		return n.Await(ctx, true)
	}
	_ = n.Await(ctx, false) // the trial says who is away
	return ctx.Err()
}

// movedWarnings warns of machines that run on another physical host than in an earlier trial.
func (r *Run) movedWarnings(hosts []record.Host) (all []record.Warning) {
	for _, h := range hosts {
		for _, t := range slices.Backward(r.done) {
			// The boot id changes if a switch restarts the machine.
			i := slices.IndexFunc(t.Hosts, func(was record.Host) bool {
				return slices.Equal(was.Nodes, h.Nodes) && was.PhysicalHost != ""
			})
			if i < 0 {
				continue
			}
			// The daemon that reports the name starts some time after the machine.
			if was := t.Hosts[i].PhysicalHost; h.PhysicalHost != "" && was != h.PhysicalHost {
				all = append(all, record.Warnf(record.WarnMoved, "%s moved from the physical host %q to %q",
					strings.Join(h.Nodes, " and "), was, h.PhysicalHost))
			}
			break
		}
	}
	return all
}

func (r *Run) event(e Event) {
	e.Done, e.Total = len(r.done), r.total
	each := r.plan.blockTime() / time.Duration(r.plan.trials())
	if r.fresh >= r.plan.trials() { // a whole block: its mean is the plan's mix
		each = time.Since(r.began) / time.Duration(r.fresh)
	}
	e.Left = max(0, time.Duration(e.Total-e.Done)*each)
	r.observe(e)
}

// network is a fabric that is up, with its workers.
type network struct {
	Network
	rounds int // of a block of a mesh
	setup  place.Setup
	nodes  []place.Place
	facts  []record.Node
	// sampleCPUs has the nodes that sample the CPUs of their machine: one node per machine.
	sampleCPUs map[string]bool

	mu      sync.Mutex
	workers map[workerKey]Worker
}

// workerKey identifies a worker of a place. A node has one for control and, for native traffic, one for each end
// of a pair. A pod has one of its own too, so that the processes are alike on every path.
type workerKey struct {
	place string
	slot  int
}

// Slots of workers other than those for a pair's ends on a node.
const (
	own     = -1 // a pod's
	control = -2
)

// controlOf returns the worker that samples and steers a place: a pod's own, unless the pod is unprivileged.
func controlOf(p place.Place) workerKey {
	if p.Kind == place.Pod && !p.Unprivileged {
		return workerKey{p.Name, own}
	}
	return workerKey{p.Name, control}
}

func (k workerKey) use() place.Use {
	if k.slot == control {
		return place.ForControl
	}
	return place.ForTraffic
}

func openNetwork(ctx context.Context, t Target, fabric int, p *Plan) (*network, error) {
	up, err := t.Network(ctx, fabric)
	if err != nil {
		return nil, err
	}
	n := &network{Network: up, rounds: p.exp.Rounds(), setup: up.Setup(), workers: make(map[workerKey]Worker), sampleCPUs: make(map[string]bool)}
	for _, p := range up.Places() {
		if p.Kind == place.Node {
			n.nodes = append(n.nodes, p)
		}
	}
	err = n.start(ctx, p, fabric)
	if err == nil {
		err = n.describe(ctx, p)
	}
	if err == nil {
		err = n.equipped(p, fabric)
	}
	if err == nil {
		err = n.acceleratorsFree(p, fabric)
	}
	if err != nil {
		return nil, errors.Join(err, n.close())
	}
	return n, nil
}

// start starts every worker that the plan needs, so that no trial has to wait
// for one.
func (n *network) start(ctx context.Context, p *Plan, fabric int) error {
	places := make(map[workerKey]place.Place)
	for _, node := range n.nodes {
		if !node.Unprivileged {
			places[controlOf(node)] = node
		}
	}
	for _, c := range p.Cells {
		if c.Fabric != fabric {
			continue
		}
		pairs, err := n.pairs(1, c)
		if err != nil {
			return err
		}
		for _, pair := range pairs {
			places[pair.client.key] = pair.client.place
			for _, s := range pair.servers {
				places[s.key] = s.place
			}
		}
		for _, s := range n.steered(c, pairs) {
			places[s.key] = s.place
		}
	}
	var tasks []func() error
	for key, place := range places {
		tasks = append(tasks, func() error {
			_, err := n.worker(ctx, key, place)
			return err
		})
	}
	if err := inParallel(tasks); p.exp.Spec.Mesh == nil || ctx.Err() != nil {
		return err
	}
	return nil // in a mesh, the pairs of a node without a worker fail and say so
}

// describe collects the facts of the nodes, and chooses which of them sample the CPUs of their machine.
func (n *network) describe(ctx context.Context, p *Plan) error {
	for _, node := range n.nodes {
		at, as := seated{node, controlOf(node)}, node
		if node.Unprivileged { // a pod on it sees most of the facts
			all := n.Places()
			if i := slices.IndexFunc(all, func(p place.Place) bool { return p.Kind == place.Pod && p.Node == node.Name }); i >= 0 {
				pod := all[i]
				at, as.Kind = seated{pod, workerKey{pod.Name, own}}, place.Pod
			}
		}
		facts, err := n.factsOf(ctx, at, as)
		if err != nil && p.exp.Spec.Mesh != nil && ctx.Err() == nil {
			n.facts = append(n.facts, record.Node{Name: node.Name})
			continue
		}
		if err != nil {
			return fmt.Errorf("describe %s: %w", node.Name, err)
		}
		if j := slices.IndexFunc(n.facts, func(f record.Node) bool { return f.Boot == facts.Boot }); j >= 0 {
			facts.InterruptSeconds = n.facts[j].InterruptSeconds // another measurement would differ a little
		} else {
			n.sampleCPUs[node.Name] = true
		}
		n.facts = append(n.facts, facts)
	}
	return nil
}

// equipped checks that the nodes at the ends of a plan's pairs have the applications that its workloads need.
// Otherwise the run would fail only at the first trial that needs a missing one.
func (n *network) equipped(p *Plan, fabric int) error {
	for _, c := range p.Cells {
		tool := c.Workload.Traffic().Tool
		if c.Fabric != fabric || !spec.InstalledApplication(tool) {
			continue
		}
		pairs, err := n.pairs(1, c)
		if err != nil {
			return err
		}
		for _, pair := range pairs {
			for _, end := range append(pair.servers, pair.client) {
				// A node of a mesh that does not answer has no facts.
				i := slices.IndexFunc(n.facts, func(f record.Node) bool { return f.Name == end.place.Node && f.Boot != "" })
				if i >= 0 && n.facts[i].Tools[tool] == "" {
					return fmt.Errorf("workload %s: %s lacks programs of %s: install them there (make apps-deps; packages are in docs/reference/workloads.md), "+
						"for pods into their image, or leave the workload out", c.Workload.Name, end.place.Node, tool)
				}
			}
		}
	}
	return nil
}

// acceleratorsFree checks that no other process holds an accelerator that a variant applies and that only one
// process can hold: every trial of that variant would fail.
func (n *network) acceleratorsFree(p *Plan, fabric int) error {
	if !slices.ContainsFunc(n.facts, func(f record.Node) bool { return len(f.Busy) > 0 }) {
		return nil
	}
	for _, c := range p.Cells {
		if c.Fabric != fabric || len(c.Variant.Accelerate) == 0 {
			continue
		}
		pairs, err := n.pairs(1, c)
		if err != nil {
			return err
		}
		for _, s := range n.steered(c, pairs) {
			i := slices.IndexFunc(n.facts, func(f record.Node) bool { return f.Name == s.place.Name })
			if i < 0 {
				continue
			}
			for _, a := range c.Variant.Accelerate {
				if held := n.facts[i].Busy[a.Kind()]; held != "" {
					return fmt.Errorf("variant %s needs %s of %s, which is in use (%s): delete the policy that asks for it there, or leave the variant out",
						c.Variant.Name, a.Label(), s.place.Name, held)
				}
			}
		}
	}
	return nil
}

func (n *network) factsOf(ctx context.Context, at seated, as place.Place) (record.Node, error) {
	w, err := n.worker(ctx, at.key, at.place)
	if err != nil {
		return record.Node{}, err
	}
	return w.Describe(ctx, as)
}

// seated is one end of a pair in its place.
type seated struct {
	place place.Place
	key   workerKey
}

// seatedPair is a pair with its workers.
type seatedPair struct {
	place.Pair
	client  seated
	servers []seated
}

// pairs returns the pairs of a cell in their places. In a mesh these depend on the block.
func (n *network) pairs(block int, c Cell) ([]seatedPair, error) {
	all := make([]seatedPair, c.Pairs)
	for i := range all {
		number, slot := i, i
		if c.Round > 0 { // no node has two pairs at a time
			number, slot = ((block-1)*n.rounds+c.Round-1)*c.Pairs+i, 0
		}
		p, err := n.Pair(c.Variant, number, c.Workload.Traffic().IP)
		if err != nil {
			return nil, fmt.Errorf("workload %s: %w", c.Workload.Name, err)
		}
		seat := func(p place.Place, slot int) seated {
			if p.Kind == place.Pod {
				slot = own
			}
			return seated{p, workerKey{p.Name, slot}}
		}
		all[i] = seatedPair{Pair: p, client: seat(p.Client, 2*slot)}
		for _, server := range p.Servers {
			all[i].servers = append(all[i].servers, seat(server, 2*slot+1))
		}
	}
	return all, nil
}

// worker returns the worker of a place. It starts one if there is none, or if it has died. The first Revert of a
// new worker restores what a dead predecessor has left.
func (n *network) worker(ctx context.Context, key workerKey, place place.Place) (Worker, error) {
	if w := n.started(key); w != nil && !w.Gone() {
		return w, nil
	}
	n.drop(key)
	w, err := n.Worker(ctx, place, key.use())
	if err != nil {
		return nil, fmt.Errorf("start worker in %s: %w", place.Name, err)
	}
	n.mu.Lock()
	n.workers[key] = w
	n.mu.Unlock()
	return w, nil
}

// started returns a worker that was started and has not been dropped, or nil.
func (n *network) started(key workerKey) Worker {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.workers[key]
}

// drop forgets a worker that failed, so that the next trial starts another.
func (n *network) drop(key workerKey) {
	n.mu.Lock()
	w := n.workers[key]
	delete(n.workers, key)
	n.mu.Unlock()
	if w != nil {
		_ = w.Close() // it failed already, and that is on record
	}
}

func (n *network) close() error {
	err := n.stop()
	ctx, cancel := context.WithTimeout(context.Background(), restoreTime)
	defer cancel()
	return errors.Join(err, n.Network.Close(ctx))
}

// stop ends all workers. The places stay.
func (n *network) stop() error {
	var tasks []func() error
	for _, w := range n.workers {
		tasks = append(tasks, func() error {
			gone := w.Gone()
			if err := w.Close(); !gone {
				return err
			}
			return nil // how it ended matters to the trial it ended in
		})
	}
	err := inParallel(tasks)
	clear(n.workers)
	return err
}

// inParallel runs tasks concurrently, and returns the errors of all.
func inParallel(tasks []func() error) error {
	errs := make([]error, len(tasks))
	var wg sync.WaitGroup
	for i, task := range tasks {
		wg.Go(func() { errs[i] = task() })
	}
	wg.Wait()
	return errors.Join(errs...)
}
