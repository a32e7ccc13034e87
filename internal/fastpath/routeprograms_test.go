//go:build linux

package fastpath

import (
	"errors"
	"net"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/testenv"
)

// TestRoutesWithPrograms checks that devices are skipped while a route leads over them through an eBPF program.
func TestRoutesWithPrograms(t *testing.T) {
	testenv.EnterNamespace(t)
	nic := addLink(t, &netlink.Veth{LinkAttrs: named("nic"), PeerName: "gateway"})
	addLink(t, &netlink.Veth{LinkAttrs: named("wire"), PeerName: "end"})
	address := net.IPv4(192, 0, 2, 1).To4()
	if err := netlink.AddrAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Index: nic}}, &netlink.Addr{IPNet: &net.IPNet{IP: address, Mask: net.CIDRMask(24, 32)}}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"gateway", "end"} {
		l, err := netlink.LinkByName(name)
		if err := errors.Join(err, netlink.LinkSetUp(l)); err != nil {
			t.Fatal(err)
		}
	}
	other, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	pod := addLink(t, &netlink.Veth{LinkAttrs: named("pod"), PeerName: "eth0", PeerNamespace: netlink.NsFd(other)})
	if err := netns.Do(other, func() error {
		l, err := netlink.LinkByName("eth0")
		return errors.Join(err, netlink.LinkSetUp(l))
	}); err != nil {
		t.Fatal(err)
	}
	tunnel := addLink(t, &netlink.Vxlan{LinkAttrs: named("tunnel"), VxlanId: 1, VtepDevIndex: nic, SrcAddr: address, Port: 8472})

	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.LWTOut, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	encap := new(netlink.BpfEncap)
	if err := encap.SetProg(nl.LWT_BPF_OUT, program.FD(), "count"); err != nil {
		t.Fatal(err)
	}
	to := func(last byte, device int, gateway net.IP, encap netlink.Encap) *netlink.Route {
		r := &netlink.Route{Dst: &net.IPNet{IP: net.IPv4(198, 51, 100, last).To4(), Mask: net.CIDRMask(32, 32)}, LinkIndex: device, Gw: gateway, Encap: encap}
		if gateway == nil {
			r.Scope = netlink.SCOPE_LINK
		}
		return r
	}
	gateway := net.IPv4(192, 0, 2, 2).To4()
	if err := netlink.RouteAdd(to(1, nic, gateway, nil)); err != nil {
		t.Fatal(err)
	}
	scan := func() node {
		t.Helper()
		n, err := scanHere(t, nil, func() error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	if n := scan(); !slices.Equal(n.supported(), []string{"nic", "tunnel"}) || !slices.Equal(n.veths, []int{pod}) {
		t.Fatalf("without a program %v, %v are supported; skipped %q", n.supported(), n.veths, n.skipped)
	}
	for _, tt := range []struct {
		route *netlink.Route
		skips []string
	}{
		{to(2, nic, gateway, encap), []string{"nic", "tunnel"}},
		{to(2, tunnel, nil, encap), []string{"tunnel"}},
		{to(2, pod, nil, encap), []string{"pod"}},
	} {
		if err := netlink.RouteAdd(tt.route); err != nil {
			if errors.Is(err, unix.EOPNOTSUPP) {
				t.Skip("the kernel has no eBPF programs on routes (CONFIG_LWTUNNEL_BPF): ", err)
			}
			t.Fatal(err)
		}
		var skipped []string
		for _, s := range scan().skipped {
			if s.reason == byRoute {
				skipped = append(skipped, s.device)
			}
		}
		slices.Sort(skipped)
		if !slices.Equal(skipped, tt.skips) {
			t.Errorf("route %v: %q are skipped, want %q", tt.route, skipped, tt.skips)
		}
		if err := netlink.RouteDel(tt.route); err != nil {
			t.Fatal(err)
		}
	}
}
