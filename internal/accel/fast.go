package accel

import (
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
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel/fastpath"
	"slipstream.dev/internal/record"
)

// The fast path is unlike settings: it lives as long as the process that holds it, so
// it needs no journal. What there is instead, beside the journal, is a socket for each
// network namespace that has it. Who listens there holds it, so that it is held once;
// and tells who asks how it fares. It goes with the process as well: a file that is
// left behind has nobody listening.

// fast is a session's fast path.
type fast struct {
	// path is nil where it is not on.
	path   *fastpath.Fastpath
	socket *fastSocket
	// as is what was asked for when it began.
	as *v1alpha1.Fastpath
	// wanted by what is kept, and why it is not on; tried is when that was found.
	wanted   bool
	err      error
	tried    time.Time
	repaired int
	// probed: the kernel has carried packets, and need not be asked again.
	probed bool
}

// probeAgain is after how long a kernel that could not carry a packet is asked again.
const probeAgain = 10 * time.Minute

// attached is what a hook of the fast path reads.
const attached = "attached"

// hooked is a hook of the fast path as a setting.
func (s *Session) hooked(h fastpath.Hook, got string) record.Setting {
	return record.Setting{Place: s.options.Place.Name, Path: "tcx/" + h.Device + "/" + h.Program, Want: attached, Got: got}
}

// canHold tells whether a session that applies can have what is asked for.
func (s *Session) canHold(accelerators []v1alpha1.Accelerator) error {
	if s.options.Persistent && slices.ContainsFunc(accelerators, func(a v1alpha1.Accelerator) bool { return a.Fastpath != nil }) {
		return errors.New("the fast path lasts as long as the process that holds it, and this one is about to end: " +
			"write it into a policy and have the agent hold it (slipstream agent --policy FILE), or measure it (slipstream run)")
	}
	return nil
}

// startFastpath begins to hold the fast path.
func (s *Session) startFastpath(as *v1alpha1.Fastpath) (err error) {
	if s.fast.socket, err = s.listenFast(); err != nil {
		return err
	}
	if s.fast.path, err = fastpath.Start(s.ns, s.options.Log, as.UnseenBy...); err != nil {
		return errors.Join(err, s.stopFastpath())
	}
	s.fast.as = as
	s.fast.socket.serve(func() (Fastpath, error) { return s.Fastpath() })
	return nil
}

func (s *Session) stopFastpath() error {
	held := s.fast
	s.fast = fast{probed: held.probed}
	var err error
	if held.path != nil {
		if counts, err := held.path.Counts(); err == nil {
			s.options.Log.Info("the fast path stops", "place", s.options.Place.Name, "counts", counts, "skipped", held.path.Skipped())
		}
		err = held.path.Close()
	}
	if held.socket != nil {
		err = errors.Join(err, held.socket.close())
	}
	return err
}

// keepFastpath has the fast path on or off as the plan wants it. That it cannot be had
// hinders nothing else.
func (s *Session) keepFastpath(ctx context.Context, kept *Kept) error {
	want := s.plan.fastpath
	if want == nil {
		return s.stopFastpath()
	}
	f := &s.fast
	if f.path != nil && !slices.Equal(f.as.UnseenBy, want.UnseenBy) {
		s.options.Log.Info("the fast path begins anew, as others may miss its packets now: connections take the slow path for a moment",
			"place", s.options.Place.Name, "unseenBy", want.UnseenBy)
		if err := s.stopFastpath(); err != nil {
			return err
		}
	}
	if f.path != nil {
		repaired := f.path.Repaired()
		kept.Repaired += repaired - f.repaired
		f.repaired = repaired
		if !f.path.TablesWorn() {
			f.path.Verify()
			return nil
		}
		s.options.Log.Info("the fast path begins anew, as its tables are nearly full: connections take the slow path for a moment", "place", s.options.Place.Name)
		if err := s.stopFastpath(); err != nil {
			return err
		}
	}
	f.wanted = true
	if f.err != nil && !errors.Is(f.err, ErrHeld) && time.Since(f.tried) < probeAgain {
		return nil
	}
	var err error
	if !f.probed {
		err = fastpath.Probe(ctx)
	}
	if err == nil {
		f.probed = true
		err = s.startFastpath(want)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	f.wanted, f.err, f.tried = true, Forbidden(err), time.Now() // wanted again, as what did not start was stopped
	if err == nil {
		kept.Set += len(f.path.Hooks())
	}
	return nil
}

// FastpathState is what Keep has made of the fast path.
type FastpathState struct {
	// Wanted: all else is empty if not.
	Wanted bool
	// VXLANDevices are those whose packets it may forward.
	VXLANDevices []string
	// Hooks are the attached programs: none while it is idle.
	Hooks []fastpath.Hook
	// Skipped names each skipped device and why.
	Skipped []string
	// Err is why all packets take the slow path, if they do.
	Err error
}

// FastpathState tells how the fast path of this place fares.
func (s *Session) FastpathState() FastpathState {
	s.mu.Lock()
	defer s.mu.Unlock()
	state := FastpathState{Wanted: s.fast.wanted, Err: s.fast.err}
	if f := s.fast.path; f != nil {
		state.VXLANDevices, state.Hooks, state.Skipped, state.Err = f.VXLANDevices(), f.Hooks(), f.Skipped(), f.Problem()
	}
	return state
}

// FastpathNews gets something when FastpathState has become another without Keep; nil
// while the fast path is off.
func (s *Session) FastpathChanges() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fast.path == nil {
		return nil
	}
	return s.fast.path.Changes()
}

// Fastpath is the fast path of one network namespace, as the process tells that holds it.
type Fastpath struct {
	// Place is what the holder calls it.
	Place  string `json:"place"`
	Holder Holder `json:"holder"`
	// Hooks are "DEVICE/PROGRAM": none while no connection is eligible.
	Hooks []string `json:"hooks"`
	// Skipped names each skipped device and why; Problem says why all packets take the slow path,
	// if they do.
	Skipped []string `json:"skipped,omitempty"`
	Problem   string   `json:"problem,omitempty"`
	// Connections that are known, and those of them that take the fast path now.
	Connections int `json:"connections"`
	Fast        int `json:"fast"`
	// Packets by what became of them: those of "fast-out" and "fast-in" took the fast
	// path, all others say why not.
	Packets map[string]uint64 `json:"packets"`
}

// Fastpath tells how the fast path of this place does. Packets is nil where it is off.
func (s *Session) Fastpath() (f Fastpath, err error) {
	state := s.FastpathState()
	s.mu.Lock()
	defer s.mu.Unlock()
	f = Fastpath{Place: s.options.Place.Name, Skipped: state.Skipped}
	if state.Err != nil {
		f.Problem = state.Err.Error()
	}
	for _, h := range state.Hooks {
		f.Hooks = append(f.Hooks, h.Device+"/"+h.Program)
	}
	if s.fast.path == nil {
		return f, nil
	}
	f.Holder = s.fast.socket.holder
	if f.Packets, err = s.fast.path.Counts(); err != nil {
		return f, err
	}
	f.Connections, f.Fast, err = s.fast.path.Connections()
	return f, err
}

// FastpathPackets are Fastpath's alone: what a trial asks for at both ends of its window.
func (s *Session) FastpathPackets() (map[string]uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fast.path == nil {
		return nil, nil
	}
	return s.fast.path.Counts()
}

// Fastpaths asks the processes of this machine that hold a fast path, by the names of
// their places. Of o it needs JournalDir.
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

// fastPrefix begins the names of sockets; the cookie of the network namespace follows.
const fastPrefix = "fastpath-"

func (j *journal) fastSocket(id namespace) string {
	return filepath.Join(j.dir, fmt.Sprintf("%s%d", fastPrefix, id.Cookie))
}

func fastSockets(dir string) ([]string, error) {
	return filepath.Glob(filepath.Join(dir, fastPrefix+"*"))
}

// fastSocket is what the holder of a fast path listens on.
type fastSocket struct {
	*net.UnixListener
	file   string
	holder Holder
}

// listenFast makes this process the holder, alone.
func (s *Session) listenFast() (*fastSocket, error) {
	unlock, err := s.journal.lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	o := s.options
	o.Persistent = false
	holder, err := newHolder(o)
	if err != nil {
		return nil, err
	}
	if err := s.journal.sweepFast(); err != nil {
		return nil, err
	}
	file := s.journal.fastSocket(s.id)
	other, held, err := askFast(file)
	if held {
		return nil, fmt.Errorf("the fast path of %s: %w by %s", o.Place.Name, errFastHeld, other.Holder)
	}
	if err != nil {
		return nil, fmt.Errorf("ask who holds the fast path of %s: %w", o.Place.Name, err)
	}
	var l *net.UnixListener
	err = shortly(file, func(file string) (err error) {
		l, err = net.ListenUnix("unix", &net.UnixAddr{Name: file, Net: "unix"})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("hold the fast path of %s: %w", o.Place.Name, err)
	}
	l.SetUnlinkOnClose(false) // by a name that means something for a moment only
	return &fastSocket{l, file, holder}, nil
}

// sweepFast removes the sockets that dead processes have left. The journal is locked, so
// that nobody begins to listen there meanwhile.
func (j *journal) sweepFast() error {
	sockets, err := fastSockets(j.dir)
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

// errFastHeld is an ErrHeld in words that fit.
var errFastHeld = heldFast{}

type heldFast struct{}

func (heldFast) Error() string   { return "held already" }
func (heldFast) Is(e error) bool { return e == ErrHeld }

// fastWait is how long a holder may take to tell.
const fastWait = 2 * time.Second

// serve answers everyone who connects with a document.
func (f *fastSocket) serve(tell func() (Fastpath, error)) {
	go func() {
		for {
			c, err := f.Accept()
			if err != nil {
				return
			}
			now, err := tell()
			if err != nil {
				now.Problem = err.Error()
			}
			now.Holder = f.holder
			_ = c.SetWriteDeadline(time.Now().Add(fastWait))
			_ = json.NewEncoder(c).Encode(now) // who asked may have gone
			_ = c.Close()
		}
	}()
}

// close lets go. The file goes first: what is there after is another's.
func (f *fastSocket) close() error { return errors.Join(os.Remove(f.file), f.Close()) }

// askFast asks the holder whose socket that is, if there is one.
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
		// Somebody listens, and hangs or starts or ends: it is not free.
		f.Problem = "the process that holds it does not answer: " + err.Error()
		if f.Holder.Owner == "" {
			f.Holder.Owner = "a process that does not answer"
		}
	}
	return f, true, nil
}

func dialFast(file string) (c *net.UnixConn, err error) {
	err = shortly(file, func(file string) (err error) {
		c, err = net.DialUnix("unix", nil, &net.UnixAddr{Name: file, Net: "unix"})
		return err
	})
	return c, err
}

// shortly calls fn with a name of a file that fits into a socket's address, however long
// the folder's is.
func shortly(file string, fn func(file string) error) error {
	dir, err := os.Open(filepath.Dir(file))
	if err != nil {
		return err
	}
	defer dir.Close()
	return fn(fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(file)))
}
