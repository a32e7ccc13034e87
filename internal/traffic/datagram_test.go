package traffic

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
)

// arrive delivers datagrams with these numbers, one per microsecond. Each was sent 100 µs earlier, on a clock that is an hour
// off.
func arrive(a *arrivals, numbers ...uint64) {
	header := make([]byte, datagramHeader)
	for i, n := range numbers {
		now := int64(i+1) * 1000
		putHeader(header, n, true, now-100_000+int64(time.Hour))
		a.take(header, now)
	}
}

func span(from, to uint64) (numbers []uint64) {
	for n := from; n <= to; n++ {
		numbers = append(numbers, n)
	}
	return numbers
}

func TestArrivals(t *testing.T) {
	const far = 3*remembered + 17 // where the bitmap has wrapped
	for name, tt := range map[string]struct {
		numbers []uint64
		want    counts
		arrived uint64
	}{
		"in order":               {span(1, 100), counts{}, 100},
		"first ones lost":        {span(50, 100), counts{}, 51},
		"lost":                   {[]uint64{1, 2, 5, 9}, counts{}, 4},
		"one late":               {[]uint64{1, 3, 4, 2, 5}, counts{reordered: 1}, 5},
		"late and lost":          {[]uint64{1, 2, 5, 4, 9}, counts{reordered: 1}, 5},
		"all backwards":          {[]uint64{5, 4, 3, 2, 1}, counts{reordered: 4}, 5},
		"twice":                  {[]uint64{1, 2, 2, 3}, counts{duplicates: 1}, 3},
		"twice, the second late": {[]uint64{1, 2, 3, 2}, counts{duplicates: 1}, 3},
		"late, and then again":   {[]uint64{1, 3, 2, 2}, counts{reordered: 1, duplicates: 1}, 3},
		"twice beside lost ones": {[]uint64{1, 1, 1, 4}, counts{duplicates: 2}, 2},
		"round the memory":       {append(span(1, far), far-remembered+1, far-5, far+1), counts{duplicates: 2}, far + 1},
		"a gap round the memory": {append(span(1, 10), far, 11, far-1, far-1), counts{reordered: 2, duplicates: 1}, 13},
		"a gap of the memory":    {append(span(1, 10), remembered+10, 11, 11), counts{reordered: 1, duplicates: 1}, 12},
		"number of nothing":      {[]uint64{0, 1}, counts{reordered: 1}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			var a arrivals
			arrive(&a, tt.numbers...)
			got := a.counts
			if got.moved != 0 {
				t.Errorf("transit times moved by %d ns, of a steady stream", got.moved)
			}
			got.moves = 0
			if got != tt.want || a.arrived != tt.arrived {
				t.Errorf("%+v and %d arrived, want %+v and %d", got, a.arrived, tt.want, tt.arrived)
			}
		})
	}
}

// TestArrivalsOfTheWindow checks that datagrams that the sender does not count do not count as arrived.
func TestArrivalsOfTheWindow(t *testing.T) {
	var a arrivals
	header := make([]byte, datagramHeader)
	for n := uint64(1); n <= 10; n++ {
		putHeader(header, n, n > 3 && n <= 8, 0)
		a.take(header, 1)
	}
	if a.arrived != 5 || a.highest != 10 {
		t.Errorf("%d arrived up to %d, want 5 up to 10", a.arrived, a.highest)
	}
}

// TestArrivalsAtRandom drops, delays and repeats datagrams at random, and compares the counts with a list of all datagrams.
func TestArrivalsAtRandom(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		type datagram struct{ number, at uint64 }
		var wire []datagram
		for n := uint64(1); n <= 200_000; n++ {
			for range []int{0, 1, 1, 1, 1, 1, 1, 1, 1, 2}[rng.IntN(10)] {
				wire = append(wire, datagram{n, n + []uint64{0, 0, 0, 10, 1000}[rng.IntN(5)]})
			}
		}
		byTime := make([][]uint64, 201_001)
		for _, d := range wire {
			byTime[d.at] = append(byTime[d.at], d.number)
		}
		var a arrivals
		var want counts
		came := make(map[uint64]bool)
		var highest uint64
		for _, numbers := range byTime {
			for _, n := range numbers {
				switch {
				case came[n]:
					want.duplicates++
				case n < highest:
					want.reordered++
				}
				came[n] = true
				highest = max(highest, n)
			}
			arrive(&a, numbers...)
		}
		a.moved, a.moves = 0, 0
		if a.counts != want || a.arrived != uint64(len(came)) {
			t.Fatalf("%+v and %d arrived, want %+v and %d", a.counts, a.arrived, want, len(came))
		}
	}
}

// TestJitter checks that the jitter of a stream whose transit times alternate by 40 µs is 40 µs, as RFC 3550 would estimate,
// whatever the clocks are.
func TestJitter(t *testing.T) {
	for _, clock := range []time.Duration{-time.Hour, 0, time.Hour} {
		t.Run(fmt.Sprint(clock), func(t *testing.T) {
			var a arrivals
			header := make([]byte, datagramHeader)
			var rfc, last float64
			for n := range uint64(1000) {
				sent := int64(n) * 10_000
				transit := int64(clock) + 100_000 + int64(n%2)*40_000
				putHeader(header, n+1, true, sent)
				a.take(header, sent+transit)
				if n > 0 {
					change := max(float64(transit)-last, last-float64(transit))
					rfc += (change - rfc) / 16
				}
				last = float64(transit)
			}
			if got := float64(a.moved) / float64(a.moves); got != 40_000 || rfc < 39_999 || a.moves != 999 {
				t.Errorf("%g ns of %d changes, want 40000 of 999; RFC 3550's estimate is %g", got, a.moves, rfc)
			}
		})
	}
}

func FuzzArrivals(f *testing.F) {
	f.Add([]byte("0123456789abcdef0123456789abcdef"))
	f.Fuzz(func(t *testing.T, wire []byte) {
		var a arrivals
		var taken uint64
		for now := int64(1); len(wire) >= datagramHeader; now++ {
			if a.take(wire, now) {
				taken++
			}
			if n := binary.LittleEndian.Uint64(wire) &^ measured; n > a.highest {
				t.Fatalf("the highest is %d after %d", a.highest, n)
			}
			wire = wire[datagramHeader:]
		}
		if a.arrived > taken || a.reordered > taken {
			t.Fatalf("%+v of %d", a.counts, taken)
		}
	})
}

func BenchmarkArrivals(b *testing.B) {
	var a arrivals
	header := make([]byte, datagramHeader)
	var n uint64
	for b.Loop() {
		n++
		putHeader(header, n, true, int64(n))
		a.take(header, int64(n)+100)
	}
}
