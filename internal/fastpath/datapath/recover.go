//go:build linux

package datapath

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"
)

// Recovery is a TCP connection without a flow whose conntrack entry another agent has left liberal.
type Recovery struct {
	Flow
	// WirePeer is the peer's address on the wire, which differs from Peer if NAT translates it.
	WirePeer netip.AddrPort
	// Link is the index of the pod's link.
	Link int
	// PodScale and PeerScale are the window scales that the two sides announce.
	PodScale, PeerScale uint8
	// Last is the time of its last packet (CLOCK_MONOTONIC).
	Last time.Duration
	// Acknowledged is the acknowledgement number of the keepalive that the caller sends to the pod.
	Acknowledged uint32
}

// Recover adds a flow for a connection. The flow takes its sequence numbers from the pod's next packet, if that has no data, and
// the programs drop that packet: the caller sends the pod a keepalive, and the peer must not see the answer. Recover adds nothing
// and returns false if there is a flow already, or no room for one.
func (p *Programs) Recover(r Recovery) (added bool, err error) {
	k := r.key()
	c := fastpathRecovery{
		Key: k, WirePeer: Flow{Pod: r.Pod, Peer: r.WirePeer, Protocol: r.Protocol}.key().wirePeer(),
		Device: uint32(r.Link), Scale: [2]uint32{uint32(r.PodScale), uint32(r.PeerScale)}, LastMs: uint32(r.Last / time.Millisecond),
		Acknowledged: r.Acknowledged,
	}
	if r.Pod.Addr().Is6() {
		c.Pod6, c.Peer6 = words(r.Pod.Addr()), words(r.Peer.Addr())
	}
	code, err := p.objects.RecoverFlow.Run(&ebpf.RunOptions{Context: &c})
	if err != nil {
		return false, fmt.Errorf("recover connection %v: %w", r.Flow, err)
	}
	return code == 0, nil
}

// Recovered returns whether the flow of a connection has the sequence numbers that Recover asked for. known is false if the
// connection has ended. If it is in use, the programs learn the numbers from its packets.
func (p *Programs) Recovered(flow Flow) (answered, known bool, err error) {
	v, known, err := p.lookUp(flow.key())
	return v.Recovering == 0, known && v.Out.Validated == 0 && v.In.Validated == 0, err
}
