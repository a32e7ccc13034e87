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

// Anybody who reaches a server's address can connect to it: other pods, scanners, probes. Only the trial's own clients know its
// secret. Over TCP a client sends it first, over UDP in the hello, and over HTTP in the path. In the workload connect, which
// measures how connections open and close, the first connection sends it, and the server trusts its address from then on; each
// message begins with it, too.

// Secret is known only to the two ends of a trial. For HTTP, the zero Secret means that none is required.
type Secret [16]byte

// Path returns the prefix of all paths of an HTTP server. It contains enough of the secret to be unguessable.
func (s Secret) Path() string {
	if s == (Secret{}) {
		return ""
	}
	return "/" + hex.EncodeToString(s[:8])
}

// hello returns the datagram that opens a UDP flow. The client sends it until the server answers with the same datagram. The
// answer comes from a new socket that is connected to the client and receives the flow from then on, so that every flow has its
// own socket and thread at both ends, as over TCP. The server binds that socket to the destination address of the hello, which
// may be one of many: the client accepts answers only from there.
func (s Spec) hello() string { return "slipstream hello" + string(s.Secret[:]) }

// message returns a client's message of the workload connect.
func (s Spec) message() []byte {
	b := s.payload()
	copy(b, s.Secret[:])
	return b
}

const (
	// maxPending limits the number of unauthenticated connections: one more closes the oldest. A client sends the secret within
	// a round trip.
	maxPending = 256
	// authTimeout limits how long a connection may stay unauthenticated.
	authTimeout = 5 * time.Second
)

// authenticator recognises the clients of a server. The threads of the server share it.
type authenticator struct {
	// A connection of the trial begins with the first required bytes of opening: with all of them, unless a message of connect
	// is too small.
	opening []byte
	first   int
	// trustAddress means that an address that has sent all of opening counts as authenticated from then on.
	trustAddress bool
	trusted      atomic.Pointer[map[netip.Addr]bool]
	mu           sync.Mutex // held while trusted is written
	refused      atomic.Uint64
}

// newAuthenticator returns the authenticator of a server whose connections begin with the opening, or with its first size
// bytes.
func newAuthenticator(opening []byte, size int, trustAddress bool) *authenticator {
	a := &authenticator{opening: opening, first: min(len(opening), size), trustAddress: trustAddress}
	a.trusted.Store(new(map[netip.Addr]bool))
	return a
}

// warnings returns a warning if the server has refused anybody.
func (a *authenticator) warnings() []record.Warning {
	n := a.refused.Load()
	if n == 0 {
		return nil
	}
	return []record.Warning{record.Warnf(record.WarnUnexpected,
		"the server was sent %d connections, requests or datagrams that were not the trial's, and refused them: somebody else reaches its address", n)}
}

func (a *authenticator) trust(addr netip.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := map[netip.Addr]bool{addr: true}
	for old := range *a.trusted.Load() {
		now[old] = true
	}
	a.trusted.Store(&now)
}

// acceptor accepts connections in one thread of a server, and holds those that have not authenticated yet.
type acceptor struct {
	*authenticator
	pending []pendingConn
	poll    []pollFD // reused, because there is no garbage collection during a run
}

type pendingConn struct {
	fd    int // -1 when it is closed
	from  netip.Addr
	until time.Time
}

// accept waits up to stallCheck for an authenticated connection, and does not consume its data. After errUnauthenticated,
// another connection may already be waiting.
func (a *acceptor) accept(listening int) (int, error) {
	if len(a.pending) == 0 {
		return a.acceptNew(listening)
	}
	a.poll = append(a.poll[:0], toRead(listening))
	for _, c := range a.pending {
		a.poll = append(a.poll, toRead(c.fd)) // poll ignores the -1 of a closed connection
	}
	err := wait(a.poll)
	if err != nil && !errors.Is(err, errStalled) {
		return -1, fmt.Errorf("wait for a connection: %w", err)
	}
	for i, p := range a.poll[1:] {
		if p.Revents == 0 {
			continue
		}
		if fd := a.authenticate(i); fd >= 0 {
			a.pending = slices.Delete(a.pending, i, i+1)
			return fd, nil
		}
	}
	a.expire(time.Now())
	switch {
	case err != nil:
		return -1, errStalled
	case a.poll[0].Revents == 0:
		return -1, errUnauthenticated
	}
	return a.acceptNew(listening)
}

// acceptNew accepts a connection, and returns it if it is authenticated already.
func (a *acceptor) acceptNew(listening int) (int, error) {
	fd, addr, err := acceptSocket(listening)
	if err != nil {
		return -1, err
	}
	if (*a.trusted.Load())[addr] {
		return fd, nil
	}
	a.add(fd, addr)
	if fd := a.authenticate(len(a.pending) - 1); fd >= 0 { // usually the secret has arrived by now
		a.pending = a.pending[:len(a.pending)-1]
		return fd, nil
	}
	return -1, errUnauthenticated
}

// add holds a connection until it authenticates. If from is not valid, its address does not become trusted.
func (a *acceptor) add(fd int, from netip.Addr) {
	if len(a.pending) >= maxPending {
		a.refuse(0)
		a.pending = slices.Delete(a.pending, 0, 1)
	}
	a.pending = append(a.pending, pendingConn{fd, from, time.Now().Add(authTimeout)})
}

// authenticate returns a pending connection if it has sent the secret, and otherwise -1. It refuses one that has sent something
// else.
func (a *acceptor) authenticate(i int) int {
	c := &a.pending[i]
	sent := make([]byte, len(a.opening))
	n, err := peek(c.fd, sent)
	switch {
	case errors.Is(err, errStalled):
	case err != nil || n == 0: // closed, for example by a probe that only tests whether the port is open
		closeSocket(c.fd)
		c.fd = -1
	case !bytes.HasPrefix(a.opening, sent[:n]):
		a.refuse(i)
	case n >= a.first:
		if a.trustAddress && c.from.IsValid() && n == len(sent) {
			a.trust(c.from)
		}
		return c.fd
	}
	return -1
}

func (a *acceptor) refuse(i int) {
	if c := &a.pending[i]; c.fd >= 0 {
		a.refused.Add(1)
		closeSocket(c.fd)
		c.fd = -1
	}
}

// expire drops closed connections, and refuses those whose time is up.
func (a *acceptor) expire(now time.Time) {
	stay := a.pending[:0]
	for i, c := range a.pending {
		if now.After(c.until) {
			a.refuse(i)
		} else if c.fd >= 0 {
			stay = append(stay, c)
		}
	}
	a.pending = stay
}

// close closes the pending connections, even those of a client of the trial that came too late.
func (a *acceptor) close() {
	for _, c := range a.pending {
		if c.fd >= 0 {
			closeSocket(c.fd)
		}
	}
	a.pending = nil
}
