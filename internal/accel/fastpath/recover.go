//go:build linux

package fastpath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/accel/fastpath/datapath"
)

// A killed agent leaves the conntrack entries of accelerated connections liberal, and nobody knows the
// sequence numbers that would make conntrack check the window again. A connection in use becomes known by its
// packets. An idle one does not, and a forged RST would end its entry. But its pod knows the numbers:
// TCP answers a segment outside the window with an acknowledgement (RFC 9293, section 3.10.7.4), as it
// answers a keepalive. So the next agent sends each such pod a segment, straight to its link; encap
// takes the numbers from the answer, and drops it. Conntrack and the peer see neither.

// recoverTries bounds how many keepalives a pod gets, one at each renewal of the lease.
const recoverTries = 8

// recovery is a connection that is being recovered.
type recovery struct {
	// link is the pod's link, and ethernet the header of frames to the pod.
	link     int
	ethernet []byte
	tries    int
}

// liberalEntries returns the connections of pods on this node whose entries an agent has left liberal. links
// are the links of the pods' addresses.
func liberalEntries(links map[netip.Addr]int) (all []datapath.Recovery, err error) {
	now, err := monotonic()
	if err != nil {
		return nil, err
	}
	var timeouts []uint32
	for _, state := range []string{"close", "unacknowledged", "established"} {
		timeout, err := timeoutOf(state, 0)
		if err != nil {
			return nil, err
		}
		timeouts = append(timeouts, timeout)
	}
	slices.Sort(timeouts)
	r := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|ctGet, unix.NLM_F_DUMP)
	r.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC, Version: nl.NFNETLINK_V0})
	err = r.ExecuteIter(unix.NETLINK_NETFILTER, 0, func(b []byte) bool {
		if t, err := parseCTEntry(b); err == nil && t.leftLiberal() {
			if is, ok := t.recovery(links); ok {
				is.Last = now - t.idle(timeouts)
				all = append(all, is)
			}
		}
		return true
	})
	if err != nil {
		return nil, fmt.Errorf("list conntrack entries: %w", err)
	}
	return all, nil
}

// idle returns for how long conntrack has seen no packet of a connection: its timeout has begun with the
// shortest of timeouts, in ascending order, that is not less. A RST that conntrack accepts leaves an entry the
// timeout of CLOSE, and its state unless the sequence number is exactly the next.
func (t *ctEntry) idle(timeouts []uint32) time.Duration {
	for _, begun := range timeouts {
		if t.timeout <= begun {
			return time.Duration(begun-t.timeout) * time.Second
		}
	}
	return 0
}

// leftLiberal reports whether an agent has left an entry liberal, and its connection may be open. Conntrack
// itself makes those liberal that it has picked up in mid-stream, without window scales, and those in a flow
// table of the kernel.
func (t *ctEntry) leftLiberal() bool {
	const flags, offloaded = tcpScaled | tcpLiberal, 1<<14 | 1<<15 // IPS_OFFLOAD, IPS_HW_OFFLOAD
	return t.flags[0]&t.flags[1]&flags == flags && t.status&offloaded == 0 && (t.state == tcpEstablished || t.state == tcpClose)
}

// recovery returns the connection of an entry if one of its ends is a pod whose address is not translated.
func (t *ctEntry) recovery(links map[netip.Addr]int) (r datapath.Recovery, ok bool) {
	r.Protocol = unix.IPPROTO_TCP
	if r.Link = links[t.original.from.Addr()]; r.Link != 0 {
		r.Pod, r.Peer, r.WirePeer = t.original.from, t.original.to, t.reply.from
		r.PodScale, r.PeerScale = t.scale[0], t.scale[1]
		return r, t.reply.to == r.Pod
	}
	if r.Link = links[t.reply.from.Addr()]; r.Link != 0 {
		r.Pod, r.Peer, r.WirePeer = t.reply.from, t.reply.to, t.original.from
		r.PodScale, r.PeerScale = t.scale[1], t.scale[0]
		return r, t.original.to == r.Pod
	}
	return r, false
}

// findLiberal adds flows for the connections that a killed agent has left liberal. The caller has scanned
// the devices.
func (f *Fastpath) findLiberal() error {
	if f.resyncs.try() != nil {
		return nil // entries stay liberal on this kernel
	}
	all, err := liberalEntries(f.node.behind)
	if err != nil || len(all) == 0 {
		return err
	}
	neighbours, err := listNeighbours(f.links)
	if err != nil {
		return err
	}
	macs := make(map[netip.Addr]net.HardwareAddr)
	for _, n := range neighbours {
		if address, ok := netip.AddrFromSlice(n.IP); ok && len(n.HardwareAddr) == len(mac{}) {
			macs[address.Unmap()] = n.HardwareAddr
		}
	}
	for _, r := range all {
		if err := f.programs.Recover(r); err != nil {
			return err
		}
		f.attach(r.Link)
		f.recovering[r.Flow] = &recovery{link: r.Link, ethernet: ethernet(macs[r.Pod.Addr()], r.Pod.Addr())}
	}
	f.log.Info("an agent has left conntrack entries liberal; they are recovered", "connections", len(all))
	return nil
}

// recoverLiberal sends keepalives to the pods of connections that are being recovered, and makes conntrack
// check the windows of those whose pods have answered.
func (f *Fastpath) recoverLiberal() error {
	if len(f.recovering) == 0 {
		return nil
	}
	// One socket for all: to close one takes milliseconds, as the kernel waits for its readers (packet_release).
	socket, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(socket)
	var errs []error
	for flow, r := range f.recovering {
		// There may be thousands, and the lease must not expire meanwhile.
		if err := f.renewLease(); err != nil {
			return err
		}
		done, err := f.recoverOne(socket, flow, r)
		if r.tries++; done || r.tries >= recoverTries {
			delete(f.recovering, flow)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s to %s: %w", flow.Pod, flow.Peer, err))
		}
	}
	return errors.Join(errs...)
}

// recoverOne does the next step for a connection, and returns whether it was the last. Keepalives go through an
// AF_PACKET socket.
func (f *Fastpath) recoverOne(socket int, flow datapath.Flow, r *recovery) (done bool, err error) {
	answered, known, err := f.programs.Recovered(flow)
	switch {
	case err != nil:
		return false, err
	case !known:
		return true, nil
	case !answered:
		return false, f.keepalive(socket, flow, r)
	}
	return f.forgetIdle(flow, false)
}

// keepalive sends a pod a segment of a connection that its peer did not send, once encap is attached to
// the pod's link. The segment is outside the window, unless the random number hits it; then TCP takes it for an
// old acknowledgement.
func (f *Fastpath) keepalive(socket int, flow datapath.Flow, r *recovery) error {
	f.mu.Lock()
	attached := f.attached[attachment{r.link, "encap"}] != nil
	f.mu.Unlock()
	if !attached {
		return nil
	}
	s := segment{flow.Peer, flow.Pod, rand.Uint32(), rand.Uint32(), ackFlag, 0xffff, nil}
	err := unix.Sendto(socket, slices.Concat(r.ethernet, s.bytes()), 0, &unix.SockaddrLinklayer{Ifindex: r.link})
	return os.NewSyscallError("sendto", err)
}

// ethernet returns the Ethernet header of packets to an address. No pod reads the source.
func ethernet(to net.HardwareAddr, address netip.Addr) []byte {
	protocol := uint16(unix.ETH_P_IP)
	if address.Is6() {
		protocol = unix.ETH_P_IPV6
	}
	return binary.BigEndian.AppendUint16(slices.Concat(to, []byte{2, 0, 0, 0, 0, 1}), protocol)
}
