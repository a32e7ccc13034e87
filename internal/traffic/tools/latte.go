package tools

import (
	"bytes"
	"fmt"
	"math"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// latte is Microsoft's ping-pong tool for Windows. Its options and output are known from Microsoft's VirtualClient and scripts,
// and from what others have quoted. It was never run with this program: what it prints when it listens is a guess.
//
// It takes whole seconds (-t) or a number of iterations (-i), and has no warm-up. Both ends need the same.
type latte struct{}

const (
	// latteBuckets is the number of buckets in its histogram, of 1 µs each.
	latteBuckets = 9998
	// latteServes is by how many seconds a server's run is longer than its client's. The server is killed when the client is
	// done, and the next run starts a new one.
	latteServes = 60
)

func (latte) Check(w spec.Workload) error {
	switch t := w.Traffic(); {
	case w.PingPong == nil:
		return fmt.Errorf("latte makes pingpong workloads only, not %s", w.Kind())
	case t.Connections != 1:
		return fmt.Errorf("latte makes one connection a pair, not %d", t.Connections)
	}
	return nil
}

func (l latte) ServerArgv(w spec.Workload, addr netip.Addr, port uint16) []string {
	return l.argv(w, addr, port, latteServes)
}

// ServerReady waits for the first line that latte prints.
func (latte) ServerReady(line []byte) bool { return bytes.HasPrefix(line, []byte("Protocol ")) }

// ClientArgv ignores cc: latte cannot set a congestion control.
func (l latte) ClientArgv(w spec.Workload, addr netip.Addr, port uint16, _, _ string) []string {
	return append(l.argv(w, addr, port, 0), "-c", "-hist", "-hl", "1", "-hc", strconv.Itoa(latteBuckets))
}

// argv returns the arguments that both ends share, for a run of the window plus more, in seconds.
func (latte) argv(w spec.Workload, addr netip.Addr, port uint16, more int64) []string {
	t := w.PingPong
	argv := []string{
		"latte", "-" + t.Protocol, "-a", netip.AddrPortFrom(addr, port).String(),
		"-m", strconv.FormatInt(int64(t.Size), 10),
	}
	if t.Iterations > 0 {
		return append(argv, "-i", strconv.Itoa(t.Iterations))
	}
	return append(argv, "-t", strconv.FormatInt(wholeSeconds(time.Duration(t.Duration))+more, 10))
}

func (latte) Lead(spec.Workload) time.Duration { return 0 }

// Parse needs the histogram, which ClientArgv requests, because a run must have a median.
func (latte) Parse(w spec.Workload, output []byte) (record.Endpoint, error) {
	e, o, err := parseLatte(output)
	if n := w.PingPong.Iterations; err == nil && n > 0 && e.Messages != uint64(n) {
		err = fmt.Errorf("it made %d of %d iterations", e.Messages, n)
	} else if err == nil && len(o.histogram) == 0 {
		err = fmt.Errorf("its output has no histogram; it ends with %.200q", o.last)
	}
	return parsed("latte", e, err)
}

var (
	// latteFigure is "Latency(usec) 69.98".
	latteFigure = regexp.MustCompile(`^(MsgSize\(byte\)|Iterations|Latency\(usec\)|CPU\(%\))\s+([0-9.]+)\s*$`)
	// latteNames begin the lines that are read.
	latteNames = []string{"MsgSize(byte)", "Iterations", "Latency(usec)", "CPU(%)", "CtxSwitch/sec", "Interrupt/sec"}
	// latteEach is "Interrupt/sec 55164     (3.86/iteration)".
	latteEach = regexp.MustCompile(`^(CtxSwitch/sec|Interrupt/sec)\s+[0-9.]+\s+\(([0-9.]+)/iteration\)\s*$`)
	// latteAnyFigure is a line of the results.
	latteAnyFigure = regexp.MustCompile(`(?m)^[A-Za-z]+(?:\([a-z%]+\)|/sec)\s+[0-9].*$|^\s*\d+\s+\d+\s*$`)
	// latteBucket is "   103      1664".
	latteBucket = regexp.MustCompile(`^\s*(\d+)\s+(\d+)\s*$`)
)

// latteProtocol is "Protocol      UDP".
var latteProtocol = regexp.MustCompile(`(?m)^Protocol +(TCP|UDP)\s*$`)

func isLatte(output []byte) bool {
	return latteProtocol.Match(output) && bytes.Contains(output, []byte("Latency(usec)"))
}

// readLatte assumes one connection, because latte has no more. It assumes that the number of iterations was set. A time limit
// (-t) may have ended the run instead, but latte does not print that.
func readLatte(output []byte, _ Known) (Reading, error) {
	t := spec.Traffic{Tool: spec.ToolLatte, Protocol: strings.ToLower(string(latteProtocol.FindSubmatch(output)[1])), Connections: 1}
	e, o, err := parseLatte(output)
	if err != nil {
		return Reading{}, err
	}
	if _, ok := e.Percentiles[metrics.LatencyP50]; len(o.histogram) > 1 && !ok {
		e.Warnings = append(e.Warnings, record.Warnf(record.WarnCoarse,
			"no percentiles: a round trip takes %.0f µs, and the buckets of the histogram are %.0f µs wide; run latte with -hl 1 -hc %d", o.figures["Latency(usec)"], o.width(), latteBuckets))
	}
	t.Size, t.Iterations = spec.Bytes(e.Bytes/e.Messages), int(e.Messages)
	t.Duration = spec.Duration(math.Ceil(min(e.Seconds, 1e6)) * 1e9)
	return Reading{Workload: spec.Workload{PingPong: &t}, Counted: true, Runs: []Run{{Pairs: []record.Endpoint{e}}}}, nil
}

// parseLatte computes the window as the duration of all iterations: the printed latency is the mean of a round trip.
func parseLatte(output []byte) (record.Endpoint, latteOutput, error) {
	e := record.Endpoint{Percentiles: make(map[string]float64)}
	o, err := latteLines(output)
	if err != nil {
		return e, o, err
	}
	for _, name := range []string{"MsgSize(byte)", "Iterations", "Latency(usec)"} {
		if v, ok := o.figures[name]; !ok {
			return e, o, fmt.Errorf("its output has no %s; it ends with %.200q", name, o.last)
		} else if !(v > 0 && v < 1e15) {
			return e, o, fmt.Errorf("%s of %g", name, v)
		}
	}
	e.Messages = uint64(o.figures["Iterations"])
	e.Bytes = e.Messages * uint64(math.Ceil(o.figures["MsgSize(byte)"]))
	if o.figures["MsgSize(byte)"] > 1<<20 {
		return e, o, fmt.Errorf("messages of %g bytes", o.figures["MsgSize(byte)"])
	}
	e.Seconds = float64(e.Messages) * o.figures["Latency(usec)"] / 1e6
	e.Percentiles[metrics.LatencyMean] = o.figures["Latency(usec)"] / 1e6
	if err := latteMachine(&e, o.figures); err != nil {
		return e, o, err
	}
	if len(o.histogram) > 0 {
		if err := lattePercentiles(&e, o); err != nil {
			return e, o, err
		}
	}
	return e, o, plausible(e)
}

// latteOutput holds what latte printed: figures by name, and how many round trips took how many µs.
type latteOutput struct {
	figures   map[string]float64
	histogram []latteCount
	last      string // line
}

type latteCount struct{ from, count float64 }

func latteLines(output []byte) (o latteOutput, err error) {
	o.figures = make(map[string]float64)
	began := false // the histogram
	number := 0
	for raw := range bytes.Lines(output) {
		number++
		line := bytes.TrimRight(raw, "\r\n")
		if len(bytes.TrimSpace(line)) > 0 {
			o.last = string(bytes.TrimSpace(line))
		}
		half := len(line) == len(raw)
		m := latteFigure.FindSubmatch(line)
		if m != nil && half {
			return o, halfLine(number, o.last)
		}
		if m == nil {
			m = latteEach.FindSubmatch(line)
		}
		switch bucket := latteBucket.FindSubmatch(line); {
		case m != nil:
			v, err := strconv.ParseFloat(string(m[2]), 64)
			if _, twice := o.figures[string(m[1])]; err != nil || twice {
				return o, &lineError{number, fmt.Errorf("%s of %q, once more or not a number", m[1], m[2])}
			}
			o.figures[string(m[1])] = v
		case half && slices.ContainsFunc(latteNames, func(name string) bool { return o.last != "" && strings.HasPrefix(name, o.last) }):
			return o, halfLine(number, o.last)
		case slices.ContainsFunc(latteNames, func(name string) bool { return bytes.HasPrefix(line, []byte(name)) }):
			return o, &lineError{number, fmt.Errorf("it is not understood: %.200q", o.last)}
		case bytes.HasPrefix(line, []byte("Interval(usec)")):
			began = true
		case began && bucket != nil:
			from, err1 := strconv.ParseFloat(string(bucket[1]), 64)
			count, err2 := strconv.ParseFloat(string(bucket[2]), 64)
			if n := len(o.histogram); err1 != nil || err2 != nil || n > 0 && from <= o.histogram[n-1].from {
				return o, &lineError{number, fmt.Errorf("invalid histogram: its buckets do not ascend at %.200q; give the output as latte printed it", o.last)}
			}
			o.histogram = append(o.histogram, latteCount{from, count})
			if half && o.total() != o.figures["Iterations"] {
				return o, halfLine(number, o.last)
			}
		}
	}
	return o, nil
}

// total returns how many round trips are in the histogram.
func (o *latteOutput) total() (n float64) {
	for _, b := range o.histogram {
		n += b.count
	}
	return n
}

// lattePercentiles computes the percentiles from the histogram. Round trips that are missing there took longer than its range.
func lattePercentiles(e *record.Endpoint, o latteOutput) error {
	total, all := o.total(), float64(e.Messages)
	if total > all {
		return fmt.Errorf("a histogram of %g round trips, and there were %d", total, e.Messages)
	}
	if missing := all - total; missing > 0.5*all {
		return fmt.Errorf("a histogram of %g round trips of %d: the others exceeded its range", total, e.Messages)
	}
	set := func(name string, bucket float64) {
		if o.narrow(bucket) {
			e.Percentiles[name] = bucket / 1e6
		}
	}
	for name, share := range map[string]float64{metrics.LatencyP50: 0.5, metrics.LatencyP99: 0.99, metrics.LatencyP999: 0.999} {
		seen := 0.0
		for _, b := range o.histogram {
			if seen += b.count; seen >= share*all {
				set(name, b.from)
				break
			}
		}
	}
	if total == all { // none took longer than the histogram's range
		for _, b := range slices.Backward(o.histogram) {
			if b.count > 0 {
				set(metrics.LatencyMax, b.from)
				break
			}
		}
	}
	return nil
}

// narrow reports whether a bucket of the histogram is narrow enough for a latency: 1 µs, or a tenth of the latency.
func (o *latteOutput) narrow(from float64) bool {
	width := o.width()
	return width > 0 && (width <= 1 || from >= 10*width)
}

// width returns the width of the widest bucket, except for the last one, whose end is not printed.
func (o *latteOutput) width() (width float64) {
	for i := range o.histogram[1:] {
		width = max(width, o.histogram[i+1].from-o.histogram[i].from)
	}
	return width
}

// latteMachine adds what latte says about its machine, if it says anything.
func latteMachine(e *record.Endpoint, figures map[string]float64) error {
	m := record.Machine{Busy: figures["CPU(%)"] / 100, Interrupts: figures["Interrupt/sec"], Switches: figures["CtxSwitch/sec"]}
	switch {
	case m.Busy > 1:
		return fmt.Errorf("CPUs that are busy for %g%% of the time", 100*m.Busy)
	case m.Interrupts > 1e9 || m.Switches > 1e9:
		return fmt.Errorf("%g interrupts and %g context switches an iteration", m.Interrupts, m.Switches)
	case m != record.Machine{}:
		e.Machine = &m
	}
	return nil
}
