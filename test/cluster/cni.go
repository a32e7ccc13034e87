//go:build linux

package cluster

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// cniDir is where Debian installs the standard plugins.
const cniDir = "/usr/lib/cni"

// linkPlugins creates the plugin folder of a node's containerd.
func (c *Cluster) linkPlugins() error {
	dir := filepath.Join(c.dir, "plugins")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return fmt.Errorf("make folder for CNI plugins: %w", err)
	}
	paths := []string{filepath.Join(c.parts, "flannel")}
	if c.config.cilium() {
		paths = append(paths, filepath.Join(c.peers, "cilium-cni"))
	}
	for _, name := range []string{"bridge", "ptp", "host-local", "loopback", "portmap"} {
		paths = append(paths, filepath.Join(cniDir, name))
	}
	for _, path := range paths {
		if err := os.Symlink(path, filepath.Join(dir, filepath.Base(path))); err != nil {
			return fmt.Errorf("link CNI plugin: %w", err)
		}
	}
	return nil
}

// install writes the node's CNI configuration, which makes the node Ready. So
// everything that the plugins need must exist before.
func (n *Node) install(plugin string) error {
	list := fmt.Sprintf(`{"name": "pods", "cniVersion": "0.3.1", "plugins": [%s, {"type": "portmap", "capabilities": {"portMappings": true}}]}`, plugin)
	// containerd ignores a file that is moved there from another folder.
	path, err := n.write("cni/.pods", list)
	if err != nil {
		return err
	}
	if err := os.Rename(path, filepath.Join(n.dir, "cni", "10-pods.conflist")); err != nil {
		return fmt.Errorf("install CNI configuration: %w", err)
	}
	return nil
}

// flannelBackends has flannel's backend for each CNI that flannel provides.
var flannelBackends = map[string]string{
	Flannel:       `{"Type": "vxlan"}`,
	FlannelDirect: `{"Type": "vxlan", "DirectRouting": true}`,
	FlannelHostGW: `{"Type": "host-gw"}`,
	CiliumChained: `{"Type": "vxlan"}`,
}

// startFlannel runs flannel as its DaemonSet does.
func (n *Node) startFlannel(ctx context.Context, daemon func(name string, args ...string) error) error {
	kubeconfig, err := n.c.authority.kubeconfig("flannel-"+n.name, apiURL, "flannel", "system:masters")
	if err != nil {
		return err
	}
	config, err := n.write("flannel.json", fmt.Sprintf(`{"Network": %q, "Backend": %s}`, podNetwork, flannelBackends[n.c.config.CNI]))
	if err != nil {
		return err
	}
	// flannel exits if its node has no range for pods yet.
	if _, err := n.podCIDR(ctx); err != nil {
		return err
	}
	if err := daemon("env", "NODE_NAME="+n.name, filepath.Join(n.c.parts, "flanneld"), "--kube-subnet-mgr",
		"--kubeconfig-file="+kubeconfig, "--net-config-path="+config, "--iface="+nicName, "--ip-masq", "--iptables-resync=60"); err != nil {
		return err
	}
	if err := poll(ctx, 20*time.Millisecond, func() (bool, error) {
		_, err := os.Stat(fmt.Sprintf("/proc/%d/root/run/flannel/subnet.env", n.PID()))
		if errors.Is(err, os.ErrNotExist) {
			return false, nil
		}
		return true, err
	}); err != nil {
		return fmt.Errorf("wait for flannel: %w", err)
	}
	return n.install(`{"type": "flannel", "delegate": {"hairpinMode": true, "isDefaultGateway": true}}`)
}

// The overlay of the routed shape has the same name, VNI and port as Calico's.
const (
	vxlanName = "vxlan.calico"
	vxlanID   = 4096
	vxlanPort = 4789
	vxlanMTU  = 1450
)

// vtep is a node's end of the overlay.
type vtep struct {
	node, addr net.IP
	pods       *net.IPNet
	mac        net.HardwareAddr
}

// route creates the overlay of the routed shape: on each node a VXLAN device,
// and through it a route, a neighbour and an FDB entry for each other node.
func (c *Cluster) route(ctx context.Context) error {
	var all []vtep
	for i, n := range c.nodes {
		cidr, err := n.podCIDR(ctx)
		if err != nil {
			return err
		}
		_, pods, err := net.ParseCIDR(cidr)
		if err != nil {
			return fmt.Errorf("addresses of %s's pods: %w", n.name, err)
		}
		all = append(all, vtep{
			node: net.ParseIP(n.Addr()).To4(),
			addr: pods.IP, // no pod uses the first address
			pods: pods,
			mac:  net.HardwareAddr{0x66, 0, 0, 0, 0, byte(i)},
		})
	}
	for i, n := range c.nodes {
		if err := onNetns(n.Netns(), func() error { return makeVXLAN(all, i) }); err != nil {
			return fmt.Errorf("overlay of %s: %w", n.name, err)
		}
		// Connections from pods to addresses outside the pod network come from their
		// node's address. The ipMasq option of the plugin ptp does not do that,
		// because it only knows the pods of its node.
		if _, err := output(n.Command(ctx, "iptables", "--wait", "--table", "nat", "--append", "POSTROUTING",
			"--source", podNetwork, "!", "--destination", podNetwork, "--jump", "MASQUERADE")); err != nil {
			return fmt.Errorf("masquerade the pods of %s: %w", n.name, err)
		}
		if err := n.install(fmt.Sprintf(`{"type": "ptp", "mtu": %d, "ipam": {"type": "host-local", "subnet": %q, "routes": [{"dst": "0.0.0.0/0"}]}}`,
			vxlanMTU, all[i].pods)); err != nil {
			return err
		}
	}
	return nil
}

// makeVXLAN creates the VXLAN device of one node, in its namespace.
func makeVXLAN(all []vtep, self int) error {
	nic, err := netlink.LinkByName(nicName)
	if err != nil {
		return fmt.Errorf("find %s: %w", nicName, err)
	}
	attrs := named(vxlanName)
	attrs.MTU, attrs.HardwareAddr = vxlanMTU, all[self].mac
	dev := &netlink.Vxlan{LinkAttrs: attrs, VxlanId: vxlanID, Port: vxlanPort, SrcAddr: all[self].node, VtepDevIndex: nic.Attrs().Index}
	if err := netlink.LinkAdd(dev); err != nil {
		return fmt.Errorf("make %s: %w", vxlanName, err)
	}
	if err := configure(vxlanName, netip.PrefixFrom(netip.AddrFrom4([4]byte(all[self].addr.To4())), 32).String()); err != nil {
		return err
	}
	for i, peer := range all {
		if i == self {
			continue
		}
		index := dev.Attrs().Index
		if err := errors.Join(
			netlink.NeighAdd(&netlink.Neigh{LinkIndex: index, State: unix.NUD_PERMANENT, Family: unix.AF_BRIDGE, Flags: unix.NTF_SELF, IP: peer.node, HardwareAddr: peer.mac}),
			netlink.NeighAdd(&netlink.Neigh{LinkIndex: index, State: unix.NUD_PERMANENT, IP: peer.addr, HardwareAddr: peer.mac}),
			netlink.RouteAdd(&netlink.Route{LinkIndex: index, Dst: peer.pods, Gw: peer.addr, Flags: int(netlink.FLAG_ONLINK)}),
		); err != nil {
			return fmt.Errorf("reach %s: %w", peer.node, err)
		}
	}
	return nil
}
