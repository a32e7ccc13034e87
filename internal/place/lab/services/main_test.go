//go:build linux

package services_test

import (
	"bytes"
	"context"
	"crypto/sha1"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/lab"
	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/place/lab/services"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
)

// dialer is the argument with which this binary connects.
const dialer = "dial"

func TestMain(m *testing.M) {
	if len(os.Args) == 5 && os.Args[1] == dialer {
		if err := dialService(os.Args[2], os.Args[3], os.Args[4]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

var modes = []string{spec.ServiceIPTables, spec.ServiceNFTables, spec.ServiceEBPF}

// Transports of services.
var (
	tcp4 = place.Transport{IP: 4, Protocol: "tcp"}
	udp4 = place.Transport{IP: 4, Protocol: "udp"}
	tcp6 = place.Transport{IP: 6, Protocol: "tcp"}
	udp6 = place.Transport{IP: 6, Protocol: "udp"}

	transports = []place.Transport{tcp4, udp4, tcp6, udp6}
)

// transportName returns what package net calls a transport.
func transportName(t place.Transport) string { return fmt.Sprint(t.Protocol, t.IP) }

// served is a lab with services in front of its servers, the first pods of the second node.
type served struct {
	*lab.Lab
	lab.Config
	dir string
}

// config describes a lab with this many servers as pods of node1, each with a service in front of it.
func config(t testing.TB, mode string, servers, backends int, of ...place.Transport) lab.Config {
	c := lab.Config{
		// A unique name, even if the same test runs in another process.
		Name:  fmt.Sprintf("test-%x", sha1.Sum(fmt.Appendf(nil, "%s %d", t.Name(), os.Getpid())))[:13],
		Nodes: 2, Pods: servers, Shape: spec.ShapeFlannel,
		NIC:      spec.NIC{Offload: spec.OffloadFull, MTU: 1500},
		Services: &services.Config{Mode: mode, Backends: backends, Total: servers, Transports: of},
	}
	for i := range servers {
		c.Services.Servers = append(c.Services.Servers, place.Position{Node: 1, Pod: i})
	}
	return c
}

// up creates a lab, and removes it when the test ends.
func up(t testing.TB, c lab.Config) served {
	t.Helper()
	testenv.NeedRoot(t)
	l := served{Config: c, dir: t.TempDir()}
	var err error
	if l.Lab, err = lab.Up(t.Context(), c, lab.Options{Dir: l.dir}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Down(context.Background()); err != nil && !errors.Is(err, lab.ErrNotFound) {
			t.Error(err)
		}
	})
	return l
}

// nodes returns the names of the nodes' network namespaces.
func (l served) nodes() []string { return []string{"slip-" + l.Name + "-n0", "slip-" + l.Name + "-n1"} }

func (l served) in(t testing.TB, pod string, f func() error) {
	t.Helper()
	var i, j int
	if _, err := fmt.Sscanf(pod, "node%d/pod%d", &i, &j); err != nil {
		t.Fatal(err)
	}
	if err := network.Inside(fmt.Sprintf("%sp%d", l.nodes()[i], j), f); err != nil {
		t.Fatalf("in %s: %v", pod, err)
	}
}

func (l served) place(t testing.TB, name string) place.Place {
	t.Helper()
	for _, p := range l.Places() {
		if p.Name == name {
			return p
		}
	}
	t.Fatalf("no place %s", name)
	return place.Place{}
}

// answer makes a pod answer at every address. It returns a channel with the destination address of each connection or datagram.
func answer(t *testing.T, l served, pod string, of place.Transport) <-chan netip.AddrPort {
	t.Helper()
	pods := make(map[netip.Addr]bool)
	for _, p := range l.Places() {
		pods[p.IP(of.IP)] = p.Kind == place.Pod
	}
	at := make(chan netip.AddrPort, 1<<16)
	came := func(from, to netip.AddrPort) {
		if !pods[from.Addr()] {
			t.Errorf("what came to %s is from %s, which is no pod's address", to, from)
		}
		at <- to
	}
	var listener io.Closer
	done := make(chan struct{})
	if of.Protocol == "udp" {
		var conn net.PacketConn
		l.in(t, pod, func() (err error) {
			config := net.ListenConfig{Control: tellDestination}
			conn, err = config.ListenPacket(t.Context(), transportName(of), fmt.Sprintf(":%d", services.Port))
			return err
		})
		listener = conn
		go func() {
			defer close(done)
			if err := answerDatagrams(conn.(*net.UDPConn), of.IP, came); !errors.Is(err, net.ErrClosed) {
				t.Error(err)
			}
		}()
	} else {
		var l4 net.Listener
		l.in(t, pod, func() (err error) {
			l4, err = net.ListenTCP(transportName(of), &net.TCPAddr{Port: services.Port})
			return err
		})
		listener = l4
		go func() {
			defer close(done)
			for {
				c, err := l4.Accept()
				if err != nil {
					return
				}
				came(c.RemoteAddr().(*net.TCPAddr).AddrPort(), c.LocalAddr().(*net.TCPAddr).AddrPort())
				c.Close()
			}
		}()
	}
	t.Cleanup(func() { listener.Close(); <-done })
	return at
}

// tellDestination makes the kernel report the destination address of each datagram. It must be set before the socket receives:
// for an earlier datagram, IPv4 reports no address from which to answer (ipv4_pktinfo_prepare in net/ipv4/ip_sockglue.c), and
// the answer would come from the pod's own address.
func tellDestination(network, _ string, raw syscall.RawConn) (err error) {
	level, option := unix.IPPROTO_IP, unix.IP_PKTINFO
	if network == "udp6" {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO
	}
	controlErr := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, option, 1) })
	return errors.Join(err, controlErr)
}

// answerDatagrams sends each datagram back from the address to which it was sent.
func answerDatagrams(conn *net.UDPConn, ip int, came func(from, to netip.AddrPort)) error {
	b, control := make([]byte, 16), make([]byte, 64)
	for {
		n, controls, _, from, err := conn.ReadMsgUDPAddrPort(b, control)
		if err != nil {
			return err
		}
		info := control[unix.CmsgLen(0):controls]
		to := netip.AddrFrom16([16]byte(info)) // struct in6_pktinfo, which begins with it
		if ip == 4 {
			to = netip.AddrFrom4([4]byte(info[8:])) // struct in_pktinfo, its third
		}
		came(from, netip.AddrPortFrom(to, services.Port))
		// The control message that reported the destination of a datagram also sets the source
		// of the answer.
		if _, _, err := conn.WriteMsgUDPAddrPort(b[:n], control[:controls], from); err != nil {
			return err
		}
	}
}

// dialService opens this many connections, and waits until the other end has closed each. Over UDP it sends this many
// datagrams, and waits for the answers.
func dialService(network, to, times string) error {
	n, err := strconv.Atoi(times)
	dial := dialTCP
	if strings.HasPrefix(network, "udp") {
		dial = askUDP
	}
	for ; n > 0 && err == nil; n-- {
		err = dial(network, to)
	}
	return err
}

func dialTCP(network, to string) error {
	c, err := net.DialTimeout(network, to, 5*time.Second)
	if err != nil {
		return err
	}
	defer c.Close()
	if got := c.RemoteAddr().String(); got != to {
		return fmt.Errorf("the peer is %s, want %s", got, to)
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}

func askUDP(network, to string) error {
	c, err := net.ListenPacket(network, ":0")
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return err
	}
	if _, err := c.WriteTo([]byte("?"), net.UDPAddrFromAddrPort(netip.MustParseAddrPort(to))); err != nil {
		return err
	}
	_, from, err := c.ReadFrom(make([]byte, 1))
	if err == nil && from.String() != to {
		err = fmt.Errorf("the answer is from %s, want %s", from, to)
	}
	return err
}

// ask calls dialService in a process in a pod.
func ask(t *testing.T, l served, pod string, of place.Transport, to netip.AddrPort, n int) {
	t.Helper()
	cmd := exec.Command(os.Args[0], dialer, transportName(of), to.String(), strconv.Itoa(n))
	var said bytes.Buffer
	cmd.Stderr = &said
	if err := l.In(l.place(t, pod))(cmd); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("connect from %s: %v: %s", pod, err, said.String())
	}
}
