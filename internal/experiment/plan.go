package experiment

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/topology"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/words"
)

// Plan says which trials an experiment runs, on which networks, and how long that takes.
type Plan struct {
	exp *spec.Experiment
	// Blocks to run. If Auto is set, blocks are added as needed, and this is the limit.
	Blocks int
	Auto   bool
	// Cells of a block, in the experiment's order. Each runs Repeats times.
	Cells   []Cell
	Repeats int
	// states has the variants, grouped by the state of the machines that they need. Switches change the
	// state.
	states   [][]spec.Variant
	topology *topology.Topology
}

// Cell is one variant × workload × pairs.
type Cell struct {
	Variant  spec.Variant
	Workload spec.Workload  // with the variant's tool
	Beside   *spec.Workload // with the times of Workload, or nil
	Pairs    int
	Fabric   int // index of its network in the topology
	// Period and Repeat are as in record.Trial, 0 where nothing is switched. Round is 0 without a mesh.
	Period, Repeat, Round int
}

// deadTime is the approximate time that a trial takes in addition to warm-up and window.
const deadTime = 250 * time.Millisecond

// startTime is the approximate time that it takes to bring a network up and take it down.
const startTime = 3 * time.Second

// New plans an experiment, which is valid and has its defaults.
func New(exp *spec.Experiment) *Plan {
	p := &Plan{exp: exp, Blocks: exp.Spec.Runs.N, Auto: exp.Spec.Runs.Auto, topology: topology.Of(exp), Repeats: exp.Repeats()}
	if exp.Switches() {
		p.states = exp.States()
	}
	if p.Auto {
		p.Blocks = exp.Spec.Runs.Max
	}
	for _, w := range exp.Spec.Workloads {
		for _, pairs := range exp.PairsOf(w) {
			for round := range exp.Rounds() {
				if exp.Spec.Mesh != nil {
					round++
				}
				for _, v := range exp.Spec.Variants {
					p.Cells = append(p.Cells, Cell{Variant: v, Workload: exp.WorkloadFor(v, w), Beside: exp.BesideOf(v, w), Pairs: pairs, Round: round, Fabric: p.topology.FabricOf(v)})
				}
			}
		}
	}
	return p
}

// Periods returns the periods of block b, counted from 1. There is only one unless something is switched.
func (p *Plan) Periods(b int) []Period {
	rng := rand.New(rand.NewPCG(p.exp.Spec.Seed, uint64(b)))
	if p.states == nil {
		return []Period{{Cells: shuffled(rng, p.Cells, len(p.exp.Spec.Variants))}}
	}
	var periods []Period
	for i, state := range p.order(b) {
		period := Period{State: state}
		for repeat := 1; repeat <= p.Repeats; repeat++ {
			for _, c := range shuffled(rng, p.cellsOf(state), len(p.states[state])) {
				c.Period, c.Repeat = (b-1)*len(p.states)+i+1, repeat
				period.Cells = append(period.Cells, c)
			}
		}
		periods = append(periods, period)
	}
	return periods
}

// shuffled returns cells in random order. variants is the size of a group: consecutive cells with the same workload,
// number of pairs and round. The order of the groups is random, and so is the order within each. What is compared
// stays close in time.
func shuffled(rng *rand.Rand, cells []Cell, variants int) []Cell {
	var groups [][]Cell
	for group := range slices.Chunk(cells, variants) {
		groups = append(groups, slices.Clone(group))
	}
	rng.Shuffle(len(groups), func(i, j int) { groups[i], groups[j] = groups[j], groups[i] })
	var order []Cell
	for _, g := range groups {
		rng.Shuffle(len(g), func(i, j int) { g[i], g[j] = g[j], g[i] })
		order = append(order, g...)
	}
	return order
}

// Time estimates how long the plan takes; for Auto, at most.
func (p *Plan) Time() time.Duration {
	_, settle := p.switching()
	return time.Duration(len(p.topology.Fabrics()))*startTime + time.Duration(p.Blocks)*p.blockTime() + settle
}

// TimeText is Time for people: "4 min", "at most 6 h 31 min".
func (p *Plan) TimeText() string {
	most := p.Auto
	for _, c := range p.Cells {
		most = most || c.Workload.Traffic().Requests > 0 // which end the window when they are done
	}
	text := p.Time().Round(time.Second).String()
	if minutes := int(p.Time().Round(time.Minute).Minutes()); minutes > 0 {
		text = fmt.Sprintf("%d min", minutes%60)
		if hours := minutes / 60; hours > 0 {
			text = fmt.Sprintf("%d h %s", hours, text)
		}
	}
	if most {
		text = "at most " + text
	}
	if commands, _ := p.switching(); commands > 0 {
		text += fmt.Sprintf(", plus about %d switch commands", commands) // without a seed the order is drawn anew
	}
	return text
}

func (p *Plan) blockTime() time.Duration {
	var sum time.Duration
	for _, c := range p.Cells {
		sum += time.Duration(p.Repeats) * c.time()
	}
	return sum
}

// trials returns the number of trials in a block.
func (p *Plan) trials() int { return p.Repeats * len(p.Cells) }

func (c Cell) time() time.Duration {
	t := c.Workload.Traffic()
	return time.Duration(t.Warmup) + time.Duration(t.Duration) + deadTime
}

// connections returns how many connections a trial opens in its window at a node, 0 if that is not known beforehand. In a round of a
// mesh, a node has one pair.
func (c Cell) connections() int {
	t := c.Workload.Traffic()
	switch {
	case t.KeepAlive:
		return 0
	case c.Round > 0:
		return t.Requests
	}
	return t.Requests * c.Pairs
}

// preparation bounds how long the parts of a trial may rightly take to get ready, beyond what any trial takes.
func (c Cell) preparation() time.Duration {
	switch {
	case c.connections() > 0:
		return place.RoomWait
	case c.Workload.Traffic().Tool == spec.ToolPostgres:
		return place.PrepareWait
	}
	return 0
}

// congestion describes the congestion control of the tools other than the engine; "" if no workload uses such a tool.
func (p *Plan) congestion() string {
	others := slices.ContainsFunc(p.Cells, func(c Cell) bool {
		t := c.Workload.Traffic()
		return t.Tool != spec.ToolNative && t.Protocol == "tcp"
	})
	switch lab := p.exp.Spec.Target.Lab; {
	case !others:
		return ""
	case lab != nil:
		return lab.CongestionControl + ", for the engine and every other tool; trials record what each tool used"
	}
	return "the machines' default, for the engine and every other tool: the run sets none; trials record what each tool used"
}

// size returns a number of bytes as text: "64 B", "128 KiB".
func size(bytes spec.Bytes) string {
	if bytes > 0 && bytes%1024 == 0 {
		return fmt.Sprintf("%d KiB", bytes/1024)
	}
	return fmt.Sprintf("%d B", bytes)
}

// traffic describes a workload in words.
func traffic(w spec.Workload) string {
	if w.Beside != "" {
		other := w.Beside
		w.Beside = ""
		return traffic(w) + ", and beside it " + other
	}
	t := w.Traffic()
	text := fmt.Sprintf("%s %s, IPv%d, ", w.Kind(), t.Protocol, t.IP)
	if !t.Page {
		text += fmt.Sprintf("%s, %s", size(t.Size), words.Count(t.Connections, "connection"))
		if w.Application != nil {
			text += fmt.Sprintf(", %s, pipeline %d", t.Operation, t.Pipeline)
		}
		return text
	}
	text += fmt.Sprintf("page with script %d B", t.Size)
	if t.Image > 0 {
		text += fmt.Sprintf(" and image %d B", t.Image)
	}
	return text + fmt.Sprintf(", %d users/s", t.Rate)
}
