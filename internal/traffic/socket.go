package traffic

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"time"
)

// This file opens sockets on every system. It uses calls that each system has in a file of its own. None of them waits longer
// than stallCheck, except dialTCP.

// acceptAll accepts the connections of a pair. Afterwards the listening socket is closed, or has become one of them.
func acceptAll(spec Spec, fd int, at netip.AddrPort, auth *authenticator, stop *atomic.Bool) ([]*conn, error) {
	if spec.UDP {
		return acceptFlows(spec, fd, at, auth, stop)
	}
	defer closeSocket(fd)
	a := &acceptor{authenticator: auth}
	defer a.close()
	var conns []*conn
	for len(conns) < spec.Connections {
		if stop.Load() {
			return conns, context.Canceled
		}
		got, err := acceptTCP(spec, fd, a)
		switch {
		case errors.Is(err, errStalled):
		case err != nil:
			return conns, err
		default:
			conns = append(conns, &conn{fd: got})
		}
	}
	return conns, nil
}

func acceptTCP(spec Spec, fd int, a *acceptor) (int, error) {
	got, err := a.accept(fd)
	if err != nil {
		return -1, err
	}
	_, err = receive(got, make([]byte, a.first)) // all of it has arrived
	if err == nil {
		err = setOptions(got, spec)
	}
	if err != nil {
		closeSocket(got)
		return -1, err
	}
	return got, nil
}

// dialTimeout limits a handshake between two ends that are known to be up.
const dialTimeout = 5 * time.Second

func dialSocket(ctx context.Context, spec Spec, to netip.AddrPort) (int, error) {
	fd, err := newSocket(spec, to.Addr())
	if err != nil {
		return -1, err
	}
	if spec.UDP {
		err = dialUDP(ctx, fd, to, spec.hello())
	} else if err = dialTCP(fd, to); err == nil {
		err = setTimeouts(fd, stallCheck)
	}
	if errors.Is(err, errStalled) {
		err = fmt.Errorf("no answer within %s", dialTimeout)
	}
	if err != nil {
		closeSocket(fd)
		return -1, err
	}
	return fd, nil
}

// dialUDP sends the hello until the server answers it.
func dialUDP(ctx context.Context, fd int, to netip.AddrPort, hello string) error {
	if err := connectUDP(fd, to); err != nil {
		return err
	}
	buf := make([]byte, len(hello)+1)
	for deadline := time.Now().Add(dialTimeout); time.Now().Before(deadline) && ctx.Err() == nil; {
		if _, err := send(fd, []byte(hello)); err != nil && !errors.Is(err, errStalled) {
			return err
		}
		n, err := 0, wait([]pollFD{toRead(fd)}) // so that receive, which would block this thread, does not wait
		if err == nil {
			n, err = receive(fd, buf)
		}
		switch {
		case errors.Is(err, errStalled):
		case err != nil:
			return err
		case string(buf[:n]) == hello:
			return nil
		}
	}
	if err := context.Cause(ctx); err != nil {
		return err
	}
	return errStalled
}
