package doctor

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"
)

// datagramHeader makes a datagram look like VXLAN to a firewall that inspects it: a VXLAN header (RFC 7348,
// section 5), and an Ethernet frame of an experimental type (IEEE 802) with an unused destination address. A
// VXLAN device that receives it drops it.
var datagramHeader = append([]byte{
	0x08, 0, 0, 0, 0xff, 0xff, 0xfe, 0, // flags; VNI
	0x02, 0, 0, 0, 0, 1, 0x02, 0, 0, 0, 0, 2, // to, from: locally administered
}, 0x88, 0xb5)

// tailSize is the size in bytes of the fields after the key: the round and the packet's size.
const tailSize = 8

// lastSize in place of a packet's size marks the last datagram of a round.
const lastSize = 0

// headers returns the size in bytes of the IP and UDP headers.
func headers(to netip.Addr) int {
	if to.Is4() {
		return 20 + 8
	}
	return 40 + 8
}

// datagram returns the payload of a packet of the given size. The payload is larger if that size is too
// small.
func datagram(to netip.Addr, key []byte, round, size int) []byte {
	b := slices.Concat(datagramHeader, key)
	b = binary.BigEndian.AppendUint32(b, uint32(round))
	b = binary.BigEndian.AppendUint32(b, uint32(size))
	return append(b, make([]byte, max(0, size-headers(to)-len(b)))...)
}

// parseDatagram returns the round and the size in a payload that has the key.
func parseDatagram(payload, key []byte) (round, size int, ok bool) {
	rest, ok := bytes.CutPrefix(payload, slices.Concat(datagramHeader, key))
	if !ok || len(rest) < tailSize {
		return 0, 0, false
	}
	return int(binary.BigEndian.Uint32(rest)), int(binary.BigEndian.Uint32(rest[4:])), true
}

// SendDatagrams sends datagrams from this network namespace, as Sender describes. It sends each one twice, and the
// last, small one of the round three times.
func SendDatagrams(to netip.AddrPort, key []byte, round int, sizes []int) (t Sent, err error) {
	routes, err := netlink.RouteGet(to.Addr().AsSlice())
	if err != nil || len(routes) == 0 {
		return t, fmt.Errorf("find the route to %s: %w", to.Addr(), err)
	}
	link, err := netlink.LinkByIndex(routes[0].LinkIndex)
	if err != nil {
		return t, fmt.Errorf("find the device to %s: %w", to.Addr(), err)
	}
	t.Device, t.DeviceMTU = link.Attrs().Name, link.Attrs().MTU
	if gateway, ok := netip.AddrFromSlice(routes[0].Gw); ok {
		t.Gateway = gateway.Unmap()
	}
	// The route that was got above has the path MTU that the kernel learned.
	configured, err := netlink.RouteGetWithOptions(to.Addr().AsSlice(), &netlink.RouteGetOptions{FIBMatch: true})
	if err != nil {
		return t, fmt.Errorf("find the route to %s in the table: %w", to.Addr(), err)
	}
	if len(configured) > 0 {
		t.RouteMTU = configured[0].MTU
	}
	conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
	if err != nil {
		return t, err
	}
	defer conn.Close()
	if err := option(conn, to.Addr(), func(fd, level, discover, _ int) error {
		return unix.SetsockoptInt(fd, level, discover, unix.IP_PMTUDISC_PROBE) // the same for IPv6
	}); err != nil {
		return t, err
	}
	for range 2 {
		for _, size := range sizes {
			t.send(conn, datagram(to.Addr(), key, round, size))
		}
	}
	for range tries {
		t.send(conn, datagram(to.Addr(), key, round, lastSize))
	}
	return t, option(conn, to.Addr(), func(fd, level, _, mtu int) (err error) {
		t.ToldMTU, err = unix.GetsockoptInt(fd, level, mtu)
		return err
	})
}

// send sends a datagram. A write may return the error of an earlier datagram, so send writes again; the next
// write does not return that error.
func (t *Sent) send(conn net.Conn, b []byte) {
	for range tries {
		_, err := conn.Write(b)
		switch {
		case err == nil:
			return
		case errors.Is(err, unix.EMSGSIZE), errors.Is(err, unix.ECONNREFUSED): // too large, or nobody listens
		default:
			t.Refused = err.Error()
		}
	}
}

// option calls fn with a socket and the numbers of its options for IPv4 or IPv6.
func option(conn syscall.Conn, to netip.Addr, fn func(fd, level, discover, mtu int) error) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	level, discover, mtu := unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_MTU
	if !to.Is4() {
		level, discover, mtu = unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_MTU
	}
	var failed error
	if err := raw.Control(func(fd uintptr) { failed = fn(int(fd), level, discover, mtu) }); err != nil {
		return err
	}
	if failed != nil {
		return fmt.Errorf("set or read the MTU of a socket: %w", failed)
	}
	return nil
}

// Port receives the datagrams of SendDatagrams.
type Port struct {
	conn net.PacketConn
	port uint16
	key  []byte
	// raw means that datagrams include their UDP headers.
	raw bool

	mu       sync.Mutex
	more     *sync.Cond
	received map[int]*Received
	ended    bool
}

// Listen receives datagrams at an address of this network namespace. For port 0 it chooses a free port. To
// listen at the port of a VXLAN device, it needs CAP_NET_RAW.
func Listen(at netip.AddrPort, key []byte) (*Port, error) {
	p := &Port{port: at.Port(), key: key, received: make(map[int]*Received)}
	p.more = sync.NewCond(&p.mu)
	conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
	switch {
	case err == nil:
		p.conn, p.port = conn, conn.LocalAddr().(*net.UDPAddr).AddrPort().Port()
	case errors.Is(err, unix.EADDRINUSE):
		if p.conn, err = listenRaw(at.Addr(), key); err != nil {
			return nil, err
		}
		p.raw = true
	default:
		return nil, err
	}
	go p.receive()
	return p, nil
}

// listenRaw receives copies of the datagrams to an address that have a key, whatever socket owns their port. It does
// not receive those that this machine's firewall drops.
func listenRaw(at netip.Addr, key []byte) (net.PacketConn, error) {
	conn, err := net.ListenIP("ip:udp", &net.IPAddr{IP: at.AsSlice(), Zone: at.Zone()})
	if errors.Is(err, os.ErrPermission) {
		return nil, errors.New("another process or device uses the port, and only root can see what arrives there")
	}
	if err != nil {
		return nil, err
	}
	// Otherwise the packets of an overlay would fill the buffer.
	if err := ipv4.NewPacketConn(conn).SetBPF(keyFilter(at, key)); err != nil {
		conn.Close()
		return nil, fmt.Errorf("filter what arrives: %w", err)
	}
	return conn, nil
}

// keyFilter accepts datagrams that have the first four bytes of a key. On IPv4 they follow an IP header, on IPv6 they
// do not.
func keyFilter(at netip.Addr, key []byte) []bpf.RawInstruction {
	header := bpf.Instruction(bpf.LoadMemShift{Off: 0}) // 4*(first byte & 0xf)
	if !at.Is4() {
		header = bpf.LoadConstant{Dst: bpf.RegX, Val: 0}
	}
	filter, err := bpf.Assemble([]bpf.Instruction{
		header,
		bpf.LoadIndirect{Off: uint32(8 + len(datagramHeader)), Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: binary.BigEndian.Uint32(key), SkipFalse: 1},
		bpf.RetConstant{Val: math.MaxInt32},
		bpf.RetConstant{Val: 0},
	})
	if err != nil {
		panic(err) // it is the same but for the key
	}
	return filter
}

func (p *Port) receive() {
	b := make([]byte, largest)
	for {
		n, _, err := p.conn.ReadFrom(b)
		if err != nil {
			break
		}
		p.add(b[:n])
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
	p.more.Broadcast()
}

// add records a datagram, or with raw an IP packet.
func (p *Port) add(b []byte) {
	if p.raw { // net has removed the IP header
		if len(b) < 8 || binary.BigEndian.Uint16(b[2:]) != p.port {
			return
		}
		b = b[8:]
	}
	round, size, ok := parseDatagram(b, p.key)
	if !ok {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.round(round)
	if size == lastSize {
		t.Complete = true
		p.more.Broadcast()
		return
	}
	if !slices.Contains(t.Sizes, size) {
		t.Sizes = append(t.Sizes, size)
	}
}

func (p *Port) round(n int) *Received {
	if p.received[n] == nil {
		p.received[n] = new(Received)
	}
	return p.received[n]
}

// receiveTime bounds how long a datagram may be in flight.
const receiveTime = time.Second

// Receive returns the datagrams of a round, once its last one has arrived or receiveTime has passed.
func (p *Port) Receive(round int) Received {
	p.mu.Lock()
	defer p.mu.Unlock()
	late := false
	timer := time.AfterFunc(receiveTime, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		late = true
		p.more.Broadcast()
	})
	defer timer.Stop()
	t := p.round(round)
	for !t.Complete && !late && !p.ended {
		p.more.Wait()
	}
	return Received{t.Complete, slices.Clone(t.Sizes)}
}

// Number returns the port number.
func (p *Port) Number() uint16 { return p.port }

// Close stops receiving.
func (p *Port) Close() error { return p.conn.Close() }
