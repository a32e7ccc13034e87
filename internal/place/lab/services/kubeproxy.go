//go:build linux

package services

import (
	"bytes"
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"net/netip"
	"strings"

	"slipstream.dev/internal/place/lab/network"
)

// The rules that kube-proxy of Kubernetes 1.34 writes (pkg/proxy/iptables/proxier.go and pkg/proxy/nftables/proxier.go). Those
// of KUBE-FORWARD are missing, because every node of a lab has them in another table (filter.go).

// serviceNamespace is the namespace of a lab's services. Their ports are named after protocols.
const serviceNamespace = "slipstream"

// version holds what differs between kube-proxy's rules for IPv4 and IPv6, which it writes separately.
type version struct {
	// cluster is the prefix of all pods, clusterIPs that of all services.
	cluster, clusterIPs netip.Prefix
	// restore is the command that loads iptables rules. notLocal excludes node ports on localhost, as kube-proxy does by
	// default.
	restore, notLocal string
	// ip and address are the names of the family and of its address type in nftables.
	ip, address string
}

var versions = map[int]version{
	4: {servedCluster4, clusterIPs4, "iptables-restore", "", "ip", "ipv4_addr"},
	6: {network.Cluster6, clusterIPs6, "ip6tables-restore", " ! -d ::1/128", "ip6", "ipv6_addr"},
}

// largeCluster is the number of endpoints above which kube-proxy writes no comments.
const largeCluster = 1000

// hash returns the part of chain names that makes them unique.
func hash(parts ...string) string {
	sum := sha256.Sum256([]byte(strings.Join(parts, "")))
	return base32.StdEncoding.EncodeToString(sum[:])
}

// iptablesRules returns input for iptables-restore --noflush, which replaces the chains that it names: those of changed
// services. All services have the same IP version.
func iptablesRules(services, changed []service) []byte {
	v := versions[services[0].transport.IP]
	endpoints := 0
	for _, s := range services {
		endpoints += len(s.backends)
	}
	comment := func(text string) string {
		if endpoints > largeCluster {
			return ""
		}
		return ` -m comment --comment "` + text + `"`
	}
	var chains, rules bytes.Buffer
	for _, name := range []string{"KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-POSTROUTING", "KUBE-MARK-MASQ"} {
		fmt.Fprintf(&chains, ":%s - [0:0]\n", name)
	}
	fmt.Fprintf(&rules, "-A KUBE-POSTROUTING -m mark ! --mark %#x/%#[1]x -j RETURN\n", markMasquerade)
	fmt.Fprintf(&rules, "-A KUBE-POSTROUTING -j MARK --xor-mark %#x\n", markMasquerade)
	fmt.Fprintf(&rules, "-A KUBE-POSTROUTING -m comment --comment \"kubernetes service traffic requiring SNAT\" -j MASQUERADE --random-fully\n")
	fmt.Fprintf(&rules, "-A KUBE-MARK-MASQ -j MARK --or-mark %#x\n", markMasquerade)
	for _, s := range services {
		fmt.Fprintf(&rules, "-A KUBE-SERVICES %s -j %s\n", s.iptablesMatch(), s.iptablesChain())
	}
	for _, s := range changed {
		chain, name := s.iptablesChain(), s.portName()
		fmt.Fprintf(&chains, ":%s - [0:0]\n", chain)
		fmt.Fprintf(&rules, "-A %s %s ! -s %s -j KUBE-MARK-MASQ\n", chain, s.iptablesMatch(), v.cluster)
		for i, b := range s.backends {
			chance := ""
			if left := len(s.backends) - i; left > 1 {
				chance = fmt.Sprintf(" -m statistic --mode random --probability %.10f", 1/float64(left))
			}
			fmt.Fprintf(&rules, "-A %s%s%s -j %s\n", chain, comment(name+" -> "+b.String()), chance, s.iptablesEndpoint(b))
		}
		for _, b := range s.backends {
			endpoint := s.iptablesEndpoint(b)
			fmt.Fprintf(&chains, ":%s - [0:0]\n", endpoint)
			fmt.Fprintf(&rules, "-A %s%s -s %s -j KUBE-MARK-MASQ\n", endpoint, comment(name), b.Addr())
			fmt.Fprintf(&rules, "-A %s%s -m %[3]s -p %[3]s -j DNAT --to-destination %s\n", endpoint, comment(name), s.transport.Protocol, b)
		}
	}
	fmt.Fprintf(&rules, "-A KUBE-SERVICES -m comment --comment \"kubernetes service nodeports; NOTE: this must be the last rule in this chain\" "+
		"-m addrtype --dst-type LOCAL%s -j KUBE-NODEPORTS\n", v.notLocal)
	return bytes.Join([][]byte{
		[]byte("*filter\n:KUBE-SERVICES - [0:0]\n:KUBE-EXTERNAL-SERVICES - [0:0]\n:KUBE-NODEPORTS - [0:0]\n:KUBE-PROXY-FIREWALL - [0:0]\nCOMMIT\n*nat\n"),
		chains.Bytes(), rules.Bytes(), []byte("COMMIT\n"),
	}, nil)
}

// iptablesJumps returns the jumps from the built-in chains to kube-proxy's.
func iptablesJumps() []byte {
	const jump = "-A %s%s -m comment --comment \"%s\" -j %s\n"
	var filter, nat bytes.Buffer
	const fresh = " -m conntrack --ctstate NEW"
	for _, chain := range []string{"INPUT", "FORWARD", "OUTPUT"} {
		fmt.Fprintf(&filter, jump, chain, fresh, "kubernetes load balancer firewall", "KUBE-PROXY-FIREWALL")
		if chain != "INPUT" {
			fmt.Fprintf(&filter, jump, chain, fresh, "kubernetes service portals", "KUBE-SERVICES")
		} else {
			fmt.Fprintf(&filter, jump, chain, "", "kubernetes health check service ports", "KUBE-NODEPORTS")
		}
		if chain != "OUTPUT" {
			fmt.Fprintf(&filter, jump, chain, fresh, "kubernetes externally-visible service portals", "KUBE-EXTERNAL-SERVICES")
		}
	}
	for _, chain := range []string{"PREROUTING", "OUTPUT"} {
		fmt.Fprintf(&nat, jump, chain, "", "kubernetes service portals", "KUBE-SERVICES")
	}
	fmt.Fprintf(&nat, jump, "POSTROUTING", "", "kubernetes postrouting rules", "KUBE-POSTROUTING")
	return bytes.Join([][]byte{[]byte("*filter\n"), filter.Bytes(), []byte("COMMIT\n*nat\n"), nat.Bytes(), []byte("COMMIT\n")}, nil)
}

// portName names a service's port in comments and hashes.
func (s service) portName() string {
	return serviceNamespace + "/" + s.name + ":" + s.transport.Protocol
}

func (s service) iptablesMatch() string {
	return fmt.Sprintf("-m comment --comment \"%s cluster IP\" -m %[2]s -p %[2]s -d %s --dport %d", s.portName(), s.transport.Protocol, s.address.Addr(), s.address.Port())
}

func (s service) iptablesChain() string {
	return "KUBE-SVC-" + hash(s.portName(), s.transport.Protocol)[:16]
}

func (s service) iptablesEndpoint(b netip.AddrPort) string {
	return "KUBE-SEP-" + hash(s.portName(), s.transport.Protocol, b.String())[:16]
}

// nftablesTable returns kube-proxy's table without services. It omits the node's address from the set of node port addresses,
// because no service has a node port.
func nftablesTable(v version) []byte {
	return []byte(strings.NewReplacer("$ip", v.ip, "$address", v.address, "$services", v.clusterIPs.String()).Replace(nftablesText))
}

const nftablesText = `add table $ip kube-proxy { comment "rules for kube-proxy" ; }
add chain $ip kube-proxy filter-prerouting-pre-dnat { type filter hook prerouting priority -110 ; }
add chain $ip kube-proxy filter-output-pre-dnat { type filter hook output priority -110 ; }
add chain $ip kube-proxy filter-input { type filter hook input priority 0 ; }
add chain $ip kube-proxy filter-forward { type filter hook forward priority 0 ; }
add chain $ip kube-proxy filter-output { type filter hook output priority 0 ; }
add chain $ip kube-proxy nat-prerouting { type nat hook prerouting priority -100 ; }
add chain $ip kube-proxy nat-output { type nat hook output priority -100 ; }
add chain $ip kube-proxy nat-postrouting { type nat hook postrouting priority 100 ; }
add chain $ip kube-proxy nodeport-endpoints-check
add chain $ip kube-proxy service-endpoints-check
add chain $ip kube-proxy firewall-check
add chain $ip kube-proxy cluster-ips-check
add chain $ip kube-proxy services
add chain $ip kube-proxy masquerading
add chain $ip kube-proxy mark-for-masquerade
add chain $ip kube-proxy reject-chain { comment "helper for @no-endpoint-services / @no-endpoint-nodeports" ; }
add rule $ip kube-proxy filter-input ct state new jump nodeport-endpoints-check
add rule $ip kube-proxy filter-input ct state new jump service-endpoints-check
add rule $ip kube-proxy filter-forward ct state new jump service-endpoints-check
add rule $ip kube-proxy filter-output ct state new jump service-endpoints-check
add rule $ip kube-proxy filter-prerouting-pre-dnat ct state new jump firewall-check
add rule $ip kube-proxy filter-output-pre-dnat ct state new jump firewall-check
add rule $ip kube-proxy nat-output jump services
add rule $ip kube-proxy nat-prerouting jump services
add rule $ip kube-proxy nat-postrouting jump masquerading
add rule $ip kube-proxy filter-forward ct state new jump cluster-ips-check
add rule $ip kube-proxy filter-output ct state new jump cluster-ips-check
add rule $ip kube-proxy mark-for-masquerade mark set mark or 0x4000
add rule $ip kube-proxy masquerading mark and 0x4000 == 0 return
add rule $ip kube-proxy masquerading mark set mark xor 0x4000
add rule $ip kube-proxy masquerading masquerade fully-random
add set $ip kube-proxy cluster-ips { type $address ; comment "Active ClusterIPs" ; }
add rule $ip kube-proxy cluster-ips-check $ip daddr @cluster-ips reject comment "Reject traffic to invalid ports of ClusterIPs"
add rule $ip kube-proxy cluster-ips-check $ip daddr { $services } drop comment "Drop traffic to unallocated ClusterIPs"
add set $ip kube-proxy nodeport-ips { type $address ; comment "IPs that accept NodePort traffic" ; }
add map $ip kube-proxy no-endpoint-services { type $address . inet_proto . inet_service : verdict ; }
add map $ip kube-proxy no-endpoint-nodeports { type inet_proto . inet_service : verdict ; }
add rule $ip kube-proxy reject-chain reject
add rule $ip kube-proxy service-endpoints-check $ip daddr . meta l4proto . th dport vmap @no-endpoint-services
add rule $ip kube-proxy nodeport-endpoints-check $ip daddr @nodeport-ips meta l4proto . th dport vmap @no-endpoint-nodeports
add map $ip kube-proxy firewall-ips { type $address . inet_proto . inet_service : verdict ; }
add rule $ip kube-proxy firewall-check $ip daddr . meta l4proto . th dport vmap @firewall-ips
add map $ip kube-proxy service-ips { type $address . inet_proto . inet_service : verdict ; }
add map $ip kube-proxy service-nodeports { type inet_proto . inet_service : verdict ; }
add rule $ip kube-proxy services $ip daddr . meta l4proto . th dport vmap @service-ips
add rule $ip kube-proxy services $ip daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports
`

// nftablesRules returns a transaction for nft -f that rewrites the chains of a service and of all its backends, even if only
// some have changed.
func nftablesRules(s service) []byte {
	var b bytes.Buffer
	v, protocol, chain := versions[s.transport.IP], s.transport.Protocol, s.nftablesChain()
	table := v.ip + " kube-proxy"
	add := func(chain string) { fmt.Fprintf(&b, "add chain %s %s\nflush chain %[1]s %[2]s\n", table, chain) }
	add(chain)
	for _, to := range s.backends {
		add(s.nftablesEndpoint(to))
	}
	fmt.Fprintf(&b, "add element %s cluster-ips { %s }\n", table, s.address.Addr())
	fmt.Fprintf(&b, "add element %s service-ips { %s . %s . %d : goto %s }\n", table, s.address.Addr(), protocol, s.address.Port(), chain)
	fmt.Fprintf(&b, "add rule %s %s %s daddr %s %[3]s saddr != %[5]s jump mark-for-masquerade\n", table, chain, v.ip, s.address.Addr(), v.cluster)
	fmt.Fprintf(&b, "add rule %s %s numgen random mod %d vmap {", table, chain, len(s.backends))
	for i, to := range s.backends {
		separator := ","
		if i == 0 {
			separator = ""
		}
		fmt.Fprintf(&b, "%s %d : goto %s", separator, i, s.nftablesEndpoint(to))
	}
	b.WriteString(" }\n")
	for _, to := range s.backends {
		endpoint := s.nftablesEndpoint(to)
		fmt.Fprintf(&b, "add rule %s %s %s saddr %s jump mark-for-masquerade\n", table, endpoint, v.ip, to.Addr())
		fmt.Fprintf(&b, "add rule %s %s meta l4proto %s dnat to %s\n", table, endpoint, protocol, to)
	}
	return b.Bytes()
}

func (s service) nftablesChain() string { return "service-" + nftablesName(s.nftablesPort()) }

func (s service) nftablesEndpoint(b netip.AddrPort) string {
	// The name of a chain must not contain a colon.
	ip := strings.ReplaceAll(b.Addr().String(), ":", ".")
	return "endpoint-" + nftablesName(fmt.Sprintf("%s__%s/%d", s.nftablesPort(), ip, b.Port()))
}

// nftablesPort names a service's port in the names of chains.
func (s service) nftablesPort() string {
	return fmt.Sprintf("%s/%s/%[3]s/%[3]s", serviceNamespace, s.name, s.transport.Protocol)
}

func nftablesName(name string) string { return hash(name)[:8] + "-" + name }
