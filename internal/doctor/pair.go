package doctor

import (
	"fmt"
	"net/netip"
	"slices"
)

// overlayDiffers is the rule that compares the overlays of two machines.
const overlayDiffers = "overlay-differs"

// Peer is a machine that is prepared for comparisons with others. It is prepared once, because a cluster has many pairs
// of nodes.
type Peer struct {
	name      string
	addresses []netip.Addr
	bridges   []Device // of perNode, if pods are behind them
	overlays  []storedOverlay
}

// storedOverlay is a VXLAN device with the entries that its machine has for others, by their addresses.
type storedOverlay struct {
	Device
	fdb        map[netip.Addr][]FDBEntry
	neighbours map[netip.Addr][]Neighbour
}

// NewPeer returns a machine for comparisons.
func NewPeer(name string, f Facts) Peer {
	p := Peer{name: name}
	for _, g := range f.gateways() {
		if slices.Contains(perNode, g.Name) {
			p.bridges = append(p.bridges, g)
		}
	}
	for _, d := range f.Devices {
		for _, a := range d.Addresses {
			p.addresses = append(p.addresses, a.Addr())
		}
		if d.Kind != "vxlan" {
			continue
		}
		o := storedOverlay{d, make(map[netip.Addr][]FDBEntry), make(map[netip.Addr][]Neighbour)}
		for _, e := range d.FDB {
			o.fdb[e.To] = append(o.fdb[e.To], e)
		}
		for _, n := range d.Neighbours {
			o.neighbours[n.IP] = append(o.neighbours[n.IP], n)
		}
		p.overlays = append(p.overlays, o)
	}
	return p
}

// entriesTo returns the forwarding entries that lead to a machine.
func (o storedOverlay) entriesTo(p Peer) (all []FDBEntry) {
	for _, a := range p.addresses {
		all = append(all, o.fdb[a]...)
	}
	return all
}

// ExaminePair compares the overlay of one machine with the entries that the other one has for it.
func ExaminePair(c, s Peer) (found []Finding) {
	client, server := c.name, s.name
	found = sameSubnet(c, s)
	for _, d := range c.overlays {
		if d.VNI == 0 {
			continue
		}
		entries := d.entriesTo(s)
		o := slices.IndexFunc(s.overlays, func(o storedOverlay) bool { return o.Name == d.Name })
		if o < 0 { // devices with the same VNI are for IPv4 and IPv6
			o = slices.IndexFunc(s.overlays, func(o storedOverlay) bool { return o.VNI == d.VNI })
		}
		var wrong []Evidence
		read := func(machine, from, format string, args ...any) {
			wrong = append(wrong, evidence(from+" of "+machine, format, args...))
		}
		if o < 0 {
			if len(entries) > 0 {
				read(client, "bridge fdb show dev "+d.Name, "%s leads to %s", entries[0].MAC, entries[0].To)
				read(server, "ip -d link show type vxlan", "none with VNI %d", d.VNI)
				found = append(found, differs(client, server, d.Name, wrong))
			}
			continue
		}
		other := s.overlays[o]
		link := "ip -d link show "
		for _, p := range []struct {
			what       string
			mine, your int
		}{{"VNI", d.VNI, other.VNI}, {"dstport", int(d.VXLANPort), int(other.VXLANPort)}} {
			if p.mine != p.your {
				read(client, link+d.Name, "%s %d", p.what, p.mine)
				read(server, link+other.Name, "%s %d", p.what, p.your)
			}
		}
		for _, e := range entries {
			if e.MAC != "00:00:00:00:00:00" && e.MAC != other.MAC && other.Master == "" {
				read(client, "bridge fdb show dev "+d.Name, "%s leads to %s", e.MAC, e.To)
				read(server, "/sys/class/net/"+other.Name+"/address", "%s", other.MAC)
			}
		}
		for _, a := range other.Addresses {
			for _, n := range d.neighbours[a.Addr()] {
				if n.MAC != other.MAC {
					read(client, "ip neigh show dev "+d.Name, "%s has %s", n.IP, n.MAC)
					read(server, "/sys/class/net/"+other.Name+"/address", "%s", other.MAC)
				}
			}
		}
		if len(wrong) > 0 {
			found = append(found, differs(client, server, d.Name, wrong))
		} else if d.MTU != other.MTU && d.Under != "" && other.Under != "" {
			f := differs(client, server, d.Name, []Evidence{evidence("/sys/class/net/"+d.Name+"/mtu of "+client, "%d", d.MTU), evidence("/sys/class/net/"+other.Name+"/mtu of "+server, "%d", other.MTU)})
			f.Severity = Warning
			f.What = fmt.Sprintf("The MTU of %s differs between the two machines.", d.Name)
			f.Cost = "The machine with the larger MTU sends packets that the other's overlay drops, or that are fragmented, unless both ends of a connection announce the smaller MSS."
			f.Do = "Set the same MTU on all nodes, in the configuration of the CNI: the smallest that any node's NIC allows; then create the pods again."
			found = append(found, f)
		}
	}
	return found
}

// perNode are bridges of network plugins that give each node a network of its own. Weave, for example, has one network for all.
var perNode = []string{"cni0", "cbr0", "kube-bridge"}

// sameSubnet finds bridges of two machines whose pods share a subnet.
func sameSubnet(c, s Peer) []Finding {
	client, server := c.name, s.name
	if client > server {
		return nil // found in the other direction
	}
	for _, here := range c.bridges {
		for _, there := range s.bridges {
			i := slices.IndexFunc(here.Addresses, func(p netip.Prefix) bool {
				return !p.IsSingleIP() && slices.ContainsFunc(there.Addresses, p.Overlaps)
			})
			if i < 0 {
				continue
			}
			return []Finding{{
				Rule: "pod-subnet", Where: Pair(client, server), Severity: Serious, Fault: "two nodes",
				What: fmt.Sprintf("Pods of %s and of %s have addresses of one network.", client, server),
				Evidence: []Evidence{
					evidence("ip addr show "+here.Name+" of "+client, "%v", here.Addresses),
					evidence("ip addr show "+there.Name+" of "+server, "%v", there.Addresses),
				},
				Cost: "Other nodes send packets for this network to one of the two. Pods of the two do not reach each other, and may have the same address.",
				Do: "ls /etc/cni/net.d on both   # the first file by name counts: remove what another network plugin or the container runtime left. If Flannel's configuration is in etcd: a node that was away too long may have a network that was given to another one since; " +
					"then, with the wrong node drained: rm /run/flannel/subnet.env, restart flanneld, ip link del " + here.Name + ", and delete its pods",
			}}
		}
	}
	return nil
}

func differs(client, server, device string, wrong []Evidence) Finding {
	return Finding{
		Rule: overlayDiffers, Where: Pair(client, server), Severity: Serious,
		What:     fmt.Sprintf("What %s knows about the overlay of %s is wrong.", client, server),
		Evidence: wrong[:min(len(wrong), 6)],
		Cost:     "Packets of pods arrive at the other node, and its kernel drops them: it has no such device, port or MAC address. Nothing tells the sender.",
		Do: fmt.Sprintf("If the MAC address differs: something changed it after the CNI's daemon published it (systemd-udevd with MACAddressPolicy=persistent, NetworkManager, a device made again): on %s, "+
			"set MACAddressPolicy=none for %s, and restart the CNI's daemon. If VNI or port differ: correct the configuration of the CNI, and delete %[2]s on the node that has the old one", server, device),
	}
}

// VXLANPortsOf returns the UDP ports to try between two machines: those that overlays usually have, and those of the
// machines' devices.
func VXLANPortsOf(machines ...Facts) []uint16 {
	ports := slices.Clone(vxlanPorts)
	for _, f := range machines {
		for _, d := range f.Devices {
			if d.VXLANPort != 0 && !slices.Contains(ports, d.VXLANPort) {
				ports = append(ports, d.VXLANPort)
			}
		}
	}
	return ports
}
