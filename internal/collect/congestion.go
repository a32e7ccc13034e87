//go:build linux

package collect

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// From linux/inet_diag.h and net/tcp_states.h.
const (
	inetDiagCong    = 4 // the attribute that names the congestion control
	inetDiagMsgLen  = 72
	tcpEstablished  = 1
	inetDiagRequest = 56 // bytes of struct inet_diag_req_v2
)

// CongestionControl returns the congestion control algorithms of the established TCP connections of this network namespace with
// a certain port: the peer's if remote is set, otherwise the local one. They are sorted. It uses sock_diag(7), which needs no
// privilege.
func CongestionControl(port uint16, remote bool) ([]string, error) {
	var names []string
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		request := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
		request.AddRawData(diagRequest(family, port, remote))
		answers, err := request.Execute(unix.NETLINK_SOCK_DIAG, 0)
		if err != nil {
			return nil, fmt.Errorf("list TCP sockets: %w", err)
		}
		for _, answer := range answers {
			name, err := parseCongestionControl(answer)
			if err != nil {
				return nil, err
			}
			if name != "" && !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	slices.Sort(names)
	return names, nil
}

// diagRequest returns a struct inet_diag_req_v2 for the established connections with a port.
func diagRequest(family uint8, port uint16, remote bool) []byte {
	b := make([]byte, inetDiagRequest)
	b[0], b[1], b[2] = family, unix.IPPROTO_TCP, 1<<(inetDiagCong-1)
	binary.NativeEndian.PutUint32(b[4:], 1<<tcpEstablished)
	at := 8 // idiag_sport
	if remote {
		at = 10 // idiag_dport
	}
	binary.BigEndian.PutUint16(b[at:], port)
	return b
}

// parseCongestionControl parses one answer: a struct inet_diag_msg and its attributes. The name is empty if the socket has
// none.
func parseCongestionControl(answer []byte) (string, error) {
	if len(answer) < inetDiagMsgLen {
		return "", fmt.Errorf("list TCP sockets: an answer of %d bytes", len(answer))
	}
	attributes, err := nl.ParseRouteAttr(answer[inetDiagMsgLen:])
	if err != nil {
		return "", fmt.Errorf("list TCP sockets: %w", err)
	}
	for _, a := range attributes {
		if a.Attr.Type == inetDiagCong {
			return unix.ByteSliceToString(a.Value), nil
		}
	}
	return "", nil
}
