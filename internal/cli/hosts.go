package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/pflag"
	"golang.org/x/term"

	"slipstream.dev/internal/experiment"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/hosts"
	"slipstream.dev/internal/place/topology"
	"slipstream.dev/internal/plain"
	"slipstream.dev/internal/spec"
)

// hostOptions are the flags for runs on hosts.
type hostOptions struct{ binaries []string }

func (o *hostOptions) addFlags(f *pflag.FlagSet) {
	f.StringArrayVar(&o.binaries, "host-binary", nil, "build of slipstream, copied to hosts (Linux or Windows) and pods (Linux) whose system or architecture differs from this program's")
}

// parseHosts returns the hosts of a list such as "a,me@b:2222,[fd77::1]".
func parseHosts(names string) (all []spec.Host) {
	taken := make(map[string]bool)
	for name := range strings.SplitSeq(names, ",") {
		host := parseHost(name)
		if taken[host.Name] && host.Port != 0 { // another port of a machine that forwards them to several
			host.Name, host.Address = fmt.Sprintf("%s-%d", host.Name, host.Port), cmp.Or(host.Address, host.Name)
		}
		taken[host.Name] = true
		all = append(all, host)
	}
	return all
}

// parseHost reads [USER@]NAME[:PORT]. An IPv6 address, with or without brackets, gets a name with valid characters.
func parseHost(text string) (host spec.Host) {
	if user, at, ok := strings.Cut(text, "@"); ok {
		host.User, text = user, at
	}
	if name, port, err := net.SplitHostPort(text); err == nil {
		if n, err := strconv.Atoi(port); err == nil {
			text, host.Port = name, n
		}
	}
	text = strings.TrimSuffix(strings.TrimPrefix(text, "["), "]")
	if a, err := netip.ParseAddr(text); err == nil && a.Is6() {
		host.Address, text = text, "ip6-"+strings.NewReplacer(":", "-", "%", "-").Replace(text)
	}
	host.Name = text
	return host
}

// hostList returns the hosts of "a,me@b" as an experiment has them. Each takes the labels and the price of the
// host at its position in others.
func hostList(names string, others []spec.Host) string {
	all := parseHosts(names)
	for i := range min(len(all), len(others)) {
		all[i].Labels, all[i].Price = others[i].Labels, others[i].Price
	}
	text, _ := json.Marshal(all) // the types cannot fail
	return string(text)
}

// hostTarget runs an experiment on hosts.
type hostTarget struct {
	config   hosts.Config
	topology *topology.Topology
}

func newHostTarget(p Process, o hostOptions, exp *spec.Experiment, note func(string)) *hostTarget {
	return &hostTarget{config: hostConfig(p, o, exp, note), topology: topology.Of(exp)}
}

// hostConfig returns what an experiment needs of its hosts.
func hostConfig(p Process, o hostOptions, exp *spec.Experiment, note func(string)) hosts.Config {
	config := hosts.Config{Hosts: topology.Of(exp).Hosts(), Binaries: o.binaries, Ask: p.interactive(), Note: note}
	config.Root = needRoot(exp, config.Hosts)
	config.Linux, config.Windows = needSystem(exp)
	for _, v := range exp.Spec.Variants {
		for _, ends := range hostPairs(exp, v) {
			path := hosts.Path{Client: ends[0], Server: ends[1], Address: cmp.Or(exp.PathOf(v).Address, spec.AddressNative)}
			for _, w := range exp.Spec.Workloads {
				t := w.Traffic()
				path.Transport, path.Port = place.Transport{IP: t.IP, Protocol: t.Protocol}, t.PortOf(0)
				if !slices.Contains(config.Paths, path) {
					config.Paths = append(config.Paths, path)
				}
			}
		}
	}
	return config
}

// interactive reports whether the user can be asked, because the input is a terminal.
func (p Process) interactive() bool { return term.IsTerminal(int(p.Stdin.Fd())) }

// hostPairs returns the client and the server of a variant, or all pairs of a mesh.
func hostPairs(exp *spec.Experiment, v spec.Variant) (pairs [][2]string) {
	all := exp.Spec.Target.Hosts
	if exp.Spec.Mesh == nil {
		client, server := exp.HostsOf(v)
		return [][2]string{{all[client].Name, all[server].Name}}
	}
	for _, client := range all {
		for _, server := range all {
			if client.Name != server.Name {
				pairs = append(pairs, [2]string{client.Name, server.Name})
			}
		}
	}
	return pairs
}

// needRoot maps each host with accelerators to the first of them. Accelerators act on all hosts, or, if the
// variant limits them to one side, on its host of that side.
func needRoot(exp *spec.Experiment, all []spec.Host) map[string]string {
	root := make(map[string]string)
	for _, v := range exp.Spec.Variants {
		if len(v.Accelerate) == 0 {
			continue
		}
		client, server := exp.HostsOf(v)
		side := map[string]string{spec.SideClient: exp.Spec.Target.Hosts[client].Name, spec.SideServer: exp.Spec.Target.Hosts[server].Name}[v.On]
		for _, h := range all {
			if (v.On == "" || exp.Spec.Mesh != nil || h.Name == side) && root[h.Name] == "" {
				root[h.Name] = fmt.Sprintf("%s of variant %s", v.Accelerate[0], v.Name)
			}
		}
	}
	return root
}

// needSystem maps each host to the first workload whose end there needs Linux, or Windows.
func needSystem(exp *spec.Experiment) (linux, windows map[string]string) {
	linux, windows = make(map[string]string), make(map[string]string)
	for _, v := range exp.Spec.Variants {
		client, server := exp.HostsOf(v)
		for _, w := range exp.Spec.Workloads {
			need := systemsFor(exp.WorkloadFor(v, w))
			for i, what := range map[int]string{client: need.linuxClient, server: need.linuxServer} {
				if name := exp.Spec.Target.Hosts[i].Name; what != "" {
					linux[name] = cmp.Or(linux[name], what)
				}
			}
			for _, i := range []int{client, server} {
				if name := exp.Spec.Target.Hosts[i].Name; need.windows != "" {
					windows[name] = cmp.Or(windows[name], need.windows)
				}
			}
		}
	}
	return linux, windows
}

// systems names the parts of a workload that need Linux at its client or its server, and the part that needs
// Windows; "" if there is none.
type systems struct{ linuxClient, linuxServer, windows string }

func systemsFor(w spec.Workload) (need systems) {
	t := w.Traffic()
	both := ""
	switch {
	case t.Tool == spec.ToolLatte:
		need.windows = "latte of workload " + w.Name
	case t.Tool == spec.ToolGRPC: // part of this program, like the engine
	case t.Tool != spec.ToolNative:
		both = t.Tool + " of workload " + w.Name
	case w.HTTP != nil:
		both = "http of workload " + w.Name
	case t.IO == spec.IOEpoll:
		both = "io: epoll of workload " + w.Name
	case t.Protocol == "udp" && t.Connections > 1:
		need.linuxServer = fmt.Sprintf("a server of %d UDP flows of workload %s", t.Connections, w.Name)
	}
	need.linuxClient, need.linuxServer = both, cmp.Or(both, need.linuxServer)
	return need
}

func (t *hostTarget) Network(ctx context.Context, fabric int) (experiment.Network, error) {
	up, err := hosts.Up(ctx, t.config)
	if err != nil {
		return nil, err
	}
	return &hostNetwork{Hosts: up, Assignment: t.topology.Assign(fabric, up.Places())}, nil
}

type hostNetwork struct {
	*hosts.Hosts
	*topology.Assignment
}

func (n *hostNetwork) Places() []place.Place { return n.Assignment.Places() }

func (n *hostNetwork) Setup() place.Setup {
	var names []string
	for _, p := range n.Assignment.Places() {
		names = append(names, p.Name)
	}
	return place.Setup{Placement: "Clients and servers run on the hosts " + strings.Join(names, ", ") + ".", Lead: n.Lead()}
}

func (n *hostNetwork) Worker(ctx context.Context, p place.Place, use place.Use) (experiment.Worker, error) {
	c, err := n.Hosts.Worker(ctx, p, use)
	if err != nil {
		return nil, err
	}
	return c, nil
}

// surveyedHost is a row of a dry run on hosts.
type surveyedHost struct {
	Host   string `json:"host"`
	Login  string `json:"login,omitempty"`
	System string `json:"system,omitempty"`
	// Folder is where the program would run.
	Folder string `json:"folder,omitempty"`
	// Accelerators says by which right they can be applied, or "none".
	Accelerators string `json:"accelerators"`
	// Limits names what the host cannot do, but the experiment does not need.
	Limits string `json:"limits,omitempty"`
}

// surveyHosts checks the hosts of a run, for a dry run.
func surveyHosts(ctx context.Context, p Process, o hostOptions, exp *spec.Experiment) (*survey, error) {
	config := hostConfig(p, o, exp, func(text string) { fmt.Fprintln(p.Err, plain.Line(text)) })
	found, err := hosts.Survey(ctx, config)
	if err != nil {
		return nil, err
	}
	s := &survey{unchecked: "a worker"}
	var rows []surveyedHost
	for _, f := range found {
		row := surveyedHost{Host: f.Host, Login: f.Login, System: f.System, Folder: f.Folder, Accelerators: "none"}
		switch {
		case f.Sudo:
			row.Accelerators = "by sudo -n"
		case f.Root:
			row.Accelerators = "by root"
		}
		if f.Missing != nil {
			s.missing = append(s.missing, f.Missing.Error())
		} else {
			row.Limits = f.Limits
		}
		rows = append(rows, row)
	}
	s.found, s.print = rows, func(w io.Writer) error { return printHosts(w, rows) }
	return s, nil
}

func printHosts(w io.Writer, rows []surveyedHost) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "\nHOST\tLOGIN\tSYSTEM\tPROGRAM RUNS IN\tACCELERATORS")
	var limits strings.Builder
	for _, r := range rows {
		fields := []string{r.Host, r.Login, r.System, r.Folder, r.Accelerators}
		for i := range fields {
			fields[i] = plain.Line(fields[i])
		}
		fmt.Fprintln(tw, strings.Join(fields, "\t"))
		if r.Limits != "" {
			fmt.Fprintf(&limits, "\n%s.\n", plain.Line(r.Limits))
		}
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	_, err := io.WriteString(w, limits.String())
	return err
}
