//go:build linux

package fastpath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"slipstream.dev/bpf"
)

// Numbers of ctnetlink (include/uapi/linux/netfilter/nfnetlink_conntrack.h).
const (
	ctaTupleOrig, ctaProtoInfo                         = 1, 4
	ctaTupleIP, ctaTupleProto                          = 1, 2
	ctaIPv4Src, ctaIPv4Dst                             = 1, 2
	ctaIPv6Src, ctaIPv6Dst                             = 3, 4
	ctaProtoNum, ctaProtoSrcPort, ctaProtoDstPort      = 1, 2, 3
	ctaProtoInfoTCP                                    = 1
	ctaProtoInfoTCPFlagsOriginal, ctaInfoTCPFlagsReply = 4, 5

	// Of a connection: its window is not checked; the highest acknowledgement is
	// known (nf_conntrack_tcp.h).
	tcpBeLiberal, tcpMaxAckSet = 0x08, 0x20
)

// relax has conntrack, in the calling thread's network namespace, accept what is out of
// the window that it knows of for a TCP connection, and judge no reset by it. One that
// has ended meanwhile is no error.
func relax(f bpf.Flow) error {
	if f.Protocol != unix.IPPROTO_TCP {
		return nil
	}
	request := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8, unix.NLM_F_ACK) // IPCTNL_MSG_CT_NEW is 0
	family := uint8(unix.AF_INET)
	if f.Pod.Addr().Is6() {
		family = unix.AF_INET6
	}
	request.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0})
	for _, a := range relaxation(f) {
		request.AddData(a)
	}
	_, err := request.Execute(unix.NETLINK_NETFILTER, 0)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("relax connection %s to %s: %w", f.Pod, f.Peer, err)
	}
	return nil
}

// relaxation is what the message says.
func relaxation(f bpf.Flow) []*nl.RtAttr {
	nested := func(parent *nl.RtAttr, kind int) *nl.RtAttr { return parent.AddRtAttr(kind|unix.NLA_F_NESTED, nil) }
	port := func(a netip.AddrPort) []byte { return binary.BigEndian.AppendUint16(nil, a.Port()) }

	// Conntrack finds a connection by the tuple of either direction.
	tuple := nl.NewRtAttr(ctaTupleOrig|unix.NLA_F_NESTED, nil)
	ip := nested(tuple, ctaTupleIP)
	source, destination := ctaIPv4Src, ctaIPv4Dst
	if f.Pod.Addr().Is6() {
		source, destination = ctaIPv6Src, ctaIPv6Dst
	}
	ip.AddRtAttr(source, f.Pod.Addr().AsSlice())
	ip.AddRtAttr(destination, f.Peer.Addr().AsSlice())
	proto := nested(tuple, ctaTupleProto)
	proto.AddRtAttr(ctaProtoNum, []byte{f.Protocol})
	proto.AddRtAttr(ctaProtoSrcPort, port(f.Pod))
	proto.AddRtAttr(ctaProtoDstPort, port(f.Peer))

	info := nl.NewRtAttr(ctaProtoInfo|unix.NLA_F_NESTED, nil)
	tcp := nested(info, ctaProtoInfoTCP)
	flags := []byte{tcpBeLiberal, tcpBeLiberal | tcpMaxAckSet} // values, and which
	tcp.AddRtAttr(ctaProtoInfoTCPFlagsOriginal, flags)
	tcp.AddRtAttr(ctaInfoTCPFlagsReply, flags)
	return []*nl.RtAttr{tuple, info}
}
