package experiment

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// network is a Network that is up, with its workers.
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
			_, err := n.openWorker(ctx, key, place)
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
		at, as := end{node, controlOf(node)}, node
		if node.Unprivileged { // a pod on it sees most of the facts
			all := n.Places()
			if i := slices.IndexFunc(all, func(p place.Place) bool { return p.Kind == place.Pod && p.Node == node.Name }); i >= 0 {
				pod := all[i]
				at, as.Kind = end{pod, workerKey{pod.Name, podSlot}}, place.Pod
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

func (n *network) factsOf(ctx context.Context, at end, as place.Place) (record.Node, error) {
	w, err := n.openWorker(ctx, at.key, at.place)
	if err != nil {
		return record.Node{}, err
	}
	return w.Describe(ctx, as)
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

// downTime bounds how long a machine may still answer after a switch that restarts it.
const downTime = time.Minute

// restart starts the workers again after a switch, which may restart the machines.
func (n *network) restart(ctx context.Context, p *Plan, fabric int) error {
	returning, ok := n.Network.(Reconnector)
	if !ok {
		return n.start(ctx, p, fabric)
	}
	for deadline := time.Now().Add(downTime); ; {
		if err := awaitMachines(ctx, returning, p); err != nil {
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

// end is a place with the worker that acts in it: one end of a pair, or a node.
type end struct {
	place place.Place
	key   workerKey
}

// pairEnds is a pair with its workers.
type pairEnds struct {
	place.Pair
	client  end
	servers []end
}

// pairs returns the pairs of a cell in their places. In a mesh these depend on the block.
func (n *network) pairs(block int, c Cell) ([]pairEnds, error) {
	all := make([]pairEnds, c.Pairs)
	for i := range all {
		number, slot := i, i
		if c.Round > 0 { // no node has two pairs at a time
			number, slot = ((block-1)*n.rounds+c.Round-1)*c.Pairs+i, 0
		}
		p, err := n.Pair(c.Variant, number, c.Workload.Traffic().IP)
		if err != nil {
			return nil, fmt.Errorf("workload %s: %w", c.Workload.Name, err)
		}
		endAt := func(p place.Place, slot int) end {
			if p.Kind == place.Pod {
				slot = podSlot
			}
			return end{p, workerKey{p.Name, slot}}
		}
		all[i] = pairEnds{Pair: p, client: endAt(p.Client, 2*slot)}
		for _, server := range p.Servers {
			all[i].servers = append(all[i].servers, endAt(server, 2*slot+1))
		}
	}
	return all, nil
}

// beside returns the pair with workers of its own for the workload beside, in the same places.
func (p pairEnds) beside() pairEnds {
	p.client.key.slot += besideSlots
	p.servers = slices.Clone(p.servers)
	for i := range p.servers {
		p.servers[i].key.slot += besideSlots
	}
	return p
}

// steered returns the places in which the accelerators of a cell act, with the workers that control them: the nodes and the
// pods of its pairs, or only those of one side.
func (n *network) steered(c Cell, pairs []pairEnds) []end {
	var ends, in []end
	for _, pair := range pairs {
		if c.Variant.On != spec.SideServer {
			ends = append(ends, pair.client)
		}
		if c.Variant.On != spec.SideClient {
			ends = append(ends, pair.servers...)
		}
	}
	add := func(p place.Place) {
		if len(v1alpha1.AcceleratorsFor(c.Variant.Accelerate, p.Kind == place.Pod)) > 0 {
			in = append(in, end{p, controlOf(p)})
		}
	}
	for _, node := range n.nodes {
		if c.Variant.On == "" || slices.ContainsFunc(ends, func(end end) bool { return end.place.Node == node.Name }) {
			add(node)
		}
	}
	for _, end := range ends {
		if end.place.Kind == place.Pod {
			add(end.place)
		}
	}
	return in
}

// workerKey identifies a worker of a place. A node has one for control and, for native traffic, one for each end
// of a pair. A pod has one of its own too, so that the processes are alike on every path.
type workerKey struct {
	place string
	slot  int
}

// Slots of workers other than those for a pair's ends on a node.
const (
	podSlot     = -1 // a pod's
	controlSlot = -2
	besideSlots = 1 << 16 // added to the slot of an end, for the workload beside
)

// controlOf returns the worker that samples and steers a place: a pod's own, unless the pod is unprivileged.
func controlOf(p place.Place) workerKey {
	if p.Kind == place.Pod && !p.Unprivileged {
		return workerKey{p.Name, podSlot}
	}
	return workerKey{p.Name, controlSlot}
}

func (k workerKey) use() place.Use {
	if k.slot == controlSlot {
		return place.ForControl
	}
	return place.ForTraffic
}

// openWorker returns the worker of a place. It starts one if there is none, or if it has died. The first Revert of a
// new worker restores what a dead predecessor has left.
func (n *network) openWorker(ctx context.Context, key workerKey, place place.Place) (Worker, error) {
	if w := n.workerOf(key); w != nil && !w.Gone() {
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

// workerOf returns a worker that was started and has not been dropped, or nil.
func (n *network) workerOf(key workerKey) Worker {
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

func (n *network) close() error {
	err := n.stop()
	limit := restoreTime
	if n, ok := n.Network.(interface{ CloseTime() time.Duration }); ok {
		limit = max(limit, n.CloseTime())
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	return errors.Join(err, n.Network.Close(ctx))
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
