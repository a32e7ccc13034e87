package cli

import (
	"context"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"

	"golang.org/x/sync/errgroup"

	"slipstream.dev/internal/doctor"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/kube"
	"slipstream.dev/internal/plain"
	"slipstream.dev/internal/words"
)

// looksAtOnce bounds how many nodes are examined at the same time: each takes a connection through the API server.
const looksAtOnce = 64

// answerTime bounds how long a node may take to answer, in addition to the time between the two readings of its
// counters.
const answerTime = 20 * time.Second

// probeNodes looks at each node of a cluster.
func (o doctorOptions) probeNodes(ctx context.Context, d *diagnosis, up *kube.Pods) error {
	places := make(map[string]place.Place)
	var names []string
	for _, p := range up.Places() {
		places[p.Name] = p
		names = append(names, p.Name)
	}
	return d.examineNodes(ctx, names, o.window+answerTime, func(ctx context.Context, name string) (doctor.Facts, error) {
		c, err := podWorker(ctx, up, places[name], place.ForControl)
		if err != nil {
			return doctor.Facts{}, err
		}
		defer c.Close()
		return c.ReadFacts(ctx, o.window, false)
	})
}

// examineNodes looks at all nodes, and compares what they have stored about each other. A node that cannot be examined in time
// is a finding, and the others are examined.
func (d *diagnosis) examineNodes(ctx context.Context, names []string, most time.Duration, look func(ctx context.Context, name string) (doctor.Facts, error)) error {
	facts, failed := make([]doctor.Facts, len(names)), make([]error, len(names))
	g := new(errgroup.Group)
	g.SetLimit(looksAtOnce)
	for i, name := range names {
		g.Go(func() error {
			in, cancel := context.WithTimeoutCause(ctx, most, fmt.Errorf("no answer in %s", most))
			defer cancel()
			if facts[i], failed[i] = look(in, name); failed[i] != nil && in.Err() != nil {
				failed[i] = context.Cause(in)
			}
			return nil
		})
	}
	_ = g.Wait() // failed has the errors
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	d.nodes = len(names)
	var peers []doctor.Peer
	for i, name := range names {
		if failed[i] != nil {
			d.Findings = append(d.Findings, doctor.NodeUnfit(name, failed[i]))
			continue
		}
		d.examine(name, facts[i])
		peers = append(peers, doctor.NewPeer(name, facts[i]))
	}
	for i, client := range peers {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		for j, server := range peers {
			if i != j {
				d.Findings = append(d.Findings, doctor.ExaminePair(client, server)...)
			}
		}
	}
	return nil
}

// kind identifies the same finding on different nodes.
type kind struct {
	severity    doctor.Severity
	rule, fault string
}

func kindOf(f doctor.Finding) kind { return kind{f.Severity, f.Rule, f.Fault} }

// byKind returns the kinds of findings on nodes in their order, and where each was found.
func byKind(findings []doctor.Finding) (kinds []kind, where map[kind][]string) {
	where = make(map[kind][]string)
	for _, f := range findings {
		if f.Where == "" {
			continue // about the cluster
		}
		k := kindOf(f)
		if where[k] == nil {
			kinds = append(kinds, k)
		}
		if !slices.Contains(where[k], f.Where) {
			where[k] = append(where[k], f.Where)
		}
	}
	return kinds, where
}

// tabulate writes a line for each kind of finding, with the nodes that have it, and one for each node that was not seen.
func tabulate(w io.Writer, d diagnosis) {
	kinds, where := byKind(d.Findings)
	for _, f := range d.Findings {
		if f.Rule == doctor.RuleNodeUnfit {
			fmt.Fprintf(w, "\n%s was not seen, because %s", plain.Line(f.Where), plain.Line(f.Evidence[0].Value))
		}
	}
	if len(kinds) == 0 { // all are about the cluster
		return
	}
	fmt.Fprintln(w)
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(tw, "finding\tseverity\tof %d\tnodes\n", d.nodes)
	for _, k := range kinds {
		const most = 6
		name := k.rule
		if k.fault != "" {
			name += " (" + k.fault + ")"
		}
		fmt.Fprintf(tw, "%s\t%s\t%d\t%s\n", plain.Line(name), k.severity, len(where[k]), plain.Line(words.First(where[k], most)))
	}
	_ = tw.Flush() // to a strings.Builder
}

// oneOfEach keeps the first finding of each kind, as an example, and all about the cluster.
func oneOfEach(findings []doctor.Finding) (examples []doctor.Finding) {
	seen := make(map[kind]bool)
	for _, f := range findings {
		if k := kindOf(f); f.Where == "" || !seen[k] {
			seen[k] = true
			examples = append(examples, f)
		}
	}
	return examples
}
