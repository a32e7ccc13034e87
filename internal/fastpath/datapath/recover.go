//go:build linux

package datapath

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"
)

// Recovery is a TCP connection without a flow, whose conntrack entry an earlier agent has left liberal.
type Recovery struct {
	Flow
	// WirePeer is the peer on the wire. It differs from Peer if NAT translates it.
	WirePeer netip.AddrPort
	// Link is the index of the pod's link.
	Link int
	// PodScale and PeerScale are the window scales of the two sides.
	PodScale, PeerScale uint8
	// Last is the time of its last packet (CLOCK_MONOTONIC).
	Last time.Duration
	// Acknowledged is the acknowledgement number of the keepalive that the caller sends to the pod.
	Acknowledged uint32
}

// Recover adds a flow for a connection. The caller then sends the pod a keepalive. The programs take the sequence numbers from
// the pod's next packet, if it has no data, and drop it, because the peer must not see this answer. If there is a flow already,
// or no room for one, Recover returns false.
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

// Recovered returns whether the pod has answered, so that the flow has its sequence numbers. known is false if the connection
// has ended, or if it is in use: then the programs learn the numbers from its packets.
func (p *Programs) Recovered(flow Flow) (answered, known bool, err error) {
	v, known, err := p.lookUp(flow.key())
	return v.Recovering == 0, known && v.Out.Validated == 0 && v.In.Validated == 0, err
}
