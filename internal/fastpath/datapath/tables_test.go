//go:build linux

package datapath

import (
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/testenv"
	"slipstream.dev/internal/testenv/grammar"
)

// remembers reports whether decap_nic leaves a packet to the kernel in order to learn its outer headers.
func (p *Programs) remembers(t *testing.T, b []byte) bool {
	t.Helper()
	if err := p.objects.CpuStates.Put(uint32(0), make([]fastpathCpuState, ebpf.MustPossibleCPU())); err != nil {
		t.Fatal(err)
	}
	p.run(t, p.DecapNIC, b, 0)
	return p.hasDecapStage(t, 1)
}

// hasDecapStage reports whether a CPU has this stage of a probe that decap_nic began.
func (p *Programs) hasDecapStage(t *testing.T, stage uint8) bool {
	t.Helper()
	cpus := make([]fastpathCpuState, ebpf.MustPossibleCPU())
	if err := p.objects.CpuStates.Lookup(uint32(0), &cpus); err != nil {
		t.Fatal(err)
	}
	return slices.ContainsFunc(cpus, func(c fastpathCpuState) bool { return c.DecapStage == stage })
}

// TestLearnsFromRemotesOnly checks that decap_nic learns the outer headers of a packet only if the FDB has a remote node with the
// packet's outer source address and inner source MAC address.
func TestLearnsFromRemotesOnly(t *testing.T) {
	f := loadForTest(t, map[string]any{"skip_csum_checks": uint8(1)})
	f.addFlow(t, four, unix.IPPROTO_UDP, func(v *fastpathFlow) { v.Decapped = 0 })
	const outerSource = 14 + 12 // the offset of the outer source address
	for name, change := range map[string]func(*grammar.Connection, *grammar.Packet, *Remote){
		"a remote node":                   func(*grammar.Connection, *grammar.Packet, *Remote) {},
		"another outer source":            func(c *grammar.Connection, _ *grammar.Packet, _ *Remote) { c.Outer[outerSource+3]++ },
		"another inner source":            func(_ *grammar.Connection, p *grammar.Packet, _ *Remote) { p.From = knownMAC },
		"a remote node of another device": func(_ *grammar.Connection, _ *grammar.Packet, r *Remote) { r.Device++ },
	} {
		c, inner, remote := knownConnection(four, false), inPacket(four, unix.IPPROTO_UDP), knownRemote
		change(&c, &inner, &remote)
		if err := f.SetRemotes([]Remote{remote}); err != nil {
			t.Fatal(err)
		}
		if learns := f.remembers(t, c.Wrap(inner.Bytes())); learns != (name == "a remote node") {
			t.Errorf("%s: learns %t", name, learns)
		}
	}
}

// TestProbeMergedByGRO checks that redirect_vxlan recognises the packet that decap_nic has left to the kernel, also if GRO has merged later
// packets into it.
func TestProbeMergedByGRO(t *testing.T) {
	testenv.PinThread(t)
	f := loadForTest(t, nil)
	longer := func(p *grammar.Packet) { p.Payload, p.Flags = p.Payload+100, tcpACK|tcpPSH }
	for _, tt := range []struct {
		name       string
		protocol   uint8
		change     func(*grammar.Packet)
		later      byte // how much later its sequence number is
		recognised bool
	}{
		{name: "the packet itself", protocol: unix.IPPROTO_TCP, recognised: true},
		{name: "merged", protocol: unix.IPPROTO_TCP, change: longer, recognised: true},
		{name: "a later segment", protocol: unix.IPPROTO_TCP, change: longer, later: 1},
		{name: "a shorter segment", protocol: unix.IPPROTO_TCP, change: func(p *grammar.Packet) { p.Payload-- }},
		{name: "another TTL", protocol: unix.IPPROTO_TCP, change: func(p *grammar.Packet) { longer(p); p.TTL-- }},
		{name: "a datagram", protocol: unix.IPPROTO_UDP, recognised: true},
		{name: "a longer datagram", protocol: unix.IPPROTO_UDP, change: longer},
	} {
		for _, v := range []version{four, six} {
			f.addFlow(t, v, tt.protocol, func(v *fastpathFlow) { v.Decapped = 0 })
			p := inPacket(v, tt.protocol)
			if !f.remembers(t, knownConnection(v, false).Wrap(p.Bytes())) {
				t.Fatalf("%s %s: decap_nic does not remember the packet", v, tt.name)
			}
			if tt.change != nil {
				tt.change(&p)
			}
			b := p.Bytes()
			b[14+v.header()+7] += tt.later
			f.run(t, f.RedirectVXLAN, b, 0)
			if recognised := f.hasDecapStage(t, 2); recognised != tt.recognised {
				t.Errorf("%s %s: recognised %t", v, tt.name, recognised)
			}
		}
	}
}

// states returns the states of an entry in all tables.
func (p *Programs) states(t *testing.T, entry uint32) (all []fastpathEntryState) {
	t.Helper()
	for _, m := range []*ebpf.Map{p.objects.EncapStates, p.objects.DecapStates, p.objects.PodLinkStates} {
		var state uint64
		if err := m.Lookup(entry, &state); err != nil {
			t.Fatal(err)
		}
		all = append(all, fastpathEntryState(state))
	}
	return all
}

// TestRecycle checks that an entry without flows is freed by the second call of Recycle, unless a flow refers to it again by
// then.
func TestRecycle(t *testing.T) {
	const free, taken, inUse, retired = fastpathEntryStateENTRY_FREE, fastpathEntryStateENTRY_TAKEN, fastpathEntryStateENTRY_IN_USE, fastpathEntryStateENTRY_RETIRED
	f := loadForTest(t, nil)
	check := func(when string, entry uint32, want fastpathEntryState) {
		t.Helper()
		if err := f.Recycle(); err != nil {
			t.Fatal(err)
		}
		for i, is := range f.states(t, entry) {
			if is != want {
				t.Errorf("%s: entry %d of table %d has state %d, want %d", when, entry, i, is, want)
			}
		}
	}
	refer := func(entry uint32) {
		f.addFlow(t, four, unix.IPPROTO_TCP, func(v *fastpathFlow) { v.Out.Template, v.In.Template, v.DecappedTemplate = entry, entry, entry })
	}
	for _, m := range []*ebpf.Map{f.objects.EncapStates, f.objects.DecapStates, f.objects.PodLinkStates} {
		for entry, state := range map[uint32]fastpathEntryState{5: inUse, 6: inUse, 7: taken, m.MaxEntries() - 1: inUse} {
			if err := m.Put(entry, uint64(state)); err != nil {
				t.Fatal(err)
			}
		}
	}
	refer(5)
	check("in use", 5, inUse)
	check("in use", 5, inUse)
	check("never referred to", 6, free)
	check("a program is writing it", 7, taken)
	check("another is in use", 4, free)
	refer(6)
	check("no longer referred to", 5, retired)
	refer(5) // by a program that had looked it up before
	check("referred to again", 5, retired)
	check("referred to again", 5, retired)
	if err := f.deleteFlows(); err != nil {
		t.Fatal(err)
	}
	check("no flows", 5, free)
	if last := f.objects.PodLinkStates.MaxEntries() - 1; f.states(t, last)[2] != free {
		t.Error("the last entry is not free")
	}
	if len(f.tables.all[0].retired) != 0 {
		t.Errorf("%d entries count as retired", len(f.tables.all[0].retired))
	}
}
