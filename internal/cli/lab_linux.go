package cli

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"slipstream.dev/internal/accel/journal"

	"github.com/spf13/cobra"

	"slipstream.dev/internal/accel"
	"slipstream.dev/internal/experiment"
	"slipstream.dev/internal/flock"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/lab"
	"slipstream.dev/internal/place/lab/balancer"
	"slipstream.dev/internal/place/lab/overlay"
	"slipstream.dev/internal/place/lab/policies"
	"slipstream.dev/internal/place/lab/services"
	"slipstream.dev/internal/place/topology"
	"slipstream.dev/internal/plain"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/shell"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/worker"
)

// forwarderArgv starts the forwarder of packets in the shapes udp and weave, balancerArgv the built-in proxy. Both are
// commands of this program.
var (
	forwarderArgv = []string{"/proc/self/exe", "forward"}
	balancerArgv  = []string{"/proc/self/exe", "balance"}
)

func balanceCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "balance",
		Short:  "Balance a lab's connections (started by a lab)",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE:   func(c *cobra.Command, _ []string) error { return balancer.Run(c.Context()) },
	}
}

func forwardCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "forward",
		Short:  "Forward a lab node's packets (started by a lab)",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE:   func(c *cobra.Command, _ []string) error { return overlay.Forward(c.Context()) },
	}
}

// labTarget runs an experiment in labs on this machine.
type labTarget struct {
	exp     *spec.Experiment
	process Process
	made    int
}

// topology describes the experiment as it is now: variants may have been left out since the site was opened,
// and the plan's networks are those of the remaining ones.
func (t *labTarget) topology() *topology.Topology { return topology.Of(t.exp) }

// openLab returns the site of labs on this machine.
func openLab(ctx context.Context, p Process, exp *spec.Experiment) (*site, error) {
	release, err := claimMachine(ctx, p)
	if err != nil {
		return nil, err
	}
	return &site{
		target:    &labTarget{exp: exp, process: p},
		probe:     accel.Probe,
		probePath: probePaths(lab.LacksOnNode),
		restore:   func(ctx context.Context) error { return recoverMachine(ctx, p) },
		release:   release,
	}, nil
}

// probePaths returns a function that checks whether this machine supports a path. It tries each mode of network policies once.
// onNode says what the machine lacks for netfilter to see the packets between pods of one node.
func probePaths(onNode func(shape string) error) func(spec.Path) error {
	known := make(map[string]error)
	return func(p spec.Path) error {
		if p.OneNode() && filtered(p) {
			if err := onNode(p.Shape()); err != nil {
				return err
			}
		}
		if p.Policies == nil {
			return nil
		}
		mode := p.Policies.Mode
		if _, tried := known[mode]; !tried {
			known[mode] = lab.Lacks(lab.Config{Shape: spec.ShapeFlannel, Policies: &policies.Config{Mode: mode}})
		}
		return known[mode]
	}
}

// filtered reports whether a path has services or network policies that netfilter implements.
func filtered(p spec.Path) bool {
	return p.Service != nil && p.Service.Mode != spec.ServiceEBPF || p.Policies != nil && p.Policies.Mode != spec.PolicyEBPF
}

func (t *labTarget) Network(ctx context.Context, fabric int) (experiment.Network, error) {
	t.made++
	layout, spec := t.topology(), t.exp.Spec.Target.Lab
	f, served := layout.Fabrics()[fabric], layout.Served(fabric)
	config := lab.Config{
		Name: fmt.Sprintf("run-%d", t.made), Nodes: f.Nodes, Pods: layout.Pods(fabric), NIC: f.NIC, Shape: f.Shape,
		CongestionControl: spec.CongestionControl,
	}
	if s := f.Service; s.Mode != "" {
		config.Services = &services.Config{
			Mode: s.Mode, Servers: served.Positions, Backends: s.Backends, Total: max(s.Services, len(served.Positions)), OtherBackends: s.OtherBackends,
			Transports: served.Transports,
		}
	}
	if p := f.Policies; p.Mode != "" {
		config.Policies = &policies.Config{Mode: p.Mode, Count: p.Count}
	}
	if b := f.Balancer; b.Backends > 0 {
		config.Balancer = &balancer.Config{Backends: b.Backends, Proxy: b.Proxy, NICs: b.NICs, Pairs: f.Pairs}
	}
	l, err := lab.Up(ctx, config, lab.Options{Forwarder: forwarderArgv, Balancer: balancerArgv, Log: newLog(t.process)})
	if err != nil {
		return nil, err
	}
	return &labNetwork{Lab: l, Assignment: layout.Assign(fabric, l.Places()), process: t.process, config: config, exp: t.exp}, nil
}

type labNetwork struct {
	*lab.Lab
	*topology.Assignment
	process Process
	config  lab.Config
	exp     *spec.Experiment
}

// labLead bounds how long the start time of traffic takes to reach a lab's workers.
const labLead = 15 * time.Millisecond

// Places returns the places of the lab that an experiment uses.
func (n *labNetwork) Places() []place.Place { return n.Assignment.Places() }

func (n *labNetwork) Setup() place.Setup {
	return place.Setup{Placement: n.Placement(), CongestionControl: n.config.CongestionControl, Lead: labLead}
}

func (n *labNetwork) Worker(ctx context.Context, p place.Place, _ place.Use) (experiment.Worker, error) {
	c, err := worker.Spawn(ctx, n.In(p), n.process.Err)
	if err != nil {
		return nil, err
	}
	return &labWorker{Client: c, network: n}, nil
}

// labWorker adds to the description of a node the facts that only its lab knows.
type labWorker struct {
	*worker.Client
	network *labNetwork
}

func (w *labWorker) Describe(ctx context.Context, p place.Place) (record.Node, error) {
	node, err := w.Client.Describe(ctx, p)
	if err != nil {
		return node, err
	}
	node.Role, node.NICRate = p.Role, float64(p.NICRate)
	if p.Role == spec.RoleProxy {
		if node.Proxy, err = w.network.Proxy(ctx); err != nil {
			return node, err
		}
	}
	loaded, policed := w.network.Loaded(p.Node)
	tools := maps.Clone(node.Tools)
	if tools == nil {
		tools = make(map[string]string)
	}
	if s := w.network.config.Services; s != nil {
		node.Services = &record.Services{
			Mode: s.Mode, Servers: len(s.Servers), Backends: s.Backends, Total: s.Total, OtherBackends: s.OtherBackends, LoadSeconds: loaded.Took.Seconds(),
		}
		if loaded.Version != "" {
			tools[s.Mode] = loaded.Version // the mode's name is the tool's
		}
	}
	if c := w.network.config.Policies; c != nil {
		node.Policies = &record.Policies{Mode: c.Mode, Count: c.Count, LoadSeconds: policed.Took.Seconds()}
		if policed.Version != "" {
			tools[c.Tool()] = policed.Version
		}
	}
	if len(tools) > 0 {
		node.Tools = tools
	}
	return node, nil
}

// Change replaces endpoints of services during trials, if the variant asks for that.
func (n *labNetwork) Change(ctx context.Context, v spec.Variant) (perSecond int, stop func() (made int, err error), err error) {
	s := n.exp.PathOf(v).Service
	if s == nil || s.EndpointChanges == 0 {
		return 0, func() (int, error) { return 0, nil }, nil
	}
	stop, err = n.ChangeEndpoints(ctx, s.EndpointChanges)
	return s.EndpointChanges, stop, err
}

func (n *labNetwork) Close(ctx context.Context) error { return n.Down(ctx) }

// claimMachine ensures that this process is the only one that measures on this machine: two would disturb
// each other. It then removes the labs and reverts the settings that dead processes have left.
func claimMachine(ctx context.Context, p Process) (release func(), err error) {
	if err := asRoot("a run in a lab creates network namespaces"); err != nil {
		return nil, err
	}
	path := filepath.Join(filepath.Dir(journalDir), "run.lock")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("lock this machine for a run: %w", err)
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("lock this machine for a run: %w", err)
	}
	if err := flock.TryLock(f); err != nil {
		holder, _ := io.ReadAll(f) // empty until the other run has written who it is
		f.Close()
		if errors.Is(err, flock.ErrLocked) {
			return nil, fmt.Errorf("another run is in progress on this machine, and the two would disturb each other: wait for it, or stop it (%s)", cmp.Or(plain.Line(string(holder)), "it has just begun"))
		}
		return nil, fmt.Errorf("lock this machine for a run: %s: %w", path, err)
	}
	// Runs on hosts claim a machine otherwise, because their workers need not be root.
	unclaim, err := worker.Claim(false, rand.Text(), fmt.Sprintf("process %d, in a lab", os.Getpid()), func() {})
	if err != nil {
		_ = flock.Release(f)
		return nil, err
	}
	if err := recoverMachine(ctx, p); err != nil {
		unclaim()
		_ = flock.Release(f)
		return nil, err
	}
	// Only for the message above, so a full disk does not matter.
	_ = f.Truncate(0)
	_, _ = fmt.Fprintf(f, "process %d, %s", os.Getpid(), shell.Join(p.Args))
	return func() {
		unclaim()
		_ = f.Truncate(0)
		_ = flock.Release(f)
	}, nil
}

func recoverMachine(ctx context.Context, p Process) error {
	swept, err := lab.Sweep(ctx, lab.DefaultDir)
	if err != nil {
		return fmt.Errorf("remove the lab of a killed run: %w", err)
	}
	for _, name := range swept {
		fmt.Fprintf(p.Err, "removed lab %s of a killed run\n", name)
	}
	restored, err := accel.Recover(ctx, accel.Options{JournalDir: journalDir})
	for _, s := range restored {
		fmt.Fprintf(p.Err, "restored %s of %s to %s, which a killed run had changed\n", s.Path, s.Place, s.Was)
	}
	if journal.OnlyChanged(err) {
		fmt.Fprintln(p.Err, err)
		return nil
	}
	return err
}

func labCommand(p Process) *cobra.Command {
	c := &cobra.Command{
		Use:   "lab",
		Short: "Create a lab of network namespaces, and run commands in it",
		Long: `Create, list and remove labs: nodes and pods made of network namespaces on this
machine, connected as flannel, Calico or another network would connect them. A
lab stays until lab down. Needs root.`,
		Example: `  sudo slipstream lab up play --pods 4 --shape calico
  sudo slipstream lab exec play node0/pod0 -- ping -c 3 10.244.1.2
  sudo slipstream lab down play`,
	}
	c.AddCommand(labUpCommand(p), labListCommand(p), labExecCommand(p), labDownCommand(p))
	return c
}

func labUpCommand(p Process) *cobra.Command {
	config := lab.Config{CongestionControl: "cubic"}
	var rate string
	c := &cobra.Command{
		Use: "up NAME", SuggestFor: []string{"create", "start", "add"}, Args: cobra.ExactArgs(1),
		Short: "Create a lab, which stays until lab down",
		RunE: func(c *cobra.Command, args []string) error {
			if err := asRoot("lab up creates network namespaces"); err != nil {
				return err
			}
			config.Name, config.NIC.Rate = args[0], spec.BitRate(rate)
			if err := config.Validate(); err != nil {
				return usage(err)
			}
			l, err := lab.Up(c.Context(), config, lab.Options{Keep: true, Forwarder: forwarderArgv, Log: newLog(p)})
			if err != nil {
				return err
			}
			tw := tabwriter.NewWriter(p.Out, 0, 0, 2, ' ', 0)
			fmt.Fprintln(tw, "PLACE\tIPV4\tIPV6\tCPUS")
			for _, place := range l.Places() {
				fmt.Fprintf(tw, "%s\t%s\t%s\t%s\n", place.Name, place.IPv4, place.IPv6, place.CPUs)
			}
			return tw.Flush()
		},
	}
	f := c.Flags()
	f.IntVar(&config.Nodes, "nodes", 2, "number of nodes, 2 to 16")
	f.IntVar(&config.Pods, "pods", 2, "pods per node, 0 to 64")
	f.StringVar(&config.Shape, "shape", spec.ShapeFlannel, "network of the pods: "+strings.Join(overlay.Shapes(), ", "))
	f.StringVar(&config.NIC.Offload, "offload", spec.OffloadFull, "NIC profile: full or none")
	f.IntVar(&config.NIC.MTU, "mtu", 1500, "MTU of the NICs in bytes")
	f.StringVar(&rate, "rate", "", "rate limit of each NIC, in each direction, such as 10Gbit")
	return c
}

func labListCommand(p Process) *cobra.Command {
	var format outputFormat
	c := &cobra.Command{
		Use: "ls", SuggestFor: []string{"list", "show"}, Args: cobra.NoArgs,
		Short: "List the labs on this machine",
		RunE: func(*cobra.Command, []string) error {
			labs, err := lab.List(lab.DefaultDir)
			if format == asJSON {
				return errors.Join(writeJSON(p.Out, append([]lab.Info{}, labs...)), err)
			}
			tw := tabwriter.NewWriter(p.Out, 0, 0, 2, ' ', 0)
			fmt.Fprintln(tw, "NAME\tNODES\tPODS PER NODE\tSHAPE\tOFFLOAD\tSTATE\tSINCE")
			for _, l := range labs {
				state := "incomplete"
				switch {
				case l.Abandoned:
					state = fmt.Sprintf("left by process %d, which has ended: slipstream lab down %s", l.PID, l.Name)
				case l.Up && l.Keep:
					state = "up"
				case l.Up:
					state = fmt.Sprintf("used by process %d", l.PID)
				}
				fmt.Fprintf(tw, "%s\t%d\t%d\t%s\t%s\t%s\t%s\n", l.Name, l.Nodes, l.Pods, l.Shape, l.NIC.Offload, state, l.Created.Local().Format("15:04:05"))
			}
			return errors.Join(tw.Flush(), err)
		},
	}
	format.addFlag(c.Flags())
	return c
}

func labExecCommand(p Process) *cobra.Command {
	c := &cobra.Command{
		Use: "exec NAME NODE[/POD] COMMAND [ARGUMENT...]", Args: cobra.MinimumNArgs(3),
		Short: "Run a command in a node (node0) or pod (node0/pod1) of a lab",
		RunE: func(c *cobra.Command, args []string) error {
			if err := asRoot("lab exec enters the network namespaces of a lab"); err != nil {
				return err
			}
			l, err := lab.Open(lab.DefaultDir, args[0])
			if err != nil {
				return withLabs(err)
			}
			command := args[2:]
			if command[0] == "--" {
				command = command[1:]
			}
			if len(command) == 0 {
				return usage(errors.New("no command to run: slipstream lab exec NAME NODE[/POD] COMMAND [ARGUMENT...]"))
			}
			code, err := l.Run(c.Context(), args[1], command, p.Stdin, p.Stdout, p.Stderr)
			if err != nil {
				return err
			}
			if code != 0 {
				return exitError{code: code}
			}
			return nil
		},
	}
	c.Flags().SetInterspersed(false) // options after NAME are the command's
	return c
}

// withLabs adds a hint to lab.ErrNotFound: the command that lists the labs.
func withLabs(err error) error {
	if errors.Is(err, lab.ErrNotFound) {
		return fmt.Errorf("%w (slipstream lab ls)", err)
	}
	return err
}

func labDownCommand(p Process) *cobra.Command {
	return &cobra.Command{
		Use: "down NAME...", SuggestFor: []string{"rm", "remove", "delete", "stop"}, Args: cobra.MinimumNArgs(1),
		Short: "Remove labs, and kill the processes in them",
		RunE: func(c *cobra.Command, args []string) error {
			if err := asRoot("lab down removes network namespaces"); err != nil {
				return err
			}
			var errs []error
			for _, name := range args {
				l, err := lab.Open(lab.DefaultDir, name)
				if err == nil {
					err = l.Down(c.Context())
				}
				err = withLabs(err)
				if err == nil {
					fmt.Fprintln(p.Out, "removed:", strings.TrimSpace(name))
				}
				errs = append(errs, err)
			}
			return errors.Join(errs...)
		},
	}
}
