package accel

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel/cpuset"
	"slipstream.dev/internal/accel/kernel"
	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/record"
)

// Device is a network device of one place.
type Device struct {
	Name  string
	Index int
	// Kind is the link type, such as "veth", "vxlan", "bridge" or "device".
	Kind string
	// Class is one of v1alpha1's classes, or empty.
	Class string
	// RxQueues is the number of receive queues in use.
	RxQueues int
	// Peer is the index of a veth's peer. PeerNamespace is the ID of the peer's network namespace in this one; -1 means that
	// the peer is in this namespace.
	Peer, PeerNamespace int
}

// Devices lists the devices of the calling thread's network namespace. From the inside, a pod looks like a node, so the caller
// says whether the place is a pod.
func Devices(pod bool) ([]Device, error) {
	sys, err := kernel.OpenSysfs("")
	if err != nil {
		return nil, err
	}
	defer sys.Close()
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	defer h.Close()
	return listDevices(h, sys, pod)
}

// Classify sets the classes of links that were listed in the calling thread's network namespace.
func Classify(links []record.Link, pod bool) error {
	devices, err := Devices(pod)
	if err != nil {
		return err
	}
	for i := range links {
		for _, d := range devices {
			if d.Name == links[i].Name {
				links[i].Class = d.Class
			}
		}
	}
	return nil
}

func listDevices(h *netlink.Handle, sys kernel.Sysfs, pod bool) ([]Device, error) {
	for tries := 1; ; tries++ {
		devices, err := listOnce(h, sys, pod)
		// A device was renamed or removed after the links were listed.
		if !kernel.Gone(err) || tries == 10 {
			return devices, err
		}
	}
}

func listOnce(h *netlink.Handle, sys kernel.Sysfs, pod bool) ([]Device, error) {
	links, err := netns.Dump("links", h.LinkList)
	if err != nil {
		return nil, err
	}
	var gateways, addressed []int
	if !pod {
		if gateways, addressed, err = reach(h); err != nil {
			return nil, err
		}
	}
	classes := classify(links, gateways, addressed, pod)
	devices := make([]Device, 0, len(links))
	for _, l := range links {
		a := l.Attrs()
		queues, err := rxQueues(sys, a.Name)
		if err != nil {
			return nil, err
		}
		devices = append(devices, Device{Name: a.Name, Index: a.Index, Kind: l.Type(), Class: classes[a.Index], RxQueues: queues,
			Peer: a.ParentIndex, PeerNamespace: a.NetNsID})
	}
	return devices, nil
}

// rxQueues counts the receive queues that a device uses.
func rxQueues(sys kernel.Sysfs, name string) (n int, err error) {
	queues, err := sys.List("class/net/" + name + "/queues")
	if err != nil {
		return 0, fmt.Errorf("list queues of %s: %w", name, err)
	}
	for _, q := range queues {
		if strings.HasPrefix(q, "rx-") {
			n++
		}
	}
	return n, nil
}

// reach returns the links of default routes, and the links with an address of global scope.
func reach(h *netlink.Handle) (gateways, addressed []int, err error) {
	routes, err := netns.Dump("routes", func() ([]netlink.Route, error) { return h.RouteList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, nil, err
	}
	for _, r := range routes {
		if netns.IsDefaultRoute(r) {
			gateways = append(gateways, netns.RouteLinks(r)...)
		}
	}
	addrs, err := netns.Dump("addresses", func() ([]netlink.Addr, error) { return h.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, nil, err
	}
	for _, a := range addrs {
		if a.Scope == unix.RT_SCOPE_UNIVERSE && a.IP.IsGlobalUnicast() {
			addressed = append(addressed, a.LinkIndex)
		}
	}
	return gateways, addressed, nil
}

// classify maps links, by index, to their classes. The NIC is the underlying device of the overlays; if there is none, the
// device of a default route; and if there is none either, every link with an address of its own (which neither a pod's veth nor
// a bridge port has). Links that receive for the NIC have its class too.
func classify(links []netlink.Link, gateways, addressed []int, pod bool) map[int]string {
	classes := make(map[int]string)
	var parents []int
	plain := make(map[int]bool)
	for _, l := range links {
		switch l := l.(type) {
		case *netlink.Vxlan:
			classes[l.Index] = v1alpha1.DeviceOverlay
			if l.VtepDevIndex != 0 {
				parents = append(parents, l.VtepDevIndex)
			}
		case *netlink.Tuntap:
			// A process forwards packets over it, as in flannel's udp backend.
			if l.Mode == netlink.TUNTAP_MODE_TUN {
				classes[l.Index] = v1alpha1.DeviceOverlay
			}
		case *netlink.Bridge:
		default:
			plain[l.Attrs().Index] = l.Attrs().Flags&net.FlagLoopback == 0
		}
	}
	for _, candidates := range [][]int{parents, gateways, addressed} {
		found := false
		for _, i := range candidates {
			if plain[i] {
				markNIC(classes, links, i)
				found = true
			}
		}
		if found {
			break
		}
	}
	for _, l := range links {
		a := l.Attrs()
		switch {
		case pod && a.Flags&net.FlagLoopback == 0:
			classes[a.Index] = v1alpha1.DevicePod
		case l.Type() == "veth" && a.NetNsID >= 0 && classes[a.Index] == "":
			classes[a.Index] = v1alpha1.DeviceHostVeth
		}
	}
	return classes
}

// markNIC sets the class of a link to NIC, and also that of the links that receive for it: the parent of a VLAN or macvlan, the
// members of a bond or team, the virtual function of a Hyper-V or virtio failover device. The kernel steers a packet by the
// queue of the link on which it arrives, and not again on the links above (netif_receive_skb_internal).
func markNIC(classes map[int]string, links []netlink.Link, nic int) {
	if classes[nic] == v1alpha1.DeviceNIC {
		return
	}
	classes[nic] = v1alpha1.DeviceNIC
	for _, l := range links {
		a := l.Attrs()
		if a.MasterIndex == nic {
			markNIC(classes, links, a.Index)
		}
		if stacked := l.Type() == "vlan" || l.Type() == "macvlan"; a.Index == nic && stacked && a.NetNsID < 0 && a.ParentIndex != 0 {
			markNIC(classes, links, a.ParentIndex)
		}
	}
}

// IRQCPUs returns the CPUs to which the kernel currently routes the interrupts of a device. The set is empty for a device
// without interrupts, such as a veth.
func IRQCPUs(sys *os.Root, proc, name string) (cpuset.Set, error) {
	// class/net/NAME is a symbolic link to devices/…/net/NAME. The hardware is two levels up.
	link, err := sys.Readlink("class/net/" + name)
	if err != nil {
		return cpuset.Set{}, fmt.Errorf("find the hardware of %s: %w", name, err)
	}
	hardware := path.Dir(path.Dir(path.Join("class/net", link)))
	if strings.HasPrefix(path.Base(hardware), "virtio") {
		// The interrupts belong to the PCI device that is the parent of the virtio device.
		hardware = path.Dir(hardware)
	}
	irqs, err := fs.ReadDir(sys.FS(), path.Join(hardware, "msi_irqs"))
	if errors.Is(err, fs.ErrNotExist) {
		return cpuset.Set{}, nil
	}
	if err != nil {
		return cpuset.Set{}, fmt.Errorf("list interrupts of %s: %w", name, err)
	}
	var cpus cpuset.Set
	for _, irq := range irqs {
		b, err := os.ReadFile(path.Join(proc, "irq", irq.Name(), "effective_affinity_list"))
		if errors.Is(err, fs.ErrNotExist) { // the vector is allocated, but not in use
			continue
		}
		if err != nil {
			return cpuset.Set{}, fmt.Errorf("read affinity of %s's interrupt: %w", name, err)
		}
		s, err := cpuset.ParseList(string(b))
		if err != nil {
			return cpuset.Set{}, fmt.Errorf("affinity of %s's interrupt %s: %w", name, irq.Name(), err)
		}
		cpus = cpus.Union(s)
	}
	return cpus, nil
}
