//go:build linux

package policies_test

import (
	"context"
	"crypto/sha1"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"slipstream.dev/internal/place/lab"
	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/place/lab/overlay"
	"slipstream.dev/internal/place/lab/policies"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
)

const count, port = 20, 7465

// policed is a lab of two nodes with one pod each, or two on a bridge, with policies unless the mode is empty.
type policed struct {
	*lab.Lab
	name, shape string
}

// server returns the pod to which node0/pod0 sends, and the suffix of its namespace's name.
func (l policed) server() (place, namespace string) {
	if l.shape == overlay.ShapeBridge {
		return "node0/pod1", "n0p1"
	}
	return "node1/pod0", "n1p0"
}

func up(t *testing.T, shape, mode string) policed {
	t.Helper()
	testenv.NeedRoot(t)
	l := policed{shape: shape, name: fmt.Sprintf("test-%x", sha1.Sum(fmt.Appendf(nil, "%s %s %s %d", t.Name(), shape, mode, os.Getpid())))[:13]}
	c := lab.Config{
		Name: l.name, Nodes: 2, Pods: 1, Shape: shape, NIC: spec.NIC{Offload: spec.OffloadFull, MTU: 1500},
	}
	if shape == overlay.ShapeBridge {
		c.Pods = 2
	}
	if mode != "" {
		c.Policies = &policies.Config{Mode: mode, Count: count}
	}
	var err error
	if l.Lab, err = lab.Up(t.Context(), c, lab.Options{Dir: t.TempDir()}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Down(context.Background()); err != nil && !errors.Is(err, lab.ErrNotFound) {
			t.Error(err)
		}
	})
	return l
}

// in runs f in a place such as n0 or n0p0.
func (l policed) in(t *testing.T, place string, f func() error) {
	t.Helper()
	if err := network.Inside("slip-"+l.name+"-"+place, f); err != nil {
		t.Fatalf("in %s: %v", place, err)
	}
}

func (l policed) address(t *testing.T, place string, ip int) netip.Addr {
	t.Helper()
	for _, p := range l.Places() {
		if p.Name == place {
			return p.IP(ip)
		}
	}
	t.Fatalf("no place %s", place)
	return netip.Addr{}
}

// datagrams receives datagrams in a place, and returns a channel with their texts.
func (l policed) datagrams(t *testing.T, place string) <-chan string {
	t.Helper()
	var conn *net.UDPConn
	l.in(t, place, func() (err error) {
		conn, err = net.ListenUDP("udp", &net.UDPAddr{Port: port})
		return err
	})
	texts := make(chan string, 16)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for b := make([]byte, 16); ; {
			n, err := conn.Read(b)
			if err != nil {
				return
			}
			texts <- string(b[:n])
		}
	}()
	t.Cleanup(func() { conn.Close(); <-done })
	return texts
}

// next returns the next text, and fails the test if none comes within 20 s.
func next(t *testing.T, texts <-chan string) string {
	t.Helper()
	select {
	case text := <-texts:
		return text
	case <-time.After(20 * time.Second):
		t.Fatal("nothing comes")
		return ""
	}
}

func (l policed) send(t *testing.T, place string, from, to netip.Addr, text string) {
	t.Helper()
	l.in(t, place, func() error {
		conn, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, port)))
		if err != nil {
			return err
		}
		defer conn.Close()
		_, err = conn.Write([]byte(text))
		return err
	})
}

// foreign gives node0's pod another address of the node's pod prefix, which no policy allows. In Calico's shape it also needs a
// route.
func (l policed) foreign(t *testing.T, ip int) netip.Addr {
	t.Helper()
	a := network.Plus(l.address(t, "node0/pod0", ip), 200)
	l.in(t, "n0p0", func() error {
		eth0, err := netlink.LinkByName(network.NIC)
		if err != nil {
			return err
		}
		return netlink.AddrAdd(eth0, &netlink.Addr{IPNet: network.IPNet(netip.PrefixFrom(a, a.BitLen())), Flags: 2}) // IFA_F_NODAD
	})
	if l.shape == spec.ShapeCalico {
		l.in(t, "n0", func() error {
			veth, err := netlink.LinkByName(overlay.VethName(l.shape, "node0/pod0"))
			if err != nil {
				return err
			}
			return netlink.RouteAdd(&netlink.Route{LinkIndex: veth.Attrs().Index, Dst: network.IPNet(netip.PrefixFrom(a, a.BitLen())), Scope: netlink.SCOPE_LINK})
		})
	}
	return a
}

type policyCase struct{ shape, mode string }

// cases are the modes, each in a shape of a product that uses it.
var cases = []policyCase{
	{spec.ShapeFlannel, spec.PolicyIPTables},
	{spec.ShapeCalico, spec.PolicyIPSet},
	{overlay.ShapeRouted, spec.PolicyNFTables},
	{spec.ShapeFlannel, spec.PolicyEBPF},
	{overlay.ShapeEBPF, spec.PolicyEBPF},
}

// TestPolicies checks that packets between the pods of a lab get through, and that packets from an address that no policy
// allows do not, but would without policies.
func TestPolicies(t *testing.T) {
	// eBPF policies are at the pods' veths, so in flannel's shape they are at bridge ports.
	onBridge := []policyCase{{overlay.ShapeBridge, spec.PolicyIPTables}, {overlay.ShapeBridge, spec.PolicyNFTables}}
	for _, c := range append(onBridge, cases...) {
		for _, mode := range []string{"", c.mode} {
			t.Run(fmt.Sprintf("%s by %q", c.shape, mode), func(t *testing.T) {
				t.Parallel()
				l := up(t, c.shape, mode)
				server, namespace := l.server()
				texts := l.datagrams(t, namespace)
				for _, ip := range []int{4, 6} {
					to := l.address(t, server, ip)
					l.send(t, "n0p0", l.foreign(t, ip), to, "foreign")
					var came []string
					if mode == "" { // before the other, which may be sent by another CPU
						came = append(came, next(t, texts))
					}
					l.send(t, "n0p0", l.address(t, "node0/pod0", ip), to, "pod")
					if came = append(came, next(t, texts)); came[len(came)-1] != "pod" {
						came = append(came, next(t, texts))
					}
					if got, want := strings.Join(came, " "), map[bool]string{true: "foreign pod", false: "pod"}[mode == ""]; got != want {
						t.Errorf("IPv%d: from %q came, want %q", ip, got, want)
					}
				}
			})
		}
	}
}

// TestEstablished checks that a pod gets the answers of a node, which no policy allows to open a connection.
func TestEstablished(t *testing.T) {
	for _, c := range cases {
		t.Run(c.shape+" by "+c.mode, func(t *testing.T) {
			t.Parallel()
			l := up(t, c.shape, c.mode)
			var listeners [2]net.Listener
			for i, place := range []string{"n1", "n0p0"} {
				l.in(t, place, func() (err error) {
					listeners[i], err = net.Listen("tcp", fmt.Sprintf(":%d", port))
					return err
				})
				t.Cleanup(func() { listeners[i].Close() })
			}
			for _, ip := range []int{4, 6} {
				node, pod := netip.AddrPortFrom(l.address(t, "node1", ip), port), netip.AddrPortFrom(l.address(t, "node0/pod0", ip), port)
				l.in(t, "n0p0", func() error {
					conn, err := net.DialTimeout("tcp", node.String(), 5*time.Second)
					if err == nil {
						conn.Close()
					}
					return err
				})
				l.in(t, "n1", func() error {
					conn, err := net.DialTimeout("tcp", pod.String(), 100*time.Millisecond)
					if err == nil {
						conn.Close()
						t.Errorf("IPv%d: the node reaches the pod", ip)
					}
					return nil
				})
			}
		})
	}
}

// TestCount checks that the kernel has as many policies as configured.
func TestCount(t *testing.T) {
	for _, c := range []struct{ mode, command, chain string }{
		{spec.PolicyIPTables, "iptables-save", ":cali-pi-"},
		{spec.PolicyIPSet, "ip6tables-save", ":cali-pi-"},
		{spec.PolicyNFTables, "nft list table ip calico", "\tchain cali-pi-"},
	} {
		t.Run(c.mode, func(t *testing.T) {
			l := up(t, spec.ShapeFlannel, c.mode)
			l.in(t, "n1", func() error {
				argv := strings.Fields(c.command)
				rules, err := exec.Command(argv[0], argv[1:]...).Output()
				if err != nil {
					return err
				}
				jumps := 0
				for line := range strings.Lines(string(rules)) {
					if strings.Contains(line, "cali-tw-pod-0 ") && strings.Contains(line, "-j cali-pi-") || strings.Contains(line, "\t\tjump cali-pi-") {
						jumps++
					}
				}
				if got := strings.Count("\n"+string(rules), "\n"+c.chain); got != count || jumps != count {
					t.Errorf("%d chains of policies and %d jumps to them, want %d:\n%s", got, jumps, count, rules)
				}
				sets, err := netlink.IpsetListAll()
				if want := map[string]int{spec.PolicyIPSet: 2 * count}[c.mode]; err == nil && len(sets) != want {
					t.Errorf("%d sets, want %d", len(sets), want)
				}
				return err
			})
		})
	}
}

// TestGone checks that the programs are removed with the lab.
func TestGone(t *testing.T) {
	l := up(t, spec.ShapeFlannel, spec.PolicyEBPF)
	mine := ofPolicies(t)
	if len(mine) == 0 {
		t.Fatal("no program is loaded")
	}
	if err := l.Down(t.Context()); err != nil {
		t.Fatal(err)
	}
	testenv.Await(t, time.Minute, "the programs are unloaded", func() bool {
		now := ofPolicies(t)
		for id := range mine {
			if now[id] {
				return false
			}
		}
		return true
	})
}

// ofPolicies returns the programs of policies on this machine.
func ofPolicies(t *testing.T) map[ebpf.ProgramID]bool {
	t.Helper()
	all := make(map[ebpf.ProgramID]bool)
	for id, err := ebpf.ProgramGetNextID(0); err == nil; id, err = ebpf.ProgramGetNextID(id) {
		p, err := ebpf.NewProgramFromID(id)
		if err != nil {
			continue
		}
		if info, err := p.Info(); err == nil && strings.HasPrefix(info.Name, "policy_") {
			all[id] = true
		}
		p.Close()
	}
	return all
}

// TestLacks checks that the error says what is missing for a mode, and what to do.
func TestLacks(t *testing.T) {
	testenv.NeedRoot(t)
	for mode, lacks := range map[string]string{
		spec.PolicyIPTables: "network policies in mode iptables need iptables-restore, which is not installed: install it (apt install iptables), or use another mode",
		spec.PolicyNFTables: "network policies in mode nftables need nft, which is not installed: install it (apt install nftables), or use another mode",
		spec.PolicyIPSet:    "network policies in mode ipset need iptables-restore",
		spec.PolicyEBPF:     "",
	} {
		c := lab.Config{Shape: spec.ShapeFlannel, Policies: &policies.Config{Mode: mode}}
		if err := lab.Lacks(c); err != nil {
			t.Errorf("%s: %v", mode, err)
		}
		t.Run(mode, func(t *testing.T) {
			t.Setenv("PATH", t.TempDir())
			if err := lab.Lacks(c); (err == nil) != (lacks == "") || err != nil && !strings.Contains(err.Error(), lacks) {
				t.Errorf("%v, want %q", err, lacks)
			}
		})
	}
}
