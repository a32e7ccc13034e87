//go:build linux

package fastpath_test

import (
	"errors"
	"io"
	"net"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/fastpath/conntrack"
	"slipstream.dev/internal/spec"
)

// disturbance makes one end of an accelerated connection send packets that the programs leave to the kernel, or that take a
// path without programs.
type disturbance struct {
	name string
	// ofPod means that it disturbs all connections of the pod.
	ofPod bool
	// prepare is called before the connection is opened, disturb while it is accelerated. pod is the network namespace of the
	// end.
	prepare func(w *world, pod string)
	disturb func(w *world, pod string, end net.Conn)
}

var disturbances = []disturbance{
	{name: "padded frames", ofPod: true, disturb: func(w *world, pod string, _ net.Conn) { w.pad(pod) }},
	{name: "IP options", disturb: func(w *world, _ string, end net.Conn) {
		w.control(end, func(fd int) error {
			return unix.SetsockoptString(fd, unix.IPPROTO_IP, unix.IP_OPTIONS, "\x01\x01\x01\x01")
		})
	}},
	{name: "IP options for a while", disturb: func(w *world, _ string, end net.Conn) {
		w.control(end, func(fd int) error {
			return unix.SetsockoptString(fd, unix.IPPROTO_IP, unix.IP_OPTIONS, "\x01\x01\x01\x01")
		})
		time.AfterFunc(50*time.Millisecond, func() {
			w.control(end, func(fd int) error { return unix.SetsockoptString(fd, unix.IPPROTO_IP, unix.IP_OPTIONS, "") })
		})
	}},
	{name: "TTL of 1", disturb: func(w *world, _ string, end net.Conn) {
		w.control(end, func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TTL, 1) })
		time.AfterFunc(50*time.Millisecond, func() {
			w.control(end, func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TTL, 64) })
		})
	}},
	{name: "BIG TCP", ofPod: true, prepare: func(w *world, pod string) {
		w.in(pod, func() error {
			const most = 3 << 16
			l, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			return errors.Join(netlink.LinkSetGSOMaxSize(l, most), netlink.LinkSetGSOIPv4MaxSize(l, most))
		})
	}},
	{name: "another path", ofPod: true, disturb: func(w *world, pod string, end net.Conn) { w.sendNatively(pod, end) }},
}

// pad makes a pod pad short frames, as some NICs of virtual machines do.
func (w *world) pad(pod string) {
	w.Helper()
	const least = 200
	pad := program(w.T, ebpf.SchedCLS,
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadMem(asm.R2, asm.R6, 0, asm.Word), // struct __sk_buff, len
		asm.JGE.Imm(asm.R2, least, "out"),
		asm.Mov.Imm(asm.R2, least),
		asm.Mov.Imm(asm.R3, 0),
		asm.FnSkbChangeTail.Call(),
		asm.Mov.Imm(asm.R0, -1).WithSymbol("out"),
	)
	w.in(pod, func() error {
		l, err := link.AttachTCX(link.TCXOptions{Interface: eth0(), Program: pad, Attach: ebpf.AttachTCXEgress})
		if err == nil {
			w.Cleanup(func() { l.Close() })
		}
		return err
	})
}

// control calls a function with the file descriptor of a TCP connection.
func (w *world) control(c net.Conn, do func(fd int) error) {
	w.Helper()
	raw, err := c.(syscall.Conn).SyscallConn()
	if err == nil {
		err = errors.Join(raw.Control(func(fd uintptr) { err = do(int(fd)) }), err)
	}
	if err != nil {
		w.Error(err)
	}
}

// sendNatively makes the node of a pod send packets to the peer of a connection over the host network.
func (w *world) sendNatively(pod string, end net.Conn) {
	w.Helper()
	own, other := pod[:2], map[string]string{"n0": "n1", "n1": "n0"}[pod[:2]]
	var gateway net.IP
	w.in(other, func() error {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		addresses, err := netlink.AddrList(l, unix.AF_INET)
		if err == nil {
			gateway = addresses[0].IP
		}
		return err
	})
	w.in(own, func() error {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		peer := end.RemoteAddr().(*net.TCPAddr).IP
		return netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: &net.IPNet{IP: peer, Mask: net.CIDRMask(32, 32)}, Gw: gateway})
	})
}

// TestDisturbedConnections checks accelerated connections with packets that the programs leave to the kernel or do not see, on
// nodes that drop packets that conntrack calls invalid. The connections must survive, and their conntrack entries, once idle,
// must be as before acceleration.
func TestDisturbedConnections(t *testing.T) {
	t.Parallel()
	worlds := make(map[string][]disturbed)
	for _, d := range disturbances {
		for _, place := range []string{"n0p0", "n1p0"} {
			one := disturbed{disturbance: d, place: place}
			name := "socket options"
			if d.ofPod {
				name = one.String()
			}
			worlds[name] = append(worlds[name], one)
		}
	}
	for name, tests := range worlds {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
			for _, node := range w.nodes() {
				w.dropInvalid(node)
			}
			for i := range tests {
				tests[i].open(w)
			}
			w.start()
			for _, d := range tests {
				w.sub(d.String(), func() { d.check(w) })
			}
		})
	}
}

// disturbed is a connection of which one end is disturbed.
type disturbed struct {
	disturbance
	place string // of that end
	e     echo
	// before has its conntrack entries without the fast path, by node.
	before map[string]conntrack.Progress
}

func (d disturbed) String() string { return d.name + " from " + d.place }

func (d *disturbed) open(w *world) {
	w.Helper()
	if d.prepare != nil {
		d.prepare(w, d.place)
	}
	d.e = w.connect().back()
	d.e.noKeepalive(w.T)
	d.before = w.settledEntries(d.e, w.nodes())
}

func (d disturbed) check(w *world) {
	w.accelerate(d.e)
	end := net.Conn(d.e.Conn)
	if d.place == "n1p0" {
		end = d.e.far
	}
	if d.disturb != nil {
		d.disturb(w, d.place, end)
	}
	for range 4 {
		w.transfer(d.e, 16<<20)
		w.trip(d.e, 100)
	}
	defer func() {
		if w.Failed() {
			w.Logf("before %+v; n0 %+v n1 %+v", d.before, w.conntrack("n0", d.e), w.conntrack("n1", d.e))
			w.Log(w.paths[0].Describe())
			w.Log(w.paths[1].Describe())
		}
	}()
	w.eventually("the idle connection's entries are as before", nil, func() bool {
		return !slices.ContainsFunc(w.nodes(), func(node string) bool {
			is := w.conntrack(node, d.e)
			return is.State != d.before[node].State || is.Flags != d.before[node].Flags || is.Timeout < establishedTimeout-60
		})
	})
	// The server is the first to send, and to close.
	_ = d.e.SetDeadline(time.Now().Add(patience))
	if _, err := d.e.far.Write([]byte("hello")); err != nil {
		w.Fatal(err)
	}
	if _, err := io.ReadFull(d.e, make([]byte, 5)); err != nil {
		w.Fatalf("after it was idle: %v", err)
	}
	w.trip(d.e, 1)
	_ = d.e.far.Close()
	if _, err := d.e.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		w.Errorf("after the server has closed the connection: %v", err)
	}
}

// settledEntries returns the conntrack entries of a connection without unacknowledged data, before it is accelerated.
func (w *world) settledEntries(e echo, nodes []string) map[string]conntrack.Progress {
	w.Helper()
	all := make(map[string]conntrack.Progress)
	w.trip(e, 100)
	w.eventually("no data is unacknowledged", nil, func() bool {
		for _, node := range nodes {
			all[node] = w.conntrack(node, e)
		}
		return !slices.ContainsFunc(nodes, func(node string) bool {
			return (all[node].Flags[0]|all[node].Flags[1])&flagUnacknowledged != 0
		})
	})
	return all
}
