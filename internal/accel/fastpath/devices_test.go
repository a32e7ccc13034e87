//go:build linux

package fastpath

import (
	"encoding/binary"
	"net"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// TestUnderstand has devices on top of a NIC and of pods' links be taken for what they are.
func TestUnderstand(t *testing.T) {
	attrs := func(index int, name string, change ...func(*netlink.LinkAttrs)) netlink.LinkAttrs {
		a := netlink.LinkAttrs{Index: index, Name: name, MTU: 1500, Flags: net.FlagUp, EncapType: "ether", NetNsID: -1}
		for _, c := range change {
			c(&a)
		}
		return a
	}
	master := func(index int) func(*netlink.LinkAttrs) {
		return func(a *netlink.LinkAttrs) { a.MasterIndex = index }
	}
	on := func(index int) func(*netlink.LinkAttrs) {
		return func(a *netlink.LinkAttrs) { a.ParentIndex = index }
	}
	ofPod := func(a *netlink.LinkAttrs) { a.NetNsID = 1 }
	const nic, lower, tunnel, bridge, vlan, pod = 2, 3, 4, 5, 6, 7
	vxlan := &netlink.Vxlan{LinkAttrs: attrs(tunnel, "flannel.1"), SrcAddr: net.IPv4(192, 0, 2, 1).To4(), VtepDevIndex: nic, Port: 8472}
	vxlan.HardwareAddr = net.HardwareAddr{2, 0, 0, 0, 0, 1}
	veth := &netlink.Veth{LinkAttrs: attrs(pod, "veth7", ofPod)}
	const where = `flannel.1: its NIC eth0 has the master bond0, which the fast path would bypass`
	for name, tt := range map[string]struct {
		devices []netlink.Link
		seen    map[side][]observer
		refused []string
		veths   []int
	}{
		"a NIC": {devices: []netlink.Link{&netlink.Device{LinkAttrs: attrs(nic, "eth0")}, veth}, veths: []int{pod}},
		"a bond": {devices: []netlink.Link{
			&netlink.Bond{LinkAttrs: attrs(nic, "bond0")}, &netlink.Device{LinkAttrs: attrs(lower, "eth0", master(nic))}, veth}, veths: []int{pod}},
		"a VLAN": {devices: []netlink.Link{
			&netlink.Vlan{LinkAttrs: attrs(nic, "eth0.7", on(lower))}, &netlink.Device{LinkAttrs: attrs(lower, "eth0")}, veth}, veths: []int{pod}},
		"a team": {devices: []netlink.Link{
			&netlink.GenericLink{LinkAttrs: attrs(nic, "team0"), LinkType: "team"}, &netlink.Device{LinkAttrs: attrs(lower, "eth0", master(nic))}, veth}, veths: []int{pod}},
		"part of a bond": {devices: []netlink.Link{
			&netlink.Device{LinkAttrs: attrs(nic, "eth0", master(lower))}, &netlink.Bond{LinkAttrs: attrs(lower, "bond0")}, veth}, refused: []string{where}},
		"no Ethernet": {devices: []netlink.Link{
			&netlink.Wireguard{LinkAttrs: attrs(nic, "wg0", func(a *netlink.LinkAttrs) { a.EncapType = "none" })}, veth},
			refused: []string{"flannel.1: its NIC wg0 has no Ethernet header"}},
		"a bridge of a wire": {devices: []netlink.Link{
			&netlink.Bridge{LinkAttrs: attrs(nic, "br0")}, &netlink.Veth{LinkAttrs: attrs(lower, "eth0", ofPod, master(nic))}, veth}, veths: []int{pod}},
		"a VLAN on the pods' bridge": {
			devices: []netlink.Link{&netlink.Device{LinkAttrs: attrs(nic, "eth0")}, &netlink.Bridge{LinkAttrs: attrs(bridge, "cni0")},
				&netlink.Vlan{LinkAttrs: attrs(vlan, "cni0.9", on(bridge))},
				&netlink.Veth{LinkAttrs: attrs(pod, "veth7", ofPod, master(bridge))}, &netlink.Veth{LinkAttrs: attrs(pod+1, "veth8", ofPod, master(bridge))},
				&netlink.Veth{LinkAttrs: attrs(pod+2, "veth9", ofPod)}},
			seen:    map[side][]observer{{vlan, true}: {{"queue", "a queue (htb)"}}},
			refused: []string{"cni0.9: it has a queue (htb), which packets of the pods behind it would bypass"},
			veths:   []int{pod + 2},
		},
		"a VLAN elsewhere": {
			devices: []netlink.Link{&netlink.Device{LinkAttrs: attrs(nic, "eth0")}, veth,
				&netlink.Macvlan{LinkAttrs: attrs(vlan, "other", on(pod), ofPod)}}, // of a device that has this number in another namespace
			seen:  map[side][]observer{{vlan, true}: {{"queue", "a queue (htb)"}}},
			veths: []int{pod},
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := classify(append(tt.devices, vxlan), nil, observers{at: tt.seen}, nil)
			if d := cmp.Diff(tt.refused, n.skipped); d != "" {
				t.Errorf("refused (-want +got):\n%s", d)
			}
			if !slices.Equal(n.veths, tt.veths) {
				t.Errorf("links of pods are %v, want %v", n.veths, tt.veths)
			}
			if carried := n.overlays[tunnel].NIC == nic; carried == slices.ContainsFunc(n.skipped, func(why string) bool { return why[:5] == "flann" }) {
				t.Errorf("the tunnel is carried: %t, refused: %q", carried, n.skipped)
			}
		})
	}
}

// TestTurn has each side be asked for once a round, however many there are.
func TestTurn(t *testing.T) {
	for _, n := range []int{0, 1, inspectMax, inspectMax + 1, 3*inspectMax - 1} {
		all := make([]side, n)
		for i := range all {
			all[i].device = i
		}
		var round []side
		from := 0
		for range (n + inspectMax - 1) / inspectMax {
			var part []side
			part, from = batch(all, from)
			round = append(round, part...)
		}
		if !slices.Equal(round, all) {
			t.Errorf("of %d sides a round has %d", n, len(round))
		}
		if part, _ := batch(all, from); len(part) > 0 && part[0] != all[0] {
			t.Errorf("the round after %d sides begins with %v", n, part[0])
		}
	}
}

// TestChainOf reads chains as the kernel lists them, and what is cut short without harm.
func TestChainOf(t *testing.T) {
	for _, tt := range []struct {
		name    string
		message []byte
		want    chain
		ok      bool
	}{
		{"ingress of one", chainMessage(unix.NFPROTO_NETDEV, unix.NF_NETDEV_INGRESS, device(unix.NFTA_HOOK_DEV, "eth0")), chain{"netdev t c", false, []string{"eth0"}}, true},
		{"egress of some", chainMessage(unix.NFPROTO_NETDEV, unix.NF_NETDEV_EGRESS, attr(nftaHookDevs, device(1, "eth0"), device(nftaDevicePrefix, "cali"))),
			chain{"netdev t c", true, []string{"eth0", "cali*"}}, true},
		{"ingress of inet", chainMessage(unix.NFPROTO_INET, nfInetIngress, device(unix.NFTA_HOOK_DEV, "eth0")), chain{"inet t c", false, []string{"eth0"}}, true},
		{"prerouting of inet", chainMessage(unix.NFPROTO_INET, unix.NF_INET_PRE_ROUTING), chain{}, false},
		{"no hook", chainMessage(unix.NFPROTO_NETDEV, -1), chain{}, false},
	} {
		got, ok := chainOf(tt.message)
		if ok != tt.ok || ok && !cmp.Equal(got, tt.want, cmp.AllowUnexported(chain{})) {
			t.Errorf("%s: %+v, %t, want %+v, %t", tt.name, got, ok, tt.want, tt.ok)
		}
	}
	c := chain{devices: []string{"eth0", "cali*"}}
	for name, want := range map[string]bool{"eth0": true, "eth01": false, "cali12": true, "cal": false} {
		if c.at(name) != want {
			t.Errorf("a chain of %q is at %s: %t", c.devices, name, !want)
		}
	}
}

// FuzzChainOf has no message of the kernel, whatever it is, be read beyond its end.
func FuzzChainOf(f *testing.F) {
	f.Add(chainMessage(unix.NFPROTO_NETDEV, unix.NF_NETDEV_EGRESS, attr(nftaHookDevs, device(1, "eth0"), device(nftaDevicePrefix, "cali"))))
	f.Add(chainMessage(unix.NFPROTO_INET, nfInetIngress, device(unix.NFTA_HOOK_DEV, "eth0")))
	f.Add([]byte{unix.NFPROTO_NETDEV, 0, 0, 0, 4})
	f.Fuzz(func(t *testing.T, message []byte) {
		if c, ok := chainOf(message); ok && c.name == "" {
			t.Error("a chain has no name")
		}
	})
}

// attr is an attribute of a message, of parts.
func attr(kind uint16, parts ...[]byte) []byte {
	body := slices.Concat(parts...)
	b := binary.NativeEndian.AppendUint16(nil, uint16(4+len(body)))
	b = append(binary.NativeEndian.AppendUint16(b, kind), body...)
	return append(b, make([]byte, -len(b)&3)...)
}

func device(kind uint16, name string) []byte { return attr(kind, []byte(name+"\x00")) }

// chainMessage is what the kernel says of a chain c of a table t, at a hook if it is not less
// than 0.
func chainMessage(family uint8, hook int, devices ...[]byte) []byte {
	m := slices.Concat([]byte{family, 0, 0, 0}, device(unix.NFTA_CHAIN_TABLE, "t"), device(unix.NFTA_CHAIN_NAME, "c"))
	if hook < 0 {
		return m
	}
	number := attr(unix.NFTA_HOOK_HOOKNUM, binary.BigEndian.AppendUint32(nil, uint32(hook)))
	return append(m, attr(unix.NFTA_CHAIN_HOOK|unix.NLA_F_NESTED, append([][]byte{number}, devices...)...)...)
}
