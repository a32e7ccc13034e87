//go:build linux

package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/fastpath/datapath"
	"slipstream.dev/internal/netns"
)

// Constants of ctnetlink (include/uapi/linux/netfilter/nfnetlink_conntrack.h).
const (
	ctaTupleOrig, ctaTupleReply, ctaStatus, ctaProtoInfo, ctaTimeout = 1, 2, 3, 4, 7
	ctaTupleIP, ctaTupleProto                                        = 1, 2
	ctaIPv4Src, ctaIPv4Dst                                           = 1, 2
	ctaIPv6Src, ctaIPv6Dst                                           = 3, 4
	ctaProtoNum, ctaProtoSrcPort, ctaProtoDstPort                    = 1, 2, 3
	ctaProtoInfoTCP                                                  = 1
	ctaTCPState                                                      = 1
	ctaTCPScaleOriginal, ctaTCPScaleReply                            = 2, 3
	ctaTCPFlagsOriginal, ctaTCPFlagsReply                            = 4, 5
	ctNew, ctGet                                                     = 0, 1 // IPCTNL_MSG_CT_*

	tcpEstablished, tcpClose = 3, 8 // enum tcp_conntrack

	// IP_CT_TCP_FLAG_* of nf_conntrack_tcp.h: window scaling, SACK permitted, close initiated, liberal
	// (the window is not checked), unacknowledged data, and a known highest acknowledgement, against
	// which conntrack checks RSTs.
	tcpWindowScale, tcpSACKPermitted, tcpCloseInit, tcpLiberal, tcpUnacknowledged, tcpMaxAck = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
)

// tcpStates maps the states of enum tcp_conntrack to the names that the sysctls of their timeouts use.
var tcpStates = [...]string{
	1: "syn_sent", 2: "syn_recv", tcpEstablished: "established", 4: "fin_wait", 5: "close_wait", 6: "last_ack", 7: "time_wait",
	tcpClose: "close", 9: "syn_sent", // SYN_SENT2 has the timeout of SYN_SENT
}

// Progress holds the fields of an entry that packets change. State and Flags are zero unless the connection is TCP.
type Progress struct {
	State uint8
	// Flags are those of the original and of the reply direction.
	Flags [2]uint8
	// Timeout is the remaining timeout in seconds.
	Timeout uint32
}

// Entry is a conntrack entry.
type Entry struct {
	Progress
	// original and reply are the tuples of the two directions. The original direction is that of the client's packets.
	original, reply struct{ from, to netip.AddrPort }
	scale           [2]uint8 // by direction: original, reply
	status          uint32   // IPS_* of nf_conntrack_common.h
}

// Offloaded reports whether an nftables flowtable forwards the connection. The flowtable makes the entry liberal too, and
// nobody else may change it.
func (t *Entry) Offloaded() bool { return t.status&(1<<14|1<<15) != 0 } // IPS_OFFLOAD, IPS_HW_OFFLOAD

// ours reports whether the fast path has made an entry liberal, and at least one direction still is.
func (t *Entry) ours() bool { return !t.Offloaded() && (t.Flags[0]|t.Flags[1])&tcpLiberal != 0 }

// accelerated reports whether an entry is liberal in both directions, which marks an accelerated connection. If the agent
// handles an event late, the entry may already belong to a new connection between the same ports; then conntrack has cleared
// the flag. (Conntrack itself sets the flag for connections that it picked up in mid-stream.)
func (t *Entry) accelerated() bool { return !t.Offloaded() && t.Flags[0]&t.Flags[1]&tcpLiberal != 0 }

// Find returns the conntrack entry of a connection in the calling thread's network namespace, or
// nil if there is none.
func Find(f datapath.Flow) (*Entry, error) {
	answers, err := request(ctGet, f)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("ask conntrack for %s to %s: %w", f.Pod, f.Peer, err)
	}
	if len(answers) != 1 {
		return nil, fmt.Errorf("ask conntrack for %s to %s: %d answers", f.Pod, f.Peer, len(answers))
	}
	t, err := parseEntry(answers[0])
	if err != nil {
		return nil, fmt.Errorf("ask conntrack for %s to %s: %w", f.Pod, f.Peer, err)
	}
	return t, nil
}

// change sets attributes of a conntrack entry. If the entry is gone, the connection has ended, which is no error.
func change(f datapath.Flow, to ...*nl.RtAttr) error {
	if _, err := request(ctNew, f, to...); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("change conntrack's entry of %s to %s: %w", f.Pod, f.Peer, err)
	}
	return nil
}

// SetFlags sets the flags that mask selects, in both directions of an entry.
func SetFlags(f datapath.Flow, flags, mask byte) error {
	return change(f, tcpInfo(flagAttrs(flags, mask)...))
}

// SetTimeout sets the remaining timeout of an entry.
func SetTimeout(f datapath.Flow, seconds uint32) error { return change(f, timeoutAttr(seconds)) }

// liberal stops conntrack from checking the window of a connection.
func liberal(f datapath.Flow) error { return SetFlags(f, tcpLiberal, tcpLiberal) }

// clearUnacknowledged clears the flag of unacknowledged data. Conntrack cannot do so, because the acknowledgements took the
// fast path.
func clearUnacknowledged(f datapath.Flow) error {
	is, err := Find(f)
	if err != nil || is == nil || !is.accelerated() {
		return err
	}
	return SetFlags(f, 0, tcpUnacknowledged)
}

// reopen moves the entry of a connection that has not ended back to ESTABLISHED. A forged FIN or RST can move it out of that
// state, because conntrack does not check the sequence numbers of a liberal entry. The entry would then soon time out.
func reopen(f datapath.Flow, idle time.Duration) error {
	is, err := Find(f)
	if err != nil || is == nil || is.State == tcpEstablished || !is.accelerated() {
		return err
	}
	// Send the timeout in a message of its own. In one message, the kernel would apply it before the state, and an RST between
	// the two would leave the ESTABLISHED entry with the short timeout of CLOSE.
	state := append(flagAttrs(0, tcpCloseInit), nl.NewRtAttr(ctaTCPState, []byte{tcpEstablished}))
	if err := change(f, tcpInfo(state...)); err != nil {
		return err
	}
	return RestoreTimeout(f, idle)
}

// RestoreTimeout gives an ESTABLISHED entry its full timeout less the time for which the connection has been idle. If the
// connection closes meanwhile, the entry gets the timeout of its new state: with that of ESTABLISHED it would outlive the
// connection by days.
func RestoreTimeout(f datapath.Flow, idle time.Duration) error {
	is, err := Find(f)
	if err != nil || is == nil || is.State != tcpEstablished {
		return err
	}
	for state := is.State; ; state, idle = is.State, 0 {
		timeout, err := timeoutOf(tcpStates[state], idle)
		if err != nil {
			return err
		}
		if err := SetTimeout(f, timeout); err != nil {
			return err
		}
		if is, err = Find(f); err != nil || is == nil || is.State == state || int(is.State) >= len(tcpStates) {
			return err
		}
	}
}

// timeoutOf reads the timeout of a state, by its name in sysctls, and subtracts the idle time of a connection.
func timeoutOf(state string, idle time.Duration) (seconds uint32, err error) {
	key := "net/netfilter/nf_conntrack_tcp_timeout_" + state
	b, err := os.ReadFile("/proc/sys/" + key)
	if err == nil {
		_, err = fmt.Sscan(string(b), &seconds)
	}
	if err != nil {
		return 0, fmt.Errorf("read sysctl %s: %w", key, err)
	}
	return without(seconds, idle), nil
}

// without subtracts an idle time, to the nearest second, from a timeout. The idle time may be negative, if a packet came after
// the clock was read.
func without(seconds uint32, idle time.Duration) uint32 {
	return seconds - min(seconds, uint32(max(0, idle.Round(time.Second)/time.Second)))
}

// reset moves the entry of a connection to CLOSE, with the timeout of that state. Conntrack has not done so, because it missed
// packets and does not know that the RST has exactly the next sequence number.
func reset(f datapath.Flow) error {
	is, err := Find(f)
	if err != nil || is == nil {
		return err
	}
	if !is.accelerated() {
		return restrict(f, is)
	}
	if is.State != tcpEstablished {
		return nil
	}
	timeout, err := timeoutOf("close", 0)
	if err != nil {
		return err
	}
	if err := change(f, tcpInfo(nl.NewRtAttr(ctaTCPState, []byte{tcpClose})), timeoutAttr(timeout)); err != nil {
		return err
	}
	if is, err = Find(f); err != nil || is == nil {
		return err
	}
	if is.accelerated() || is.State != tcpClose {
		// If conntrack has seen the SYN of a new connection between the same ports, but not yet the SYN-ACK, the new connection
		// takes over the entry with its flags.
		return restrict(f, is)
	}
	// Between Find and change, a new connection between the same ports took over the entry.
	if err := change(f, tcpInfo(nl.NewRtAttr(ctaTCPState, []byte{tcpEstablished}))); err != nil {
		return err
	}
	return errors.Join(restrict(f, is), RestoreTimeout(f, 0))
}

// restrict makes conntrack check the windows of a connection that takes over the entry of an accelerated one: its handshake clears
// the liberal flag in one direction only.
func restrict(f datapath.Flow, is *Entry) error {
	if !is.ours() {
		return nil
	}
	return SetFlags(f, 0, tcpLiberal)
}

// abandon leaves the entry of a connection liberal for good: conntrack will never know its sequence numbers.
func abandon(f datapath.Flow) error {
	return SetFlags(f, tcpLiberal, tcpLiberal|tcpUnacknowledged|tcpMaxAck)
}

func timeoutAttr(seconds uint32) *nl.RtAttr {
	return nl.NewRtAttr(ctaTimeout, binary.BigEndian.AppendUint32(nil, seconds))
}

// flagAttrs sets the flags that mask selects, in both directions.
func flagAttrs(flags, mask byte) (all []*nl.RtAttr) {
	for _, way := range []int{ctaTCPFlagsOriginal, ctaTCPFlagsReply} {
		all = append(all, nl.NewRtAttr(way, []byte{flags, mask}))
	}
	return all
}

func tcpInfo(is ...*nl.RtAttr) *nl.RtAttr {
	info := nl.NewRtAttr(ctaProtoInfo|unix.NLA_F_NESTED, nil)
	tcp := info.AddRtAttr(ctaProtoInfoTCP|unix.NLA_F_NESTED, nil)
	for _, a := range is {
		tcp.AddChild(a)
	}
	return info
}

// request sends a ctnetlink request about a connection, which conntrack looks up by the tuple of the pod's packets.
func request(kind int, f datapath.Flow, more ...*nl.RtAttr) ([][]byte, error) {
	r := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|kind, unix.NLM_F_ACK)
	family := uint8(unix.AF_INET)
	source, destination := ctaIPv4Src, ctaIPv4Dst
	if f.Pod.Addr().Is6() {
		family, source, destination = unix.AF_INET6, ctaIPv6Src, ctaIPv6Dst
	}
	r.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0})
	port := func(a netip.AddrPort) []byte { return binary.BigEndian.AppendUint16(nil, a.Port()) }
	tuple := nl.NewRtAttr(ctaTupleOrig|unix.NLA_F_NESTED, nil)
	ip := tuple.AddRtAttr(ctaTupleIP|unix.NLA_F_NESTED, nil)
	ip.AddRtAttr(source, f.Pod.Addr().AsSlice())
	ip.AddRtAttr(destination, f.Peer.Addr().AsSlice())
	proto := tuple.AddRtAttr(ctaTupleProto|unix.NLA_F_NESTED, nil)
	proto.AddRtAttr(ctaProtoNum, []byte{f.Protocol})
	proto.AddRtAttr(ctaProtoSrcPort, port(f.Pod))
	proto.AddRtAttr(ctaProtoDstPort, port(f.Peer))
	r.AddData(tuple)
	for _, a := range more {
		r.AddData(a)
	}
	return r.Execute(unix.NETLINK_NETFILTER, 0)
}

var errShort = errors.New("conntrack's answer is truncated")

// parseEntry parses a ctnetlink message: struct nfgenmsg and attributes.
func parseEntry(b []byte) (*Entry, error) {
	if len(b) < nl.SizeofNfgenmsg {
		return nil, errShort
	}
	t := new(Entry)
	err := each(b[nl.SizeofNfgenmsg:], func(kind uint16, b []byte) (err error) {
		switch kind {
		case ctaTupleOrig:
			t.original.from, t.original.to, err = parseTuple(b)
		case ctaTupleReply:
			t.reply.from, t.reply.to, err = parseTuple(b)
		case ctaTimeout:
			t.Timeout, err = parseWord(b)
		case ctaStatus:
			t.status, err = parseWord(b)
		case ctaProtoInfo:
			err = each(b, t.parseProtoInfo)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return t, nil
}

func parseWord(b []byte) (uint32, error) {
	if len(b) < 4 {
		return 0, errShort
	}
	return binary.BigEndian.Uint32(b), nil
}

// parseProtoInfo parses an attribute in CTA_PROTOINFO.
func (t *Entry) parseProtoInfo(kind uint16, b []byte) error {
	if kind != ctaProtoInfoTCP {
		return nil
	}
	return each(b, func(kind uint16, b []byte) error {
		if len(b) < 1 {
			return errShort
		}
		switch kind {
		case ctaTCPState:
			t.State = b[0]
		case ctaTCPScaleOriginal, ctaTCPScaleReply:
			t.scale[kind-ctaTCPScaleOriginal] = b[0]
		case ctaTCPFlagsOriginal, ctaTCPFlagsReply:
			t.Flags[kind-ctaTCPFlagsOriginal] = b[0]
		}
		return nil
	})
}

func parseTuple(b []byte) (from, to netip.AddrPort, err error) {
	var ends [2]netip.Addr
	var ports [2]uint16
	err = each(b, func(kind uint16, b []byte) error {
		return each(b, func(of uint16, b []byte) error {
			switch {
			case kind == ctaTupleIP && (of >= ctaIPv4Src && of <= ctaIPv6Dst):
				address, ok := netip.AddrFromSlice(b)
				if !ok {
					return errShort
				}
				ends[(of-ctaIPv4Src)%2] = address
			case kind == ctaTupleProto && (of == ctaProtoSrcPort || of == ctaProtoDstPort):
				if len(b) < 2 {
					return errShort
				}
				ports[of-ctaProtoSrcPort] = binary.BigEndian.Uint16(b)
			}
			return nil
		})
	})
	return netip.AddrPortFrom(ends[0], ports[0]), netip.AddrPortFrom(ends[1], ports[1]), err
}

// each calls read for each netlink attribute until one fails.
func each(b []byte, read func(kind uint16, b []byte) error) error {
	var first error
	err := netns.Attributes(b, func(kind uint16, b []byte) {
		if first == nil {
			first = read(kind, b)
		}
	})
	return errors.Join(first, err)
}
