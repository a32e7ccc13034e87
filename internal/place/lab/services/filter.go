//go:build linux

package services

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"

	"slipstream.dev/internal/place/lab/network"
)

// family holds what differs between the rules for IPv4 and IPv6.
type family struct {
	family nftables.TableFamily
	// source and destination are the offsets of the addresses in the header.
	source, destination uint32
	// pods and cluster are the prefixes of the pods of the node and of all nodes, multicast is the multicast range.
	pods, cluster, multicast netip.Prefix
}

// Filter adds the rules that every packet passes on a Kubernetes node: those of kube-proxy in the forward chain, which make the
// kernel track connections, and flannel's masquerading, which does not apply between pods. The shape of Calico has flannel's
// masquerading too, so that shapes differ only in how packets travel. kubeproxy.go has the rules of services.
func Filter(ns *network.Namespace, n network.Node) error {
	conn, err := nftables.New(nftables.WithNetNSFd(int(ns.Handle)))
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	for _, f := range []family{
		{nftables.TableFamilyIPv4, 12, 16, n.Pods4, n.Cluster4, netip.MustParsePrefix("224.0.0.0/4")},
		{nftables.TableFamilyIPv6, 8, 24, n.Pods6, network.Cluster6, netip.MustParsePrefix("ff00::/8")},
	} {
		f.add(conn)
	}
	if err := conn.Flush(); err != nil {
		return fmt.Errorf("add nftables rules: %w", err)
	}
	return nil
}

// markMasquerade is kube-proxy's mark on packets to masquerade.
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

// rule returns a rule: a verdict on packets that meet all conditions.
func rule(verdict expr.Any, conditions ...[]expr.Any) []expr.Any {
	var all []expr.Any
	for _, c := range conditions {
		all = append(all, c...)
	}
	return append(all, verdict)
}

// address matches packets whose address is, or is not, in a prefix.
func address(offset uint32, op expr.CmpOp, p netip.Prefix) []expr.Any {
	bytes := p.Addr().BitLen() / 8
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: uint32(bytes)},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: uint32(bytes), Mask: net.CIDRMask(p.Bits(), bytes*8), Xor: make([]byte, bytes)},
		&expr.Cmp{Op: op, Register: 1, Data: p.Addr().AsSlice()},
	}
}

// tracked matches packets in one of these conntrack states.
func tracked(bits uint32) []expr.Any {
	return append([]expr.Any{&expr.Ct{Register: 1, Key: expr.CtKeySTATE}}, anyBit(bits)...)
}

// marked matches packets that kube-proxy marks for masquerading.
func marked() []expr.Any {
	return append([]expr.Any{&expr.Meta{Register: 1, Key: expr.MetaKeyMARK}}, anyBit(markMasquerade)...)
}

func anyBit(bits uint32) []expr.Any {
	return []expr.Any{
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(bits), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
	}
}
