//go:build linux

package bpf

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The kernel has no test run for programs of this kind, so a process in a cgroup makes
// the calls: this binary, in the environment of servicesChild.
const servicesChild = "SLIPSTREAM_TEST_SERVICES"

// What the process in the cgroup asks for. The backends are 127.0.0.2 to 127.0.0.4.
var (
	serviceAt = netip.MustParseAddrPort("10.96.0.1:80")
	otherPort = netip.MustParseAddrPort("10.96.0.1:81")
	noBackend = netip.MustParseAddrPort("10.96.0.2:80")
)

func TestMain(m *testing.M) {
	if os.Getenv(servicesChild) == "" {
		os.Exit(m.Run())
	}
	if err := useServices(); err != nil {
		fmt.Println(err)
	}
	fmt.Println("done")
}

// cgroup makes one, and leaves it empty and gone.
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

// Sockets of the cgroup are led to backends, and told of the service; those outside of
// it are not, and neither are other addresses and protocols.
func TestServices(t *testing.T) {
	newNamespace(t)
	if err := netlink.LinkSetUp(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "lo"}}); err != nil {
		t.Fatal(err)
	}
	s, err := LoadServices(3, 6)
	if err != nil {
		t.Fatal(err)
	}
	var backends []netip.AddrPort
	for _, ip := range []string{"127.0.0.2", "127.0.0.3", "127.0.0.4"} {
		backends = append(backends, netip.AddrPortFrom(netip.MustParseAddr(ip), 8080))
	}
	for _, b := range []Backends{
		{Service: serviceAt, Protocol: unix.IPPROTO_TCP, Backends: backends},
		{Service: serviceAt, Protocol: unix.IPPROTO_UDP, Backends: backends},
		{Service: noBackend, Protocol: unix.IPPROTO_TCP},
	} {
		if err := s.Add(b); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Add(Backends{Service: otherPort, Protocol: unix.IPPROTO_TCP}); err == nil {
		t.Error("a service more than there is room for")
	}
	dir := cgroup(t)
	if err := s.Attach(int(dir.Fd())); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil { // what is attached stays
		t.Fatal(err)
	}
	run := func(in *os.File) string {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), servicesChild+"=1")
		if in != nil {
			cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(in.Fd())}
		}
		out, err := cmd.CombinedOutput() // in this thread's namespace
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	if got := run(dir); got != "done\n" {
		t.Errorf("in the cgroup: %s", got)
	}
	if got, want := run(nil), "tcp: connect: network is unreachable\ndone\n"; got != want {
		t.Errorf("outside of it: %q, want %q", got, want)
	}
}

// useServices is what the process does.
func useServices() error {
	tcp, err := listenAll(unix.SOCK_STREAM)
	if err != nil {
		return err
	}
	udp, err := listenAll(unix.SOCK_DGRAM)
	if err != nil {
		return err
	}
	service := sockaddrOf(serviceAt)
	const n = 300
	came := make(map[netip.AddrPort]int)
	for range n {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
		if err != nil {
			return err
		}
		if err := unix.Connect(fd, service); err != nil {
			return fmt.Errorf("tcp: connect: %w", err)
		}
		if peer, err := unix.Getpeername(fd); err != nil || addrPortOf(peer) != serviceAt {
			return fmt.Errorf("tcp: the peer is %v, %w", addrPortOf(peer), err)
		}
		got, _, err := unix.Accept(tcp)
		if err != nil {
			return fmt.Errorf("tcp: accept: %w", err)
		}
		at, err := unix.Getsockname(got)
		if err != nil {
			return err
		}
		came[addrPortOf(at)]++
		unix.Close(got)
		unix.Close(fd)
	}
	if err := spread("tcp", came); err != nil {
		return err
	}

	// UDP that is connected, and UDP that is not.
	for _, connected := range []bool{true, false} {
		came, what := make(map[netip.AddrPort]int), fmt.Sprintf("udp, connected %t", connected)
		for range n {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
			if err != nil {
				return err
			}
			if connected {
				if err = unix.Connect(fd, service); err == nil {
					_, err = unix.Write(fd, []byte("ask"))
				}
			} else {
				err = unix.Sendto(fd, []byte("ask"), 0, service)
			}
			if err != nil {
				return fmt.Errorf("%s: send: %w", what, err)
			}
			at, err := answerUDP(udp)
			if err != nil {
				return fmt.Errorf("%s: answer: %w", what, err)
			}
			came[at]++
			_, from, err := unix.Recvfrom(fd, make([]byte, 8), 0)
			if err != nil || addrPortOf(from) != serviceAt {
				return fmt.Errorf("%s: the answer is from %v, %w", what, addrPortOf(from), err)
			}
			unix.Close(fd)
		}
		if err := spread(what, came); err != nil {
			return err
		}
	}

	for _, to := range []netip.AddrPort{otherPort, noBackend} {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
		if err != nil {
			return err
		}
		if err := unix.Connect(fd, sockaddrOf(to)); !errors.Is(err, unix.ENETUNREACH) {
			return fmt.Errorf("%s, which leads nowhere: %v", to, err)
		}
		unix.Close(fd)
	}
	return nil
}

func listenAll(kind int) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, kind, 0)
	if err != nil {
		return -1, err
	}
	// Connections that have ended keep the port for a while.
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return -1, err
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Port: 8080}); err != nil {
		return -1, err
	}
	tv := unix.Timeval{Sec: 10}
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		return -1, err
	}
	if kind == unix.SOCK_STREAM {
		return fd, unix.Listen(fd, 16)
	}
	return fd, unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_PKTINFO, 1)
}

// answerUDP sends a datagram back from the address that it came to.
func answerUDP(fd int) (at netip.AddrPort, err error) {
	oob := make([]byte, 64)
	_, n, _, from, err := unix.Recvmsg(fd, make([]byte, 8), oob, 0)
	if err != nil {
		return at, err
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil || len(messages) != 1 {
		return at, fmt.Errorf("%d control messages, %w", len(messages), err)
	}
	// struct in_pktinfo: the interface, the local address, the header's.
	ip := netip.AddrFrom4([4]byte(messages[0].Data[8:12]))
	info := unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: ip.As4()})
	return netip.AddrPortFrom(ip, 8080), unix.Sendmsg(fd, []byte("answer"), info, from, 0)
}

// spread checks that about a third came to each backend.
func spread(what string, came map[netip.AddrPort]int) error {
	if len(came) != 3 {
		return fmt.Errorf("%s: came to %v", what, came)
	}
	for at, n := range came {
		if n < 60 || n > 140 {
			return fmt.Errorf("%s: %d came to %s", what, n, at)
		}
	}
	return nil
}

func sockaddrOf(a netip.AddrPort) unix.Sockaddr {
	return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
}

func addrPortOf(sa unix.Sockaddr) netip.AddrPort {
	in, ok := sa.(*unix.SockaddrInet4)
	if !ok {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(netip.AddrFrom4(in.Addr), uint16(in.Port))
}
