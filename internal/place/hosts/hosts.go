// Package hosts makes places of machines that it reaches by SSH. It runs the user's ssh, copies this program to each host once,
// starts workers there, and tests whether traffic gets from one host to another. It leaves nothing behind: the program's file
// is unlinked before its first byte is written, and a worker ends with its connection. internal/worker has the workers, and
// internal/experiment decides what runs in the places.
package hosts

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"os/user"
	"regexp"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/build"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/worker"
)

// Config configures a run on hosts.
type Config struct {
	Hosts []spec.Host
	// Paths are the paths that traffic takes.
	Paths []Path
	// Root maps the names of hosts to what needs root there, such as "rps of variant rps".
	Root map[string]string
	// Linux maps the names of hosts to what needs Linux there, such as "workload page", and Windows to what needs Windows. A
	// host with the wrong system is refused.
	Linux, Windows map[string]string
	// ReadOnly means that the run changes nothing on the hosts. Workers for control run as root only where sudo -n allows it.
	ReadOnly bool
	// Binaries are builds of this program for other architectures.
	Binaries []string
	// Ask means that ssh may ask a person at a terminal for a password or the like, once for each host.
	Ask bool
	// Note prints a line for the user.
	Note func(string)

	// Tests set how ssh is started, and that its commands share no connection.
	begin func(*exec.Cmd) error
	alone bool
}

// Path leads from a client's host to a server's, by their names.
type Path struct {
	Client, Server string
	// Address is the name of the server's address, spec.AddressNative for its own.
	Address string
	place.Transport
	// Port is the server's port; 0 lets the server choose one.
	Port uint16
}

// Hosts are the places of a run, until Close.
type Hosts struct {
	config Config
	run    string
	builds []build.Build
	hosts  []*host
	lead   time.Duration
	// dialing limits the number of connections that are made at the same time: one if a person may be asked, otherwise eight.
	// All may go through one machine, and a server drops some if more than ten have not logged in yet (MaxStartups of
	// sshd_config).
	dialing chan struct{}
	// folder is the folder of ssh's control sockets.
	folder string
}

type host struct {
	name string
	spec spec.Host
	all  *Hosts
	link link
	// verbose makes ssh print more than errors.
	verbose bool
	// configured is the user's ssh configuration for the host, once it is known.
	configured map[string]string

	facts facts
	// build is the one that the host can run.
	build build.Build
	// windows means that the host runs Windows.
	windows bool
	program program
	// ownJournal means that the run may change settings, and that there was no journal before it.
	ownJournal bool
	// first is the worker that claims the host, or nil. The other workers are started from its program.
	first *worker.Client
	// started means that a first worker has been started. found is the host's own address at that time.
	started bool
	found   netip.Addr

	mu       sync.Mutex
	sessions []*session
}

// program identifies the copy of this program on a host, by a process that runs it and what that calls the file: on Linux, the
// target of its /proc/PID/exe.
type program struct{ process, file string }

// Up starts a worker on each host, and returns once traffic gets through between the hosts. If it fails, it leaves nothing
// behind.
func Up(ctx context.Context, config Config) (*Hosts, error) {
	h, err := New(config)
	if err != nil {
		return nil, err
	}
	if err := h.Up(ctx); err != nil {
		return nil, errors.Join(err, h.Close(context.WithoutCancel(ctx)))
	}
	return h, nil
}

// New returns hosts without connecting to them. The caller closes them.
func New(config Config) (*Hosts, error) {
	if config.begin == nil {
		config.begin = (*exec.Cmd).Start
	}
	config.Ask = config.Ask && canShare // otherwise ssh would ask for each command
	h := &Hosts{config: config, run: strings.ToLower(rand.Text())[:16], dialing: make(chan struct{}, 8)}
	if config.Ask {
		h.dialing = make(chan struct{}, 1)
	}
	var err error
	if h.builds, err = build.Find(config.Binaries); err != nil {
		return nil, err
	}
	if h.folder, err = newFolder(); err != nil {
		return nil, fmt.Errorf("make a folder for ssh's sockets: %w", err)
	}
	for _, spec := range config.Hosts {
		h.hosts = append(h.hosts, &host{name: spec.Name, spec: spec, all: h})
	}
	return h, nil
}

// Up starts a worker on each host, and returns once traffic gets through between the hosts.
func (h *Hosts) Up(ctx context.Context) error {
	err := h.each(ctx, func(ctx context.Context, at *host) error { return at.look(ctx) })
	for _, at := range h.hosts {
		err = cmp.Or(err, at.twin())
	}
	if err != nil {
		return err
	}
	err = h.each(ctx, func(ctx context.Context, at *host) error {
		at.ownJournal = at.root() != "" && !at.facts.journal
		return at.begin(ctx)
	})
	if err != nil {
		return err
	}
	for _, at := range h.hosts {
		if at.windows {
			h.config.Note(at.limits())
		}
	}
	for _, at := range h.hosts {
		began := time.Now()
		if err := at.first.Alive(ctx); err != nil {
			return fmt.Errorf("host %s: %w", at.name, err)
		}
		h.lead = max(h.lead, 50*time.Millisecond+2*time.Since(began))
	}
	return h.reach(ctx)
}

// each calls do for all hosts concurrently. The first error ends it.
func (h *Hosts) each(ctx context.Context, do func(context.Context, *host) error) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, at := range h.hosts {
		g.Go(func() error { return do(ctx, at) })
	}
	return g.Wait()
}

// start examines the host and starts the first worker.
func (h *host) start(ctx context.Context) error {
	if err := h.look(ctx); err != nil {
		return err
	}
	return h.begin(ctx)
}

// look examines the host and chooses its build.
func (h *host) look(ctx context.Context) (err error) {
	facts, err := h.askFacts(ctx)
	if err != nil {
		return err
	}
	h.facts = facts
	if h.build, err = h.suit(); err != nil {
		return refusedError{err}
	}
	return nil
}

// begin copies the program, starts the first worker, which claims the host, and restores the settings of dead workers.
func (h *host) begin(ctx context.Context) (err error) {
	if h.windows {
		err = h.startWindows(ctx, h.build)
	} else {
		err = h.startLinux(ctx, h.build)
	}
	if err != nil {
		return err
	}
	if !h.started {
		h.started, h.found = true, h.address(spec.AddressNative)
	}
	if h.windows || !h.facts.journal {
		return nil
	}
	return h.restore(ctx, false)
}

// startLinux copies the program to the first folder with enough room, and starts the first worker.
func (h *host) startLinux(ctx context.Context, b build.Build) error {
	var s *session
	var err error
	for _, folder := range h.facts.folders {
		if s, err = h.launch(ctx, folder, b); !errors.As(err, new(brokenError)) { // another folder may have more room
			break
		}
	}
	if err != nil {
		return err
	}
	h.first, err = h.attach(ctx, s)
	return err
}

// launch copies the program to a folder of the host, in a session that then becomes the worker.
func (h *host) launch(ctx context.Context, folder string, b build.Build) (*session, error) {
	s, err := h.open(ctx, func(mark string) request { return script(mark, launch(mark, folder, b, h.claim())) })
	if err != nil {
		return nil, err
	}
	if h.program, err = s.copy(ctx, folder, b); err != nil {
		s.end()
		return nil, err
	}
	return s, nil
}

// claim returns the arguments of a worker that claims the host: the first one, or the one for control.
func (h *host) claim() string { return "--remote --claim " + h.all.run + "/" + whoami() }

// attach connects to the worker that a session has become.
func (h *host) attach(ctx context.Context, s *session) (*worker.Client, error) {
	c, err := worker.Attach(ctx, s)
	if err != nil {
		return nil, fmt.Errorf("host %s: %w", h.name, err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.sessions = append(h.sessions, s)
	return c, nil
}

// brokenError means that a copy of the program is incomplete, usually for lack of space.
type brokenError struct{ error }

// copy sends the program, and returns the process that runs it.
func (s *session) copy(ctx context.Context, folder string, b build.Build) (program, error) {
	if err := s.expect(ctx, "send"); err != nil {
		return program{}, err
	}
	f, err := os.Open(b.File)
	if err != nil {
		return program{}, fmt.Errorf("copy the program to host %s: %w", s.at.name, err)
	}
	defer f.Close()
	ctx, stop := s.within(ctx, copyTime, "")
	defer stop()
	_, _ = f.WriteTo(s.in) // the script reports errors
	// What ssh and its connection still hold may take minutes, so copyTime limits this report too.
	word, rest, err := s.next(ctx)
	switch {
	case errors.As(err, new(brokenConnection)):
		return program{}, fmt.Errorf("copy the program to host %s: %w. If this happens again at the same place: does a limit of the user's memory there (MemoryMax of systemd, a container's) leave no room for %d MiB in %s?", s.at.name, err, b.Size>>20+1, folder)
	case err != nil:
		return program{}, fmt.Errorf("copy the program to host %s: %w", s.at.name, err)
	case word == "broken":
		s.settle()
		return program{}, brokenError{fmt.Errorf("copy the program to %s on host %s: the copy differs from the program that was sent (%d bytes)%s", folder, s.at.name, b.Size, s.said())}
	case word != "program":
		return program{}, unexpected(s.at.name, word)
	}
	process, file, _ := strings.Cut(rest, " ")
	return program{process, file}, nil
}

func unexpected(host, word string) error {
	return refusedError{fmt.Errorf("host %s: sh there does not run the script that it was sent: it answers %q", host, word)}
}

// drop ends the connections to all workers of the host.
func (h *host) drop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, s := range h.sessions {
		s.end()
	}
	h.sessions = nil
	h.first = nil
	h.unlink()
}

var notPlain = regexp.MustCompile(`[^A-Za-z0-9.@_-]+`)

// whoami names the user and the process of this run, for another run that finds the host claimed.
func whoami() string {
	name, err := os.Hostname()
	if err != nil {
		name = "unknown"
	}
	return notPlain.ReplaceAllString(fmt.Sprintf("%s@%s-process-%d", me(), name, os.Getpid()), "-")
}

// me returns the user name of this process.
func me() string {
	u, err := user.Current()
	if err != nil {
		return cmp.Or(os.Getenv("USER"), "root")
	}
	return u.Username[strings.LastIndex(u.Username, `\`)+1:]
}

// Worker starts a worker in a place.
func (h *Hosts) Worker(ctx context.Context, p place.Place, use place.Use) (*worker.Client, error) {
	at := h.find(p.Node)
	control, arguments := use == place.ForControl, "--remote"
	if control {
		arguments = "--control " + at.claim()
	}
	s, err := at.open(ctx, func(mark string) request {
		if at.windows {
			return againWindows(mark, at.program.file)
		}
		return script(mark, again(mark, at.program, control && at.sudo(), control && at.ownJournal, arguments))
	})
	if err != nil {
		return nil, err
	}
	if err := s.expect(ctx, "program"); err != nil {
		s.end()
		return nil, err
	}
	return at.attach(ctx, s)
}

func (h *Hosts) find(name string) *host {
	for _, at := range h.hosts {
		if at.name == name {
			return at
		}
	}
	panic("no host " + name) // every place is a host
}

// root returns what needs root on this host, or "".
func (h *host) root() string { return h.all.config.Root[h.name] }

// sudo reports whether a worker for control uses sudo on this host.
func (h *host) sudo() bool {
	return h.facts.user != "0" && (h.root() != "" || h.facts.sudo)
}

// restore restores the settings that dead workers have left on the host, if this run may change settings there. With own it
// also removes the journal.
func (h *host) restore(ctx context.Context, own bool) error {
	if h.root() == "" {
		return nil
	}
	s, err := h.open(ctx, func(mark string) request { return script(mark, revert(mark, h.program, h.sudo(), own)) })
	if err != nil {
		return err
	}
	defer s.end()
	if err = s.expect(ctx, "program"); err == nil {
		var word string
		if word, _, err = s.report(ctx); err == nil && word != "end" {
			s.settle()
			err = errors.New(strings.TrimPrefix(s.said(), ": "))
		}
	}
	if err != nil {
		return fmt.Errorf("restore the settings of host %s: %w", h.name, err)
	}
	s.settle()
	if said := s.said(); said != "" { // a warning about settings that somebody else has changed
		h.all.config.Note("host " + h.name + said)
	}
	return nil
}

// patience is how long a host may be unreachable before the run is lost: about as long as a reboot takes. endPatience applies
// at the end of a run; after that, the settings of dead workers stay.
const patience, endPatience = 5 * time.Minute, time.Minute

// aliveTime limits how long a host may take to answer.
const aliveTime = 10 * time.Second

// Await reconnects to hosts that do not answer. It tries once or, if patient is set, until patience is over; then the run is
// lost (place.ErrLost).
func (h *Hosts) Await(ctx context.Context, patient bool) error {
	limit := time.Duration(0)
	if patient {
		limit = patience
	}
	return h.everywhere(func(at *host) error {
		if at.answers(ctx) == nil || ctx.Err() != nil {
			return ctx.Err()
		}
		h.config.Note(fmt.Sprintf("host %s does not answer: connecting again", at.name))
		if err := at.comeBack(ctx, limit); err != nil {
			return err
		}
		h.config.Note(fmt.Sprintf("host %s is back", at.name))
		return nil
	})
}

// everywhere calls do for all hosts concurrently. An error does not end it.
func (h *Hosts) everywhere(do func(*host) error) error {
	errs := make([]error, len(h.hosts))
	var doing sync.WaitGroup
	for i, at := range h.hosts {
		doing.Go(func() { errs[i] = do(at) })
	}
	doing.Wait()
	return errors.Join(errs...)
}

func (h *host) answers(ctx context.Context) error {
	if h.first == nil {
		return worker.ErrGone
	}
	ctx, cancel := context.WithTimeout(ctx, aliveTime)
	defer cancel()
	return h.first.Alive(ctx)
}

// comeBack tries at growing intervals, until limit is over, to start the host's first worker again.
func (h *host) comeBack(ctx context.Context, limit time.Duration) error {
	deadline := time.Now().Add(limit)
	for wait := 250 * time.Millisecond; ; wait = min(2*wait, 15*time.Second) {
		h.drop()
		err := h.start(ctx)
		switch now := h.address(spec.AddressNative); {
		case err == nil && now != h.found:
			h.drop()
			return &place.LostError{Why: fmt.Errorf("host %s has come back at another address, %s for %s", h.name, now, h.found)}
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.As(err, new(refusedError)):
			return &place.LostError{Why: err}
		case time.Now().After(deadline):
			return &place.LostError{Why: fmt.Errorf("host %s has not come back within %s: %w", h.name, limit, err)}
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		}
	}
}

// Places returns the hosts, as nodes.
func (h *Hosts) Places() []place.Place {
	var all []place.Place
	for _, at := range h.hosts {
		p := place.Place{Name: at.name, Kind: place.Node, Node: at.name, Addresses: make(map[string]netip.Addr), Unprivileged: at.windows}
		for name := range at.spec.Addresses {
			p.Addresses[name] = at.address(name)
		}
		if native := at.address(spec.AddressNative); native.Is4() {
			p.IPv4 = native
		} else {
			p.IPv6 = native
		}
		all = append(all, p)
	}
	return all
}

// address returns an address of the host by name, or the zero Addr. The native one is the address at which SSH reaches it.
func (h *host) address(name string) netip.Addr {
	if text, ok := h.spec.Addresses[name]; ok {
		return netip.MustParseAddr(text).Unmap() // Parse has checked it
	}
	if name == spec.AddressNative {
		return h.facts.address
	}
	return netip.Addr{}
}

// Lead returns the time in which the start time of traffic reaches all workers.
func (h *Hosts) Lead() time.Duration { return h.lead }

// Close ends all workers, and restores the settings that they may have left.
func (h *Hosts) Close(ctx context.Context) error {
	err := h.everywhere(func(at *host) error { return at.close(ctx) })
	return errors.Join(err, os.RemoveAll(h.folder))
}

func (h *host) close(ctx context.Context) error {
	defer h.unlink()
	if !h.started {
		return nil
	}
	if h.root() != "" && h.answers(ctx) != nil { // the last switch may have rebooted it
		h.all.config.Note(fmt.Sprintf("host %s does not answer: connecting again, to restore its settings", h.name))
		if err := h.comeBack(ctx, endPatience); err != nil { // not %w: the run is not lost, all trials are done
			return fmt.Errorf("restore the settings of host %s: %v", h.name, err)
		}
	}
	if h.first == nil {
		return nil
	}
	err := h.restore(ctx, h.ownJournal)
	gone := h.first.Gone()
	if closeErr := h.first.Close(); !gone { // if it is gone, that was reported before
		err = errors.Join(err, closeErr)
	}
	if h.windows {
		err = errors.Join(err, h.remove(ctx, h.program.file))
	}
	h.drop()
	return err
}
