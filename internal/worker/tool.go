//go:build linux || windows

package worker

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/traffic"
	"slipstream.dev/internal/traffic/tools"
)

const (
	// toolPatience limits how long a tool's server may take until it listens, and how long a client may run after its time.
	toolPatience = 10 * time.Second
	// acceptEvery is the interval between attempts to connect to a server that does not print when it listens.
	acceptEvery = 10 * time.Millisecond
	// toolOutput limits the output of a tool that is kept, in bytes.
	toolOutput = 16 << 20
	// toolLogs limits what is kept of its logs, so that its output, which comes first, and they fit.
	toolLogs = toolOutput - 1<<20
)

// toolEnd is one end of a pair whose traffic another tool generates.
type toolEnd struct {
	tool     tools.Tool
	workload spec.Workload
	argv     []string
	port     uint16         // of a server
	release  func()         // gives port back; nil if it was not reserved
	at       netip.AddrPort // of a client's server
	home     *home          // of an application's end
	patience time.Duration  // toolPatience, except in tests
	stop     context.CancelFunc
	wait     func() error
	output   *capture
}

func (t *toolEnd) Port() uint16 { return t.port }

func lookupTool(w spec.Workload) (tools.Tool, error) {
	name := w.Traffic().Tool
	tool, ok := tools.Lookup(name)
	if !ok {
		return nil, fmt.Errorf("workload %s: no such tool %q", w.Name, name)
	}
	if err := errors.Join(runs(name), tool.Check(w)); err != nil {
		return nil, err
	}
	return tool, nil
}

// serveTool starts a tool's server and returns once it listens.
func serveTool(ctx context.Context, tool tools.Tool, w spec.Workload, at netip.AddrPort, patience time.Duration) (end, error) {
	addr, port := at.Addr(), at.Port()
	var release func()
	var err error
	if port == 0 {
		port, release, err = reservePort(addr, w.Traffic().Protocol == "udp")
	} else {
		err = awaitPort(ctx, at, patience)
	}
	if err != nil {
		return nil, err
	}
	listening := make(chan struct{})
	t := &toolEnd{tool: tool, workload: w, argv: tool.ServerArgv(w, addr, port), port: port, release: release, patience: patience}
	var once sync.Once
	t.output = &capture{line: func(line []byte) {
		if tool.ServerReady(line) {
			once.Do(func() { close(listening) })
		}
	}}
	var prepare tools.Preparation
	if app, ok := tool.(tools.Application); ok {
		if t.home, err = newHome(os.TempDir(), app.Files(w, addr, port)); err != nil {
			t.leave()
			return nil, err
		}
		prepare = app.Prepare(w, addr, port)
	}
	if err := t.prepare(ctx, prepare.Before); err != nil {
		t.leave()
		return nil, err
	}
	if err := t.start(ctx); err != nil {
		t.leave()
		return nil, err
	}
	if prepare.Silent {
		dialing, dialed := context.WithCancel(ctx)
		defer dialed()
		go func() {
			if accepts(dialing, netip.AddrPortFrom(addr, port)) {
				once.Do(func() { close(listening) })
			}
		}()
	}
	exited := make(chan error, 1)
	wait := t.wait
	go func() { exited <- wait() }()
	t.wait = func() error { return <-exited }
	timer := time.NewTimer(t.patience)
	defer timer.Stop()
	select {
	case <-listening:
		if err := t.prepare(ctx, prepare.After); err != nil {
			t.Close()
			return nil, err
		}
		return t, nil
	case err := <-exited:
		t.stop()
		t.leave()
		return nil, fmt.Errorf("%s: exited before it listened: %w", t.name(), t.explain(err))
	case <-timer.C:
		t.Close()
		return nil, fmt.Errorf("%s: does not listen after %s: %s", t.name(), t.patience, t.output.excerpt())
	}
}

// prepare runs commands in the folder of an application's server, one after another.
func (t *toolEnd) prepare(ctx context.Context, commands [][]string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, place.PrepareWait, fmt.Errorf("still running after %s", place.PrepareWait))
	defer cancel()
	for _, argv := range commands {
		c := &toolEnd{argv: argv, home: t.home, output: new(capture)}
		if err := c.start(ctx); err != nil {
			return err
		}
		err := c.wait()
		c.stop()
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", c.name(), c.explain(err))
		}
	}
	return nil
}

// accepts waits until a server accepts a connection, or ctx ends.
func accepts(ctx context.Context, at netip.AddrPort) bool {
	return poll(ctx, acceptEvery, func() bool {
		var d net.Dialer
		c, err := d.DialContext(ctx, "tcp", at.String())
		if err == nil {
			c.Close()
		}
		return err == nil
	})
}

// poll calls done at intervals until it returns true. It returns false if ctx ends first.
func poll(ctx context.Context, interval time.Duration, done func() bool) bool {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for !done() {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// driveTool prepares a tool's client, whose process starts with the traffic.
func driveTool(w spec.Workload, to netip.AddrPort, congestionControl, path string, patience time.Duration) (end, error) {
	tool, err := lookupTool(w)
	if err != nil {
		return nil, err
	}
	argv := tool.ClientArgv(w, to.Addr(), to.Port(), congestionControl, path)
	t := &toolEnd{tool: tool, workload: w, argv: argv, at: to, output: new(capture), patience: patience}
	if app, ok := tool.(tools.Application); ok {
		if t.home, err = newHome(os.TempDir(), app.Files(w, to.Addr(), to.Port())); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// Run runs a client until it exits, and parses its output; a server keeps running until ctx ends.
func (t *toolEnd) Run(ctx context.Context, window traffic.Window, progress func(traffic.Progress)) (record.Endpoint, error) {
	if t.port != 0 {
		progress(traffic.Progress{Command: t.name()})
		if cc := t.congestionControl(ctx, t.port, false); cc != "" {
			progress(traffic.Progress{CongestionControl: cc})
		}
		// The client reports everything. The caller ends the server when the client is done.
		<-ctx.Done()
		return record.Endpoint{}, context.Cause(ctx)
	}
	limit := time.Duration(window.To-traffic.Now()) + t.patience
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("%s: still running %s after its run should have ended", t.name(), t.patience))
	defer cancel()
	// A tool has its own warm-up. Start it early enough that its window is this one.
	begin := window.From - int64(t.tool.Lead(t.workload))
	if _, ok := t.tool.(tools.Application); ok { // warmUp runs it first
		begin = window.Start
	}
	if begin < window.Start {
		return record.Endpoint{}, fmt.Errorf("%s needs a warm-up of %s at least", t.argv[0], t.tool.Lead(t.workload))
	}
	if err := traffic.SleepUntil(ctx, begin); err != nil {
		return record.Endpoint{}, err
	}
	if app, ok := t.tool.(tools.Application); ok {
		if err := t.warmUp(ctx, app, window); err != nil {
			return record.Endpoint{}, err
		}
	}
	if err := t.start(ctx); err != nil {
		return record.Endpoint{}, err
	}
	look, looked := context.WithCancel(ctx)
	seen := make(chan string, 1)
	go func() { seen <- t.congestionControl(look, t.at.Port(), true) }()
	exit := t.wait()
	looked()
	cc := <-seen
	if err := context.Cause(ctx); err != nil {
		return record.Endpoint{}, fmt.Errorf("%w: %s", err, t.output.excerpt())
	}
	if err := t.readLogs(); err != nil {
		return record.Endpoint{}, err
	}
	// A tool's output says more than its exit status.
	result, err := t.tool.Parse(t.workload, t.output.Bytes())
	if err != nil || exit != nil {
		return record.Endpoint{}, fmt.Errorf("%s: %w", t.name(), errors.Join(err, t.explain(exit)))
	}
	result.CongestionControl, result.Command = cc, t.name()
	if result.Machine != nil {
		result.Machine.CPUs = runtime.NumCPU()
	}
	return result, nil
}

const (
	// lookEvery is the interval at which congestionControl looks for a tool's sockets. It stops at the first success, because
	// each look walks the kernel's table of connections.
	lookEvery = 50 * time.Millisecond
	// lookMost limits how long it looks after the warm-up.
	lookMost = 2 * time.Second
)

// congestionControl waits for the tool's TCP connections to or from a port, and returns their congestion control, or "" if
// there are none in time.
func (t *toolEnd) congestionControl(ctx context.Context, port uint16, remote bool) string {
	traffic := t.workload.Traffic()
	if traffic.Protocol == "udp" {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, time.Duration(traffic.Warmup)+lookMost)
	defer cancel()
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ""
		case <-tick.C:
		}
		names, err := congestionControls(port, remote)
		if err != nil { // netlink is denied, which will not change, or this is not Linux
			return ""
		}
		if len(names) > 0 {
			return strings.Join(names, " ")
		}
	}
}

// warmUp runs an application's client until the window begins. If the measured run needs a number of requests, warmUp derives
// it from this run.
func (t *toolEnd) warmUp(ctx context.Context, app tools.Application, window traffic.Window) error {
	before := &toolEnd{argv: app.WarmupArgv(t.workload, t.at.Addr(), t.at.Port()), output: new(capture), home: t.home}
	if err := before.start(ctx); err != nil {
		return err
	}
	exited := make(chan error, 1)
	go func() { exited <- before.wait() }()
	until, cancel := context.WithCancel(ctx)
	defer cancel()
	due := make(chan error, 1)
	go func() { due <- traffic.SleepUntil(until, window.From) }()
	select {
	case exit := <-exited:
		before.stop()
		return fmt.Errorf("%s: ended within the warm-up: %w", before.name(), before.explain(exit))
	case err := <-due:
		before.stop()
		if killed := <-exited; err != nil {
			return errors.Join(err, killed)
		}
	}
	if counted, ok := app.(tools.Counted); ok {
		var err error
		t.argv, err = counted.CountedArgv(t.workload, t.at.Addr(), t.at.Port(), before.output.Bytes())
		return err
	}
	return nil
}

// readLogs appends the logs that an application's client has left in its folder to its output. Of logs that are too long it appends
// every second line, or fewer: their beginning alone would say nothing about the end of the window.
func (t *toolEnd) readLogs() error {
	if t.home == nil {
		return nil
	}
	logs, _ := filepath.Glob(filepath.Join(t.home.path(), tools.LogPrefix+"*"))
	for _, log := range logs {
		f, err := os.Open(log)
		if err != nil {
			return fmt.Errorf("read the log of %s: %w", t.argv[0], err)
		}
		err = thin(t.output, f, toolLogs/int64(len(logs)))
		f.Close()
		if err != nil {
			return fmt.Errorf("read the log of %s: %w", t.argv[0], err)
		}
	}
	return nil
}

// thin copies a file to w, or every nth of its lines, so that about most bytes are copied.
func thin(w io.Writer, f *os.File, most int64) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	n := info.Size()/most + 1
	out, lines := bufio.NewWriter(w), bufio.NewScanner(io.LimitReader(f, info.Size()))
	for i := int64(0); lines.Scan(); i++ {
		if i%n == 0 {
			_, _ = out.Write(lines.Bytes()) // Flush returns the error
			_ = out.WriteByte('\n')
		}
	}
	return errors.Join(lines.Err(), out.Flush())
}

func (t *toolEnd) name() string { return strings.Join(t.argv, " ") }

// start starts the process. The tool ends with this process, however that ends.
func (t *toolEnd) start(ctx context.Context) error {
	ctx, t.stop = context.WithCancel(ctx)
	started, exited := make(chan error), make(chan error, 1)
	go func() {
		// Pdeathsig is sent when the thread that started the process ends.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		cmd, err := t.spawn(ctx)
		if started <- err; err == nil {
			exited <- cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		t.stop()
		if errors.Is(err, exec.ErrNotFound) {
			return fmt.Errorf("%s is not installed: install it (Debian's package %s), or use another tool: %w", t.argv[0], tools.Package(t.argv[0]), err)
		}
		return fmt.Errorf("start %s: %w", t.argv[0], err)
	}
	t.wait = func() error { return <-exited }
	return nil
}

func (t *toolEnd) explain(exit error) error {
	if exit == nil {
		return errors.New(t.output.excerpt())
	}
	return fmt.Errorf("%w: %s", exit, t.output.excerpt())
}

// Close ends the process, waits for it, and releases its folder and port.
func (t *toolEnd) Close() {
	if t.stop != nil {
		t.stop()
		if t.port != 0 {
			_ = t.wait() // it was killed on purpose
		}
	}
	t.leave()
}

// leave removes the folder of an application's end, and releases its port.
func (t *toolEnd) leave() {
	if t.release != nil {
		t.release()
	}
	if t.home != nil {
		t.home.remove()
		t.home = nil
	}
}

// reserved are the ports of this process's tools. The servers of a trial start at the same time, and until a server has bound
// its port, the kernel may offer the same port to another one.
var reserved = struct {
	sync.Mutex
	ports map[uint16]bool
}{ports: make(map[uint16]bool)}

// reservePort returns a free port that no other tool of this process gets until release is called.
func reservePort(addr netip.Addr, udp bool) (port uint16, release func(), err error) {
	reserved.Lock()
	defer reserved.Unlock()
	for {
		if port, err = freePort(addr, udp); err != nil {
			return 0, nil, err
		}
		if reserved.ports[port] {
			continue
		}
		reserved.ports[port] = true
		return port, sync.OnceFunc(func() {
			reserved.Lock()
			defer reserved.Unlock()
			delete(reserved.ports, port)
		}), nil
	}
}

// awaitPort waits until no other socket listens at a port: a child of a server that has just ended may still listen for a
// moment.
func awaitPort(ctx context.Context, at netip.AddrPort, patience time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var busy error
	free := poll(ctx, acceptEvery, func() bool {
		l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
		if busy = err; err == nil {
			l.Close()
		}
		return err == nil
	})
	if !free {
		return fmt.Errorf("port %d: another program listens there, and still did after %s: %w", at.Port(), patience, busy)
	}
	return nil
}

// freePort asks the kernel for a free port for a tool.
func freePort(addr netip.Addr, udp bool) (uint16, error) {
	at := netip.AddrPortFrom(addr, 0)
	if udp {
		c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
		if err != nil {
			return 0, fmt.Errorf("find a free port: %w", err)
		}
		defer c.Close()
		return c.LocalAddr().(*net.UDPAddr).AddrPort().Port(), nil
	}
	l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
	if err != nil {
		return 0, fmt.Errorf("find a free port: %w", err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).AddrPort().Port(), nil
}

// capture keeps the first toolOutput bytes of a process's output, and calls line for each line as it arrives.
type capture struct {
	line func([]byte)

	mu      sync.Mutex
	buf     bytes.Buffer
	pending []byte
}

var _ io.Writer = (*capture)(nil)

func (c *capture) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if room := toolOutput - c.buf.Len(); room > 0 {
		c.buf.Write(p[:min(room, len(p))])
	}
	if c.line != nil {
		c.pending = append(c.pending, p...)
		for {
			advance, line, _ := bufio.ScanLines(c.pending, false)
			if advance == 0 {
				break
			}
			c.line(line)
			c.pending = c.pending[advance:]
		}
		c.pending = c.pending[max(0, len(c.pending)-64<<10):]
	}
	return len(p), nil
}

func (c *capture) Bytes() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.buf.Bytes()
}

// excerpt returns the beginning and the end of the output for an error message: tools print errors before their usage or after
// their results.
func (c *capture) excerpt() string {
	const part = 300
	b := bytes.TrimSpace(c.Bytes())
	switch {
	case len(b) == 0:
		return "it printed nothing"
	case len(b) <= 2*part:
		return fmt.Sprintf("it printed %q", b)
	}
	return fmt.Sprintf("it printed %q … %q", b[:part], b[len(b)-part:])
}

// toolVersions returns the versions of those tools whose programs are all installed.
func toolVersions(ctx context.Context) map[string]string {
	versions, path := make(map[string]string), os.Getenv("PATH")
	for name, programs := range tools.Programs() {
		if slices.ContainsFunc(programs, func(p string) bool { return tools.Find(path, p) == "" }) {
			continue
		}
		// Not every tool exits with 0 here, so only the output counts.
		out, _ := exec.CommandContext(ctx, tools.Find(path, programs[0]), tools.VersionArg(name)).CombinedOutput()
		versions[name] = cmp.Or(tools.ParseVersion(name, out), "of an unknown version")
	}
	return versions
}
