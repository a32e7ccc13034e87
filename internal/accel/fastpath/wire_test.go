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

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/grammar"
)

// frame is one from node0 to node1 on the wire, taken apart.
type frame struct {
	// headers are all in front of the inner UDP's or TCP's payload, less what is
	// each packet's own: identifications, lengths and sums, which are checked.
	headers string
	payload []byte
	size    int
	// sum is whether there is an outer checksum.
	sum bool
}

// take is the frame of a captured packet of the connection to a port, if it is one.
func take(b []byte, protocol byte, port uint16) (f frame, ok bool, err error) {
	const outer, inner = 14, 64
	if len(b) < inner+28 || binary.BigEndian.Uint16(b[12:]) != 0x0800 || b[outer+9] != unix.IPPROTO_UDP || b[inner+9] != protocol ||
		binary.BigEndian.Uint16(b[inner+22:]) != port {
		return f, false, nil
	}
	b = bytes.Clone(b)
	f.size = len(b)
	l4 := 8
	if protocol == unix.IPPROTO_TCP {
		l4 = int(b[inner+32]>>4) * 4
	}
	f.payload = bytes.Clone(b[inner+20+l4:])
	var errs []error
	check := func(what string, got, want int) {
		if got != want {
			errs = append(errs, fmt.Errorf("%s is %d, want %d", what, got, want))
		}
	}
	half := func(at int) int { return int(binary.BigEndian.Uint16(b[at:])) }
	check("outer length", half(outer+2), len(b)-outer)
	check("outer UDP's length", half(outer+24), len(b)-outer-20)
	check("inner length", half(inner+2), len(b)-inner)
	check("outer header's sum", int(grammar.Sum(0, b[outer:outer+20])), 0xffff)
	check("inner header's sum", int(grammar.Sum(0, b[inner:inner+20])), 0xffff)
	pseudo := func(ip int) uint32 {
		s := uint32(b[ip+9]) + uint32(half(ip+2)-20)
		return s + uint32(grammar.Sum(0, b[ip+12:ip+20]))
	}
	at := inner + 20 + 6
	if protocol == unix.IPPROTO_TCP {
		at = inner + 20 + 16
	}
	f.sum = half(outer+26) != 0
	if f.sum && protocol == unix.IPPROTO_UDP {
		// What the device would fill in, which the outer sum counts on.
		if half(at) == int(grammar.Sum(pseudo(inner), nil)) {
			b[at], b[at+1] = 0, 0
			binary.BigEndian.PutUint16(b[at:], ^grammar.Sum(pseudo(inner), b[inner+20:]))
		}
		check("inner sum", int(grammar.Sum(pseudo(inner), b[inner+20:])), 0xffff)
		check("outer UDP's sum", int(grammar.Sum(pseudo(outer), b[outer+20:])), 0xffff)
	}
	own := []int{outer + 2, outer + 4, outer + 10, outer + 24, outer + 26, inner + 2, inner + 4, inner + 10, at}
	if protocol == unix.IPPROTO_UDP {
		own = append(own, inner+24)
	} else {
		clear(b[inner+24 : inner+20+l4]) // numbers, window, options
	}
	for _, at := range own {
		b[at], b[at+1] = 0, 0
	}
	f.headers = fmt.Sprintf("%x", b[:inner+20+l4])
	return f, true, errors.Join(errs...)
}

// capture takes the frames that come over the wire from node0, until stop returns them.
func (w *world) capture(protocol byte, port uint16) (stop func() []frame) {
	w.Helper()
	fd := -1
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
		for {
			n, from, err := unix.Recvfrom(fd, buf, 0)
			if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
				select {
				case <-quit: // and nothing is left to read
					unix.Close(fd)
					done <- all
					return
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
			f, ok, err := take(buf[:n], protocol, port)
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

// TestDatagramsOnTheWire compares what node0 sends over the slow path and over the fast
// one, of the same sockets: the same but for identifications.
func TestDatagramsOnTheWire(t *testing.T) {
	for _, shape := range shapes {
		for _, offload := range offloads {
			for _, tos := range []int{0, 2, 3, 0x28 | 1} {
				// One of them by way of a service.
				front, by := front(direct), ""
				if tos == 3 && shape == v1alpha1.ShapeFlannel {
					front, by = byService, " service"
				}
				t.Run(fmt.Sprintf("%s %s %#x%s", shape, offload, tos, by), func(t *testing.T) {
					w := newWorld(t, shape, offload)
					server := uint16(0)
					near := w.datagramsBy(func(w *world, protocol byte, to netip.AddrPort) netip.AddrPort {
						server = to.Port()
						return front(w, protocol, to)
					})
					raw, err := near.SyscallConn()
					if err != nil {
						t.Fatal(err)
					}
					if err := errors.Join(raw.Control(func(fd uintptr) {
						err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_TOS, tos)
					}), err); err != nil {
						t.Fatal(err)
					}
					sizes := []int{0, 1, 2, 63, 64, 1000, 1421, 1422} // the last fills the MTU
					answer := make([]byte, 2048)
					send := func(rounds int) {
						t.Helper()
						for range rounds {
							for _, size := range sizes {
								message := bytes.Repeat([]byte{byte(size), 0xff, 7}, size/3+1)[:size]
								_ = near.SetReadDeadline(time.Now().Add(patience))
								if _, err := near.Write(message); err != nil {
									t.Fatal(err)
								}
								if n, err := near.Read(answer); err != nil || !bytes.Equal(answer[:n], message) {
									t.Fatalf("of %d bytes %d came back: %v", size, n, err)
								}
							}
						}
					}
					stop := w.capture(unix.IPPROTO_UDP, server)
					send(10)
					slow := stop()

					w.start()
					fast := func() bool {
						before := w.counts(0)["fast-out"]
						send(4)
						return w.counts(0)["fast-out"] >= before+uint64(4*len(sizes))
					}
					w.eventually("fast path", func() {}, fast)
					before := w.counts(0)
					stop = w.capture(unix.IPPROTO_UDP, server)
					send(10)
					quick := stop()
					if n := w.counts(0)["fast-out"] - before["fast-out"]; n < uint64(9*len(sizes)) {
						t.Fatalf("%d of %d datagrams took the fast path: %v", n, 10*len(sizes), w.counts(0))
					}
					if len(slow) != 10*len(sizes) || len(quick) != len(slow) {
						t.Fatalf("%d datagrams were on the wire from the slow path, %d from the fast one, want %d", len(slow), len(quick), 10*len(sizes))
					}
					for i := range slow {
						if a, b := slow[i], quick[i]; a.headers != b.headers || a.size != b.size || a.sum != b.sum || !bytes.Equal(a.payload, b.payload) {
							t.Fatalf("slow %+v\nfast %+v", a, b)
						}
					}
				})
			}
		}
	}
}

// TestStreamOnTheWire compares the headers and sizes of a stream.
func TestStreamOnTheWire(t *testing.T) {
	for _, offload := range offloads {
		t.Run(offload, func(t *testing.T) {
			w := newWorld(t, shapes[0], offload)
			e := w.connect()
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
				t.Errorf("it did not take the fast path: %v", w.counts(0))
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

// discard reads without splice, which needs no file.
type discard struct{}

func (discard) Write(b []byte) (int, error) { return len(b), nil }
