//go:build linux

package datapath

import (
	"encoding/binary"
	"fmt"
	"slices"
)

// EventKind tells what an event asks the agent to do.
type EventKind uint32

const (
	// EventAttach requests programs for the link of an idle pod that has an eligible connection.
	EventAttach = EventKind(fastpathEventKindEVENT_ATTACH)
	// EventLiberal makes the conntrack entry of a connection liberal.
	EventLiberal = EventKind(fastpathEventKindEVENT_LIBERAL)
	// EventAcked clears conntrack's flag of unacknowledged data.
	EventAcked = EventKind(fastpathEventKindEVENT_ACKED)
	// EventResync resynchronises conntrack with a connection.
	EventResync = EventKind(fastpathEventKindEVENT_RESYNC)
	// EventReset moves the conntrack entry of a connection to CLOSE.
	EventReset = EventKind(fastpathEventKindEVENT_RESET)
	// EventReopen moves the conntrack entry of a connection that has not ended back to ESTABLISHED.
	EventReopen = EventKind(fastpathEventKindEVENT_REOPEN)
)

// Event is a request of the programs to the agent.
type Event struct {
	Kind EventKind
	// Pod is set in an EventAttach. The address may belong to another node.
	Pod PodKey
	// Link is set in an EventAttach if the peer is a pod of the same node too: the index of the pod's link.
	Link int
	// Flow is set in all events, except for an EventAttach without Link.
	Flow Flow
}

// ReadEvent waits for the next event, until Close. The same event may come more than once.
func (p *Programs) ReadEvent() (Event, error) {
	r, err := p.events.Read()
	if err != nil {
		return Event{}, fmt.Errorf("wait for an event of the fast path: %w", err)
	}
	return decodeEvent(r.RawSample)
}

func decodeEvent(b []byte) (Event, error) {
	var event fastpathEvent
	if _, err := binary.Decode(b, binary.NativeEndian, &event); err != nil {
		return Event{}, fmt.Errorf("decode an event of the fast path: %w", err)
	}
	kind := EventKind(event.Kind)
	flow := event.Key.flow(fastpathFlow{Pod6: event.Pod6, Peer6: event.Peer6})
	switch {
	case kind == EventAttach && event.Link == 0:
		return Event{Pod: PodKey{event.Key.Pod, event.Key.IsIpv6 != 0}}, nil
	case kind == EventAttach:
		return Event{Pod: PodKeyOf(flow.Pod.Addr()), Link: int(event.Link), Flow: flow}, nil
	case slices.Contains([]EventKind{EventLiberal, EventAcked, EventResync, EventReset, EventReopen}, kind):
		return Event{Kind: kind, Flow: flow}, nil
	}
	return Event{}, fmt.Errorf("decode an event of the fast path: unknown kind %d", kind)
}
