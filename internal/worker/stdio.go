package worker

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"time"
)

// pipe makes a net.Conn of two byte streams: the standard input and output of a child, or of an exec into a pod.
type pipe struct {
	io.Reader
	io.Writer
	close func() error
	once  sync.Once
	done  chan struct{}
	err   error

	mu       sync.Mutex
	deadline *time.Timer
}

func newPipe(r io.ReadCloser, w io.WriteCloser) *pipe {
	return &pipe{Reader: r, Writer: w, close: func() error { return errors.Join(w.Close(), r.Close()) }, done: make(chan struct{})}
}

// SetDeadline closes the pipe at a given time, or never if that is zero. gRPC limits the setup of a connection by it.
func (p *pipe) SetDeadline(at time.Time) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.deadline != nil {
		p.deadline.Stop()
	}
	if !at.IsZero() {
		p.deadline = time.AfterFunc(time.Until(at), func() { _ = p.Close() })
	}
	return nil
}

// closed reports whether the stream has ended: gRPC closes a connection that it cannot read.
func (p *pipe) closed() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

func (p *pipe) Close() error {
	p.once.Do(func() {
		p.err = p.close()
		close(p.done)
	})
	return p.err
}

type stdioAddr struct{}

func (stdioAddr) Network() string { return "stdio" }
func (stdioAddr) String() string  { return "stdio" }

func (*pipe) LocalAddr() net.Addr              { return stdioAddr{} }
func (*pipe) RemoteAddr() net.Addr             { return stdioAddr{} }
func (*pipe) SetReadDeadline(time.Time) error  { return nil } // gRPC sets these when it closes the pipe anyway
func (*pipe) SetWriteDeadline(time.Time) error { return nil }

// one is a listener that accepts one connection, and closes with it.
type one struct {
	conn  *pipe
	taken chan struct{}
}

func listenOne(p *pipe) *one {
	l := &one{conn: p, taken: make(chan struct{}, 1)}
	l.taken <- struct{}{}
	return l
}

func (l *one) Accept() (net.Conn, error) {
	select {
	case <-l.taken:
		return l.conn, nil
	case <-l.conn.done:
		return nil, net.ErrClosed
	}
}

func (l *one) Close() error   { return l.conn.Close() }
func (l *one) Addr() net.Addr { return stdioAddr{} }

// dialOnce returns a dialer for the one connection. A second dial fails, because the worker ends with the stream.
func dialOnce(p *pipe) func(context.Context, string) (net.Conn, error) {
	l := listenOne(p)
	return func(context.Context, string) (net.Conn, error) {
		select {
		case <-l.taken:
			return p, nil
		default:
			return nil, net.ErrClosed
		}
	}
}
