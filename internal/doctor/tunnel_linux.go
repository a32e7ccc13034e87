package doctor

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"

	"slipstream.dev/internal/ethtool"
	"slipstream.dev/internal/netns"
)

// The tunnel's addresses come from a network for benchmarks (RFC 2544). Its namespaces use no other network.
var tunnelServer = netip.MustParseAddrPort("198.18.0.2:7465")

const (
	tunnelDevice = "vxlan0"
	tunnelClient = "198.18.0.1/30"
)

// open creates the network namespace of this end. The namespace, with all that is in it, ends when the handle is
// closed. The device is created inside, so that its name cannot collide with another one outside.
func (t Tunnel) open(o Offload) (ns netns.Handle, err error) {
	routes, err := netlink.RouteGet(t.Remote.AsSlice())
	if err != nil || len(routes) == 0 {
		return ns, fmt.Errorf("find the route to %s: %w", t.Remote, err)
	}
	if ns, err = netns.New(); err != nil {
		return ns, fmt.Errorf("make a network namespace: %w", err)
	}
	device := &netlink.Vxlan{
		LinkAttrs: netlink.LinkAttrs{Name: tunnelDevice, Namespace: netlink.NsFd(ns)},
		VxlanId:   t.VNI, VtepDevIndex: routes[0].LinkIndex, SrcAddr: t.Local.AsSlice(), Group: t.Remote.AsSlice(), Port: int(t.Port),
	}
	if err = netlink.LinkAdd(device); err != nil {
		err = fmt.Errorf("make a VXLAN device on UDP port %d: %w", t.Port, err)
	} else {
		err = netns.Do(ns, func() error { return t.configure(o) })
	}
	if err != nil {
		release(ns)
	}
	return ns, err
}

// release removes the device first, because the kernel takes a while to end a namespace, and until then no other
// device with the same VNI and port can be created. If that fails, the device ends with the namespace.
func release(ns netns.Handle) {
	_ = netns.Do(ns, func() error {
		link, err := netlink.LinkByName(tunnelDevice)
		if err != nil {
			return err
		}
		return netlink.LinkDel(link)
	})
	ns.Close()
}

// features are the VXLAN device's features to switch off for each Offload, by ethtool's names.
var features = map[Offload][]string{
	OffloadAll:      nil,
	OffloadChecksum: {"tx-tcp-segmentation", "tx-tcp-ecn-segmentation", "tx-tcp-mangleid-segmentation"},
	OffloadNothing:  {"tx-tcp-segmentation", "tx-tcp-ecn-segmentation", "tx-tcp-mangleid-segmentation", "tx-checksum-ip-generic"},
}

func (t Tunnel) configure(o Offload) error {
	link, err := netlink.LinkByName(tunnelDevice)
	if err != nil {
		return fmt.Errorf("find the device of the tunnel: %w", err)
	}
	prefix := tunnelClient
	if t.Server {
		prefix = tunnelServer.Addr().String() + "/30"
	}
	address, err := netlink.ParseAddr(prefix)
	if err != nil {
		return err
	}
	if err := netlink.AddrAdd(link, address); err != nil {
		return fmt.Errorf("address the device of the tunnel: %w", err)
	}
	if off := features[o]; len(off) > 0 {
		tool, err := ethtool.Open()
		if err != nil {
			return err
		}
		defer tool.Close()
		change := make(map[string]bool)
		for _, name := range off {
			change[name] = false
		}
		if err := tool.Change(tunnelDevice, change); err != nil {
			return err
		}
	}
	return netlink.LinkSetUp(link)
}

// OpenTunnel opens the server's end of a tunnel until ctx ends, and receives the data that SendThroughTunnel sends. It calls
// ready when it can receive.
func OpenTunnel(ctx context.Context, t Tunnel, ready func() error) error {
	ns, err := t.open(OffloadAll)
	if err != nil {
		return err
	}
	defer release(ns)
	var listener net.Listener
	err = netns.Do(ns, func() (err error) {
		listener, err = net.Listen("tcp", tunnelServer.String())
		return err
	})
	if err != nil {
		return fmt.Errorf("listen in the tunnel: %w", err)
	}
	defer context.AfterFunc(ctx, func() { listener.Close() })()
	if err := ready(); err != nil {
		return err
	}
	for {
		conn, err := listener.Accept()
		if err != nil {
			return nil // closed
		}
		go func() {
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(2 * transferTime))
			answer(conn, t.Key)
		}()
	}
}

// answer tells the sender how many bytes, from the first one on, arrived unchanged.
func answer(conn net.Conn, key []byte) {
	want := contents(key)
	got := make([]byte, len(want))
	n, _ := io.ReadFull(conn, got)
	same := 0
	for same < n && got[same] == want[same] {
		same++
	}
	_, _ = conn.Write(binary.BigEndian.AppendUint64(nil, uint64(same)))
}

// contents returns the data of a transfer: the key, and random bytes derived from it. They are random so that no
// two parts have the same checksum.
func contents(key []byte) []byte {
	var seed [32]byte
	copy(seed[:], key)
	b := make([]byte, transferBytes)
	_, _ = rand.NewChaCha8(seed).Read(b)
	copy(b, key)
	return b
}

// SendThroughTunnel sends through a tunnel whose other end another machine has opened.
func SendThroughTunnel(ctx context.Context, t Tunnel, o Offload) (c Transfer, err error) {
	ns, err := t.open(o)
	if err != nil {
		return c, err
	}
	defer release(ns)
	began := time.Now()
	ctx, cancel := context.WithDeadline(ctx, began.Add(transferTime))
	defer cancel()
	if err := transfer(ctx, ns, t.Key); err != nil {
		c.Why = err.Error()
	}
	c.Took = time.Since(began)
	return c, nil
}

func transfer(ctx context.Context, ns netns.Handle, key []byte) error {
	var conn net.Conn
	err := netns.Do(ns, func() (err error) {
		conn, err = (&net.Dialer{}).DialContext(ctx, "tcp", tunnelServer.String())
		return err
	})
	if err != nil {
		return errors.New("no connection was made")
	}
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	if err := conn.SetDeadline(deadline); err != nil {
		return err
	}
	var reply [8]byte
	if _, err := io.Copy(conn, bytes.NewReader(contents(key))); err != nil {
		return errors.New("the transfer stalled")
	}
	if _, err := io.ReadFull(conn, reply[:]); err != nil {
		return errors.New("the end of the transfer did not arrive")
	}
	if same := binary.BigEndian.Uint64(reply[:]); same < transferBytes {
		return fmt.Errorf("the data differs from byte %d on", same)
	}
	return nil
}
