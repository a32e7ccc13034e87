//go:build linux

package lab

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/place/lab/overlay"
	"slipstream.dev/internal/place/lab/programs"
	"slipstream.dev/internal/place/lab/services"
)

// Lacks returns nil, or what this machine lacks for a lab and what to do. It tests that in a temporary network namespace, and
// changes nothing.
func Lacks(c Config) error {
	if _, err := os.Stat("/proc/sys/net/ipv6"); err != nil {
		return errors.New("this kernel has no IPv6: start it without ipv6.disable=1")
	}
	h, err := netns.New()
	if errors.Is(err, unix.EPERM) {
		return errors.New("no permission to create network namespaces: run as root (in a container: privileged)")
	}
	if err != nil {
		return fmt.Errorf("%w; the kernel needs CONFIG_NET_NS", err)
	}
	ns, err := network.Adopt("of the probe", h)
	if err != nil {
		return err
	}
	defer ns.Close()
	return ns.Do(func() error {
		if err := probeKernel(ns); err != nil {
			return err
		}
		if c.Policies != nil {
			if err := c.Policies.Probe(ns); err != nil {
				return err
			}
		}
		if c.Services != nil {
			return c.Services.Probe(ns)
		}
		return overlay.Probe(ns, c.Shape)
	})
}

// LacksOnNode returns nil, or what this machine lacks for netfilter to see the packets between pods of one node. Between nodes it
// always sees them, because they are routed.
func LacksOnNode(shape string) error { return lacksOnNode("/proc/sys", shape) }

func lacksOnNode(sysctls, shape string) error {
	if !overlay.Bridged(shape) {
		return nil
	}
	if _, err := os.Stat(filepath.Join(sysctls, "net/bridge/bridge-nf-call-iptables")); err != nil {
		return network.Missing("netfilter for packets between pods on a bridge", "CONFIG_BRIDGE_NETFILTER", "br_netfilter", err)
	}
	return nil
}

func probeKernel(ns *network.Namespace) error {
	devices := []struct {
		link   netlink.Link
		config string
	}{
		{netlink.NewVeth(network.LinkAttrs("probe-veth")), "CONFIG_VETH"},
		{&netlink.Bridge{LinkAttrs: network.LinkAttrs("probe-bridge")}, "CONFIG_BRIDGE"},
		{&netlink.Vxlan{LinkAttrs: network.LinkAttrs("probe-vxlan"), VxlanId: 1, Port: 4789}, "CONFIG_VXLAN"},
	}
	devices[0].link.(*netlink.Veth).PeerName = "probe-peer"
	for _, d := range devices {
		if err := ns.Netlink.LinkAdd(d.link); err != nil {
			return network.Missing(d.link.Type()+" devices", d.config, d.link.Type(), err)
		}
	}
	veth := devices[0].link.Attrs().Index
	queue := netlink.QdiscAttrs{LinkIndex: veth, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT}
	if err := ns.Netlink.QdiscAdd(network.TBF(queue, 1e9)); err != nil {
		return network.Missing("token bucket filters", "CONFIG_NET_SCH_TBF", "sch_tbf", err)
	}
	hash, err := programs.LoadRehash()
	if err != nil {
		return network.Missing("eBPF for traffic control", "CONFIG_BPF_SYSCALL", "cls_bpf", err)
	}
	w := &wire{hash: hash}
	defer w.close()
	if err := w.rehash(ns, veth); err != nil {
		return network.Missing("eBPF classifiers", "CONFIG_NET_CLS_BPF and CONFIG_NET_SCH_INGRESS", "cls_bpf sch_ingress", err)
	}
	var n network.Node
	n.Pods4, n.Cluster4, n.Pods6 = network.Cluster4, network.Cluster4, network.Cluster6
	if err := services.Filter(ns, n); err != nil {
		return network.Missing("nftables with connection tracking and masquerading", "CONFIG_NF_TABLES, CONFIG_NFT_CT and CONFIG_NFT_MASQ", "nf_tables nft_ct nft_masq", err)
	}
	return nil
}
