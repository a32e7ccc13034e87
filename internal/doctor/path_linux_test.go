package doctor

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

// way is a fake network between two machines.
type way struct {
	device, carries, told int
	route                 int      // the MTU of the route, if it has one
	closed                []uint16 // UDP ports
	taken                 []uint16
	loses                 int // how many datagrams of the largest size to lose first
	arrived               map[uint16][]int
}

func (w *way) SendDatagrams(_ context.Context, to netip.AddrPort, _ []byte, _ int, sizes []int) (Sent, error) {
	w.arrived[to.Port()] = nil
	for _, size := range sizes {
		if size == w.device && w.loses > 0 {
			w.loses--
			continue
		}
		if size <= min(w.device, w.carries) {
			w.arrived[to.Port()] = append(w.arrived[to.Port()], size)
		}
	}
	return Sent{Device: "eth0", DeviceMTU: w.device, ToldMTU: w.told, RouteMTU: w.route}, nil
}

type arrivals struct {
	*way
	port uint16
}

func (w *way) open(_ context.Context, at netip.AddrPort, _ []byte) (Receiver, error) {
	if slices.Contains(w.taken, at.Port()) {
		return nil, errors.New("the port is taken")
	}
	return arrivals{w, max(at.Port(), 1)}, nil
}

func (c arrivals) Port() uint16 { return c.port }
func (c arrivals) Close()       {}
func (c arrivals) Receive(int) (Received, error) {
	if slices.Contains(c.closed, c.port) || slices.Contains(c.closed, 0) {
		return Received{}, nil
	}
	return Received{Complete: true, Sizes: c.arrived[c.port]}, nil
}

// TestExplore checks the findings for several kinds of networks.
func TestExplore(t *testing.T) {
	overlay, moved := Facts{Devices: []Device{{VXLANPort: 8472}}}, Facts{Devices: []Device{{VXLANPort: 8473}}}
	for _, c := range []struct {
		name   string
		way    way
		server Facts
		want   []string
	}{
		{"healthy", way{device: 1500, carries: 1500, told: 1500}, overlay, nil},
		{"jumbo frames", way{device: 9001, carries: 9001, told: 9001}, overlay, nil},
		{"larger than a datagram", way{device: 65536, carries: 65536, told: 65536}, overlay, nil},
		{"two losses", way{device: 1500, carries: 1500, told: 1500, loses: 2}, overlay, nil},
		{"black hole", way{device: 1500, carries: 1400, told: 1500}, overlay, []string{"serious path-mtu: Packets of more than 1400 bytes vanish, and eth0 sends up to 1500."}},
		{"black hole by 1", way{device: 9000, carries: 8999, told: 9000}, overlay, []string{"serious path-mtu: Packets of more than 8999 bytes vanish"}},
		{"the least", way{device: 1500, carries: 576, told: 1500}, overlay, []string{"serious path-mtu: Packets of more than 576 bytes vanish"}},
		{"told by ICMP", way{device: 9001, carries: 1500, told: 1500}, overlay, []string{"warning path-mtu: The path carries packets of up to 1500 bytes, and eth0 sends up to 9001."}},
		{"a route with the MTU of the path", way{device: 9001, carries: 1500, told: 1500, route: 1500}, overlay, nil},
		{"a route with a larger MTU", way{device: 9001, carries: 1400, told: 1500, route: 1500}, overlay, []string{"serious path-mtu: Packets of more than 1400 bytes vanish, and eth0 sends up to 1500."}},
		{"overlay blocked", way{device: 1500, carries: 1500, told: 1500, closed: []uint16{8472}}, overlay, []string{"serious vxlan-blocked: UDP port 8472"}},
		{"another port blocked", way{device: 1500, carries: 1500, told: 1500, closed: []uint16{4789}}, overlay, []string{"note vxlan-blocked: UDP port 4789"}},
		{"a port of neither product", way{device: 1500, carries: 1500, told: 1500}, moved, nil},
		{"a port of neither product blocked", way{device: 1500, carries: 1500, told: 1500, closed: []uint16{8473}}, moved, []string{"serious vxlan-blocked: UDP port 8473"}},
		{"the usual port blocked, and not used", way{device: 1500, carries: 1500, told: 1500, closed: []uint16{8472}}, moved, []string{"note vxlan-blocked: UDP port 8472"}},
		{"port taken", way{device: 1500, carries: 1500, told: 1500, taken: []uint16{4789, 8472}}, overlay, nil},
		{"all UDP blocked", way{device: 1500, carries: 1500, told: 1500, closed: []uint16{0}}, overlay, []string{"serious port-blocked: No datagram arrives at 192.0.2.2"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.way.arrived = make(map[uint16][]int)
			p := Path{Client: "a", Server: "b", To: netip.MustParseAddr("192.0.2.2")}
			if err := p.Explore(t.Context(), &c.way, c.way.open, c.server, VXLANPortsOf(c.server)); err != nil {
				t.Fatal(err)
			}
			found := ExaminePath(p)
			lines := summary(found)
			if len(lines) != len(c.want) {
				t.Fatalf("found %q, want %q", lines, c.want)
			}
			for i, f := range found {
				if !strings.HasPrefix(lines[i], c.want[i]) || f.Where != "a to b" || len(f.Evidence) == 0 || f.Cost == "" || f.Do == "" {
					t.Errorf("found %+v, want %q", f, c.want[i])
				}
				if f.Rule == "path-mtu" && !strings.HasPrefix(f.Do, fmt.Sprintf("ip route replace 192.0.2.2 dev eth0 mtu %d   # on a, ", p.MTU)) {
					t.Errorf("do %q", f.Do)
				}
			}
		})
	}
}

// TestPathToAPod checks that packets which are larger than the pod's MTU need not arrive there, whatever the node can send, and that
// no remedy changes the node's NIC.
func TestPathToAPod(t *testing.T) {
	for _, c := range []struct {
		name                     string
		device, told, mtu, toPod int
		want                     string
	}{
		// Calico (VXLANCrossSubnet) and Antrea (hybrid) leave out the overlay between nodes of one subnet.
		{"a node without the overlay", 1500, 1450, 1450, 1450, ""},
		{"the same without ICMP", 1500, 1500, 1450, 1450, ""},
		{"a pod", 1450, 1450, 1450, 1450, ""},
		{"less than pods send", 1450, 1400, 1400, 1450, "warning path-mtu: The path carries packets of up to 1400 bytes, and eth0 sends up to 1450."},
		{"less than pods send, without ICMP", 1500, 1500, 1400, 1450, "serious path-mtu: Packets of more than 1400 bytes vanish, and eth0 sends up to 1500."},
	} {
		p := Path{Client: "a", Server: "pod b", Datagrams: true, MTU: c.mtu, PodMTU: c.toPod, Sent: Sent{Device: "eth0", DeviceMTU: c.device, ToldMTU: c.told}}
		found := ExaminePath(p)
		if got := strings.Join(summary(found), "\n"); got != c.want {
			t.Errorf("%s: found %q, want %q", c.name, got, c.want)
		}
		for _, f := range found {
			if !strings.HasPrefix(f.Do, "Set MTU 1400 in the configuration of the CNI") {
				t.Errorf("%s: %s", c.name, f.Do)
			}
		}
	}
}

// FuzzDatagram checks that only payloads with the key are taken for datagrams.
func FuzzDatagram(f *testing.F) {
	to, key := netip.MustParseAddr("192.0.2.2"), make([]byte, keySize)
	f.Add(datagram(to, key, 3, 1500), 3, 1500)
	f.Add(datagram(to, key, 4, lastSize)[:40], 4, 0)
	f.Add([]byte{}, 0, 0)
	f.Fuzz(func(t *testing.T, b []byte, round, size int) {
		_, _, _ = parseDatagram(b, key)
		round, size = int(uint32(round)), int(uint32(size)%largest)
		d := datagram(to, key, round, size)
		if r, s, ok := parseDatagram(d, key); !ok || r != round || s != size || len(d)+headers(to) != max(size, len(datagramHeader)+keySize+tailSize+headers(to)) {
			t.Errorf("round %d of %d bytes is read as %d, %d, %v", round, size, r, s, ok)
		}
		if _, _, ok := parseDatagram(d, []byte("another key of 16")[:keySize]); ok {
			t.Error("another key is taken")
		}
	})
}

// tunnelStub is a fake network that fails while at least failsUpTo is offloaded.
type tunnelStub struct {
	failsUpTo Offload
	once      bool // a repeated transfer succeeds
	did       []Offload
}

func (c *tunnelStub) SendThroughTunnel(_ context.Context, _ Tunnel, o Offload) (Transfer, error) {
	again := slices.Contains(c.did, o)
	c.did = append(c.did, o)
	if o <= c.failsUpTo && (!again || !c.once) {
		return Transfer{Why: "the transfer stalled"}, nil
	}
	return Transfer{}, nil
}

// TestOffloadFault checks that a fault is found only if a transfer fails twice and succeeds with less offloaded.
func TestOffloadFault(t *testing.T) {
	for name, c := range map[string]struct {
		stub    tunnelStub
		blocked bool
		want    string
		tries   int
	}{
		"healthy":       {tunnelStub{failsUpTo: -1}, false, "", 1},
		"segmentation":  {tunnelStub{failsUpTo: OffloadAll}, false, "serious : Segmentation of VXLAN packets that a sends", 3},
		"checksum":      {tunnelStub{failsUpTo: OffloadChecksum}, false, "serious : The checksum of VXLAN packets that a sends", 4},
		"a loss":        {tunnelStub{failsUpTo: OffloadAll, once: true}, false, "", 3},
		"another fault": {tunnelStub{failsUpTo: OffloadNothing}, false, "", 3},
		"blocked":       {tunnelStub{failsUpTo: OffloadNothing}, true, "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			p := Path{Client: "a", Server: "b", To: netip.MustParseAddr("192.0.2.2"), Datagrams: true, VXLAN: []VXLANPort{{Port: 4789, Blocked: true}, {Port: 8472, Blocked: c.blocked}}}
			held := 0
			hold := func(_ context.Context, t Tunnel) (func(), error) {
				if t.Port != 8472 || !t.Server {
					return nil, errors.New("not that tunnel")
				}
				held++
				return func() { held-- }, nil
			}
			if err := p.ProbeOffload(t.Context(), netip.MustParseAddr("192.0.2.1"), &c.stub, hold); err != nil || held != 0 {
				t.Fatalf("%v, %d tunnels held", err, held)
			}
			found := strings.Join(summary(offloadFault(p)), "\n")
			if !strings.HasPrefix(found, c.want) || (found == "") != (c.want == "") || len(p.Tries) != c.tries {
				t.Errorf("%d tries, found %q, want %q", len(p.Tries), found, c.want)
			}
		})
	}
}
