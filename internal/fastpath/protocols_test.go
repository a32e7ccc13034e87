//go:build linux

package fastpath_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/spec"
)

// anyIPv4 returns a struct sockaddr_storage with the IPv4 address 0.0.0.0, in the form that a socket's family uses.
func anyIPv4(fd int) (address [128]byte, err error) {
	family, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	binary.NativeEndian.PutUint16(address[:], uint16(family))
	if family == unix.AF_INET6 {
		address[18], address[19] = 0xff, 0xff // ::ffff:0.0.0.0
	}
	return address, err
}

// withMD5 makes a socket sign each segment (RFC 2385), for peers with any IPv4 address.
func withMD5(fd int) error {
	address, err := anyIPv4(fd)
	if err != nil {
		return err
	}
	// struct tcp_md5sig: address, flags, prefix length, key length, device, key
	b := append(address[:], make([]byte, 4+4+80)...)
	b[128] = unix.TCP_MD5SIG_FLAG_PREFIX
	binary.NativeEndian.PutUint16(b[130:], uint16(len("secret")))
	copy(b[136:], "secret")
	return unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_MD5SIG_EXT, string(b))
}

// signed makes the connections of a world sign each segment. It reports whether the kernel supports that.
func (w *world) signed() (supported bool) {
	w.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		w.Fatal(err)
	}
	defer unix.Close(fd)
	if err := withMD5(fd); errors.Is(err, unix.ENOPROTOOPT) {
		return false
	} else if err != nil {
		w.Fatal(err)
	}
	control := func(_, _ string, raw syscall.RawConn) error {
		var err error
		failed := raw.Control(func(fd uintptr) { err = withMD5(int(fd)) })
		return errors.Join(failed, err)
	}
	w.dialer.Control, w.listener.Control = control, control
	w.listener.SetMultipathTCP(false) // Multipath TCP supports no signatures
	return true
}

// TestTCPOptions checks connections with options that change how TCP works: they are accelerated, their data arrives whole, the
// next agent recovers them if one is killed, and they end as others do.
func TestTCPOptions(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		with func(*world) (supported bool)
		// silent means that pods do not answer the agent's keepalives, because these are not signed.
		silent bool
	}{
		{name: "MPTCP", with: func(w *world) bool {
			w.dialer.SetMultipathTCP(true)
			w.listener.SetMultipathTCP(true)
			return true
		}},
		{name: "MD5", silent: true, with: (*world).signed},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
			if !tt.with(w) {
				t.Logf("this kernel has no %s", tt.name)
				return
			}
			e := w.connect()
			if tt.name == "MPTCP" && !isMultipath(t, e.Conn) {
				t.Log("this kernel has no MPTCP")
				return
			}
			w.start()
			w.stream(e)
			w.checkEnds()
			w.stop(0)
			w.stop(1)
			w.checkRecovery(tt.silent)
		})
	}
}

func isMultipath(t *testing.T, c net.Conn) bool {
	t.Helper()
	is, err := c.(*net.TCPConn).MultipathTCP()
	if err != nil {
		t.Fatal(err)
	}
	return is
}

// checkEnds checks that accelerated connections end: by a FIN of each side, and by an RST.
func (w *world) checkEnds() {
	w.Helper()
	e := w.connect()
	go func() {
		_, _ = io.Copy(e.far, e.far)
		e.far.Close()
	}()
	w.accelerate(e)
	if err := e.Conn.(*net.TCPConn).CloseWrite(); err != nil {
		w.Fatal(err)
	}
	if err := e.SetReadDeadline(time.Now().Add(patience)); err != nil {
		w.Fatal(err)
	}
	if n, err := e.Read(make([]byte, 1)); err != io.EOF {
		w.Errorf("after both sides closed: %d bytes, %v", n, err)
	}
	e = w.connect().back()
	w.accelerate(e)
	w.reset(e)
}

// checkRecovery checks that the agent that is started after another was killed recovers an idle connection, unless its pod is
// silent, and that the connection continues.
func (w *world) checkRecovery(silent bool) {
	w.Helper()
	left := w.leftLiberal(direct)[0]
	w.startAgent("n0")
	if silent {
		time.Sleep(5 * time.Second) // the agent sends keepalives for four seconds
	} else {
		w.checksWindow(left)
	}
	w.trip(left.echo, 100)
	if is := w.conntrack("n0", left.echo); is.State != stateEstablished {
		w.Errorf("conntrack has %+v", is)
	}
}

// Chunks of SCTP (RFC 9260, section 3.2).
const sctpData, sctpInit, sctpInitAck, sctpCookieEcho, sctpCookieAck = 0, 1, 2, 10, 11

func sctpPacket(from, to uint16, tag uint32, chunk byte, body []byte) []byte {
	b := binary.BigEndian.AppendUint16(nil, from)
	b = binary.BigEndian.AppendUint16(b, to)
	b = binary.BigEndian.AppendUint32(b, tag)
	b = append(b, 0, 0, 0, 0, chunk, 3) // a DATA chunk begins and ends a message
	b = append(binary.BigEndian.AppendUint16(b, uint16(4+len(body))), body...)
	binary.LittleEndian.PutUint32(b[8:], crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
	return b
}

// TestSCTP checks that SCTP is delivered unchanged beside accelerated connections, and takes the slow path.
func TestSCTP(t *testing.T) {
	t.Parallel()
	w, e := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
	// The association has the addresses and ports of the accelerated connection.
	type end struct {
		place   string
		address netip.Addr
		port    uint16
		fd      int
		tag     uint32 // in chunks that the other end sends to it
	}
	near := &end{"n0p0", w.pod(0, 0), uint16(e.LocalAddr().(*net.TCPAddr).Port), -1, 7}
	far := &end{"n1p0", w.pod(1, 0), uint16(e.RemoteAddr().(*net.TCPAddr).Port), -1, 9}
	for _, of := range []*end{near, far} {
		w.in(of.place, func() (err error) {
			of.fd, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP)
			return os.NewSyscallError("socket", err)
		})
		w.Cleanup(func() { unix.Close(of.fd) })
		if err := unix.SetsockoptTimeval(of.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: int64(patience / time.Second)}); err != nil {
			t.Fatal(err)
		}
	}
	send := func(from, to *end, tag uint32, chunk byte, body []byte) {
		t.Helper()
		b, got := sctpPacket(from.port, to.port, tag, chunk, body), make([]byte, 256)
		if err := unix.Sendto(from.fd, b, 0, &unix.SockaddrInet4{Addr: to.address.As4()}); err != nil {
			t.Fatal(err)
		}
		n, _, err := unix.Recvfrom(to.fd, got, 0)
		if err != nil || n < 20 || !bytes.Equal(got[20:n], b) {
			t.Fatalf("sent %x, got %x, %v", b, got[:max(n, 0)], err)
		}
	}
	before := w.counts(0)
	init := func(tag uint32) []byte {
		return append(binary.BigEndian.AppendUint32(nil, tag), 0, 0, 0xff, 0xff, 0, 1, 0, 1, 0, 0, 0, 1)
	}
	send(near, far, 0, sctpInit, init(near.tag))
	send(far, near, near.tag, sctpInitAck, append(init(far.tag), 0, 7, 0, 8, 1, 2, 3, 4)) // with a cookie
	send(near, far, far.tag, sctpCookieEcho, []byte{1, 2, 3, 4})
	send(far, near, near.tag, sctpCookieAck, nil)
	const packets = 200
	for i := range uint32(packets) {
		data := append(binary.BigEndian.AppendUint32(nil, i), 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4)
		send(near, far, far.tag, sctpData, data)
		send(far, near, near.tag, sctpData, data)
		w.trip(e, 1)
	}
	after := w.counts(0)
	if n := after["not-tcp-udp"] - before["not-tcp-udp"]; n < 2*packets {
		t.Errorf("of %d packets %d are counted as not-tcp-udp", 2*packets, n)
	}
	if n := after["fast-out"] - before["fast-out"]; n > packets*11/10 {
		t.Errorf("%d packets took the fast path beside %d of TCP", n, packets)
	}
}
