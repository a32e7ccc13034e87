//go:build linux

package traffic

import (
	"bufio"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"
)

// visitors runs the users of a page. There may be any number, and most of them wait. So each is a goroutine that uses Go's
// poller, whose cost hardly matters here: loading a page takes a hundred times longer than waking a user.
type visitors struct {
	spec    Spec
	objects []pageObject
	root    string // the beginning of all paths
	to      netip.AddrPort
	dialer  net.Dialer
	working sync.WaitGroup
	readers sync.Pool

	mu sync.Mutex // guards the counts that are not atomic
	// due counts the users who were due in the window, and late those who began late.
	due, late uint64
}

// visit starts users at the rate, even if earlier ones have not finished. The time of a user counts from when it was due, so
// that a stall counts for all users that it delayed (coordinated omission).
func (s Spec) visit(to netip.AddrPort, c *conn, r *run) error {
	v := &visitors{spec: s, objects: s.pageObjects(), to: to, root: s.Secret.Path(), readers: sync.Pool{New: func() any { return &pageReader{in: bufio.NewReaderSize(nil, 16<<10)} }}}
	v.dialer.Control = func(_, _ string, raw syscall.RawConn) (err error) {
		return joinControl(raw, func(fd int) error { return setCongestionControl(fd, s) })
	}
	first := s.first(r)
	for seq := int64(0); ; seq++ {
		due := first + s.after(seq)
		if due >= r.To {
			break
		}
		if c.from.at == 0 && due > r.From { // the edge is not that of the next user
			r.await(r.From, sleeper{}, false)
			c.mark(r, r.now())
		}
		r.await(due, sleeper{}, false)
		if r.stopped.Load() {
			break
		}
		v.working.Go(func() { v.user(due, c, r) })
		c.mark(r, r.now())
	}
	r.await(r.To, sleeper{}, false)
	c.mark(r, max(r.now(), r.To))
	v.working.Wait() // each gives up after answerLimit
	c.due, c.late = v.due, v.late
	return nil
}

// user loads a page over one connection.
func (v *visitors) user(due int64, c *conn, r *run) {
	began := r.now()
	n, err := v.load(r.ctx)
	now := r.now()
	v.mu.Lock()
	defer v.mu.Unlock()
	if within := due >= r.From && due < r.To; within {
		v.due++
		if began-due > int64(lateBy) {
			v.late++
		}
		if err != nil && !r.stopped.Load() {
			c.fail(err)
		} else if err == nil {
			_ = c.hdr.RecordValue(min(now-due, c.hdr.HighestTrackableValue()))
		}
	}
	if err == nil {
		c.bytes.Add(uint64(n))
		c.messages.Add(1)
	}
}

func (v *visitors) load(ctx context.Context) (n int, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, answerLimit, errNoAnswer)
	defer cancel()
	conn, err := v.dialer.DialContext(ctx, "tcp", v.to.String())
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	in := v.readers.Get().(*pageReader)
	defer v.readers.Put(in)
	in.in.Reset(conn)
	for i, one := range v.objects {
		connection := "keep-alive"
		if i == len(v.objects)-1 {
			connection = "close"
		}
		if _, err := fmt.Fprintf(conn, "GET %s%s HTTP/1.1\r\nHost: %s\r\nUser-Agent: slipstream\r\nAccept-Encoding: gzip\r\nConnection: %s\r\n\r\n",
			v.root, one.target, v.to, connection); err != nil {
			return 0, err
		}
		took, err := in.object(one.size)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", one.target, err)
		}
		n += took
	}
	// The server closes first, as for single requests.
	if _, err := in.in.ReadByte(); err != io.EOF {
		return 0, fmt.Errorf("%w: more than the response", errHTTP)
	}
	return n, nil
}

// pageReader reads responses. Users share a pool of them, because they are large.
type pageReader struct {
	in *bufio.Reader
	z  gzip.Reader
}

// object reads a response whose uncompressed body has size bytes, and returns the size of the body as transferred.
func (p *pageReader) object(size int) (int, error) {
	in := p.in
	var h head
	for want := 1; h.size == 0; {
		if _, err := in.Peek(want); err != nil {
			return 0, noEOF(err)
		}
		b, err := in.Peek(in.Buffered())
		if err != nil {
			return 0, err
		}
		if h, err = parseResponse(b); err != nil {
			return 0, err
		}
		want = len(b) + 1
	}
	_, _ = in.Discard(h.size)
	if h.status < 200 || h.status > 299 {
		return 0, fmt.Errorf("%w: %d", errStatus, h.status)
	}
	body := io.LimitReader(in, int64(h.length))
	var plain int64
	var err error
	if h.gzip {
		if err = p.z.Reset(body); err == nil {
			p.z.Multistream(false)
			plain, err = io.Copy(io.Discard, &p.z)
		}
	} else {
		plain, err = io.Copy(io.Discard, body)
	}
	if err == nil {
		_, err = io.Copy(io.Discard, body)
	}
	if err != nil {
		return 0, noEOF(err)
	}
	if plain != int64(size) {
		return 0, fmt.Errorf("%d bytes of %d: %w", plain, size, io.ErrUnexpectedEOF)
	}
	return h.length, nil
}

// noEOF turns io.EOF into io.ErrUnexpectedEOF.
func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// joinControl calls set with the socket of raw, and returns the error of either.
func joinControl(raw syscall.RawConn, set func(fd int) error) error {
	var err error
	if controlErr := raw.Control(func(fd uintptr) { err = set(int(fd)) }); controlErr != nil {
		return controlErr
	}
	return err
}
