//go:build linux

package lab

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
)

// family is what the rules of an IP version differ in.
type family struct {
	family nftables.TableFamily
	// source and destination are the offsets of the addresses in the header.
	source, destination uint32
	// pods of the node, of the cluster, and the multicast range.
	pods, cluster, multicast netip.Prefix
}

// filter gives a node the rules that every packet meets on a node of
// Kubernetes: kube-proxy's of the forward chain, which are what makes
// connections tracked, and flannel's masquerading, which lets traffic between
// pods alone. Those of services are added where there are some (see service.go);
// those of network policy are left out: there is none here. Calico's node has flannel's too, in place of its own of the same
// purpose, so that the shapes differ in how packets travel and in nothing else.
func filter(ns *namespace, n node) error {
	conn, err := nftables.New(nftables.WithNetNSFd(int(ns.handle)))
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	for _, f := range []family{
		{nftables.TableFamilyIPv4, 12, 16, n.pods4, n.cluster4, netip.MustParsePrefix("224.0.0.0/4")},
		{nftables.TableFamilyIPv6, 8, 24, n.pods6, cluster6, netip.MustParsePrefix("ff00::/8")},
	} {
		f.add(conn)
	}
	if err := conn.Flush(); err != nil {
		return fmt.Errorf("add nftables rules: %w", err)
	}
	return nil
}

// trackBriefly has a node forget connections 1 s after their end, not 120 s. The nodes of
// all labs of a machine share one table (nf_conntrack_max): each variant's connections
// would be in the way of all others', and those of a workload that makes thousands a
// second fill it.
func trackBriefly(ns *namespace) error {
	return ns.do(func() error { return sysctl("net/netfilter/nf_conntrack_tcp_timeout_time_wait=1") })
}

// markMasquerade is kube-proxy's mark on what it masquerades.
const markMasquerade = 0x4000

func (f family) add(conn *nftables.Conn) {
	table := conn.AddTable(&nftables.Table{Family: f.family, Name: "slipstream"})
	chain := func(name string, kind nftables.ChainType, hook *nftables.ChainHook, priority *nftables.ChainPriority, rules ...[]expr.Any) {
		c := conn.AddChain(&nftables.Chain{Table: table, Name: name, Type: kind, Hooknum: hook, Priority: priority})
		for _, r := range rules {
			conn.AddRule(&nftables.Rule{Table: table, Chain: c, Exprs: r})
		}
	}
	const (
		in  = expr.CmpOpEq
		not = expr.CmpOpNeq
	)
	accept, drop := &expr.Verdict{Kind: expr.VerdictAccept}, &expr.Verdict{Kind: expr.VerdictDrop}
	done, masquerade := &expr.Verdict{Kind: expr.VerdictReturn}, &expr.Masq{FullyRandom: true}
	chain("forward", nftables.ChainTypeFilter, nftables.ChainHookForward, nftables.ChainPriorityFilter,
		rule(drop, tracked(expr.CtStateBitINVALID)),
		rule(accept, marked()),
		rule(accept, tracked(expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED)),
		rule(accept, address(f.source, in, f.cluster)),
		rule(accept, address(f.destination, in, f.cluster)),
	)
	chain("postrouting", nftables.ChainTypeNAT, nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource,
		rule(done, marked()),
		rule(done, address(f.source, in, f.pods), address(f.destination, in, f.cluster)),
		rule(done, address(f.source, in, f.cluster), address(f.destination, in, f.pods)),
		rule(done, address(f.source, not, f.cluster), address(f.destination, in, f.pods)),
		rule(masquerade, address(f.source, in, f.cluster), address(f.destination, not, f.multicast)),
		rule(masquerade, address(f.source, not, f.cluster), address(f.destination, in, f.cluster)),
	)
}

// rule is a verdict on what meets all conditions.
func rule(verdict expr.Any, conditions ...[]expr.Any) []expr.Any {
	var all []expr.Any
	for _, c := range conditions {
		all = append(all, c...)
	}
	return append(all, verdict)
}

// address is in a prefix, or not.
func address(offset uint32, op expr.CmpOp, p netip.Prefix) []expr.Any {
	bytes := p.Addr().BitLen() / 8
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: uint32(bytes)},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: uint32(bytes), Mask: net.CIDRMask(p.Bits(), bytes*8), Xor: make([]byte, bytes)},
		&expr.Cmp{Op: op, Register: 1, Data: p.Addr().AsSlice()},
	}
}

// tracked says that connection tracking has the packet in one of these states.
func tracked(bits uint32) []expr.Any {
	return append([]expr.Any{&expr.Ct{Register: 1, Key: expr.CtKeySTATE}}, anyBit(bits)...)
}

// marked for masquerading by kube-proxy.
func marked() []expr.Any {
	return append([]expr.Any{&expr.Meta{Register: 1, Key: expr.MetaKeyMARK}}, anyBit(markMasquerade)...)
}

func anyBit(bits uint32) []expr.Any {
	return []expr.Any{
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(bits), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
	}
}
