//go:build linux

package fastpath

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strconv"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/fastpath/datapath"
	"slipstream.dev/internal/netns"
)

// probeTime is how long the probe waits for its connection to be accelerated. Where many agents started at once on few CPUs,
// that took more than 5 s.
const probeTime = 15 * time.Second

// The addresses of the nodes and pods that the probe makes. They exist only in its own network namespaces.
var (
	probeNodes = [2]net.IP{net.IPv4(198, 18, 255, 1).To4(), net.IPv4(198, 18, 255, 2).To4()}
	probePods  = [2]net.IP{net.IPv4(10, 255, 255, 1).To4(), net.IPv4(10, 255, 255, 2).To4()}
	probeMACs  = [2]net.HardwareAddr{{2, 0, 0, 0, 1, 1}, {2, 0, 0, 0, 1, 2}}
)

// Probe tests in temporary network namespaces whether the fast path works on this kernel. A pod opens a TCP connection over a
// VXLAN device to an echo server on a node without the fast path, and compares what comes back. On a kernel without VXLAN
// devices, the connection is routed. The error says what does not work.
func Probe(ctx context.Context) error {
	err := probe(ctx, true)
	if errors.Is(err, errNoVXLAN) {
		err = probe(ctx, false)
	}
	return err
}

var errNoVXLAN = errors.New("this kernel lacks VXLAN devices (load the module vxlan)")

// probe is Probe for one of the two paths: over a VXLAN device (tunnel), or routed.
func probe(ctx context.Context, tunnel bool) error {
	var spaces [3]netns.Handle // node, pod, far node
	for i := range spaces {
		ns, err := netns.New()
		if err != nil {
			return fmt.Errorf("try the fast path: %w", err)
		}
		defer ns.Close()
		spaces[i] = ns
	}
	err := probeDevices(spaces, tunnel)
	if err == nil {
		kind := datapath.KindRouted
		if tunnel {
			kind = datapath.KindVXLAN
		}
		err = probeTraffic(ctx, spaces, kind)
	}
	if err != nil {
		return fmt.Errorf("try the fast path: %w", err)
	}
	return nil
}

// probeDevices creates a node with a pod, and a far node without one: its loopback device has the address of the far pod.
func probeDevices(spaces [3]netns.Handle, tunnel bool) error {
	node, pod, far := spaces[0], spaces[1], spaces[2]
	if err := netns.Do(node, func() error { return makeProbeNode(pod, far, tunnel) }); err != nil {
		return fmt.Errorf("make a node: %w", err)
	}
	if err := netns.Do(pod, makeProbePod); err != nil {
		return fmt.Errorf("make a pod: %w", err)
	}
	if err := netns.Do(far, func() error {
		if err := makeProbeNetwork(1, tunnel); err != nil {
			return err
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return errors.Join(netlink.LinkSetUp(lo), netlink.AddrAdd(lo, &netlink.Addr{IPNet: host(probePods[1], 32)}))
	}); err != nil {
		return fmt.Errorf("make another node: %w", err)
	}
	return nil
}

func probeLink(name string) netlink.LinkAttrs {
	a := netlink.NewLinkAttrs()
	a.Name, a.Flags = name, net.FlagUp
	return a
}

// makeProbeNetwork gives a node its address, and a route to the other node's pod.
func makeProbeNetwork(i int, tunnel bool) error {
	nic, err := netlink.LinkByName("nic")
	if err != nil {
		return err
	}
	if err := errors.Join(netlink.LinkSetUp(nic), netlink.AddrAdd(nic, &netlink.Addr{IPNet: host(probeNodes[i], 24)})); err != nil {
		return err
	}
	if tunnel {
		return makeProbeTunnel(i, nic)
	}
	return netlink.RouteAdd(&netlink.Route{LinkIndex: nic.Attrs().Index, Dst: host(probePods[1-i], 32), Gw: probeNodes[1-i]})
}

// makeProbeTunnel creates the VXLAN device of a node, and the FDB entry, neighbour and route by which it reaches the other
// node's pod.
func makeProbeTunnel(i int, nic netlink.Link) error {
	v := &netlink.Vxlan{LinkAttrs: probeLink("vx"), VxlanId: 1, SrcAddr: probeNodes[i], VtepDevIndex: nic.Attrs().Index, Port: 4790}
	v.HardwareAddr, v.MTU = probeMACs[i], 1450
	other := 1 - i
	for _, step := range []func() error{
		func() error {
			err := netlink.LinkAdd(v)
			if errors.Is(err, unix.EOPNOTSUPP) {
				return errNoVXLAN
			}
			return err
		},
		func() error {
			return netlink.NeighSet(&netlink.Neigh{LinkIndex: v.Index, Family: unix.AF_BRIDGE, Flags: netlink.NTF_SELF, State: netlink.NUD_PERMANENT,
				IP: probeNodes[other], HardwareAddr: probeMACs[other]})
		},
		func() error {
			return netlink.NeighSet(&netlink.Neigh{LinkIndex: v.Index, State: netlink.NUD_PERMANENT, IP: probePods[other], HardwareAddr: probeMACs[other]})
		},
		func() error {
			return netlink.RouteAdd(&netlink.Route{LinkIndex: v.Index, Dst: host(probePods[other], 32), Scope: netlink.SCOPE_LINK})
		},
		func() error { return forward("vx") },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// makeProbeNode creates the node's devices: the veth of its pod, the NIC, and the VXLAN device if there is a tunnel.
func makeProbeNode(pod, far netns.Handle, tunnel bool) error {
	wire := netlink.NewVeth(probeLink("nic"))
	wire.PeerName, wire.PeerNamespace = "nic", netlink.NsFd(far)
	link := netlink.NewVeth(probeLink("pod"))
	link.PeerName, link.PeerNamespace, link.PeerHardwareAddr = "eth0", netlink.NsFd(pod), net.HardwareAddr{2, 0, 0, 0, 2, 1}
	link.HardwareAddr, link.MTU = net.HardwareAddr{2, 0, 0, 0, 2, 2}, 1450
	if err := errors.Join(netlink.LinkAdd(wire), netlink.LinkAdd(link)); errors.Is(err, unix.EOPNOTSUPP) {
		return errors.New("this kernel lacks veth devices (load the module veth)")
	} else if err != nil {
		return err
	}
	if err := makeProbeNetwork(0, tunnel); err != nil {
		return err
	}
	return errors.Join(
		forward("pod"), forward("nic"),
		netlink.RouteAdd(&netlink.Route{LinkIndex: link.Index, Dst: host(probePods[0], 32), Scope: netlink.SCOPE_LINK}),
		netlink.NeighSet(&netlink.Neigh{LinkIndex: link.Index, State: netlink.NUD_PERMANENT, IP: probePods[0], HardwareAddr: link.PeerHardwareAddr}),
		track(),
	)
}

// makeProbePod configures the pod's end.
func makeProbePod() error {
	eth0, err := netlink.LinkByName("eth0")
	if err != nil {
		return err
	}
	return errors.Join(
		netlink.LinkSetUp(eth0),
		netlink.AddrAdd(eth0, &netlink.Addr{IPNet: host(probePods[0], 32)}),
		netlink.RouteAdd(&netlink.Route{LinkIndex: eth0.Attrs().Index, Dst: host(probePods[1], 32), Scope: netlink.SCOPE_LINK}),
		netlink.NeighSet(&netlink.Neigh{LinkIndex: eth0.Attrs().Index, State: netlink.NUD_PERMANENT, IP: probePods[1], HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 2, 2}}),
	)
}

func host(ip net.IP, bits int) *net.IPNet { return &net.IPNet{IP: ip, Mask: net.CIDRMask(bits, 32)} }

// forward enables forwarding on a device, by netlink because /proc/sys is read-only in a container.
func forward(device string) error {
	l, err := netlink.LinkByName(device)
	if err != nil {
		return err
	}
	// inet_set_link_af in net/ipv4/devinet.c, include/uapi/linux/{if_link,ip}.h.
	const inetConf, forwarding = 1, 1 // IFLA_INET_CONF, IPV4_DEVCONF_FORWARDING
	r := nl.NewNetlinkRequest(unix.RTM_SETLINK, unix.NLM_F_ACK)
	at := nl.NewIfInfomsg(unix.AF_UNSPEC)
	at.Index = int32(l.Attrs().Index)
	spec := nl.NewRtAttr(unix.IFLA_AF_SPEC, nil)
	spec.AddRtAttr(unix.AF_INET, nil).AddRtAttr(inetConf, nil).AddRtAttr(forwarding, nl.Uint32Attr(1))
	r.AddData(at)
	r.AddData(spec)
	if _, err := r.Execute(unix.NETLINK_ROUTE, 0); err != nil {
		return fmt.Errorf("enable forwarding on %s: %w", device, err)
	}
	return nil
}

// track enables conntrack in the thread's network namespace, by adding a rule that needs it.
func track() error {
	conn, err := nftables.New()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	table := conn.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "probe"})
	chain := conn.AddChain(&nftables.Chain{Table: table, Name: "forward", Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter})
	conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
		&expr.Ct{Register: 1, Key: expr.CtKeySTATE}, &expr.Verdict{Kind: expr.VerdictAccept},
	}})
	if err := conn.Flush(); err != nil {
		return fmt.Errorf("add an nftables rule that enables connection tracking (load the modules nf_conntrack, nf_tables and nft_ct): %w", err)
	}
	return nil
}

// probeTraffic sends data until packets in both directions have taken the fast path.
func probeTraffic(ctx context.Context, spaces [3]netns.Handle, kind string) error {
	f, err := Start(spaces[0], slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	defer f.Close()
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	var listener net.Listener
	var near, far net.Conn
	if err := netns.Do(spaces[2], func() (err error) {
		listener, err = new(net.ListenConfig).Listen(ctx, "tcp4", net.JoinHostPort(probePods[1].String(), "0"))
		return err
	}); err != nil {
		return err
	}
	defer listener.Close()
	if err := netns.Do(spaces[1], func() (err error) {
		near, err = new(net.Dialer).DialContext(ctx, "tcp4", net.JoinHostPort(probePods[1].String(), strconv.Itoa(listener.Addr().(*net.TCPAddr).Port)))
		return err
	}); err != nil {
		return err
	}
	defer near.Close()
	if far, err = listener.Accept(); err != nil {
		return err
	}
	defer far.Close()
	go func() { _, _ = io.Copy(far, far) }()
	deadline, _ := ctx.Deadline()
	_ = near.SetDeadline(deadline)
	// Alternate small messages and messages that leave as GSO packets.
	message := bytes.Repeat([]byte("fast path "), 1<<10)
	answer := make([]byte, len(message))
	for round := byte(0); ; round++ {
		sent := message[:len(message)>>(4*(round%3))]
		sent[0] = round
		if _, err = near.Write(sent); err == nil {
			_, err = io.ReadFull(near, answer[:len(sent)])
		}
		if err == nil && !bytes.Equal(sent, answer[:len(sent)]) {
			return errors.New("the data that came back differs from what was sent")
		}
		counts, countErr := f.Counts()
		switch {
		case countErr != nil:
			return countErr
		case err != nil:
			return fmt.Errorf("packets do not take the fast path: %w (%v)", err, counts)
		case counts["fast-out-"+kind] > 100 && counts["fast-in-"+kind] > 100:
			return nil
		}
	}
}
