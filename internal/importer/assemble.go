package importer

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"slipstream.dev/internal/experiment"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/traffic/tools"
	"slipstream.dev/internal/words"
)

// part is one run from a file.
type part struct {
	*file
	run tools.Run
}

// trial consists of the parts that were measured together.
type trial struct {
	key
	traffic []part // clients, by pair
	cpus    []part // nodes
}

// key is common to all clients of a trial. pairs is -1 until they are counted, unless the names say
// it.
type key struct {
	variant, workload string
	pairs, number     int
}

// assemble makes the trials from files, and their experiment. It returns what is known of the workloads.
func (r *Result) assemble(p *pattern, files []*file, o Options) (map[string]*tools.Reading, error) {
	var bad problems
	trials := clients(files, p, &bad)
	cpus(files, trials, &bad)
	if err := bad.err(); err != nil {
		return nil, err
	}
	if len(trials) == 0 {
		return nil, fmt.Errorf("no file has traffic: those of mpstat have CPUs only")
	}
	merged := merge(trials, &bad)
	if p.has(blockField) {
		checkInterleaved(trials, &bad)
	}
	if err := bad.err(); err != nil {
		return nil, err
	}
	var workloads []spec.Workload
	for _, name := range slices.Sorted(maps.Keys(merged)) {
		w := merged[name].Workload
		w.Name = name
		workloads = append(workloads, w)
	}
	if err := r.experiment(p, trials, workloads, o); err != nil {
		return nil, err
	}
	return merged, r.fill(trials, workloads)
}

// clients returns the trials of the files with traffic.
func clients(files []*file, p *pattern, bad *problems) []*trial {
	byKey := make(map[key]*trial)
	var trials []*trial
	for _, f := range files {
		if f.Workload.Traffic() == nil {
			continue
		}
		for i, run := range f.Runs {
			number := f.number
			if number < 0 {
				number = i + 1
			}
			k := key{f.variant, cmp.Or(f.workload, f.Workload.Kind()), f.pairs, number}
			t := byKey[k]
			if t == nil {
				t = &trial{key: k}
				byKey[k] = t
				trials = append(trials, t)
			}
			for _, other := range t.traffic {
				if other.pair == f.pair {
					bad.add(f.path, "it belongs to the same trial as %s: the pattern needs a placeholder that tells them apart, such as {workload} or {pair}", other.path)
				}
			}
			t.traffic = append(t.traffic, part{f, run})
		}
	}
	for _, t := range trials {
		t.countPairs(p, bad)
	}
	checkPairs(trials, p, bad)
	return trials
}

// countPairs checks the number of pairs against the names, or takes it from the files.
func (t *trial) countPairs(p *pattern, bad *problems) {
	slices.SortFunc(t.traffic, func(a, b part) int { return cmp.Compare(a.pair, b.pair) })
	n := 0
	for _, part := range t.traffic {
		n += len(part.run.Pairs)
	}
	for _, part := range t.traffic[1:] {
		if first := t.traffic[0]; part.apart(first) || first.apart(part) {
			bad.add(part.path, "by the times in the files, it did not run at the same time as %s, so the two are no pairs of one trial: write {run} in place of {pair}", first.path)
		}
	}
	switch first := t.traffic[0]; {
	case t.pairs < 0:
		t.pairs = n
	case t.pairs != n && p.has(pairField):
		bad.add(first.path, "its trial has files for %d of %d pairs", n, t.pairs)
	case t.pairs != n:
		bad.add(first.path, "it has %s, and its name says %d: use {pair} if each pair has a file of its own; connections of one client are not pairs", words.Count(n, "pair"), t.pairs)
	}
}

// apart reports whether a part began when another one had ended. It is false if the start of one is unknown.
func (p part) apart(other part) bool {
	if p.run.Started.IsZero() || other.run.Started.IsZero() {
		return false
	}
	length := time.Duration(other.Workload.Traffic().Warmup)
	for _, e := range other.run.Pairs {
		length = max(length, time.Duration(other.Workload.Traffic().Warmup)+time.Duration(e.Seconds*1e9))
	}
	return p.run.Started.Sub(other.run.Started) >= length+startedRounding
}

// startedRounding is how much a tool may round the time at which it began.
const startedRounding = time.Second

// checkPairs reports trials that lack the file of a pair, if only the files show how many pairs there are.
func checkPairs(trials []*trial, p *pattern, bad *problems) {
	if !p.has(pairField) || p.has(pairsField) {
		return
	}
	most := make(map[string]int) // by workload
	for _, t := range trials {
		most[t.workload] = max(most[t.workload], t.pairs)
	}
	for _, t := range trials {
		if t.pairs < most[t.workload] {
			bad.add(t.traffic[0].path, "its trial has files for %s, and others have %d: put {pairs} into the pattern if that is intended", words.Count(t.pairs, "pair"), most[t.workload])
		}
	}
}

// cpus adds the CPU figures of files to the trials.
func cpus(files []*file, trials []*trial, bad *problems) {
	for _, t := range trials {
		for _, part := range t.traffic {
			if part.run.CPUs != nil {
				t.cpus = append(t.cpus, part)
			}
		}
	}
	of := make(map[numbered][]*trial)
	for _, t := range trials {
		n := numbered{t.variant, t.number}
		of[n] = append(of[n], t)
	}
	for _, f := range files {
		if f.Workload.Traffic() != nil {
			continue
		}
		for i, run := range f.Runs {
			addCPUs(part{f, run}, i, of, bad)
		}
	}
	checkNodes(trials, bad)
}

// checkNodes reports trials that have the CPUs of fewer nodes than others of their workload: their sums would be smaller.
func checkNodes(trials []*trial, bad *problems) {
	most := make(map[string]int) // by workload
	for _, t := range trials {
		most[t.workload] = max(most[t.workload], len(t.cpus))
	}
	for _, t := range trials {
		if n := len(t.cpus); n > 0 && n < most[t.workload] {
			bad.add(t.cpus[0].path, "its trial has the CPUs of %s, and others have those of %d: leave them out of all trials, or add the missing files", words.Count(n, "node"), most[t.workload])
		}
	}
}

// numbered identifies the trials that a run of mpstat may belong to.
type numbered struct {
	variant string
	number  int
}

// addCPUs adds a run of mpstat to its trial. i is the index of the run in its file.
func addCPUs(p part, i int, trials map[numbered][]*trial, bad *problems) {
	number := p.number
	if number < 0 {
		number = i + 1
	}
	var of []*trial
	for _, t := range trials[numbered{p.variant, number}] {
		if (p.workload == "" || p.workload == t.workload) && (p.pairs < 0 || p.pairs == t.pairs) {
			of = append(of, t)
		}
	}
	switch {
	case len(of) == 0 && len(p.Runs) > 1:
		bad.add(p.path, "it has %d runs, and no file has the traffic of run %d", len(p.Runs), i+1)
	case len(of) == 0:
		bad.add(p.path, "no file has the traffic of its trial")
	case len(of) > 1:
		bad.add(p.path, "it fits %d trials: the pattern needs a placeholder that tells them apart, such as {workload}", len(of))
	default:
		t := of[0]
		for _, other := range t.cpus {
			if other.node == p.node {
				bad.add(p.path, "it belongs to the same node and trial as %s: name the nodes by {node}", other.path)
			}
		}
		t.cpus = append(t.cpus, p)
	}
}

// merge returns what the files say about each workload. All files of a workload must have the same traffic, but if the number of
// messages is set, durations may differ.
func merge(trials []*trial, bad *problems) map[string]*tools.Reading {
	first := make(map[string]*file)
	merged := make(map[string]*tools.Reading)
	for _, t := range trials {
		for _, part := range t.traffic {
			of := merged[t.workload]
			if of == nil {
				own := part.Reading
				merged[t.workload], first[t.workload] = &own, part.file
				continue
			}
			if differences := of.Merge(part.Reading); len(differences) > 0 {
				bad.add(part.path, "its traffic differs from that of %s: %s; tell workloads apart by {workload}, or import them separately", first[t.workload].path, strings.Join(differences, ", "))
			}
		}
	}
	return merged
}

// checkInterleaved reports a variant whose runs were all before those of another variant, by the times that the tools
// wrote. Equal numbers alone do not prove that runs were close in time.
func checkInterleaved(trials []*trial, bad *problems) {
	type span struct {
		from, to time.Time
		n        int
		path     string
	}
	spans := make(map[string]*span)
	for _, t := range trials {
		at := t.started()
		if at.IsZero() {
			return
		}
		s := spans[t.variant]
		if s == nil {
			s = &span{from: at, to: at, path: t.traffic[0].path}
			spans[t.variant] = s
		}
		s.n++
		if at.Before(s.from) {
			s.from = at
		}
		if at.After(s.to) {
			s.to = at
		}
	}
	variants := distinct(trials, func(t *trial) string { return t.variant })
	for i, a := range variants {
		for _, b := range variants[:i] {
			before, behind := spans[a], spans[b]
			if before.from.After(behind.from) {
				before, behind, a, b = behind, before, b, a
			}
			if before.n > 1 && behind.n > 1 && before.to.Before(behind.from) {
				bad.add(behind.path, "by the times in the files, all of %s was measured after all of %s, so these are not blocks: write {run} in place of {block}", b, a)
				return
			}
		}
	}
}

// started returns when the first pair began, or zero if the file of a pair does not say it.
func (t *trial) started() time.Time {
	var at time.Time
	for _, part := range t.traffic {
		switch s := part.run.Started; {
		case s.IsZero():
			return s
		case at.IsZero() || s.Before(at):
			at = s
		}
	}
	return at
}

// fill makes the records of the trials, in the order of their times, or of their blocks if the times
// are unknown.
func (r *Result) fill(trials []*trial, workloads []spec.Workload) error {
	slices.SortStableFunc(trials, func(a, b *trial) int {
		return cmp.Or(a.started().Compare(b.started()), cmp.Compare(a.number, b.number))
	})
	blocks := make(map[int]int) // by number
	for i, number := range distinct(trials, func(t *trial) int { return t.number }) {
		blocks[number] = i + 1
	}
	byName := make(map[string]spec.Workload)
	for _, w := range workloads {
		byName[w.Name] = w
	}
	var bad problems
	for i, t := range trials {
		out := record.Trial{
			Block: blocks[t.number], Order: i + 1, Variant: t.variant, Workload: t.workload, Pairs: t.pairs,
			Attempt: 1, Started: t.started(), Status: record.StatusOK,
		}
		for _, part := range t.traffic {
			out.Files = append(out.Files, part.path)
			for _, e := range part.run.Pairs {
				out.PerPair = append(out.PerPair, record.Pair{Client: e})
			}
		}
		for _, part := range t.cpus {
			out.Hosts = append(out.Hosts, host(part, out.PerPair[0].Client.Seconds))
			if !slices.Contains(out.Files, part.path) {
				out.Files = append(out.Files, part.path)
			}
		}
		cell := experiment.Cell{Variant: spec.Variant{Name: t.variant}, Workload: byName[t.workload], Pairs: t.pairs}
		if err := experiment.Imported(cell, &out); err != nil {
			bad.add(t.traffic[0].path, "%w", err)
		}
		r.Trials = append(r.Trials, out)
	}
	return bad.err()
}

// host returns the CPU times of a node over a window of the given length.
func host(p part, seconds float64) record.Host {
	node := cmp.Or(p.node, "node")
	h := record.Host{Boot: node, Nodes: []string{node}, Seconds: seconds, Source: record.SoftirqTicks}
	for _, c := range p.run.CPUs {
		for _, share := range []*float64{&c.User, &c.System, &c.IRQ, &c.Steal, &c.Idle, &c.Busy, &c.Softirq, &c.SoftirqTicks} {
			*share *= seconds
		}
		h.CPUs = append(h.CPUs, c)
	}
	return h
}
