package accel

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel/journal"
	"slipstream.dev/internal/fastpath"
	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/record"
)

// Unlike a setting, the fast path ends with the process that runs it, so it needs no journal entry. Instead, each network
// namespace with a fast path has a Unix socket next to the journal. Listening on it is the lock by which only one process runs
// the fast path of a namespace. A client that connects receives the status. The lock ends with the process: on the file that a
// dead process leaves behind, nobody listens.

// fastKind is the fast path.
type fastKind struct{}

// Plan implements Kind. Two accelerators must agree on UnseenBy: the union would hide packets from observers that one of them
// protects, the intersection would not do what the other asks for.
func (fastKind) Plan(p *Plan, a v1alpha1.PolicyAccelerator) error {
	unseenBy := slices.Sorted(slices.Values(a.Fastpath.UnseenBy))
	a.Fastpath = &v1alpha1.Fastpath{UnseenBy: unseenBy}
	if other := p.Run(a); other != nil && !slices.Equal(other.Fastpath.UnseenBy, unseenBy) {
		return Conflict(fmt.Sprintf("wants the fast path unseenBy %q, another accelerator %q", unseenBy, other.Fastpath.UnseenBy))
	}
	return nil
}

// Probe implements Kind.
func (fastKind) Probe(ctx context.Context) error { return fastpath.Probe(ctx) }

// Open implements Kind.
func (fastKind) Open(h Host) Runner { return &fast{namespace: h.namespace, changed: h.Changed} }

// fast runs the fast path of a place.
type fast struct {
	namespace *namespace
	changed   func()

	mu sync.Mutex
	// probed is set once fastpath.Probe has succeeded on this kernel.
	probed bool
	fastRun
}

// fastRun is the fast path from its start to its end.
type fastRun struct {
	// path is nil while the fast path is off.
	path   *fastpath.Fastpath
	socket *fastSocket
	// stopped is closed when path is.
	stopped chan struct{}
	// as is the configuration with which the fast path was started.
	as *v1alpha1.Fastpath
	// wanted means that Keep wants the fast path. err says why it is off nevertheless, and tried is when it last failed to
	// start.
	wanted   bool
	err      error
	tried    time.Time
	repaired int
}

// After a failed start, Keep waits for retryAfter before it tries again. After a timeout, which may happen while a machine
// boots, it waits only for retrySoon.
const (
	retryAfter = 10 * time.Minute
	retrySoon  = 15 * time.Second
)

// attached is the value of an attached hook that is shown as a setting.
const attached = "attached"

// setting returns a hook of the fast path as a setting.
func (f *fast) setting(h fastpath.Hook, got string) record.Setting {
	return record.Setting{Place: f.namespace.options.Place.Name, Path: "tcx/" + h.Device + "/" + h.Program, Want: attached, Got: got}
}

// Plan implements Runner.
func (f *fast) Plan(want v1alpha1.PolicyAccelerator) (all []record.Setting, err error) {
	hooks, err := fastpath.Plan(f.namespace.ns, want.Fastpath.UnseenBy...)
	if err != nil {
		return nil, err
	}
	for _, h := range hooks {
		all = append(all, f.setting(h, ""))
	}
	return all, nil
}

// Start implements Runner. It takes the lock and starts the fast path.
func (f *fast) Start(want v1alpha1.PolicyAccelerator) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.startLocked(want.Fastpath)
}

func (f *fast) startLocked(as *v1alpha1.Fastpath) (err error) {
	if f.socket, err = f.namespace.listenFast(); err != nil {
		return err
	}
	if f.path, err = fastpath.Start(f.namespace.ns, f.namespace.options.Log, as.UnseenBy...); err != nil {
		return errors.Join(err, f.stopLocked())
	}
	f.as, f.wanted, f.stopped = as, true, make(chan struct{})
	f.socket.serve(f.status)
	go tell(f.changed, f.path.Changes(), f.stopped)
	return nil
}

// tell calls changed for each value that it receives from changes, until stopped is closed.
func tell(changed func(), changes, stopped <-chan struct{}) {
	for {
		select {
		case <-stopped:
			return
		case <-changes:
			changed()
		}
	}
}

// Stop ends the fast path, if it is on.
func (f *fast) Stop() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.stopLocked()
}

func (f *fast) stopLocked() error {
	old := f.fastRun
	f.fastRun = fastRun{}
	var err error
	if old.stopped != nil {
		close(old.stopped)
	}
	if old.path != nil {
		if counts, err := old.path.Counts(); err == nil {
			f.namespace.options.Log.Info("the fast path stops", "place", f.namespace.options.Place.Name, "counts", counts, "skipped", old.path.Skipped())
		}
		err = old.path.Close()
	}
	if old.socket != nil {
		err = errors.Join(err, old.socket.close())
	}
	return err
}

// Keep implements Runner. A fast path that cannot start is not an error: the other accelerators do not depend on it.
func (f *fast) Keep(ctx context.Context, wanted *v1alpha1.PolicyAccelerator, kept *Kept) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if wanted == nil {
		return f.stopLocked()
	}
	o, want := f.namespace.options, wanted.Fastpath
	if f.path != nil && !slices.Equal(f.as.UnseenBy, want.UnseenBy) {
		o.Log.Info("the fast path restarts with another unseenBy: connections take the slow path for a moment",
			"place", o.Place.Name, "unseenBy", want.UnseenBy)
		if err := f.stopLocked(); err != nil {
			return err
		}
	}
	if f.path != nil {
		repaired := f.path.Repaired()
		kept.Repaired += repaired - f.repaired
		f.repaired = repaired
		f.path.Verify()
		return nil
	}
	f.wanted = true
	if f.err != nil && time.Since(f.tried) < retryPause(f.err) {
		return nil
	}
	var err error
	if !f.probed {
		err = fastpath.Probe(ctx)
	}
	if err == nil {
		f.probed = true
		err = f.startLocked(want)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	f.wanted, f.err, f.tried = true, Forbidden(err), time.Now() // a failed startLocked has reset wanted
	if err == nil {
		kept.Set += len(f.path.Hooks())
	}
	return nil
}

// retryPause returns how long Keep waits before it tries again, given the error of the last try.
func retryPause(err error) time.Duration {
	var timeout net.Error
	switch {
	case errors.Is(err, journal.ErrHeld):
		return 0
	case errors.As(err, &timeout) && timeout.Timeout():
		return retrySoon
	}
	return retryAfter
}

// Verify implements Runner. It does nothing: the fast path follows changes by itself.
func (f *fast) Verify(time.Time) {}

type fastState struct {
	// supported lists the VXLAN devices and NICs that the fast path supports, hooks the attached programs. While it is idle,
	// there are none.
	supported []string
	// local tells whether connections between pods of the node may take it.
	local bool
	hooks []fastpath.Hook
	// skipped names the skipped devices and why; skippedBy counts them by reason.
	skipped   []string
	skippedBy map[string]int
	// err says why all packets take the slow path, or is nil.
	err error
}

func (f *fast) state() fastState {
	if p := f.path; p != nil {
		return fastState{p.Devices(), p.Local(), p.Hooks(), p.Skipped(), p.SkippedBy(), p.Problem()}
	}
	return fastState{err: f.err}
}

// State implements Runner.
func (f *fast) State() *State {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.wanted {
		return nil
	}
	is := f.state()
	s := is.condition()
	for _, h := range is.hooks {
		s.Attached = append(s.Attached, f.setting(h, attached))
	}
	for _, why := range is.skipped {
		s.Notices = append(s.Notices, Event{Reason: v1alpha1.ReasonSkipped, Message: "the fast path skips " + why})
	}
	return s
}

// noNetwork says why there is no device for connections to other nodes.
const noNetwork = "it has no VXLAN device, and no NIC with a route through a gateway"

// condition turns the state into a condition.
func (s fastState) condition() *State {
	c := &State{Condition: v1alpha1.ConditionFastpath, Status: StatusTrue, Reason: v1alpha1.ReasonAttached}
	c.Message = fmt.Sprintf("%d programs are attached", len(s.hooks))
	if len(s.hooks) == 0 {
		c.Message = "idle: no pod has an eligible connection"
	}
	skipped := strings.Join(s.skipped, "; ")
	fails := func(reason, message string) {
		c.Status, c.Failed, c.Reason, c.Message = StatusFalse, true, reason, message
	}
	switch {
	case errors.Is(s.err, journal.ErrHeld):
		fails(v1alpha1.ReasonHeld, s.err.Error())
	case s.err != nil && len(s.supported) == 0:
		fails(v1alpha1.ReasonImpossible, s.err.Error())
	case s.err != nil:
		fails(v1alpha1.ReasonError, s.err.Error())
	case len(s.supported) == 0 && !s.local:
		fails(v1alpha1.ReasonImpossible, "the fast path supports no VXLAN device and no NIC of this node: "+cmp.Or(skipped, noNetwork))
	case len(s.supported) == 0:
		c.Reason = v1alpha1.ReasonSkipped
		c.Message += "; only connections between pods of this node are eligible: " + cmp.Or(skipped, noNetwork)
	case skipped != "":
		c.Reason = v1alpha1.ReasonSkipped
		c.Message += "; skipped: " + skipped
	}
	if c.Failed || c.Reason == v1alpha1.ReasonSkipped || len(s.hooks) == 0 {
		c.Detail = "fast path: " + c.Message
	}
	return c
}

// Metrics of the fast path.
var (
	fastUp      = &Metric{Name: "slipstream_fastpath_up", Help: "1 if the fast path is on, 0 if a policy wants it and it is not."}
	fastHooks   = &Metric{Name: "slipstream_fastpath_programs", Help: "Programs of the fast path that are attached: none while no connection is eligible."}
	fastSkipped = &Metric{"slipstream_fastpath_devices_skipped", "Devices that the fast path skips, by reason: a kind of observer, flowtable, xdp, cilium, ipsec, route-program, unsupported, addresses-move or failed. What concerns all devices counts as one.", []string{"reason"}}
	fastFlows   = &Metric{"slipstream_fastpath_flows", "Known connections of pods, by their current path: fast or slow. Those on the fast path are of the kind vxlan, routed or local.", []string{"path", "kind"}}
	fastPackets = &Metric{"slipstream_fastpath_packets_total", "Packets that the programs of the fast path saw, by reason: fast-out and fast-in took the fast path and are of the kind vxlan, routed or local, all others took the slow path for that reason.", []string{"reason", "kind"}}
)

// Metrics implements Kind.
func (fastKind) Metrics() []*Metric {
	return []*Metric{fastUp, fastHooks, fastSkipped, fastFlows, fastPackets}
}

// Samples implements Runner.
func (f *fast) Samples(s *State, emit func(Sample)) {
	if s == nil {
		return
	}
	emit(Sample{Metric: fastUp, Value: Flag(s.Status == StatusTrue)})
	emit(Sample{Metric: fastHooks, Value: float64(len(s.Attached))})
	for reason, n := range f.skippedBy() {
		emit(Sample{Metric: fastSkipped, Value: float64(n), Values: []string{reason}})
	}
	now, err := f.status()
	if err != nil {
		emit(Sample{Metric: fastPackets, Err: err})
		return
	}
	if now.Packets == nil {
		return
	}
	for kind, n := range now.Kinds {
		emit(Sample{Metric: fastFlows, Value: float64(n), Values: []string{"fast", kind}})
	}
	emit(Sample{Metric: fastFlows, Value: float64(now.Connections - now.Fast), Values: []string{"slow", ""}})
	for why, n := range now.Packets {
		reason, kind, _ := record.SplitReason(why)
		emit(Sample{Metric: fastPackets, Value: float64(n), Values: []string{reason, kind}})
	}
}

func (f *fast) skippedBy() map[string]int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.state().skippedBy
}

// Counts implements Runner: see fastpath.Counts. It returns nil while the fast path is off.
func (f *fast) Counts() (map[string]uint64, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.path == nil {
		return nil, nil
	}
	return f.path.Counts()
}

// Fastpath is the status of the fast path of one network namespace, as reported by the process that runs it.
type Fastpath struct {
	// Place is the name that the process gives the namespace; Holder is the process.
	Place  string         `json:"place"`
	Holder journal.Holder `json:"holder"`
	// Hooks are "DEVICE/PROGRAM": none while no connection is eligible.
	Hooks []string `json:"hooks"`
	// Skipped names each skipped device and why; Problem says why all packets take the slow path,
	// if they do.
	Skipped []string `json:"skipped,omitempty"`
	Problem string   `json:"problem,omitempty"`
	// Connections counts the known connections, Fast the accelerated ones, and Kinds the accelerated ones by kind: vxlan,
	// routed or local.
	Connections int            `json:"connections"`
	Fast        int            `json:"fast"`
	Kinds       map[string]int `json:"kinds"`
	// Packets counts packets by reason: see fastpath.Counts.
	Packets map[string]uint64 `json:"packets"`
}

// status returns the status of the fast path of this place. Packets is nil while it is off.
func (f *fast) status() (status Fastpath, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	state := f.state()
	status = Fastpath{Place: f.namespace.options.Place.Name, Skipped: state.skipped}
	if state.err != nil {
		status.Problem = state.err.Error()
	}
	for _, h := range state.hooks {
		status.Hooks = append(status.Hooks, h.Device+"/"+h.Program)
	}
	if f.path == nil {
		return status, nil
	}
	status.Holder = f.socket.holder
	if status.Packets, err = f.path.Counts(); err != nil {
		return status, err
	}
	status.Connections, status.Kinds, err = f.path.Connections()
	for _, n := range status.Kinds {
		status.Fast += n
	}
	return status, err
}

// Fastpaths returns the status of all fast paths on this machine, sorted by place. It uses only JournalDir of o.
func Fastpaths(o Options) ([]Fastpath, error) {
	sockets, err := fastSockets(o.JournalDir)
	if err != nil {
		return nil, err
	}
	var all []Fastpath
	for _, file := range sockets {
		f, held, err := askFast(file)
		if err != nil {
			return nil, fmt.Errorf("ask for the fast path at %s: %w", file, err)
		}
		if held {
			all = append(all, f)
		}
	}
	slices.SortFunc(all, func(a, b Fastpath) int { return strings.Compare(a.Place, b.Place) })
	return all, nil
}

// fastPrefix is the prefix of a socket's name; the cookie of the network namespace follows.
const fastPrefix = "fastpath-"

func fastSocketFile(dir string, id netns.ID) string {
	return filepath.Join(dir, fmt.Sprintf("%s%d", fastPrefix, id.Cookie))
}

func fastSockets(dir string) ([]string, error) {
	return filepath.Glob(filepath.Join(dir, fastPrefix+"*"))
}

// fastSocket is the socket of a process that runs a fast path.
type fastSocket struct {
	*net.UnixListener
	file   string
	holder journal.Holder
}

// listenFast listens on the socket, unless another process already does.
func (n *namespace) listenFast() (*fastSocket, error) {
	unlock, err := n.journal.Lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	o := n.options
	holder, err := journal.Process(o.Proc, o.Owner)
	if err != nil {
		return nil, err
	}
	if err := sweepFast(o.JournalDir); err != nil {
		return nil, err
	}
	file := fastSocketFile(o.JournalDir, n.id)
	other, held, err := askFast(file)
	if held {
		return nil, fmt.Errorf("the fast path of %s: %w by %s", o.Place.Name, errFastHeld, other.Holder)
	}
	if err != nil {
		return nil, fmt.Errorf("ask which process runs the fast path of %s: %w", o.Place.Name, err)
	}
	var l *net.UnixListener
	err = withShortName(file, func(file string) (err error) {
		l, err = net.ListenUnix("unix", &net.UnixAddr{Name: file, Net: "unix"})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listen for the fast path of %s: %w", o.Place.Name, err)
	}
	l.SetUnlinkOnClose(false) // the name is valid only inside withShortName
	return &fastSocket{l, file, holder}, nil
}

// sweepFast removes the sockets of dead processes. The caller holds the journal's lock, so that no process starts to listen at
// the same time.
func sweepFast(dir string) error {
	sockets, err := fastSockets(dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, file := range sockets {
		c, err := dialFast(file)
		if err == nil {
			_ = c.Close()
		}
		if !errors.Is(err, unix.ECONNREFUSED) {
			continue
		}
		if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove the socket of a dead process: %w", err))
		}
	}
	return errors.Join(errs...)
}

// errFastHeld is journal.ErrHeld with another text: the fast path has no value.
var errFastHeld = heldFast{}

type heldFast struct{}

func (heldFast) Error() string   { return "held already" }
func (heldFast) Is(e error) bool { return e == journal.ErrHeld }

// fastWait limits the wait for an answer on a socket.
const fastWait = 2 * time.Second

// serve sends the status as JSON to everyone who connects.
func (f *fastSocket) serve(status func() (Fastpath, error)) {
	go func() {
		for {
			c, err := f.Accept()
			if err != nil {
				return
			}
			now, err := status()
			if err != nil {
				now.Problem = err.Error()
			}
			now.Holder = f.holder
			_ = c.SetWriteDeadline(time.Now().Add(fastWait))
			_ = json.NewEncoder(c).Encode(now) // the client may be gone
			_ = c.Close()
		}
	}()
}

// close stops listening. It removes the file first: once the socket is closed, another process may create its own file of that
// name.
func (f *fastSocket) close() error { return errors.Join(os.Remove(f.file), f.Close()) }

// askFast reads the status from a socket. held is false if no process listens on it.
func askFast(file string) (f Fastpath, held bool, err error) {
	c, err := dialFast(file)
	if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist) {
		return f, false, nil
	}
	if err != nil {
		return f, false, err
	}
	defer c.Close()
	if err = c.SetReadDeadline(time.Now().Add(fastWait)); err == nil {
		err = json.NewDecoder(c).Decode(&f)
	}
	if err != nil {
		// A process listens but does not answer, because it hangs, starts or ends: it holds the fast path.
		f.Problem = "the process that runs it does not answer: " + err.Error()
		if f.Holder.Owner == "" {
			f.Holder.Owner = "a process that does not answer"
		}
	}
	return f, true, nil
}

func dialFast(file string) (c *net.UnixConn, err error) {
	err = withShortName(file, func(file string) (err error) {
		c, err = net.DialUnix("unix", nil, &net.UnixAddr{Name: file, Net: "unix"})
		return err
	})
	return c, err
}

// withShortName calls fn with a name for file that fits into a socket address, however long its path is.
func withShortName(file string, fn func(file string) error) error {
	dir, err := os.Open(filepath.Dir(file))
	if err != nil {
		return err
	}
	defer dir.Close()
	return fn(fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(file)))
}
