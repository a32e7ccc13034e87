//go:build linux

package hosts_test

import (
	"encoding/json"
	"errors"
	"net"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"slipstream.dev/internal/netns"
)

// diagnose runs doctor on hosts, and returns its exit code and a line for each finding that is of the hosts'
// network namespaces or between them: what the machine under them does is another matter.
func (w *world) diagnose(t *testing.T, args ...string) (code int, found []string) {
	t.Helper()
	p := w.start(t, append([]string{"doctor", "--for", "100ms", "--format", "json"}, args...)...)
	text, err := p.end()
	if exit := new(exec.ExitError); errors.As(err, &exit) {
		code = exit.ExitCode()
	}
	var d struct {
		Facts    []struct{ Where, From, Value string }
		Findings []struct{ Where, Rule, Severity, What string }
	}
	if err := json.Unmarshal([]byte(text), &d); err != nil {
		t.Fatalf("exit code %d: %v\n%s", code, err, text)
	}
	for _, f := range d.Findings {
		if !slices.Contains([]string{"backlog-full", "flow-limit", "squeezed", "throttled"}, f.Rule) {
			found = append(found, f.Severity+" "+f.Rule+" "+f.Where+": "+f.What)
		}
	}
	return code, found
}

// TestDoctor: nothing is found on two healthy hosts and between them, and each fault is, alone, by its name.
// Nothing is left.
func TestDoctor(t *testing.T) {
	w, nodes := newWorld(t, nodeOptions{}, nodeOptions{})
	both := "hosts:root@10.9.0.1,root@10.9.0.2"
	b := nodes[1]
	if _, found := w.diagnose(t, both); len(found) > 0 {
		t.Fatalf("without a fault: %q", found)
	}
	// The port of a VXLAN device is looked at too: by a raw socket.
	b.in("ip", "link", "add", "vx", "type", "vxlan", "id", "7", "dev", "eth0", "local", "10.9.0.2", "dstport", "8472")
	if _, found := w.diagnose(t, both); len(found) > 0 {
		t.Fatalf("with a VXLAN device: %q", found)
	}
	for _, c := range []struct {
		name, inject, mend string
		want               []string
	}{
		{
			"the port of an overlay", "iptables -A INPUT -p udp --dport 8472 -j DROP", "iptables -F",
			[]string{"serious vxlan-blocked 10.9.0.1 to 10.9.0.2: UDP port 8472"},
		},
		{
			"the other port", "iptables -A INPUT -p udp --dport 4789 -j DROP", "iptables -F",
			[]string{"note vxlan-blocked 10.9.0.1 to 10.9.0.2: UDP port 4789"},
		},
		{
			"TCP", "iptables -A INPUT -p tcp --dport 30000: --syn -j REJECT", "iptables -F",
			[]string{"serious port-blocked 10.9.0.1 to 10.9.0.2: No traffic gets through to 10.9.0.2 by tcp"},
		},
		{
			"datagrams", "iptables -A INPUT -p udp -j DROP", "iptables -F",
			[]string{"serious port-blocked 10.9.0.1 to 10.9.0.2: No traffic gets through to 10.9.0.2 by udp", "serious port-blocked 10.9.0.2 to 10.9.0.1: No traffic gets through to 10.9.0.1 by udp"},
		},
		{
			"the way's MTU", "ip link set eth0 mtu 1400", "ip link set eth0 mtu 1500", // of 10.9.0.1's other end
			[]string{"serious path-mtu 10.9.0.1 to 10.9.0.2: Packets of more than 14"},
		},
	} {
		b.in("sh", "-ec", c.inject)
		code, found := w.diagnose(t, both)
		if len(found) != len(c.want) || code != 3 && strings.HasPrefix(c.want[0], "serious") {
			t.Errorf("%s: exit code %d, found %q, want %q", c.name, code, found, c.want)
		}
		for i := range min(len(found), len(c.want)) {
			if !strings.HasPrefix(found[i], c.want[i]) {
				t.Errorf("%s: found %q, want %q", c.name, found[i], c.want[i])
			}
		}
		b.in("sh", "-ec", c.mend)
	}
	// A host that cannot be looked at leaves the other to be.
	b.stop()
	code, found := w.diagnose(t, both)
	if code != 3 || len(found) != 1 || !strings.HasPrefix(found[0], "serious host-unfit 10.9.0.2: ") {
		t.Errorf("a host that is down: exit code %d, found %q", code, found)
	}
	clean(t, nodes[:1])
}

// faulty has a node's device drop what a program of these instructions says of UDP packets: with the context in
// R6, they go to "drop".
func (n *node) faulty(t *testing.T, drops asm.Instructions) (mend func()) {
	t.Helper()
	var attached link.Link
	must(t, netns.Do(n.ns, func() error {
		device, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		const protocol, udp = 14 + 9, 17 // of the IPv4 header
		code := slices.Concat(asm.Instructions{
			asm.Mov.Reg(asm.R6, asm.R1),
			asm.LoadAbs(protocol, asm.Byte),
			asm.JNE.Imm(asm.R0, udp, "pass"),
		}, drops, asm.Instructions{
			asm.Mov.Imm(asm.R0, 0).WithSymbol("pass"), // TCX_PASS
			asm.Return(),
			asm.Mov.Imm(asm.R0, 2).WithSymbol("drop"), // TCX_DROP
			asm.Return(),
		})
		program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: code})
		if err != nil {
			return err
		}
		defer program.Close()
		attached, err = link.AttachTCX(link.TCXOptions{Interface: device.Index, Program: program, Attach: ebpf.AttachTCXEgress})
		return err
	}))
	return func() { must(t, attached.Close()) }
}

// TestDoctorProbesOffloads: a NIC that segments wrongly what is encapsulated, and one that leaves its checksums out,
// are told from each other and from a healthy one, by what arrives.
func TestDoctorProbesOffloads(t *testing.T) {
	w, nodes := newWorld(t, nodeOptions{}, nodeOptions{})
	both := "hosts:root@10.9.0.1,root@10.9.0.2"
	if _, found := w.diagnose(t, both, "--probe"); len(found) > 0 {
		t.Fatalf("without a fault: %q", found)
	}
	// The inner packet begins after Ethernet, IPv4, UDP, VXLAN and Ethernet.
	const gsoSize, inner = 176, 14 + 20 + 8 + 8 + 14
	const addresses = 0xc612 + 1 + 0xc612 + 2 // 198.18.0.1 and .2, in words of 16 bits
	for name, drops := range map[string]asm.Instructions{
		"Segmentation": {
			asm.LoadMem(asm.R0, asm.R6, gsoSize, asm.Word),
			asm.JNE.Imm(asm.R0, 0, "drop"),
		},
		// Where the checksum is left to the device, its field has the sum of the pseudo-header.
		"The checksum": {
			asm.LoadAbs(inner+2, asm.Half), // the total length
			asm.Mov.Reg(asm.R7, asm.R0),
			asm.Add.Imm(asm.R7, addresses+6-20),
			asm.Mov.Reg(asm.R8, asm.R7), asm.RSh.Imm(asm.R8, 16), asm.And.Imm(asm.R7, 0xffff), asm.Add.Reg(asm.R7, asm.R8),
			asm.Mov.Reg(asm.R8, asm.R7), asm.RSh.Imm(asm.R8, 16), asm.And.Imm(asm.R7, 0xffff), asm.Add.Reg(asm.R7, asm.R8),
			asm.LoadAbs(inner+20+16, asm.Half),
			asm.JEq.Reg(asm.R0, asm.R7, "drop"),
		},
	} {
		mend := nodes[0].faulty(t, drops)
		want := "serious offload-fault 10.9.0.1 to 10.9.0.2: " + name + " of packets that 10.9.0.1 sends by VXLAN is wrong if it is offloaded to eth0"
		code, found := w.diagnose(t, both, "--probe")
		if code != 3 || len(found) != 1 || !strings.HasPrefix(found[0], want) {
			t.Errorf("exit code %d, found %q, want %q", code, found, want)
		}
		mend()
	}
	clean(t, nodes)
}
