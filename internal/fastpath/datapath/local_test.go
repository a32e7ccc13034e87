//go:build linux

package datapath

import (
	"testing"

	"golang.org/x/sys/unix"
)

// TestPaddingAtNIC checks that redirect_nic takes frames that were padded to the least length of Ethernet, without the padding, and
// leaves longer ones with padding to the kernel. TCP without options in a padded frame is an acknowledgement.
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

// TestPeerOnNode checks when redirect_pod delivers a packet to another pod of the node, or takes one from it, and all conditions under
// which it leaves the packet to the kernel. All devices of a test are the same one, so another one has the index lo+1.
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
			in[0] ^= 2 // to another MAC address: the bridge or router would not forward it so
			if code, _, err = f.RedirectPod.Test(in); err != nil || code == redirect {
				t.Errorf("%s %s: for a frame to another MAC address redirect_pod returns %d, error %v", v, tt.name, int32(code), err)
			}
		}
	}
}
