package doctor

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/testenv"
)

// ends are two network namespaces that are wired together.
type ends struct{ client, server netns.Handle }

func newEnds(t *testing.T) ends {
	t.Helper()
	testenv.NeedRoot(t)
	var all []netns.Handle
	for range 2 {
		ns, err := netns.New()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { ns.Close() })
		all = append(all, ns)
	}
	e := ends{all[0], all[1]}
	if err := netns.Do(e.client, func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "eth0", PeerNamespace: netlink.NsFd(e.server)})
	}); err != nil {
		t.Fatal(err)
	}
	for i, ns := range all {
		if err := netns.Do(ns, func() error {
			out, err := exec.Command("sh", "-ec", fmt.Sprintf("ip addr add 192.0.2.%d/24 dev eth0; ip link set eth0 up", i+1)).CombinedOutput()
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	return e
}

// SendThroughTunnel sends in the client's namespace.
func (e ends) SendThroughTunnel(ctx context.Context, tunnel Tunnel, o Offload) (c Transfer, err error) {
	err = netns.Do(e.client, func() (err error) {
		c, err = SendThroughTunnel(ctx, tunnel, o)
		return err
	})
	return c, err
}

// hold receives in the server's namespace.
func (e ends) open(ctx context.Context, tunnel Tunnel) (release func(), err error) {
	ctx, cancel := context.WithCancel(ctx)
	ready, done := make(chan error, 1), make(chan struct{})
	go func() {
		defer close(done)
		err := netns.Do(e.server, func() error {
			return OpenTunnel(ctx, tunnel, func() error { ready <- nil; return nil })
		})
		if err != nil {
			ready <- err
		}
	}()
	release = func() {
		cancel()
		<-done
	}
	if err := <-ready; err != nil {
		release()
		return nil, err
	}
	return release, nil
}

// drop makes the client's device drop each UDP packet for which the instructions jump to "drop". They find the
// packet's context in R6.
func (e ends) drop(t *testing.T, instructions asm.Instructions) {
	t.Helper()
	const protocol, udp = 14 + 9, 17 // offset of the protocol in the IPv4 header
	code := slices.Concat(asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadAbs(protocol, asm.Byte),
		asm.JNE.Imm(asm.R0, udp, "pass"),
	}, instructions, asm.Instructions{
		asm.Mov.Imm(asm.R0, 0).WithSymbol("pass"), // TCX_PASS
		asm.Return(),
		asm.Mov.Imm(asm.R0, 2).WithSymbol("drop"), // TCX_DROP
		asm.Return(),
	})
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: code})
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	if err := netns.Do(e.client, func() error {
		device, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		attached, err := link.AttachTCX(link.TCXOptions{Interface: device.Index, Program: program, Attach: ebpf.AttachTCXEgress})
		if err == nil {
			t.Cleanup(func() { attached.Close() })
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

// TestProbeOffload checks that the probe distinguishes a healthy NIC from one that segments encapsulated packets
// wrongly, and from one that leaves out their checksums. It sees only what arrives.
func TestProbeOffload(t *testing.T) {
	// The inner packet begins after Ethernet, IPv4, UDP, VXLAN and Ethernet.
	const gsoSize, inner = 176, 14 + 20 + 8 + 8 + 14
	const addresses = 0xc612 + 1 + 0xc612 + 2 // 198.18.0.1 and .2, in words of 16 bits
	for _, c := range []struct {
		name  string
		fault asm.Instructions
		want  string
		why   string // of the failure of the first transfer
		costs string // as the finding describes it
	}{
		{"healthy", nil, "", "", ""},
		{"segmentation", asm.Instructions{
			asm.LoadMem(asm.R0, asm.R6, gsoSize, asm.Word),
			asm.JNE.Imm(asm.R0, 0, "drop"),
		}, "serious : Segmentation of VXLAN packets that a sends is wrong if it is offloaded to eth0.", "the transfer stalled", "Connections between pods on the two open"},
		// If the checksum is left to the device, its field contains the sum of the pseudo-header.
		{"checksum", asm.Instructions{
			asm.LoadAbs(inner+2, asm.Half), // the total length
			asm.Mov.Reg(asm.R7, asm.R0),
			asm.Add.Imm(asm.R7, addresses+6-20),
			asm.Mov.Reg(asm.R8, asm.R7), asm.RSh.Imm(asm.R8, 16), asm.And.Imm(asm.R7, 0xffff), asm.Add.Reg(asm.R7, asm.R8),
			asm.Mov.Reg(asm.R8, asm.R7), asm.RSh.Imm(asm.R8, 16), asm.And.Imm(asm.R7, 0xffff), asm.Add.Reg(asm.R7, asm.R8),
			asm.LoadAbs(inner+20+16, asm.Half),
			asm.JEq.Reg(asm.R0, asm.R7, "drop"),
		}, "serious : The checksum of VXLAN packets that a sends is wrong if it is offloaded to eth0.", "no connection was made", "no TCP connection between them opens"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			e := newEnds(t)
			if c.fault != nil {
				e.drop(t, c.fault)
			}
			p := Path{Client: "a", Server: "b", To: netip.MustParseAddr("192.0.2.2"), Datagrams: true, VXLAN: []VXLANPort{{Port: 8472}}, Sent: Sent{Device: "eth0"}}
			if err := p.ProbeOffload(t.Context(), netip.MustParseAddr("192.0.2.1"), e, e.open); err != nil || p.Unprobed != "" {
				t.Fatal(err, p.Unprobed)
			}
			for _, try := range p.Tries {
				t.Logf("%s: %s, %q", try.Offload, try.Took, try.Why)
			}
			if why := p.Tries[0].Why; why != c.why {
				t.Errorf("the first transfer: %q, want %q", why, c.why)
			}
			faults := offloadFault(p)
			if found := strings.Join(summary(faults), "\n"); found != c.want {
				t.Errorf("found %q, want %q", found, c.want)
			}
			for _, f := range faults {
				if !strings.Contains(f.Cost, c.costs) {
					t.Errorf("it costs %q, want %q in it", f.Cost, c.costs)
				}
			}
		})
	}
}
