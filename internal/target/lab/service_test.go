//go:build linux

package lab

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/target"
	"slipstream.dev/internal/testenv"
)

var update = flag.Bool("update", false, "write the golden files anew")

var serviceModes = []string{v1alpha1.ServiceIPTables, v1alpha1.ServiceNFTables, v1alpha1.ServiceEBPF}

// Transports of services.
var (
	tcp4 = target.Transport{IP: 4, Protocol: "tcp"}
	udp4 = target.Transport{IP: 4, Protocol: "udp"}
	tcp6 = target.Transport{IP: 6, Protocol: "tcp"}
	udp6 = target.Transport{IP: 6, Protocol: "udp"}

	transports = []target.Transport{tcp4, udp4, tcp6, udp6}
)

// network is what package net calls a transport.
func network(t target.Transport) string { return fmt.Sprint(t.Protocol, t.IP) }

// upServed makes a lab with a service in front of each of so many pods of node1.
func upServed(t *testing.T, mode string, servers, backends int, of ...target.Transport) *Lab {
	t.Helper()
	return up(t, func(c *Config) {
		c.Pods = servers
		c.Services = &Services{Mode: mode, Backends: backends, Total: servers, Transports: of}
		for i := range servers {
			c.Services.Servers = append(c.Services.Servers, target.Seat{Node: 1, Pod: i})
		}
	})
}

// served is the service in front of a lab's nth server.
func served(l *Lab, of target.Transport, nth int) service {
	c := l.state.Config
	for _, s := range c.Services.services(layout(c)) {
		if s.transport == of && s.name == fmt.Sprintf("server-%d", nth) {
			return s
		}
	}
	panic(fmt.Sprintf("no server-%d of %v", nth, of))
}

// answer has a pod answer at every address, and tells which one each connection, or
// datagram, came to.
func answer(t *testing.T, l *Lab, pod string, of target.Transport) <-chan netip.AddrPort {
	t.Helper()
	pods := make(map[netip.Addr]bool)
	for _, p := range l.Places() {
		pods[p.IP(of.IP)] = p.Kind == target.Pod
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
		in(t, l, pod, func() (err error) {
			config := net.ListenConfig{Control: tellDestination}
			conn, err = config.ListenPacket(t.Context(), network(of), fmt.Sprintf(":%d", servicePort))
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
		in(t, l, pod, func() (err error) {
			l4, err = net.ListenTCP(network(of), &net.TCPAddr{Port: servicePort})
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

// tellDestination makes the kernel tell the address that each datagram was sent to. It is set before the
// socket receives: of a datagram that arrives earlier, IPv4 tells no address to answer from
// (ipv4_pktinfo_prepare in net/ipv4/ip_sockglue.c), and the answer would come from the pod's own.
func tellDestination(network, _ string, raw syscall.RawConn) (err error) {
	level, option := unix.IPPROTO_IP, unix.IP_PKTINFO
	if network == "udp6" {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO
	}
	controlErr := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, option, 1) })
	return errors.Join(err, controlErr)
}

// answerDatagrams sends each back from the address that it came to.
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
		came(from, netip.AddrPortFrom(to, servicePort))
		// What was told of the datagram tells, of another, where to send it from.
		if _, _, err := conn.WriteMsgUDPAddrPort(b[:n], control[:controls], from); err != nil {
			return err
		}
	}
}

// dialer has this binary connect.
const dialer = "dial"

// dialService connects so many times, and waits until the other end has closed; or it
// asks so many times by datagrams, and waits until what it asked has answered.
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

// ask connects n times, from a process in a pod.
func ask(t *testing.T, l *Lab, pod string, to service, n int) {
	t.Helper()
	cmd := exec.Command(os.Args[0], dialer, network(to.transport), to.address.String(), strconv.Itoa(n))
	var said bytes.Buffer
	cmd.Stderr = &said
	if err := l.In(place(t, l, pod))(cmd); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("connect from %s: %v: %s", pod, err, said.String())
	}
}

// Each mode leads to all backends alike, and every one answers as the service.
func TestServices(t *testing.T) {
	for _, mode := range serviceModes {
		t.Run(mode, func(t *testing.T) {
			const backends, n = 10, 500
			l := upServed(t, mode, 2, backends, transports...)
			for _, of := range transports {
				for i, pod := range []string{"node1/pod0", "node1/pod1"} {
					at := answer(t, l, pod, of)
					s := served(l, of, i)
					if got := place(t, l, pod).Service.AddrPort(of.IP); got != s.address {
						t.Errorf("%s is said to be at %s, and is at %s", s.name, got, s.address)
					}
					ask(t, l, fmt.Sprintf("node0/pod%d", i), s, n)
					count := make(map[netip.Addr]int)
					for range n {
						a := <-at
						count[a.Addr()]++
					}
					for j, b := range s.backends {
						// Of 500 that fall on ten with equal chance, less than 20 or more
						// than 90 fall on one in one of a million runs.
						if got := count[b.Addr()]; got < 20 || got > 90 {
							t.Errorf("%v, %s: %d of %d connections came to backend %d, want about %d", of, pod, got, n, j, n/backends)
						}
						delete(count, b.Addr())
					}
					if len(count) > 0 {
						t.Errorf("%v, %s: connections came to %v", of, pod, count)
					}
				}
			}
		})
	}
}

// In each mode 16,000 backends are all there, each at an address that answers, and
// connections are spread over all of them.
func TestManyBackends(t *testing.T) {
	for _, mode := range serviceModes {
		t.Run(mode, func(t *testing.T) {
			const backends, n = 16000, 1000
			l := upServed(t, mode, 1, backends, tcp4)
			at := answer(t, l, "node1/pod0", tcp4)
			s := served(l, tcp4, 0)
			ask(t, l, "node0/pod0", s, n)
			first := s.backends[0].Addr()
			distinct, quarters := make(map[netip.Addr]bool), make([]int, 4)
			for range n {
				a := (<-at).Addr()
				nth := int(binary.BigEndian.Uint32(a.AsSlice())) - int(binary.BigEndian.Uint32(first.AsSlice()))
				if nth < 0 || nth >= backends {
					t.Fatalf("a connection came to %s, backend %d", a, nth)
				}
				distinct[a] = true
				quarters[nth*4/backends]++
			}
			// Of 16,000 with equal chance 1000 draws leave out all but 970 or so.
			if len(distinct) < 930 {
				t.Errorf("%d connections came to %d backends only", n, len(distinct))
			}
			for i, got := range quarters {
				if got < 180 || got > 320 { // 250, with a deviation of 14
					t.Errorf("%d of %d connections came to quarter %d of the backends", got, n, i)
				}
			}
			if mode != serviceModes[0] {
				return // the addresses are the same in every mode
			}
			in(t, l, "node0/pod0", func() error {
				for i := range backends {
					want := netip.AddrPortFrom(plus(first, i), servicePort)
					c, err := net.DialTimeout("tcp4", want.String(), 5*time.Second)
					if err != nil {
						return fmt.Errorf("backend %d: %w", i, err)
					}
					c.Close()
					if got := <-at; got != want {
						return fmt.Errorf("a connection to %s came to %s", want, got)
					}
				}
				return nil
			})
		})
	}
}

// change has the first of a lab's services, which are all of one version of IP, lead to
// another backend in place of its nth, as kube-proxy does it where there are more than a
// thousand endpoints, or Cilium's agent. The chain of the backend that was stays.
func change(t testing.TB, l *Lab, services []service, n int, to netip.AddrPort) {
	t.Helper()
	c := l.state.Config
	s := &services[0]
	old := s.backends[n]
	s.backends[n] = to
	v := versions[s.transport.IP]
	var all []rules
	switch c.Services.Mode {
	case v1alpha1.ServiceEBPF:
		if err := backendsMap(t, c).Update([2]uint32{0, uint32(n)}, wireAddress(to, s.transport), ebpf.UpdateExist); err != nil {
			t.Fatal(err)
		}
		return
	case v1alpha1.ServiceIPTables:
		all = []rules{iptables(v, iptablesRules(services, services[:1]))}
	case v1alpha1.ServiceNFTables:
		// It looks for chains that nobody needs any more.
		for _, what := range []string{"chains", "sets"} {
			all = append(all, rules{argv: []string{"nft", "--json", "list", what, v.ip}})
		}
		all = append(all, nft(fmt.Appendf(nftablesRules(*s), "flush chain %s kube-proxy %s\n", v.ip, s.nftablesEndpoint(old))))
	}
	if err := parallel(context.Background(), c.Nodes, func(i int) error {
		ns, err := openNamespace(layout(c)[i].ns)
		if err != nil {
			return err
		}
		defer ns.close()
		for _, r := range all {
			if err := r.load(context.Background(), ns); err != nil {
				return err
			}
		}
		if s.transport.Protocol != "udp" {
			return nil
		}
		return ns.do(func() error { return forget(old.Addr()) })
	}); err != nil {
		t.Fatal(err)
	}
}

// forget has the thread's namespace track no datagrams to a backend any more: whoever
// sends from the same port again would have it again.
func forget(backend netip.Addr) error {
	h, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
	if err != nil {
		return err
	}
	defer h.Close()
	family := netlink.InetFamily(unix.AF_INET)
	if backend.Is6() {
		family = unix.AF_INET6
	}
	var those netlink.ConntrackFilter
	if err := errors.Join(those.AddProtocol(unix.IPPROTO_UDP), those.AddIP(netlink.ConntrackReplySrcIP, backend.AsSlice())); err != nil {
		return err
	}
	_, err = h.ConntrackDeleteFilters(netlink.ConntrackTable, family, &those)
	return err
}

// wireAddress is an address as the map of backends has it.
func wireAddress(a netip.AddrPort, of target.Transport) (raw [20]byte) {
	protocol := uint16(unix.IPPROTO_TCP)
	if of.Protocol == "udp" {
		protocol = unix.IPPROTO_UDP
	}
	ip := a.Addr().As16()
	copy(raw[:], ip[:])
	binary.BigEndian.PutUint16(raw[16:], a.Port())
	binary.NativeEndian.PutUint16(raw[18:], protocol)
	return raw
}

// backendsMap is that of the programs which a lab's cgroup has.
func backendsMap(t testing.TB, c Config) *ebpf.Map {
	t.Helper()
	dir, err := openCgroup(c.Name)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	attached, err := link.QueryPrograms(link.QueryOptions{Target: int(dir.Fd()), Attach: ebpf.AttachCGroupInet4Connect})
	if err != nil || len(attached.Programs) != 1 {
		t.Fatalf("programs of the cgroup: %v, %v", attached, err)
	}
	program, err := ebpf.NewProgramFromID(attached.Programs[0].ID)
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	info, err := program.Info()
	if err != nil {
		t.Fatal(err)
	}
	ids, _ := info.MapIDs()
	for _, id := range ids {
		m, err := ebpf.NewMapFromID(id)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { m.Close() })
		if info, err := m.Info(); err == nil && info.Name == "backends" {
			return m
		}
	}
	t.Fatal("the programs have no map of backends")
	return nil
}

// One backend of a service is replaced: new connections come to the other from then
// on, and to those that stayed as before.
func TestBackendChanges(t *testing.T) {
	for _, mode := range serviceModes {
		for _, of := range []target.Transport{tcp4, udp6} {
			t.Run(mode+" "+network(of), func(t *testing.T) {
				l := upServed(t, mode, 1, 3, of)
				at := answer(t, l, "node1/pod0", of)
				services := l.state.Config.Services.services(layout(l.state.Config))
				first := services[0].backends[0].Addr()
				came := func() map[netip.Addr]bool {
					const n = 200
					all := make(map[netip.Addr]bool)
					ask(t, l, "node0/pod0", services[0], n)
					for range n {
						all[(<-at).Addr()] = true
					}
					return all
				}
				want := map[netip.Addr]bool{first: true, plus(first, 1): true, plus(first, 2): true}
				if diff := cmp.Diff(want, came(), cmpopts.EquateComparable(netip.Addr{})); diff != "" {
					t.Errorf("before (-want +got):\n%s", diff)
				}
				change(t, l, services, 1, netip.AddrPortFrom(plus(first, 100), servicePort))
				delete(want, plus(first, 1))
				want[plus(first, 100)] = true
				if diff := cmp.Diff(want, came(), cmpopts.EquateComparable(netip.Addr{})); diff != "" {
					t.Errorf("after (-want +got):\n%s", diff)
				}
			})
		}
	}
}

// Rules are in the lab's namespaces alone, and they and the cgroup go with it.
func TestServicesGo(t *testing.T) {
	testenv.NeedRoot(t)
	ours := func() (text string) {
		for _, argv := range [][]string{{"nft", "list", "ruleset"}, {"iptables-legacy-save"}, {"ip6tables-legacy-save"}} {
			out, _ := exec.Command(argv[0], argv[1:]...).CombinedOutput()
			for line := range strings.Lines(string(out)) {
				// What iptables says of a chain has counters behind it, and of itself the time.
				if line, _, _ = strings.Cut(line, " ["); !strings.HasPrefix(line, "#") {
					text += line
				}
			}
		}
		return text
	}
	rules := ours()
	for _, mode := range serviceModes {
		t.Run(mode, func(t *testing.T) {
			dir, c := t.TempDir(), config(labName(t))
			c.Services = &Services{Mode: mode, Backends: 10, Total: 5, Servers: []target.Seat{{Node: 1}}, Transports: transports}
			before := machine(t, "slip-"+c.Name)
			// As the command line has it: another process takes it down.
			l, err := Up(t.Context(), c, Options{Dir: dir, Keep: true})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if !t.Failed() {
					return
				}
				if err := l.Down(context.Background()); err != nil && !errors.Is(err, ErrNotFound) {
					t.Error(err)
				}
			})
			if got := ours(); got != rules {
				t.Errorf("the machine has other rules than before:\n%s", got)
			}
			for _, of := range transports {
				at := answer(t, l, "node1/pod0", of)
				if l, err = Open(dir, c.Name); err != nil {
					t.Fatal(err)
				}
				ask(t, l, "node0/pod0", served(l, of, 0), 1)
				<-at
			}
			cmd := exec.Command("sleep", "1h")
			if err := l.In(place(t, l, "node0/pod1"))(cmd); err != nil {
				t.Fatal(err)
			}
			ended := make(chan struct{})
			go func() { _ = cmd.Wait(); close(ended) }() // it is killed
			if err := l.Down(t.Context()); err != nil {
				t.Fatal(err)
			}
			<-ended
			if diff := cmp.Diff(before, machine(t, "slip-"+c.Name)); diff != "" {
				t.Errorf("left (-before +after):\n%s", diff)
			}
			if left := files(t, dir); left != nil {
				t.Errorf("files left: %v", left)
			}
		})
	}
}

// What cannot be is refused before anything is touched.
func TestServicesRefused(t *testing.T) {
	testenv.NeedRoot(t)
	seats := func(n int) (all []target.Seat) {
		for i := range n {
			all = append(all, target.Seat{Node: 1, Pod: i})
		}
		return all
	}
	for what, tt := range map[string]struct {
		change func(*testing.T, *Config)
		want   string
	}{
		"too many backends": {
			func(_ *testing.T, c *Config) {
				c.Pods = 64
				c.Services = &Services{Mode: v1alpha1.ServiceEBPF, Backends: 16000, Total: 31, Servers: seats(31), Transports: transports}
			},
			"31 servers of node1 with 16000 backends each need more addresses than 10.136.0.0/13 holds, which is enough for 30: choose fewer backends",
		},
		"more than there is": {
			func(_ *testing.T, c *Config) {
				c.Services = &Services{Mode: v1alpha1.ServiceEBPF, Backends: 1 << 20, Total: 1, Servers: seats(1), Transports: transports}
			},
			"which is enough for 0",
		},
		"no such pod": {
			func(_ *testing.T, c *Config) {
				c.Services = &Services{Mode: v1alpha1.ServiceEBPF, Backends: 1, Total: 3, Servers: seats(3), Transports: transports}
			},
			"there is no node1/pod2 to be a server",
		},
		"no transport": {
			func(_ *testing.T, c *Config) {
				c.Services = &Services{Mode: v1alpha1.ServiceEBPF, Backends: 1, Total: 1, Servers: seats(1)}
			},
			"services: none is for a transport",
		},
		"no such transport": {
			func(_ *testing.T, c *Config) {
				c.Services = &Services{Mode: v1alpha1.ServiceEBPF, Backends: 1, Total: 1, Servers: seats(1), Transports: []target.Transport{{IP: 4, Protocol: "sctp"}}}
			},
			"services: must each be of IP version 4 or 6 and of tcp or udp, once, are [{4 sctp}]",
		},
		"another shape": {
			func(_ *testing.T, c *Config) {
				c.Shape = ShapeRouted
				c.Services = &Services{Mode: v1alpha1.ServiceEBPF, Backends: 1, Total: 1, Servers: seats(1), Transports: transports}
			},
			"must be of shape flannel, is routed",
		},
		"no iptables": {
			func(t *testing.T, c *Config) {
				t.Setenv("PATH", t.TempDir())
				c.Services = &Services{Mode: v1alpha1.ServiceIPTables, Backends: 1, Total: 1, Servers: seats(1), Transports: transports}
			},
			"need iptables-restore, which is not installed: install it (apt install iptables), or use another mode",
		},
		"no ip6tables": {
			func(t *testing.T, c *Config) {
				t.Setenv("PATH", t.TempDir())
				c.Services = &Services{Mode: v1alpha1.ServiceIPTables, Backends: 1, Total: 1, Servers: seats(1), Transports: []target.Transport{udp6}}
			},
			"need ip6tables-restore, which is not installed: install it (apt install iptables), or use another mode",
		},
		"no nft": {
			func(t *testing.T, c *Config) {
				t.Setenv("PATH", t.TempDir())
				c.Services = &Services{Mode: v1alpha1.ServiceNFTables, Backends: 1, Total: 1, Servers: seats(1), Transports: transports}
			},
			"need nft, which is not installed: install it (apt install nftables)",
		},
		"a tool that fails": {
			func(t *testing.T, c *Config) {
				dir := t.TempDir()
				if err := os.WriteFile(dir+"/nft", []byte("#!/bin/sh\necho no such thing >&2; echo more >&2; exit 3\n"), 0o755); err != nil {
					t.Fatal(err)
				}
				t.Setenv("PATH", dir)
				c.Services = &Services{Mode: v1alpha1.ServiceNFTables, Backends: 1, Total: 1, Servers: seats(1), Transports: transports}
			},
			"does not accept kube-proxy's rules: nft: exit status 3: no such thing",
		},
	} {
		t.Run(what, func(t *testing.T) {
			dir, c := t.TempDir(), config(labName(t))
			before := machine(t, "slip-"+c.Name)
			tt.change(t, &c)
			l, err := Up(t.Context(), c, Options{Dir: dir})
			if err == nil {
				err = l.Down(t.Context())
				t.Fatalf("came up; %v", err)
			}
			if !strings.Contains(err.Error(), tt.want) {
				t.Errorf("says %q, want %q in it", err, tt.want)
			}
			if diff := cmp.Diff(before, machine(t, "slip-"+c.Name)); diff != "" {
				t.Errorf("changed (-before +after):\n%s", diff)
			}
			if left := files(t, dir); left != nil {
				t.Errorf("files left: %v", left)
			}
		})
	}
}

// A cgroup of the name that is no lab's is left alone.
func TestForeignCgroup(t *testing.T) {
	testenv.NeedRoot(t)
	c := config(labName(t))
	c.Services = &Services{Mode: v1alpha1.ServiceEBPF, Backends: 1, Total: 1, Servers: []target.Seat{{Node: 1}}, Transports: transports}
	path, err := cgroupPath(c.Name)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(path, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(path); err != nil {
			t.Error(err)
		}
	})
	if _, err := Up(t.Context(), c, Options{Dir: t.TempDir()}); !errors.Is(err, ErrExists) || !strings.Contains(err.Error(), path) {
		t.Errorf("a lab over a foreign cgroup: %v, want %v", err, ErrExists)
	}
}

func TestCgroupRoot(t *testing.T) {
	for text, want := range map[string]string{
		"25 1 0:22 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n":                                          "/sys/fs/cgroup",
		"30 29 0:25 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n39 29 0:34 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n": "/sys/fs/cgroup/unified",
		"30 29 0:25 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n":                                                              "",
		"":               "",
		" - cgroup2 x\n": "",
	} {
		file := filepath.Join(t.TempDir(), "mountinfo")
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		got, err := cgroupRoot(file)
		if got != want || (want == "") != errors.Is(err, errNoCgroup) {
			t.Errorf("%q: %q, %v, want %q", text, got, err, want)
		}
	}
}

// The rules are those of kube-proxy, word for word.
func TestKubeProxyRules(t *testing.T) {
	c := config("x")
	c.Services = &Services{Backends: 3, Total: 2, Servers: []target.Seat{{Node: 1}}, Transports: transports}
	services := c.Services.services(layout(c))
	for _, mode := range []string{v1alpha1.ServiceIPTables, v1alpha1.ServiceNFTables} {
		for i, got := range kubeProxy(mode, services) {
			file := filepath.Join("testdata", fmt.Sprintf("%s%d.txt", mode, 4+2*i))
			if *update {
				if err := os.WriteFile(file, got.text, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), string(got.text)); diff != "" {
				t.Errorf("%s (-want +got):\n%s", file, diff)
			}
		}
	}
	// Names of kube-proxy's own tests (pkg/proxy/iptables/proxier_test.go and
	// pkg/proxy/nftables/helpers_test.go, and the comments in pkg/proxy/nftables/proxier.go).
	for got, want := range map[string]string{
		hash("ns1/svc1:p80", "tcp")[:16]:                    "XPGD46QRK7WJZT7O",
		hash("ns1/svc1:p80", "tcp", "10.180.0.1:80")[:16]:   "SXIVWICOYRO3J4NJ",
		nftablesName("ns1/svc1/tcp/p80"):                    "ULMVA6XW-ns1/svc1/tcp/p80",
		nftablesName("ns1/svc1/tcp/p80__10.180.0.1/80"):     "5OJB2KTY-ns1/svc1/tcp/p80__10.180.0.1/80",
		nftablesName("ns1/svc1/tcp/p80__fd00.10.180..1/80"): "ZVRFLKHO-ns1/svc1/tcp/p80__fd00.10.180..1/80",
	} {
		if got != want {
			t.Errorf("hash %s, want %s", got, want)
		}
	}
	c.Services.Transports = []target.Transport{tcp4}
	services = c.Services.services(layout(c))
	few := iptablesRules(services, services)
	c.Services.Backends = largeCluster + 1
	many := c.Services.services(layout(c))
	if got := iptablesRules(many, many); bytes.Count(few, []byte("--comment")) < 15 || bytes.Count(got, []byte("--comment")) != 6 {
		t.Errorf("%d comments of few endpoints, %d of many", bytes.Count(few, []byte("--comment")), bytes.Count(got, []byte("--comment")))
	}
}
