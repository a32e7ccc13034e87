//go:build linux

package datapath

import (
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/testenv"
)

// TestNeighbourFilter checks that the filter drops notifications about FDB entries of bridges
// unless they are about a subscribed MAC address, and passes all others.
func TestNeighbourFilter(t *testing.T) {
	testenv.NeedRoot(t)
	n, err := LoadNeighbourFilter()
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
		// prog.Run needs an Ethernet header, which a program of this type does not see.
		code, err := n.objects.FilterNeighbours.Run(&ebpf.RunOptions{Data: append(make([]byte, 14), message...)})
		if err != nil || int32(code) != map[bool]int32{false: 0, true: -1}[passes] {
			t.Errorf("%s: returns %d, %v", what, int32(code), err)
		}
	}
	want("no MAC subscribed", false, message(unix.RTM_NEWNEIGH, unix.AF_BRIDGE, address(heard), master))
	if err := n.Subscribe(heard); err != nil {
		t.Fatal(err)
	}
	for _, kind := range []uint16{unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH} {
		want("subscribed MAC", true, message(kind, unix.AF_BRIDGE, address(heard), master, vlan))
		want("another MAC", false, message(kind, unix.AF_BRIDGE, address(other), master, vlan))
		want("another MAC, at a VXLAN device", true, message(kind, unix.AF_BRIDGE, address(other), vlan))
		want("another MAC, IP neighbour", true, message(kind, unix.AF_INET, address(other), master))
		want("address of another length", true, message(kind, unix.AF_BRIDGE, nl.NewRtAttr(unix.NDA_LLADDR, other[:4]), master))
		want("other attribute", true, message(kind, unix.AF_BRIDGE, nl.NewRtAttr(unix.NDA_DST, other[:]), master))
		want("no other attribute", true, message(kind, unix.AF_BRIDGE, address(other)))
		want("no attributes", true, message(kind, unix.AF_BRIDGE))
	}
	want("link notification", true, message(unix.RTM_NEWLINK, unix.AF_BRIDGE, address(other), master))
	if err := n.Unsubscribe(heard); err != nil {
		t.Fatal(err)
	}
	want("unsubscribed MAC", false, message(unix.RTM_NEWNEIGH, unix.AF_BRIDGE, address(heard), master))
	for i := range n.Capacity() {
		if err := n.Subscribe([6]byte{4, 0, byte(i >> 16), byte(i >> 8), byte(i)}); err != nil {
			t.Fatalf("no room for address %d: %v", i, err)
		}
	}
	if err := n.Subscribe(heard); err == nil {
		t.Error("there is more room than Capacity reports")
	}
}
