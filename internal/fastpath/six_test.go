//go:build linux

package fastpath_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
	"slipstream.dev/internal/testenv/grammar"
)

// option sets or gets socket options of a connection.
func option(t *testing.T, c syscall.Conn, do func(fd int) error) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var failed error
	if err := raw.Control(func(fd uintptr) { failed = do(int(fd)) }); err != nil || failed != nil {
		t.Fatal(err, failed)
	}
}

// tripsUntil makes round trips of datagrams until a condition holds.
func (w *world) tripsUntil(near *net.UDPConn, what string, holds func() bool) {
	w.Helper()
	w.eventually(what, func() {
		_ = near.SetDeadline(time.Now().Add(patience))
		if _, err := near.Write([]byte("datagram")); err != nil {
			w.Fatal(err)
		}
		if _, err := near.Read(make([]byte, 64)); err != nil {
			w.Fatal(err)
		}
	}, holds)
}

// TestIPv6OptionsAndHopLimit checks datagrams of an accelerated connection: with a destination
// options header they take the slow path and arrive, and with an expiring hop limit the node drops
// them.
func TestIPv6OptionsAndHopLimit(t *testing.T) {
	t.Parallel()
	w := newWorldOf(t, spec.ShapeFlannel, spec.OffloadFull, true)
	w.start()
	near := w.datagrams()
	accelerated := func() bool {
		c, d := w.counts(0), w.counts(1)
		return min(c["fast-out"], c["fast-in"], d["fast-out"], d["fast-in"]) > 100
	}
	w.tripsUntil(near, "fast path", accelerated)

	option(t, near, func(fd int) error {
		// 8 bytes: next header, length in units of 8 bytes beyond the first, padding (RFC 8200,
		// section 4.2).
		return unix.SetsockoptString(fd, unix.IPPROTO_IPV6, unix.IPV6_DSTOPTS, string([]byte{0, 0, 1, 4, 0, 0, 0, 0}))
	})
	before := [2]map[string]uint64{w.counts(0), w.counts(1)}
	w.tripsUntil(near, "packets are counted as ip-options", func() bool { return w.counts(0)["ip-options"] >= before[0]["ip-options"]+200 })
	if now := w.counts(0); now["fast-out"] != before[0]["fast-out"] {
		t.Errorf("%d packets with options left by the fast path", now["fast-out"]-before[0]["fast-out"])
	}
	if now := w.counts(1); now["fast-in"] != before[1]["fast-in"] || now["ip-options"] < before[1]["ip-options"]+200 {
		t.Errorf("%d packets with options arrived by the fast path, %d by the slow path", now["fast-in"]-before[1]["fast-in"], now["ip-options"]-before[1]["ip-options"])
	}
	option(t, near, func(fd int) error { return unix.SetsockoptString(fd, unix.IPPROTO_IPV6, unix.IPV6_DSTOPTS, "") })

	option(t, near, func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, 1) })
	before[0] = w.counts(0)
	w.eventually("packets are counted as ttl", func() { _, _ = near.Write([]byte("datagram")) }, func() bool { return w.counts(0)["ttl"] >= before[0]["ttl"]+100 })
	if now := w.counts(0); now["fast-out"] != before[0]["fast-out"] {
		t.Errorf("%d packets with hop limit 1 left by the fast path", now["fast-out"]-before[0]["fast-out"])
	}
}

// collidingAddress returns another address in the same /64 with the same hash in bpf/fastpath/fastpath.c. It
// inverts the steps of the hash for the lower half of the address.
func collidingAddress(a netip.Addr, n uint64) netip.Addr {
	const first, second = 0x9e3779b97f4a7c15, 0xd6e8feb86659fd93
	inverse := uint64(second) // of an odd number modulo 2^64, by Newton's method
	for range 5 {
		inverse *= 2 - second*inverse
	}
	raw := a.As16()
	prefix, host := binary.NativeEndian.Uint64(raw[:]), binary.NativeEndian.Uint64(raw[8:])
	h := prefix*first + host
	h ^= h >> 32
	h = (h*second ^ n) * inverse
	h ^= h >> 32
	binary.NativeEndian.PutUint64(raw[8:], h-prefix*first)
	return netip.AddrFrom16(raw)
}

// TestIPv6AddressHashCollision uses two pods whose addresses have the same hash in flow keys. With
// the same ports on both, each must receive its own datagrams, and only one of the two connections
// may be accelerated.
func TestIPv6AddressHashCollision(t *testing.T) {
	t.Parallel()
	w := newWorldOf(t, spec.ShapeFlannel, spec.OffloadFull, true)
	w.start()
	const port = 5000
	servers := [2]netip.Addr{w.pod(1, 0), collidingAddress(w.pod(1, 0), 1<<20)}
	t.Log(servers)
	w.in("n1p1", func() error {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		// Without the flag the address is tentative until duplicate address detection is done.
		return netlink.AddrAdd(l, &netlink.Addr{IPNet: &net.IPNet{IP: servers[1].AsSlice(), Mask: net.CIDRMask(64, 128)}, Flags: unix.IFA_F_NODAD})
	})
	var near [2]*net.UDPConn
	var got, wrong [2]atomic.Int64
	for i, server := range servers {
		var far *net.UDPConn
		w.in(fmt.Sprintf("n1p%d", i), func() (err error) {
			far, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(server, port)))
			return err
		})
		t.Cleanup(func() { far.Close() })
		go func() {
			buf := make([]byte, 64)
			for {
				n, from, err := far.ReadFromUDPAddrPort(buf)
				if err != nil {
					return
				}
				if n != 1+i {
					wrong[i].Add(1)
				}
				got[i].Add(1)
				_, _ = far.WriteToUDPAddrPort(buf[:n], from)
			}
		}()
		w.in("n0p0", func() (err error) {
			d := net.Dialer{LocalAddr: net.UDPAddrFromAddrPort(netip.AddrPortFrom(w.pod(0, 0), 6000)), Control: func(_, _ string, c syscall.RawConn) error {
				var err error
				controlled := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) })
				return errors.Join(controlled, err)
			}}
			c, err := d.Dial("udp", netip.AddrPortFrom(server, port).String())
			if err == nil {
				near[i] = c.(*net.UDPConn)
			}
			return err
		})
		t.Cleanup(func() { near[i].Close() })
	}
	trip := func(i int) {
		buf := make([]byte, 64)
		_ = near[i].SetDeadline(time.Now().Add(patience))
		if _, err := near[i].Write(make([]byte, 1+i)); err != nil {
			t.Fatal(err)
		}
		if n, err := near[i].Read(buf); err != nil || n != 1+i {
			t.Fatalf("%d bytes came back to %d: %v", n, i, err)
		}
	}
	w.eventually("one connection is accelerated", func() { trip(0) }, func() bool { return w.counts(0)["fast-out"] > 100 && w.counts(1)["fast-in"] > 100 })
	var fast, mismatches uint64
	for range 20 {
		trip(0) // an idle connection would be forgotten, and the other would take its place
		before := w.counts(0)
		for range 100 {
			trip(1)
		}
		now := w.counts(0)
		fast += now["fast-out"] - before["fast-out"] + now["fast-in"] - before["fast-in"]
		mismatches += now["mismatch"] - before["mismatch"]
	}
	if fast > 0 {
		t.Errorf("%d packets of the other took the fast path", fast)
	}
	if mismatches == 0 {
		t.Errorf("no mismatch was counted: has the hash changed? %v", w.counts(0))
	}
	for range 2000 {
		trip(0)
		trip(1)
	}
	for i := range got {
		t.Logf("server %d received %d datagrams, %d of them wrong", i, got[i].Load(), wrong[i].Load())
		if n := wrong[i].Load(); n > 0 {
			t.Errorf("server %d received %d datagrams of the other", i, n)
		}
	}
}

// TestIPv6DeviceMTU checks that packets larger than a device's IPv6 MTU take the slow path. The kernel does not announce that it
// changes.
func TestIPv6DeviceMTU(t *testing.T) {
	t.Parallel()
	w := newWorldOf(t, spec.ShapeCalico, spec.OffloadNone, true)
	w.start()
	near := w.datagrams()
	message := make([]byte, 1300)
	send := func() {
		_ = near.SetDeadline(time.Now().Add(100 * time.Millisecond))
		_, _ = near.Write(message)
		_, _ = near.Read(make([]byte, 2048))
	}
	w.eventually("fast path", send, func() bool { return w.counts(0)["fast-out"] > 20 && w.counts(1)["fast-out"] > 20 })
	w.in("n0", func() error { return os.WriteFile("/proc/sys/net/ipv6/conf/vxlan.calico/mtu", []byte("1290"), 0) })
	testenv.Await(t, polled, "packets are counted as exceeds-mtu", func() bool { send(); return w.counts(0)["exceeds-mtu"] > 0 })
}

// TestSKBPriority checks that accelerated packets have the skb->priority that the kernel would have derived from their TOS, if
// it does so.
func TestSKBPriority(t *testing.T) {
	t.Parallel()
	for version, six := range versions {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			w := newWorldOf(t, spec.ShapeFlannel, spec.OffloadFull, six)
			near := w.datagrams()
			size := int32(grammar.Head + 28 + 777)
			if six {
				size += 20
			}
			of := func(tos int) {
				option(t, near, func(fd int) error {
					if six {
						return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_TCLASS, tos)
					}
					return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TOS, tos)
				})
			}
			seen, counter := counting(t, 8,
				asm.LoadMem(asm.R2, asm.R1, 0, asm.Word), // __sk_buff.len
				asm.JNE.Imm(asm.R2, size, "out"),
				asm.LoadMem(asm.R2, asm.R1, 32, asm.Word), // __sk_buff.priority
				asm.And.Imm(asm.R2, 7))
			w.in("n0", func() error {
				l, err := netlink.LinkByName("eth0")
				if err != nil {
					return err
				}
				at, err := link.AttachTCX(link.TCXOptions{Interface: l.Attrs().Index, Program: counter, Attach: ebpf.AttachTCXEgress})
				if err == nil {
					t.Cleanup(func() { at.Close() })
				}
				return err
			})
			message := make([]byte, 777)
			trip := func() {
				_ = near.SetDeadline(time.Now().Add(patience))
				if _, err := near.Write(message); err != nil {
					t.Fatal(err)
				}
				if _, err := near.Read(make([]byte, 1000)); err != nil {
					t.Fatal(err)
				}
			}
			// The priorities of 100 packets.
			priorities := func() (all [8]uint64) {
				for i := range uint32(len(all)) {
					if err := seen.Put(i, uint64(0)); err != nil {
						t.Fatal(err)
					}
				}
				for range 100 {
					trip()
				}
				for i := range all {
					if err := seen.Lookup(uint32(i), &all[i]); err != nil {
						t.Fatal(err)
					}
				}
				return all
			}
			slow := map[int][8]uint64{}
			for tos := 0; tos < 32; tos += 8 {
				of(tos)
				slow[tos] = priorities()
				if slow[tos] == [8]uint64{} {
					t.Fatal("no packet was counted")
				}
			}
			w.start()
			for tos := 0; tos < 32; tos += 8 {
				of(tos)
				before := w.counts(0)["fast-out"]
				w.eventually("fast path", trip, func() bool { return w.counts(0)["fast-out"] > before+100 })
				before = w.counts(0)["fast-out"]
				fast := priorities()
				if n := w.counts(0)["fast-out"] - before; n < 90 {
					t.Fatalf("with TOS %#x %d of 100 packets took the fast path", tos, n)
				}
				if fast != slow[tos] {
					t.Errorf("priorities of 100 packets with TOS %#x: on the slow path %v, on the fast path %v", tos, slow[tos], fast)
				}
			}
		})
	}
}
