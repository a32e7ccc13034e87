package experiment

import (
	"fmt"
	"io"
	"math"
	"strings"
	"text/tabwriter"
	"time"

	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/words"
)

// Outline describes a plan: as JSON to programs, and by Print to people.
type Outline struct {
	Experiment string `json:"experiment"`
	// Trials of all blocks. If AtMost is set, a run may end after fewer blocks.
	Trials int  `json:"trials"`
	Blocks int  `json:"blocks"`
	AtMost bool `json:"atMost,omitempty"`
	// Done are the trials on record, if a run is resumed. It does not repeat them.
	Done int `json:"done,omitempty"`
	// Periods of a switch-back design; 0 if nothing is switched.
	Periods int `json:"periods,omitempty"`
	// Mesh describes the rounds of a mesh; "" without one.
	Mesh string `json:"mesh,omitempty"`
	// Time is for people; Seconds is about how long the plan takes, without switch commands.
	Time     string   `json:"time"`
	Seconds  float64  `json:"seconds"`
	Networks []string `json:"networks"`
	// Congestion describes the congestion control of the tools other than the engine; "" if there is no such tool.
	Congestion string            `json:"congestionControl,omitempty"`
	Variants   []OutlineVariant  `json:"variants"`
	Workloads  []OutlineWorkload `json:"workloads"`
}

// OutlineVariant describes a variant of a plan.
type OutlineVariant struct {
	Name string `json:"name"`
	Path string `json:"path"`
	// Settings of the path and the accelerators, such as "rps nic cpus all".
	Settings []string `json:"settings,omitempty"`
	Versus   string   `json:"versus,omitempty"`
	// Switch has the commands of the state that the variant needs, if it is the first variant of that state.
	Switch []string `json:"switch,omitempty"`
	// SettleSeconds is how long the run waits after these commands.
	SettleSeconds float64 `json:"settleSeconds,omitempty"`
}

// OutlineWorkload describes a workload of a plan.
type OutlineWorkload struct {
	Name    string `json:"name"`
	Traffic string `json:"traffic"`
	Tool    string `json:"tool"`
	Pairs   []int  `json:"pairs"`
	// WarmupSeconds and WindowSeconds of each trial.
	WarmupSeconds float64 `json:"warmupSeconds"`
	WindowSeconds float64 `json:"windowSeconds"`
}

// Outline describes the plan.
func (p *Plan) Outline() Outline {
	o := Outline{
		Experiment: p.exp.Metadata.Name, Trials: p.Blocks * p.trials(), Blocks: p.Blocks, AtMost: p.Auto, Periods: p.Blocks * len(p.states),
		Time: p.TimeText(), Seconds: p.Time().Seconds(), Congestion: p.congestion(),
	}
	if p.exp.Spec.Mesh != nil {
		o.Mesh = fmt.Sprintf("%d nodes, each with every other one in both directions: %d rounds of %d pairs", p.exp.Nodes(), p.exp.Rounds(), p.exp.Nodes()/2)
	}
	for i := range p.topology.Fabrics() {
		o.Networks = append(o.Networks, p.topology.Describe(i))
	}
	for _, v := range p.exp.Spec.Variants {
		path := p.exp.PathOf(v)
		o.Variants = append(o.Variants, OutlineVariant{Name: v.Name, Path: path.String(), Settings: append(path.Settings(), v.Settings()...), Versus: p.exp.BaselineOf(v)})
		if outlined := &o.Variants[len(o.Variants)-1]; p.needsSwitch(v) {
			outlined.Switch, outlined.SettleSeconds = CommandLines(v.Switch), time.Duration(v.Switch.Settle).Seconds()
		}
	}
	for _, wl := range p.exp.Spec.Workloads {
		t := wl.Traffic()
		o.Workloads = append(o.Workloads, OutlineWorkload{
			Name: wl.Name, Traffic: traffic(wl), Tool: t.Tool, Pairs: p.exp.PairsOf(wl),
			WarmupSeconds: time.Duration(t.Warmup).Seconds(), WindowSeconds: time.Duration(t.Duration).Seconds(),
		})
	}
	return o
}

// needsSwitch reports whether v is the first variant of a state that commands switch to.
func (p *Plan) needsSwitch(v spec.Variant) bool {
	for _, state := range p.states {
		if state[0].Name == v.Name {
			return v.Switch != nil
		}
	}
	return false
}

// Print shows a plan to a person.
func (o Outline) Print(w io.Writer) error {
	upTo := ""
	if o.AtMost {
		upTo = "at most "
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(tw, "experiment\t%s\n", o.Experiment)
	if o.Periods == 0 {
		fmt.Fprintf(tw, "trials\t%s%d: %s%s of %d\n", upTo, o.Trials, upTo, words.Count(o.Blocks, "block"), o.Trials/o.Blocks)
	} else {
		fmt.Fprintf(tw, "trials\t%d in %d periods of a switch-back design\n", o.Trials, o.Periods)
	}
	if o.Done > 0 {
		fmt.Fprintf(tw, "done\t%s\n", words.Count(o.Done, "trial"))
	}
	if o.Mesh != "" {
		fmt.Fprintf(tw, "mesh\t%s\n", o.Mesh)
	}
	fmt.Fprintf(tw, "time\t%s\n", o.Time)
	for _, network := range o.Networks {
		fmt.Fprintf(tw, "network\t%s\n", network)
	}
	if o.Congestion != "" {
		fmt.Fprintf(tw, "congestion control\t%s\n", o.Congestion)
	}
	fmt.Fprintf(tw, "\nVARIANT\tPATH\tSETTINGS\tVERSUS\n")
	for _, v := range o.Variants {
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\n", v.Name, v.Path, orDash(strings.Join(v.Settings, "; ")), orDash(v.Versus))
	}
	o.printSwitches(tw)
	fmt.Fprintf(tw, "\nWORKLOAD\tTRAFFIC\tTOOL\tPAIRS\tWARMUP\tWINDOW\n")
	for _, wl := range o.Workloads {
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\n", wl.Name, wl.Traffic, wl.Tool, strings.Trim(fmt.Sprint(wl.Pairs), "[]"), seconds(wl.WarmupSeconds), seconds(wl.WindowSeconds))
	}
	return tw.Flush()
}

func (o Outline) printSwitches(w io.Writer) {
	if o.Periods == 0 {
		return
	}
	fmt.Fprintf(w, "\nSWITCH\tCOMMAND\n")
	for _, v := range o.Variants {
		if len(v.Switch) == 0 {
			continue
		}
		fmt.Fprintf(w, "%s\t%s\n", v.Name, strings.Join(v.Switch, "\n\t"))
		if v.SettleSeconds > 0 {
			fmt.Fprintf(w, "\tthen wait %s\n", seconds(v.SettleSeconds))
		}
	}
}

func seconds(s float64) time.Duration {
	return time.Duration(math.Round(s * float64(time.Second)))
}

func orDash(s string) string {
	if s == "" {
		return "–"
	}
	return s
}
