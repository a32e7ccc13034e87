//go:build linux

package fastpath_test

import (
	"bytes"
	"errors"
	"net"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/place/lab/overlay"
	"slipstream.dev/internal/spec"
)

// TestDatagramBatches sends batches of datagrams in one packet (UDP_SEGMENT), as QUIC does, for several revalidations. The batches must
// take the fast path, and each datagram must arrive, in order and with its size.
func TestDatagramBatches(t *testing.T) {
	t.Parallel()
	vxlan := func(t *testing.T) *world { return newWorld(t, spec.ShapeFlannel, spec.OffloadFull) }
	local := func(t *testing.T) *world { return newLocalWorld(t, spec.ShapeFlannel, false) }
	for name, c := range map[string]struct {
		start func(*testing.T) *world
		front front
	}{
		"VXLAN":                   {vxlan, direct},
		"VXLAN, Service":          {vxlan, byService},
		"VXLAN, IPv6":             {func(t *testing.T) *world { return newWorldOf(t, spec.ShapeFlannel, spec.OffloadFull, true) }, direct},
		"VXLAN, without offloads": {func(t *testing.T) *world { return newWorld(t, spec.ShapeFlannel, spec.OffloadNone) }, direct},
		"routed":                  {func(t *testing.T) *world { return newWorld(t, overlay.ShapeRouted, spec.OffloadFull) }, direct},
		"routed, IPv6":            {func(t *testing.T) *world { return newWorldOf(t, overlay.ShapeRouted, spec.OffloadFull, true) }, direct},
		"local":                   {local, direct},
		"local, Service":          {local, byService},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := c.start(t)
			w.start()
			w.checkBatches(c.front)
		})
	}
}

func (w *world) checkBatches(front front) {
	near, far := w.datagramPair(front)
	for _, c := range []*net.UDPConn{near, far} {
		option(w.T, c, func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_SEGMENT, 1000) })
	}
	count := func(why string) (all []uint64) {
		for i := range w.nodes() {
			all = append(all, w.counts(i)[why])
		}
		return all
	}
	w.eventually("the batches take the fast path", func() { w.exchangeBatches(near, far, 20) }, func() bool { return slices.Min(count("fast-out")) > 20 })
	out, in, last, tooLong := count("fast-out"), count("fast-in"), count("revalidate"), count("exceeds-mtu")
	batches, rises := uint64(0), make([]int, len(last)) // a batch may be counted nine times, if it is single packets
	w.eventually("each node revalidates the flow three times both ways", func() {
		w.exchangeBatches(near, far, 20)
		batches += 20
		now := count("revalidate")
		for i, n := range now {
			if n > last[i] {
				rises[i]++
			}
		}
		last = now
	}, func() bool { return slices.Min(rises) >= 6 })
	for i := range w.nodes() {
		c := w.counts(i)
		sent, received := c["fast-out"]-out[i], c["fast-in"]-in[i]
		if w.local { // a packet counts once: as outgoing or as incoming
			sent = (sent + received) / 2
			received = sent
		}
		if least := batches * 9 / 10; sent < least || received < least {
			w.Errorf("of %d batches to and from pods of node%d, %d left and %d arrived by the fast path: %v", batches, i, sent, received, c)
		}
	}
	if now := count("exceeds-mtu"); !slices.Equal(now, tooLong) {
		w.Errorf("packets are counted as larger than the MTU: %d, before %d", now, tooLong)
	}
}

// exchangeBatches sends batches of nine datagrams, and waits for the answer to each, which is such a batch too.
func (w *world) exchangeBatches(near, far *net.UDPConn, batches int) {
	w.Helper()
	batch := make([]byte, 8*1000+300)
	receive := func(c *net.UDPConn) (from *net.UDPAddr) {
		buf := make([]byte, 2000)
		for rest := batch; len(rest) > 0; {
			want := rest[:min(1000, len(rest))]
			n, sender, err := c.ReadFromUDP(buf)
			if err != nil {
				w.Fatalf("after %d of %d bytes: %v", len(batch)-len(rest), len(batch), err)
			}
			if !bytes.Equal(buf[:n], want) {
				w.Fatalf("a datagram of %d bytes that begins with %d, want %d that begin with %d", n, buf[0], len(want), want[0])
			}
			rest, from = rest[len(want):], sender
		}
		return from
	}
	for i := range batches {
		for k := range batch {
			batch[k] = byte(i + k/1000)
		}
		deadline := time.Now().Add(patience)
		_, err := near.Write(batch)
		if err := errors.Join(err, near.SetDeadline(deadline), far.SetDeadline(deadline)); err != nil {
			w.Fatal(err)
		}
		from := receive(far)
		if _, err := far.WriteToUDP(batch, from); err != nil {
			w.Fatal(err)
		}
		receive(near)
	}
}
