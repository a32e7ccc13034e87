package report

import (
	"fmt"
	"math"
	"strings"

	"github.com/HdrHistogram/hdrhistogram-go"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/report/draw"
	"slipstream.dev/internal/report/number"
	"slipstream.dev/internal/spec"
)

// latencyFigure draws the percentiles of each variant, its trials merged, at one number of pairs.
func (m *Model) latencyFigure(w spec.Workload, n int) (Figure, bool) {
	chart := draw.Percentiles{Decades: 2, Names: len(m.exp.Spec.Variants), Unit: "µs"}
	data := Data{Columns: []string{"Variant", "Messages", "p50 µs", "p90 µs", "p99 µs", "p99.9 µs", "Largest µs"}}
	var medians []string
	for _, v := range m.exp.Spec.Variants {
		h := m.mergedHistogram(cell{v.Name, w.Name, n, ""})
		if h == nil || h.TotalCount() == 0 {
			continue
		}
		row := []string{v.Name, fmt.Sprint(h.TotalCount())}
		for _, q := range []float64{50, 90, 99, 99.9, 100} {
			row = append(row, number.Significant(microseconds(h, q)))
		}
		data.Rows = append(data.Rows, row)
		medians = append(medians, fmt.Sprintf("%s %s and %s", v.Name, row[2], row[4]))
		if marks, decades := percentileMarks(h); len(marks) > 0 {
			chart.Decades = max(chart.Decades, math.Ceil(decades*2)/2)
			chart.Curves = append(chart.Curves, draw.Curve{Name: v.Name, Style: m.variantStyle(v.Name), Marks: marks})
		}
	}
	if len(chart.Curves) == 0 {
		return Figure{}, false
	}
	return Figure{
		Section: SectionLatency,
		Name:    slug(w.Name, "latency-distribution", fmt.Sprint(n)),
		Title:   fmt.Sprintf("%s latency distribution, %s", capitalized(w.Name), pairs(n)),
		Caption: "All trials of a variant merged. Both axes are logarithmic. A curve ends where fewer than ten messages are slower. Lower is better.",
		Alt:     fmt.Sprintf("Percentile curves of %s latency at %s, in µs. Median and p99: %s.", w.Name, pairs(n), strings.Join(medians, "; ")),
		Data:    data,
		Picture: chart.Picture(),
	}, true
}

func microseconds(h *hdrhistogram.Histogram, percentile float64) float64 {
	return float64(h.ValueAtPercentile(percentile)) / 1e3
}

// percentileMarks returns the marks of a curve, and the number of its decades. Marks at whole decades (90%, 99% …)
// are filled.
func percentileMarks(h *hdrhistogram.Histogram) (marks []draw.Mark, decades float64) {
	const perDecade = 20
	// With fewer than ten slower messages, a percentile depends on chance.
	decades = min(math.Log10(max(float64(h.TotalCount())/10, 1)), 5)
	for i := 0; float64(i)/perDecade <= decades; i++ {
		x := float64(i) / perDecade
		if y := microseconds(h, 100*(1-math.Pow(10, -x))); y > 0 {
			marks = append(marks, draw.Mark{X: x, Y: y, Filled: i%perDecade == 0 && i > 0})
		}
	}
	return marks, decades
}

// mergedHistogram returns the latencies of all trials of a cell, or nil if no trial has any. It leaves out a
// histogram that cannot be read, with a warning.
func (m *Model) mergedHistogram(c cell) *hdrhistogram.Histogram {
	var all *hdrhistogram.Histogram
	for _, t := range m.trials {
		if t.Latency == "" || !c.holds(t) {
			continue
		}
		h, err := record.DecodeHistogram(t.Latency)
		if err != nil {
			m.warn(record.WarnLatencyUnreadable, Entry{fmt.Sprintf("block %d: %v", t.Block, err), m.nameCells([]cell{c})})
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
