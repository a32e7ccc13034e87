package draw

import (
	"math"
	"strings"
	"testing"

	"slipstream.dev/internal/report/number"
)

func TestScaleShowsRatiosAndBlocks(t *testing.T) {
	none := number.Interval{Low: math.Inf(-1), High: math.Inf(1)}
	for name, c := range map[string]struct {
		all  []Ratio
		want Scale
	}{
		"nothing":               {nil, Scale{1, 1}},
		"an interval":           {[]Ratio{{1.2, number.Interval{Low: 1.1, High: 1.3}, nil, nil}}, Scale{1, 1.3}},
		"a block beyond it":     {[]Ratio{{1.2, number.Interval{Low: 1.1, High: 1.3}, []float64{1.6, 0.9}, nil}}, Scale{0.9, 1.6}},
		"rings beyond it":       {[]Ratio{{1.1, number.Interval{Low: 1, High: 1.2}, nil, []float64{0.2, 3}}}, Scale{0.2, 3}},
		"one block":             {[]Ratio{{0.5, none, []float64{0.5}, nil}}, Scale{0.5, 1}},
		"an interval of guests": {[]Ratio{{1.25, number.Interval{Low: 0.01, High: 100}, nil, nil}}, Scale{0.8, 1.5625}}, // as much room again, either way
	} {
		got := ScaleOf(c.all)
		if math.Abs(got.low-c.want.low) > 1e-9 || math.Abs(got.high-c.want.high) > 1e-9 {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

func TestTicks(t *testing.T) {
	for s, want := range map[Scale]string{
		{0.9, 1.35}:    "0.9 1 1.1 1.2 1.3",
		{0.98, 1.003}:  "0.98 0.985 0.99 0.995 1",
		{0.1, 1}:       "0.1 0.2 0.5 1",
		{1, 1}:         "1",
		{0.96, 2.5}:    "1 1.5 2 2.5",
		{1, 1000}:      "1 5 20 100 500",
		{0.999, 1.001}: "0.999 0.9995 1 1.0005 1.001",
	} {
		var got []string
		last := math.Inf(-1)
		for _, tick := range s.Ticks() {
			got = append(got, tick.Text)
			if tick.At-last < 10 || tick.At < 0 || tick.At > 100 {
				t.Errorf("%v: a tick at %g%%, after one at %g%%", s, tick.At, last)
			}
			last = tick.At
		}
		if text := strings.Join(got, " "); text != want {
			t.Errorf("%v: ticks %s, want %s", s, text, want)
		}
	}
}

func TestBar(t *testing.T) {
	s := Scale{0.5, 2} // 1 is in the middle
	b := s.Bar(Ratio{1, number.Interval{Low: 0.5, High: 2}, []float64{0.5, 2}, nil})
	if b.Off != "" || b.Mean != "M500 7h0" || b.Interval != "M40 7H960" || b.Dots != "M40 16h0M960 16h0" {
		t.Errorf("within the scale: %+v", b)
	}
	if b := s.Bar(Ratio{1, number.Interval{Low: 0.1, High: 9}, nil, nil}); b.Interval != "M0 7H1000" {
		t.Errorf("an interval beyond the scale: %+v", b)
	}
	if b := s.Bar(Ratio{1, number.Interval{Low: math.Inf(-1), High: math.Inf(1)}, []float64{1}, nil}); b.Interval != "" || b.Mean == "" {
		t.Errorf("without an interval: %+v", b)
	}
	above, below := s.Bar(Ratio{Value: 3}), s.Bar(Ratio{Value: 0.1})
	if above.Mean+below.Mean != "" || above.Off == "" || below.Off == "" || above.Off == below.Off {
		t.Errorf("off the scale: %+v and %+v", above, below)
	}
}
