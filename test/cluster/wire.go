//go:build linux

package cluster

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/ethtool"
	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/place/lab/programs"
)

// onThread runs f on a thread whose namespaces f may change. The thread ends
// with its goroutine, which is locked to it. The process's first thread never
// ends, and /proc/self shows its namespaces, so onThread does not use it.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			defer runtime.UnlockOSThread()
			done <- onThread(f) // retry on another thread while this one is locked
			return
		}
		done <- f()
	}()
	return <-done
}

// onNetns runs f in the network namespace at a path.
func onNetns(path string, f func() error) error { return netns.DoAt(path, f) }

const switchName = "br0"

// startWire creates the control plane's namespace, and in it the switch that
// connects the nodes. The API server listens at an address of the switch.
//
// The wire matches the lab's with offload full (internal/place/lab/wire.go says
// why), so that experiments find the same conditions in both: a NIC has a queue,
// which a full ring stops; it receives with NAPI, and sends packets with a new
// hash.
func (c *Cluster) startWire() error {
	var err error
	if c.control, err = c.first("control-plane", &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET}); err != nil {
		return err
	}
	return onNetns(netnsOf(c.control), func() error {
		attrs := named(switchName)
		// A bridge without its own address takes the address of a port, and changes it
		// when the port goes. So a node that dies would cut off the others.
		attrs.HardwareAddr = net.HardwareAddr{0x02, 0, 0, 0, 0, 1}
		if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err != nil {
			return fmt.Errorf("make the switch: %w", err)
		}
		return errors.Join(configure("lo", ""), configure(switchName, fmt.Sprintf("%s/%d", controlAddr, nodePrefix)))
	})
}

func named(name string) netlink.LinkAttrs {
	a := netlink.NewLinkAttrs()
	a.Name = name
	return a
}

// configure sets up a device of the thread's namespace. It adds an address
// unless that is empty.
func configure(name, addr string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find %s: %w", name, err)
	}
	if addr != "" {
		a, err := netlink.ParseAddr(addr)
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(link, a); err != nil {
			return fmt.Errorf("give %s address %s: %w", name, addr, err)
		}
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("set up %s: %w", name, err)
	}
	return nil
}

// connect connects the node to the switch.
func (n *Node) connect() error {
	if err := onNetns(netnsOf(n.c.control), func() error {
		bridge, err := netlink.LinkByName(switchName)
		if err != nil {
			return fmt.Errorf("find the switch: %w", err)
		}
		port := &netlink.Veth{LinkAttrs: named(n.name), PeerName: nicName, PeerNamespace: netlink.NsPid(n.network.Process.Pid)}
		port.MasterIndex = bridge.Attrs().Index
		port.NumTxQueues, port.NumRxQueues = 1, 1
		if err := netlink.LinkAdd(port); err != nil {
			return fmt.Errorf("make NIC: %w", err)
		}
		if err := queue(port.Index); err != nil {
			return err
		}
		return configure(n.name, "")
	}); err != nil {
		return err
	}
	return onNetns(n.Netns(), func() error {
		if err := actAsNIC(); err != nil {
			return err
		}
		if err := errors.Join(configure("lo", ""), configure(nicName, fmt.Sprintf("%s/%d", n.Addr(), nodePrefix))); err != nil {
			return err
		}
		if err := netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP(controlAddr)}); err != nil {
			return fmt.Errorf("add default route: %w", err)
		}
		return nil
	})
}

// nicName is the name of the node's device on the wire.
const nicName = "eth0"

// queue gives a device of the thread's namespace a queue, as a NIC has.
func queue(link int) error {
	if err := netlink.QdiscAdd(&netlink.GenericQdisc{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: link, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
		QdiscType:  "pfifo",
	}); err != nil {
		return fmt.Errorf("add queue: %w", err)
	}
	return nil
}

// actAsNIC makes the node's end of a veth behave like a NIC.
func actAsNIC() error {
	nic, err := netlink.LinkByName(nicName)
	if err != nil {
		return fmt.Errorf("find NIC: %w", err)
	}
	index := nic.Attrs().Index
	if err := queue(index); err != nil {
		return err
	}
	tool, err := ethtool.Open()
	if err != nil {
		return err
	}
	defer tool.Close()
	if err := tool.Change(nicName, map[string]bool{"rx-gro": true}); err != nil {
		return fmt.Errorf("have the NIC receive by NAPI: %w", err)
	}
	rehash, err := programs.LoadRehash()
	if err != nil {
		return err
	}
	defer rehash.Close()
	if err := netlink.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}}); err != nil {
		return fmt.Errorf("add clsact to the NIC: %w", err)
	}
	if err := netlink.FilterAdd(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: netlink.HANDLE_MIN_EGRESS, Handle: 1, Protocol: unix.ETH_P_ALL, Priority: 1},
		Fd:          rehash.FD(), Name: "rehash", DirectAction: true,
	}); err != nil {
		return fmt.Errorf("have the NIC compute hashes: %w", err)
	}
	return nil
}

// forwarder accepts connections in this process's network namespace, and
// forwards them to an address in another namespace.
type forwarder struct {
	net.Listener
	netns, to string
}

func newForwarder(control *exec.Cmd, to string) (*forwarder, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("listen for the API server: %w", err)
	}
	f := &forwarder{l, netnsOf(control), to}
	go f.serve()
	return f, nil
}

func (f *forwarder) serve() {
	for {
		in, err := f.Accept()
		if err != nil {
			return // closed
		}
		go f.carry(in)
	}
}

func (f *forwarder) carry(in net.Conn) {
	defer in.Close()
	var out net.Conn
	// A socket stays in the namespace in which it was created.
	if err := onNetns(f.netns, func() (err error) {
		out, err = net.DialTimeout("tcp", f.to, 5*time.Second)
		return err
	}); err != nil {
		return // the client sees its connection end, as if nobody listened
	}
	defer out.Close()
	var both sync.WaitGroup
	for _, way := range [2][2]net.Conn{{in, out}, {out, in}} {
		both.Go(func() {
			_, _ = io.Copy(way[1], way[0])
			_ = way[1].(*net.TCPConn).CloseWrite()
		})
	}
	both.Wait()
}
