//go:build linux

// Package lab builds nodes and pods of network namespaces on this machine: nodes whose NICs are connected by a switch, and pods
// in a network like that of some product (lab/overlay). There can be services in front of pods (lab/services), or a balancer
// between nodes (lab/balancer). Devices, routes and netfilter are the kernel's own; only the wire is a veth that is made to
// behave like one (wire.go).
//
// It starts processes in places, but does not know what they do: see internal/worker. internal/experiment and the command line
// decide which labs are built, and when.
package lab

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/lab/balancer"
	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/place/lab/overlay"
	"slipstream.dev/internal/place/lab/policies"
	"slipstream.dev/internal/place/lab/services"
	"slipstream.dev/internal/spec"
)

// DefaultDir holds the state of labs. A reboot clears it, as it clears the labs.
const DefaultDir = "/run/slipstream/lab"

var (
	// ErrNotFound means that there is no lab of that name.
	ErrNotFound = errors.New("no such lab")
	// ErrInUse means that a process is creating, using or removing the lab.
	ErrInUse = errors.New("in use")
	// ErrExists means that the name is taken, by a lab or something else.
	ErrExists = errors.New("already exists")
)

// Config describes a lab.
type Config struct {
	// Name is part of every name of the lab on the machine: 1 to 20 of [a-z0-9-].
	Name string `json:"name"`
	// Nodes is 2 to 16, and Pods, the number on each node, 0 to 64.
	Nodes int      `json:"nodes"`
	Pods  int      `json:"pods"`
	NIC   spec.NIC `json:"nic"`
	// Shape is the shape of the pod network: one of overlay.Shapes.
	Shape string `json:"shape"`
	// Services in front of pods; none if nil.
	Services *services.Config `json:"services,omitempty"`
	// Policies for the pods; none if nil.
	Policies *policies.Config `json:"policies,omitempty"`
	// Balancer between nodes; none if nil.
	Balancer *balancer.Config `json:"balancer,omitempty"`
	// CongestionControl is the default congestion control in the namespaces; that of the machine if empty.
	CongestionControl string `json:"congestionControl,omitempty"`
}

var validName = regexp.MustCompile(`^[a-z0-9-]{1,20}$`)

// Validate returns an error if no lab can have this configuration.
func (c Config) Validate() error {
	if !validName.MatchString(c.Name) {
		return fmt.Errorf("lab name must be 1 to 20 characters of a-z, 0-9 and -, is %q", c.Name)
	}
	if c.Nodes < 2 || c.Nodes > 16 {
		return fmt.Errorf("lab %s: nodes must be 2 to 16, are %d", c.Name, c.Nodes)
	}
	if c.Pods < 0 || c.Pods > 64 {
		return fmt.Errorf("lab %s: pods per node must be 0 to 64, are %d", c.Name, c.Pods)
	}
	if !slices.Contains(overlay.Shapes(), c.Shape) {
		return fmt.Errorf("lab %s: shape must be one of %s, is %q", c.Name, strings.Join(overlay.Shapes(), ", "), c.Shape)
	}
	if c.NIC.Offload != spec.OffloadFull && c.NIC.Offload != spec.OffloadNone {
		return fmt.Errorf("lab %s: offload must be %s or %s, is %q", c.Name, spec.OffloadFull, spec.OffloadNone, c.NIC.Offload)
	}
	if c.NIC.MTU < overlay.MinMTU || c.NIC.MTU > 9000 {
		return fmt.Errorf("lab %s: MTU must be %d (IPv6 needs 1280 inside the overlay) to 9000, is %d", c.Name, overlay.MinMTU, c.NIC.MTU)
	}
	if _, err := c.NIC.Rate.BitsPerSecond(); err != nil {
		return fmt.Errorf("lab %s: rate %w", c.Name, err)
	}
	if c.Balancer != nil {
		if err := c.Balancer.Validate(c.Nodes); err != nil {
			return fmt.Errorf("lab %s: balancer: %w", c.Name, err)
		}
	}
	if c.Services != nil {
		if err := c.Services.Validate(c.Shape, c.Nodes, c.Pods); err != nil {
			return fmt.Errorf("lab %s: services: %w", c.Name, err)
		}
	}
	if c.Policies != nil {
		if err := c.Policies.Validate(c.Shape, overlay.Bypasses(c.Shape)); err != nil {
			return fmt.Errorf("lab %s: network policies: %w", c.Name, err)
		}
	}
	return nil
}

// Options configures Up.
type Options struct {
	// Dir holds the state of labs; DefaultDir if empty.
	Dir string
	// Keep lets the lab outlive this process. Without it, Sweep removes the lab once this process has ended.
	Keep bool
	// Forwarder is a command that calls overlay.Forward. The shapes udp and weave need it.
	Forwarder []string
	// Balancer is a command that calls balancer.Run. A balancer with the built-in proxy needs it.
	Balancer []string
	// Log receives problems that are no reason to fail. It may be nil.
	Log *slog.Logger
}

// Lab is a lab that is up.
type Lab struct {
	state *state
	dir   string
	// lock is nil unless this process owns the lab.
	lock      *lock
	processes processes
	// services and policies say how the rules of each node were loaded.
	services, policies []Load
	// changer is nil until endpoints change.
	changer *services.Changer
}

// Load says how the rules of a node were loaded.
type Load struct {
	Took time.Duration
	// Version of the program that loaded them; empty for eBPF programs.
	Version string
}

// Up creates a lab. If the kernel lacks something, a name is taken (ErrExists), or another process uses that lab (ErrInUse), it
// fails before it changes anything. If it fails later, it removes what it has created.
func Up(ctx context.Context, c Config, o Options) (*Lab, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	if o.Dir == "" {
		o.Dir = DefaultDir
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if overlay.Forwards(c.Shape) && len(o.Forwarder) == 0 {
		return nil, fmt.Errorf("lab %s: shape %s needs Options.Forwarder", c.Name, c.Shape)
	}
	if c.Balancer != nil {
		b := *c.Balancer
		c.Balancer = &b
		if err := c.Balancer.Choose(o.Balancer); err != nil {
			return nil, fmt.Errorf("lab %s: balancer: %w", c.Name, err)
		}
	}
	if err := Lacks(c); err != nil {
		return nil, err
	}
	cores, err := availableCPUs("/sys")
	if err != nil {
		return nil, err
	}
	for _, dir := range []string{o.Dir, network.Dir} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, fmt.Errorf("create folder for labs: %w", err)
		}
	}
	lock, err := acquire(o.Dir, c.Name)
	if err != nil {
		return nil, err
	}
	if _, err := os.Lstat(statePath(o.Dir, c.Name)); err == nil {
		lock.release()
		return nil, fmt.Errorf("lab %s %w: remove it (slipstream lab down %[1]s), or choose another name", c.Name, ErrExists)
	}
	if err := free(c); err != nil {
		return nil, errors.Join(err, lock.remove())
	}
	l := &Lab{
		state:    &state{Config: c, PID: os.Getpid(), Keep: o.Keep, Created: time.Now().UTC(), CPUs: divide(cores, c.Nodes)},
		dir:      o.Dir,
		lock:     lock,
		services: make([]Load, c.Nodes),
		policies: make([]Load, c.Nodes),
	}
	l.processes.lab = l
	if err := l.state.write(o.Dir); err != nil {
		return nil, errors.Join(err, lock.remove())
	}
	if err := l.make(ctx, o); err != nil {
		return nil, errors.Join(fmt.Errorf("create lab %s: %w", c.Name, err), l.Down(context.WithoutCancel(ctx)))
	}
	l.state.Up = true
	if err := l.state.write(o.Dir); err != nil {
		return nil, errors.Join(err, l.Down(context.WithoutCancel(ctx)))
	}
	if o.Keep {
		lock.release()
		l.lock = nil
	}
	return l, nil
}

// free checks that none of the names that a lab needs is taken.
func free(c Config) error {
	for _, ns := range namespaces(c) {
		if _, err := os.Lstat(network.Path(ns)); err == nil {
			return fmt.Errorf("network namespace %s %w, but belongs to no lab: remove it (ip netns del %[1]s), or choose another name for the lab", ns, ErrExists)
		}
	}
	if c.translated() {
		if path, err := services.CgroupPath(c.Name); err != nil {
			return err
		} else if _, err := os.Lstat(path); err == nil {
			return fmt.Errorf("cgroup %s %w, but belongs to no lab: remove it (rmdir %[1]s), or choose another name for the lab", path, ErrExists)
		}
	}
	return nil
}

// Open opens a lab that another process created.
func Open(dir, name string) (*Lab, error) {
	if !validName.MatchString(name) {
		return nil, fmt.Errorf("lab %q: %w", name, ErrNotFound)
	}
	s, err := readState(dir, name)
	if err != nil {
		return nil, err
	}
	return &Lab{state: s, dir: dir}, nil
}

// Info describes a lab in a list.
type Info struct {
	Config
	// PID is the process that created it.
	PID int `json:"pid"`
	// Keep: the lab outlives that process.
	Keep bool `json:"keep"`
	// Up is false while the lab is being created, or if that was interrupted.
	Up bool `json:"up"`
	// Abandoned: that process has ended without removing the lab, which it should have.
	Abandoned bool      `json:"abandoned"`
	Created   time.Time `json:"created"`
}

// List returns the labs, sorted by name. If it returns an error, it still returns those that can be read.
func List(dir string) ([]Info, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list labs: %w", err)
	}
	var all []Info
	var errs []error
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok {
			continue
		}
		s, err := readState(dir, name)
		if errors.Is(err, ErrNotFound) {
			continue // it has just been removed
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		abandoned := !s.Keep && errors.Is(unix.Kill(s.PID, 0), unix.ESRCH)
		all = append(all, Info{Config: s.Config, PID: s.PID, Keep: s.Keep, Up: s.Up, Abandoned: abandoned, Created: s.Created})
	}
	return all, errors.Join(errs...)
}

// make creates the lab that the state describes.
func (l *Lab) make(ctx context.Context, o Options) error {
	c := l.state.Config
	nodes := layout(c)
	sw, err := network.Create(switchNS(c.Name), prepareSwitch)
	if err != nil {
		return err
	}
	defer sw.Close()
	wire, err := newWire(c.NIC, sw)
	if err != nil {
		return err
	}
	defer wire.close()
	podNetwork := &overlay.Overlay{
		Shape: c.Shape, NICMTU: c.NIC.MTU, Nodes: nodes,
		Processes: &l.processes, Forwarder: o.Forwarder, Keep: l.state.Keep, Log: o.Log,
	}
	spaces, hosts := make([]*network.Namespace, len(nodes)), make([]*overlay.Host, len(nodes))
	defer func() {
		for i := range nodes {
			hosts[i].Close()
			spaces[i].Close()
		}
	}()
	if err := parallel(ctx, len(nodes), func(i int) error {
		n := nodes[i]
		ns, err := network.Create(n.NS, prepareNode)
		if err != nil {
			return err
		}
		spaces[i] = ns
		if err := wire.connect(ns, n, l.state.CPUs[i].IRQ); err != nil {
			return fmt.Errorf("connect %s: %w", n.Place.Name, err)
		}
		if err := errors.Join(services.Filter(ns, n), trackBriefly(ns)); err != nil {
			return fmt.Errorf("netfilter of %s: %w", n.Place.Name, err)
		}
		if hosts[i], err = podNetwork.Join(ns, i); err != nil {
			return fmt.Errorf("pod network of %s: %w", n.Place.Name, err)
		}
		return nil
	}); err != nil {
		return err
	}
	if err := parallel(ctx, c.Nodes*c.Pods, func(i int) error {
		p := nodes[i%c.Nodes].Pods[i/c.Nodes]
		ns, err := network.Create(p.NS, prepareIPv6)
		if err != nil {
			return err
		}
		defer ns.Close()
		if err := hosts[i%c.Nodes].Connect(ns, p); err != nil {
			return fmt.Errorf("create %s: %w", p.Place.Name, err)
		}
		return setCongestionControl(ns, c.CongestionControl)
	}); err != nil {
		return err
	}
	for _, ns := range spaces { // now that they have their routes to pods
		if err := setCongestionControl(ns, c.CongestionControl); err != nil {
			return err
		}
	}
	return l.makeExtras(ctx, o, spaces, nodes)
}

// makeExtras adds the services, network policies and balancer of a lab whose pods exist.
func (l *Lab) makeExtras(ctx context.Context, o Options, spaces []*network.Namespace, nodes []network.Node) error {
	c := l.state.Config
	if c.Services != nil {
		if err := l.makeServices(ctx, spaces, nodes); err != nil {
			return fmt.Errorf("services: %w", err)
		}
	}
	if c.Policies != nil {
		if err := parallel(ctx, len(spaces), func(i int) error {
			took, version, err := c.Policies.Load(ctx, spaces[i], nodes, i, overlay.Bypasses(c.Shape))
			l.policies[i] = Load{took, version}
			return err
		}); err != nil {
			return fmt.Errorf("network policies: %w", err)
		}
	}
	if c.Balancer != nil {
		if err := c.Balancer.Start(ctx, spaces[balancer.Node], nodes, o.Balancer, &l.processes, o.Log); err != nil {
			return fmt.Errorf("balancer: %w", err)
		}
	}
	return nil
}

// makeServices creates the services of a lab whose pods exist.
func (l *Lab) makeServices(ctx context.Context, spaces []*network.Namespace, nodes []network.Node) error {
	c := l.state.Config
	if c.translated() {
		took, err := c.Services.Attach(c.Name, nodes)
		for i := range l.services {
			l.services[i].Took = took
		}
		return err
	}
	rules := c.Services.Rules(nodes)
	version, err := rules.Version(ctx)
	if err != nil {
		return err
	}
	return parallel(ctx, len(spaces), func(i int) error {
		took, err := rules.Load(ctx, spaces[i])
		if err != nil {
			return fmt.Errorf("rules of %s: %w", nodes[i].Place.Name, err)
		}
		l.services[i] = Load{took, version}
		return nil
	})
}

// translated reports whether the lab's pods have a cgroup.
func (c Config) translated() bool {
	return c.Services != nil && c.Services.Mode == spec.ServiceEBPF
}

// threads is the number of concurrent threads that create devices. Most of the work is under the RTNL lock, so a second thread
// gains only a sixth; but waits overlap.
const threads = 4

// parallel calls f with 0 to n-1.
func parallel(ctx context.Context, n int, f func(i int) error) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(threads)
	for i := range n {
		g.Go(func() error {
			if err := ctx.Err(); err != nil {
				return err
			}
			return f(i)
		})
	}
	return g.Wait()
}

// Places returns the nodes, in order, and then the pods of each.
func (l *Lab) Places() []place.Place {
	var nodes, pods []place.Place
	for i, n := range layout(l.state.Config) {
		cpus := l.state.CPUs[i]
		add := func(all *[]place.Place, p place.Place) {
			p.CPUs = formatCPUs(cpus.CPUs)
			if cpus.IRQ >= 0 {
				p.IRQCPUs = formatCPUs([]int{cpus.IRQ})
			}
			*all = append(*all, p)
		}
		n.Place.Cores, n.Place.Shared = cpus.CPUs, cpus.IRQ < 0
		if n.Place.Shared && n.Place.Role != "" {
			core := l.state.Config.Balancer.Core(cpus.CPUs, i)
			n.Place.Cores, n.Place.Affinity = []int{core}, formatCPUs([]int{core})
		}
		add(&nodes, n.Place)
		for j, p := range n.Pods {
			if cpus.IRQ < 0 {
				// If nodes share CPUs, the two pods of a pair are on different CPUs. Pods on
				// different machines never share a CPU, and here the scheduler would decide
				// at random.
				p.Place.Affinity = formatCPUs(cpus.CPUs[(i+j)%len(cpus.CPUs) : (i+j)%len(cpus.CPUs)+1])
			}
			add(&pods, p.Place)
		}
	}
	return append(nodes, pods...)
}

// Placement is a sentence about the CPUs on which the nodes run.
func (l *Lab) Placement() string {
	cpus := l.state.CPUs
	if cpus[0].IRQ < 0 && l.state.Config.Balancer != nil {
		return l.state.Config.Balancer.Placement(cpus[0].CPUs)
	}
	if len(cpus[0].CPUs) == 1 {
		return fmt.Sprintf("The nodes share CPU %s, so both ends of a pair run on it.", formatCPUs(cpus[0].CPUs))
	}
	if cpus[0].IRQ < 0 {
		return fmt.Sprintf("The nodes share CPUs %s, because there are fewer than two CPUs per node: the two ends of a pair are on different CPUs, "+
			"and a packet is received on the CPU that sent it.", formatCPUs(cpus[0].CPUs))
	}
	var parts []string
	for i, c := range cpus {
		parts = append(parts, fmt.Sprintf("node%d has %s", i, formatCPUs(c.CPUs)))
	}
	said := fmt.Sprintf("Each node has its own CPUs (%s); the last one receives the NIC's packets, by RPS in place of an interrupt.",
		strings.Join(parts, ", "))
	if cpus[0].SharesCore {
		said += " Some nodes have threads of the same core, so they slow each other down."
	}
	return said
}

// In returns a function that starts a command in a place: in its network namespace, on its CPUs and, for a pod with services in
// mode ebpf, in the lab's cgroup. /sys stays that of the machine.
func (l *Lab) In(p place.Place) func(*exec.Cmd) error {
	return func(cmd *exec.Cmd) error {
		ns, err := l.find(p.Name)
		if err != nil {
			return err
		}
		cpus, err := parseCPUs(cmp.Or(p.Affinity, p.CPUs))
		if err != nil {
			return fmt.Errorf("CPUs of %s: %w", p.Name, err)
		}
		if p.Kind == place.Pod && l.state.Config.translated() {
			cgroup, err := services.OpenCgroup(l.state.Config.Name)
			if err != nil {
				return err
			}
			defer cgroup.Close()
			if cmd.SysProcAttr == nil {
				cmd.SysProcAttr = new(syscall.SysProcAttr)
			}
			cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(cgroup.Fd())
		}
		var set, before unix.CPUSet
		for _, cpu := range cpus {
			set.Set(cpu)
		}
		return network.Inside(ns, func() error {
			// A child inherits the namespace and the affinity of the thread that forks it.
			if err := unix.SchedGetaffinity(0, &before); err != nil {
				return fmt.Errorf("read CPU affinity: %w", err)
			}
			if err := unix.SchedSetaffinity(0, &set); err != nil {
				return fmt.Errorf("set CPU affinity to %s of %s: %w", formatCPUs(cpus), p.Name, err)
			}
			err := cmd.Start()
			if err != nil {
				err = fmt.Errorf("start %s in %s: %w", cmd.Path, p.Name, err)
			}
			return errors.Join(err, unix.SchedSetaffinity(0, &before))
		})
	}
}

// Proxy returns the name and version of the balancer's proxy, "haproxy 2.6.12" or "builtin", or "" without a balancer.
func (l *Lab) Proxy(ctx context.Context) (string, error) {
	b := l.state.Config.Balancer
	if b == nil {
		return "", nil
	}
	return b.Version(ctx)
}

// Loaded returns how the services and the network policies of a node were loaded. In mode ebpf, the services of all nodes are
// loaded together, and each node reports the total time.
func (l *Lab) Loaded(node string) (services, policies Load) {
	for i, n := range layout(l.state.Config) {
		if n.Place.Name == node && i < len(l.services) {
			return l.services[i], l.policies[i]
		}
	}
	return Load{}, Load{}
}

// ChangeEndpoints replaces perSecond backends of the lab's services per second, in the way of kube-proxy, until stop is called.
// stop returns how many it has replaced.
func (l *Lab) ChangeEndpoints(ctx context.Context, perSecond int) (stop func() (made int, err error), err error) {
	c := l.state.Config
	var spaces []*network.Namespace
	closeAll := func() {
		for _, ns := range spaces {
			ns.Close()
		}
	}
	nodes := layout(c)
	for _, n := range nodes {
		ns, err := network.Open(n.NS)
		if err != nil {
			closeAll()
			return nil, err
		}
		spaces = append(spaces, ns)
	}
	if l.changer == nil {
		l.changer = c.Services.Changer(nodes)
	}
	if err := l.changer.Open(c.Name, spaces); err != nil {
		closeAll()
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	var made int
	done := make(chan error, 1)
	go func() {
		var err error
		made, err = l.changer.Run(ctx, perSecond)
		done <- err
	}()
	return func() (int, error) {
		cancel()
		err := errors.Join(<-done, l.changer.Close())
		closeAll()
		return made, err
	}, nil
}

// Run runs a command in a place, and returns its exit code. When ctx ends, it interrupts the command.
func (l *Lab) Run(ctx context.Context, name string, argv []string, in, out, errs *os.File) (code int, err error) {
	var at place.Place
	for _, p := range l.Places() {
		if p.Name == name {
			at = p
		}
	}
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, out, errs
	at.Name = name
	if err := l.In(at)(cmd); err != nil {
		return 0, err
	}
	err = cmd.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Exited() {
		return exit.ExitCode(), nil
	}
	return 0, err
}

// find returns the name of the network namespace of a place.
func (l *Lab) find(place string) (ns string, err error) {
	for _, n := range layout(l.state.Config) {
		if place == n.Place.Name {
			return n.NS, nil
		}
		for _, p := range n.Pods {
			if place == p.Place.Name {
				return p.NS, nil
			}
		}
	}
	return "", fmt.Errorf("lab %s has no place %q: its nodes are node0 to node%d, and the pods of each are pod0 to pod%d, as in node0/pod0",
		l.state.Config.Name, place, l.state.Config.Nodes-1, l.state.Config.Pods-1)
}
