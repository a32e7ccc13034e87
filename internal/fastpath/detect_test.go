//go:build linux

package fastpath

import (
	"maps"
	"slices"
	"testing"
	"time"
)

// detectorTest feeds a detector with simulated time and packet counts.
type detectorTest struct {
	*testing.T
	detector
	now   time.Time
	sum   uint64
	began time.Time
	turns []time.Duration
}

// newDetectorTest returns a detector that has seen the counters at rest.
func newDetectorTest(t *testing.T) *detectorTest {
	d := &detectorTest{T: t, now: time.Now(), sum: 1000}
	d.pass(detectEvery, 0)
	d.want("packets before the start")
	return d
}

// pass lets time pass, with a number of packets in each interval.
func (d *detectorTest) pass(time time.Duration, packets uint64) {
	for end := d.now.Add(time); d.now.Before(end); d.now = d.now.Add(detectEvery) {
		d.sum += packets
		if d.update(d.now, d.sum) {
			d.turns = append(d.turns, d.now.Sub(d.began))
		}
	}
}

// want checks the times at which the detector was switched on or off since the last call.
func (d *detectorTest) want(what string, at ...time.Duration) {
	d.Helper()
	if !slices.Equal(d.turns, at) {
		d.Fatalf("%s: switched at %v, want %v", what, d.turns, at)
	}
	d.turns, d.began = nil, d.now
}

// TestDetector checks that sampling is on for a while when there are packets, and that the pauses
// in between grow as long as packets continue.
func TestDetector(t *testing.T) {
	d := newDetectorTest(t)
	const on, off = detectEvery + detectMin, detectPause
	d.pass(time.Minute, busyPackets-1)
	d.want("few packets")
	d.pass(34*time.Second, detectPackets)
	d.want("many packets", 0, on, on+off, 2*on+off, 2*on+3*off, 3*on+3*off, 3*on+7*off, 4*on+7*off,
		4*on+15*off, 5*on+15*off, 5*on+23*off, 6*on+23*off, 6*on+31*off, 7*on+31*off)
	d.pass(time.Minute, 0)
	d.want("no packets")
	d.pass(2*time.Second, detectPackets)
	d.want("many packets again", 0, on, on+off, 2*on+off)
}

// TestDetectorSamplesEnough checks that sampling goes on until enough packets have passed, but for no longer than the pause.
func TestDetectorSamplesEnough(t *testing.T) {
	d := newDetectorTest(t)
	d.pass(time.Second, detectPackets/5+1)
	d.want("enough packets in five intervals after the first", 0, 6*detectEvery)
	d = newDetectorTest(t)
	const on = detectEvery + detectMax
	d.pass(on+detectPause+on+detectEvery, busyPackets)
	d.want("few packets", 0, on, on+detectPause, on+detectPause+on)
	if on > detectPause {
		t.Errorf("with few packets, sampling is on for %s and then off for %s", on, detectPause)
	}
}

// TestDetectorAttachesSlowly checks that the time that it takes to attach the programs does not count as sampling.
func TestDetectorAttachesSlowly(t *testing.T) {
	d := newDetectorTest(t)
	d.pass(detectEvery, detectPackets)
	d.want("packets", 0)
	d.now = d.now.Add(time.Minute) // without updates
	d.began = d.now
	d.pass(detectPause, detectPackets)
	d.want("programs that take a minute to attach", detectMin)
}

// TestPace checks that periodic work is due at its interval even if most ticks are missed.
func TestPace(t *testing.T) {
	for tick, want := range map[time.Duration]int{
		detectEvery: 20, detectEvery + time.Millisecond: 20, 450 * time.Millisecond: 22, 900 * time.Millisecond: 11,
	} {
		began := time.Now()
		p, got := pace{leaseRenewal, began}, 0
		for at := tick; at <= 20*leaseRenewal; at += tick {
			if p.due(began.Add(at)) {
				got++
			}
		}
		if got < want-1 || got > want {
			t.Errorf("with a tick every %s, %d times within %s, want %d", tick, got, 20*leaseRenewal, want)
		}
	}
}

// TestLocalDetector checks that busy links without programs are sampled for one interval, the busiest first, and that the pauses grow
// as long as links are busy.
func TestLocalDetector(t *testing.T) {
	var d localDetector
	now, packets := time.Now(), map[int]uint64{8: 0, 9: 0}
	// second applies a second with a number of packets at each link, and returns the links that are sampled then.
	second := func(more map[int]uint64) []int {
		now = now.Add(localEvery)
		for link, n := range more {
			packets[link] += n
		}
		before := slices.Clone(d.sampling)
		if switched := d.update(now, maps.Clone(packets)); switched == slices.Equal(before, d.sampling) {
			t.Errorf("sampling is %v after %v, and update returned %t", d.sampling, before, switched)
		}
		return d.sampling
	}
	want := func(what string, is []int, links ...int) {
		t.Helper()
		if !slices.Equal(is, links) {
			t.Errorf("%s: sampled are %v, want %v", what, is, links)
		}
	}
	want("a link that appears", second(map[int]uint64{7: 1e6}))
	want("few packets", second(map[int]uint64{7: localPackets - 1}))
	busy := map[int]uint64{7: localPackets, 8: 2 * localPackets, 9: 1}
	want("many packets", second(busy), 8, 7)
	want("a second later", second(busy))
	sampled := 0
	for range 60 {
		sampled += min(1, len(second(busy)))
	}
	// Pauses of 1, 2, 4, 8 and then 16 s, and a second of sampling after each.
	if sampled != 6 {
		t.Errorf("links were sampled %d times in a minute, want 6", sampled)
	}
	many := make(map[int]uint64)
	for link := range 2 * localLinks {
		packets[link] = 0
		many[link] = localPackets + uint64(link)
	}
	rest := func() {
		for range localPauseMax/localEvery + 2 {
			second(nil)
		}
	}
	rest()
	want("again after a rest", second(busy), 8, 7)
	rest()
	is := second(many)
	if len(is) != localLinks || is[0] != 2*localLinks-1 {
		t.Errorf("of %d busy links %v are sampled", len(many), is)
	}
	second(many)
	if wait := d.next.Sub(now); wait != localEvery {
		t.Fatalf("the pause is %s", wait)
	}
	is = second(many)
	if len(is) == 0 || is[0] >= localLinks {
		t.Errorf("after the busiest links %v are sampled", is)
	}
	delete(packets, is[0]) // it gets programs
	delete(many, is[0])
	second(many)
	if wait := d.next.Sub(now); wait != localEvery {
		t.Errorf("the pause after a link got programs is %s", wait)
	}
}

// TestLinkPackets checks the counters of a device.
func TestLinkPackets(t *testing.T) {
	all, err := linkPackets()
	if _, there := all["lo"]; err != nil || !there {
		t.Errorf("counters are %v, error %v", all, err)
	}
}
