package tools

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"time"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// qperf makes streams (tcp_bw, udp_bw) and ping-pong (tcp_lat, udp_lat). Checked
// against 0.4.11.
//
// It has no warm-up, and reports only a mean latency. So ping-pong has a rate and a mean, and no
// percentiles. Its port is for control; the data uses one that the server chooses.
type qperf struct{}

func (qperf) Check(w spec.Workload) error {
	if w.Stream == nil && w.PingPong == nil {
		return fmt.Errorf("qperf makes stream and pingpong workloads only, not %s", w.Kind())
	}
	if n := w.Traffic().Connections; n != 1 {
		return fmt.Errorf("qperf makes one connection a pair, not %d", n)
	}
	return nil
}

// ServerArgv makes the server print when it listens, which it does not do by default.
func (qperf) ServerArgv(_ spec.Workload, _ netip.Addr, port uint16) []string {
	return []string{"qperf", "--debug", "--listen_port", strconv.Itoa(int(port))}
}

func (qperf) ServerReady(line []byte) bool {
	return string(bytes.TrimSpace(line)) == "ready for requests"
}

// ClientArgv ignores cc: qperf cannot set a congestion control.
func (q qperf) ClientArgv(w spec.Workload, addr netip.Addr, port uint16, _, _ string) []string {
	t := w.Traffic()
	return []string{
		"qperf", "--listen_port", strconv.Itoa(int(port)),
		// Every figure, in units that do not change with its size.
		"-vv", "--unify_units", "--precision", "9",
		"--time", strconv.FormatInt(wholeSeconds(time.Duration(t.Duration)), 10),
		"--msg_size", strconv.Itoa(int(t.Size)),
		addr.String(), q.test(w),
	}
}

// test is the name of qperf's test.
func (qperf) test(w spec.Workload) string {
	if w.Stream != nil {
		return w.Stream.Protocol + "_bw"
	}
	return w.PingPong.Protocol + "_lat"
}

func (qperf) Lead(spec.Workload) time.Duration { return 0 }

func (q qperf) Parse(w spec.Workload, output []byte) (record.Endpoint, error) {
	e, err := q.parse(w, output)
	if err != nil {
		return record.Endpoint{}, fmt.Errorf("qperf: %w", err)
	}
	return e, nil
}

// qperfLine is a figure: "    latency          =   4737.33828 ns".
var qperfLine = regexp.MustCompile(`^    (\w+) += +([0-9.]+) (.*)\n$`)

func (q qperf) parse(w spec.Workload, output []byte) (record.Endpoint, error) {
	var e record.Endpoint
	f := qperfFigures{lines: make(map[string]string)}
	began := false
	for line := range bytes.Lines(output) {
		switch m := qperfLine.FindSubmatch(line); {
		case !began:
			began = string(line) == q.test(w)+":\n"
		case m != nil:
			f.lines[string(m[1])] = string(m[2]) + " " + string(bytes.TrimSpace(m[3]))
		case len(bytes.TrimSpace(line)) > 0:
			return e, errors.New(string(bytes.TrimSpace(line)[:min(200, len(bytes.TrimSpace(line)))]))
		}
	}
	if !began {
		return e, fmt.Errorf("there is no %s in its output, which begins with %.200q", q.test(w), output)
	}
	if w.PingPong != nil {
		e.Seconds = f.number("loc_real_time", "ns") / 1e9
		e.Messages, e.Bytes = f.count("loc_recv_msgs", ""), f.count("loc_recv_bytes", "bytes")
		// Its latency is one-way: the time divided by the messages that both ends have
		// received (calc_results in qperf.c). A round trip is twice that. It is also the
		// time divided by the messages of one end, from which the rate is computed. The
		// two have to agree.
		oneWay := f.number("latency", "ns") / 1e9
		trip := e.Seconds / float64(e.Messages)
		e.Percentiles = map[string]float64{metrics.LatencyMean: trip}
		if f.err == nil && math.Abs(2*oneWay-trip) > 0.01*trip+10*trip/float64(e.Messages) {
			return e, fmt.Errorf("its latency is %g s one way, and a round trip takes %g s", oneWay, trip)
		}
	} else {
		e.Seconds = f.number("recv_real_time", "ns") / 1e9
		e.Messages, e.Bytes = f.count("recv_msgs", ""), f.count("recv_bytes", "bytes")
		e.BitsPerSecond = float64(e.Bytes) * 8 / e.Seconds
		if sent := f.count("send_msgs", ""); w.Stream.Protocol == "udp" && sent > e.Messages {
			e.Lost = sent - e.Messages
		}
		if w.Stream.Protocol == "tcp" {
			e.Messages = 0 // as much as one read gave
		}
	}
	if f.err != nil {
		return e, f.err
	}
	return e, plausible(e)
}

// qperfFigures has the lines of an output, and the first thing that is wrong with them.
type qperfFigures struct {
	lines map[string]string
	err   error
}

func (f *qperfFigures) number(name, unit string) float64 {
	text, ok := f.lines[name]
	if !ok {
		f.fail(fmt.Errorf("its output has no %s: it ended too early, or is that of another version than 0.4", name))
		return 0
	}
	value, got, _ := strings.Cut(text, " ")
	v, err := strconv.ParseFloat(value, 64)
	if err != nil || got != unit {
		f.fail(fmt.Errorf("%s of %q, want a number in %q", name, text, unit))
		return 0
	}
	return v
}

func (f *qperfFigures) count(name, unit string) uint64 {
	v := f.number(name, unit)
	if v != math.Trunc(v) || v >= 1<<53 {
		f.fail(fmt.Errorf("%s of %g", name, v))
		return 0
	}
	return uint64(v)
}

func (f *qperfFigures) fail(err error) {
	if f.err == nil {
		f.err = err
	}
}

var (
	// qperfTest is the heading of a test, "tcp_lat:".
	qperfTest = regexp.MustCompile(`(?m)^(tcp|udp)_(bw|lat):$`)
	// qperfShort is a figure with the unit that suits it: "    latency  =  6.31 us".
	qperfShort = regexp.MustCompile(`(?m)^    (latency|bw|recv_bw|msg_size|time) += +([0-9.]+) (\S+)$`)
	// qperfUnits by name. Bytes and bits are of 1000 (view_band in qperf.c), sizes of 1024.
	qperfUnits = map[string]float64{
		"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "sec": 1,
		"bytes/sec": 8, "KB/sec": 8e3, "MB/sec": 8e6, "GB/sec": 8e9, "TB/sec": 8e12,
		"bits/sec": 1, "Kb/sec": 1e3, "Mb/sec": 1e6, "Gb/sec": 1e9, "Tb/sec": 1e12,
		"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20,
	}
)

func isQperf(output []byte) bool { return qperfTest.Match(output) }

// readQperf reads every figure if they are all there. Otherwise it reads the one of a plain run,
// which prints its window only with -v.
func readQperf(output []byte, window time.Duration) (Reading, error) {
	tests := qperfTest.FindAllSubmatch(output, -1)
	if len(tests) != 1 {
		return Reading{}, fmt.Errorf("it has %d tests, want one in a file", len(tests))
	}
	t := spec.Traffic{Tool: spec.ToolQperf, Protocol: string(tests[0][1]), Connections: 1}
	w := spec.Workload{PingPong: &t}
	if string(tests[0][2]) == "bw" {
		w = spec.Workload{Stream: &t}
	}
	short := make(map[string]float64)
	for _, m := range qperfShort.FindAllSubmatch(output, -1) {
		v, err := strconv.ParseFloat(string(m[2]), 64)
		if unit, ok := qperfUnits[string(m[3])]; err == nil && ok {
			short[string(m[1])] = v * unit
		}
	}
	if short["msg_size"] > 1<<20 {
		return Reading{}, fmt.Errorf("messages of %g bytes", short["msg_size"])
	}
	t.Size = spec.Bytes(short["msg_size"])
	if seconds := short["time"]; seconds >= 1e-3 && seconds < 1e6 {
		window = time.Duration(seconds * 1e9)
	}
	e, err := qperf{}.parse(w, output)
	if err != nil {
		e, err = qperfPlain(w, short, window, err)
	}
	if err != nil {
		return Reading{}, err
	}
	t.Duration = spec.Duration(window)
	if t.Duration <= 0 {
		t.Duration = spec.Duration(math.Round(e.Seconds) * 1e9)
	}
	return Reading{Workload: w, Runs: []Run{{Pairs: []record.Endpoint{e}}}}, nil
}

// qperfPlain computes messages and bytes from the figure and the window.
func qperfPlain(w spec.Workload, short map[string]float64, window time.Duration, why error) (record.Endpoint, error) {
	oneWay, bits := short["latency"], short["bw"]+short["recv_bw"]
	switch {
	case w.PingPong != nil && !(oneWay > 0), w.Stream != nil && !(bits > 0):
		return record.Endpoint{}, why
	case window <= 0:
		return record.Endpoint{}, errNoWindow
	}
	e := record.Endpoint{Seconds: window.Seconds()}
	n := bits / 8 * e.Seconds
	if w.PingPong != nil {
		n = e.Seconds / (2 * oneWay)
	}
	if !(n >= 1 && n < 1<<53) {
		return record.Endpoint{}, fmt.Errorf("%g messages or bytes in %s", n, window)
	}
	if w.PingPong != nil {
		e.Messages, e.Bytes = uint64(math.Round(n)), uint64(math.Round(n)*short["msg_size"])
		e.Percentiles = map[string]float64{metrics.LatencyMean: 2 * oneWay}
		return e, nil
	}
	e.BitsPerSecond, e.Bytes = bits, uint64(n)
	return e, nil
}
