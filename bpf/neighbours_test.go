//go:build linux

package bpf

import (
	"os"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Of what bridges announce the filter lets through what is about addresses that are heard of, and
// it lets through all else.
func TestNeighbours(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	n, err := LoadNeighbours()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	heard, other := [6]byte{2, 5: 1}, [6]byte{2, 5: 2}
	message := func(kind uint16, family uint8, attrs ...*nl.RtAttr) []byte {
		r := nl.NewNetlinkRequest(int(kind), 0)
		r.AddData(&netlink.Ndmsg{Family: family, Index: 3})
		for _, a := range attrs {
			r.AddData(a)
		}
		return r.Serialize()
	}
	address := func(m [6]byte) *nl.RtAttr { return nl.NewRtAttr(unix.NDA_LLADDR, m[:]) }
	master := nl.NewRtAttr(unix.NDA_MASTER, nl.Uint32Attr(1))
	vlan := nl.NewRtAttr(unix.NDA_VLAN, nl.Uint16Attr(7))
	want := func(what string, passes bool, message []byte) {
		t.Helper()
		// A packet has an Ethernet header in front, which such a program does not see.
		code, err := n.objects.Hear.Run(&ebpf.RunOptions{Data: append(make([]byte, 14), message...)})
		if err != nil || int32(code) != map[bool]int32{false: 0, true: -1}[passes] {
			t.Errorf("%s: returns %d, %v", what, int32(code), err)
		}
	}
	want("nobody is heard of", false, message(unix.RTM_NEWNEIGH, unix.AF_BRIDGE, address(heard), master))
	if err := n.Hear(heard); err != nil {
		t.Fatal(err)
	}
	for _, kind := range []uint16{unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH} {
		want("one that is heard of", true, message(kind, unix.AF_BRIDGE, address(heard), master, vlan))
		want("another", false, message(kind, unix.AF_BRIDGE, address(other), master, vlan))
		want("another, of a VXLAN device", true, message(kind, unix.AF_BRIDGE, address(other), vlan))
		want("another, a neighbour of IP", true, message(kind, unix.AF_INET, address(other), master))
		want("no Ethernet address", true, message(kind, unix.AF_BRIDGE, nl.NewRtAttr(unix.NDA_LLADDR, other[:4]), master))
		want("something else", true, message(kind, unix.AF_BRIDGE, nl.NewRtAttr(unix.NDA_DST, other[:]), master))
		want("only that", true, message(kind, unix.AF_BRIDGE, address(other)))
		want("nothing", true, message(kind, unix.AF_BRIDGE))
	}
	want("of a link", true, message(unix.RTM_NEWLINK, unix.AF_BRIDGE, address(other), master))
	if err := n.Ignore(heard); err != nil {
		t.Fatal(err)
	}
	want("one that was heard of", false, message(unix.RTM_NEWNEIGH, unix.AF_BRIDGE, address(heard), master))
	for i := range n.Room() {
		if err := n.Hear([6]byte{4, 0, byte(i >> 16), byte(i >> 8), byte(i)}); err != nil {
			t.Fatalf("address %d finds no room: %v", i, err)
		}
	}
	if err := n.Hear(heard); err == nil {
		t.Error("there is more room than there is said to be")
	}
}
