//go:build linux

package fastpath

import (
	"encoding/binary"
	"net"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/fastpath/datapath"
)

// TestDeviceClassification checks how upper devices of a NIC and of pods' links are classified.
func TestDeviceClassification(t *testing.T) {
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
		seen    map[attachPoint][]observer
		skipped []string
		veths   []int
	}{
		"NIC": {devices: []netlink.Link{&netlink.Device{LinkAttrs: attrs(nic, "eth0")}, veth}, veths: []int{pod}},
		"bond": {devices: []netlink.Link{
			&netlink.Bond{LinkAttrs: attrs(nic, "bond0")}, &netlink.Device{LinkAttrs: attrs(lower, "eth0", master(nic))}, veth}, veths: []int{pod}},
		"VLAN": {devices: []netlink.Link{
			&netlink.Vlan{LinkAttrs: attrs(nic, "eth0.7", on(lower))}, &netlink.Device{LinkAttrs: attrs(lower, "eth0")}, veth}, veths: []int{pod}},
		"team": {devices: []netlink.Link{
			&netlink.GenericLink{LinkAttrs: attrs(nic, "team0"), LinkType: "team"}, &netlink.Device{LinkAttrs: attrs(lower, "eth0", master(nic))}, veth}, veths: []int{pod}},
		"lower device of a bond": {devices: []netlink.Link{
			&netlink.Device{LinkAttrs: attrs(nic, "eth0", master(lower))}, &netlink.Bond{LinkAttrs: attrs(lower, "bond0")}, veth}, skipped: []string{where}, veths: []int{pod}},
		"no Ethernet header": {devices: []netlink.Link{
			&netlink.Wireguard{LinkAttrs: attrs(nic, "wg0", func(a *netlink.LinkAttrs) { a.EncapType = "none" })}, veth},
			skipped: []string{"flannel.1: its NIC wg0 has no Ethernet header"}, veths: []int{pod}},
		"bridge": {devices: []netlink.Link{
			&netlink.Bridge{LinkAttrs: attrs(nic, "br0")}, &netlink.Veth{LinkAttrs: attrs(lower, "eth0", ofPod, master(nic))}, veth}, veths: []int{pod}},
		"VLAN on the pods' bridge": {
			devices: []netlink.Link{&netlink.Device{LinkAttrs: attrs(nic, "eth0")}, &netlink.Bridge{LinkAttrs: attrs(bridge, "cni0")},
				&netlink.Vlan{LinkAttrs: attrs(vlan, "cni0.9", on(bridge))},
				&netlink.Veth{LinkAttrs: attrs(pod, "veth7", ofPod, master(bridge))}, &netlink.Veth{LinkAttrs: attrs(pod+1, "veth8", ofPod, master(bridge))},
				&netlink.Veth{LinkAttrs: attrs(pod+2, "veth9", ofPod)}},
			seen:    map[attachPoint][]observer{{vlan, true}: {{"queue", "a queue (htb)"}}},
			skipped: []string{"cni0.9: it has a queue (htb), which packets of the pods behind it would bypass"},
			veths:   []int{pod + 2},
		},
		"flowtable": {
			devices: []netlink.Link{&netlink.Device{LinkAttrs: attrs(nic, "eth0")}, veth, &netlink.Veth{LinkAttrs: attrs(pod+1, "veth8", ofPod)},
				&netlink.Veth{LinkAttrs: attrs(pod+2, "veth9", ofPod)}},
			seen: map[attachPoint][]observer{
				{tunnel, false}: {{byFlowtable, "a flowtable (ip calico f)"}}, {pod, false}: {{byFlowtable, "a flowtable (ip calico f)"}},
				{pod + 1, false}: {{byFlowtable, "a flowtable (ip calico f)"}}},
			skipped: []string{"flannel.1: it has a flowtable (ip calico f), which the fast path would bypass",
				"links of pods: they have a flowtable (ip calico f), which the fast path would bypass"},
			veths: []int{pod + 2},
		},
		"macvlan in another namespace": {
			devices: []netlink.Link{&netlink.Device{LinkAttrs: attrs(nic, "eth0")}, veth,
				&netlink.Macvlan{LinkAttrs: attrs(vlan, "other", on(pod), ofPod)}}, // its parent has this ifindex in another namespace
			seen:  map[attachPoint][]observer{{vlan, true}: {{"queue", "a queue (htb)"}}},
			veths: []int{pod},
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := classify(append(tt.devices, vxlan), nil, observers{at: tt.seen}, nil)
			if d := cmp.Diff(tt.skipped, sentences(n.skipped)); d != "" {
				t.Errorf("skipped (-want +got):\n%s", d)
			}
			if !slices.Equal(n.veths, tt.veths) {
				t.Errorf("pod links are %v, want %v", n.veths, tt.veths)
			}
			if accelerated := n.overlays[tunnel].NIC == nic; accelerated == slices.ContainsFunc(n.skipped, func(s skip) bool { return s.device == "flannel.1" }) {
				t.Errorf("the VXLAN device is accelerated: %t, skipped: %q", accelerated, n.skipped)
			}
		})
	}
}

// TestRouters checks which devices are NICs over which a node routes packets of pods as they are.
func TestRouters(t *testing.T) {
	const nic, other, pod = 2, 3, 7
	attrs := func(index int, name string) netlink.LinkAttrs {
		return netlink.LinkAttrs{Index: index, Name: name, MTU: 1500, Flags: net.FlagUp, EncapType: "ether", NetNsID: -1}
	}
	subnet := func(text string) *net.IPNet {
		_, to, err := net.ParseCIDR(text)
		if err != nil {
			t.Fatal(err)
		}
		return to
	}
	route := func(to string, via string, device int) netlink.Route {
		return netlink.Route{Dst: subnet(to), Gw: net.ParseIP(via), LinkIndex: device, Type: unix.RTN_UNICAST}
	}
	own := netlink.Route{Dst: subnet("192.0.2.0/24"), LinkIndex: nic, Type: unix.RTN_UNICAST}
	usual := route("0.0.0.0/0", "192.0.2.254", nic)
	toPods := route("10.244.1.0/24", "192.0.2.2", nic)
	eth0 := &netlink.Device{LinkAttrs: attrs(nic, "eth0")}
	link := &netlink.Veth{LinkAttrs: attrs(pod, "veth7")}
	link.NetNsID = 1
	cilium := &netlink.Vxlan{LinkAttrs: attrs(other, "cilium_vxlan"), FlowBased: true}
	vxlan := &netlink.Vxlan{LinkAttrs: attrs(other, "flannel.1"), SrcAddr: net.IPv4(192, 0, 2, 1).To4(), VtepDevIndex: nic, Port: 8472}
	vxlan.HardwareAddr = net.HardwareAddr{2, 0, 0, 0, 0, 1}
	enslaved, wired, bridged := attrs(nic, "eth0"), attrs(nic, "eth0"), attrs(pod, "veth7")
	enslaved.MasterIndex, wired.NetNsID, bridged.MasterIndex, bridged.NetNsID = other, 2, nic, 1
	announced := route("169.254.169.254/32", "192.0.2.254", nic)
	announced.Protocol = unix.RTPROT_DHCP
	podsBridge := &netlink.Bridge{LinkAttrs: attrs(other, "cni0")}
	onBridge := attrs(nic, "cni0.9")
	onBridge.ParentIndex = other
	port := &netlink.Veth{LinkAttrs: attrs(pod, "veth7")}
	port.MasterIndex, port.NetNsID = other, 1
	onNIC := attrs(other, "eth0.9")
	onNIC.ParentIndex = nic
	vrf := &netlink.Vrf{LinkAttrs: attrs(other, "blue"), Table: 7}
	for name, tt := range map[string]struct {
		devices []netlink.Link
		routes  []netlink.Route
		seen    map[attachPoint][]observer
		routers []int
		skipped []string
	}{
		"a default route":                   {devices: []netlink.Link{eth0, link}, routes: []netlink.Route{own, usual}, routers: []int{nic}},
		"a default route beside an overlay": {devices: []netlink.Link{eth0, link, vxlan}, routes: []netlink.Route{own, usual}},
		"a default route beside an overlay that is not supported": {devices: []netlink.Link{eth0, link, cilium}, routes: []netlink.Route{own, usual},
			skipped: []string{"cilium_vxlan: each packet has its own tunnel key (external)"}},
		"a route to pods beside an overlay":     {devices: []netlink.Link{eth0, link, vxlan}, routes: []netlink.Route{own, usual, toPods}, routers: []int{nic}},
		"an announced route beside an overlay":  {devices: []netlink.Link{eth0, link, vxlan}, routes: []netlink.Route{own, usual, announced}},
		"an announced route":                    {devices: []netlink.Link{eth0, link}, routes: []netlink.Route{own, announced}, routers: []int{nic}},
		"a VLAN of the NIC":                     {devices: []netlink.Link{eth0, link, &netlink.Vlan{LinkAttrs: onNIC}}, routes: []netlink.Route{route("10.0.0.0/8", "198.51.100.1", other)}, routers: []int{other}},
		"a VLAN of the pods' bridge":            {devices: []netlink.Link{podsBridge, port, &netlink.Vlan{LinkAttrs: onBridge}}, routes: []netlink.Route{own, toPods}},
		"no gateway":                            {devices: []netlink.Link{eth0, link}, routes: []netlink.Route{own}},
		"several paths":                         {devices: []netlink.Link{eth0, link}, routes: []netlink.Route{{Dst: subnet("10.0.0.0/8"), Type: unix.RTN_UNICAST, MultiPath: []*netlink.NexthopInfo{{LinkIndex: nic, Gw: net.IPv4(192, 0, 2, 2)}}}}, routers: []int{nic}},
		"a blackhole":                           {devices: []netlink.Link{eth0, link}, routes: []netlink.Route{{Dst: subnet("10.0.0.0/8"), LinkIndex: nic, Gw: net.IPv4(192, 0, 2, 2), Type: unix.RTN_BLACKHOLE}}},
		"flannel's gateways are in the overlay": {devices: []netlink.Link{eth0, link, vxlan}, routes: []netlink.Route{own, route("10.244.1.0/24", "10.244.1.0", other)}},
		"WireGuard":                             {devices: []netlink.Link{&netlink.Wireguard{LinkAttrs: attrs(nic, "wg0")}, link}, routes: []netlink.Route{usual}},
		"a pod is the gateway":                  {devices: []netlink.Link{link}, routes: []netlink.Route{{Dst: subnet("10.244.0.7/32"), LinkIndex: pod, Type: unix.RTN_UNICAST}, route("10.9.0.1/32", "10.244.0.7", pod)}},
		"a veth is the NIC":                     {devices: []netlink.Link{&netlink.Veth{LinkAttrs: wired}, link}, routes: []netlink.Route{own, usual}, routers: []int{nic}},
		"the pods' bridge has a gateway":        {devices: []netlink.Link{&netlink.Bridge{LinkAttrs: attrs(nic, "cni0")}, &netlink.Veth{LinkAttrs: bridged}}, routes: []netlink.Route{own, usual}},
		"a bridge is the NIC":                   {devices: []netlink.Link{&netlink.Bridge{LinkAttrs: attrs(nic, "br0")}, link}, routes: []netlink.Route{own, usual}, routers: []int{nic}},
		"VRF": {devices: []netlink.Link{&netlink.Device{LinkAttrs: enslaved}, vrf, link}, routes: []netlink.Route{own, usual},
			skipped: []string{"eth0: it has the master blue, which the fast path would bypass"}},
		"nftables at its ingress": {devices: []netlink.Link{eth0, link}, routes: []netlink.Route{own, usual},
			seen:    map[attachPoint][]observer{{nic, false}: {{"nftables-netdev", "an nftables chain"}}},
			skipped: []string{"eth0: it has an nftables chain, which the fast path would bypass"}},
		"tcx at its ingress runs before": {devices: []netlink.Link{eth0, link}, routes: []netlink.Route{own, usual},
			seen: map[attachPoint][]observer{{nic, false}: {{"tcx", "a tcx program"}}}, routers: []int{nic}},
	} {
		t.Run(name, func(t *testing.T) {
			n := classify(tt.devices, tt.routes, observers{at: tt.seen}, nil)
			if !slices.Equal(n.routers, tt.routers) {
				t.Errorf("routers are %v, want %v", n.routers, tt.routers)
			}
			if d := cmp.Diff(tt.skipped, sentences(n.skipped)); d != "" {
				t.Errorf("skipped (-want +got):\n%s", d)
			}
			for _, device := range n.routers {
				if !slices.Contains(n.nics, device) || slices.Contains(n.veths, device) || !slices.Contains(n.veths, pod) {
					t.Errorf("NICs %v, pods' links %v", n.nics, n.veths)
				}
			}
		})
	}
}

// TestCilium checks that the fast path uses no device of a node with any of Cilium's programs. It must give that single reason,
// whatever else would be skipped, and whatever unseenBy allows.
func TestCilium(t *testing.T) {
	attrs := func(index int, name string) netlink.LinkAttrs {
		return netlink.LinkAttrs{Index: index, Name: name, MTU: 1500, Flags: net.FlagUp, EncapType: "ether", NetNsID: -1}
	}
	pod := &netlink.Veth{LinkAttrs: attrs(7, "lxc7")}
	pod.NetNsID = 1
	devices := []netlink.Link{&netlink.Device{LinkAttrs: attrs(2, "eth0")}, &netlink.Vxlan{LinkAttrs: attrs(3, "cilium_vxlan"), FlowBased: true}, pod}
	_, subnet, err := net.ParseCIDR("10.244.1.0/24")
	if err != nil {
		t.Fatal(err)
	}
	routes := []netlink.Route{{Dst: subnet, Gw: net.IPv4(192, 0, 2, 2), LinkIndex: 2, Type: unix.RTN_UNICAST}}
	for name, tt := range map[string]struct {
		programs []string
		skipped  []string
		routers  []int
	}{
		"Cilium":            {[]string{"other", "cil_to_netdev", "cil_from_netdev"}, []string{"all devices: Cilium's programs already handle the packets of pods (cil_to_netdev at the egress of eth0)"}, nil},
		"another's program": {[]string{"other", "my_cil_to_netdev"}, []string{"cilium_vxlan: each packet has its own tunnel key (external)"}, []int{2}},
	} {
		t.Run(name, func(t *testing.T) {
			var o observers
			for _, program := range tt.programs {
				o.findCilium(attachPoint{2, true}, "eth0", program)
			}
			n := classify(devices, routes, o, nil)
			if d := cmp.Diff(tt.skipped, sentences(n.skipped)); d != "" {
				t.Errorf("skipped (-want +got):\n%s", d)
			}
			if !slices.Equal(n.routers, tt.routers) || len(n.attachments([]int{7}, true, nil)) > 0 != (len(tt.routers) > 0) {
				t.Errorf("routers are %v, programs %v", n.routers, n.attachments([]int{7}, true, nil))
			}
		})
	}
}

// TestRouteMTUs checks that the fast path respects the MTUs of routes through the devices to which it redirects packets.
func TestRouteMTUs(t *testing.T) {
	const router, underlay, other = 2, 3, 4
	for name, tt := range map[string]struct {
		route netlink.Route
		mtu   int
	}{
		"under an overlay":  {netlink.Route{MTU: 1400, LinkIndex: underlay}, 1400 - overhead},
		"a router":          {netlink.Route{MTU: 1400, LinkIndex: router}, 1400},
		"several paths":     {netlink.Route{MTU: 1400, MultiPath: []*netlink.NexthopInfo{{LinkIndex: other}, {LinkIndex: router}}}, 1400},
		"another device":    {netlink.Route{MTU: 1400, LinkIndex: other}, 1500},
		"no MTU of its own": {netlink.Route{LinkIndex: router}, 1500},
	} {
		t.Run(name, func(t *testing.T) {
			n := node{mtu: 1500, routers: []int{router}, overlays: map[int]datapath.VXLANDevice{5: {NIC: underlay}}}
			n.addRouteMTUs([]netlink.Route{tt.route})
			if n.mtu != tt.mtu {
				t.Errorf("the MTU is %d, want %d", n.mtu, tt.mtu)
			}
		})
	}
}

// TestEndsWith checks that a foreign program behind any program of the fast path is found. A NIC may have two programs of the
// fast path.
func TestEndsWith(t *testing.T) {
	ours := func(id ebpf.ProgramID) bool { return id < 10 }
	for name, tt := range map[string]struct {
		programs []ebpf.ProgramID
		want     bool
	}{
		"none":                {nil, false},
		"only others":         {[]ebpf.ProgramID{10, 11}, false},
		"ours":                {[]ebpf.ProgramID{1, 2}, true},
		"others before ours":  {[]ebpf.ProgramID{10, 1, 2}, true},
		"another after ours":  {[]ebpf.ProgramID{1, 2, 10}, false},
		"another between two": {[]ebpf.ProgramID{1, 10, 2}, false},
	} {
		if got := endsWith(tt.programs, ours); got != tt.want {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
}

// TestBatch checks that one round of batches covers each attach point once, however many there are.
func TestBatch(t *testing.T) {
	for _, n := range []int{0, 1, inspectMax, inspectMax + 1, 3*inspectMax - 1} {
		all := make([]attachPoint, n)
		for i := range all {
			all[i].device = i
		}
		var round []attachPoint
		from := 0
		for range (n + inspectMax - 1) / inspectMax {
			var part []attachPoint
			part, from = batch(all, from)
			round = append(round, part...)
		}
		if !slices.Equal(round, all) {
			t.Errorf("a round of %d points inspects %d", n, len(round))
		}
		if part, _ := batch(all, from); len(part) > 0 && part[0] != all[0] {
			t.Errorf("the round after %d points begins with %v", n, part[0])
		}
	}
}

// TestChainOf parses chains as the kernel lists them, and truncated messages.
func TestChainOf(t *testing.T) {
	for _, tt := range []struct {
		name    string
		message []byte
		want    chain
		ok      bool
	}{
		{"ingress, one device", chainMessage(unix.NFPROTO_NETDEV, unix.NF_NETDEV_INGRESS, device(unix.NFTA_HOOK_DEV, "eth0")), chain{"netdev t c", false, []string{"eth0"}}, true},
		{"egress, two devices", chainMessage(unix.NFPROTO_NETDEV, unix.NF_NETDEV_EGRESS, attr(nftaHookDevs, device(1, "eth0"), device(nftaDevicePrefix, "cali"))),
			chain{"netdev t c", true, []string{"eth0", "cali*"}}, true},
		{"inet ingress", chainMessage(unix.NFPROTO_INET, nfInetIngress, device(unix.NFTA_HOOK_DEV, "eth0")), chain{"inet t c", false, []string{"eth0"}}, true},
		{"inet prerouting", chainMessage(unix.NFPROTO_INET, unix.NF_INET_PRE_ROUTING), chain{}, false},
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
			t.Errorf("chain of %q at %s: %t", c.devices, name, !want)
		}
	}
}

// FuzzChainOf checks that no message is read beyond its end.
func FuzzChainOf(f *testing.F) {
	f.Add(chainMessage(unix.NFPROTO_NETDEV, unix.NF_NETDEV_EGRESS, attr(nftaHookDevs, device(1, "eth0"), device(nftaDevicePrefix, "cali"))))
	f.Add(chainMessage(unix.NFPROTO_INET, nfInetIngress, device(unix.NFTA_HOOK_DEV, "eth0")))
	f.Add([]byte{unix.NFPROTO_NETDEV, 0, 0, 0, 4})
	f.Fuzz(func(t *testing.T, message []byte) {
		if c, ok := chainOf(message); ok && c.name == "" {
			t.Error("chain without a name")
		}
	})
}

// TestFlowtableOf parses flowtables as the kernel lists them, and other messages.
func TestFlowtableOf(t *testing.T) {
	hook := attr(nftaFlowtableHook, attr(1, []byte{0, 0, 0, 0}), attr(nftaFlowtableHookDevs, device(1, "eth0"), device(nftaDevicePrefix, "cali")))
	message := func(family byte) []byte {
		return slices.Concat([]byte{family, 0, 0, 0}, device(nftaFlowtableTable, "t"), device(nftaFlowtableName, "f"), hook)
	}
	for family, want := range map[byte]string{unix.NFPROTO_INET: "inet t f", unix.NFPROTO_IPV4: "ip t f", unix.NFPROTO_IPV6: "ip6 t f", unix.NFPROTO_BRIDGE: ""} {
		got, ok := flowtableOf(message(family))
		if ok != (want != "") || ok && !cmp.Equal(got, Flowtable{want, []string{"eth0", "cali*"}}) {
			t.Errorf("family %d: %+v, %t, want %q", family, got, ok, want)
		}
	}
	whole := message(unix.NFPROTO_INET)
	for n := range len(whole) {
		flowtableOf(whole[:n]) // must not read beyond the end
	}
}

// attr returns a netlink attribute made of parts.
func attr(kind uint16, parts ...[]byte) []byte {
	body := slices.Concat(parts...)
	b := binary.NativeEndian.AppendUint16(nil, uint16(4+len(body)))
	b = append(binary.NativeEndian.AppendUint16(b, kind), body...)
	return append(b, make([]byte, -len(b)&3)...)
}

func device(kind uint16, name string) []byte { return attr(kind, []byte(name+"\x00")) }

// chainMessage returns a message about chain c of table t, with a hook unless it is negative.
func chainMessage(family uint8, hook int, devices ...[]byte) []byte {
	m := slices.Concat([]byte{family, 0, 0, 0}, device(unix.NFTA_CHAIN_TABLE, "t"), device(unix.NFTA_CHAIN_NAME, "c"))
	if hook < 0 {
		return m
	}
	number := attr(unix.NFTA_HOOK_HOOKNUM, binary.BigEndian.AppendUint32(nil, uint32(hook)))
	return append(m, attr(unix.NFTA_CHAIN_HOOK|unix.NLA_F_NESTED, append([][]byte{number}, devices...)...)...)
}
