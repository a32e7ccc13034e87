//go:build linux

package fastpath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/netns"
)

// Accelerated packets bypass some hooks of a node's devices. Whatever is attached to such a hook is an observer, whether it
// counts, shapes or filters packets: it would miss them. The fast path skips a device with an observer, unless a policy allows
// it to bypass observers of that kind.

// attachPoint is the ingress or the egress of a device.
type attachPoint struct {
	device int
	egress bool
}

func (p attachPoint) String() string {
	if p.egress {
		return "egress"
	}
	return "ingress"
}

func (p attachPoint) attachType() ebpf.AttachType {
	if p.egress {
		return ebpf.AttachTCXEgress
	}
	return ebpf.AttachTCXIngress
}

type observer struct {
	// kind is one of v1alpha1's (UnseenBy...), or a reason to skip a device that no policy can override.
	kind string
	name string
}

// observers holds the observers of a node's devices, except for the kinds that may be bypassed.
type observers struct {
	at map[attachPoint][]observer
	// programs holds the foreign tcx programs of each queried attach point. xdp tells whether a device has an XDP program.
	// Netlink does not announce changes of either.
	programs map[attachPoint][]ebpf.ProgramID
	xdp      map[int]bool
	// cilium names a program of Cilium and its attach point, or is empty.
	cilium string
}

// first returns an observer at one of the attach points, or nil. If kinds are given, only observers of these kinds count.
func (o observers) first(points []attachPoint, kinds ...string) *observer {
	for _, p := range points {
		for i, other := range o.at[p] {
			if len(kinds) == 0 || slices.Contains(kinds, other.kind) {
				return &o.at[p][i]
			}
		}
	}
	return nil
}

// ciliumPrefix begins the names of Cilium's tcx programs and tc filters (bpf/bpf_lxc.c, bpf_host.c and bpf_overlay.c).
const ciliumPrefix = "cil_"

// findCilium sets cilium if a program is the first of Cilium's.
func (o *observers) findCilium(p attachPoint, device, program string) {
	if o.cilium == "" && strings.HasPrefix(program, ciliumPrefix) {
		o.cilium = fmt.Sprintf("%s at the %s of %s", program, p, device)
	}
}

func both(device int) []attachPoint { return []attachPoint{{device, false}, {device, true}} }

// isOurs reports whether a program belongs to the fast path.
type isOurs func(ebpf.ProgramID) bool

// observersOf finds the observers of devices and of the routes over them, without those of the kinds in unseenBy.
func observersOf(h *netlink.Handle, links []netlink.Link, routes []netlink.Route, unseenBy []string, ours isOurs, renew func() error) (observers, error) {
	o := observers{at: make(map[attachPoint][]observer), programs: make(map[attachPoint][]ebpf.ProgramID), xdp: make(map[int]bool)}
	add := func(p attachPoint, kind, format string, args ...any) {
		if !slices.Contains(unseenBy, kind) {
			o.at[p] = append(o.at[p], observer{kind, fmt.Sprintf(format, args...)})
		}
	}
	qdiscs, err := netns.Dump("queueing disciplines", func() ([]netlink.Qdisc, error) { return h.QdiscList(nil) })
	if err != nil {
		return o, err
	}
	for _, q := range qdiscs {
		if t := q.Type(); t != "noqueue" && t != "clsact" && t != "ingress" {
			add(attachPoint{q.Attrs().LinkIndex, true}, v1alpha1.UnseenByQueue, "a queue (%s)", t)
		}
	}
	for _, r := range routes {
		if _, is := r.Encap.(*netlink.BpfEncap); is { // package netlink does not parse that of one of several next hops
			add(attachPoint{r.LinkIndex, true}, byRoute, "a route with an eBPF program (%s)", destination(r))
		}
	}
	filtered, err := filtersOf(h, links, qdiscs, renew)
	if err != nil {
		return o, err
	}
	for _, f := range filtered {
		add(f.attachPoint, v1alpha1.UnseenByTC, "tc filters at its %s", f)
		for _, name := range f.programs {
			o.findCilium(f.attachPoint, f.device, name)
		}
	}
	chains, err := netdevChains()
	if err != nil {
		return o, err
	}
	flowtables, err := Flowtables()
	if err != nil {
		return o, err
	}
	for _, l := range links {
		if err := renew(); err != nil {
			return o, err
		}
		a := l.Attrs()
		o.xdp[a.Index] = hasXDP(l)
		for _, f := range flowtables {
			if f.At(a.Name) {
				add(attachPoint{a.Index, false}, byFlowtable, "a flowtable (%s)", f.Name)
			}
		}
		for _, c := range chains {
			if p := (attachPoint{a.Index, c.egress}); c.at(a.Name) {
				add(p, v1alpha1.UnseenByNetdev, "an nftables chain at its %s (%s)", p, c.name)
			}
		}
		for _, p := range both(a.Index) {
			// At the ingress of a pod's veth, XDP and foreign tcx programs run before redirect_pod, so nothing bypasses them.
			if !p.egress && l.Type() == "veth" {
				continue
			}
			if !p.egress && o.xdp[a.Index] {
				add(p, byXDP, "an XDP program")
			}
			all, err := programsAt(p)
			if err != nil {
				return o, err
			}
			o.programs[p] = slices.DeleteFunc(all, ours)
			for _, id := range o.programs[p] {
				name := programName(id)
				add(p, v1alpha1.UnseenByTCX, "a tcx program at its %s (%s)", p, name)
				o.findCilium(p, a.Name, name)
			}
		}
	}
	return o, nil
}

// destination returns the destination of a route, as ip route shows it.
func destination(r netlink.Route) string {
	if netns.IsDefaultRoute(r) {
		return "default"
	}
	return r.Dst.String()
}

func hasXDP(l netlink.Link) bool { return l.Attrs().Xdp != nil && l.Attrs().Xdp.Attached }

// programsAt returns the tcx programs of an attach point, in the order in which they run. There are none if the device is gone
// or the kernel has no tcx.
func programsAt(at attachPoint) ([]ebpf.ProgramID, error) {
	all, err := link.QueryPrograms(link.QueryOptions{Target: at.device, Attach: at.attachType()})
	if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list tcx programs: %w", err)
	}
	var ids []ebpf.ProgramID
	for _, p := range all.Programs {
		ids = append(ids, p.ID)
	}
	return ids, nil
}

// programName returns the name of a program, or its ID if the process may not query it.
func programName(id ebpf.ProgramID) string {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return fmt.Sprintf("number %d", id)
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil || info.Name == "" {
		return fmt.Sprintf("number %d", id)
	}
	return info.Name
}

// filterPoint is an attach point with tc filters. programs holds the names of the eBPF filters.
type filterPoint struct {
	attachPoint
	device   string
	programs []string
}

// filtersOf finds the attach points of devices that have tc filters.
func filtersOf(h *netlink.Handle, links []netlink.Link, qdiscs []netlink.Qdisc, renew func() error) (all []filterPoint, err error) {
	for _, q := range qdiscs {
		if t := q.Type(); t != "clsact" && t != "ingress" {
			continue
		}
		if err := renew(); err != nil {
			return nil, err
		}
		index := q.Attrs().LinkIndex
		i := slices.IndexFunc(links, func(l netlink.Link) bool { return l.Attrs().Index == index })
		if i < 0 {
			continue // the device is new; a notification follows
		}
		for _, p := range both(index) {
			parent := uint32(netlink.HANDLE_MIN_INGRESS)
			if p.egress {
				parent = netlink.HANDLE_MIN_EGRESS
			}
			if p.egress && q.Type() == "ingress" {
				continue
			}
			f := filterPoint{attachPoint: p, device: links[i].Attrs().Name}
			if !p.egress && q.Attrs().IngressBlock != nil { // shared with other devices
				all = append(all, f)
				continue
			}
			filters, err := netns.Dump("filters", func() ([]netlink.Filter, error) { return h.FilterList(links[i], parent) })
			if err != nil {
				return nil, err
			}
			for _, filter := range filters {
				if b, ok := filter.(*netlink.BpfFilter); ok {
					f.programs = append(f.programs, b.Name)
				}
			}
			if len(filters) > 0 {
				all = append(all, f)
			}
		}
	}
	return all, nil
}

// chain is an nftables chain at the ingress or egress of devices.
type chain struct {
	// name consists of family, table and chain, as nft lists them.
	name   string
	egress bool
	// devices are names, or prefixes of names with a * appended.
	devices []string
}

// at reports whether the chain is attached to a device.
func (c chain) at(device string) bool { return isAmong(device, c.devices) }

// isAmong reports whether names contains a device's name, or a prefix of it with a * appended.
func isAmong(device string, names []string) bool {
	return slices.ContainsFunc(names, func(d string) bool {
		start, wild := strings.CutSuffix(d, "*")
		return d == device || wild && strings.HasPrefix(device, start)
	})
}

// Constants of nftables (include/uapi/linux/netfilter/nf_tables.h, include/uapi/linux/netfilter.h)
// that package unix lacks.
const (
	nftaHookDevs     = 4
	nftaDevicePrefix = 2
	nfInetIngress    = 5
)

// netdevChains lists the nftables chains at devices in the thread's network namespace: those of family netdev, and the ingress
// chains of family inet. It does not query the other families, because a cluster may have thousands of their chains.
func netdevChains() (all []chain, err error) {
	for _, family := range []uint8{unix.NFPROTO_NETDEV, unix.NFPROTO_INET} {
		messages, err := dumpNFTables("chains of nftables", unix.NFT_MSG_GETCHAIN, family)
		if err != nil {
			return nil, err
		}
		for _, m := range messages {
			if c, ok := chainOf(m); ok {
				all = append(all, c)
			}
		}
	}
	return all, nil
}

// dumpNFTables returns the kernel's messages about all nftables objects of a kind and family in the thread's network namespace.
// There are none if the kernel has no nftables.
func dumpNFTables(what string, kind int, family uint8) ([][]byte, error) {
	messages, err := netns.Dump(what, func() ([][]byte, error) {
		request := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|kind, unix.NLM_F_DUMP)
		request.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0})
		return request.Execute(unix.NETLINK_NETFILTER, 0)
	})
	if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EINVAL) {
		return nil, nil
	}
	return messages, err
}

// chainOf parses a message about a chain; ok is false if the chain is not attached to a device.
func chainOf(message []byte) (c chain, ok bool) {
	if len(message) < nl.SizeofNfgenmsg {
		return c, false
	}
	var table, name string
	hook := -1
	if netns.Attributes(message[nl.SizeofNfgenmsg:], func(kind uint16, is []byte) {
		switch kind {
		case unix.NFTA_CHAIN_TABLE:
			table = unix.ByteSliceToString(is)
		case unix.NFTA_CHAIN_NAME:
			name = unix.ByteSliceToString(is)
		case unix.NFTA_CHAIN_HOOK:
			hook, c.devices = hookOf(is)
		}
	}) != nil {
		return c, false
	}
	switch family := message[0]; {
	case family == unix.NFPROTO_NETDEV && (hook == unix.NF_NETDEV_INGRESS || hook == unix.NF_NETDEV_EGRESS):
		c.name, c.egress = fmt.Sprintf("netdev %s %s", table, name), hook == unix.NF_NETDEV_EGRESS
	case family == unix.NFPROTO_INET && hook == nfInetIngress:
		c.name = fmt.Sprintf("inet %s %s", table, name)
	default:
		return c, false
	}
	return c, true
}

// hookOf parses the hook of a chain: its number, or -1, and its devices.
func hookOf(b []byte) (number int, devices []string) {
	number = -1
	// A truncated attribute is parsed as far as it goes.
	_ = netns.Attributes(b, func(kind uint16, is []byte) {
		switch kind {
		case unix.NFTA_HOOK_HOOKNUM:
			if len(is) == 4 {
				number = int(binary.BigEndian.Uint32(is))
			}
		case unix.NFTA_HOOK_DEV: // a single device, which newer kernels also list in NFTA_HOOK_DEVS
			devices = append(devices, unix.ByteSliceToString(is))
		case nftaHookDevs:
			devices = append(devices, devicesOf(is)...)
		}
	})
	return number, devices
}

// devicesOf parses a list of device names. It appends a * to a name that is a prefix.
func devicesOf(b []byte) (names []string) {
	_ = netns.Attributes(b, func(kind uint16, is []byte) {
		name := unix.ByteSliceToString(is)
		if kind == nftaDevicePrefix {
			name += "*"
		}
		names = append(names, name)
	})
	return names
}

// unsupportedNode returns why no packet in the thread's network namespace may take the fast path, or "". inspect calls it too,
// because netlink does not announce changes of sysctls.
func unsupportedNode(unseenBy []string) (reason, why string, err error) {
	var pathMTU, accounting int
	if err := readSysctl("net/ipv4/ip_forward_use_pmtu", &pathMTU); err != nil {
		return "", "", err
	}
	if err := readSysctl("net/netfilter/nf_conntrack_acct", &accounting); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", "", err
	}
	policies, err := ipsecPolicies()
	switch {
	case err != nil:
		return "", "", err
	case policies > 0:
		return byIPsec, "there are IPsec policies (ip xfrm policy), which the fast path would bypass", nil
	case accounting != 0 && !slices.Contains(unseenBy, v1alpha1.UnseenByAccounting):
		return v1alpha1.UnseenByAccounting, "net.netfilter.nf_conntrack_acct is set, so conntrack counts the packets of each connection, and would miss most of them", nil
	case pathMTU != 0:
		return byConfiguration, "net.ipv4.ip_forward_use_pmtu is set, so each destination has an MTU of its own", nil
	}
	return "", "", nil
}

// ipsecPolicies counts the IPsec policies in the thread's network namespace, without those of sockets.
func ipsecPolicies() (n uint32, err error) {
	const spdInfo = 1 // XFRMA_SPD_INFO
	request := nl.NewNetlinkRequest(nl.XFRM_MSG_GETSPDINFO, 0)
	request.AddRawData(make([]byte, 4)) // flags
	messages, err := request.Execute(unix.NETLINK_XFRM, nl.XFRM_MSG_NEWSPDINFO)
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		return 0, nil // the kernel has no IPsec
	}
	if err != nil {
		return 0, fmt.Errorf("count IPsec policies: %w", err)
	}
	for _, m := range messages {
		if err := netns.Attributes(m[min(4, len(m)):], func(kind uint16, is []byte) {
			// struct xfrmu_spdinfo begins with the counts of in, out and forward policies.
			if kind == spdInfo && len(is) >= 12 {
				for i := range 3 {
					n += binary.NativeEndian.Uint32(is[4*i:])
				}
			}
		}); err != nil {
			return 0, fmt.Errorf("count IPsec policies: %w", err)
		}
	}
	return n, nil
}
