// Package traffic is the native engine: it generates the traffic of a
// workload at one end of a pair and counts what happened within the measured
// window. It knows sockets and clocks; it neither starts processes (see
// internal/worker) nor judges figures (see internal/stats). Drivers for other
// tools are in traffic/tools.
//
// Both ends take the same steps: Listen or Dial sets every connection up, Run waits for the start that all pairs share,
// and the result covers only the window. Each connection has a thread of its own that blocks in the kernel as a C
// program's would, or all share an event loop (Spec.EventLoop). Neither uses Go's poller, which costs two wake-ups per
// message: as much as the network under test.
package traffic

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"slipstream.dev/internal/record"
)

// Kinds of traffic that the engine generates.
const (
	Stream    = "stream"
	PingPong  = "pingpong"
	UnderLoad = "underload"
	Connect   = "connect"
	HTTP      = "http"
)

// Spec holds the settings on which both ends of a pair must agree.
type Spec struct {
	// Kind is one of the constants.
	Kind string
	// UDP selects UDP; otherwise the protocol is TCP.
	UDP bool
	// EventLoop makes one thread serve all connections of an end without blocking (loop); for HTTP, one thread for each CPU.
	// Otherwise each connection has a thread of its own, which blocks.
	EventLoop bool
	// Size of a message, or of a stream's write, in bytes.
	Size int
	// Connections that the client opens; for Connect and HTTP, those that it has open at a time.
	Connections int
	// Rate is in messages per second for each connection under load, where 0 means as fast as the connection takes
	// them. For a page it is in users per second.
	Rate int
	// Busy makes a sender under load never sleep.
	Busy bool
	// Iterations is the number of round trips in the window on each connection of a PingPong; 0 for no limit. Event loops
	// ignore it.
	Iterations int
	// For HTTP: KeepAlive sends more than one request on a connection. Requests is their number in the window, 0 for no
	// limit. Page, which needs an event loop, loads a page in place of one object, with an image of Image bytes unless
	// that is 0.
	KeepAlive bool
	Requests  int
	Page      bool
	Image     int
	// Pipeline is the number of concurrent gRPC calls on a connection.
	Pipeline int
	// Ports is the number of consecutive ports on which an HTTP server on an event loop listens; 0 means one.
	Ports int
	// Secret is the trial's, by which a server recognises its clients.
	Secret Secret
	// CongestionControl is that of TCP; empty for the kernel's default.
	CongestionControl string
}

// noDelay reports whether a TCP socket has TCP_NODELAY. Programs that wait for answers set it. Bulk senders do not (iperf
// 2 and iperf3 by default): with it a stream over VXLAN would be faster than theirs.
func (s Spec) noDelay() bool { return s.Kind != Stream }

// payload returns what a client sends: a message or a write. It is noise, because memory that was never written is a single
// page of zeros, which would stay in the sender's cache.
func (s Spec) payload() []byte { return noise(s.Size, 0) }

// Window is when traffic starts and which part of it is measured, in nanoseconds of this machine's monotonic clock (see Now).
type Window struct {
	Start, From, To int64
}

// tail is how long a sender continues after the window, so that a receiver whose clock is a little behind measures no silence.
const tail = 10 * time.Millisecond

// linger limits how long a TCP receiver waits for its sender to finish.
const linger = time.Second

// stallCheck limits how long a thread blocks in one system call, and so how long it takes to notice the end of the run.
const stallCheck = 50 * time.Millisecond

// End is one end of a pair, connected and ready to run.
type End struct {
	spec  Spec
	conns []*conn
	// threads holds the function of each thread of the end, which runs until the run is over.
	threads []func(*run) error
	// listening is the socket that a server of Connect keeps; otherwise -1.
	listening int
	// further are the sockets for the further ports of an HTTP server.
	further []int
	// auth is the authenticator of a server; nil for a client.
	auth *authenticator
}

// conn is a connection, with the counts of its thread.
type conn struct {
	fd  int
	hdr *hdrhistogram.Histogram
	// bytes and messages never decrease. Only the thread that owns the connection writes them.
	bytes, messages atomic.Uint64
	lost            uint64
	// passenger means that it shares the thread of another connection, which counts the thread's CPU time.
	passenger bool
	// failed counts the failed HTTP requests of the window. For a page, due counts the users who were due in it, and late those
	// who began late.
	failed    failures
	due, late uint64
	// pace records how a sender under load kept its schedule.
	pace pace
	// arrivals is for the receiver of a UDP stream.
	arrivals *arrivals
	from, to edge
	_        [64]byte // keep the counters of other connections off this cache line
}

// edge holds the counts of a connection at one edge of the window.
type edge struct {
	at              int64
	bytes, messages uint64
	lost            uint64
	retransmits     uint64
	spent           spent
	counts          counts
}

// spent is the CPU time of a thread since it began, and how often it has slept in the kernel.
type spent struct {
	cpu    time.Duration
	sleeps uint64
}

// run is the shared state of the threads of one Run.
type run struct {
	Window
	// ctx ends the run, for threads that wait in Go's poller.
	ctx     context.Context
	stopped atomic.Bool
	clock   clock
}

func (r *run) now() int64 { return r.clock.now() }

// over reports whether a thread has nothing left to do at the time now.
func (r *run) over(now int64) bool {
	return now >= r.To+int64(tail) || r.stopped.Load()
}

// mark records the edges of the window as soon as now has passed them. The thread of c calls it after each message, so that
// both edges are at the same point of its loop, and the bytes between them belong to the time between them.
func (c *conn) mark(r *run, now int64) {
	// Call into the kernel only at the edges: otherwise these calls would be part of every message.
	next, due := &c.from, r.From
	if c.from.at != 0 {
		next, due = &c.to, r.To
	}
	if next.at != 0 || now < due {
		return
	}
	*next = c.edge(now)
	if !c.passenger {
		next.spent = threadSpent()
	}
	if c.arrivals != nil {
		next.counts = c.arrivals.counts
	}
}

// passed records the edge of the window that lies before a time up to which everything has been counted, with the edge's own time:
// at a low rate the next message may come long after it.
func (c *conn) passed(r *run, counted int64) {
	switch {
	case c.from.at == 0 && counted >= r.From:
		c.mark(r, r.From)
	case c.to.at == 0 && counted >= r.To:
		c.mark(r, r.To)
	}
}

// edge returns the counts of a connection, for the time now.
func (c *conn) edge(now int64) edge {
	return edge{
		at: now, bytes: c.bytes.Load(), messages: c.messages.Load(), lost: c.lost,
		retransmits: retransmits(c.fd),
	}
}

// close ends the window early, when everything to be measured is done.
func (c *conn) close(now int64) {
	c.to = c.edge(now)
	c.to.spent = threadSpent()
}

// finish records the missing edges of the window, when nothing more will come.
func (c *conn) finish(r *run, now int64) {
	last := edge{at: now, bytes: c.bytes.Load(), messages: c.messages.Load(), lost: c.lost, spent: threadSpent()}
	if c.from.at == 0 {
		c.from = last
		c.from.at = min(r.From, now-1)
	}
	if c.to.at == 0 {
		c.to = last
	}
}

// fail counts a failed request.
func (c *conn) fail(err error) {
	if c.failed == nil {
		c.failed = make(failures)
	}
	c.failed[kindOfError(err)]++
}

// engine is the scheduler of all runs of this process.
var engine = &scheduler{}

// scheduler configures Go's runtime for runs. A thread that blocks in the kernel keeps its P, so there must be more Ps than
// such threads. It would also delay a garbage collection for as long as it blocks, so there is none while such threads exist.
type scheduler struct {
	mu sync.Mutex
	// threads counts the threads of all runs in progress, blocking counts the runs whose threads block.
	threads, blocking int
	// procs, percent and limit are the previous GOMAXPROCS, GOGC and GOMEMLIMIT.
	procs, percent int
	limit          int64
}

// begin makes room for a run's threads, until the returned function is called. Without collect, it also disables garbage
// collection.
func (s *scheduler) begin(threads int, collect bool) (end func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.threads == 0 {
		s.procs = runtime.GOMAXPROCS(0)
	}
	s.threads += threads
	runtime.GOMAXPROCS(max(s.threads+3, s.procs))
	if !collect {
		if s.blocking == 0 {
			s.percent, s.limit = debug.SetGCPercent(-1), debug.SetMemoryLimit(math.MaxInt64)
		}
		s.blocking++
	}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.threads -= threads; s.threads == 0 {
			runtime.GOMAXPROCS(s.procs)
		}
		if !collect {
			if s.blocking--; s.blocking == 0 {
				debug.SetGCPercent(s.percent)
				debug.SetMemoryLimit(s.limit)
			}
		}
	}
}

// Progress counts what an end has transferred since the start of its run.
type Progress struct {
	Bytes, Messages uint64
	// CongestionControl and Command are for the server of another tool; empty for ends of the engine.
	CongestionControl, Command string
}

// Run generates the traffic of this end, and returns what it measured in the window. It calls progress once a second from
// another goroutine. If ctx ends, Run stops the traffic within 50 ms and returns the cause. Call it once.
func (e *End) Run(ctx context.Context, w Window, progress func(Progress)) (record.Endpoint, error) {
	if len(e.conns) == 0 || e.spec.Kind != HTTP && len(e.conns) != e.spec.Connections {
		return record.Endpoint{}, fmt.Errorf("run %s: %d of %d connections are open", e.spec.Kind, len(e.conns), e.spec.Connections)
	}
	threads := len(e.threads)
	if e.spec.Kind == UnderLoad && !e.spec.EventLoop {
		threads *= 2
	}
	users := e.spec.Page && e.listening < 0 // their threads do not block
	defer engine.begin(threads, users)()

	r := &run{Window: w, ctx: ctx, clock: newClock()}
	defer context.AfterFunc(ctx, func() { r.stopped.Store(true) })()

	errs := make([]error, len(e.threads))
	var wg sync.WaitGroup
	for i, work := range e.threads {
		wg.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			if errs[i] = SleepUntil(ctx, w.Start); errs[i] == nil {
				errs[i] = work(r)
			}
			if errs[i] != nil {
				r.stopped.Store(true)
			}
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	silence := silence{from: w.From, to: w.To, heard: w.From}
	look := time.NewTicker(silence.interval())
	defer look.Stop()
	for {
		select {
		case <-done:
			if err := context.Cause(ctx); err != nil {
				return record.Endpoint{}, fmt.Errorf("run %s: %w", e.spec.Kind, err)
			}
			if err := errors.Join(errs...); err != nil {
				return record.Endpoint{}, fmt.Errorf("run %s: %w", e.spec.Kind, err)
			}
			silence.look(r.now(), e.moved())
			out, err := e.result()
			out.Silent = silence.longest.Seconds()
			if e.auth != nil {
				out.Warnings = append(out.Warnings, e.auth.warnings()...)
			}
			return out, err
		case <-look.C:
			silence.look(r.now(), e.moved())
		case <-tick.C:
			progress(e.moved())
		}
	}
}

// moved returns what all connections have moved so far.
func (e *End) moved() (p Progress) {
	for _, c := range e.conns {
		p.Bytes += c.bytes.Load()
		p.Messages += c.messages.Load()
	}
	return p
}

// result adds up the results of the connections.
func (e *End) result() (record.Endpoint, error) {
	var out record.Endpoint
	var hdr *hdrhistogram.Histogram
	var moved, moves uint64
	var paced pacing
	var web webResult
	for _, c := range e.conns {
		if c.to.at == 0 {
			return out, fmt.Errorf("run %s: %w", e.spec.Kind, record.StalledAtEnd)
		}
		seconds := float64(c.to.at-c.from.at) / 1e9
		bytes := c.to.bytes - c.from.bytes
		out.Seconds += seconds / float64(len(e.conns))
		out.Bytes += bytes
		// Each connection has its own edges, so add up rates: bytes over a common time would be wrong.
		if seconds > 0 { // a client whose requests others have made may end as its window begins
			out.BitsPerSecond += float64(bytes) * 8 / seconds
		}
		out.Messages += c.to.messages - c.from.messages
		out.Lost += c.to.lost - c.from.lost
		out.Retransmits += c.to.retransmits - c.from.retransmits
		out.CPUSeconds += (c.to.spent.cpu - c.from.spent.cpu).Seconds()
		out.Sleeps += c.to.spent.sleeps - c.from.spent.sleeps
		paced.add(&c.pace)
		if c.arrivals != nil {
			from, to := c.from.counts, c.to.counts
			out.Arrived += c.arrivals.arrived
			out.Reordered += to.reordered - from.reordered
			out.Duplicates += to.duplicates - from.duplicates
			moved += to.moved - from.moved
			moves += to.moves - from.moves
		}
		web.add(c)
		if c.hdr == nil {
			continue
		}
		if hdr == nil {
			hdr = c.hdr
		} else {
			hdr.Merge(c.hdr)
		}
	}
	out.Warnings = append(out.Warnings, paced.warnings(out.Seconds*float64(len(e.conns)))...)
	if moves > 0 {
		out.Jitter = float64(moved) / float64(moves) / 1e9
	}
	if e.spec.Kind == HTTP {
		if err := web.fill(e, &out); err != nil {
			return out, err
		}
	}
	if hdr != nil {
		text, err := record.EncodeHistogram(hdr)
		if err != nil {
			return out, err
		}
		out.Latency = text
	}
	return out, nil
}

// Close closes every connection. It must not be called while Run runs.
func (e *End) Close() {
	closeAll(e.conns)
	if e.conns = nil; e.listening >= 0 {
		closeSocket(e.listening)
	}
	for _, fd := range e.further {
		closeSocket(fd)
	}
}

// Server is the listening end of a pair before its client connects.
type Server struct {
	spec Spec
	fd   int
	addr netip.AddrPort
	// further are the sockets for further ports.
	further []int
	accept  chan acceptance
	stop    atomic.Bool
	auth    *authenticator
}

type acceptance struct {
	conns []*conn
	err   error
}

// Listen binds addr and starts to accept the connections of spec. If the port is 0, the kernel chooses one.
func Listen(spec Spec, addr netip.AddrPort) (*Server, error) {
	if err := spec.fits(true); err != nil {
		return nil, fmt.Errorf("listen on %s: %w", addr, err)
	}
	if spec.Ports > 1 && (spec.Kind != HTTP || !spec.EventLoop) {
		return nil, fmt.Errorf("listen on %s: only a server of HTTP on an event loop has %d ports", addr, spec.Ports)
	}
	fd, bound, err := listenSocket(spec, addr)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", addr, err)
	}
	s := &Server{spec: spec, fd: fd, addr: bound, accept: make(chan acceptance, 1), auth: newAuthenticator(spec.Secret[:], len(spec.Secret), false)}
	switch spec.Kind {
	case HTTP:
		if err := s.listenHTTP(); err != nil {
			closeSocket(fd)
			return nil, fmt.Errorf("listen on %s: %w", addr, err)
		}
		return s, nil
	case Connect: // its connections come and go while it runs, too
		s.auth = newAuthenticator(spec.Secret[:], spec.Size, true)
		return s, nil
	}
	go func() {
		conns, err := acceptAll(spec, fd, bound, s.auth, &s.stop)
		s.accept <- acceptance{conns, err}
	}()
	return s, nil
}

// Addr returns the address at which the server listens.
func (s *Server) Addr() netip.AddrPort { return s.addr }

// Accept waits for all connections of the pair. Whatever it returns, the server accepts no other pair afterwards.
func (s *Server) Accept(ctx context.Context) (*End, error) {
	if s.spec.Kind == Connect {
		end := &End{spec: s.spec, listening: s.fd, conns: unconnected(s.spec.Connections), auth: s.auth}
		end.each(func(c *conn, r *run) error { return s.spec.answer(s.fd, s.auth, c, r) })
		return end, nil
	}
	if s.spec.Kind == HTTP {
		return s.acceptHTTP()
	}
	var a acceptance
	select {
	case a = <-s.accept:
	case <-ctx.Done():
		s.stop.Store(true)
		a = <-s.accept
		if a.err == nil {
			a.err = context.Cause(ctx)
		}
	}
	if a.err != nil {
		closeAll(a.conns)
		return nil, fmt.Errorf("accept %d connections on %s: %w", s.spec.Connections, s.addr, a.err)
	}
	end := &End{spec: s.spec, conns: a.conns, listening: -1, auth: s.auth}
	if s.spec.Kind == Stream && s.spec.UDP {
		for _, c := range end.conns {
			c.arrivals = new(arrivals)
		}
	}
	end.connected(false)
	return end, nil
}

// each adds a thread for each connection of an end.
func (e *End) each(role func(*conn, *run) error) {
	for _, c := range e.conns {
		e.threads = append(e.threads, func(r *run) error { return role(c, r) })
	}
}

// connected sets up the threads of an end whose connections are all open.
func (e *End) connected(client bool) {
	s := e.spec
	switch {
	case s.EventLoop:
		e.threads = append(e.threads, s.share(e.conns, client))
	case s.Kind == Stream && client:
		e.each(s.source)
	case s.Kind == Stream && s.UDP:
		e.each(s.collect)
	case s.Kind == Stream:
		e.each(s.sink)
	case s.Kind == PingPong && client:
		e.each(s.ask)
	case s.Kind == UnderLoad && client:
		e.each(s.load)
	default:
		e.each(s.echo)
	}
}

// Dial opens the connections of spec to a server, and waits until each has been answered.
func Dial(ctx context.Context, spec Spec, to netip.AddrPort) (*End, error) {
	end := &End{spec: spec, listening: -1}
	if err := spec.fits(false); err != nil {
		return nil, fmt.Errorf("connect to %s: %w", to, err)
	}
	switch spec.Kind {
	case Stream, PingPong, UnderLoad:
	case Connect, HTTP:
		// This connection distinguishes a missing server from a slow one, and tells a server of the workload connect the
		// address of its client.
		fd, err := dialSocket(ctx, spec, to)
		if err == nil && spec.Kind == Connect {
			if _, err = send(fd, spec.Secret[:]); err != nil {
				closeSocket(fd)
			}
		}
		if err != nil {
			return nil, fmt.Errorf("connect to %s: %w", to, err)
		}
		closeSocket(fd)
		if spec.Kind == HTTP {
			if err := end.dialHTTP(to); err != nil {
				return nil, fmt.Errorf("connect to %s: %w", to, err)
			}
		} else {
			end.conns = unconnected(spec.Connections)
			end.each(func(c *conn, r *run) error { return spec.connect(to, c, r) })
		}
		for _, c := range end.conns {
			c.hdr = record.NewHistogram()
		}
		return end, nil
	default:
		return nil, fmt.Errorf("dial %s: no such traffic %q", to, spec.Kind)
	}
	for range spec.Connections {
		fd, err := dialSocket(ctx, spec, to)
		if err != nil {
			end.Close()
			return nil, fmt.Errorf("connect to %s: %w", to, err)
		}
		c := &conn{fd: fd}
		if !spec.UDP { // a new connection has room for its first bytes
			if _, err := send(fd, spec.Secret[:]); err != nil {
				closeSocket(fd)
				end.Close()
				return nil, fmt.Errorf("connect to %s: %w", to, err)
			}
		}
		if spec.Kind != Stream {
			c.hdr = record.NewHistogram()
		}
		end.conns = append(end.conns, c)
	}
	end.connected(true)
	return end, nil
}

// unconnected returns conns without a socket, for threads that open sockets while they run.
func unconnected(n int) []*conn {
	conns := make([]*conn, n)
	for i := range conns {
		conns[i] = &conn{fd: -1}
	}
	return conns
}

func closeAll(conns []*conn) {
	for _, c := range conns {
		if c.fd >= 0 {
			closeSocket(c.fd)
		}
	}
}
