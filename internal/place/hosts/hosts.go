// Package hosts makes places of machines that it reaches by SSH. It logs in as ssh does, copies this program to each
// host once, starts workers there, and finds out whether traffic gets from one host to the other. It leaves nothing
// behind: the program's file has no name from its first byte on, and a worker ends with its connection. What a worker
// does is up to internal/worker, and what runs in the places to internal/experiment.
package hosts

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/sync/errgroup"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/worker"
)

// Config of a run on hosts.
type Config struct {
	Hosts []spec.Host
	// Paths that traffic takes.
	Paths []Path
	// Root maps the names of hosts to what needs root there, such as "rps of variant rps". The other hosts do not
	// need it.
	Root map[string]string
	// Linux maps the names of hosts to what needs Linux there, such as "workload page". Such a host is refused if it
	// runs Windows. Windows maps them to what needs Windows.
	Linux, Windows map[string]string
	// Look means that the run changes nothing on the hosts. Workers for control run as root where sudo -n allows it,
	// and otherwise without.
	Look bool
	// Binaries are files of this program for other architectures than its own.
	Binaries []string
	// Home has the user's SSH configuration and keys in its .ssh.
	Home string
	// Note prints a line for the user.
	Note func(string)

	dial dialer // a test's own
}

// Path leads from a client's host to a server's, by their names.
type Path struct {
	Client, Server string
	// Address is the name of the server's address, spec.AddressNative for its own.
	Address string
	place.Transport
}

// Hosts are the places of a run, until Close.
type Hosts struct {
	config   Config
	run      string
	binaries []binary
	hosts    []*host
	lead     time.Duration
	// dialing bounds how many connections are made at once, as all may go through one machine: servers drop
	// some of more than ten that have not logged in yet (MaxStartups of sshd_config).
	dialing chan struct{}
}

// host is one of the Hosts.
type host struct {
	name  string
	spec  spec.Host
	login login
	all   *Hosts

	facts facts
	// windows means that the host runs Windows, according to its SSH server.
	windows bool
	program program
	// ownJournal means that the run may change settings, and that there was no journal when it began.
	ownJournal bool
	// first is the worker that claims the host, or nil. The other workers run its program.
	first *worker.Client
	// started means that there has been a first worker, and that found, the host's own address, is known since.
	started bool
	found   netip.Addr

	mu       sync.Mutex
	sessions []*session
}

// program identifies this program on a host, by a process that runs it.
type program struct{ process, file string }

// Up starts a worker on each host, and returns once traffic gets through between them. If it fails, it
// leaves nothing behind.
func Up(ctx context.Context, config Config) (*Hosts, error) {
	h, err := prepare(config)
	if err != nil {
		return nil, err
	}
	if err := h.up(ctx); err != nil {
		return nil, errors.Join(err, h.Close(context.WithoutCancel(ctx)))
	}
	return h, nil
}

// prepare works out how to reach the hosts, and connects to none.
func prepare(config Config) (*Hosts, error) {
	if config.dial == nil {
		config.dial = new(net.Dialer).DialContext
	}
	h := &Hosts{config: config, run: strings.ToLower(rand.Text())[:16], dialing: make(chan struct{}, 8)}
	ssh, err := readConfiguration(config.Home, machineFile())
	if err != nil {
		return nil, err
	}
	if ssh.leftOut != nil {
		config.Note(fmt.Sprintf("the SSH configuration of this machine is left out: %v", ssh.leftOut))
	}
	if h.binaries, err = binaries(config.Binaries); err != nil {
		return nil, err
	}
	for _, spec := range config.Hosts {
		l, err := ssh.login(spec)
		if err != nil {
			return nil, err
		}
		h.hosts = append(h.hosts, &host{name: spec.Name, spec: spec, login: l, all: h})
	}
	return h, nil
}

func (h *Hosts) up(ctx context.Context) error {
	err := h.each(ctx, func(ctx context.Context, at *host) error {
		err := at.start(ctx)
		at.ownJournal = at.root() != "" && !at.facts.journal
		return err
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

// connect opens a connection to the host, for one session.
func (h *host) connect(ctx context.Context) (*ssh.Client, error) {
	select {
	case h.all.dialing <- struct{}{}:
		defer func() { <-h.all.dialing }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	return h.login.connect(ctx, h.all.config.dial)
}

// start examines the host, copies the program, starts the first worker, which claims the host, and restores what dead
// workers have left there.
func (h *host) start(ctx context.Context) error {
	facts, err := h.look(ctx)
	if err != nil {
		return err
	}
	h.facts = facts
	b, err := h.suit()
	if err != nil {
		return refusedError{err}
	}
	if h.windows {
		err = h.startWindows(ctx, b)
	} else {
		err = h.startLinux(ctx, b)
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

// startLinux copies the program to the first folder that has room for it, and starts the first worker.
func (h *host) startLinux(ctx context.Context, b binary) error {
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

// launch copies the program to a folder of the host, in a session that then becomes the program.
func (h *host) launch(ctx context.Context, folder string, b binary) (*session, error) {
	s, err := h.open(ctx, func(mark string) string { return command(launch(mark, folder, b, h.claim())) })
	if err != nil {
		return nil, err
	}
	if h.program, err = s.copy(ctx, folder, b); err != nil {
		s.client.Close()
		return nil, err
	}
	return s, nil
}

// claim returns the arguments of a worker of which a host has only one: the first, or the one for control.
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

// brokenError means that a copy of the program is not complete. Usually there is no room for it.
type brokenError struct{ error }

// copy sends the program, and returns how the host runs it.
func (s *session) copy(ctx context.Context, folder string, b binary) (program, error) {
	if err := s.expect(ctx, "send"); err != nil {
		return program{}, err
	}
	f, err := os.Open(b.file)
	if err != nil {
		return program{}, fmt.Errorf("copy the program to host %s: %w", s.host, err)
	}
	defer f.Close()
	ctx, stop := within(ctx, copyTime, s.host, s.client)
	defer stop()
	_, _ = f.WriteTo(s.in) // the script reports the outcome
	word, rest, err := s.report(ctx)
	switch {
	case err != nil:
		return program{}, fmt.Errorf("copy the program to host %s: %w", s.host, err)
	case word == "broken":
		s.settle()
		return program{}, brokenError{fmt.Errorf("copy the program to %s on host %s: the copy differs from the program that was sent (%d bytes)%s", folder, s.host, b.size, s.stderr.Last())}
	case word != "program":
		return program{}, unexpected(s.host, word)
	}
	process, file, _ := strings.Cut(rest, " ")
	return program{process, file}, nil
}

func unexpected(host, word string) error {
	return refusedError{fmt.Errorf("host %s: sh there does not run the script that it was sent: it answers %q", host, word)}
}

// drop breaks the connections to all workers of the host.
func (h *host) drop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, s := range h.sessions {
		s.client.Close()
	}
	h.sessions = nil
	h.first = nil
}

var notPlain = regexp.MustCompile(`[^A-Za-z0-9.@_-]+`)

// whoami says who runs this, for others that find the host claimed.
func whoami() string {
	name, err := os.Hostname()
	if err != nil {
		name = "unknown"
	}
	return notPlain.ReplaceAllString(fmt.Sprintf("%s@%s-process-%d", me(), name, os.Getpid()), "-")
}

// Worker starts a worker in a place.
func (h *Hosts) Worker(ctx context.Context, p place.Place, use place.Use) (*worker.Client, error) {
	at := h.find(p.Node)
	control, arguments := use == place.ForControl, "--remote"
	if control {
		arguments = "--control " + at.claim()
	}
	s, err := at.open(ctx, func(mark string) string {
		if at.windows {
			return againWindows(mark, at.program.file)
		}
		return command(again(mark, at.program, control && at.sudo(), control && at.ownJournal, arguments))
	})
	if err != nil {
		return nil, err
	}
	if err := s.expect(ctx, "program"); err != nil {
		s.client.Close()
		return nil, err
	}
	return at.attach(ctx, s)
}

// open runs a command in a session with a connection of its own: a server may allow no more, not even one
// after the other (MaxSessions 1).
func (h *host) open(ctx context.Context, script func(mark string) string) (*session, error) {
	client, err := h.connect(ctx)
	if err != nil {
		return nil, err
	}
	return h.run(ctx, client, script)
}

// run runs a command in a connection, which it closes if that fails.
func (h *host) run(ctx context.Context, client *ssh.Client, script func(mark string) string) (*session, error) {
	ctx, stop := within(ctx, scriptTime, h.name, client)
	defer stop()
	s, err := open(h.name, client, script)
	if err != nil {
		client.Close()
		return nil, cmp.Or(context.Cause(ctx), err)
	}
	return s, nil
}

func (h *Hosts) find(name string) *host {
	for _, at := range h.hosts {
		if at.name == name {
			return at
		}
	}
	panic("no host " + name) // places are of hosts
}

// root says what needs root on this host, "" if nothing does.
func (h *host) root() string { return h.all.config.Root[h.name] }

// sudo reports whether a worker for control uses sudo on this host.
func (h *host) sudo() bool {
	return h.facts.user != "0" && (h.root() != "" || h.facts.sudo)
}

// restore restores what dead workers have left on the host, if this run may change anything there. It removes a journal
// that is the run's own.
func (h *host) restore(ctx context.Context, own bool) error {
	if h.root() == "" {
		return nil
	}
	s, err := h.open(ctx, func(mark string) string { return command(revert(mark, h.program, h.sudo(), own)) })
	if err != nil {
		return err
	}
	defer s.client.Close()
	if err = s.expect(ctx, "program"); err == nil {
		var word string
		if word, _, err = s.report(ctx); err == nil && word != "end" {
			s.settle()
			err = errors.New(strings.TrimPrefix(s.stderr.Last(), ": "))
		}
	}
	if err != nil {
		return fmt.Errorf("restore the settings of host %s: %w", h.name, err)
	}
	s.settle()
	if said := s.stderr.Last(); said != "" { // of settings that somebody has changed meanwhile
		h.all.config.Note("host " + h.name + said)
	}
	return nil
}

// patience bounds how long a host may be unreachable before the run is given up. A restart takes about that long.
// endPatience is the bound at the end of a run: after it, what dead workers left there stays.
const patience, endPatience = 5 * time.Minute, time.Minute

// aliveTime bounds how long a host may take to answer.
const aliveTime = 10 * time.Second

// Await connects again to hosts that do not answer. It tries once or, if patient is set, until patience is over; then
// the run is lost (place.ErrLost).
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

// comeBack tries to start the host's first worker again, at growing intervals, until limit is over.
func (h *host) comeBack(ctx context.Context, limit time.Duration) error {
	h.drop()
	deadline := time.Now().Add(limit)
	for wait := 250 * time.Millisecond; ; wait = min(2*wait, 15*time.Second) {
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

// address returns an address of the host by name; invalid if it has none. The host's own is the one by which SSH reaches
// it.
func (h *host) address(name string) netip.Addr {
	if text, ok := h.spec.Addresses[name]; ok {
		return netip.MustParseAddr(text).Unmap() // Parse has checked it
	}
	if name == spec.AddressNative {
		return h.facts.address
	}
	return netip.Addr{}
}

// Lead returns the longest time that the start time of traffic takes to reach the workers.
func (h *Hosts) Lead() time.Duration { return h.lead }

// Close ends all workers, and restores what they may have left.
func (h *Hosts) Close(ctx context.Context) error {
	return h.everywhere(func(at *host) error { return at.close(ctx) })
}

func (h *host) close(ctx context.Context) error {
	if !h.started {
		return nil
	}
	if h.root() != "" && h.answers(ctx) != nil { // the last switch may have restarted it
		h.all.config.Note(fmt.Sprintf("host %s does not answer: connecting again, to restore its settings", h.name))
		if err := h.comeBack(ctx, endPatience); err != nil { // no trial is lost by that
			return fmt.Errorf("restore the settings of host %s: %v", h.name, err)
		}
	}
	if h.first == nil {
		return nil
	}
	err := h.restore(ctx, h.ownJournal)
	gone := h.first.Gone()
	if closeErr := h.first.Close(); !gone { // otherwise that is known, and was reported
		err = errors.Join(err, closeErr)
	}
	h.drop()
	if h.windows {
		err = errors.Join(err, h.remove(ctx, h.program.file))
	}
	return err
}
