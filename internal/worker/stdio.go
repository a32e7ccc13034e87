package worker

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"time"
)

// pipe makes a net.Conn out of two byte streams: the standard input and output of a child, or of an exec
// into a pod.
type pipe struct {
	io.Reader
	io.Writer
	closers []io.Closer
	once    sync.Once
	done    chan struct{}
	err     error
}

func newPipe(r io.Reader, w io.Writer, closers ...io.Closer) *pipe {
	return &pipe{Reader: r, Writer: w, closers: closers, done: make(chan struct{})}
}

// closed reports whether the stream has ended: gRPC closes a connection that it cannot read any more.
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
		for _, c := range p.closers {
			p.err = errors.Join(p.err, c.Close())
		}
		close(p.done)
	})
	return p.err
}

type stdioAddr struct{}

func (stdioAddr) Network() string { return "stdio" }
func (stdioAddr) String() string  { return "stdio" }

func (*pipe) LocalAddr() net.Addr              { return stdioAddr{} }
func (*pipe) RemoteAddr() net.Addr             { return stdioAddr{} }
func (*pipe) SetDeadline(time.Time) error      { return nil } // gRPC calls it; a stream has no deadlines
func (*pipe) SetReadDeadline(time.Time) error  { return nil }
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

// dialOnce gives gRPC the one connection. gRPC must not dial again: the worker ends with the stream.
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
