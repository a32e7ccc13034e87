//go:build linux

package programs

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/testenv"
)

// The kernel has no test run for these programs, so a process in a cgroup makes the system calls: this binary with
// servicesChild in its environment.
const servicesChild = "SLIPSTREAM_TEST_SERVICES"

// task is what the process in the cgroup does. The backends are the first address and the two after it.
type task struct {
	service, otherPort, noBackend netip.AddrPort
	backend                       netip.AddrPort
}

var (
	asked4 = task{
		service: netip.MustParseAddrPort("10.96.0.1:80"), otherPort: netip.MustParseAddrPort("10.96.0.1:81"),
		noBackend: netip.MustParseAddrPort("10.96.0.2:80"), backend: netip.MustParseAddrPort("127.0.0.2:8080"),
	}
	asked6 = task{
		service: netip.MustParseAddrPort("[fd96::1]:80"), otherPort: netip.MustParseAddrPort("[fd96::1]:81"),
		noBackend: netip.MustParseAddrPort("[fd96::2]:80"), backend: netip.MustParseAddrPort("[fd97::2]:8080"),
	}
)

// mapped returns the same task over IPv4 with IPv6 sockets.
func (a task) mapped() task {
	for _, p := range []*netip.AddrPort{&a.service, &a.otherPort, &a.noBackend, &a.backend} {
		*p = netip.AddrPortFrom(netip.AddrFrom16(p.Addr().As16()), p.Port())
	}
	return a
}

func (a task) backends() (all []netip.AddrPort) {
	addr := a.backend.Addr()
	for range 3 {
		all = append(all, netip.AddrPortFrom(addr, a.backend.Port()))
		addr = addr.Next()
	}
	return all
}

func TestMain(m *testing.M) {
	if os.Getenv(servicesChild) == "" {
		os.Exit(m.Run())
	}
	for _, a := range []task{asked4, asked6, asked4.mapped()} {
		if err := a.use(); err != nil {
			fmt.Printf("%s %v\n", a.service, err)
		}
	}
	fmt.Println("done")
}

// cgroup creates a cgroup, and removes it when the test ends.
func cgroup(t *testing.T) *os.File {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line)
		if f[2] != "cgroup2" {
			continue
		}
		path := filepath.Join(f[1], fmt.Sprintf("slip-test-%d", os.Getpid()))
		if err := os.Mkdir(path, 0o755); err != nil {
			t.Fatal(err)
		}
		dir, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			dir.Close()
			if err := os.Remove(path); err != nil {
				t.Error(err)
			}
		})
		return dir
	}
	t.Skip("no cgroups of version 2 are mounted")
	return nil
}

// TestServices checks that sockets of the cgroup connect to the backends and see the address of the
// Service as their peer, and that sockets outside, other addresses and other protocols are not
// changed.
func TestServices(t *testing.T) {
	testenv.EnterNamespace(t)
	if err := netlink.LinkSetUp(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "lo"}}); err != nil {
		t.Fatal(err)
	}
	// Make all addresses of the network local.
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.RouteAdd(&netlink.Route{
		LinkIndex: lo.Attrs().Index, Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL,
		Dst: &net.IPNet{IP: asked6.backend.Addr().AsSlice(), Mask: net.CIDRMask(112, 128)},
	}); err != nil {
		t.Fatal(err)
	}
	// IPv6 needs permission to send from an address that is local but on no device.
	if err := os.WriteFile("/proc/sys/net/ipv6/ip_nonlocal_bind", []byte("1"), 0o644); err != nil {
		t.Fatal(err)
	}
	s, err := LoadServices(6, 12)
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range []task{asked4, asked6} {
		for _, b := range []Backends{
			{Service: a.service, Protocol: unix.IPPROTO_TCP, Backends: a.backends()},
			{Service: a.service, Protocol: unix.IPPROTO_UDP, Backends: a.backends()},
			{Service: a.noBackend, Protocol: unix.IPPROTO_TCP},
		} {
			if err := s.Add(b); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := s.Add(Backends{Service: asked4.otherPort, Protocol: unix.IPPROTO_TCP}); err == nil {
		t.Error("a full table accepts another Service")
	}
	dir := cgroup(t)
	if err := s.Attach(int(dir.Fd())); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil { // programs stay attached
		t.Fatal(err)
	}
	run := func(in *os.File) string {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), servicesChild+"=1")
		if in != nil {
			cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(in.Fd())}
		}
		out, err := cmd.CombinedOutput() // in the namespace of this thread
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	if got := run(dir); got != "done\n" {
		t.Errorf("in the cgroup: %s", got)
	}
	const not = " tcp: connect: network is unreachable\n"
	if got, want := run(nil), asked4.service.String()+not+asked6.service.String()+not+asked4.mapped().service.String()+not+"done\n"; got != want {
		t.Errorf("outside: %q, want %q", got, want)
	}
}

func (a task) use() error {
	tcp, err := a.listen(unix.SOCK_STREAM)
	if err != nil {
		return err
	}
	defer unix.Close(tcp)
	udp, err := a.listen(unix.SOCK_DGRAM)
	if err != nil {
		return err
	}
	defer unix.Close(udp)
	const n = 300
	for _, way := range []struct {
		what  string
		reach func() (netip.AddrPort, error)
	}{
		{"tcp", func() (netip.AddrPort, error) { return a.reachTCP(tcp) }},
		{"udp, connected", func() (netip.AddrPort, error) { return a.reachUDP(udp, true) }},
		{"udp, unconnected", func() (netip.AddrPort, error) { return a.reachUDP(udp, false) }},
	} {
		came := make(map[netip.AddrPort]int)
		for range n {
			at, err := way.reach()
			if err != nil {
				return fmt.Errorf("%s: %w", way.what, err)
			}
			came[at]++
		}
		if err := a.spread(way.what, came); err != nil {
			return err
		}
	}
	return a.refuse()
}

// reachTCP connects to the Service, and returns the backend that the connection reached.
func (a task) reachTCP(listener int) (at netip.AddrPort, err error) {
	fd, err := unix.Socket(a.domain(), unix.SOCK_STREAM, 0)
	if err != nil {
		return at, err
	}
	defer unix.Close(fd)
	if err := unix.Connect(fd, sockaddrOf(a.service)); err != nil {
		return at, fmt.Errorf("connect: %w", err)
	}
	if peer, err := unix.Getpeername(fd); err != nil || addrPortOf(peer) != a.service {
		return at, fmt.Errorf("the peer is %v, %w", addrPortOf(peer), err)
	}
	got, _, err := unix.Accept(listener)
	if err != nil {
		return at, fmt.Errorf("accept: %w", err)
	}
	defer unix.Close(got)
	own, err := unix.Getsockname(got)
	if err != nil {
		return at, err
	}
	return addrPortOf(own), nil
}

// reachUDP sends a request to the Service, from a connected or an unconnected socket, and returns the backend that answered.
func (a task) reachUDP(server int, connected bool) (at netip.AddrPort, err error) {
	fd, err := unix.Socket(a.domain(), unix.SOCK_DGRAM, 0)
	if err != nil {
		return at, err
	}
	defer unix.Close(fd)
	service := sockaddrOf(a.service)
	if connected {
		if err = unix.Connect(fd, service); err == nil {
			_, err = unix.Write(fd, []byte("ask"))
		}
	} else {
		err = unix.Sendto(fd, []byte("ask"), 0, service)
	}
	if err != nil {
		return at, fmt.Errorf("send: %w", err)
	}
	if at, err = a.answerUDP(server); err != nil {
		return at, fmt.Errorf("answer: %w", err)
	}
	_, from, err := unix.Recvfrom(fd, make([]byte, 8), 0)
	if err != nil || addrPortOf(from) != a.service {
		return at, fmt.Errorf("the answer is from %v, %w", addrPortOf(from), err)
	}
	return at, nil
}

// refuse checks that another port of the Service, and a Service without backends, are not translated.
func (a task) refuse() error {
	for _, to := range []netip.AddrPort{a.otherPort, a.noBackend} {
		fd, err := unix.Socket(a.domain(), unix.SOCK_STREAM, 0)
		if err != nil {
			return err
		}
		if err := unix.Connect(fd, sockaddrOf(to)); !errors.Is(err, unix.ENETUNREACH) {
			return fmt.Errorf("connect to %s: %v, want ENETUNREACH", to, err)
		}
		unix.Close(fd)
	}
	return nil
}

func (a task) domain() int {
	if a.service.Addr().Is6() {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

func (a task) listen(kind int) (int, error) {
	fd, err := unix.Socket(a.domain(), kind, 0)
	if err != nil {
		return -1, err
	}
	// Closed connections hold the port for a while.
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return -1, err
	}
	all, level, option := netip.IPv4Unspecified(), unix.IPPROTO_IP, unix.IP_PKTINFO
	if a.service.Addr().Is6() {
		all, level, option = netip.IPv6Unspecified(), unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO
	}
	if err := unix.Bind(fd, sockaddrOf(netip.AddrPortFrom(all, a.backend.Port()))); err != nil {
		return -1, err
	}
	tv := unix.Timeval{Sec: 10}
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		return -1, err
	}
	if kind == unix.SOCK_STREAM {
		return fd, unix.Listen(fd, 16)
	}
	return fd, unix.SetsockoptInt(fd, level, option, 1)
}

// answerUDP returns a datagram to its sender, from the address to which it was sent.
func (a task) answerUDP(fd int) (at netip.AddrPort, err error) {
	oob := make([]byte, 64)
	_, n, _, from, err := unix.Recvmsg(fd, make([]byte, 8), oob, 0)
	if err != nil {
		return at, err
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil || len(messages) != 1 {
		return at, fmt.Errorf("%d control messages, %w", len(messages), err)
	}
	var ip netip.Addr
	var info []byte
	if a.domain() == unix.AF_INET {
		// struct in_pktinfo: interface, local address, destination of the header.
		ip = netip.AddrFrom4([4]byte(messages[0].Data[8:12]))
		info = unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: ip.As4()})
	} else {
		ip = netip.AddrFrom16([16]byte(messages[0].Data[:16]))
		info = unix.PktInfo6(&unix.Inet6Pktinfo{Addr: ip.As16()})
	}
	return netip.AddrPortFrom(ip, a.backend.Port()), unix.Sendmsg(fd, []byte("answer"), info, from, 0)
}

// spread checks that each backend received about a third.
func (a task) spread(what string, came map[netip.AddrPort]int) error {
	for _, at := range a.backends() {
		if n := came[at]; n < 60 || n > 140 {
			return fmt.Errorf("%s: %d reached %s", what, n, at)
		}
	}
	if len(came) != 3 {
		return fmt.Errorf("%s: reached %v", what, came)
	}
	return nil
}

func sockaddrOf(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

func addrPortOf(sa unix.Sockaddr) netip.AddrPort {
	switch in := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(in.Addr), uint16(in.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(in.Addr), uint16(in.Port))
	}
	return netip.AddrPort{}
}
