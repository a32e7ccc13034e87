//go:build linux

package fastpath

import (
	"errors"
	"fmt"
	"time"

	"github.com/vishvananda/netlink"
)

const (
	// detectEvery is between two looks at how busy VXLAN devices are.
	detectEvery = leaseRenewal / 5
	// busyPackets is how many packets in a glance make them so.
	busyPackets = 10
	// detectFor is how long scouts look.
	detectFor = 3 * detectEvery
	// scoutAgain is after how long they look again if they found nothing; twice that after the
	// second time, and so on up to scoutRarely, as long as the devices are busy.
	scoutAgain, scoutRarely = time.Second, 8 * time.Second
)

// detector says when the programs at the VXLAN devices look for connections that are worth it,
// while no pod has any: only if there are packets, and then not always, as each of these pays.
type detector struct {
	on bool
	// next is when they end, or may begin again; wait is how long they paused last.
	next time.Time
	wait time.Duration
	// packets is how many there were at the last glance.
	packets uint64
}

// look goes by the packets that there have been until now, and tells whether that turned the
// scouts on or off.
func (s *detector) look(now time.Time, packets uint64) (turned bool) {
	few := s.packets == 0 || packets-s.packets < busyPackets
	s.packets = packets
	if few && !s.on {
		s.wait = 0
	}
	if now.Before(s.next) || few && !s.on {
		return false
	}
	s.on = !s.on
	if s.on {
		s.next = now.Add(detectFor)
		return true
	}
	s.wait = min(max(2*s.wait, scoutAgain), scoutRarely)
	s.next = now.Add(s.wait)
	return true
}

// packets counts those of VXLAN devices until now.
func packets(h *netlink.Handle, n node) (sum uint64, err error) {
	for index := range n.overlays {
		l, err := h.LinkByIndex(index)
		if errors.As(err, new(netlink.LinkNotFoundError)) {
			continue // a change will tell
		}
		if err != nil {
			return 0, fmt.Errorf("read counters of %s: %w", n.names[index], err)
		}
		if s := l.Attrs().Statistics; s != nil {
			sum += s.RxPackets + s.TxPackets
		}
	}
	return sum, nil
}
