package report

import (
	"fmt"
	"math"
	"strings"

	"github.com/HdrHistogram/hdrhistogram-go"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// latencyFigure draws the percentiles of each variant, its trials merged, at one number of
// pairs. The x axis is logarithmic in the share of slower messages, as is usual for HDR
// histograms.
func (m *Model) latencyFigure(w spec.Workload, n int) (Figure, bool) {
	var curves []curve
	least, most, end := math.Inf(1), 0.0, 2.0
	data := Data{Columns: []string{"Variant", "Messages", "p50 µs", "p90 µs", "p99 µs", "p99.9 µs", "Largest µs"}}
	var alt []string
	for _, v := range m.exp.Spec.Variants {
		h := m.merged(cell{v.Name, w.Name, n, ""})
		if h == nil || h.TotalCount() == 0 {
			continue
		}
		row := []string{v.Name, fmt.Sprint(h.TotalCount())}
		for _, q := range []float64{50, 90, 99, 99.9, 100} {
			row = append(row, significant(microseconds(h, q)))
		}
		data.Rows = append(data.Rows, row)
		alt = append(alt, fmt.Sprintf("%s %s and %s", v.Name, row[2], row[4]))
		c, last := percentiles(h)
		if len(c) == 0 {
			continue
		}
		for _, s := range c {
			least, most = min(least, s.y), max(most, s.y)
		}
		end = max(end, math.Ceil(last*2)/2)
		curves = append(curves, curve{v.Name, m.look(v.Name), c})
	}
	if len(curves) == 0 {
		return Figure{}, false
	}
	lo, hi := ladder(least, false), ladder(most, true)
	if lo == hi {
		hi = ladder(hi*1.01, true)
	}
	f := Figure{
		Section: SectionLatency,
		Name:    slug(w.Name, "latency-distribution", fmt.Sprint(n)),
		Title:   fmt.Sprintf("%s latency distribution, %s", upper(w.Name), pairs(n)),
		Caption: "All trials of a variant merged. Both axes are logarithmic. A curve ends where fewer than ten messages are slower. Lower is better.",
		Alt:     fmt.Sprintf("Percentile curves of %s latency at %s, in µs. Median and p99: %s.", w.Name, pairs(n), strings.Join(alt, "; ")),
		Data:    data,
		width:   figureWidth,
		height:  max(260, 80+12*float64(len(m.exp.Spec.Variants))),
	}
	f.draw = func(p *pen) { p.latencies(curves, f, lo, hi, end) }
	return f, true
}

func microseconds(h *hdrhistogram.Histogram, percentile float64) float64 {
	return float64(h.ValueAtPercentile(percentile)) / 1e3
}

// percentiles returns the points of a curve, and the number of its decades. Points at whole
// decades (90 %, 99 % …) are filled.
func percentiles(h *hdrhistogram.Histogram) (points []sample, last float64) {
	const perDecade = 20
	// With fewer than ten slower messages, a percentile depends on chance.
	last = min(math.Log10(max(float64(h.TotalCount())/10, 1)), 5)
	for i := 0; float64(i)/perDecade <= last; i++ {
		x := float64(i) / perDecade
		if y := microseconds(h, 100*(1-math.Pow(10, -x))); y > 0 {
			points = append(points, sample{x: x, y: y, filled: i%perDecade == 0 && i > 0})
		}
	}
	return points, last
}

func (p *pen) latencies(curves []curve, f Figure, lo, hi, end float64) {
	labels := 0.0
	for _, c := range curves {
		labels = max(labels, p.width(c.name, normal))
	}
	labels = min(labels, 0.2*f.width)
	area := frame{left: 40, top: 22, right: f.width - labels - 30, bottom: f.height - 36}
	x := func(v float64) float64 { return area.left + (area.right-area.left)*v/end }
	y := func(v float64) float64 {
		return area.bottom - (area.bottom-area.top)*math.Log(v/lo)/math.Log(hi/lo)
	}
	p.text(point{0, 12}, "µs", small, inkMuted, alignLeft)
	for v := lo; v <= hi*1.001; v = ladder(v*1.01, true) {
		p.line(0.6, inkGrid, nil, point{area.left, y(v)}, point{area.right, y(v)})
		p.text(point{area.left - 6, y(v) + 3}, fixed(v, stepDecimals(v)), small, inkMuted, alignRight)
	}
	ticks := []struct {
		at   float64
		text string
	}{{0, "0"}, {math.Log10(2), "50"}, {1, "90"}, {2, "99"}, {3, "99.9"}, {4, "99.99"}, {5, "99.999"}}
	for _, t := range ticks {
		if t.at > end {
			break
		}
		p.line(0.6, inkGrid, nil, point{x(t.at), area.top}, point{x(t.at), area.bottom})
		p.text(point{x(t.at), area.bottom + 13}, t.text, small, inkMuted, alignCentre)
	}
	p.text(point{(area.left + area.right) / 2, area.bottom + 28}, "percentile", small, inkMuted, alignCentre)
	var tags []tag
	for _, c := range curves {
		var line []point
		for _, s := range c.points {
			line = append(line, point{x(s.x), y(s.y)})
		}
		p.line(1.4, c.look.ink, c.look.dash, line...)
		for j, s := range c.points {
			if s.filled {
				p.marker(c.look.shape, line[j], 2.4, c.look.ink, true)
			}
		}
		tags = append(tags, tag{line[len(line)-1], c.name, c.look, true})
	}
	p.tags(tags, area, labels)
}

// merged returns the histogram of all trials of a cell, or nil if no trial has one. It
// leaves out a histogram that cannot be read, with a warning.
func (m *Model) merged(c cell) *hdrhistogram.Histogram {
	var all *hdrhistogram.Histogram
	for _, t := range m.trials {
		if t.Latency == "" || !c.holds(t) {
			continue
		}
		h, err := record.DecodeHistogram(t.Latency)
		if err != nil {
			m.warn(record.WarnLatencyUnreadable, Entry{fmt.Sprintf("block %d: %v", t.Block, err), m.words([]cell{c})})
			continue
		}
		if all == nil {
			all = h
			continue
		}
		all.Merge(h)
	}
	return all
}
