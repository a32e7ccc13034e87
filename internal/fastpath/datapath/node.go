//go:build linux

package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// VXLANDevice holds the settings of a VXLAN device that appear in its outer headers.
type VXLANDevice struct {
	// NIC is the index of the underlying device.
	NIC int
	// Source is the outer IPv4 source address, Port the outer destination port.
	Source netip.Addr
	Port   uint16
	VNI    uint32
	// MAC is the MAC address of the VXLAN device.
	MAC net.HardwareAddr
}

// halfWords copies bytes to 16-bit words, in network byte order as in the programs.
func halfWords(to []uint16, from []byte) {
	for i := range to {
		to[i] = binary.NativeEndian.Uint16(from[2*i:])
	}
}

// value converts the device to the map value of the programs, in network byte order.
func (o VXLANDevice) value() fastpathVxlanDevice {
	v := fastpathVxlanDevice{Nic: uint32(o.NIC)}
	source := o.Source.As4()
	halfWords(v.Source[:], source[:])
	halfWords(v.Mac[:], o.MAC)
	halfWords(v.Vni[:], binary.BigEndian.AppendUint32(nil, o.VNI<<8))
	var port [2]byte
	binary.BigEndian.PutUint16(port[:], o.Port)
	v.Port = binary.NativeEndian.Uint16(port[:])
	return v
}

// SetVXLANDevices replaces the VXLAN devices whose packets may take the fast path, by index.
func (p *Programs) SetVXLANDevices(all map[int]VXLANDevice) error {
	m := p.objects.VxlanDevices
	var known []uint32
	var index uint32
	var value fastpathVxlanDevice
	for i := m.Iterate(); i.Next(&index, &value); {
		known = append(known, index)
	}
	for _, index := range known {
		if _, still := all[int(index)]; !still {
			if err := m.Delete(index); err != nil {
				return fmt.Errorf("remove VXLAN device %d: %w", index, err)
			}
		}
	}
	for index, o := range all {
		if err := m.Put(uint32(index), o.value()); err != nil {
			return fmt.Errorf("add VXLAN device %d: %w", index, err)
		}
	}
	return nil
}

// SetRouters replaces the NICs over which the node routes packets of pods without encapsulation. It is not safe for concurrent use.
func (p *Programs) SetRouters(nics []int) error {
	return updateSet(p.objects.Routers, p.routers, indices(nics))
}

// SetPodDevices replaces the devices over which the node reaches its pods: their links, and the bridges that have these. It is not safe
// for concurrent use.
func (p *Programs) SetPodDevices(all []int) error {
	return updateSet(p.objects.PodDevices, p.podDevices, indices(all))
}

func indices(devices []int) map[uint32]bool {
	set := make(map[uint32]bool, len(devices))
	for _, device := range devices {
		set[uint32(device)] = true
	}
	return set
}

// Remote is an FDB entry of a VXLAN device: frames for MAC go to the node with this IPv4 address.
type Remote struct {
	Device  int
	MAC     [6]byte
	Address netip.Addr
}

// SetRemotes replaces the remote nodes. decap_nic decapsulates packets from these only. It is not safe for concurrent use.
func (p *Programs) SetRemotes(all []Remote) error {
	want := make(map[fastpathRemote]bool, len(all))
	for _, r := range all {
		k, address := fastpathRemote{Device: uint32(r.Device)}, r.Address.As4()
		halfWords(k.Address[:], address[:])
		halfWords(k.Mac[:], r.MAC[:])
		want[k] = true
	}
	// If the map is full, the kernel decapsulates the packets of the other nodes.
	return updateSet(p.objects.Remotes, p.remotes, want)
}

// LinkMAC is a MAC address of a pod, and the index of the pod's link on the node.
type LinkMAC struct {
	Link int
	MAC  [6]byte
}

// SetLinkMACs replaces the MAC addresses of pods. The fast path delivers to a link only packets for these. It is not safe for
// concurrent use.
func (p *Programs) SetLinkMACs(all []LinkMAC) error {
	want := make(map[fastpathLinkMac]bool, len(all))
	for _, o := range all {
		want[fastpathLinkMac{Link: uint32(o.Link), Mac: o.MAC}] = true
	}
	// If the map is full, packets to the other addresses take the slow path as mismatch.
	return updateSet(p.objects.LinkMacs, p.linkMACs, want)
}

// Pod is a pod: the index of its link on the node, and its known addresses.
type Pod struct {
	Link      int
	Addresses []netip.Addr
}

// SetWatched replaces the watched pods, whose links have all programs. The programs create flows for connections of watched
// pods, and send EventAttach for those of others. It is not safe for concurrent use.
func (p *Programs) SetWatched(all []Pod) error {
	want := make(map[fastpathWatch]bool)
	for _, p := range all {
		want[fastpathWatch{Device: uint32(p.Link)}] = true
		for _, a := range p.Addresses {
			want[fastpathWatch{Pod: PodKeyOf(a).number}] = true
		}
	}
	return updateSet(p.objects.WatchedPods, p.watched, want)
}

// updateSet makes the keys of a map equal to want, as far as there is room. present is the Go copy of the keys, which it
// updates.
func updateSet[K comparable](m *ebpf.Map, present, want map[K]bool) error {
	for k := range present {
		if want[k] {
			continue
		}
		if err := m.Delete(k); err != nil {
			return fmt.Errorf("delete %+v from the fast path's %s: %w", k, m, err)
		}
		delete(present, k)
	}
	for k := range want {
		if present[k] {
			continue
		}
		err := m.Put(k, uint8(1))
		if errors.Is(err, unix.E2BIG) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("put %+v into the fast path's %s: %w", k, m, err)
		}
		present[k] = true
	}
	return nil
}
