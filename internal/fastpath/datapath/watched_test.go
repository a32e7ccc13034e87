//go:build linux

package datapath

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/testenv/grammar"
)

// TestSampledConnectionRequestsAttach checks that the programs send an attach request for a pod's link when they have sampled a
// connection of the pod twice, at least 50 ms apart, and none for short connections that reuse ports. They start probes only
// once the pod is watched.
func TestSampledConnectionRequestsAttach(t *testing.T) {
	for _, v := range []version{four, six} {
		t.Run(v.String(), func(t *testing.T) { testSampledConnectionRequestsAttach(t, v) })
	}
}

func testSampledConnectionRequestsAttach(t *testing.T, v version) {
	pod, peer := v.ends()
	for _, way := range []struct {
		name string
		// sampler sends the attach requests for packets that prober handles.
		sampler, prober func(*Programs) *ebpf.Program
		packet          func(version, uint8) grammar.Packet
		// others are other watched pods, which must make no difference.
		pod    Pod
		others []Pod
		stage  func(fastpathCpuState) uint8
	}{
		{"out", func(p *Programs) *ebpf.Program { return p.ObserveVXLAN }, func(p *Programs) *ebpf.Program { return p.RedirectPod }, outPacket,
			Pod{Link: lo, Addresses: []netip.Addr{pod.Addr()}}, []Pod{{Link: lo + 1, Addresses: []netip.Addr{peer.Addr()}}},
			func(c fastpathCpuState) uint8 { return c.OutStage }},
		{"in", func(p *Programs) *ebpf.Program { return p.RedirectVXLAN }, func(p *Programs) *ebpf.Program { return p.RedirectVXLAN }, inPacket,
			Pod{Link: lo + 1, Addresses: []netip.Addr{peer.Addr(), pod.Addr()}}, []Pod{{Link: lo, Addresses: []netip.Addr{peer.Addr()}}},
			func(c fastpathCpuState) uint8 { return c.InStage }},
	} {
		f := loadForTest(t, nil)
		if err := errors.Join(f.SetWatched(way.others), f.RenewLease(1<<62)); err != nil {
			t.Fatal(err)
		}
		show := func(to func(*Programs) *ebpf.Program, p grammar.Packet, times uint32) {
			t.Helper()
			code, err := to(f).Run(&ebpf.RunOptions{Data: p.Bytes(), Repeat: times})
			if err != nil || int32(code) != -1 {
				t.Fatalf("returns %d, %v", int32(code), err)
			}
		}
		requested := func() bool {
			t.Helper()
			f.events.SetDeadline(time.Now())
			event, err := f.ReadEvent()
			if errors.Is(err, os.ErrDeadlineExceeded) {
				return false
			}
			if want := (Event{Kind: EventAttach, Pod: PodKeyOf(pod.Addr())}); err != nil || event != want {
				t.Fatalf("%s: event %v, %v, want %v", way.name, event, err, want)
			}
			return true
		}
		probing := func() bool {
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
		const some = 64 // at least one of them is sampled
		for _, protocol := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
			start := time.Now()
			for !requested() {
				if time.Since(start) > 20*time.Second {
					t.Fatalf("%s: no attach request for protocol %d", way.name, protocol)
				}
				show(way.sampler, way.packet(v, protocol), some)
			}
			if took := time.Since(start); took < 40*time.Millisecond {
				t.Errorf("%s: attach request after %v", way.name, took)
			}
		}
		noProbe := func(what string) {
			t.Helper()
			for start := time.Now(); time.Since(start) < 300*time.Millisecond; {
				show(way.prober, way.packet(v, unix.IPPROTO_UDP), 1)
				if probing() {
					t.Fatalf("%s: a probe started for %s", way.name, what)
				}
			}
			for requested() { // the same program may request it
			}
		}
		noProbe("a pod that is not watched")

		opening := way.packet(v, unix.IPPROTO_TCP)
		opening.Flags = 0x02
		for try := 1; ; try++ {
			var longest time.Duration
			wasRequested := false
			for start := time.Now(); time.Since(start) < 300*time.Millisecond; {
				began := time.Now()
				show(way.sampler, opening, 1)
				show(way.sampler, way.packet(v, unix.IPPROTO_TCP), some)
				longest = max(longest, time.Since(began))
				wasRequested = requested() || wasRequested
			}
			if !wasRequested {
				break
			}
			// A connection that lasts this long is eligible.
			if longest < 40*time.Millisecond || try == 20 {
				t.Errorf("%s: attach request for short connections, the longest of %v", way.name, longest)
				break
			}
		}

		if err := f.SetWatched([]Pod{way.pod}); err != nil {
			t.Fatal(err)
		}
		for start := time.Now(); !probing(); {
			if time.Since(start) > 20*time.Second {
				t.Fatalf("%s: no probe for a watched pod", way.name)
			}
			show(way.prober, way.packet(v, unix.IPPROTO_UDP), 1)
		}
		for start := time.Now(); time.Since(start) < 200*time.Millisecond; {
			show(way.sampler, way.packet(v, unix.IPPROTO_UDP), some)
		}
		if requested() {
			t.Errorf("%s: attach request for a watched pod", way.name)
		}
		// Clear the state: redirect_vxlan waits for the outcome of the last probe.
		if err := errors.Join(f.SetWatched(way.others), f.objects.CpuStates.Put(uint32(0), make([]fastpathCpuState, ebpf.MustPossibleCPU()))); err != nil {
			t.Fatal(err)
		}
		for start := time.Now(); !requested(); {
			if time.Since(start) > 20*time.Second {
				t.Fatalf("%s: no attach request for a pod that is no longer watched", way.name)
			}
			show(way.sampler, way.packet(v, unix.IPPROTO_UDP), some)
		}
		noProbe("a pod that is no longer watched")
	}
}

// TestAttachRequestsRateLimited checks that the programs send at most one attach request per
// millisecond and CPU, however many connections there are.
func TestAttachRequestsRateLimited(t *testing.T) {
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
	requested := 0
	for {
		f.events.SetDeadline(time.Now())
		if _, err := f.ReadEvent(); err != nil {
			break
		}
		requested++
	}
	if most := (int(took/time.Millisecond) + 1) * ebpf.MustPossibleCPU(); requested == 0 || requested > most {
		t.Errorf("%d attach requests in %v, want at most %d", requested, took, most)
	}
	t.Logf("%d attach requests in %v", requested, took)
}

// TestAdmissionSampling checks that a connection that is sampled again is eligible, unless it
// counts as idle because too much time has passed.
func TestAdmissionSampling(t *testing.T) {
	f := loadForTest(t, nil)
	if err := f.RenewLease(1 << 62); err != nil {
		t.Fatal(err)
	}
	packet := outPacket(four, unix.IPPROTO_UDP).Bytes()
	// show runs the program often enough that some packets are sampled.
	show := func() {
		t.Helper()
		if code, err := f.ObserveVXLAN.Run(&ebpf.RunOptions{Data: packet, Repeat: 1000}); err != nil || int32(code) != -1 {
			t.Fatalf("returns %d, %v", int32(code), err)
		}
	}
	for _, tt := range []struct {
		ago       time.Duration
		requested bool
	}{{0, false}, {time.Second, true}, {time.Minute, false}} {
		slots := make([]uint64, f.objects.Admission.Size()/8)
		// Also reset the rate limit of attach requests.
		if err := errors.Join(f.objects.Admission.Set(slots), f.objects.CpuStates.Put(uint32(0), make([]fastpathCpuState, ebpf.MustPossibleCPU()))); err != nil {
			t.Fatal(err)
		}
		show()
		if err := f.objects.Admission.Get(slots); err != nil {
			t.Fatal(err)
		}
		for i, y := range slots {
			if y != 0 {
				slots[i] = y&^0xffffffff | uint64(uint32(y)-uint32(tt.ago/time.Millisecond))
			}
		}
		if err := f.objects.Admission.Set(slots); err != nil {
			t.Fatal(err)
		}
		show()
		f.events.SetDeadline(time.Now())
		if _, err := f.ReadEvent(); (err == nil) != tt.requested {
			t.Errorf("sampled again after %s: attach request %t, want %t (%v)", tt.ago, err == nil, tt.requested, err)
		}
	}
}

// FuzzDecodeEvent checks that any bytes in the ring buffer decode to one event or an error.
func FuzzDecodeEvent(f *testing.F) {
	const size, at = 56, 48
	for kind := range uint32(EventReopen) + 2 {
		b := make([]byte, size)
		binary.NativeEndian.PutUint32(b[at:], kind)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		event, err := decodeEvent(b)
		if len(b) < size || binary.NativeEndian.Uint32(b[at:]) > uint32(EventReopen) {
			if err == nil {
				t.Errorf("%x is %v", b, event)
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		six, kind := b[13] != 0, EventKind(binary.NativeEndian.Uint32(b[at:]))
		if kind == EventAttach {
			if want := (Event{Pod: PodKey{binary.NativeEndian.Uint32(b), six}}); event != want {
				t.Errorf("%x is %v", b, event)
			}
			return
		}
		if event.Flow.Pod.Addr().Is6() != six || event.Pod != (PodKey{}) || event.Kind != kind ||
			six && event.Flow.Pod.Addr() != netip.AddrFrom16([16]byte(b[16:])) || six && event.Flow.Peer.Addr() != netip.AddrFrom16([16]byte(b[32:])) {
			t.Errorf("%x is %v", b, event)
		}
	})
}
