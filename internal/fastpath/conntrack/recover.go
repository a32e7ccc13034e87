//go:build linux

package conntrack

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/fastpath/datapath"
)

// A killed agent leaves the conntrack entries of accelerated connections liberal, and the sequence numbers that a resync needs
// are lost. If a connection is in use, the programs of the next agent learn them from its packets. An idle connection sends
// none, and a forged RST could close its entry. But its pod knows the numbers: TCP answers a segment outside the window, such
// as a keepalive, with an acknowledgement (RFC 9293, section 3.10.7.4). So the next agent sends each such pod a keepalive,
// straight to its link; redirect_pod takes the numbers from the answer and drops it. Neither conntrack nor the peer sees these
// packets.

const (
	// recoverTries is the number of rounds in which the agent tries to recover a connection. Each lease renewal starts a round.
	recoverTries = 8
	// recoverRound limits the duration of a round, because the agent has other work to do.
	recoverRound = 200 * time.Millisecond
	// recoverMost limits the number of connections to recover, and that of those that could not be recovered: twice the size of
	// the flow table.
	recoverMost = 32768
	// searchAgain is the time until the next search for liberal entries if the last one was not complete.
	searchAgain = 30 * time.Second
	// locateMost limits the number of connections in a round for whose pods the agent looks: it asks for the two addresses of each,
	// and the fast path keeps 256.
	locateMost = 128
	// pruneMost limits the number of unrecovered connections that AnyLeft looks up: they take about 10 ms.
	pruneMost = 512
	// answerTime is how long the agent waits for a pod's answer, which normally comes before sendto returns. It is short
	// because the programs would take any other packet of the pod for the answer.
	answerTime = 5 * time.Millisecond
	// restTime is how long a connection must have been idle before it is recovered. If the peer had just sent data, the pod's
	// answer would acknowledge it, and the peer does not get that answer.
	restTime = time.Second
)

// recovery is a connection that is being recovered.
type recovery struct {
	datapath.Recovery
	tries int
	// entry is the conntrack entry while it is unknown which of its two ends is a pod of this node, and at which link.
	entry *Entry
	// resting means that the connection was idle when its flow was forgotten. Once it is used again, the programs learn the
	// numbers from its packets.
	resting bool
}

// liberalEntries calls add with each entry that an agent has left liberal, until add returns false.
func liberalEntries(add func(*Entry) bool) error {
	r := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|ctGet, unix.NLM_F_DUMP)
	r.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC, Version: nl.NFNETLINK_V0})
	err := r.ExecuteIter(unix.NETLINK_NETFILTER, 0, func(b []byte) bool {
		t, err := parseEntry(b)
		return err != nil || !t.leftLiberal() || add(t)
	})
	if err != nil {
		return fmt.Errorf("list conntrack entries: %w", err)
	}
	return nil
}

// timeouts are the timeouts, in seconds, that conntrack may give the entry of an open connection. That of CLOSE is among them:
// an RST that conntrack accepts sets it, but changes the state only if its sequence number is exactly the next one.
type timeouts struct{ established, retransmitted, unacknowledged, close uint32 }

func readTimeouts() (t timeouts, err error) {
	for state, to := range map[string]*uint32{
		"established": &t.established, "max_retrans": &t.retransmitted, "unacknowledged": &t.unacknowledged, "close": &t.close,
	} {
		if *to, err = timeoutOf(state, 0); err != nil {
			return t, err
		}
	}
	return t, nil
}

// idle returns for how long conntrack has seen no packet of a connection. It assumes that the timeout started at the smallest
// of timeouts that is not below the remaining one.
func (t *Entry) idle(timeouts timeouts) time.Duration {
	all := []uint32{timeouts.close, timeouts.unacknowledged, timeouts.retransmitted, timeouts.established}
	slices.Sort(all)
	for _, begun := range all {
		if t.Timeout <= begun {
			return time.Duration(begun-t.Timeout) * time.Second
		}
	}
	return 0
}

// leftLiberal reports whether an agent left an entry liberal and its connection may still be open: conntrack saw no FIN. It
// excludes entries that the kernel made liberal: those of connections picked up in mid-stream, which have no window scales, and
// those in a flowtable.
func (t *Entry) leftLiberal() bool {
	const flags = tcpWindowScale | tcpLiberal
	return t.ours() && t.Flags[0]&t.Flags[1]&flags == flags && (t.Flags[0]|t.Flags[1])&tcpCloseInit == 0 &&
		(t.State == tcpEstablished || t.State == tcpClose)
}

// recovery returns the connection of an entry as seen from a pod of this node whose address is not translated. If both ends are
// such pods, it is seen from the one that the programs would choose.
func (t *Entry) recovery(links map[netip.Addr]int) (r datapath.Recovery, ok bool) {
	client := datapath.Recovery{
		Flow:     datapath.Flow{Pod: t.original.from, Peer: t.original.to, Protocol: unix.IPPROTO_TCP},
		WirePeer: t.reply.from, Link: links[t.original.from.Addr()], PodScale: t.scale[0], PeerScale: t.scale[1],
	}
	server := datapath.Recovery{
		Flow:     datapath.Flow{Pod: t.reply.from, Peer: t.reply.to, Protocol: unix.IPPROTO_TCP},
		WirePeer: t.original.from, Link: links[t.reply.from.Addr()], PodScale: t.scale[1], PeerScale: t.scale[0],
	}
	if client.Link == 0 || server.Link != 0 && t.reply.to == client.Pod && !client.Flow.IsChosen(client.WirePeer) {
		return server, server.Link != 0 && t.original.to == server.Pod
	}
	return client, t.reply.to == client.Pod
}

// isMasqueraded reports whether both ends of a connection have translated addresses.
func (t *Entry) isMasqueraded() bool {
	return t.reply.to != t.original.from && t.original.to != t.reply.from
}

// FindLiberal finds the connections of this node's pods that a killed agent has left liberal. If it fails or finds too many, Recover
// calls it again.
func (e *Entries) FindLiberal() error {
	e.searchAt = time.Time{}
	if errors.Is(e.resyncs.try(), errCannotResync) {
		return nil // entries stay liberal on this kernel
	}
	links, found := e.fastpath.Links(), 0
	err := liberalEntries(func(t *Entry) bool {
		r, ok := t.recovery(links)
		if !ok && (links[t.original.from.Addr()] != 0 || t.isMasqueraded()) {
			return true // no agent accelerates it
		}
		next := &recovery{Recovery: r}
		if !ok {
			next.Flow, next.entry = datapath.Flow{Pod: t.original.from, Peer: t.original.to, Protocol: unix.IPPROTO_TCP}, t
		}
		if e.unrecovered[next.Flow] || e.recovering[next.Flow] != nil {
			return true
		}
		if !e.keep(next) {
			return false
		}
		found++
		return true
	})
	if err != nil {
		e.searchLater()
	}
	if found > 0 {
		e.fastpath.DropForged() // no event announces entries that are liberal already
		e.log.Info("conntrack entries are still liberal from an earlier agent; recovering them", "connections", found)
	}
	return err
}

// searchLater schedules a search for liberal entries, unless there will be one.
func (e *Entries) searchLater() {
	if e.searchAt.IsZero() {
		e.searchAt = time.Now().Add(searchAgain)
	}
}

// keep schedules the recovery of a connection. If there is no room for it, it schedules a search instead, and returns false.
func (e *Entries) keep(r *recovery) bool {
	if len(e.recovering) >= recoverMost {
		e.searchLater()
		return false
	}
	e.recovering[r.Flow] = r
	return true
}

// recoverLater schedules the recovery of a connection whose flow was forgotten without its sequence numbers, so that its entry
// is still liberal.
func (e *Entries) recoverLater(flow datapath.Flow) error {
	is, err := Find(flow)
	if err != nil || is == nil || !is.leftLiberal() {
		return err
	}
	if r, ok := is.recovery(e.fastpath.Links()); ok && r.Flow == flow {
		e.keep(&recovery{Recovery: r, resting: true})
	}
	return nil
}

// locate finds the pod of a connection of which it is unknown which end is a pod of this node. Until then it asks for both ends.
func (e *Entries) locate(r *recovery, links map[netip.Addr]int) {
	is, ok := r.entry.recovery(links)
	if !ok {
		e.fastpath.Locate(r.entry.original.from.Addr())
		e.fastpath.Locate(r.entry.reply.from.Addr())
		return
	}
	delete(e.recovering, r.Flow)
	r.Recovery, r.entry, r.tries = is, nil, 0
	e.recovering[r.Flow] = r
}

// Recover runs one round of recovery.
func (e *Entries) Recover() error {
	if !e.searchAt.IsZero() && time.Now().After(e.searchAt) {
		if err := e.FindLiberal(); err != nil {
			return err
		}
	}
	if len(e.recovering) == 0 {
		return nil
	}
	k, err := e.newKeepalives()
	if err != nil {
		return err
	}
	defer k.close()
	var first error
	failed, located, began := 0, 0, time.Now()
	links := e.fastpath.Links()
	for _, r := range slices.Collect(maps.Values(e.recovering)) { // in no order
		if r.entry != nil {
			if located++; located > locateMost {
				continue
			}
			e.locate(r, links)
		}
		e.fastpath.Attach(r.Link)
		if time.Since(began) > recoverRound {
			continue
		}
		if e.stopped.Load() {
			return nil
		}
		done, err := e.recoverOne(k, r)
		if r.tries++; done || r.tries == recoverTries {
			delete(e.recovering, r.Flow)
			if !done || err != nil {
				e.giveUp(r.Flow)
			}
		}
		if err != nil {
			failed++
			first = cmp.Or(first, fmt.Errorf("%s to %s: %w", r.Pod, r.Peer, err))
		}
	}
	if failed > 1 {
		return fmt.Errorf("%w; %d others failed", first, failed-1)
	}
	return first
}

// giveUp records that a connection could not be recovered. If there is no room for it, a later search finds it again.
func (e *Entries) giveUp(flow datapath.Flow) {
	if len(e.unrecovered) >= recoverMost {
		e.searchLater()
		return
	}
	e.unrecovered[flow] = true
}

// AnyLeft reports whether any connection of a killed agent may still be liberal, because its recovery is under way or has failed,
// or it was not found yet. Each call looks up a few of those that could not be recovered, and forgets what has ended.
func (e *Entries) AnyLeft() bool {
	looked := 0
	for flow := range e.unrecovered { // in no order
		if looked++; looked > pruneMost {
			break
		}
		if is, err := Find(flow); err == nil && (is == nil || !is.leftLiberal()) {
			delete(e.unrecovered, flow)
		}
	}
	return len(e.recovering) > 0 || len(e.unrecovered) > 0 || !e.searchAt.IsZero()
}

// recoverOne tries once to recover a connection, and returns whether another try is pointless.
func (e *Entries) recoverOne(k *keepalives, r *recovery) (done bool, err error) {
	if r.entry != nil || !e.fastpath.Attached(r.Link) || k.macs[r.Pod.Addr()] == nil {
		return false, nil
	}
	is, err := Find(r.Flow)
	if err != nil || is == nil || !is.leftLiberal() {
		return err == nil, err
	}
	now, err := datapath.Now()
	if err != nil {
		return false, err
	}
	idle := is.idle(k.timeouts)
	if idle < restTime && r.resting {
		return true, nil
	} else if idle < restTime && r.tries < recoverTries/2 {
		return false, nil // in use, or its timeout does not show the idle time
	}
	r.Last, r.Acknowledged = now-idle, rand.Uint32()
	if added, err := e.programs.Recover(r.Recovery); err != nil {
		return false, err
	} else if !added { // in use; Forget resynchronises it when it becomes idle
		return e.programs.Known(r.Flow)
	}
	answered, known, err := e.ask(k, r)
	switch {
	case err == nil && !known:
		return true, nil // the pod has ended it, or it is in use
	case err == nil && answered:
		return true, e.recovered(k, r.Flow)
	}
	// With the flow still there, the programs would take a later packet for the answer.
	return false, errors.Join(err, e.programs.Forget(r.Flow))
}

// ask sends a pod a keepalive, and waits for the answer: see datapath.Programs.Recovered.
func (e *Entries) ask(k *keepalives, r *recovery) (answered, known bool, err error) {
	if err := k.send(r); err != nil {
		return false, true, err
	}
	for until := time.Now().Add(answerTime); ; time.Sleep(answerTime / 20) {
		answered, known, err = e.programs.Recovered(r.Flow)
		if err != nil || !known || answered || time.Now().After(until) {
			return answered, known, err
		}
	}
}

// recovered makes conntrack check the window of a connection whose sequence numbers are known from the pod's answer.
func (e *Entries) recovered(k *keepalives, flow datapath.Flow) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	n, _, err := e.sequence(flow)
	if err != nil || n != (datapath.Sequence{}) && !n.Acknowledged() {
		return err // it is in use
	}
	is, err := Find(flow)
	if err != nil || is == nil || !is.leftLiberal() || n == (datapath.Sequence{}) {
		// The pod may have closed the connection after its answer.
		return errors.Join(err, e.programs.Forget(flow))
	}
	err = e.resyncs.do(func(r *resyncer) error { return r.recover(flow, n, is, k.timeouts) })
	if known, failed := e.programs.Known(flow); failed != nil || !known {
		return errors.Join(err, failed) // it has ended
	}
	if after, _, failed := e.sequence(flow); err != nil || failed != nil || after != n {
		// Conntrack did not accept the handshake, or missed packets that took the fast path during it. The flow is known now:
		// Forget tries again once it is idle.
		if errors.Is(err, errNotAccepted) {
			err = nil
		}
		return errors.Join(err, failed, liberal(flow), reopen(flow, 0))
	}
	return e.programs.Forget(flow)
}

// keepalives sends the keepalives of one round.
type keepalives struct {
	// socket is an AF_PACKET socket. All keepalives share it, because closing one takes milliseconds (packet_release waits for
	// an RCU grace period).
	socket   int
	macs     map[netip.Addr]net.HardwareAddr
	timeouts timeouts
}

func (e *Entries) newKeepalives() (k *keepalives, err error) {
	k = new(keepalives)
	if k.timeouts, err = readTimeouts(); err != nil {
		return nil, err
	}
	if k.macs, err = e.fastpath.MACs(); err != nil {
		return nil, err
	}
	k.socket, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	return k, os.NewSyscallError("socket", err)
}

func (k *keepalives) close() { _ = unix.Close(k.socket) }

// send sends a pod a segment in the name of its peer. Its sequence number is random and so most likely outside the window,
// which makes TCP answer; inside the window, TCP takes the segment for an old acknowledgement.
func (k *keepalives) send(r *recovery) error {
	s := segment{r.Peer, r.Pod, rand.Uint32(), r.Acknowledged, ackFlag, 0xffff, nil}
	frame := append(ethernet(k.macs[r.Pod.Addr()], r.Pod.Addr()), s.bytes()...)
	return os.NewSyscallError("sendto", unix.Sendto(k.socket, frame, 0, &unix.SockaddrLinklayer{Ifindex: r.Link}))
}

// ethernet returns the Ethernet header of packets to an address. No pod looks at the source MAC address.
func ethernet(to net.HardwareAddr, address netip.Addr) []byte {
	protocol := uint16(unix.ETH_P_IP)
	if address.Is6() {
		protocol = unix.ETH_P_IPV6
	}
	return binary.BigEndian.AppendUint16(slices.Concat(to, []byte{2, 0, 0, 0, 0, 1}), protocol)
}
