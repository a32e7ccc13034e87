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
	// prepare is called before the connection is opened, disturb while it is accelerated. pod is the network namespace of the
	// end.
	prepare func(w *world, pod string)
	disturb func(w *world, pod string, end net.Conn)
}

var disturbances = []disturbance{
	{name: "padded frames", disturb: func(w *world, pod string, _ net.Conn) { w.pad(pod) }},
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
	{name: "BIG TCP", prepare: func(w *world, pod string) {
		w.in(pod, func() error {
			const most = 3 << 16
			l, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			return errors.Join(netlink.LinkSetGSOMaxSize(l, most), netlink.LinkSetGSOIPv4MaxSize(l, most))
		})
	}},
	{name: "another path", disturb: func(w *world, pod string, end net.Conn) { w.sendNatively(pod, end) }},
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
	for _, d := range disturbances {
		for _, place := range []string{"n0p0", "n1p0"} {
			t.Run(d.name+" from "+place, func(t *testing.T) {
				t.Parallel()
				w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
				nodes := []string{"n0", "n1"}
				for _, node := range nodes {
					w.dropInvalid(node)
				}
				if d.prepare != nil {
					d.prepare(w, place)
				}
				e := w.connect().back()
				e.noKeepalive(t)
				before := w.settledEntries(e, nodes)
				w.start()
				w.accelerate(e)
				end := net.Conn(e.Conn)
				if place == "n1p0" {
					end = e.far
				}
				if d.disturb != nil {
					d.disturb(w, place, end)
				}
				for range 4 {
					w.transfer(e, 16<<20)
					w.trip(e, 100)
				}
				defer func() {
					if t.Failed() {
						t.Logf("%+v, before %+v; n0 %+v n1 %+v", "", before, w.conntrack("n0", e), w.conntrack("n1", e))
						w.Log(w.paths[0].Describe())
						w.Log(w.paths[1].Describe())
					}
				}()
				w.eventually("the idle connection's entries are as before", nil, func() bool {
					return !slices.ContainsFunc(nodes, func(node string) bool {
						is := w.conntrack(node, e)
						return is.State != before[node].State || is.Flags != before[node].Flags || is.Timeout < establishedTimeout-60
					})
				})
				// The server is the first to send, and to close.
				_ = e.SetDeadline(time.Now().Add(patience))
				if _, err := e.far.Write([]byte("hello")); err != nil {
					t.Fatal(err)
				}
				if _, err := io.ReadFull(e, make([]byte, 5)); err != nil {
					t.Fatalf("after it was idle: %v", err)
				}
				w.trip(e, 1)
				_ = e.far.Close()
				if _, err := e.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
					t.Errorf("after the server has closed the connection: %v", err)
				}
			})
		}
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
