package doctor

import (
	"cmp"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/words"
)

// docker matches the names of bridges whose containers reach other machines by translated addresses, not by an overlay.
var docker = regexp.MustCompile(`^(docker0|docker_gwbridge|br-[0-9a-f]{12}|virbr\d+|lxcbr\d+|lxdbr\d+|incusbr\d+|podman\d+|cni-podman\d+)$`)

func isDocker(name string) bool { return docker.MatchString(name) }

// cni matches the names of devices that network plugins make.
var cni = regexp.MustCompile(`^(flannel|cali|vxlan\.calico|vxlan-v6\.calico|wireguard\.cali|wg-v6\.cali|cilium|lxc[0-9a-f]{6,}|lxc_health|antrea|cni\d|cbr\d|weave|vethwe|kube-|ovn-k8s|genev_sys|nodelocaldns|tunl0$|azv|eni[0-9a-f]{6,})`)

func isCNI(name string) bool { return cni.MatchString(name) }

// gateways returns the devices at which packets of pods enter this node's routing: veths of pods, and bridges that have
// veths of pods and an address. It leaves out a bridge to the LAN, as in Proxmox and LXC, whose containers have their
// router on the LAN.
func (f Facts) gateways() (all []Device) {
	for _, d := range f.Devices {
		if d.Pod != nil && d.Master == "" || d.Kind == "bridge" && len(d.Addresses) > 0 && len(f.podsOf(d.Name)) > 0 && !f.hasNIC(d.Name) {
			all = append(all, d)
		}
	}
	return all
}

// podBridges returns the bridges among the gateways, except for those of Docker and the like.
func (f Facts) podBridges() []Device {
	return slices.DeleteFunc(f.gateways(), func(d Device) bool { return d.Kind != "bridge" || isDocker(d.Name) })
}

// hasNIC reports whether a bridge leads to other machines: by a NIC, or by a device made of NICs. A bridge that sends
// an overlay's packets does too, for example by the veth of a node that is a container.
func (f Facts) hasNIC(bridge string) bool {
	return slices.ContainsFunc(f.Devices, func(d Device) bool {
		return d.Under == bridge || d.Master == bridge && (d.NIC != nil || slices.Contains([]string{"device", "bond", "team", "vlan"}, d.Kind))
	})
}

// podsOf returns the veths of pods that belong to a bridge.
func (f Facts) podsOf(bridge string) (all []Device) {
	for _, d := range f.Devices {
		if d.Pod != nil && d.Master == bridge {
			all = append(all, d)
		}
	}
	return all
}

func names(devices []Device) (all []string) {
	for _, d := range devices {
		all = append(all, d.Name)
	}
	return all
}

// lostBeside returns evidence for counters that grew, beside a fault that explains them.
func (f Facts) lostBeside(counters ...string) (all []Evidence) {
	for _, name := range counters {
		if n := f.count(name); n > 0 {
			source, counter := sourceOf(name)
			all = append(all, evidence(source+", "+counter+", in "+f.window(), "%d", n))
		}
	}
	return all
}

var noWay = []string{"IpExt.InNoRoutes", "Ip.InAddrErrors", "Ip6InNoRoutes"}

// overlayDown finds tunnel devices that are down, or whose NIC is, and devices of pods that are down.
func overlayDown(f Facts) (found []Finding) {
	add := func(d Device, severity Severity, fault, what, cost, do string, more ...Evidence) {
		found = append(found, Finding{Severity: severity, Fault: fault, What: what, Cost: cost, Do: do,
			Evidence: slices.Concat([]Evidence{evidence("ip -d link show "+d.Name, "%s, not up", d.Kind)}, more, f.lostBeside(noWay...))})
	}
	for _, d := range f.Devices {
		switch under, bound := f.device(d.Under); {
		case !d.Up && (d.Tunnelling || d.Class == v1alpha1.DeviceOverlay && isCNI(d.Name)):
			severity := Note
			if isCNI(d.Name) || len(d.Addresses) > 0 || d.Master != "" {
				severity = Serious
			}
			add(d, severity, "overlay", fmt.Sprintf("The overlay device %s is down.", d.Name),
				"The kernel removes its routes: packets of pods to other nodes have no route, or leave by the default route and get lost. If nothing uses the device, nothing is lost.",
				fmt.Sprintf("ip link set %s up   # then restart the CNI's daemon here: the kernel does not restore the routes. \"Address already in use\" means that another program has its UDP port: ss -ulpn. Else look for what took it down (slipstream doctor: link-managed; the logs of NetworkManager, systemd-networkd, the CNI)", d.Name))
		case d.Up && d.Tunnelling && bound && (!under.Up || under.NoCarrier):
			add(under, Serious, "NIC", fmt.Sprintf("%s is down, or has no carrier, and sends the packets of %s.", under.Name, d.Name),
				"No packet of the overlay leaves this node.", "ip link set "+under.Name+" up; dmesg | grep "+under.Name)
		case !d.Up && d.Kind == "bridge" && len(f.podsOf(d.Name)) > 0:
			add(d, Serious, "bridge", fmt.Sprintf("The bridge %s is down, and pods are connected to it.", d.Name),
				"Its pods cannot reach anything.", "ip link set "+d.Name+" up   # then restart the CNI's daemon here, if routes are missing")
		case !d.Up && d.Pod != nil:
			add(d, Warning, "pod", fmt.Sprintf("%s, which leads to a pod, is down.", d.Name), "The pod cannot reach anything.", "ip link set "+d.Name+" up   # or delete the pod, so that the CNI makes a new one")
		}
	}
	return found
}

// encapsulations maps the usual differences between the MTUs of NICs and overlays, in bytes, to the encapsulations.
var encapsulations = map[int]string{20: "IPIP", 50: "VXLAN, Geneve", 58: "Geneve with options", 60: "WireGuard", 70: "VXLAN over IPv6", 80: "WireGuard over IPv6"}

// overlayGone finds pods with an MTU that leaves room for an overlay's headers, on a node that has no overlay.
func overlayGone(f Facts) []Finding {
	if slices.ContainsFunc(f.Devices, func(d Device) bool { return d.Tunnelling || d.Class == v1alpha1.DeviceOverlay }) {
		return nil
	}
	for _, nic := range f.Devices {
		if nic.Class != v1alpha1.DeviceNIC {
			continue
		}
		for _, g := range f.gateways() {
			kind, ok := encapsulations[nic.MTU-g.MTU]
			if !ok || isDocker(g.Name) || strings.HasPrefix(g.Name, "kube-") { // kube-router makes tunnels when it needs them
				continue
			}
			finding := Finding{
				Severity: Note,
				What:     fmt.Sprintf("%s has the MTU for an overlay, and this node has no overlay device: it may have been deleted, or never created.", g.Name),
				Evidence: []Evidence{
					evidence("/sys/class/net/"+g.Name+"/mtu", "%d: %d less than %s, as for %s", g.MTU, nic.MTU-g.MTU, nic.Name, kind),
					evidence("ip -d link", "no vxlan, geneve, ipip, gre, wireguard or tun device"),
				},
				Cost: "If the cluster uses an overlay, pods here cannot reach pods on other nodes. If it routes without one, nothing is wrong, and the MTU could be larger.",
				Do:   "Read the log of the CNI's daemon on this node, and restart it: it makes the device when it starts. To see what the cluster expects of Flannel: kubectl get node NODE -o yaml | grep flannel",
			}
			if _, lost := loss(f.count(noWay...), f.count(received...)); lost {
				finding.Severity = Serious
				finding.Evidence = append(finding.Evidence, f.lostBeside(noWay...)...)
			}
			return []Finding{finding}
		}
	}
	return nil
}

// overlayLocal finds overlays that send from an address that this node does not have: answers go to another machine, or to none.
func overlayLocal(f Facts) (found []Finding) {
	for _, d := range f.Devices {
		if !d.Up || !d.Local.IsValid() || f.has(d.Local) {
			continue
		}
		found = append(found, Finding{
			Severity: Serious,
			What:     fmt.Sprintf("%s sends from %s, an address that this node does not have.", d.Name, d.Local),
			Evidence: []Evidence{evidence("ip -d link show "+d.Name, "local %s", d.Local), evidence("ip addr", "no device has it")},
			Cost:     "Other nodes send their packets for the pods here to that address, where this node does not receive them.",
			Do:       "Correct the address in the configuration of the CNI (Calico: IP_AUTODETECTION_METHOD; Flannel: --iface, --public-ip), and restart its daemon on this node",
		})
	}
	return found
}

// overlayNIC finds overlays that are bound to a device which does not lead to the other nodes: a network plugin took a
// management NIC or a bridge of containers for the node's NIC.
func overlayNIC(f Facts) (found []Finding) {
	for _, d := range f.Devices {
		if !d.Up || d.Elsewhere == "" {
			continue
		}
		finding := Finding{
			Severity: Warning,
			What:     fmt.Sprintf("%s is bound to %s, and the routes to the other nodes lead through %s.", d.Name, d.Under, d.Elsewhere),
			Evidence: []Evidence{
				evidence("ip -d link show "+d.Name, "dev %s", d.Under),
				evidence("ip route get, for all addresses in bridge fdb show dev "+d.Name, "dev %s", d.Elsewhere),
				evidence("packets of "+d.Name+", in "+f.window(), "%d sent, %d received", d.Window.Tx, d.Window.Rx),
			},
			Cost: fmt.Sprintf("The kernel sends the overlay's packets by %s all the same. Unless the other nodes are reached there too, they get lost.", d.Under),
			Do:   "Name the right NIC in the configuration of the CNI (Calico: IP_AUTODETECTION_METHOD=interface=NIC; Flannel: --iface=NIC), and restart its daemon on this node",
		}
		if d.Window.Tx > 0 && d.Window.Rx == 0 {
			finding.Severity = Serious
		}
		found = append(found, finding)
	}
	return found
}

// hairpin finds bridges whose pods cannot reach themselves through services: the bridge does not send a packet back to the port
// that it came from.
func hairpin(f Facts) []Finding {
	bridges := slices.DeleteFunc(f.podBridges(), func(bridge Device) bool {
		return !slices.ContainsFunc(f.podsOf(bridge.Name), func(d Device) bool { return d.NoHairpin })
	})
	if len(bridges) == 0 || f.KubeProxy == "" {
		return nil
	}
	port := f.podsOf(bridges[0].Name)[0].Name
	return []Finding{{
		Severity: Note,
		What:     fmt.Sprintf("Pods at %s cannot reach themselves through a service: hairpin mode is off.", some(names(bridges))),
		Evidence: []Evidence{evidence("/sys/class/net/"+port+"/brport/hairpin_mode", "0"), evidence("rules of Kubernetes", "%s", f.KubeProxy)},
		Cost:     "If kube-proxy chooses, as the backend, the same pod that opens the connection, the connection times out: always for a service with one pod, sometimes for others. Other connections work.",
		Do:       "\"hairpinMode\": true in the configuration of the CNI (the plugin bridge, or Flannel's delegate), and create the pods again; for a trial: bridge link set dev " + port + " hairpin on",
	}}
}

func isIPv4(p netip.Prefix) bool { return p.Addr().Is4() }

// carriesPods reports whether a tunnel is likely to carry packets of the pods behind a device.
func (d Device) carriesPods(gateway Device) bool {
	if !d.Up || d.Under == "" {
		return false
	}
	for _, network := range gateway.Addresses {
		if slices.ContainsFunc(d.Addresses, func(p netip.Prefix) bool { return network.Contains(p.Addr()) }) {
			return true
		}
	}
	return !isDocker(gateway.Name) && (isCNI(d.Name) || slices.Contains([]string{"vxlan", "geneve", "ipip"}, d.Kind))
}

// beside reports whether an overlay only carries the IPv6 of pods, and another one their IPv4. The pods' MTU is then
// meant for IPv4. The overlay's own may be smaller, because IPv6 routers always tell the sender.
func (f Facts) beside(overlay, gateway Device) bool {
	if len(overlay.Addresses) == 0 || slices.ContainsFunc(overlay.Addresses, isIPv4) {
		return false
	}
	return slices.ContainsFunc(gateway.Addresses, isIPv4) || slices.ContainsFunc(f.Devices, func(d Device) bool {
		return d.carriesPods(gateway) && slices.ContainsFunc(d.Addresses, isIPv4)
	})
}

// podMTU finds pods that send packets which are too large for the overlay.
func podMTU(f Facts) (found []Finding) {
	groups := []Device{{}} // the first group has the pods that belong to no bridge
	for _, g := range f.gateways() {
		if g.Kind == "bridge" {
			groups = append(groups, g)
		}
	}
	for _, g := range groups {
		pods := f.podsOf(g.Name)
		for _, overlay := range f.Devices {
			if !overlay.carriesPods(g) || f.beside(overlay, g) {
				continue
			}
			var large []Device
			var read []Evidence
			for _, p := range pods {
				mtu, of := p.MTU, "/sys/class/net/"+p.Name+"/mtu"
				if p.Pod.MTU > 0 {
					mtu, of = p.Pod.MTU, "MTU of the default route of the pod behind "+p.Name+" ("+p.Pod.Device+")"
				}
				if mtu <= overlay.MTU || p.Pod.MTU == 0 && (strings.HasPrefix(p.Name, "lxc") || p.Kind == "netkit") { // Cilium limits the route, not the device
					continue
				}
				if large = append(large, p); len(large) <= 3 {
					read = append(read, evidence(of, "%d", mtu))
				}
			}
			if len(large) == 0 {
				continue
			}
			finding := Finding{
				Severity: Warning,
				Fault:    overlay.Name,
				What:     fmt.Sprintf("Pods send packets that are too large for %s, which carries them to other nodes: %s.", overlay.Name, some(names(large))),
				Evidence: slices.Concat(read, []Evidence{evidence("/sys/class/net/"+overlay.Name+"/mtu", "%d", overlay.MTU)}, f.lostBeside("Ip.FragFails", "Ip.FragCreates", "Ip6FragFails", "Ip.OutDiscards")),
				Cost: fmt.Sprintf("TCP of pods works as long as ICMP \"fragmentation needed\" gets from this node to the pod; where a rule drops it, connections open, and hang at the first large transfer. UDP is fragmented or lost. To see it, in a pod: ping -M do -s %d POD, on another node",
					overlay.MTU-28),
				Do: fmt.Sprintf("Set MTU %d in the configuration of the CNI, and create the pods again; for a trial in one pod: nsenter -t PID -n ip link set eth0 mtu %[1]d", overlay.MTU),
			}
			if _, lost := loss(f.count("Ip.FragFails", "Ip6FragFails"), f.count("Ip.OutRequests", "Ip.ForwDatagrams", "Ip6OutRequests", "Ip6OutForwDatagrams")); lost {
				finding.Severity = Serious
			}
			found = append(found, finding)
		}
	}
	return found
}

// vtep finds forwarding entries of VXLAN devices that cannot be right.
func vtep(f Facts) (found []Finding) {
	const zero = "00:00:00:00:00:00" // any destination
	for _, d := range f.Devices {
		if d.Kind != "vxlan" || !d.Up {
			continue
		}
		var wrong []Evidence
		macs := make(map[string]netip.Addr)
		for _, t := range d.FDB {
			entry := "bridge fdb show dev " + d.Name + ", " + t.MAC
			switch other, twice := macs[t.MAC]; {
			case t.MAC == d.MAC:
				wrong = append(wrong, evidence(entry, "leads to %s, and is the MAC address of %s itself", t.To, d.Name))
			case f.has(t.To):
				wrong = append(wrong, evidence(entry, "leads to %s, which is an address of this node", t.To))
			case twice && other != t.To && t.MAC != zero:
				wrong = append(wrong, evidence(entry, "leads to %s and to %s", other, t.To))
			}
			macs[t.MAC] = t.To
		}
		holders := make(map[string]netip.Addr) // a network plugin makes one entry for a node; another router may have several addresses
		for _, n := range d.Neighbours {
			other, twice := holders[n.MAC]
			if twice && isCNI(d.Name) && other.Is4() == n.IP.Is4() && slices.ContainsFunc(d.FDB, func(t FDBEntry) bool { return t.MAC == n.MAC }) {
				wrong = append(wrong, evidence("ip neigh show dev "+d.Name+", "+n.MAC, "is the address of %s and of %s: two nodes", other, n.IP))
			}
			holders[n.MAC] = n.IP
		}
		if len(wrong) == 0 {
			continue
		}
		found = append(found, Finding{
			Severity: Serious,
			Fault:    d.Name,
			What:     fmt.Sprintf("Nodes share a VTEP address, or entries of %s point at the wrong node.", d.Name),
			Evidence: wrong[:min(len(wrong), 5)],
			Cost:     "Packets to pods on one of the nodes go to the other, or are dropped. Virtual machines that were cloned have the same machine-id, from which systemd computes the MAC addresses of such devices.",
			Do: "With the cloned node drained: rm -f /etc/machine-id /var/lib/dbus/machine-id; systemd-machine-id-setup; reboot   # its DHCP client ID changes with it, and so may its address. " +
				"If all nodes have published one address, as the first NIC of Vagrant's machines has: tell Flannel the NIC (--iface). If an entry is stale: restart the CNI's daemon here",
		})
	}
	return found
}

// otherMAC finds overlays that receive packets for another MAC address than their own.
func otherMAC(f Facts) (found []Finding) {
	for _, d := range f.Devices {
		severity, lost := loss(d.Window.OtherHost, d.Window.Rx)
		if !d.Tunnelling || !lost || d.Master != "" { // a bridge sends them on
			continue
		}
		found = append(found, Finding{
			Severity: severity,
			Fault:    d.Name,
			What:     fmt.Sprintf("Packets arrive at %s for another MAC address than its own, and the kernel drops them.", d.Name),
			Evidence: []Evidence{
				evidence("ip -s -s link show "+d.Name+", otherhost, in "+f.window(), "%d of %d packets", d.Window.OtherHost, d.Window.Rx),
				evidence("/sys/class/net/"+d.Name+"/address", "%s", d.MAC),
			},
			Cost: "Other nodes have stored an address that this device no longer has, or never had: nothing that they send reaches pods here, and nothing tells them.",
			Do: fmt.Sprintf("Restart the CNI's daemon here: it publishes the address that the device has. Then find what changes it: systemd-udevd (MACAddressPolicy=none in a .link file for %s), NetworkManager, a second daemon. "+
				"slipstream doctor hosts:THIS,OTHER shows what the other has stored", d.Name),
		})
	}
	return found
}

// blackhole finds routes that drop packets to other nodes' pods. A network plugin may have such a route for the addresses of
// this node's own pods.
func blackhole(f Facts) (found []Finding) {
	for _, route := range f.Blackholes {
		for _, d := range f.Devices {
			i := slices.IndexFunc(d.Neighbours, func(n Neighbour) bool { return route.Contains(n.IP) })
			if !d.Tunnelling || i < 0 || slices.ContainsFunc(d.Addresses, func(p netip.Prefix) bool { return route.Contains(p.Addr()) }) {
				continue
			}
			found = append(found, Finding{
				Severity: Serious,
				What:     fmt.Sprintf("A route drops all packets to %s, which is behind %s.", route, d.Name),
				Evidence: []Evidence{
					evidence("ip route show type blackhole; unreachable; prohibit", "%s", route),
					evidence("ip neigh show dev "+d.Name, "%s has %s", d.Neighbours[i].IP, d.Neighbours[i].MAC),
				},
				Cost: "Pods here cannot reach a pod with such an address. A blackhole tells the sender nothing.",
				Do:   fmt.Sprintf("ip route get %s   # then find what made the route: the network plugin, if the addresses were once this node's; restart its daemon, or ip route del blackhole %s", d.Neighbours[i].IP, route),
			})
		}
	}
	return found
}

// podGateway finds pods that cannot send, because their gateway does not answer, or because they have stored a wrong
// MAC address for it.
func podGateway(f Facts) (found []Finding) {
	for _, d := range f.Devices {
		if d.Pod == nil || !d.Pod.Gateway.IsValid() || !d.Up {
			continue
		}
		bridge, _ := f.device(d.Master)
		mine := f.has(d.Pod.Gateway) || d.Master == ""
		// Open vSwitch is the master of all its ports, and one of these has the address (Antrea's antrea-gw0, OpenShift SDN's tun0).
		right := slices.ContainsFunc(f.Devices, func(h Device) bool {
			return h.MAC == d.Pod.GatewayMAC && (h.Name == d.Name || h.Name == d.Master || h.has(d.Pod.Gateway))
		})
		entry := "ip neigh, in the pod behind " + d.Name
		finding := Finding{Severity: Serious, Cost: "Nothing that the pod sends leaves it, except to addresses of its own network."}
		switch {
		case d.Pod.GatewayFailed:
			finding.Fault = "no answer"
			if !d.Pod.GatewayAsked {
				finding.Severity = Note
				finding.Cost += " The kernel keeps such an entry: it may be old, if the pod sends nothing."
			}
			finding.What = fmt.Sprintf("Nobody answers for the gateway of the pod behind %s.", d.Name)
			finding.Evidence = []Evidence{evidence(entry, "%s failed or incomplete", d.Pod.Gateway), evidence("ip addr; ip route", "this node has the address: %v", f.has(d.Pod.Gateway))}
			finding.Do = fmt.Sprintf("ip route get %s; sysctl net/ipv4/conf/%s/proxy_arp net.ipv4.conf.all.arp_ignore   # arp_ignore of 2 or more keeps a node from answering; without the address, the node answers only with proxy_arp=1 and a route to it: Calico needs a default route, or ip route add 169.254.1.1 dev lo. Strict rp_filter also keeps a node from answering", d.Pod.Gateway, d.Name)
		case mine && d.Pod.GatewayMAC != "" && !right:
			finding.Fault = "MAC address"
			finding.What = fmt.Sprintf("The pod behind %s has a wrong MAC address of its gateway.", d.Name)
			finding.Evidence = []Evidence{evidence(entry, "%s has %s", d.Pod.Gateway, d.Pod.GatewayMAC), evidence("/sys/class/net/"+cmp.Or(d.Master, d.Name)+"/address", "%s", cmp.Or(bridge.MAC, d.MAC))}
			finding.Do = "Delete the pod, so that the CNI makes a new one. Then find what changed the address of the device: systemd-udevd (MACAddressPolicy=none in a .link file for veths), NetworkManager"
		default:
			continue
		}
		found = append(found, finding)
	}
	return found
}

// podSubnet finds a bridge whose pods' addresses are not in the subnet that Flannel gave to this node.
func podSubnet(f Facts) (found []Finding) {
	bridge, ok := f.device("cni0")
	if !ok || len(f.podsOf(bridge.Name)) == 0 || !slices.ContainsFunc(bridge.Addresses, isIPv4) {
		return nil
	}
	for _, d := range f.Devices {
		i := slices.IndexFunc(d.Addresses, isIPv4)
		if d.Kind != "vxlan" || !strings.HasPrefix(d.Name, "flannel.") || i < 0 {
			continue
		}
		given := d.Addresses[i].Addr()
		if slices.ContainsFunc(bridge.Addresses, func(p netip.Prefix) bool { return p.Contains(given) }) {
			continue
		}
		found = append(found, Finding{
			Severity: Serious,
			What:     fmt.Sprintf("Pods behind %s have addresses of another network than this node's.", bridge.Name),
			Evidence: []Evidence{
				evidence("ip addr show "+bridge.Name, "%s", bridge.Addresses[slices.IndexFunc(bridge.Addresses, isIPv4)]),
				evidence("ip addr show "+d.Name, "%s, the first address of the node's network", given),
			},
			Cost: "Other nodes send packets for these pods to the node that has the network, or nowhere: only pods here reach each other.",
			Do: fmt.Sprintf("ls /etc/cni/net.d   # the first file by name counts: remove what another network plugin left; cat /run/flannel/subnet.env; then, with the node drained: ip link del %s, and delete its pods, so that both are made again",
				bridge.Name),
		})
	}
	return found
}

// noNeighbour finds other nodes that a route to pods leads to, but whose MAC address behind the overlay is unknown.
func noNeighbour(f Facts) (found []Finding) {
	for _, d := range f.Devices {
		if !d.Up || !d.Tunnelling || len(d.Unresolved) == 0 {
			continue
		}
		var read []Evidence
		for _, ip := range d.Unresolved[:min(len(d.Unresolved), 5)] {
			read = append(read, evidence("ip neigh show dev "+d.Name, "%s failed or incomplete, and a route has it as its gateway", ip))
		}
		found = append(found, Finding{
			Severity: Serious,
			Fault:    d.Name,
			What:     fmt.Sprintf("%s lacks the MAC addresses of %s.", d.Name, words.Count(len(d.Unresolved), "other node")),
			Evidence: read,
			Cost:     "Packets to pods on these nodes are dropped. Network plugins enter the addresses themselves, because nobody answers requests for them.",
			Do:       "Restart the CNI's daemon here, which enters them again; and look in its log for why it did not",
		})
	}
	return found
}

// ipForward finds that packets of pods are not forwarded.
func ipForward(f Facts) []Finding {
	var off []Device
	serious := false
	_, lost := loss(f.count("Ip.InAddrErrors", "Ip6InAddrErrors"), f.count(received...))
	for _, d := range f.gateways() {
		if len(d.NotForwarding) > 0 && d.Up {
			off, serious = append(off, d), true
		}
	}
	for _, d := range f.Devices {
		if d.Tunnelling && d.Up && len(d.NotForwarding) > 0 && (isCNI(d.Name) && len(d.Addresses) > 0 || lost) {
			off, serious = append(off, d), serious || isCNI(d.Name) || lost
		}
	}
	if len(off) == 0 {
		return nil
	}
	setting := "net.ipv4.ip_forward"
	read := []Evidence{evidence("/proc/sys/net/ipv4/ip_forward", "%s", settingOr(f.Settings[setting]))}
	do := "sysctl -w net.ipv4.ip_forward=1"
	ofIPv4 := func(d Device) bool {
		return slices.ContainsFunc(d.NotForwarding, func(file string) bool { return strings.Contains(file, "/net/ipv4/") })
	}
	if f.Settings[setting] != "0" || !slices.ContainsFunc(off, ofIPv4) {
		do = ""
		for _, d := range off {
			for _, file := range d.NotForwarding {
				if len(read) < 5 {
					read = append(read, evidence(file, "0"))
					do += "sysctl -w " + strings.TrimPrefix(file, "/proc/sys/") + "=1; "
				}
			}
		}
		do = strings.TrimSuffix(do, "; ")
	}
	severity := Warning
	if serious {
		severity = Serious
	}
	return []Finding{{
		Severity: severity,
		What:     fmt.Sprintf("This node does not forward packets that arrive at %s.", some(names(off))),
		Evidence: append(read, f.lostBeside("Ip.InAddrErrors", "Ip6InAddrErrors")...),
		Cost:     "The kernel drops packets between pods and other nodes, and between pods and services.",
		Do:       do + "   # and in /etc/sysctl.d; look for what sets it to 0: a hardening guide, sysctl --system at boot, systemd-networkd",
	}}
}

// forwardPolicy finds base chains whose policy drops forwarded packets.
func forwardPolicy(f Facts) (found []Finding) {
	// Docker's own policy does not concern its containers, whose packets its rules accept by device.
	carries := slices.ContainsFunc(f.gateways(), func(d Device) bool { return !isDocker(d.Name) }) || slices.ContainsFunc(f.Devices, func(d Device) bool { return d.Tunnelling && isCNI(d.Name) })
	for _, c := range f.Chains {
		severity, lost := loss(c.Dropped, c.Dropped+f.count("Ip.ForwDatagrams", "Ip6OutForwDatagrams"))
		switch {
		case c.Hook != hookForward || !c.Drops || !carries || !lost && (c.Opens || strings.HasPrefix(c.Name, "nft ip6 ")): // pods may have no IPv6
			continue
		case !lost && c.Counted:
			severity = Warning // nothing was sent
		case !lost:
			severity = Serious
		}
		how, met := "policy drop", "policy"
		if c.ByRule {
			how, met = "a rule drops or rejects everything that the rules before it do not accept", "rule"
		}
		opens := "no rule accepts new connections of pods"
		if c.ByRule {
			opens = "none of these accepts new connections of pods"
		}
		if c.Opens {
			opens = "rules accept some new connections"
		}
		dropped := evidence("packets that met the "+met, "not counted by this chain")
		if c.Counted {
			dropped = evidence("packets that met the "+met+", in "+f.window(), "%d", c.Dropped)
		}
		found = append(found, Finding{
			Severity: severity,
			Fault:    c.Name,
			What:     fmt.Sprintf("The chain %s drops forwarded packets by its %s.", c.Name, met),
			Evidence: []Evidence{evidence(c.Name, "%s; %s", how, opens), dropped},
			Cost:     "Pods cannot reach other nodes or services, unless another rule of the chain accepts their packets. A packet must be accepted by every chain of the forward hook.",
			Do: "For a trial, accept the pods' addresses: iptables -I FORWARD -s POD_CIDR -j ACCEPT; iptables -I FORWARD -d POD_CIDR -j ACCEPT (the same iptables, legacy or nft; for a table of its own: nft insert rule). " +
				"To keep it: in the configuration of what set the policy (Docker, ufw, firewalld); or iptables -P FORWARD ACCEPT, if nothing relies on the policy",
		})
	}
	return found
}

// deafVXLAN returns a VXLAN device that sent packets in the window, if none of them received any.
func (f Facts) deafVXLAN() (deaf Device, ok bool) {
	for _, d := range f.Devices {
		switch {
		case d.Kind != "vxlan" || !d.Up:
		case d.Window.Rx > 0:
			return d, false
		case d.Window.Tx > 0:
			deaf, ok = d, true
		}
	}
	return deaf, ok
}

// ruleDrops finds rules that drop packets, if they have counters. Rules drop on purpose, but often nobody meant them to drop
// packets of pods, or all packets for a VXLAN device.
func ruleDrops(f Facts) (found []Finding) {
	deaf, isDeaf := f.deafVXLAN()
	for _, c := range f.Chains {
		dropped := c.RuleDropped
		if c.ByRule { // forward-policy judges that rule
			dropped -= min(dropped, c.Dropped)
		}
		finding := Finding{
			Severity: Note,
			Fault:    c.Name,
			What:     fmt.Sprintf("Rules of %s drop packets.", c.Name),
			Cost:     "If they are packets of pods, connections of pods fail. The rules may be right: this counts everything that they drop.",
		}
		if c.Hook == hookInput {
			if !isDeaf {
				continue
			}
			dropped += c.Dropped
			finding.Severity = Warning
			finding.What = fmt.Sprintf("%s drops packets, and the VXLAN device %s of this node receives nothing.", c.Name, deaf.Name)
			finding.Cost = fmt.Sprintf("If they are packets to UDP port %d, pods of other nodes do not reach those here.", deaf.VXLANPort)
			finding.Do = fmt.Sprintf("For a trial: iptables -I INPUT -p udp --dport %d -j ACCEPT   # then the same in the configuration of ufw or firewalld; slipstream doctor hosts:OTHER,THIS shows whether the port is open", deaf.VXLANPort)
		} else if len(f.gateways()) == 0 {
			continue
		}
		if _, lost := loss(dropped, dropped+f.count(received...)); !lost {
			continue
		}
		if finding.Do == "" {
			finding.Do = "nft list ruleset; iptables-save -c   # which rule's counter grows, and whether it should; for a trial, accept the pods' devices before it"
		}
		finding.Evidence = []Evidence{evidence(c.Name+", counters of rules that drop or reject, in "+f.window(), "%d", c.RuleDropped)}
		if c.Hook == hookInput && c.Dropped > 0 {
			finding.Evidence = append(finding.Evidence, evidence(c.Name+", packets that met the policy, in "+f.window(), "%d", c.Dropped))
		}
		found = append(found, finding)
	}
	return found
}

// bridgeNF finds bridges of pods whose packets bypass the rules that translate addresses of services.
func bridgeNF(f Facts) []Finding {
	const setting = "net.bridge.bridge-nf-call-iptables"
	value, there := f.Settings[setting]
	bridges := f.podBridges()
	if len(bridges) == 0 || there && value != "0" || !there && f.KubeProxy == "" {
		return nil
	}
	finding := Finding{
		Severity: Warning,
		What:     fmt.Sprintf("Packets between pods of one bridge bypass iptables: %s.", some(names(bridges))),
		Evidence: []Evidence{evidence("/proc/sys/net/bridge/bridge-nf-call-iptables", "%s", value)},
		Cost:     "A pod that connects to a service whose backend is on the same node gets a reply from the backend's own address, and ignores it: the connection times out. Connections to backends on other nodes work.",
		Do:       "sysctl -w " + setting + "=1   # and in /etc/sysctl.d",
	}
	if !there {
		finding.Evidence = []Evidence{evidence("/proc/sys/net/bridge", "missing: the module br_netfilter is not loaded")}
		finding.Do = "modprobe br_netfilter; " + finding.Do + "; echo br_netfilter > /etc/modules-load.d/br_netfilter.conf"
	}
	if f.KubeProxy == "" {
		finding.Severity = Note
		finding.Evidence = append(finding.Evidence, evidence("nft list chains; iptables-save", "no chain of kube-proxy here"))
	} else {
		finding.Evidence = append(finding.Evidence, evidence("rules of kube-proxy or the kubelet", "%s", f.KubeProxy))
	}
	return []Finding{finding}
}

// podName matches the names that network plugins give to devices of pods.
var podName = regexp.MustCompile(`^(cali|lxc|veth|eni|azv|oci)`)

// patterns returns what matches the names of devices: one pattern for all devices of pods that a plugin names alike.
func patterns(devices []Device) (all []string) {
	for _, d := range devices {
		pattern := d.Name
		if prefix := podName.FindString(d.Name); prefix != "" {
			pattern = prefix + "*"
		}
		if !slices.Contains(all, pattern) {
			all = append(all, pattern)
		}
	}
	slices.Sort(all)
	return all
}

// linkManaged finds devices of network plugins that another program manages, too.
func linkManaged(f Facts) (found []Finding) {
	by := make(map[string][]Device)
	for _, d := range f.Devices {
		if d.Manager != "" && (isCNI(d.Name) || d.Pod != nil && (d.Master == "" || isCNI(d.Master))) {
			by[d.Manager] = append(by[d.Manager], d)
		}
	}
	for _, manager := range []string{"NetworkManager", "systemd-networkd"} {
		devices := by[manager]
		if len(devices) == 0 {
			continue
		}
		finding := Finding{
			Severity: Warning,
			Fault:    manager,
			What:     fmt.Sprintf("%s manages devices of the network plugin: %s.", manager, some(names(devices))),
			Cost:     "When it starts, or when its configuration is read again, it takes devices down, changes their MAC addresses, and removes addresses, routes and rules that it did not make. Other nodes then send to a MAC address that is gone.",
			Do:       "In /etc/NetworkManager/conf.d/cni.conf: [keyfile] unmanaged-devices=interface-name:" + strings.Join(patterns(devices), ";interface-name:") + "   # then systemctl reload NetworkManager",
		}
		if manager == "systemd-networkd" {
			finding.Do = "In /etc/systemd/network/05-cni.network: [Match] Name=" + strings.Join(patterns(devices), " ") + " [Link] Unmanaged=yes; in networkd.conf: ManageForeignRoutes=no, ManageForeignRoutingPolicyRules=no; " +
				"in a .link file for flannel*: MACAddressPolicy=none   # then systemctl restart systemd-networkd, which reads networkd.conf, too"
		}
		for _, d := range devices[:min(len(devices), 3)] {
			finding.Evidence = append(finding.Evidence, evidence(d.ManagerFile, "managed: %s", d.Name))
		}
		found = append(found, finding)
	}
	return found
}

// iptablesTwice finds rules of both kinds of iptables: packets must pass both, and each tool shows only its own.
func iptablesTwice(f Facts) []Finding {
	if f.Rules["legacy"] == 0 || f.Rules["nft"] == 0 {
		return nil
	}
	severity := Note
	if len(f.gateways()) > 0 || f.KubeProxy != "" {
		severity = Warning
	}
	return []Finding{{
		Severity: severity,
		What:     "There are rules of iptables-legacy and of iptables-nft at the same time.",
		Evidence: []Evidence{evidence("/proc/net/ip_tables_names, iptables-legacy-save", "%d rules", f.Rules["legacy"]), evidence("nft list ruleset, iptables-nft-save", "%d rules", f.Rules["nft"])},
		Cost:     "Every packet passes both. A rule that one program adds in one kind cannot accept what the other kind drops, and neither tool shows the other's rules: rules that are left over from before an update are never removed.",
		Do:       "Compare iptables-legacy-save and iptables-nft-save: which of them does the CNI's daemon write now (iptables --version in its pod)? Then switch all programs to one kind (update-alternatives --config iptables), and reboot, which removes the other's rules",
	}}
}
