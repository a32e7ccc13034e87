package doctor

import (
	"errors"
	"flag"
	"fmt"
	"net"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/testenv"
)

// node is a node of a cluster, in the network namespace of the test's thread: a pod behind cni0, and Flannel's VXLAN over e0
// to another node.
type node struct {
	t          *testing.T
	pod, other int // processes
}

func newNode(t *testing.T) node {
	t.Helper()
	testenv.EnterNamespace(t)
	n := node{t, emptyPod(t), emptyPod(t)}
	n.sh(`ip link add e0 type veth peer name e0 netns $OTHER; ip addr add 10.77.0.1/24 dev e0; ip link set e0 up
		in_other ip addr add 10.77.0.2/24 dev e0; in_other ip link set e0 up
		sysctl -qw net.ipv4.ip_forward=1; in_other sysctl -qw net.ipv4.ip_forward=1
		vxlan='mtu 1450 type vxlan id 1 dev e0 dstport 8472 nolearning'
		ip link add flannel.1 address 02:00:00:00:01:01 $vxlan local 10.77.0.1; ip addr add 10.244.1.0/32 dev flannel.1; ip link set flannel.1 up
		in_other ip link add flannel.1 address 02:00:00:00:02:01 $vxlan local 10.77.0.2; in_other ip addr add 10.244.2.0/32 dev flannel.1; in_other ip link set flannel.1 up
		ip route add 10.244.2.0/24 via 10.244.2.0 dev flannel.1 onlink; ip neigh add 10.244.2.0 lladdr 02:00:00:00:02:01 dev flannel.1 nud permanent
		bridge fdb add 02:00:00:00:02:01 dev flannel.1 dst 10.77.0.2
		in_other ip route add 10.244.1.0/24 via 10.244.1.0 dev flannel.1 onlink; in_other ip neigh add 10.244.1.0 lladdr 02:00:00:00:01:01 dev flannel.1 nud permanent
		in_other bridge fdb add 02:00:00:00:01:01 dev flannel.1 dst 10.77.0.1
		ip link add cni0 mtu 1450 type bridge; ip addr add 10.244.1.1/24 dev cni0; ip link set cni0 up
		ip link add v0 mtu 1450 type veth peer name eth0 mtu 1450 netns $POD; ip link set v0 master cni0 up; bridge link set dev v0 hairpin on
		in_pod ip addr add 10.244.1.2/24 dev eth0; in_pod ip link set eth0 up; in_pod ip route add default via 10.244.1.1`)
	n.in(n.pod, func() error { // a request for the gateway's address that is sent before the links are up is repeated after a second
		if conn, err := net.DialTimeout("tcp", "10.244.1.1:9", 5*time.Second); !errors.Is(err, syscall.ECONNREFUSED) {
			return fmt.Errorf("the pod reaches its gateway: %v, %w", conn, err)
		}
		return nil
	})
	return n
}

// secondNetwork connects the pod to a bridge of Docker, too.
const secondNetwork = `ip link add docker0 type bridge; ip addr add 172.17.0.1/16 dev docker0; ip link set docker0 up
	ip link add v1 type veth peer name eth1 netns $POD; ip link set v1 master docker0 up
	in_pod ip addr add 172.17.0.2/16 dev eth1; in_pod ip link set eth1 up`

// remade makes flannel.1 again, with another binding.
func remade(binding string) string {
	return "ip link del flannel.1; ip link add flannel.1 address 02:00:00:00:01:01 mtu 1450 type vxlan id 1 dstport 8472 nolearning " + binding + `; ip addr add 10.244.1.0/32 dev flannel.1; ip link set flannel.1 up
		ip route add 10.244.2.0/24 via 10.244.2.0 dev flannel.1 onlink; ip neigh add 10.244.2.0 lladdr 02:00:00:00:02:01 dev flannel.1 nud permanent; bridge fdb add 02:00:00:00:02:01 dev flannel.1 dst 10.77.0.2`
}

// management connects both nodes a second time.
const management = "ip link add e1 type veth peer name e1 netns $OTHER; ip addr add 10.88.0.1/24 dev e1; ip link set e1 up; in_other ip link set e1 up; "

// emptyPod starts a process in a new network namespace.
func emptyPod(t *testing.T) int {
	t.Helper()
	c := exec.Command("sleep", "infinity")
	c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	})
	return c.Process.Pid
}

// sh runs a script on the node. in_pod and in_other run a command in the pod, and on the other node.
func (n node) sh(script string) {
	n.t.Helper()
	run(n.t, fmt.Sprintf("POD=%d; OTHER=%d; in_pod() { nsenter -t $POD -n \"$@\"; }; in_other() { nsenter -t $OTHER -n \"$@\"; }\n%s", n.pod, n.other, script))
}

// in runs fn in the network namespace of a process; 0 is the node.
func (n node) in(process int, fn func() error) {
	n.t.Helper()
	err := fn
	if process != 0 {
		err = func() error { return netns.DoAt(fmt.Sprintf("/proc/%d/ns/net", process), fn) }
	}
	if err := err(); err != nil {
		n.t.Fatal(err)
	}
}

// sends returns a function that sends a datagram from the network namespace of a process. Most faults make the kernel
// return an error for some of them.
func (n node) sends(process int, to string, size int) func() {
	n.t.Helper()
	var conn net.Conn
	n.in(process, func() (err error) {
		conn, err = net.Dial("udp", to)
		return err
	})
	n.t.Cleanup(func() { _ = conn.Close() })
	return func() { _, _ = conn.Write(make([]byte, size)) }
}

// raw returns a function that sends an IP packet of a protocol from the other node.
func (n node) raw(protocol string, payload []byte) func() {
	n.t.Helper()
	var conn net.Conn
	n.in(n.other, func() (err error) {
		conn, err = net.Dial("ip4:"+protocol, "10.77.0.1")
		return err
	})
	n.t.Cleanup(func() { _ = conn.Close() })
	return func() { _, _ = conn.Write(payload) }
}

// fills returns a socket in the network namespace of a process that nobody reads.
func (n node) fills(process int, at string) {
	n.t.Helper()
	n.in(process, func() error {
		conn, err := net.ListenPacket("udp", at)
		if err != nil {
			return err
		}
		n.t.Cleanup(func() { _ = conn.Close() })
		return conn.(*net.UDPConn).SetReadBuffer(4096)
	})
}

// TestFaultsOfANode injects faults of a node, one by one and some together. doctor must find each by its own evidence, and
// nothing else, and nothing before.
func TestFaultsOfANode(t *testing.T) {
	toOther := func(n node) func() { return n.sends(n.pod, "10.244.2.0:9", 200) }
	bothWays := func(n node) func() {
		there, back := toOther(n), n.sends(n.other, "10.244.1.2:9", 10)
		return func() { there(); back() }
	}
	for _, c := range []struct {
		name, inject string
		traffic      func(node) func()
		want         []string // severity, rule, and a word of the evidence
	}{
		{"nothing", "", toOther, nil},
		{"overlay down", "ip link set flannel.1 down", toOther, []string{"serious overlay-down InNoRoutes"}},
		{"overlay down, default route", "ip route add default via 10.77.0.2; ip link set flannel.1 down", toOther, []string{"serious overlay-down flannel.1"}},
		{"overlay gone", "ip link del flannel.1", toOther, []string{"serious overlay-gone InNoRoutes"}},
		{"overlay gone, no traffic", "ip link del flannel.1", nil, []string{"note overlay-gone cni0/mtu"}},
		{"NIC down", "ip link set e0 down", nil, []string{"serious overlay-down e0"}},
		{"bridge down", "ip link set cni0 down", nil, []string{"serious overlay-down cni0"}},
		{"pod's veth down", "ip link set v0 down", nil, []string{"warning overlay-down v0"}},
		{"ip_forward", "sysctl -qw net.ipv4.ip_forward=0", toOther, []string{"serious ip-forward InAddrErrors"}},
		{"ip_forward, no traffic", "sysctl -qw net.ipv4.ip_forward=0", nil, []string{"serious ip-forward ip_forward"}},
		{"forwarding of one device", "sysctl -qw net.ipv4.conf.cni0.forwarding=0", toOther, []string{"serious ip-forward conf/cni0/forwarding"}},
		{"policy of nftables", "nft 'add table ip f; add chain ip f fw { type filter hook forward priority 0; policy drop; }'", toOther, []string{"serious forward-policy nft"}},
		{"policy of nftables, replies accepted", `nft 'add table inet f; add chain inet f fw { type filter hook forward priority 0; policy drop; }
			add rule inet f fw ct state established,related accept; add rule inet f fw iifname "docker0" accept'`, toOther, []string{"serious forward-policy inet"}},
		{"policy of nftables, pods accepted", `nft 'add table inet f; add chain inet f fw { type filter hook forward priority 0; policy drop; }; add chain inet f pods
			add rule inet f fw jump pods; add rule inet f pods iifname "cni0" accept'`, toOther, nil},
		{"policy of iptables-nft", "iptables-nft -P FORWARD DROP; iptables-nft -A FORWARD -i docker0 -j ACCEPT; iptables-nft -A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
			toOther, []string{"serious forward-policy packets that met the policy, in"}},
		{"policy of iptables-nft, pods accepted", "iptables-nft -P FORWARD DROP; iptables-nft -N FLANNEL-FWD; iptables-nft -A FORWARD -j FLANNEL-FWD; iptables-nft -A FLANNEL-FWD -s 10.244.0.0/16 -j ACCEPT", toOther, nil},
		{"policy of iptables-legacy", "iptables-legacy -P FORWARD DROP; iptables-legacy -A FORWARD -i docker0 -j ACCEPT", toOther, []string{"serious forward-policy iptables-legacy"}},
		{"policy of iptables-legacy, no traffic", "iptables-legacy -P FORWARD DROP", nil, []string{"warning forward-policy iptables-legacy"}},
		{"policy of iptables-legacy, pods accepted", "iptables-legacy -P FORWARD DROP; iptables-legacy -N FWD; iptables-legacy -A FORWARD -j FWD; iptables-legacy -A FWD -i cni+ -j ACCEPT", toOther, nil},
		{"policy of iptables-legacy, services accepted", "iptables-legacy -P FORWARD DROP; iptables-legacy -N KUBE-FORWARD; iptables-legacy -A FORWARD -j KUBE-FORWARD; iptables-legacy -A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT",
			nil, []string{"warning forward-policy iptables-legacy"}},
		{"policy of iptables-legacy, marked packets accepted", "iptables-legacy -P FORWARD DROP; iptables-legacy -N cali-FORWARD; iptables-legacy -A FORWARD -j cali-FORWARD; iptables-legacy -A cali-FORWARD -m mark --mark 0x10000/0x10000 -j ACCEPT", nil, nil},
		{"policy of iptables-legacy, all but one device accepted", "iptables-legacy -P FORWARD DROP; iptables-legacy -A FORWARD ! -i docker0 ! -o docker0 -j ACCEPT", nil, nil},
		{"a rule that drops packets of pods", "iptables-nft -t mangle -N rpfilter; iptables-nft -t mangle -A PREROUTING -j rpfilter; iptables-nft -t mangle -A rpfilter -i cni0 -j DROP", toOther,
			[]string{"note rule-drops nft ip mangle PREROUTING"}},
		{"a firewall that drops VXLAN", "iptables-nft -A INPUT -p icmp -j ACCEPT; iptables-nft -P INPUT DROP", bothWays,
			[]string{"warning rule-drops nft ip filter INPUT"}},
		{"a rule that rejects all the rest, of iptables-nft", "iptables-nft -A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT; iptables-nft -A FORWARD -m comment --comment last -j REJECT --reject-with icmp-host-prohibited; iptables-nft -A FORWARD -s 10.244.0.0/16 -j ACCEPT",
			toOther, []string{"serious forward-policy packets that met the rule, in"}},
		{"a rule that rejects all the rest, no traffic", "iptables-nft -A FORWARD -i docker0 -j ACCEPT; iptables-nft -A FORWARD -j REJECT", nil, []string{"warning forward-policy a rule drops or rejects"}},
		{"a rule that rejects all the rest, of iptables-legacy", "iptables-legacy -A FORWARD -i docker0 -j ACCEPT; iptables-legacy -A FORWARD -j REJECT", toOther, []string{"serious forward-policy iptables-legacy"}},
		{"a rule that rejects all the rest, of iptables-legacy, pods accepted", "iptables-legacy -A FORWARD -s 10.244.0.0/16 -j ACCEPT; iptables-legacy -A FORWARD -j REJECT", toOther, nil},
		{"firewalld", `nft 'add table inet firewalld; add chain inet firewalld filter_FORWARD { type filter hook forward priority 10; policy accept; }; add chain inet firewalld zones; add chain inet firewalld trusted
			add rule inet firewalld filter_FORWARD ct state established,related accept; add rule inet firewalld filter_FORWARD ct status dnat accept; add rule inet firewalld filter_FORWARD iifname "lo" accept
			add rule inet firewalld filter_FORWARD jump zones; add rule inet firewalld filter_FORWARD reject with icmpx type admin-prohibited'`, toOther, []string{"serious forward-policy inet firewalld"}},
		{"firewalld, pods trusted", `nft 'add table inet firewalld; add chain inet firewalld filter_FORWARD { type filter hook forward priority 10; policy accept; }; add chain inet firewalld zones; add chain inet firewalld trusted
			add rule inet firewalld filter_FORWARD ct state established,related accept; add rule inet firewalld filter_FORWARD jump zones; add rule inet firewalld filter_FORWARD reject with icmpx type admin-prohibited
			add rule inet firewalld zones ip saddr 10.244.0.0/16 goto trusted; add rule inet firewalld trusted accept'`, toOther, nil},
		{"rules behind a return, and rules for others", `nft 'add table ip f; add chain ip f fw { type filter hook forward priority 0; policy accept; }; add chain ip f user; add chain ip f others
			add rule ip f fw jump user; add rule ip f user return; add rule ip f user drop; add rule ip f fw iifname "docker0" jump others; add rule ip f others drop'`, toOther, nil},
		{"both kinds of iptables", "iptables-legacy -A INPUT -p icmp -j ACCEPT; iptables-nft -A INPUT -p icmp -j ACCEPT", toOther, []string{"warning iptables-twice legacy"}},
		{"bridge-nf-call-iptables", "sysctl -qw net.bridge.bridge-nf-call-iptables=0", toOther, []string{"note bridge-nf bridge-nf-call-iptables"}},
		{"bridge-nf-call-iptables, kube-proxy", "sysctl -qw net.bridge.bridge-nf-call-iptables=0; iptables-nft -t nat -N KUBE-SERVICES", toOther, []string{"warning bridge-nf KUBE-SERVICES"}},
		{"no hairpin mode, kube-proxy", "bridge link set dev v0 hairpin off; iptables-nft -t nat -N KUBE-SERVICES", toOther, []string{"note hairpin brport/hairpin_mode"}},
		{"no hairpin mode", "bridge link set dev v0 hairpin off", toOther, nil},
		{"a promiscuous bridge, kube-proxy", "bridge link set dev v0 hairpin off; ip link set cni0 promisc on; iptables-nft -t nat -N KUBE-SERVICES", toOther, nil},
		{"an address that the node does not have", remade("dev e0 local 10.77.0.9"), toOther, []string{"serious overlay-local local 10.77.0.9"}},
		{"an address of the loopback device", "ip addr add 10.99.0.1/32 dev lo; " + remade("dev e0 local 10.99.0.1"), toOther, nil},
		{"a management NIC", management + remade("dev e1 local 10.88.0.1"), toOther, []string{"serious overlay-nic dev e0"}},
		{"a bridge of containers", "ip link add docker0 type bridge; ip addr add 172.17.0.1/16 dev docker0; ip link set docker0 up; " + remade("dev docker0 local 172.17.0.1"), toOther, []string{"serious overlay-nic dev docker0"}},
		{"a second NIC", management + "ip route add 10.77.0.2 dev e1; " + remade("dev e1 local 10.88.0.1"), nil, nil},
		{"the NIC as a port of a bridge", "ip link add br0 type bridge; ip link set br0 up; ip addr flush dev e0; ip link set e0 master br0; ip addr add 10.77.0.1/24 dev br0; " + remade("dev e0 local 10.77.0.1"), nil, nil},
		{"a bridge that carries the overlay", "ip link add br0 type bridge; ip link set br0 up; ip addr flush dev e0; ip link set e0 master br0; ip addr add 10.77.0.1/24 dev br0; " + remade("dev br0 local 10.77.0.1"), nil, nil},
		{"MTU of the pod", "ip link set v0 mtu 1500; ip link set cni0 mtu 1500; in_pod ip link set eth0 mtu 1500", toOther, []string{"warning pod-mtu eth0"}},
		{"MTU of the pod's device, but not of its route", "ip link set v0 mtu 1500; ip link set cni0 mtu 1500; in_pod ip link set eth0 mtu 1500; in_pod ip route replace default via 10.244.1.1 mtu 1450", toOther, nil},
		{"MTU of the pod, packets lost", "ip link set v0 mtu 1500; ip link set cni0 mtu 1500; in_pod ip link set eth0 mtu 1500; nft 'add table ip f; add chain ip f o { type filter hook output priority 0; }; add rule ip f o icmp type destination-unreachable drop'",
			func(n node) func() { return n.sends(n.pod, "10.244.2.0:9", 1470) }, []string{"serious pod-mtu FragFails"}},
		{"VXLAN bound to no device", "ip link add vx9 mtu 1500 type vxlan id 9 local 10.77.0.1 dstport 4789; ip link set vx9 up", toOther, []string{"serious mtu-too-large e0/mtu"}},
		{"two nodes with one MAC address", "bridge fdb add 02:00:00:00:01:01 dev flannel.1 dst 10.77.0.3", toOther, []string{"serious vtep MAC address of flannel.1 itself"}},
		{"another MAC address than other nodes know", "ip link set flannel.1 address 02:00:00:00:0a:0a", func(n node) func() { return n.sends(n.other, "10.244.1.2:9", 10) },
			[]string{"serious other-mac otherhost"}},
		{"a blackhole", "ip route replace blackhole 10.244.2.0/24", toOther, []string{"serious blackhole 10.244.2.0/24"}},
		{"a blackhole for the node's own pods", "ip route add blackhole 10.244.1.0/24 metric 500", toOther, nil},
		{"a gateway with another MAC address", "in_pod ip neigh replace 10.244.1.1 lladdr 02:00:00:00:0b:0b dev eth0 nud permanent", toOther, []string{"serious pod-gateway 02:00:00:00:0b:0b"}},
		{"a gateway without ARP", "in_pod ip neigh replace 10.244.1.1 lladdr 00:00:00:00:00:00 dev eth0 nud noarp", nil, nil},
		{"a gateway that does not answer", "ip addr del 10.244.1.1/24 dev cni0; ip route add 10.244.1.0/24 dev cni0; in_pod ip neigh flush dev eth0", toOther, []string{"serious pod-gateway 10.244.1.1 failed"}},
		{"a second network of the pod", secondNetwork, toOther, nil},
		{"a second network of the pod, with its default route", secondNetwork + "; in_pod ip route replace default via 172.17.0.1", toOther, nil},
		{"a second network of the pod, and a gateway with another MAC address", secondNetwork + "; in_pod ip neigh replace 10.244.1.1 lladdr 02:00:00:00:0b:0b dev eth0 nud permanent", toOther, []string{"serious pod-gateway 02:00:00:00:0b:0b"}},
		{"wrong checksums", "", func(n node) func() {
			return n.raw("udp", append([]byte{0x9c, 0x40, 0x21, 0x18, 0, 108, 0x12, 0x34}, make([]byte, 100)...))
		}, []string{"serious udp-checksums InCsumErrors"}},
		{"an unread socket", "", func(n node) func() {
			n.fills(0, "10.77.0.1:7777")
			return n.sends(n.other, "10.77.0.1:7777", 500)
		}, []string{"serious udp-buffer-full RcvbufErrors"}},
		{"an unread socket in a pod", "", func(n node) func() {
			n.fills(n.pod, "10.244.1.2:7777")
			return n.sends(0, "10.244.1.2:7777", 500)
		}, []string{"serious udp-buffer-full of the pod behind v0 (sleep)"}},
		{"two faults", "sysctl -qw net.ipv4.ip_forward=0", func(n node) func() {
			n.fills(0, "10.77.0.1:7777")
			fill, forward := n.sends(n.other, "10.77.0.1:7777", 500), toOther(n)
			return func() { fill(); forward() }
		}, []string{"serious ip-forward InAddrErrors", "serious udp-buffer-full RcvbufErrors"}},
		{"an accept queue", "", func(n node) func() {
			fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
			if err == nil {
				err = syscall.Bind(fd, &syscall.SockaddrInet4{Port: 7000})
			}
			if err == nil {
				err = syscall.Listen(fd, 1)
			}
			if err != nil {
				t.Fatal(err)
			}
			n.t.Cleanup(func() { _ = syscall.Close(fd) })
			return n.connects("10.77.0.1", 7000)
		}, []string{"serious accept-queue-full ListenOverflows"}},
		{"a loop of routes", "ip route add 192.0.2.0/24 via 10.77.0.2; in_other ip route add 192.0.2.0/24 via 10.77.0.1; in_pod sysctl -qw net.ipv4.ip_default_ttl=63", // 64 expires on the other node
			func(n node) func() { return n.sends(n.pod, "192.0.2.1:9", 10) },
			[]string{"serious ttl InHdrErrors"}},
		{"no neighbour entry for the other node", "ip neigh del 10.244.2.0 dev flannel.1", toOther, []string{"serious no-neighbour 10.244.2.0 failed or incomplete"}},
		{"pods of another network", "ip addr del 10.244.1.1/24 dev cni0; ip addr add 10.244.5.1/24 dev cni0; in_pod ip addr flush dev eth0; in_pod ip addr add 10.244.5.2/24 dev eth0; in_pod ip route add default via 10.244.5.1",
			nil, []string{"serious pod-subnet 10.244.5.1/24"}},
		{"IPIP without a tunnel", "", func(n node) func() { return n.raw("4", make([]byte, 40)) }, []string{"serious unknown-protocol InUnknownProtos"}},
		{"no route", "ip route del 10.244.2.0/24", toOther, []string{"serious no-route InNoRoutes"}},
		{"half of the fragments", "sysctl -qw net.ipv4.ipfrag_low_thresh=500 net.ipv4.ipfrag_high_thresh=1000", func(n node) func() { return n.sends(n.other, "10.77.0.1:9", 4000) },
			[]string{"serious reassembly ReasmFails"}},
		{"a rate", "tc qdisc add dev v0 root tbf rate 100kbit burst 1600 limit 3000", func(n node) func() { return n.sends(0, "10.244.1.2:9", 500) }, []string{"serious qdisc-drops tbf"}},
		{"another VXLAN port", "in_other ip link del flannel.1; in_other ip link add flannel.1 address 02:00:00:00:02:01 mtu 1450 type vxlan id 1 dev e0 local 10.77.0.2 dstport 4789 nolearning; in_other ip addr add 10.244.2.0/32 dev flannel.1; " +
			"in_other ip link set flannel.1 up; in_other ip route add 10.244.1.0/24 via 10.244.1.0 dev flannel.1 onlink; in_other ip neigh add 10.244.1.0 lladdr 02:00:00:00:01:01 dev flannel.1; in_other bridge fdb add 02:00:00:00:01:01 dev flannel.1 dst 10.77.0.1",
			bothWays, []string{"warning no-listener NoPorts"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := newNode(t)
			if c.inject != "" {
				n.sh(c.inject)
			}
			do := func() {}
			if c.traffic != nil {
				do = c.traffic(n)
			}
			testenv.Retry(t, 3, func() error {
				found := lookWhile(t, do)
				if len(found) != len(c.want) {
					return fmt.Errorf("found %+v, want %q", found, c.want)
				}
				for i, want := range c.want {
					fields := strings.SplitN(want, " ", 3)
					if j := slices.IndexFunc(found, func(f Finding) bool {
						return string(f.Severity) == fields[0] && f.Rule == fields[1] && strings.Contains(fmt.Sprint(f.Evidence), fields[2])
					}); j < 0 {
						return fmt.Errorf("found %+v, want %q", found, c.want[i])
					}
				}
				return nil
			})
		})
	}
}

// connects returns a function that opens connections from the other node, and does not wait for them.
func (n node) connects(to string, port int) func() {
	n.t.Helper()
	address := &syscall.SockaddrInet4{Port: port}
	copy(address.Addr[:], net.ParseIP(to).To4())
	var made []int
	n.t.Cleanup(func() {
		for _, fd := range made {
			_ = syscall.Close(fd)
		}
	})
	var fds []int // made in the namespace of the other node, used anywhere
	n.in(n.other, func() error {
		for range 2000 {
			fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_NONBLOCK, 0)
			if err != nil {
				return err
			}
			fds = append(fds, fd)
		}
		return nil
	})
	made = fds
	return func() {
		if len(fds) > 0 {
			_ = syscall.Connect(fds[0], address)
			fds = fds[1:]
		}
	}
}

var healthyLooks = flag.Int("looks", 1, "how often TestHealthyNodes looks at each kind of node")

// healthyNodes change a node into another healthy one, whose pod still reaches the other node.
var healthyNodes = map[string]string{
	"Flannel":                   "",
	"containers of Docker, too": secondNetwork,
	"Docker's policy":           "iptables-nft -P FORWARD DROP; iptables-nft -A FORWARD -s 10.244.0.0/16 -j ACCEPT; iptables-nft -A FORWARD -d 10.244.0.0/16 -j ACCEPT",
	"firewalld": `nft 'add table inet firewalld; add chain inet firewalld filter_FORWARD { type filter hook forward priority 10; policy accept; }; add chain inet firewalld zones; add chain inet firewalld trusted
		add rule inet firewalld filter_FORWARD ct state established,related accept; add rule inet firewalld filter_FORWARD jump zones; add rule inet firewalld filter_FORWARD reject with icmpx type admin-prohibited
		add rule inet firewalld zones iifname "cni0" goto trusted; add rule inet firewalld zones oifname "cni0" goto trusted; add rule inet firewalld trusted accept'`,
	"RHEL's iptables": "iptables-legacy -A FORWARD -i cni0 -j ACCEPT; iptables-legacy -A FORWARD -o cni0 -j ACCEPT; iptables-legacy -A FORWARD -j REJECT",
	"kube-proxy": `iptables-nft -t nat -N KUBE-SERVICES; iptables-nft -t nat -A PREROUTING -j KUBE-SERVICES; iptables-nft -N KUBE-FORWARD; iptables-nft -A FORWARD -j KUBE-FORWARD
		iptables-nft -A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP; iptables-nft -A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT; sysctl -qw net.bridge.bridge-nf-call-iptables=1`,
	"two IP versions": `sysctl -qw net.ipv6.conf.all.forwarding=1; ip addr add fd00:10:244:1::1/64 dev cni0 nodad
		in_pod ip addr add fd00:10:244:1::2/64 dev eth0 nodad; in_pod ip -6 route add default via fd00:10:244:1::1`,
	"a second NIC":                      management + "in_other ip addr add 10.88.0.2/24 dev e1",
	"macvlan below the overlay":         "ip link add link e0 name mv0 type macvlan mode bridge; ip addr flush dev e0; ip addr add 10.77.0.1/24 dev mv0; ip link set mv0 up; " + remade("dev mv0 local 10.77.0.1"),
	"a bridge below the overlay":        "ip link add br0 type bridge; ip link set br0 up; ip addr flush dev e0; ip link set e0 master br0; ip addr add 10.77.0.1/24 dev br0; " + remade("dev br0 local 10.77.0.1"),
	"an address of the loopback device": "ip addr add 10.99.0.1/32 dev lo; in_other ip route add 10.99.0.1/32 via 10.77.0.1; " + remade("local 10.99.0.1") + "; in_other bridge fdb replace 02:00:00:00:01:01 dev flannel.1 dst 10.99.0.1",
	"routes without an overlay": `ip link del flannel.1; in_other ip link del flannel.1; ip link set cni0 mtu 1500; ip link set v0 mtu 1500; in_pod ip link set eth0 mtu 1500; ip route add 10.244.2.0/24 via 10.77.0.2
		in_other ip route add 10.244.1.0/24 via 10.77.0.1; in_other ip addr add 10.244.2.0/32 dev lo`,
	"Calico": `ip route add default via 10.77.0.2; ip link del cni0; ip link set v0 down; ip link set v0 name cali0123456789a address ee:ee:ee:ee:ee:ee; ip link set cali0123456789a up
		sysctl -qw net.ipv4.conf.cali0123456789a.proxy_arp=1; ip route add 10.244.1.2/32 dev cali0123456789a; ip route add blackhole 10.244.1.0/24 metric 500 proto 80
		in_pod ip addr flush dev eth0; in_pod ip addr add 10.244.1.2/32 dev eth0; in_pod ip route add 169.254.1.1 dev eth0; in_pod ip route add default via 169.254.1.1`,
}

// TestHealthyNodes looks at healthy nodes of several kinds while pods send both ways, and finds nothing.
func TestHealthyNodes(t *testing.T) {
	for name, change := range healthyNodes {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			if change != "" {
				n.sh(change)
			}
			n.in(n.pod, func() error {
				if conn, err := net.DialTimeout("tcp", "10.244.2.0:9", 10*time.Second); !errors.Is(err, syscall.ECONNREFUSED) {
					return fmt.Errorf("the pod reaches the other node: %v, %w", conn, err)
				}
				return nil
			})
			there, back := n.sends(n.pod, "10.244.2.0:9", 1000), n.sends(n.other, "10.244.1.2:9", 10)
			for range *healthyLooks {
				if found := lookWhile(t, func() { there(); back() }); len(found) > 0 {
					t.Fatalf("found %+v", found)
				}
			}
		})
	}
}

// TestOverlaysDiffer changes the overlay of one of two nodes after the other has learned of it, and compares them.
func TestOverlaysDiffer(t *testing.T) {
	remake := func(change string) string {
		return "in_other ip link del flannel.1; in_other ip link add flannel.1 address 02:00:00:00:02:01 mtu 1450 " + change + "; in_other ip addr add 10.244.2.0/32 dev flannel.1; in_other ip link set flannel.1 up"
	}
	const otherPods = "in_other ip link add cni0 type bridge; in_other ip link set cni0 up; in_other ip link add v1 type veth peer name eth9 netns $POD; in_other ip link set v1 master cni0 up; "
	for _, c := range []struct{ name, inject, want string }{
		{"nothing", "", ""},
		{"MAC address", "in_other ip link set flannel.1 address 02:00:00:00:0a:0a", "serious 02:00:00:00:0a:0a"},
		{"port", remake("type vxlan id 1 dev e0 local 10.77.0.2 dstport 8473 nolearning"), "serious dstport 8473"},
		{"VNI", remake("type vxlan id 2 dev e0 local 10.77.0.2 dstport 8472 nolearning"), "serious VNI 2"},
		{"MTU", "in_other ip link set flannel.1 mtu 1400", "warning 1400"},
		{"gone", "in_other ip link del flannel.1", "serious none with VNI 1"},
		{"pods of one network", otherPods + "in_other ip addr add 10.244.1.7/24 dev cni0", "serious 10.244.1.7/24"},
		{"one network of all nodes", otherPods + "ip link set cni0 down; ip link set cni0 name weave; ip link set weave up; in_other ip link set cni0 down; in_other ip link set cni0 name weave; in_other ip link set weave up; in_other ip addr add 10.244.1.7/24 dev weave", ""},
		{"pods of two networks", otherPods + "in_other ip addr add 10.244.2.1/24 dev cni0", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := newNode(t)
			if c.inject != "" {
				n.sh(c.inject)
			}
			here, err := ReadFacts(t.Context(), time.Millisecond, false)
			if err != nil {
				t.Fatal(err)
			}
			var there Facts
			n.in(n.other, func() (err error) {
				there, err = ReadFacts(t.Context(), time.Millisecond, false)
				return err
			})
			found := ExaminePair(NewPeer("a", here), NewPeer("b", there))
			severity, value, _ := strings.Cut(c.want, " ")
			if c.want == "" != (len(found) == 0) || len(found) > 1 || len(found) == 1 && (string(found[0].Severity) != severity || !strings.Contains(fmt.Sprint(found[0].Evidence), value)) {
				t.Errorf("found %+v, want %q", found, c.want)
			}
		})
	}
}
