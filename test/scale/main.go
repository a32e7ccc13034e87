//go:build linux

// Command scale measures the load of a large cluster's agents on its API server: make scale. It starts a real API server
// with etcd (test/cluster), and creates nodes, policies and pods. It runs the agents' own code for clusters
// (internal/agent/kube), each with its own connection; only the node below an agent is synthetic. One more agent is the
// program that users install, on a node with real devices (solo.go). The requests are counted from the API server's audit
// log and metrics.
//
// With -scenario it repeats a published test of Cilium's agent (published.go) with slipstream's.
//
// Unlike a large cluster, it has no controllers, and only the heartbeats of kubelets.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"k8s.io/klog/v2"

	"slipstream.dev/internal/stats"
	"slipstream.dev/test/cluster"
)

type options struct {
	nodes, pods, policies int
	blocks                int
	idle, step            time.Duration
	agent, dir, out       string
	scenario              string // "" for all limits, else one of allPublished
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var o options
	flag.IntVar(&o.nodes, "nodes", 100, "how many nodes, with an agent each")
	flag.IntVar(&o.pods, "pods", 0, "how many pods are created, 100 a node if 0")
	flag.IntVar(&o.policies, "policies", 20, "how many policies there are for nodes that do not exist")
	flag.IntVar(&o.blocks, "blocks", 4, "how many blocks measure the cluster once with agents and once without")
	flag.DurationVar(&o.idle, "idle", time.Minute, "how long the idle cluster is watched")
	flag.DurationVar(&o.step, "step", time.Minute, "the least time in which the pods of half a block are created")
	flag.StringVar(&o.agent, "agent", "bin/slipstream", "the program of the agent whose CPU time and memory are measured")
	flag.StringVar(&o.dir, "dir", "/dev/shm", "where etcd and logs are, on a tmpfs")
	flag.StringVar(&o.out, "o", "", "file for the result, in JSON")
	flag.StringVar(&o.scenario, "scenario", "", "a published test to repeat in place of the limits: pods, policies or services")
	figures := flag.String("draw", "", "draw the results in the given files, of published tests, and nothing else: the beginning of the figures' names")
	flag.Parse()
	if *figures != "" {
		exitOn(drawResults(*figures, flag.Args()))
		return
	}
	if o.pods == 0 {
		o.pods = 100 * o.nodes
	}
	if o.blocks < 2 {
		fmt.Fprintf(os.Stderr, "scale: -blocks is %d: an interval takes at least 2\n", o.blocks)
		os.Exit(2)
	}
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	r, err := run(ctx, o, os.Stderr)
	// Print the phases that were measured before a failure.
	if len(r.Phases) > 0 {
		err = errors.Join(err, r.print(os.Stdout))
	}
	if err == nil {
		err = errors.Join(r.write(o.out), r.check())
	}
	exitOn(err)
}

func exitOn(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "scale:", err)
		os.Exit(1)
	}
}

// run measures all scenarios, and logs the beginning of each.
func run(ctx context.Context, o options, log io.Writer) (r result, err error) {
	r = result{Scenario: o.scenario, Nodes: o.nodes, Pods: o.pods, Policies: o.policies}
	todo := scenarios(o.blocks)
	if o.scenario != "" {
		t, err := publishedOf(o.scenario)
		if err != nil {
			return r, err
		}
		todo, r.Pods = t.scenarios(), t.podsPerNode*(o.nodes+1)
	}
	dir, err := os.MkdirTemp(o.dir, "slipstream-scale-")
	if err != nil {
		return r, fmt.Errorf("make a folder for etcd: %w", err)
	}
	defer os.RemoveAll(dir)
	plane, err := cluster.StartPlane(ctx, dir, auditPolicy, log)
	if err != nil {
		return r, err
	}
	defer plane.Stop()
	f, err := newFleet(ctx, plane, filepath.Join(dir, "token"), o, slog.New(slog.NewTextHandler(io.Discard, nil)))
	if err != nil {
		return r, err
	}
	defer f.stop()
	defer f.startHeartbeats(ctx)()
	for _, s := range todo {
		fmt.Fprintf(log, "%s: %s\n", time.Now().Format(time.TimeOnly), s.name)
		p, err := f.measure(ctx, s)
		if err != nil {
			return r, fmt.Errorf("%s: %w", s.name, err)
		}
		r.Phases = append(r.Phases, p)
	}
	if o.scenario == "" {
		r.compare()
	}
	return r, nil
}

// result contains the measurements of a run.
type result struct {
	// Scenario is the name of a published test; empty for the run of all limits.
	Scenario string  `json:"scenario,omitempty"`
	Nodes    int     `json:"nodes"`
	Pods     int     `json:"pods"`
	Policies int     `json:"policies"`
	Phases   []phase `json:"phases"`
	// Shares are the agents' shares of the API server's CPU time.
	Shares []share `json:"shares"`
}

// share is the agents' share of the API server's CPU time in a scenario.
type share struct {
	Name string `json:"name"`
	// Estimate is 1 minus the ratio of the API server's CPU time without agents to that with them, in the same blocks.
	Estimate float64    `json:"estimate"`
	CI95     [2]float64 `json:"ci95"`
	// Profile is the same share, derived from the API server's profile, which attributes CPU time to kinds of work.
	Profile     float64    `json:"profile"`
	ProfileCI95 [2]float64 `json:"profileCI95"`
	Blocks      int        `json:"blocks"`
	Most        float64    `json:"most"`
}

// compare computes the shares.
func (r *result) compare() {
	for _, s := range []share{{Name: idleWith, Most: idleShare}, {Name: podsWith, Most: podShare}} {
		var ratios, profiles []float64
		with, without := r.phases(s.Name), r.phases(s.Name+withoutAgents)
		for i := range min(len(with), len(without)) {
			w, wo := with[i], without[i]
			ratios = append(ratios, math.Log(wo.ServerCPU*wo.Seconds/(w.ServerCPU*w.Seconds)))
			agents := traffic{w.requests(""), w.requests("patch "), w.All.Events - wo.All.Events} // the API server's own watches get the others
			profiles = append(profiles, w.Work.agentsShare(agents, w.All))
		}
		s.Blocks = len(ratios)
		mean, ci := stats.Mean(ratios)
		s.Estimate, s.CI95 = 1-math.Exp(mean), [2]float64{1 - math.Exp(ci[1]), 1 - math.Exp(ci[0])}
		s.Profile, s.ProfileCI95 = stats.Mean(profiles)
		r.Shares = append(r.Shares, s)
	}
}

// soloMemory returns the real agent's memory in MiB, as means over phases: while the first half of the pods is created,
// and while the second half is. It includes phases with and without the other agents. A phase shorter than a minute would
// depend on when the agent returns memory.
func (r *result) soloMemory() (first, second float64) {
	var all []float64
	for _, p := range r.Phases {
		if strings.TrimSuffix(p.Name, withoutAgents) == podsWith && p.Seconds >= 60 {
			all = append(all, p.SoloMiB)
		}
	}
	if len(all) < 2 {
		return 0, 0
	}
	first, _ = stats.Mean(all[:len(all)/2])
	second, _ = stats.Mean(all[len(all)/2:])
	return first, second
}

// phases returns the phases with a name.
func (r *result) phases(name string) (all []phase) {
	for _, p := range r.Phases {
		if p.Name == name {
			all = append(all, p)
		}
	}
	return all
}

// phase contains the measurements of one scenario. Requests and writes are only those of the agents.
type phase struct {
	Name    string  `json:"name"`
	Seconds float64 `json:"seconds"`
	// Pods is how many pods there were at the end of a phase that created some; 0 for other phases.
	Pods int `json:"pods,omitempty"`
	// Requests are counted by verb and resource, and Refused ones by status code.
	Requests map[string]int `json:"requests"`
	Refused  map[int]int    `json:"refused"`
	// Writes of NodeAccelerations, of policies, and of events.
	StatusWrites int `json:"statusWrites"`
	PolicyWrites int `json:"policyWrites"`
	// WorstSecond is the largest number of requests in a second, and MeanPerSecond the mean.
	WorstSecond   int     `json:"worstSecond"`
	MeanPerSecond float64 `json:"meanPerSecond"`
	// Events counts the events that the API server sent to watches of resources that agents watch.
	Events int `json:"events"`
	// Watches is the number of open watches at the end.
	Watches int `json:"watches"`
	// All counts everything that the API server answered and sent, to any client.
	All traffic `json:"all"`
	// Work is the API server's CPU time by kind of work; nil if it was not profiled.
	Work *work `json:"work,omitempty"`
	// ServerCPU is the API server's CPU time in seconds per second, and ServerMiB its memory at the end.
	ServerCPU float64 `json:"serverCPU"`
	ServerMiB float64 `json:"serverMiB"`
	// SoloMillicores is the CPU time of the real agent. SoloMiB and SoloMostMiB are the mean and the maximum of its resident
	// memory in the phase.
	SoloMillicores float64 `json:"soloMillicores"`
	SoloMiB        float64 `json:"soloMiB"`
	SoloMostMiB    float64 `json:"soloMostMiB"`
	// Done holds quantiles of how long agents took to finish the scenario, in seconds: p50, p99, the maximum.
	Done []float64 `json:"done,omitempty"`
	// Problems names the limits that were exceeded.
	Problems []string `json:"problems,omitempty"`
}

// requests counts the requests whose verb and resource begin with prefix.
func (p phase) requests(prefix string) (n int) {
	for what, of := range p.Requests {
		if strings.HasPrefix(what, prefix) {
			n += of
		}
	}
	return n
}

// write writes the result to a file, unless its name is empty.
func (r result) write(file string) error {
	if file == "" {
		return nil
	}
	text, err := json.MarshalIndent(r, "", "  ")
	if err == nil {
		err = os.WriteFile(file, append(text, '\n'), 0o644)
	}
	if err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	return nil
}

func (r result) print(to io.Writer) error {
	w := tabwriter.NewWriter(to, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "%d nodes\ts\trequests\t/s\tworst s\tstatus\tpolicy\trefused\tevents\twatches\tAPI CPU\tMiB\tagent mc\tMiB\tmost\tp50 s\tp99 s\tlast s\t\n", r.Nodes)
	for _, p := range r.Phases {
		refused := 0
		for _, n := range p.Refused {
			refused += n
		}
		fmt.Fprintf(w, "%s\t%.0f\t%d\t%.1f\t%d\t%d\t%d\t%d\t%d\t%d\t%.3f\t%.0f\t%.1f\t%.0f\t%.0f\t", p.Name, p.Seconds, p.requests(""), p.MeanPerSecond, p.WorstSecond, p.StatusWrites,
			p.PolicyWrites, refused, p.Events, p.Watches, p.ServerCPU, p.ServerMiB, p.SoloMillicores, p.SoloMiB, p.SoloMostMiB)
		for i := range 3 {
			if i < len(p.Done) {
				fmt.Fprintf(w, "%.1f", p.Done[i])
			}
			fmt.Fprint(w, "\t")
		}
		fmt.Fprintln(w)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if r.Scenario != "" {
		fmt.Fprintf(to, "the agent of %s, for each pod of its node: %+.4f millicores, %+.4f MiB\n", soloNode, r.slope(millicores), r.slope(mib))
	}
	for _, s := range r.Shares {
		fmt.Fprintf(to, "the agents' share of the API server's CPU, %s: by comparison %.1f%% (%.1f–%.1f), by profile %.1f%% (%.1f–%.1f), n = %d blocks\n", s.Name,
			100*s.Estimate, 100*s.CI95[0], 100*s.CI95[1], 100*s.Profile, 100*s.ProfileCI95[0], 100*s.ProfileCI95[1], s.Blocks)
	}
	return nil
}

// check returns an error that names the exceeded limits.
func (r result) check() (err error) {
	for _, p := range r.Phases {
		for _, problem := range p.Problems {
			err = errors.Join(err, fmt.Errorf("%s: %s", p.Name, problem))
		}
	}
	if first, second := r.soloMemory(); second-first > soloGrowth {
		err = errors.Join(err, fmt.Errorf("the agent of %s has %.1f MiB while the first half of the pods is created and %.1f in the second, want at most %.0f more", soloNode, first, second, soloGrowth))
	}
	for _, s := range r.Shares {
		if max(s.CI95[0], s.ProfileCI95[0]) > s.Most {
			err = errors.Join(err, fmt.Errorf("%s: the agents take %.1f%% of the API server's CPU, by its profile %.1f%%; want at most %.0f%%", s.Name, 100*s.Estimate, 100*s.Profile, 100*s.Most))
		}
	}
	return err
}
