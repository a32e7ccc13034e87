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
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel/fastpath"
	"slipstream.dev/internal/accel/journal"
	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/record"
)

// Unlike a setting, the fast path lives only as long as the process that runs it, so it
// needs no journal entry. Instead, each network namespace with a fast path has a socket
// next to the journal. Listening on it is the lock, so that only one process runs the
// fast path of a namespace; and whoever connects gets the status. The lock ends with the
// process: nobody listens on a file that is left behind.

// fast is the fast path of a place.
type fast struct {
	place *place

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
	// as is the configuration that the fast path was started with.
	as *v1alpha1.Fastpath
	// wanted is whether Keep wants the fast path; err is why it is off nevertheless, and tried is when
	// starting it failed.
	wanted   bool
	err      error
	tried    time.Time
	repaired int
}

// Keep tries again to start a fast path that failed to start after retryAfter, and after a timeout, as on a machine that
// boots, after retrySoon.
const (
	retryAfter = 10 * time.Minute
	retrySoon  = 15 * time.Second
)

// attached is the value of a hook of the fast path, as a setting.
const attached = "attached"

// setting returns a hook of the fast path as a setting.
func (f *fast) setting(h fastpath.Hook, got string) record.Setting {
	return record.Setting{Place: f.place.options.Place.Name, Path: "tcx/" + h.Device + "/" + h.Program, Want: attached, Got: got}
}

// settings are the hooks that are attached now.
func (f *fast) settings() (all []record.Setting) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.path != nil {
		for _, h := range f.path.Hooks() {
			all = append(all, f.setting(h, attached))
		}
	}
	return all
}

// checkLifetime returns an error if the accelerators include the fast path and this process is about
// to end.
func (p *place) checkLifetime(accelerators []v1alpha1.Accelerator) error {
	if p.options.Persistent && slices.ContainsFunc(accelerators, func(a v1alpha1.Accelerator) bool { return a.Fastpath != nil }) {
		return errors.New("the fast path lasts as long as the process that runs it, and this one is about to end: " +
			"write it into a policy for the agent (slipstream agent --policy FILE), or measure it (slipstream run)")
	}
	return nil
}

// start takes the socket and starts the fast path.
func (f *fast) start(as *v1alpha1.Fastpath) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.startLocked(as)
}

func (f *fast) startLocked(as *v1alpha1.Fastpath) (err error) {
	if f.socket, err = f.place.listenFast(); err != nil {
		return err
	}
	if f.path, err = fastpath.Start(f.place.ns, f.place.options.Log, as.UnseenBy...); err != nil {
		return errors.Join(err, f.stopLocked())
	}
	f.as = as
	f.socket.serve(f.status)
	return nil
}

// stop ends the fast path, if it is on.
func (f *fast) stop() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.stopLocked()
}

func (f *fast) stopLocked() error {
	old := f.fastRun
	f.fastRun = fastRun{}
	var err error
	if old.path != nil {
		if counts, err := old.path.Counts(); err == nil {
			f.place.options.Log.Info("the fast path stops", "place", f.place.options.Place.Name, "counts", counts, "skipped", old.path.Skipped())
		}
		err = old.path.Close()
	}
	if old.socket != nil {
		err = errors.Join(err, old.socket.close())
	}
	return err
}

// keep starts or stops the fast path as it is wanted; nil is off. It is no error if the fast path
// cannot start: the other accelerators do not depend on it.
func (f *fast) keep(ctx context.Context, want *v1alpha1.Fastpath, kept *Kept) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if want == nil {
		return f.stopLocked()
	}
	o := f.place.options
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
	f.wanted, f.err, f.tried = true, Forbidden(err), time.Now() // stopLocked has reset wanted if starting failed
	if err == nil {
		kept.Set += len(f.path.Hooks())
	}
	return nil
}

// retryPause returns after how long Keep tries again what has failed with an error.
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

// FastpathState is the state of the fast path after Keep.
type FastpathState struct {
	// Wanted is whether the plan has the fast path; if not, all else is empty.
	Wanted bool
	// VXLANDevices are the devices that the fast path supports.
	VXLANDevices []string
	// Hooks are the attached programs: none while the fast path is idle.
	Hooks []fastpath.Hook
	// Skipped names each skipped device and why.
	Skipped []string
	// Err is why all packets take the slow path, if they do.
	Err error
}

// FastpathState returns the state of the fast path of this place.
func (k *Keeper) FastpathState() FastpathState {
	k.fast.mu.Lock()
	defer k.fast.mu.Unlock()
	return k.fast.state()
}

func (f *fast) state() FastpathState {
	state := FastpathState{Wanted: f.wanted, Err: f.err}
	if p := f.path; p != nil {
		state.VXLANDevices, state.Hooks, state.Skipped, state.Err = p.VXLANDevices(), p.Hooks(), p.Skipped(), p.Problem()
	}
	return state
}

// FastpathChanges returns a channel that receives a value when FastpathState changes without Keep;
// nil while the fast path is off.
func (k *Keeper) FastpathChanges() <-chan struct{} {
	k.fast.mu.Lock()
	defer k.fast.mu.Unlock()
	if k.fast.path == nil {
		return nil
	}
	return k.fast.path.Changes()
}

// Fastpath is the status of the fast path of one network namespace, from the process that runs it.
type Fastpath struct {
	// Place is the name that this process gives the namespace; Holder is the process.
	Place  string         `json:"place"`
	Holder journal.Holder `json:"holder"`
	// Hooks are "DEVICE/PROGRAM": none while no connection is eligible.
	Hooks []string `json:"hooks"`
	// Skipped names each skipped device and why; Problem says why all packets take the slow path,
	// if they do.
	Skipped []string `json:"skipped,omitempty"`
	Problem string   `json:"problem,omitempty"`
	// Connections counts the known connections, Fast those of them that are accelerated now.
	Connections int `json:"connections"`
	Fast        int `json:"fast"`
	// Packets counts packets by reason: "fast-out" and "fast-in" took the fast path, all
	// others the slow path for that reason.
	Packets map[string]uint64 `json:"packets"`
}

// Fastpath returns the status of the fast path of this place. Packets is nil while it is off.
func (k *Keeper) Fastpath() (Fastpath, error) { return k.fast.status() }

func (f *fast) status() (status Fastpath, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	state := f.state()
	status = Fastpath{Place: f.place.options.Place.Name, Skipped: state.Skipped}
	if state.Err != nil {
		status.Problem = state.Err.Error()
	}
	for _, h := range state.Hooks {
		status.Hooks = append(status.Hooks, h.Device+"/"+h.Program)
	}
	if f.path == nil {
		return status, nil
	}
	status.Holder = f.socket.holder
	if status.Packets, err = f.path.Counts(); err != nil {
		return status, err
	}
	status.Connections, status.Fast, err = f.path.Connections()
	return status, err
}

// FastpathPackets returns how many packets took the fast path, and for each reason the slow one;
// nil while the fast path is off. A trial reads them at both ends of its window.
func (a *Applier) FastpathPackets() (map[string]uint64, error) {
	a.fast.mu.Lock()
	defer a.fast.mu.Unlock()
	if a.fast.path == nil {
		return nil, nil
	}
	return a.fast.path.Counts()
}

// Fastpaths returns the status of all fast paths of this machine, sorted by the names of their
// places. It uses only JournalDir of o.
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

// fastPrefix is the prefix of socket names, which the cookie of the network namespace completes.
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

// listenFast listens on the socket, unless another process does.
func (p *place) listenFast() (*fastSocket, error) {
	unlock, err := p.journal.Lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	o := p.options
	holder, err := journal.Process(o.Proc, o.Owner)
	if err != nil {
		return nil, err
	}
	if err := sweepFast(o.JournalDir); err != nil {
		return nil, err
	}
	file := fastSocketFile(o.JournalDir, p.id)
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

// sweepFast removes the sockets of dead processes. The caller holds the lock of the journal, so
// that no process starts to listen meanwhile.
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

// errFastHeld is journal.ErrHeld with a text that fits a fast path.
var errFastHeld = heldFast{}

type heldFast struct{}

func (heldFast) Error() string   { return "held already" }
func (heldFast) Is(e error) bool { return e == journal.ErrHeld }

// fastWait bounds how long to wait for the answer on a socket.
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

// close ends listening. It removes the file first: afterwards another process may have created it again.
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
		// A process listens, but hangs, starts or ends: the fast path counts as held.
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

// withShortName calls fn with a name of a file that fits into a socket's address, no matter how long
// the directory's name is.
func withShortName(file string, fn func(file string) error) error {
	dir, err := os.Open(filepath.Dir(file))
	if err != nil {
		return err
	}
	defer dir.Close()
	return fn(fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(file)))
}
