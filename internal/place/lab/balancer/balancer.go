//go:build linux

// Package balancer is the balancer of a lab: a proxy on the second node, with clients on the first node, and a backend on each
// of the others. The proxy balances TCP connections round robin. It listens on one port per pair, for IPv4 and IPv6, and
// forwards to the same port of the backends.
//
// The proxy is HAProxy or the built-in one (Run). The lab makes the nodes.
package balancer

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/accel/cpuset"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/spec"
)

// Config describes a balancer.
type Config struct {
	// Backends is the number of backends, 1 to spec.MaxBackends.
	Backends int `json:"backends"`
	// Proxy is one of the API's. If it is empty, Choose chooses one.
	Proxy string `json:"proxy"`
	// NICs are the nodes' NICs where they differ from the lab's.
	NICs spec.RoleNICs `json:"nics"`
	// Pairs is the maximum number of pairs at a time.
	Pairs int `json:"pairs"`
}

// Node is the index of the proxy's node.
const Node = 1

const (
	// balancerPort is the port of the first pair. The ports of the others follow.
	balancerPort = 7465
	// proxyStart limits how long a proxy may take until it listens.
	proxyStart = 10 * time.Second
	// proxyConfig is the path of the proxy's configuration. HAProxy needs a file; an inherited one without a name cannot be
	// left behind.
	proxyConfig = "/proc/self/fd/3"
)

func (b *Config) role(i int) string {
	return spec.Balancer{Backends: b.Backends}.Role(i)
}

// Validate checks that a lab with this many nodes can have the balancer.
func (b *Config) Validate(nodes int) error {
	switch {
	case b.Backends < 1 || b.Backends > spec.MaxBackends:
		return fmt.Errorf("backends must be 1 to %d, are %d", spec.MaxBackends, b.Backends)
	case nodes < 2+b.Backends:
		return fmt.Errorf("the client, the proxy and %d backends need %d nodes, and there are %d", b.Backends, 2+b.Backends, nodes)
	case b.Pairs < 1 || b.Pairs > 64:
		return fmt.Errorf("pairs must be 1 to 64, are %d", b.Pairs)
	case b.Proxy != "" && b.Proxy != spec.ProxyHAProxy && b.Proxy != spec.ProxyBuiltin:
		return fmt.Errorf("proxy must be %s or %s, is %q", spec.ProxyHAProxy, spec.ProxyBuiltin, b.Proxy)
	}
	for _, role := range []string{spec.RoleClient, spec.RoleProxy, spec.RoleBackend} {
		if _, err := b.NICs.Of(role).Rate.BitsPerSecond(); err != nil {
			return fmt.Errorf("rate of the %s's NIC %w", role, err)
		}
	}
	return nil
}

// Choose chooses a proxy if none is set, and checks that it is available. builtin is the command of the built-in proxy.
func (b *Config) Choose(builtin []string) error {
	_, err := exec.LookPath(spec.ProxyHAProxy)
	switch {
	case b.Proxy == "" && err == nil:
		b.Proxy = spec.ProxyHAProxy
	case b.Proxy == "":
		b.Proxy = spec.ProxyBuiltin
	case b.Proxy == spec.ProxyHAProxy && err != nil:
		return fmt.Errorf("HAProxy is not installed: install it (apt install haproxy), or use the built-in proxy (proxy: %s)", spec.ProxyBuiltin)
	}
	if b.Proxy == spec.ProxyBuiltin && len(builtin) == 0 {
		return fmt.Errorf("the proxy %s needs Options.Balancer", b.Proxy)
	}
	return nil
}

// Assign gives the nodes of a lab their roles and NIC rates, and the proxy its service address.
func (b *Config) Assign(nodes []network.Node) {
	for i := range nodes {
		n := &nodes[i]
		n.Place.Role = b.role(i)
		n.Rate = cmp.Or(b.NICs.Of(n.Place.Role).Rate, n.Rate)
	}
	proxy := &nodes[Node].Place
	proxy.Service = place.Service{IPv4: proxy.IPv4, IPv6: proxy.IPv6, Port: balancerPort}
}

// Core returns the CPU of node i's processes if nodes share CPUs. If there are two or more, the proxy has one of its own, so
// that its load can be measured.
func (b *Config) Core(cpus []int, i int) int {
	if len(cpus) == 1 {
		return cpus[0]
	}
	others := slices.Concat(cpus[:1], cpus[2:])
	switch b.role(i) {
	case spec.RoleProxy:
		return cpus[1]
	case spec.RoleClient:
		return cpus[0]
	}
	return others[(i-Node)%len(others)]
}

// Placement is a sentence about the CPUs on which the nodes run if they share CPUs.
func (b *Config) Placement(cpus []int) string {
	said := fmt.Sprintf("The nodes share CPUs %s, because there are fewer than two CPUs per node", cpuset.New(cpus...))
	if len(cpus) == 1 {
		return said + "."
	}
	return fmt.Sprintf("%s: the proxy runs on CPU %d, the client and the backends on the others, and a packet is received on the CPU that sent it.",
		said, b.Core(cpus, Node))
}

// front is an address on which the proxy listens, and its backends.
type front struct {
	Name     string           `json:"name"`
	Listen   netip.AddrPort   `json:"listen"`
	Backends []netip.AddrPort `json:"backends"`
}

// fronts returns the fronts of a balancer, given the nodes of its lab.
func (b *Config) fronts(nodes []network.Node) []front {
	var all []front
	for pair := range b.Pairs {
		for _, version := range []int{4, 6} {
			at := func(n network.Node) netip.AddrPort {
				return netip.AddrPortFrom(n.Place.IP(version), balancerPort+uint16(pair))
			}
			f := front{Name: fmt.Sprintf("pair%d-ipv%d", pair, version), Listen: at(nodes[Node])}
			for _, n := range nodes[2 : 2+b.Backends] {
				f.Backends = append(f.Backends, at(n))
			}
			all = append(all, f)
		}
	}
	return all
}

// haproxy returns a configuration with these fronts, for a process with this limit of open files. It leaves HAProxy's options
// for moving bytes at their defaults. Idle connections stay open, because they wait for the window to begin.
func haproxy(fronts []front, files uint64) []byte {
	var b bytes.Buffer
	// A connection takes two files. HAProxy reserves memory for the maximum.
	fmt.Fprintf(&b, `global
    maxconn %d
defaults
    mode tcp
    balance roundrobin
    timeout connect 5s
    timeout client 1h
    timeout server 1h
`, (max(min(files, 1<<16), 1<<11)-1<<10)/2)
	for _, f := range fronts {
		fmt.Fprintf(&b, "listen %s\n    bind %s\n", f.Name, f.Listen)
		for i, to := range f.Backends {
			fmt.Fprintf(&b, "    server backend%d %s\n", i, to)
		}
	}
	return b.Bytes()
}

// Start starts the proxy of a lab in the namespace of its node, and returns once it listens. Removing the lab kills it like
// everything else there. builtin is the command of the built-in proxy.
func (b *Config) Start(ctx context.Context, ns *network.Namespace, nodes []network.Node, builtin []string, processes network.Processes, log *slog.Logger) error {
	fronts := b.fronts(nodes)
	argv := builtin
	config, err := json.Marshal(fronts)
	if b.Proxy == spec.ProxyHAProxy {
		var files unix.Rlimit
		err = unix.Getrlimit(unix.RLIMIT_NOFILE, &files)
		config, argv = haproxy(fronts, files.Max), []string{spec.ProxyHAProxy, "-db", "-f", proxyConfig}
	}
	if err != nil {
		return fmt.Errorf("configure %s: %w", b.Proxy, err)
	}
	file, err := inMemory("balancer", config)
	if err != nil {
		return err
	}
	defer file.Close()
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.ExtraFiles = []*os.File{file}
	// Ctrl-C in a terminal must not kill the proxy before the lab is removed.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	said := new(output)
	cmd.Stdout, cmd.Stderr = said, said
	if err := processes.Start(Node, cmd); err != nil {
		return err
	}
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()
	ctx, cancel := context.WithTimeoutCause(ctx, proxyStart, fmt.Errorf("it does not listen after %s", proxyStart))
	defer cancel()
	for {
		missing, err := notListening(ns, fronts)
		if err != nil {
			return err
		}
		if missing == 0 {
			processes.Watch(func() error { return <-exited }, func(err error) {
				log.Warn("the proxy exited: clients cannot reach the backends", "node", nodes[Node].Place.Name, "err", err, "output", said.String())
			})
			return nil
		}
		select {
		case err := <-exited: // nil if the program has exited with 0
			return fmt.Errorf("%s exited before it listened (%v): %s", b.Proxy, err, said)
		case <-ctx.Done(): // removing the lab kills it
			return fmt.Errorf("%s: %w: %s", b.Proxy, context.Cause(ctx), said)
		case <-time.After(time.Millisecond):
		}
	}
}

// notListening counts the fronts on which no process in a namespace listens yet.
func notListening(ns *network.Namespace, fronts []front) (missing int, err error) {
	listening := make(map[uint16]int)
	err = ns.Do(func() error {
		for _, name := range []string{"tcp", "tcp6"} {
			text, err := os.ReadFile("/proc/thread-self/net/" + name)
			if err != nil {
				return fmt.Errorf("list listening sockets: %w", err)
			}
			for _, port := range listeningPorts(text) {
				listening[port]++
			}
		}
		return nil
	})
	for _, f := range fronts {
		if listening[f.Listen.Port()]--; listening[f.Listen.Port()] < 0 {
			missing++
		}
	}
	return missing, err
}

// listeningPorts parses /proc/net/tcp or tcp6: "0: 0100007F:0016 00000000:0000 0A …", where 0A is TCP_LISTEN (proc(5)).
func listeningPorts(text []byte) (ports []uint16) {
	for line := range bytes.Lines(text) {
		fields := bytes.Fields(line)
		if len(fields) < 4 || string(fields[3]) != "0A" {
			continue
		}
		_, hex, _ := strings.Cut(string(fields[1]), ":")
		if port, err := strconv.ParseUint(hex, 16, 16); err == nil {
			ports = append(ports, uint16(port))
		}
	}
	return ports
}

// inMemory returns a file in memory, positioned at its beginning.
func inMemory(name string, content []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create file in memory: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if _, err := f.WriteAt(content, 0); err != nil {
		return nil, errors.Join(fmt.Errorf("write file in memory: %w", err), f.Close())
	}
	return f, nil
}

// output keeps the beginning of what a process prints. It is safe for concurrent use.
type output struct {
	mu   sync.Mutex
	text []byte
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	const most = 4 << 10
	o.text = append(o.text, p[:min(len(p), most-len(o.text))]...)
	return len(p), nil
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	if text := strings.TrimSpace(string(o.text)); text != "" {
		return text
	}
	return "it printed nothing"
}

// Version returns the name and version of the proxy: "haproxy 2.6.12" or "builtin".
func (b *Config) Version(ctx context.Context) (string, error) {
	if b.Proxy != spec.ProxyHAProxy {
		return b.Proxy, nil
	}
	said, err := exec.CommandContext(ctx, spec.ProxyHAProxy, "-v").Output()
	if err != nil {
		return "", fmt.Errorf("ask HAProxy for its version: %w", err)
	}
	return haproxyVersion(said), nil
}

// haproxyVersion parses the output of haproxy -v: "HAProxy version 2.6.12-1+deb12u4 2026/10/17
// - https://haproxy.org/".
func haproxyVersion(said []byte) string {
	fields := bytes.Fields(said)
	if len(fields) < 3 || string(fields[1]) != "version" {
		return spec.ProxyHAProxy
	}
	return spec.ProxyHAProxy + " " + string(fields[2])
}
