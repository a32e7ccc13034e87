//go:build linux

package fastpath_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/place/lab/overlay"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv/grammar"
)

// frame is a parsed frame from node0 to node1.
type frame struct {
	// headers has everything before the inner payload, without the fields that differ in each
	// packet: identifications, lengths and checksums. parseFrame verifies those.
	headers string
	payload []byte
	size    int
	// sum is whether there is an outer UDP checksum.
	sum bool
}

// parseFrame parses a captured packet, if it belongs to the connection to a port. inner is the offset of the pods' packet: that of an
// Ethernet header if nothing encapsulates it.
func parseFrame(b []byte, inner int, protocol byte, port uint16) (f frame, ok bool, err error) {
	const outer = 14
	tunnel := inner > outer
	if len(b) < inner+28 || tunnel && (binary.BigEndian.Uint16(b[12:]) != 0x0800 || b[outer+9] != unix.IPPROTO_UDP) {
		return f, false, nil
	}
	six := b[inner]>>4 == 6
	next, ends := inner+9, inner+20 // its protocol, and the offset of that header
	if six {
		next, ends = inner+6, inner+40
	}
	if len(b) < ends+8 || b[next] != protocol || binary.BigEndian.Uint16(b[ends+2:]) != port {
		return f, false, nil
	}
	b = bytes.Clone(b)
	f.size = len(b)
	l4, at := 8, ends+6 // the size of its header, and the offset of the checksum
	if protocol == unix.IPPROTO_TCP {
		l4, at = int(b[ends+12]>>4)*4, ends+16
	}
	f.payload = bytes.Clone(b[ends+l4:])
	var errs []error
	check := func(what string, got, want int) {
		if got != want {
			errs = append(errs, fmt.Errorf("%s is %d, want %d", what, got, want))
		}
	}
	half := func(at int) int { return int(binary.BigEndian.Uint16(b[at:])) }
	if six {
		check("inner length", half(inner+4), len(b)-ends)
	} else {
		check("inner length", half(inner+2), len(b)-inner)
		check("inner header's sum", int(grammar.Sum(0, b[inner:inner+20])), 0xffff)
	}
	own := []int{at}
	if tunnel {
		check("outer length", half(outer+2), len(b)-outer)
		check("outer UDP's length", half(outer+24), len(b)-outer-20)
		check("outer header's sum", int(grammar.Sum(0, b[outer:outer+20])), 0xffff)
		own = append(own, outer+2, outer+4, outer+10, outer+24, outer+26)
		f.sum = half(outer+26) != 0
	}
	pseudo := func(protocol byte, l4, from int) uint32 {
		return uint32(protocol) + uint32(len(b)-l4) + uint32(grammar.Sum(0, b[from:l4]))
	}
	inside := func() uint32 {
		if six {
			return pseudo(protocol, ends, inner+8)
		}
		return pseudo(protocol, ends, inner+12)
	}
	if f.sum && protocol == unix.IPPROTO_UDP {
		// The NIC would complete this checksum, and the kernel has computed the outer checksum as if it had.
		if half(at) == int(grammar.Sum(inside(), nil)) {
			b[at], b[at+1] = 0, 0
			binary.BigEndian.PutUint16(b[at:], ^grammar.Sum(inside(), b[ends:]))
		}
		check("inner sum", int(grammar.Sum(inside(), b[ends:])), 0xffff)
		check("outer UDP's sum", int(grammar.Sum(pseudo(unix.IPPROTO_UDP, outer+20, outer+12), b[outer+20:])), 0xffff)
	}
	if six {
		own = append(own, inner+4)
	} else {
		own = append(own, inner+2, inner+4, inner+10)
	}
	if protocol == unix.IPPROTO_UDP {
		own = append(own, ends+4)
	} else {
		clear(b[ends+4 : ends+l4]) // sequence numbers, window, options
	}
	for _, at := range own {
		b[at], b[at+1] = 0, 0
	}
	f.headers = fmt.Sprintf("%x", b[:ends+l4])
	return f, true, errors.Join(errs...)
}

// capture captures the frames that node0 sends on the wire, until stop returns them.
func (w *world) capture(protocol byte, port uint16) (stop func() []frame) {
	w.Helper()
	fd, inner := -1, grammar.Head
	if w.shape == overlay.ShapeRouted {
		inner = 14
	}
	w.in("sw", func() error {
		device, err := net.InterfaceByName("node0")
		if err != nil {
			return err
		}
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		timeout := unix.NsecToTimeval(int64(50 * time.Millisecond))
		return errors.Join(
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20),
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout),
			unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: 0x0300, Ifindex: device.Index}), // ETH_P_ALL in network order
		)
	})
	quit := make(chan struct{})
	done := make(chan []frame)
	go func() {
		var all []frame
		buf := make([]byte, 1<<17)
		stopped := false
		for {
			n, from, err := unix.Recvfrom(fd, buf, 0)
			if errors.Is(err, unix.EAGAIN) && stopped { // nothing is left to read
				unix.Close(fd)
				done <- all
				return
			}
			if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
				// Packets may have come since, so read the socket once more.
				select {
				case <-quit:
					stopped = true
				default:
				}
				continue
			}
			if err != nil {
				w.Error(err)
				close(done)
				return
			}
			if from.(*unix.SockaddrLinklayer).Pkttype == unix.PACKET_OUTGOING {
				continue
			}
			f, ok, err := parseFrame(buf[:n], inner, protocol, port)
			if err != nil {
				w.Errorf("packet %x: %v", buf[:min(n, 128)], err)
			}
			if ok {
				all = append(all, f)
			}
		}
	}()
	return func() []frame { close(quit); return <-done }
}

func headersOf(frames []frame) []string {
	all := make(map[string]bool)
	for _, f := range frames {
		all[f.headers] = true
	}
	return slices.Sorted(maps.Keys(all))
}

// TestDatagramsOnTheWire compares the packets that node0 sends on the slow path and on the fast
// path, from the same sockets. They must be equal except for identifications.
func TestDatagramsOnTheWire(t *testing.T) {
	t.Parallel()
	for _, shape := range shapes {
		for _, offload := range offloads {
			t.Run(shape+" "+offload, func(t *testing.T) {
				t.Parallel()
				w := newWorldOf(t, shape, offload, true) // with IPv4 as in all worlds
				var all []*wireTest
				for _, tos := range []int{0, 2, 3, 0x28 | 1} {
					// One connection uses a Service, two use IPv6.
					front, by, six := front(direct), "", false
					switch {
					case tos == 3 && shape != spec.ShapeCalico:
						front, by = byService, " service"
					case tos == 2 && shape != spec.ShapeCalico, tos == 0x28|1 && shape == spec.ShapeCalico:
						six, by = true, " IPv6"
					}
					w.six = six
					c := w.wireTest(front, tos)
					c.name = fmt.Sprintf("%#x%s", tos, by)
					c.slow = c.captured(10)
					all = append(all, c)
				}
				w.start()
				for _, c := range all {
					w.sub(c.name, c.compare)
				}
			})
		}
	}
}

// wireTest sends datagrams of several sizes, which come back.
type wireTest struct {
	*world
	name   string
	near   *net.UDPConn
	server uint16 // its port
	sizes  []int
	slow   []frame
}

func (w *world) wireTest(front front, tos int) *wireTest {
	w.Helper()
	c := &wireTest{world: w, sizes: []int{0, 1, 2, 63, 64, 1000, 1421, 1422}} // up to the MTU
	if w.six {
		c.sizes[6], c.sizes[7] = 1381, 1382 // up to the MTU of IPv6 routes of a pod
	}
	c.near = w.datagramsBy(func(w *world, protocol byte, to netip.AddrPort) netip.AddrPort {
		c.server = to.Port()
		return front(w, protocol, to)
	})
	option(w.T, c.near, func(fd int) error {
		if w.six {
			return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_TCLASS, tos)
		}
		return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TOS, tos)
	})
	return c
}

// send sends a datagram of each size in each round, and waits for it.
func (c *wireTest) send(rounds int) {
	c.Helper()
	answer := make([]byte, 2048)
	for range rounds {
		for _, size := range c.sizes {
			message := bytes.Repeat([]byte{byte(size), 0xff, 7}, size/3+1)[:size]
			_ = c.near.SetReadDeadline(time.Now().Add(patience))
			if _, err := c.near.Write(message); err != nil {
				c.Fatal(err)
			}
			if n, err := c.near.Read(answer); err != nil || !bytes.Equal(answer[:n], message) {
				c.Fatalf("of %d bytes %d came back: %v", size, n, err)
			}
		}
	}
}

// captured sends, and returns the frames that node0 sends for that.
func (c *wireTest) captured(rounds int) []frame {
	c.Helper()
	stop := c.capture(unix.IPPROTO_UDP, c.server)
	c.send(rounds)
	return stop()
}

func (c *wireTest) compare() {
	each := len(c.sizes)
	c.eventually("fast path", nil, func() bool {
		before := c.counts(0)["fast-out"]
		c.send(4)
		return c.counts(0)["fast-out"] >= before+uint64(4*each)
	})
	before := c.counts(0)
	quick := c.captured(10)
	if n := c.counts(0)["fast-out"] - before["fast-out"]; n < uint64(9*each) {
		c.Fatalf("%d of %d datagrams took the fast path: %v", n, 10*each, c.counts(0))
	}
	if len(c.slow) != 10*each || len(quick) != len(c.slow) {
		c.Fatalf("%d datagrams were on the wire from the slow path, %d from the fast one, want %d", len(c.slow), len(quick), 10*each)
	}
	for i := range c.slow {
		if a, b := c.slow[i], quick[i]; a.headers != b.headers || a.size != b.size || a.sum != b.sum || !bytes.Equal(a.payload, b.payload) {
			c.Fatalf("slow %+v\nfast %+v", a, b)
		}
	}
}

// TestStreamOnTheWire compares the headers and sizes of a TCP stream.
func TestStreamOnTheWire(t *testing.T) {
	t.Parallel()
	for i, offload := range slices.Concat(offloads, offloads) {
		six := i >= len(offloads)
		t.Run(fmt.Sprintf("%s IPv6 %t", offload, six), func(t *testing.T) {
			t.Parallel()
			w := newWorldOf(t, shapes[0], offload, six)
			e := w.connect()
			// After a retransmission timeout, which a busy machine can cause, the kernel would choose another hash, and so
			// another outer source port.
			option(t, e.Conn.(*net.TCPConn), func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TXREHASH, 0) })
			go func() { _, _ = e.far.(*net.TCPConn).WriteTo(discard{}) }()
			send := func() {
				t.Helper()
				block := make([]byte, 1<<18)
				for range 64 {
					if _, err := e.Write(block); err != nil {
						t.Fatal(err)
					}
				}
			}
			port := uint16(e.RemoteAddr().(*net.TCPAddr).Port)
			largest := func(frames []frame) (size int) {
				for _, f := range frames {
					size = max(size, f.size)
				}
				return size
			}
			send()
			stop := w.capture(unix.IPPROTO_TCP, port)
			send()
			slow := stop()
			w.start()
			w.eventually("fast path", send, func() bool { return w.counts(0)["fast-out"] > 1000 })
			stop = w.capture(unix.IPPROTO_TCP, port)
			before := w.counts(0)["fast-out"]
			send()
			fast := stop()
			if w.counts(0)["fast-out"] == before {
				t.Errorf("packets did not take the fast path: %v", w.counts(0))
			}
			if a, b := headersOf(slow), headersOf(fast); !slices.Equal(a, b) {
				t.Errorf("slow %q\nfast %q", a, b)
			}
			if a, b := largest(slow), largest(fast); a != b && offload == "none" {
				t.Errorf("the largest frame has %d bytes over the slow path, %d over the fast one", a, b)
			}
		})
	}
}

// discard hides the io.ReaderFrom of io.Discard, so that reads do not use splice.
type discard struct{}

func (discard) Write(b []byte) (int, error) { return len(b), nil }
