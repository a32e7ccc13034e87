package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"slipstream.dev/internal/doctor"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/kube"
	"slipstream.dev/internal/plain"
	"slipstream.dev/internal/worker"
)

// diagnosis is the output of doctor.
type diagnosis struct {
	// nodes is the number of nodes that were examined with --all-nodes, else 0. The text then has one paragraph for all
	// nodes with the same finding.
	nodes int
	// cluster gets the facts of its nodes; nil if no cluster is examined.
	cluster       *doctor.Cluster
	WindowSeconds float64          `json:"window_seconds"`
	Facts         []fact           `json:"facts"`
	Findings      []doctor.Finding `json:"findings"`
}

// fact is a fact that no rule judges. Where names the machine; it is empty for the one that doctor runs on.
type fact struct {
	Where string `json:"where,omitempty"`
	doctor.Evidence
}

// add adds the facts and findings of a machine.
func (d *diagnosis) add(where string, f doctor.Facts) {
	for _, e := range f.Known() {
		d.Facts = append(d.Facts, fact{where, e})
	}
	d.examine(where, f)
}

// examine adds the findings of a machine.
func (d *diagnosis) examine(where string, f doctor.Facts) {
	d.WindowSeconds = max(d.WindowSeconds, f.Window.Seconds())
	if d.cluster != nil {
		d.cluster.See(where, f)
	}
	for _, found := range doctor.Examine(f) {
		found.Where = where
		d.Findings = append(d.Findings, found)
	}
}

// minWindow is ten clock ticks, the unit in which the kernel counts CPU time.
const minWindow = 100 * time.Millisecond

type doctorOptions struct {
	window time.Duration
	format outputFormat
	probe  bool
	all    bool // every node of a cluster
	hosts  hostOptions
	kube   kubeOptions
}

func doctorCommand(p Process) *cobra.Command {
	var o doctorOptions
	c := &cobra.Command{
		Use:   "doctor [lab|kubernetes|hosts:HOST,...]",
		Short: "Check what makes a container network slow or lossy",
		Long: `Check what makes a container network slow or lossy: receive steering, MTUs,
drops, offloads, conntrack, virtual functions, CPU limits, and what slipstream
itself needs. Each finding has its evidence, its cost, and the command that
corrects it, or the experiment that shows whether correcting it helps.

Without an argument, doctor checks this machine, in the network namespace that
it runs in.

hosts:HOST,... checks hosts by SSH, each [USER@]NAME as in ~/.ssh/config, and
the path from each to each other: whether traffic reaches the ports that a run
uses and those of VXLAN, and which packets are too large.

lab checks whether this machine can make a lab, in network namespaces that
doctor removes at once.

kubernetes asks the API server whether a run would fail, how the nodes differ,
what agents report, and whether settings of Cilium cost something.

With --probe, doctor also tries the fast path. For hosts it checks offloads as
well, by transfers through a VXLAN tunnel between network namespaces that it
removes at once (as root). For lab it makes a lab of two nodes, checks it like
two hosts, and removes it. For kubernetes it starts pods on two nodes, as a run
does, checks the nodes and the paths between nodes and pods, and removes the
pods. --all-nodes instead looks once at every node, and compares what the nodes
know about each other's overlays.

doctor changes no settings. Without --probe it sends no packets on this machine;
between hosts it sends a few messages, and datagrams of up to the MTU. It reads
counters twice, and sees only what happens in between: run it under load, with a
longer --for.

Findings are serious (traffic is lost, or a run would fail), warning (something
is slower than it could be) or note (worth an experiment; the setting may be
right as it is). The exit code is 3 if there is a serious finding, and 0
otherwise.`,
		Example: `  sudo slipstream doctor
  sudo slipstream doctor --for 1m              while the applications run
  sudo slipstream doctor --probe               also whether the fast path runs here
  slipstream doctor hosts:a,me@b               two machines, and the paths between them
  sudo slipstream doctor lab                   whether this machine can make a lab
  slipstream doctor kubernetes --probe         two nodes and two pods of a cluster
  slipstream doctor kubernetes --probe --all-nodes   every node
  slipstream doctor --format json | jq '.findings[].what'`,
		Args:      cobra.MaximumNArgs(1),
		ValidArgs: []string{"lab", "kubernetes", "hosts:"},
		RunE: func(c *cobra.Command, args []string) error {
			if o.window < minWindow {
				return usage(fmt.Errorf("--for %s: must be at least %s", o.window, minWindow))
			}
			d, err := o.diagnose(c.Context(), p, args)
			if err != nil {
				return err
			}
			doctor.SortWorstFirst(d.Findings)
			if o.format == asJSON {
				err = writeJSON(p.Out, d)
			} else {
				err = writeDiagnosis(p.Out, d, columnsOf(p.Stdout))
			}
			if err != nil {
				return err
			}
			if slices.ContainsFunc(d.Findings, doctor.IsSerious) {
				return exitError{code: exitSlower}
			}
			return nil
		},
	}
	f := c.Flags()
	f.DurationVar(&o.window, "for", time.Second, "time between the two readings of counters")
	o.format.addFlag(f)
	f.BoolVar(&o.probe, "probe", false, "also try the fast path, and offloads between hosts (root, in temporary network namespaces); for lab, in a lab; for kubernetes, from pods on two nodes")
	f.BoolVar(&o.all, "all-nodes", false, "with kubernetes --probe: look at every node at the same time, instead of at two and the paths between them")
	o.hosts.addFlags(f)
	o.kube.addFlags(f)
	return c
}

// diagnose checks the target that the argument names.
func (o doctorOptions) diagnose(ctx context.Context, p Process, args []string) (diagnosis, error) {
	d := diagnosis{Facts: []fact{}, Findings: []doctor.Finding{}} // empty lists, because JSON would show nil as null
	if err := o.checkFlags(args); err != nil {
		return d, usage(err)
	}
	if len(args) == 0 {
		f, err := readFactsHere(ctx, o.window, o.probe)
		if err != nil {
			return d, err
		}
		d.add("", f)
		return d, nil
	}
	if names, ok := strings.CutPrefix(args[0], "hosts:"); ok {
		return d, o.examineHosts(ctx, p, &d, names)
	}
	switch args[0] {
	case "lab":
		return d, o.examineLab(ctx, p, &d)
	case "kubernetes":
		return d, o.examineCluster(ctx, p, &d)
	}
	return d, usage(fmt.Errorf("doctor %s: must be lab, kubernetes, hosts:HOST,... or nothing, for this machine", args[0]))
}

// checkFlags returns an error for a flag that belongs to another target.
func (o doctorOptions) checkFlags(args []string) error {
	at := strings.Join(args, " ")
	changes, err := o.kube.overrides()
	switch {
	case err != nil:
		return err
	case at != "kubernetes" && len(changes) > 0:
		return fmt.Errorf("%s is for doctor kubernetes", changes[0].flag)
	case at != "kubernetes" && o.kube.access != (kube.Access{}):
		return errors.New("--kubeconfig, --context and --namespace are for doctor kubernetes")
	case o.all && (at != "kubernetes" || !o.probe):
		return errors.New("--all-nodes is for doctor kubernetes --probe")
	case o.all && slices.ContainsFunc(changes, func(c override) bool { return c.flag != "--image" && c.flag != "--base-image" }):
		return errors.New("--all-nodes takes every node: leave out --client-node, --server-node and --selector")
	case at != "kubernetes" && !strings.HasPrefix(at, "hosts:") && len(o.hosts.binaries) > 0:
		return errors.New("--host-binary is for doctor hosts:HOST,... and doctor kubernetes")
	}
	return nil
}

// machine is a machine that a worker examines.
type machine struct {
	name    string
	address netip.Addr
	worker  *worker.Client
	facts   doctor.Facts
	// pod is true if the machine is a pod, which has no overlay of its own.
	pod bool
}

func newMachine(p place.Place, c *worker.Client) *machine {
	m := &machine{name: p.Name, address: p.IPv4, worker: c, pod: p.Kind == place.Pod}
	if !m.address.IsValid() {
		m.address = p.IPv6
	}
	return m
}

// readFacts examines all machines at the same time.
func (o doctorOptions) readFacts(ctx context.Context, all []*machine) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, m := range all {
		g.Go(func() (err error) {
			if m.facts, err = m.worker.ReadFacts(ctx, o.window, o.probe); err != nil {
				return fmt.Errorf("look at %s: %w", m.name, err)
			}
			return nil
		})
	}
	return g.Wait()
}

// reach sends a message from one machine to another, and returns an error if it does not
// arrive.
type reach func(ctx context.Context, client, server *machine, by place.Transport) error

// exchangeWithin returns a reach whose start time of traffic takes up to lead to reach the machines.
func exchangeWithin(lead time.Duration) reach {
	return func(ctx context.Context, client, server *machine, by place.Transport) error {
		_, err := worker.Exchange(ctx, client.worker, server.worker, netip.AddrPortFrom(server.address, 0), by, lead)
		return err
	}
}

// probePath explores the path from one machine to another.
func probePath(ctx context.Context, client, server *machine, reach reach) (doctor.Path, error) {
	p := doctor.Path{Client: client.name, Server: server.name, To: server.address}
	ip := 6
	if server.address.Is4() {
		ip = 4
	}
	protocols := []string{"tcp", "udp"}
	closed := make([]error, len(protocols))
	var both sync.WaitGroup // a blocked protocol waits for its timeout
	for i, protocol := range protocols {
		both.Go(func() { closed[i] = reach(ctx, client, server, place.Transport{IP: ip, Protocol: protocol}) })
	}
	both.Wait()
	if ctx.Err() != nil {
		return p, context.Cause(ctx)
	}
	for i, err := range closed {
		if err != nil {
			p.Closed = append(p.Closed, doctor.Closed{Protocol: protocols[i], Why: err})
		}
	}
	var ports []uint16
	if !server.pod {
		ports = doctor.VXLANPortsOf(client.facts, server.facts)
	}
	return p, p.Explore(ctx, client.worker, server.worker.OpenReceiver, server.facts, ports)
}

// examineMachines checks machines, and the paths between each two of them in both directions.
func (o doctorOptions) examineMachines(ctx context.Context, d *diagnosis, all []*machine, reach reach) error {
	if err := o.readFacts(ctx, all); err != nil {
		return err
	}
	peers := make(map[*machine]doctor.Peer)
	for _, m := range all {
		d.add(m.name, m.facts)
		peers[m] = doctor.NewPeer(m.name, m.facts)
	}
	for _, client := range all {
		for _, server := range all {
			if client == server {
				continue
			}
			path, err := probePath(ctx, client, server, reach)
			if err == nil && o.probe {
				err = path.ProbeOffload(ctx, client.address, client.worker, server.worker.OpenTunnel)
			}
			if err != nil {
				return err
			}
			if path.Unprobed != "" {
				d.Facts = append(d.Facts, fact{doctor.Pair(client.name, server.name), doctor.Evidence{From: "offloads were not probed", Value: path.Unprobed}})
			}
			d.Findings = append(d.Findings, doctor.ExaminePath(path)...)
			d.Findings = append(d.Findings, doctor.ExaminePair(peers[client], peers[server])...)
		}
	}
	return nil
}

// fit breaks a text into lines that fit beside an indent. It breaks between words, which the terminal would not. It
// breaks nothing if columns is 0, which means unknown, or too small.
func fit(text string, columns, indent int) []string {
	text = plain.Line(text)
	if columns-indent < 20 || utf8.RuneCountInString(text) <= columns-indent {
		return []string{text}
	}
	return plain.Wrap(text, columns-indent, 0)
}

// writeDiagnosis writes the facts as a table for each machine, and each finding as a paragraph, broken between words if
// columns is not 0. It never breaks the text of what to do, which has commands to copy.
func writeDiagnosis(w io.Writer, d diagnosis, columns int) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	where, widest := "", 0
	for _, f := range d.Facts {
		widest = max(widest, utf8.RuneCountInString(f.From))
	}
	for i, f := range d.Facts {
		if f.Where != where {
			if where = f.Where; i > 0 {
				fmt.Fprintln(tw)
			}
			fmt.Fprintf(tw, "%s:\n", plain.Line(where))
		}
		for i, line := range fit(f.Value, columns, widest+2) {
			fmt.Fprintf(tw, "%s\t%s\n", []string{f.From, ""}[min(i, 1)], line)
		}
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	if len(d.Findings) == 0 && d.WindowSeconds == 0 { // no counters were read
		_, err := fmt.Fprintln(w, "\nNothing found.")
		return err
	}
	if len(d.Findings) == 0 {
		_, err := fmt.Fprintf(w, "\nNothing found. Counters were read twice, %.1f s apart.\n", d.WindowSeconds)
		return err
	}
	var b strings.Builder
	if d.nodes > 0 {
		tabulate(&b, d)
		d.Findings = oneOfEach(d.Findings)
	}
	for _, f := range d.Findings {
		at := ""
		if f.Where != "" {
			at = f.Where + ": "
		}
		paragraph := func(label, text string) {
			indent := utf8.RuneCountInString(label)
			fmt.Fprintln(&b, label+strings.Join(fit(text, columns, indent), "\n"+strings.Repeat(" ", indent)))
		}
		b.WriteString("\n")
		paragraph(strings.ToUpper(string(f.Severity))+": ", fmt.Sprintf("%s (%s)", at+f.What, f.Rule))
		for _, e := range f.Evidence {
			paragraph("  read   ", e.From+": "+e.Value)
		}
		paragraph("  costs  ", f.Cost)
		fmt.Fprintf(&b, "  do     %s\n", plain.Line(f.Do))
	}
	_, err := io.WriteString(w, b.String())
	return err
}
