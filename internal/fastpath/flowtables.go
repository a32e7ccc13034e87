//go:build linux

package fastpath

import (
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/netns"
)

// An nftables flowtable forwards packets at the ingress of its devices, past conntrack and the rules. So the programs cannot
// validate an offloaded connection, and its conntrack entry belongs to the flowtable.

// Flowtable is an nftables flowtable.
type Flowtable struct {
	// Name consists of family, table and flowtable, as nft lists them.
	Name string
	// Devices are names, or prefixes of names with a * appended.
	Devices []string
}

// At reports whether a flowtable is attached to a device.
func (f Flowtable) At(device string) bool { return isAmong(device, f.Devices) }

// Constants of nftables (include/uapi/linux/netfilter/nf_tables.h) that package unix lacks.
const nftaFlowtableTable, nftaFlowtableName, nftaFlowtableHook, nftaFlowtableHookDevs = 1, 2, 3, 3

// flowtableFamilies are the families that have flowtables, as nft names them.
var flowtableFamilies = map[uint8]string{unix.NFPROTO_INET: "inet", unix.NFPROTO_IPV4: "ip", unix.NFPROTO_IPV6: "ip6"}

// Flowtables lists the flowtables in the thread's network namespace.
func Flowtables() (all []Flowtable, err error) {
	messages, err := dumpNFTables("flowtables", unix.NFT_MSG_GETFLOWTABLE, unix.NFPROTO_UNSPEC)
	if err != nil {
		return nil, err
	}
	for _, m := range messages {
		if f, ok := flowtableOf(m); ok {
			all = append(all, f)
		}
	}
	return all, nil
}

// flowtableOf parses a message about a flowtable; ok is false for any other message.
func flowtableOf(message []byte) (f Flowtable, ok bool) {
	if len(message) < nl.SizeofNfgenmsg {
		return f, false
	}
	var table, name string
	if netns.Attributes(message[nl.SizeofNfgenmsg:], func(kind uint16, is []byte) {
		switch kind {
		case nftaFlowtableTable:
			table = unix.ByteSliceToString(is)
		case nftaFlowtableName:
			name = unix.ByteSliceToString(is)
		case nftaFlowtableHook:
			// Parse as much of a truncated attribute as there is.
			_ = netns.Attributes(is, func(kind uint16, is []byte) {
				if kind == nftaFlowtableHookDevs {
					f.Devices = devicesOf(is)
				}
			})
		}
	}) != nil {
		return f, false
	}
	family, known := flowtableFamilies[message[0]]
	f.Name = fmt.Sprintf("%s %s %s", family, table, name)
	return f, known
}
