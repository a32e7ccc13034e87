package traffic

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"slipstream.dev/internal/record"
)

// A server of a pair is reached by whoever reaches its address: other pods, scanners,
// probes. Who belongs to the trial knows its secret. Over TCP a client says it first,
// over UDP in the hello. In the workload connect, where connections come and go while
// they are measured, the first one says it, and its address is known from then on;
// besides, each message begins with it. HTTP has it in the path.

// Secret is what both ends of a trial know, and nobody else. Of HTTP the zero Secret
// asks for none.
type Secret [16]byte

// Path is what the paths of what a server of HTTP has begin with: as much of the
// secret as cannot be guessed.
func (s Secret) Path() string {
	if s == (Secret{}) {
		return ""
	}
	return "/" + hex.EncodeToString(s[:8])
}

// hello opens a UDP flow: the client sends it until the server answers with the
// same from a socket that is connected to the client, which from then on gets
// all of the flow. So every flow has a socket and a thread of its own at both
// ends, as it has over TCP. The server's is bound to the address that was asked, which
// may be one of many: the client takes answers from there alone.
func (s Spec) hello() string { return "slipstream hello" + string(s.Secret[:]) }

// message is one of connect's, as the client sends it.
func (s Spec) message() []byte {
	b := make([]byte, s.Size)
	copy(b, s.Secret[:])
	return b
}

const (
	// maxGuests have not said yet who they are; one more sends the first of them away.
	// Who knows the secret says it within a round trip.
	maxGuests = 256
	// guestTime is how long they may take.
	guestTime = 5 * time.Second
)

// door lets in who knows the secret. The threads of a server share it.
type door struct {
	// opening is what a connection of the trial begins with, first how much of it each has to
	// say; a message of connect may have room for a part only.
	opening []byte
	first   int
	// keep has an address that said all of it once be let in at once from then on.
	keep      bool
	known     atomic.Pointer[map[netip.Addr]bool]
	mu        sync.Mutex // of who writes known
	strangers atomic.Uint64
}

// newDoor is that of a server whose connections begin with as much of the opening as size has
// room for.
func newDoor(opening []byte, size int, keep bool) *door {
	d := &door{opening: opening, first: min(len(opening), size), keep: keep}
	d.known.Store(new(map[netip.Addr]bool))
	return d
}

// warnings tell of those who were not let in.
func (d *door) warnings() []record.Warning {
	n := d.strangers.Load()
	if n == 0 {
		return nil
	}
	return []record.Warning{record.Warnf(record.WarnUnexpected,
		"the server was sent %d connections, requests or datagrams that were not the trial's, and refused them: somebody else reaches its address", n)}
}

func (d *door) remember(a netip.Addr) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := map[netip.Addr]bool{a: true}
	for old := range *d.known.Load() {
		now[old] = true
	}
	d.known.Store(&now)
}

// hall is where one thread has connections wait that have not said the secret yet.
type hall struct {
	*door
	guests []guest
	poll   []pollFD // kept, as there is no collection during a run
}

type guest struct {
	fd    int
	from  netip.Addr
	until time.Time
}

// accept waits, for stallCheck at most, for a connection that may come in. What it has
// sent is still to be read. After an errStranger there may be one that has come already.
func (h *hall) accept(listening int) (int, error) {
	if len(h.guests) == 0 {
		return h.take(listening)
	}
	h.poll = append(h.poll[:0], toRead(listening))
	for _, g := range h.guests {
		h.poll = append(h.poll, toRead(g.fd)) // none where it is gone
	}
	err := wait(h.poll)
	if err != nil && !errors.Is(err, errStalled) {
		return -1, fmt.Errorf("wait for a connection: %w", err)
	}
	for i, p := range h.poll[1:] {
		if p.Revents == 0 {
			continue
		}
		if fd := h.ask(i); fd >= 0 {
			h.guests = slices.Delete(h.guests, i, i+1)
			return fd, nil
		}
	}
	h.dismiss(time.Now())
	switch {
	case err != nil:
		return -1, errStalled
	case h.poll[0].Revents == 0:
		return -1, errStranger
	}
	return h.take(listening)
}

// take takes a connection, and has one wait that is not known.
func (h *hall) take(listening int) (int, error) {
	fd, addr, err := acceptSocket(listening)
	if err != nil {
		return -1, err
	}
	if (*h.known.Load())[addr] {
		return fd, nil
	}
	h.seat(fd, addr)
	if fd := h.ask(len(h.guests) - 1); fd >= 0 { // it is mostly there already
		h.guests = h.guests[:len(h.guests)-1]
		return fd, nil
	}
	return -1, errStranger
}

// seat has a connection wait.
func (h *hall) seat(fd int, from netip.Addr) {
	if len(h.guests) >= maxGuests {
		h.refuse(0)
		h.guests = slices.Delete(h.guests, 0, 1)
	}
	h.guests = append(h.guests, guest{fd, from, time.Now().Add(guestTime)})
}

// ask looks at what a guest has said: its connection if that is the secret, else -1.
func (h *hall) ask(i int) int {
	g := &h.guests[i]
	said := make([]byte, len(h.opening))
	n, err := peek(g.fd, said)
	switch {
	case errors.Is(err, errStalled):
	case err != nil || n == 0: // it has gone, as a client does that only looks whether somebody is there
		closeSocket(g.fd)
		g.fd = -1
	case !bytes.HasPrefix(h.opening, said[:n]):
		h.refuse(i)
	case n >= h.first:
		if h.keep && g.from.IsValid() && n == len(said) {
			h.remember(g.from)
		}
		return g.fd
	}
	return -1
}

func (h *hall) refuse(i int) {
	if g := &h.guests[i]; g.fd >= 0 {
		h.strangers.Add(1)
		closeSocket(g.fd)
		g.fd = -1
	}
}

// dismiss forgets guests that are gone, or have said nothing for long.
func (h *hall) dismiss(now time.Time) {
	stay := h.guests[:0]
	for i, g := range h.guests {
		if now.After(g.until) {
			h.refuse(i)
		} else if g.fd >= 0 {
			stay = append(stay, g)
		}
	}
	h.guests = stay
}

// close ends what still waits, be it the client's own, which came too late.
func (h *hall) close() {
	for _, g := range h.guests {
		if g.fd >= 0 {
			closeSocket(g.fd)
		}
	}
	h.guests = nil
}
