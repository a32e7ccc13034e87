//go:build linux

package worker

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"sync"
	"time"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/traffic"
	"slipstream.dev/internal/traffic/tools"
)

const (
	// toolStart is how long a tool's server may take until it listens.
	toolStart = 10 * time.Second
	// toolGrace is how long a tool may go on beyond the time it was given.
	toolGrace = 10 * time.Second
	// toolOutput bounds what is kept of a tool's output, in bytes.
	toolOutput = 16 << 20
)

// toolEnd is a process of another tool at one end of a pair.
type toolEnd struct {
	tool     tools.Tool
	workload v1alpha1.Workload
	argv     []string
	port     uint16
	stop     context.CancelFunc
	wait     func() error
	output   *capture
}

func (t *toolEnd) Port() uint16 { return t.port }

func lookupTool(w v1alpha1.Workload) (tools.Tool, error) {
	name := w.Traffic().Tool
	tool, ok := tools.Lookup(name)
	if !ok {
		return nil, fmt.Errorf("workload %s: no such tool %q", w.Name, name)
	}
	if err := tool.Check(w); err != nil {
		return nil, err
	}
	return tool, nil
}

// serveTool starts a tool's server and returns once it listens.
func serveTool(ctx context.Context, tool tools.Tool, w v1alpha1.Workload, at netip.AddrPort) (end, error) {
	addr, port := at.Addr(), at.Port()
	if port == 0 {
		var err error
		if port, err = freePort(addr, w.Traffic().Protocol == "udp"); err != nil {
			return nil, err
		}
	}
	listening := make(chan struct{})
	t := &toolEnd{tool: tool, workload: w, argv: tool.ServerArgv(w, addr, port), port: port}
	var once sync.Once
	t.output = &capture{line: func(line []byte) {
		if tool.ServerReady(line) {
			once.Do(func() { close(listening) })
		}
	}}
	if err := t.start(ctx); err != nil {
		return nil, err
	}
	exited := make(chan error, 1)
	wait := t.wait
	go func() { exited <- wait() }()
	t.wait = func() error { return <-exited }
	timer := time.NewTimer(toolStart)
	defer timer.Stop()
	select {
	case <-listening:
		return t, nil
	case err := <-exited:
		t.stop()
		return nil, fmt.Errorf("%s: ended before it listened: %w", t.name(), t.explain(err))
	case <-timer.C:
		t.Close()
		return nil, fmt.Errorf("%s: does not listen after %s: %s", t.name(), toolStart, t.output.excerpt())
	}
}

// driveTool prepares a tool's client; the process starts with the traffic.
func driveTool(w v1alpha1.Workload, to netip.AddrPort, congestionControl, path string) (end, error) {
	tool, err := lookupTool(w)
	if err != nil {
		return nil, err
	}
	argv := tool.ClientArgv(w, to.Addr(), to.Port(), congestionControl, path)
	return &toolEnd{tool: tool, workload: w, argv: argv, output: new(capture)}, nil
}

// Run runs a client to its end and reads its figures; a server it keeps until ctx
// ends.
func (t *toolEnd) Run(ctx context.Context, window traffic.Window, _ func(traffic.Progress)) (record.Endpoint, error) {
	if t.port != 0 {
		// The server has nothing to tell that its client does not. It goes
		// when its caller has heard the client out.
		<-ctx.Done()
		return record.Endpoint{}, context.Cause(ctx)
	}
	limit := time.Duration(window.To-traffic.Now()) + toolGrace
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("%s: still runs %s after its time", t.name(), toolGrace))
	defer cancel()
	// A tool has a warm-up of its own; its window is to be this one.
	begin := window.From - int64(t.tool.Lead(t.workload))
	if begin < window.Start {
		return record.Endpoint{}, fmt.Errorf("%s needs a warm-up of %s at least", t.argv[0], t.tool.Lead(t.workload))
	}
	if err := traffic.SleepUntil(ctx, begin); err != nil {
		return record.Endpoint{}, err
	}
	if err := t.start(ctx); err != nil {
		return record.Endpoint{}, err
	}
	exit := t.wait()
	if err := context.Cause(ctx); err != nil {
		return record.Endpoint{}, fmt.Errorf("%w: %s", err, t.output.excerpt())
	}
	// A tool's own words say more than its exit status.
	result, err := t.tool.Parse(t.workload, t.output.Bytes())
	if err != nil || exit != nil {
		return record.Endpoint{}, fmt.Errorf("%s: %w", t.name(), errors.Join(err, t.explain(exit)))
	}
	return result, nil
}

func (t *toolEnd) name() string { return strings.Join(t.argv, " ") }

func (t *toolEnd) start(ctx context.Context) error {
	ctx, t.stop = context.WithCancel(ctx)
	cmd := exec.CommandContext(ctx, t.argv[0], t.argv[1:]...)
	cmd.Stdout, cmd.Stderr = t.output, t.output
	cmd.WaitDelay = time.Second // a grandchild may hold the pipe
	if err := cmd.Start(); err != nil {
		t.stop()
		if errors.Is(err, exec.ErrNotFound) {
			return fmt.Errorf("tool %s is not installed here: install it, or choose another tool: %w", t.argv[0], err)
		}
		return fmt.Errorf("start %s: %w", t.argv[0], err)
	}
	t.wait = cmd.Wait
	return nil
}

func (t *toolEnd) explain(exit error) error {
	if exit == nil {
		return errors.New(t.output.excerpt())
	}
	return fmt.Errorf("%w: %s", exit, t.output.excerpt())
}

// Close ends the process and waits for it.
func (t *toolEnd) Close() {
	if t.stop == nil {
		return
	}
	t.stop()
	if t.port != 0 {
		_ = t.wait() // killed, as it was meant to be
	}
}

// freePort asks the kernel for a port that a tool may have.
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

// capture keeps what a process prints, up to toolOutput, and shows each line to
// line as it comes.
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

// excerpt is the beginning and the end of the output, for an error: tools print
// what went wrong before their usage, or after their figures.
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

// toolVersions is what the tools installed here say of themselves.
func toolVersions(ctx context.Context) map[string]string {
	versions := make(map[string]string)
	for name, argv := range tools.VersionArgv() {
		// Exit statuses differ; what is printed is what counts.
		out, _ := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
		if v := tools.ParseVersion(name, out); v != "" {
			versions[name] = v
		}
	}
	return versions
}
