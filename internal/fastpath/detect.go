//go:build linux

package fastpath

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
)

const (
	// detectEvery is the interval at which the detector reads the packet counters of VXLAN devices and routers.
	detectEvery = leaseRenewal / 5
	// busyPackets is the number of packets in an interval from which the devices are busy.
	busyPackets = 10
	// The programs sample for detectMin at least, and until detectPackets packets have passed: they sample one in 32, and
	// have to sample a connection twice. With few packets they stop after detectMax.
	detectMin, detectMax = 2 * detectEvery, 9 * detectEvery
	detectPackets        = 256
	// detectPause is the pause after a detection that found nothing. It doubles each time, up to
	// detectPauseMax, while the devices stay busy.
	detectPause, detectPauseMax = time.Second, 8 * time.Second
)

// detector decides when the programs of the VXLAN devices search for eligible connections while the
// fast path is idle: only while the devices are busy, and even then only part of the time, because
// the programs cost every packet.
type detector struct {
	on bool
	// since is the time at which the programs began to sample, and began the counters at that time. While the programs are being
	// attached, since is zero: attaching waits for other changes of devices, and can take longer than the detection.
	since time.Time
	began uint64
	// next is the earliest time of the next detection; wait is the length of the last pause.
	next time.Time
	wait time.Duration
	// packets is the last value of the counters.
	packets uint64
}

// update applies new counters, and returns whether the detector was switched on or off.
func (s *detector) update(now time.Time, packets uint64) (switched bool) {
	few := s.packets == 0 || packets-s.packets < busyPackets
	s.packets = packets
	switch {
	case s.on && s.since.IsZero():
		s.since, s.began = now, packets
		return false
	case s.on:
		sampled := now.Sub(s.since)
		if sampled < detectMin || sampled < detectMax && packets-s.began < detectPackets {
			return false
		}
		s.wait = min(max(2*s.wait, detectPause), detectPauseMax)
		s.on, s.next = false, now.Add(s.wait)
		return true
	case few:
		s.wait = 0
		return false
	case now.Before(s.next):
		return false
	}
	s.on, s.since = true, time.Time{}
	return true
}

// packets sums the packet counters of the VXLAN devices and routers. Without pods nothing is eligible.
func packets(h *netlink.Handle, n node) (sum uint64, err error) {
	if len(n.veths) == 0 {
		return 0, nil
	}
	for _, index := range slices.AppendSeq(slices.Clone(n.routers), maps.Keys(n.overlays)) {
		l, err := h.LinkByIndex(index)
		if errors.As(err, new(netlink.LinkNotFoundError)) {
			continue // the device is gone; a notification follows
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
