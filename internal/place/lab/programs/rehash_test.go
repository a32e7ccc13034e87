//go:build linux

package programs

import (
	"net"
	"runtime"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/testenv"
)

func rehash(t *testing.T) *ebpf.Program {
	t.Helper()
	prog, err := LoadRehash()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { prog.Close() })
	return prog
}

// TestRehashRun checks that the program passes every packet unchanged.
func TestRehashRun(t *testing.T) {
	testenv.EnterNamespace(t)
	prog := rehash(t)
	ethernet := func(kind uint16, rest ...byte) []byte {
		return append([]byte{2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, byte(kind >> 8), byte(kind)}, rest...)
	}
	ipv4 := []byte{0x45, 0, 0, 28, 0, 1, 0, 0, 64, unix.IPPROTO_UDP, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 0x12, 0x34, 0x12, 0xb5, 0, 8, 0, 0}
	ipv6 := append([]byte{0x60, 0, 0, 0, 0, 8, unix.IPPROTO_UDP, 64}, make([]byte, 32+8)...)
	for name, packet := range map[string][]byte{
		"IPv4":  ethernet(unix.ETH_P_IP, ipv4...),
		"IPv6":  ethernet(unix.ETH_P_IPV6, ipv6...),
		"ARP":   ethernet(unix.ETH_P_ARP, make([]byte, 28)...),
		"other": ethernet(unix.ETH_P_802_EX1, 0x45),
	} {
		out := make([]byte, len(packet))
		verdict, err := prog.Run(&ebpf.RunOptions{Data: packet, DataOut: out})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if int32(verdict) != -1 {
			t.Errorf("%s: verdict %d, want -1 (TC_ACT_UNSPEC)", name, int32(verdict))
		}
		if diff := cmp.Diff(packet, out); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

// TestRehashOnWire checks the program's effect across a veth pair. A packet arrives with its sender's hash; with the program,
// packets of different sockets with the same headers have the same hash, as from a NIC.
func TestRehashOnWire(t *testing.T) {
	far := testenv.EnterNamespace(t)
	near := testenv.EnterNamespace(t)
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "wire"}, PeerName: "far", PeerNamespace: netlink.NsFd(far)}
	if err := netlink.LinkAdd(veth); err != nil {
		t.Fatal(err)
	}
	wire := configure(t, "wire", "192.0.2.1/30")

	if err := netns.Set(far); err != nil {
		t.Fatal(err)
	}
	seen := watchHash(t, configure(t, "far", "192.0.2.2/30"))
	if err := netns.Set(near); err != nil {
		t.Fatal(err)
	}

	// Each socket has a random hash (sk_set_txhash in include/net/sock.h), which its packets carry.
	hash := func() uint32 {
		conn, err := net.DialUDP("udp", &net.UDPAddr{Port: 4660}, &net.UDPAddr{IP: net.IPv4(192, 0, 2, 2), Port: 4789})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := seen.Update(uint32(0), uint32(0), ebpf.UpdateAny); err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		var h uint32
		for deadline := time.Now().Add(5 * time.Second); h == 0; runtime.Gosched() {
			if err := seen.Lookup(uint32(0), &h); err != nil {
				t.Fatal(err)
			}
			if time.Now().After(deadline) {
				t.Fatal("no packet with a hash arrived")
			}
		}
		return h
	}
	hash() // resolve the neighbour
	if a, b := hash(), hash(); a == b {
		t.Errorf("without the program, both sockets have hash %#x", a)
	}
	l, err := link.AttachTCX(link.TCXOptions{Interface: wire, Program: rehash(t), Attach: ebpf.AttachTCXEgress})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	if a, b := hash(), hash(); a != b {
		t.Errorf("with the program, the sockets have hashes %#x and %#x", a, b)
	}
}

// configure sets a device's address and returns its index.
func configure(t *testing.T, name, address string) int {
	t.Helper()
	l, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	addr, err := netlink.ParseAddr(address)
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.AddrAdd(l, addr); err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetUp(l); err != nil {
		t.Fatal(err)
	}
	return l.Attrs().Index
}

// watchHash stores the hash of the last IPv4 UDP packet to port 4789 that a device received, in an
// array of one element.
func watchHash(t *testing.T, device int) *ebpf.Map {
	t.Helper()
	seen, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { seen.Close() })
	const portAt = 14 + 20 + 2 // after the Ethernet and IPv4 headers
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{
			asm.Mov.Reg(asm.R6, asm.R1),
			asm.LoadAbs(portAt, asm.Half), // ends the program if the packet is shorter
			asm.JNE.Imm(asm.R0, 4789, "out"),
			asm.StoreImm(asm.RFP, -4, 0, asm.Word),
			asm.LoadMem(asm.R1, asm.R6, 17*4, asm.Word), // __sk_buff.hash
			asm.StoreMem(asm.RFP, -8, asm.R1, asm.Word),
			asm.LoadMapPtr(asm.R1, seen.FD()),
			asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, -4),
			asm.Mov.Reg(asm.R3, asm.RFP), asm.Add.Imm(asm.R3, -8),
			asm.Mov.Imm(asm.R4, 0),
			asm.FnMapUpdateElem.Call(),
			asm.Mov.Imm(asm.R0, -1).WithSymbol("out"),
			asm.Return(),
		},
	})
	if err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(func() { prog.Close() })
	l, err := link.AttachTCX(link.TCXOptions{Interface: device, Program: prog, Attach: ebpf.AttachTCXIngress})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return seen
}
