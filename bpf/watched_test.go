//go:build linux

package bpf

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/grammar"
)

// Of a pod that is not watched programs tell when a connection of it is picked twice, 50 ms
// apart or more, and not when one has the same ports after the other. They look at it once it
// is watched, and no sooner.
func TestWatched(t *testing.T) {
	for _, v := range []version{four, six} {
		t.Run(v.String(), func(t *testing.T) { testWatched(t, v) })
	}
}

func testWatched(t *testing.T, v version) {
	pod, peer := v.ends()
	for _, way := range []struct {
		name string
		// scout tells of what looker looks at.
		scout, looker func(*Fastpath) *ebpf.Program
		packet        func(version, uint8) grammar.Packet
		// others are watched too, and do not matter.
		pod    Pod
		others []Pod
		stage  func(fastpathCpuState) uint8
	}{
		{"out", func(f *Fastpath) *ebpf.Program { return f.ObserveVXLAN }, func(f *Fastpath) *ebpf.Program { return f.Encap }, outPacket,
			Pod{Link: lo, Addresses: []netip.Addr{pod.Addr()}}, []Pod{{Link: lo + 1, Addresses: []netip.Addr{peer.Addr()}}},
			func(c fastpathCpuState) uint8 { return c.OutStage }},
		{"in", func(f *Fastpath) *ebpf.Program { return f.VXLANIngress }, func(f *Fastpath) *ebpf.Program { return f.VXLANIngress }, inPacket,
			Pod{Link: lo + 1, Addresses: []netip.Addr{peer.Addr(), pod.Addr()}}, []Pod{{Link: lo, Addresses: []netip.Addr{peer.Addr()}}},
			func(c fastpathCpuState) uint8 { return c.InStage }},
	} {
		f := loadForTest(t, nil)
		if err := errors.Join(f.SetWatched(way.others), f.RenewLease(1<<62)); err != nil {
			t.Fatal(err)
		}
		show := func(to func(*Fastpath) *ebpf.Program, p grammar.Packet, times uint32) {
			t.Helper()
			code, err := to(f).Run(&ebpf.RunOptions{Data: p.Bytes(), Repeat: times})
			if err != nil || int32(code) != -1 {
				t.Fatalf("returns %d, %v", int32(code), err)
			}
		}
		told := func() bool {
			t.Helper()
			f.events.SetDeadline(time.Now())
			news, err := f.ReadEvent()
			if errors.Is(err, os.ErrDeadlineExceeded) {
				return false
			}
			if want := (Event{Kind: EventAttach, Pod: PodKeyOf(pod.Addr())}); err != nil || news != want {
				t.Fatalf("%s: told of %v, %v, want %v", way.name, news, err, want)
			}
			return true
		}
		looked := func() bool {
			t.Helper()
			var each []fastpathCpuState
			if err := f.objects.CpuStates.Lookup(uint32(0), &each); err != nil {
				t.Fatal(err)
			}
			for _, c := range each {
				if way.stage(c) != 0 {
					return true
				}
			}
			return false
		}
		const some = 64 // one of them is picked at least
		for _, protocol := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
			start := time.Now()
			for !told() {
				if time.Since(start) > 20*time.Second {
					t.Fatalf("%s: never told of protocol %d", way.name, protocol)
				}
				show(way.scout, way.packet(v, protocol), some)
			}
			if took := time.Since(start); took < 40*time.Millisecond {
				t.Errorf("%s: told after %v", way.name, took)
			}
		}
		unseen := func(what string) {
			t.Helper()
			for start := time.Now(); time.Since(start) < 300*time.Millisecond; {
				show(way.looker, way.packet(v, unix.IPPROTO_UDP), 1)
				if looked() {
					t.Fatalf("%s: looked at %s", way.name, what)
				}
			}
			for told() { // by the same program, it may be
			}
		}
		unseen("what nobody would see delivered")

		opening := way.packet(v, unix.IPPROTO_TCP)
		opening.Flags = 0x02
		for try := 1; ; try++ {
			var longest time.Duration
			woken := false
			for start := time.Now(); time.Since(start) < 300*time.Millisecond; {
				began := time.Now()
				show(way.scout, opening, 1)
				show(way.scout, way.packet(v, unix.IPPROTO_TCP), some)
				longest = max(longest, time.Since(began))
				woken = told() || woken
			}
			if !woken {
				break
			}
			// One that lasts so long is worth it.
			if longest < 40*time.Millisecond || try == 20 {
				t.Errorf("%s: told of short connections, the longest of %v", way.name, longest)
				break
			}
		}

		if err := f.SetWatched([]Pod{way.pod}); err != nil {
			t.Fatal(err)
		}
		for start := time.Now(); !looked(); {
			if time.Since(start) > 20*time.Second {
				t.Fatalf("%s: never looked at what is watched", way.name)
			}
			show(way.looker, way.packet(v, unix.IPPROTO_UDP), 1)
		}
		for start := time.Now(); time.Since(start) < 200*time.Millisecond; {
			show(way.scout, way.packet(v, unix.IPPROTO_UDP), some)
		}
		if told() {
			t.Errorf("%s: told of a pod that is watched", way.name)
		}
		// Of another packet: arrive waits for the first.
		if err := errors.Join(f.SetWatched(way.others), f.objects.CpuStates.Put(uint32(0), make([]fastpathCpuState, ebpf.MustPossibleCPU()))); err != nil {
			t.Fatal(err)
		}
		for start := time.Now(); !told(); {
			if time.Since(start) > 20*time.Second {
				t.Fatalf("%s: never told of a pod that is watched no more", way.name)
			}
			show(way.scout, way.packet(v, unix.IPPROTO_UDP), some)
		}
		unseen("what is watched no more")
	}
}

// TestWishes has programs not ask more often than once in a millisecond, however many
// connections there are.
func TestWishes(t *testing.T) {
	f := loadForTest(t, nil)
	if err := f.RenewLease(1 << 62); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	for time.Since(start) < 500*time.Millisecond {
		for port := range uint16(500) {
			p := outPacket(four, unix.IPPROTO_UDP)
			p.Source = netip.AddrPortFrom(p.Source.Addr(), 1000+port)
			if _, err := f.ObserveVXLAN.Run(&ebpf.RunOptions{Data: p.Bytes(), Repeat: 32}); err != nil {
				t.Fatal(err)
			}
		}
	}
	took := time.Since(start)
	told := 0
	for {
		f.events.SetDeadline(time.Now())
		if _, err := f.ReadEvent(); err != nil {
			break
		}
		told++
	}
	if most := (int(took/time.Millisecond) + 1) * ebpf.MustPossibleCPU(); told == 0 || told > most {
		t.Errorf("told %d times in %v, want at most %d", told, took, most)
	}
	t.Logf("told %d times in %v", told, took)
}

// TestRare has a connection that is picked again be taken for one that lasts, unless so much time
// went by that it is as good as idle.
func TestRare(t *testing.T) {
	f := loadForTest(t, nil)
	if err := f.RenewLease(1 << 62); err != nil {
		t.Fatal(err)
	}
	packet := outPacket(four, unix.IPPROTO_UDP).Bytes()
	// show shows so many that some are picked.
	show := func() {
		t.Helper()
		if code, err := f.ObserveVXLAN.Run(&ebpf.RunOptions{Data: packet, Repeat: 1000}); err != nil || int32(code) != -1 {
			t.Fatalf("returns %d, %v", int32(code), err)
		}
	}
	for _, tt := range []struct {
		ago  time.Duration
		told bool
	}{{0, false}, {time.Second, true}, {time.Minute, false}} {
		young := make([]uint64, f.objects.Admission.Size()/8)
		// Nor was the agent asked just now.
		if err := errors.Join(f.objects.Admission.Set(young), f.objects.CpuStates.Put(uint32(0), make([]fastpathCpuState, ebpf.MustPossibleCPU()))); err != nil {
			t.Fatal(err)
		}
		show()
		if err := f.objects.Admission.Get(young); err != nil {
			t.Fatal(err)
		}
		for i, y := range young {
			if y != 0 {
				young[i] = y&^0xffffffff | uint64(uint32(y)-uint32(tt.ago/time.Millisecond))
			}
		}
		if err := f.objects.Admission.Set(young); err != nil {
			t.Fatal(err)
		}
		show()
		f.events.SetDeadline(time.Now())
		if _, err := f.ReadEvent(); (err == nil) != tt.told {
			t.Errorf("picked again after %s it is told of: %t, want %t (%v)", tt.ago, err == nil, tt.told, err)
		}
	}
}

// FuzzNews has whatever the ring holds be read as one thing or refused.
func FuzzNews(f *testing.F) {
	const size, at = 56, 48
	for ask := range uint32(eventKinds) + 1 {
		b := make([]byte, size)
		binary.NativeEndian.PutUint32(b[at:], ask)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		news, err := decodeEvent(b)
		if len(b) < size || binary.NativeEndian.Uint32(b[at:]) >= uint32(eventKinds) {
			if err == nil {
				t.Errorf("%x is %v", b, news)
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		six, ask := b[13] != 0, EventKind(binary.NativeEndian.Uint32(b[at:]))
		if ask == EventAttach {
			if want := (Event{Pod: PodKey{binary.NativeEndian.Uint32(b), six}}); news != want {
				t.Errorf("%x is %v", b, news)
			}
			return
		}
		if news.Flow.Pod.Addr().Is6() != six || news.Pod != (PodKey{}) || news.Kind != ask ||
			six && news.Flow.Pod.Addr() != netip.AddrFrom16([16]byte(b[16:])) || six && news.Flow.Peer.Addr() != netip.AddrFrom16([16]byte(b[32:])) {
			t.Errorf("%x is %v", b, news)
		}
	})
}
