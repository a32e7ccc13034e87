//go:build linux

package policies

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/spec"
)

// version holds what differs between the rules for IPv4 and IPv6.
type version struct {
	// restore is the command that loads iptables rules, digit the version in names of sets.
	restore, digit string
	// ip and address are the names of the family and of its address type in nftables.
	ip, address string
	family      uint8
}

var versions = map[int]version{
	4: {"iptables-restore", "4", "ip", "ipv4_addr", unix.AF_INET},
	6: {"ip6tables-restore", "6", "ip6", "ipv6_addr", unix.AF_INET6},
}

// set returns the name of a policy's ipset as Calico names it: "cali40s:" and a hash.
func (v version) set(p policy) string {
	sum := sha256.Sum256([]byte(p.name))
	return "cali" + v.digit + "0s:" + base64.RawURLEncoding.EncodeToString(sum[:])[:22]
}

// Calico's marks (felix/rules): a policy has accepted the packet, or passed it to the next tier.
const (
	markAccept = "0x10000/0x10000"
	markPass   = "0x20000"
)

// rules returns the rules for the policies of a node. The ipsets must exist before they are loaded.
func (c *Config) rules(nodes []network.Node, i int) (all network.Rules) {
	for _, ip := range []int{4, 6} {
		v, policies, pods := versions[ip], c.policies(nodes, ip), podsOf(nodes[i], ip)
		if c.Mode == spec.PolicyNFTables {
			all = append(all, network.NFT(nftablesRules(v, policies, pods)))
		} else {
			all = append(all, network.Restore(v.restore, iptablesRules(v, c.Mode == spec.PolicyIPSet, policies, pods)))
		}
	}
	return all
}

// iptablesRules returns the rules for packets to pods as Calico writes them (felix/rules, version 3.30). But the dispatch chain
// selects a pod by its address, as kube-router's does, and not by its link as Calico's: on a bridge, the link is not known when
// the rules run.
func iptablesRules(v version, sets bool, policies []policy, pods []pod) []byte {
	var chains, rules bytes.Buffer
	chain := func(name string) { fmt.Fprintf(&chains, ":%s - [0:0]\n", name) }
	rule := func(format string, args ...any) { fmt.Fprintf(&rules, "-A "+format+"\n", args...) }
	chain("cali-FORWARD")
	chain("cali-to-wl-dispatch")
	rule("FORWARD -j cali-FORWARD")
	rule("FORWARD -m comment --comment \"Policy explicitly accepted packet.\" -m mark --mark %s -j ACCEPT", markAccept)
	rule("cali-FORWARD -j MARK --set-xmark 0x0/0x30000")
	rule("cali-FORWARD -j cali-to-wl-dispatch")
	for _, p := range pods {
		chain("cali-tw-" + p.name)
		for _, a := range p.addresses {
			rule("cali-to-wl-dispatch -d %s -g cali-tw-%s", a, p.name)
		}
		own := "cali-tw-" + p.name
		rule("%s -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", own)
		rule("%s -m conntrack --ctstate INVALID -j DROP", own)
		rule("%s -j MARK --set-xmark 0x0/0x10000", own)
		rule("%s -m comment --comment \"Start of policies\" -j MARK --set-xmark 0x0/%s", own, markPass)
		for _, q := range policies {
			rule("%s -m mark --mark 0x0/%s -j cali-pi-%s", own, markPass, q.name)
			rule("%s -m comment --comment \"Return if policy accepted\" -m mark --mark %s -j RETURN", own, markAccept)
		}
		rule("%s -m comment --comment \"Drop if no policies passed packet\" -m mark --mark 0x0/%s -j DROP", own, markPass)
	}
	for _, q := range policies {
		own := "cali-pi-" + q.name
		chain(own)
		if sets {
			rule("%s -m set --match-set %s src -j MARK --set-xmark %s", own, v.set(q), markAccept)
		} else {
			for _, a := range q.peers {
				rule("%s -s %s -j MARK --set-xmark %s", own, a, markAccept)
			}
		}
		rule("%s -m mark --mark %s -j RETURN", own, markAccept)
	}
	return bytes.Join([][]byte{[]byte("*filter\n"), chains.Bytes(), rules.Bytes(), []byte("COMMIT\n")}, nil)
}

// nftablesRules returns a transaction for nft -f: the same chains as Calico writes them for nftables (felix/nftables), and a
// map from addresses to the chains of pods.
func nftablesRules(v version, policies []policy, pods []pod) []byte {
	var b bytes.Buffer
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	table := v.ip + " calico"
	line("add table %s", table)
	line("add chain %s filter-FORWARD { type filter hook forward priority 0 ; }", table)
	for _, q := range policies {
		line("add set %s cali-s-%s { type %s ; flags interval ; elements = { %s } ; }", table, q.name, v.address, list(q.peers))
		line("add chain %s cali-pi-%s", table, q.name)
		line("add rule %s cali-pi-%s %s saddr @cali-s-%s mark set mark or 0x10000", table, q.name, v.ip, q.name)
		line("add rule %s cali-pi-%s mark and 0x10000 == 0x10000 return", table, q.name)
	}
	line("add map %s cali-to-wl-dispatch { type %s : verdict ; }", table, v.address)
	line("add rule %s filter-FORWARD mark set mark and 0xfffcffff", table)
	line("add rule %s filter-FORWARD %s daddr vmap @cali-to-wl-dispatch", table, v.ip)
	for _, p := range pods {
		own := fmt.Sprintf("%s cali-tw-%s", table, p.name)
		line("add chain %s", own)
		line("add rule %s ct state established,related accept", own)
		line("add rule %s ct state invalid drop", own)
		for _, q := range policies {
			line("add rule %s jump cali-pi-%s", own, q.name)
			line("add rule %s mark and 0x10000 == 0x10000 return", own)
		}
		line("add rule %s drop", own)
		for _, a := range p.addresses {
			if a.IsSingleIP() {
				line("add element %s cali-to-wl-dispatch { %s : goto cali-tw-%s }", table, a.Addr(), p.name)
			} else { // the backends of its service
				line("add rule %s filter-FORWARD %s daddr %s goto cali-tw-%s", table, v.ip, a, p.name)
			}
		}
	}
	return b.Bytes()
}

func list(all []netip.Prefix) string {
	texts := make([]string, len(all))
	for i, p := range all {
		texts[i] = p.String()
	}
	return strings.Join(texts, ", ")
}
