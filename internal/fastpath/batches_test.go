//go:build linux

package fastpath_test

import (
	"bytes"
	"errors"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/place/lab/overlay"
	"slipstream.dev/internal/spec"
)

// TestDatagramBatches sends batches of datagrams in one packet (UDP_SEGMENT), as QUIC does, for several revalidations. The batches must
// take the fast path, and each datagram must arrive, in order and with its size.
func TestDatagramBatches(t *testing.T) {
	t.Parallel()
	vxlan := func(t *testing.T) *world { return newWorld(t, spec.ShapeFlannel, spec.OffloadFull) }
	local := func(t *testing.T) *world { return newLocalWorld(t, spec.ShapeFlannel, false) }
	for name, c := range map[string]struct {
		start func(*testing.T) *world
		front front
	}{
		"VXLAN":                   {vxlan, direct},
		"VXLAN, Service":          {vxlan, byService},
		"VXLAN, IPv6":             {func(t *testing.T) *world { return newWorldOf(t, spec.ShapeFlannel, spec.OffloadFull, true) }, direct},
		"VXLAN, without offloads": {func(t *testing.T) *world { return newWorld(t, spec.ShapeFlannel, spec.OffloadNone) }, direct},
		"routed":                  {func(t *testing.T) *world { return newWorld(t, overlay.ShapeRouted, spec.OffloadFull) }, direct},
		"routed, IPv6":            {func(t *testing.T) *world { return newWorldOf(t, overlay.ShapeRouted, spec.OffloadFull, true) }, direct},
		"local":                   {local, direct},
		"local, Service":          {local, byService},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := c.start(t)
			w.start()
			w.checkBatches(c.front)
		})
	}
}

func (w *world) checkBatches(front front) {
	near, far := w.batchPair(front)
	count := func(why string) (all []uint64) {
		for i := range w.nodes() {
			all = append(all, w.counts(i)[why])
		}
		return all
	}
	w.eventually("the batches take the fast path", func() { w.exchangeBatches(near, far, 20) }, func() bool { return slices.Min(count("fast-out")) > 20 })
	out, in, last, tooLong := count("fast-out"), count("fast-in"), count("revalidate"), count("exceeds-mtu")
	batches, rises := uint64(0), make([]int, len(last)) // a batch may be counted nine times, if it is single packets
	w.eventually("each node revalidates the flow three times both ways", func() {
		w.exchangeBatches(near, far, 20)
		batches += 20
		now := count("revalidate")
		for i, n := range now {
			if n > last[i] {
				rises[i]++
			}
		}
		last = now
	}, func() bool { return slices.Min(rises) >= 6 })
	for i := range w.nodes() {
		c := w.counts(i)
		sent, received := c["fast-out"]-out[i], c["fast-in"]-in[i]
		if w.local { // a packet counts once: as outgoing or as incoming
			sent = (sent + received) / 2
			received = sent
		}
		if least := batches * 9 / 10; sent < least || received < least {
			w.Errorf("of %d batches to and from pods of node%d, %d left and %d arrived by the fast path: %v", batches, i, sent, received, c)
		}
	}
	if now := count("exceeds-mtu"); !slices.Equal(now, tooLong) {
		w.Errorf("packets are counted as larger than the MTU: %d, before %d", now, tooLong)
	}
}

// batchPair returns two sockets that send each batch of datagrams of 1,000 bytes as one packet.
func (w *world) batchPair(front front) (near, far *net.UDPConn) {
	w.Helper()
	near, far = w.datagramPair(front)
	for _, c := range []*net.UDPConn{near, far} {
		option(w.T, c, func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_SEGMENT, 1000) })
	}
	return near, far
}

// exchangeBatches sends batches of nine datagrams, and waits for the answer to each, which is such a batch too.
func (w *world) exchangeBatches(near, far *net.UDPConn, batches int) {
	w.Helper()
	batch := make([]byte, 8*1000+300)
	receive := func(c *net.UDPConn) (from *net.UDPAddr) {
		buf := make([]byte, 2000)
		for rest := batch; len(rest) > 0; {
			want := rest[:min(1000, len(rest))]
			n, sender, err := c.ReadFromUDP(buf)
			if err != nil {
				w.Fatalf("after %d of %d bytes: %v", len(batch)-len(rest), len(batch), err)
			}
			if !bytes.Equal(buf[:n], want) {
				w.Fatalf("a datagram of %d bytes that begins with %d, want %d that begin with %d", n, buf[0], len(want), want[0])
			}
			rest, from = rest[len(want):], sender
		}
		return from
	}
	for i := range batches {
		for k := range batch {
			batch[k] = byte(i + k/1000)
		}
		deadline := time.Now().Add(patience)
		_, err := near.Write(batch)
		if err := errors.Join(err, near.SetDeadline(deadline), far.SetDeadline(deadline)); err != nil {
			w.Fatal(err)
		}
		from := receive(far)
		if _, err := far.WriteToUDP(batch, from); err != nil {
			w.Fatal(err)
		}
		receive(near)
	}
}

// TestOrderAroundOddPackets sends batches of packets, of which a few differ from the others in a header that the fast path compares. The
// kernel has to decapsulate or forward these, and they must not be overtaken.
func TestOrderAroundOddPackets(t *testing.T) {
	t.Parallel()
	// The first two are marked by a router: 2 becomes 3 in the ECN field of the outer header (RFC 3168).
	for name, c := range map[string]struct{ field, sum, change, every int }{
		"marked often":    {15, 24, 1, 50},
		"marked at times": {15, 24, 1, 20011}, // decap_nic decapsulates most others
		"another TOS":     {65, 74, 0x28, 50},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, spec.ShapeFlannel, spec.OffloadNone)
			w.start()
			near, far := w.batchPair(direct)
			for _, c := range []*net.UDPConn{near, far} {
				option(t, c, func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TOS, 2) }) // capable of ECN
			}
			seen := w.changeSome("n1", int32(c.every), c.field, c.sum, c.change)
			count := func(why string) uint64 { return w.counts(1)[why] }
			w.eventually("the datagrams take the fast path", func() { w.exchangeBatches(near, far, 20) }, func() bool { return count("fast-in") > 100 })
			fast, mismatches, before, byKernel := count("fast-in"), count("mismatch"), seen(), w.decappedByKernel("n1")
			const packets = 9 * 20_000
			w.exchangeBatches(near, far, packets/9)
			changed := (seen() - before) / uint64(c.every)
			fast, mismatches, byKernel = count("fast-in")-fast, count("mismatch")-mismatches, w.decappedByKernel("n1")-byKernel
			t.Logf("of %d packets %d were changed, %d took the fast path, and the kernel decapsulated %d; %d counted as mismatch", packets, changed, fast, byKernel, mismatches)
			if changed < packets/uint64(c.every)-1 || fast < packets/3 || name == "another TOS" && mismatches < changed || name == "marked at times" && byKernel > packets*3/4 {
				t.Error("the packets did not go as the test needs them to")
			}
		})
	}
}

// changeSome attaches an XDP program to a node's NIC. The program adds to a byte of an IPv4 header in each VXLAN packet whose
// number is a multiple of every, and corrects the checksum. seen returns how many VXLAN packets the program has seen.
func (w *world) changeSome(node string, every int32, field, sum, add int) (seen func() uint64) {
	w.Helper()
	count := array(w.T, 8, 1)
	const end, ipProtocol = 100, 23
	begin := asm.Instructions{
		asm.LoadMem(asm.R6, asm.R1, 0, asm.Word), // data
		asm.LoadMem(asm.R2, asm.R1, 4, asm.Word), // data_end
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.Add.Imm(asm.R1, end),
		asm.JGT.Reg(asm.R1, asm.R2, "pass"),
		asm.LoadMem(asm.R1, asm.R6, ipProtocol, asm.Byte),
		asm.JNE.Imm(asm.R1, unix.IPPROTO_UDP, "pass"),
	}
	p := program(w.T, ebpf.XDP, slices.Concat(begin, lookUpFirst(count, "pass"), asm.Instructions{
		asm.LoadMem(asm.R1, asm.R0, 0, asm.DWord),
		asm.Add.Imm(asm.R1, 1),
		asm.StoreMem(asm.R0, 0, asm.R1, asm.DWord),
		asm.Mod.Imm(asm.R1, every),
		asm.JNE.Imm(asm.R1, 0, "pass"),
		asm.LoadMem(asm.R1, asm.R6, int16(field), asm.Byte),
		asm.Add.Imm(asm.R1, int32(add)),
		asm.StoreMem(asm.R6, int16(field), asm.R1, asm.Byte),
		asm.LoadMem(asm.R1, asm.R6, int16(sum), asm.Half),
		asm.HostTo(asm.BE, asm.R1, asm.Half),
		asm.Add.Imm(asm.R1, int32(0xffff-add)), // RFC 1624
		asm.Mov.Reg(asm.R2, asm.R1),
		asm.RSh.Imm(asm.R2, 16),
		asm.Add.Reg(asm.R1, asm.R2),
		asm.HostTo(asm.BE, asm.R1, asm.Half),
		asm.StoreMem(asm.R6, int16(sum), asm.R1, asm.Half),
		asm.Mov.Imm(asm.R0, 2).WithSymbol("pass"), // XDP_PASS
	})...)
	var attached link.Link
	w.in(node, func() error {
		nic, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		attached, err = link.AttachXDP(link.XDPOptions{Interface: nic.Index, Flags: link.XDPDriverMode, Program: p})
		return err
	})
	w.Cleanup(func() { attached.Close() })
	return func() (n uint64) {
		if err := count.Lookup(uint32(0), &n); err != nil {
			w.Fatal(err)
		}
		return n
	}
}
