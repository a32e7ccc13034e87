//go:build linux

package fastpath

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
)

const (
	// detectEvery is the interval at which the detector reads the packet counters of VXLAN devices and routers.
	detectEvery = leaseRenewal / 5
	// The devices are busy if at least busyPackets packets pass in an interval.
	busyPackets = 10
	// A detection lasts at least detectMin, and until detectPackets packets have passed: the programs sample one packet in 32,
	// and must sample a connection twice. With few packets it ends after detectMax.
	detectMin, detectMax = 2 * detectEvery, 9 * detectEvery
	detectPackets        = 256
	// detectPause is the pause after a detection that found nothing. It doubles each time, up to
	// detectPauseMax, while the devices stay busy.
	detectPause, detectPauseMax = time.Second, 8 * time.Second
)

// detector decides when the programs of VXLAN devices and routers look for eligible connections while the fast path is idle.
// They do so only while the devices are busy, and only part of that time, because the programs slow down every packet.
type detector struct {
	on bool
	// since is the time at which the programs began to sample, and began is the value of the counters at that time. since is
	// zero while the programs are being attached: attaching waits for the RTNL lock, and can take longer than the detection.
	since time.Time
	began uint64
	// next is the earliest time of the next detection; wait is the length of the last pause.
	next time.Time
	wait time.Duration
	// packets is the last value of the packet counters.
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

// packets sums the packet counters of the VXLAN devices and routers. It returns 0 on a node without pods, where no connection
// is eligible.
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

const (
	// localEvery is the interval at which the detector reads the packet counters of pods' links.
	localEvery = time.Second
	// A link is busy if at least localPackets packets pass in an interval.
	localPackets = 100
	// localLinks limits the number of links that are sampled at the same time: each costs one system call to attach and another
	// to detach.
	localLinks = 16
	// localPauseMax is the longest pause after a detection that found nothing.
	localPauseMax = 16 * time.Second
)

// localDetector decides when the programs at pods' links look for connections between pods of the node, which pass no other
// device of the fast path. It samples the busiest links without programs for one interval, and others the next time. While links
// stay busy and no link gets programs, each pause is twice as long as the one before: most busy links have no such connection.
type localDetector struct {
	// packets holds the last values of the packet counters, by link.
	packets map[int]uint64
	// last is the time of that reading, next the earliest time of the next detection, wait the length of the last pause.
	last, next time.Time
	wait       time.Duration
	// sampling holds the links that are being sampled, sampled those that were sampled while others wait for their turn.
	sampling []int
	sampled  map[int]bool
}

// update applies new counters of the links without programs, and returns whether d.sampling has changed.
func (d *localDetector) update(now time.Time, packets map[int]uint64) (switched bool) {
	var busy []int
	count := make(map[int]uint64)
	for link, n := range packets {
		if before, known := d.packets[link]; known {
			count[link] = n - before
		}
		if count[link] >= localPackets {
			busy = append(busy, link)
		}
	}
	d.packets, d.last = packets, now
	switch {
	case len(d.sampling) > 0:
		if slices.ContainsFunc(d.sampling, func(link int) bool { _, without := packets[link]; return !without }) {
			d.wait = 0 // it has got programs, or is gone
		}
		d.wait = min(max(2*d.wait, localEvery), localPauseMax)
		d.sampling, d.next = nil, now.Add(d.wait)
		return true
	case len(busy) == 0:
		d.wait = 0
		return false
	case now.Before(d.next):
		return false
	}
	turn := func(link int) int {
		if d.sampled[link] {
			return 1
		}
		return 0
	}
	slices.SortFunc(busy, func(a, b int) int {
		return cmp.Or(cmp.Compare(turn(a), turn(b)), cmp.Compare(count[b], count[a]), cmp.Compare(a, b))
	})
	d.sampling = busy[:min(len(busy), localLinks)]
	if d.sampled == nil {
		d.sampled = make(map[int]bool)
	}
	for _, link := range d.sampling {
		d.sampled[link] = true
	}
	if !slices.ContainsFunc(busy, func(link int) bool { return !d.sampled[link] }) {
		clear(d.sampled)
	}
	return true
}

// detectLocal feeds the packet counters of pods' links to the local detector, and returns whether its choice of links has
// changed.
func (f *Fastpath) detectLocal(now time.Time) (switched bool, err error) {
	if now.Sub(f.local.last) < localEvery || len(f.node.veths) < 2 && len(f.local.sampling) == 0 {
		return false, nil
	}
	all, err := linkPackets()
	if err != nil {
		return false, err
	}
	without := make(map[int]uint64)
	for _, link := range f.node.veths {
		if n, there := all[f.node.names[link]]; there && f.attached[attachment{link, "observe_pod"}] == nil {
			without[link] = n
		}
	}
	return f.local.update(now, without), nil
}

// linkPackets returns the packet counters of the devices in the calling thread's network namespace, by name. It reads /proc,
// because netlink would take the RTNL lock, for which everybody who attaches or detaches a program would wait.
func linkPackets() (map[string]uint64, error) {
	b, err := os.ReadFile("/proc/thread-self/net/dev")
	if err != nil {
		return nil, fmt.Errorf("read packet counters: %w", err)
	}
	all := make(map[string]uint64)
	for line := range strings.Lines(string(b)) {
		name, counters, ok := strings.Cut(line, ":")
		fields := strings.Fields(counters)
		if !ok || len(fields) < 16 {
			continue // a heading
		}
		name = strings.TrimSpace(name)
		for _, column := range []int{1, 9} { // received, sent
			n, err := strconv.ParseUint(fields[column], 10, 64)
			if err != nil {
				return nil, fmt.Errorf("read packet counters of %s: %w", name, err)
			}
			all[name] += n
		}
	}
	return all, nil
}
