//go:build linux && soak

package cluster

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/fastpath/conntrack"
	"slipstream.dev/internal/fastpath/datapath"
	"slipstream.dev/internal/testenv/grammar"
)

var errMisdelivered = errors.New("something else arrived than was sent")

// sequence is the stream that one end of a connection sends. Each 8-byte word names the connection, the
// direction and its own position. So the first wrong byte shows whether data was lost, duplicated, or
// belongs to another connection.
type sequence struct {
	of uint64 // connection and direction, in the upper 25 bits
	at uint64 // bytes
}

func sequences(connection uint64) (there, back sequence) {
	return sequence{of: connection << 40}, sequence{of: connection<<40 | 1<<39}
}

func (s *sequence) next(n int) []byte {
	skip := int(s.at % 8)
	b := make([]byte, 0, skip+n+7)
	for word := s.at / 8; len(b) < skip+n; word++ {
		b = binary.BigEndian.AppendUint64(b, s.of|word)
	}
	s.at += uint64(n)
	return b[skip : skip+n]
}

// expect compares arrived data with the next part of the sequence.
func (s *sequence) expect(b []byte) error {
	at := s.at
	if want := s.next(len(b)); !bytes.Equal(b, want) {
		i := 0
		for b[i] == want[i] {
			i++
		}
		end := min(i+16, len(b))
		return fmt.Errorf("%w: byte %d is the first of %x, want %x", errMisdelivered, at+uint64(i), b[i:end], want[i:end])
	}
	return nil
}

// connection connects two pods. Both ends check each byte.
type connection struct {
	near, far *net.TCPConn

	// mu guards the near end's state.
	mu          sync.Mutex
	there, back sequence
	answered    chan error
}

func newConnection(near, far net.Conn, id uint64) *connection {
	c := &connection{near: near.(*net.TCPConn), far: far.(*net.TCPConn), answered: make(chan error, 1)}
	c.there, c.back = sequences(id)
	go func() { c.answered <- c.answer(id) }()
	return c
}

// answer makes the far end send back as many bytes as arrive, until the connection ends.
func (c *connection) answer(id uint64) error {
	defer c.far.Close()
	there, back := sequences(id)
	for b := make([]byte, blockSize); ; {
		n, err := c.far.Read(b)
		if err == nil {
			err = there.expect(b[:n])
		}
		if err == nil {
			_, err = c.far.Write(back.next(n))
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

const blockSize = 1 << 16

// exchange sends size bytes, and waits until as many come back.
func (c *connection) exchange(size int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	sent := make(chan error, 1)
	go func() { sent <- c.send(size) }()
	err := c.receive(size, patience)
	return errors.Join(err, <-sent)
}

func (c *connection) send(size int) error {
	if err := c.near.SetWriteDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	for size > 0 {
		n := min(size, blockSize)
		if _, err := c.near.Write(c.there.next(n)); err != nil {
			return err
		}
		size -= n
	}
	return nil
}

// receive waits for the bytes that come back. If the far end has failed, the error includes its reason.
func (c *connection) receive(size int, wait time.Duration) error {
	if err := c.near.SetReadDeadline(time.Now().Add(wait)); err != nil {
		return err
	}
	for b := make([]byte, min(size, blockSize)); size > 0; {
		n, err := c.near.Read(b[:min(size, blockSize)])
		if err == nil {
			err = c.back.expect(b[:n])
		}
		if err != nil {
			select {
			case far := <-c.answered:
				err = fmt.Errorf("%w; the far end: %w", err, errors.Join(far, io.EOF))
			default:
			}
			return err
		}
		size -= n
	}
	return nil
}

func (c *connection) close() { c.near.Close() }

// ends returns the addresses of a connection as the pod at this end sees them.
func ends(c *net.TCPConn) (own, other netip.AddrPort) {
	return c.LocalAddr().(*net.TCPAddr).AddrPort(), c.RemoteAddr().(*net.TCPAddr).AddrPort()
}

// tracked returns the conntrack entry of a connection, on the node of one of its ends.
func tracked(n *Node, end *net.TCPConn) (t conntrack.Progress, err error) {
	own, other := ends(end)
	err = onNetns(n.Netns(), func() error {
		is, err := conntrack.Find(datapath.Flow{Pod: own, Peer: other, Protocol: unix.IPPROTO_TCP})
		if is != nil {
			t = is.Progress
		}
		return err
	})
	return t, err
}

// forge makes another pod send packets in the name of the near end. next is the sequence number that the
// near end sends next. The numbers of the forged packets are far outside the window, like those of an
// attacker who does not know it. Conntrack would rightly accept a packet that hits the window by chance,
// and it might hit on only one side of the soak. Offsets are from 0 to 1.
func (c *connection) forge(from webPod, flags byte, next uint32, offsets []float64) error {
	own, other := ends(c.near)
	return onNetns(from.netns, func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		for _, offset := range offsets {
			seq := next + 1<<30 + uint32(offset*(1<<31))
			if err := unix.Sendto(fd, grammar.Segment(own, other, seq, flags), 0, &unix.SockaddrInet4{Addr: other.Addr().As4()}); err != nil {
				return err
			}
		}
		return nil
	})
}

// nextNumber returns the next sequence number that a socket will send (tcp(7), TCP_REPAIR).
func nextNumber(c *net.TCPConn) (seq uint32, err error) {
	const sendQueue, off = 2, -1 // TCP_SEND_QUEUE, and TCP_REPAIR_OFF_NO_WP: without a window probe
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	set := func(fd uintptr, option, value int) error {
		return unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, option, value)
	}
	failed := raw.Control(func(fd uintptr) {
		if err = set(fd, unix.TCP_REPAIR, 1); err != nil {
			return
		}
		var n int
		if err = set(fd, unix.TCP_REPAIR_QUEUE, sendQueue); err == nil {
			n, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_QUEUE_SEQ)
		}
		seq = uint32(n)
		err = errors.Join(err, set(fd, unix.TCP_REPAIR, off))
	})
	return seq, errors.Join(failed, err)
}

// flood sends frames from a pod, with the given number of unused Ethernet source addresses. With arp they
// announce unused IP addresses at these.
func flood(from webPod, addresses int, arp bool) error {
	return onNetns(from.netns, func() error {
		eth0, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for i := range addresses {
			mac := grammar.MadeUp(i)
			frame := grammar.Frame(mac, 0x88b5)
			if arp {
				frame = grammar.Frame(mac, unix.ETH_P_ARP, gratuitous(mac, netip.AddrFrom4([4]byte{10, 243, 0, byte(i % 100)}))...)
			}
			if err := unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: eth0.Index, Halen: 6}); err != nil && !errors.Is(err, unix.ENOBUFS) {
				return err
			}
			if i%100 == 99 {
				<-tick.C
			}
		}
		return nil
	})
}

// gratuitous returns the payload of an unsolicited ARP reply (RFC 826).
func gratuitous(mac net.HardwareAddr, address netip.Addr) []byte {
	b := []byte{0, 1, 8, 0, 6, 4, 0, 2}
	for range 2 {
		b = append(append(b, mac...), address.AsSlice()...)
	}
	return b
}
