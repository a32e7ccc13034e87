//go:build linux

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"slipstream.dev/test/cluster"
)

// scenario is a change in the cluster to measure.
type scenario struct {
	name string
	// do makes it happen. It returns how long each agent took, if the scenario measures that.
	do func(context.Context, *fleet) ([]time.Duration, error)
	// limits returns the limits that were exceeded.
	limits func(*fleet, phase) []string
}

// measure runs a scenario and measures it.
func (f *fleet) measure(ctx context.Context, s scenario) (p phase, err error) {
	p.Name = s.name
	log, err := os.Open(f.plane.AuditLog())
	if err != nil {
		return p, err
	}
	defer log.Close()
	if _, err := log.Seek(0, io.SeekEnd); err != nil {
		return p, err
	}
	server := f.plane.Server()
	before, err := cluster.UsageOf(server)
	if err != nil {
		return p, err
	}
	countsBefore, err := f.counts(ctx)
	if err != nil {
		return p, err
	}
	soloBefore, err := f.solo.usage()
	if err != nil {
		return p, err
	}
	memory := f.solo.sampleMemory()
	began := time.Now()
	profile := f.profile(ctx, s.name)
	created := f.created
	took, err := s.do(ctx, f)
	p.SoloMiB, p.SoloMostMiB = memory()
	if err != nil {
		return p, err
	}
	p.Seconds = time.Since(began).Seconds()
	if f.created > created {
		p.Pods = f.created
	}
	if p.Work, err = profile(); err != nil {
		return p, err
	}
	if server != f.plane.Server() {
		server, before, countsBefore = f.plane.Server(), cluster.Usage{}, counts{} // the new process's counters start at zero
	}
	after, err := cluster.UsageOf(server)
	if err != nil {
		return p, err
	}
	p.ServerCPU, p.ServerMiB = (after.CPU-before.CPU).Seconds()/p.Seconds, after.MiB
	soloAfter, err := f.solo.usage()
	if err != nil {
		return p, err
	}
	p.SoloMillicores = 1000 * (soloAfter.CPU - soloBefore.CPU).Seconds() / p.Seconds
	now, err := f.counts(ctx)
	if err != nil {
		return p, err
	}
	p.Events, p.Watches = now.events-countsBefore.events, now.watches-f.own
	p.All = now.all.since(countsBefore.all)
	if err := p.audit(log, began); err != nil {
		return p, err
	}
	p.Done = quantiles(took)
	p.Problems = soloLimits(p)
	if s.limits != nil {
		p.Problems = append(p.Problems, s.limits(f, p)...)
	}
	return p, nil
}

// audit counts the agents' requests since a time.
func (p *phase) audit(log io.Reader, began time.Time) error {
	p.Requests, p.Refused = make(map[string]int), make(map[int]int)
	perSecond := make(map[int64]int)
	lines := bufio.NewReader(log)
	for {
		line, err := lines.ReadBytes('\n')
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		var e struct {
			Stage, Verb              string
			RequestReceivedTimestamp time.Time
			ObjectRef                struct{ Resource, Subresource string }
			ResponseStatus           struct{ Code int }
		}
		if err := json.Unmarshal(line, &e); err != nil {
			continue // a line that a killed server did not complete
		}
		// A watch is logged when it starts and when it ends. Only the start counts, because a watch that ends may have
		// started long ago.
		started := e.Stage == "ResponseStarted"
		if e.RequestReceivedTimestamp.Before(began) || (e.Verb == "watch") != started && e.ResponseStatus.Code < 300 {
			continue
		}
		what := e.Verb + " " + e.ObjectRef.Resource
		if e.ObjectRef.Subresource != "" {
			what += "/" + e.ObjectRef.Subresource
		}
		p.Requests[what]++
		perSecond[e.RequestReceivedTimestamp.Unix()]++
		if e.ResponseStatus.Code >= 300 {
			p.Refused[e.ResponseStatus.Code]++
		}
	}
	total := 0
	for _, n := range perSecond {
		p.WorstSecond = max(p.WorstSecond, n)
		total += n
	}
	p.MeanPerSecond = float64(total) / p.Seconds
	p.StatusWrites, p.PolicyWrites = p.Requests["patch nodeaccelerations/status"], p.Requests["patch accelerationpolicies/status"]
	return nil
}

// traffic counts what an API server answers and sends.
type traffic struct {
	// Requests include Patches.
	Requests int `json:"requests"`
	Patches  int `json:"patches"`
	Events   int `json:"events"`
}

func (t traffic) since(before traffic) traffic {
	return traffic{t.Requests - before.Requests, t.Patches - before.Patches, t.Events - before.Events}
}

// counts are the API server's own counters, since it started.
type counts struct {
	all traffic
	// events and open watches of the kinds of objects that agents watch, or could watch.
	events, watches int
}

// watchedByAgents are the metric labels of these kinds.
var watchedByAgents = []string{`resource="nodes"`, `resource="pods"`, `resource="accelerationpolicies"`, `resource="daemonsets"`,
	`kind="Node"`, `kind="Pod"`, `kind="AccelerationPolicy"`, `kind="DaemonSet"`}

func (f *fleet) counts(ctx context.Context) (c counts, err error) {
	text, err := f.admin.Discovery().RESTClient().Get().AbsPath("/metrics").Do(ctx).Raw()
	if err != nil {
		return c, fmt.Errorf("read the API server's metrics: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), "} ")
		n, err := strconv.ParseFloat(value, 64)
		if err != nil {
			continue
		}
		ofAgents := slices.ContainsFunc(watchedByAgents, func(label string) bool { return strings.Contains(name, label) })
		switch {
		case strings.HasPrefix(name, "apiserver_request_total{"):
			c.all.Requests += int(n)
			if strings.Contains(name, `verb="PATCH"`) || strings.Contains(name, `verb="APPLY"`) {
				c.all.Patches += int(n)
			}
		case strings.HasPrefix(name, "apiserver_watch_events_total{"):
			c.all.Events += int(n)
			if ofAgents {
				c.events += int(n)
			}
		case strings.HasPrefix(name, "apiserver_longrunning_requests{") && strings.Contains(name, `verb="WATCH"`) && ofAgents:
			c.watches += int(n)
		}
	}
	return c, nil
}

// quantiles returns the p50, the p99 and the maximum, in seconds.
func quantiles(all []time.Duration) []float64 {
	if len(all) == 0 {
		return nil
	}
	slices.Sort(all)
	at := func(q float64) float64 { return all[min(len(all)-1, int(q*float64(len(all))))].Seconds() }
	return []float64{at(0.5), at(0.99), at(1)}
}
