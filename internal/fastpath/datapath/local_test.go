//go:build linux

package datapath

import (
	"errors"
	"maps"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// TestPaddingAtNIC checks that redirect_nic redirects frames that were padded to the minimum size of Ethernet, without the
// padding, and leaves longer padded frames to the kernel. A TCP segment without options in a padded frame is a bare
// acknowledgement.
func TestPaddingAtNIC(t *testing.T) {
	f := loadForTest(t, map[string]any{"skip_csum_checks": uint8(1)})
	for _, tt := range []struct {
		name             string
		payload, padding int
		taken            bool
	}{
		{"no padding", 0, 0, true}, {"padded", 0, 60 - 54, true}, {"padded, and too long", 100, 6, false},
	} {
		f.addFlow(t, four, unix.IPPROTO_TCP, nil)
		p := inPacket(four, unix.IPPROTO_TCP)
		p.Payload = tt.payload
		length := len(p.Bytes())
		p.Trailing = tt.padding
		code, out, err := f.RedirectNIC.Test(p.Bytes())
		if err != nil {
			t.Fatal(err)
		}
		if taken := code == redirect; taken != tt.taken || taken && len(out) != length {
			t.Errorf("%s: redirect_nic returns %d and %d bytes, want a redirect of %d bytes: %t", tt.name, int32(code), len(out), length, tt.taken)
		}
	}
}

// TestPeerOnNode checks when redirect_pod delivers a packet to or from another pod of the node, and all conditions under which
// it leaves the packet to the kernel. All devices of a test run are lo, so lo+1 stands for another device.
func TestPeerOnNode(t *testing.T) {
	const toPeer = 1<<31 | 1
	f := loadForTest(t, map[string]any{"skip_csum_checks": uint8(1)})
	for _, tt := range []struct {
		name    string
		flow    func(*fastpathFlow)
		out, in bool
	}{
		{"the peer is a pod of the node", func(v *fastpathFlow) { v.Out.Template = toPeer }, true, true},
		{"the peer is on another node", func(*fastpathFlow) {}, true, false},
		{"from another link than the one to the peer", func(v *fastpathFlow) { v.Out.Template = 1<<31 | 2 }, true, false},
		{"from another link than before", func(v *fastpathFlow) { v.Out.Template, v.In.Device = toPeer, lo+1 }, true, false},
		{"unused link of the peer", func(v *fastpathFlow) { v.Out.Template = 1<<31 | 3 }, false, false},
		{"expired", func(v *fastpathFlow) { v.Out.Template = toPeer; v.Out.Validated -= 1e9; v.In.Validated -= 1e9 }, false, false},
		{"due for revalidation", func(v *fastpathFlow) { v.Out.Template = toPeer; v.Out.Validated -= 500e6; v.In.Validated -= 500e6 }, false, false},
		{"invalidated", func(v *fastpathFlow) { v.Out.Template = toPeer; v.Out.Generation--; v.In.Generation-- }, false, false},
	} {
		for i := range 4 {
			v, protocol := version(i&1 != 0), []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP}[i/2]
			f.addFlow(t, v, protocol, tt.flow)
			if err := f.objects.PodLinks.Put(uint32(2), fastpathPodLink{Veth: lo + 1}); err != nil {
				t.Fatal(err)
			}
			code, _, err := f.RedirectPod.Test(outPacket(v, protocol).Bytes())
			if err != nil || (code == redirect) != tt.out {
				t.Errorf("%s %s: for a packet to the peer redirect_pod returns %d, error %v, want a redirect: %t", v, tt.name, int32(code), err, tt.out)
			}
			f.addFlow(t, v, protocol, tt.flow)
			in := inPacket(v, protocol).Bytes()
			code, _, err = f.RedirectPod.Test(in)
			if err != nil || (code == redirect) != tt.in {
				t.Errorf("%s %s: for a packet of the peer redirect_pod returns %d, error %v, want a redirect: %t", v, tt.name, int32(code), err, tt.in)
			}
			in[0] ^= 2 // to another MAC address: the bridge or the node would not forward it to this pod
			if code, _, err = f.RedirectPod.Test(in); err != nil || code == redirect {
				t.Errorf("%s %s: for a frame to another MAC address redirect_pod returns %d, error %v", v, tt.name, int32(code), err)
			}
		}
	}
}

// TestKinds checks that packets on the fast path, and connections, are counted by kind.
func TestKinds(t *testing.T) {
	const toPeer = 1<<31 | 1
	f := loadForTest(t, map[string]any{"skip_csum_checks": uint8(1)})
	routed := func() error { return f.objects.EncapTemplates.Put(uint32(1), fastpathEncapTemplate{Nic: lo}) }
	local := func(v *fastpathFlow) { v.Out.Template = toPeer }
	incoming := func(v *fastpathFlow) { v.Out.Validated, v.Out.Template = 0, 0 }
	in, out := inPacket(four, unix.IPPROTO_UDP).Bytes(), outPacket(four, unix.IPPROTO_UDP).Bytes()
	known := knownConnection(four, false)
	for _, tt := range []struct {
		name    string
		flow    func(*fastpathFlow)
		also    func() error
		program *ebpf.Program
		packet  []byte
		counted string
		kind    string
	}{
		{"sent in VXLAN", nil, nil, f.RedirectPod, out, "fast-out-vxlan", KindVXLAN},
		{"sent as it is", nil, routed, f.RedirectPod, out, "fast-out-routed", KindRouted},
		{"sent to a pod of the node", local, nil, f.RedirectPod, out, "fast-out-local", KindLocal},
		{"received from a pod of the node", local, nil, f.RedirectPod, in, "fast-in-local", KindLocal},
		{"decapsulated by the kernel", incoming, nil, f.RedirectVXLAN, in, "fast-in-vxlan", KindVXLAN},
		{"decapsulated at the NIC", nil, nil, f.DecapNIC, known.Wrap(in), "fast-in-vxlan", KindVXLAN},
		{"received as it is", incoming, func() error { return f.SetRouters([]int{lo}) }, f.RedirectNIC, in, "fast-in-routed", KindRouted},
		{"received from a pod only", incoming, func() error { return f.SetPodDevices([]int{lo}) }, nil, nil, "", KindLocal},
	} {
		f.addFlow(t, four, unix.IPPROTO_UDP, tt.flow)
		err := errors.Join(f.SetRouters(nil), f.SetPodDevices(nil), f.objects.DecapTemplates.Put(uint32(2), decapTemplateForTest(four)))
		if tt.also != nil {
			err = errors.Join(err, tt.also())
		}
		if err != nil {
			t.Fatal(err)
		}
		if tt.program != nil {
			before, err := f.Counts()
			if err != nil {
				t.Fatal(err)
			}
			if code, _, err := tt.program.Test(tt.packet); err != nil || code != redirect {
				t.Errorf("%s: the program returns %d, error %v, want a redirect", tt.name, int32(code), err)
			}
			if got, want := f.since(t, before), "["+tt.counted+"]"; got != want {
				t.Errorf("%s: counted %s, want %s", tt.name, got, want)
			}
		}
		want := map[string]int{KindVXLAN: 0, KindRouted: 0, KindLocal: 0}
		want[tt.kind] = 1
		if all, fast, err := f.Accelerated(monotonic(t)); err != nil || all != 1 || !maps.Equal(fast, want) {
			t.Errorf("%s: of %d connections %v are accelerated, %v, want %v", tt.name, all, fast, err, want)
		}
	}
}
