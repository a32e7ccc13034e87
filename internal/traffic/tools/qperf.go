package tools

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
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

// qperf makes streams (tcp_bw, udp_bw) and ping-pong (tcp_lat, udp_lat). Checked
// against 0.4.11.
//
// It has no warm-up, and reports only a mean latency. So ping-pong has a rate and a mean, but no percentiles. Its listening
// port is for control. Data uses the next port if the workload sets a port, and otherwise one that the server chooses.
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

// ServerArgv makes the server print when it listens, which is not the default.
func (qperf) ServerArgv(_ spec.Workload, _ netip.Addr, port uint16) []string {
	return []string{"qperf", "--debug", "--listen_port", strconv.Itoa(int(port))}
}

func (qperf) ServerReady(line []byte) bool {
	return string(bytes.TrimSpace(line)) == "ready for requests"
}

// ClientArgv ignores cc: qperf cannot set a congestion control.
func (q qperf) ClientArgv(w spec.Workload, addr netip.Addr, port uint16, _, _ string) []string {
	t := w.Traffic()
	argv := []string{"qperf", "--listen_port", strconv.Itoa(int(port))}
	if t.Port != 0 {
		argv = append(argv, "--ip_port", strconv.Itoa(int(port)+1))
	}
	return append(argv,
		// Print every figure, in units that do not depend on its size.
		"-vv", "--unify_units", "--precision", "9",
		"--time", strconv.FormatInt(wholeSeconds(time.Duration(t.Duration)), 10),
		"--msg_size", strconv.Itoa(int(t.Size)),
		addr.String(), q.test(w),
	)
}

// test returns the name of qperf's test.
func (qperf) test(w spec.Workload) string {
	if w.Stream != nil {
		return w.Stream.Protocol + "_bw"
	}
	return w.PingPong.Protocol + "_lat"
}

func (qperf) Lead(spec.Workload) time.Duration { return 0 }

func (q qperf) Parse(w spec.Workload, output []byte) (record.Endpoint, error) {
	e, err := q.parse(w, output)
	return parsed("qperf", e, err)
}

var (
	// qperfHead is the heading of a test, "tcp_lat:".
	qperfHead = regexp.MustCompile(`^(\w+):$`)
	// qperfLine matches a figure, "    latency          =   4737.33828 ns", or for conf a text.
	qperfLine = regexp.MustCompile(`^    (\w+) += *(.*)$`)
	// qperfNames are the names of figures of 0.4.11: results and counters, options, and those of conf.
	qperfNames = regexp.MustCompile(`^((loc|rem)_)?((send|recv)_)?(latency|bw|msg_rate|cost|cpus_(used|user|intr|kernel|iowait)|real_time|cpu_time|bytes|msgs|errors|max_cqe` +
		`|time|timeout|msg_size|mtu_size|sock_buf_size|no_msgs|rate|static_rate|port|ip_port|alt_port|id|(cpu_)?affinity|flip|poll_mode|cq_poll|access_recv|rd_atomic|service_level|sl|src_path_bits|use_cm|precision` +
		`|node|cpu|os|qperf)$`)
)

// qperfTest is a test in an output, and its figures.
type qperfTest struct {
	name  string // "tcp_lat"
	line  int    // of its heading
	lines map[string]string
}

// qperfTests finds the tests in an output. One qperf may run several. conf and quit measure nothing.
func qperfTests(output []byte) (tests []qperfTest, err error) {
	number := 0
	for raw := range bytes.Lines(output) {
		number++
		line := string(bytes.TrimRight(raw, "\r\n"))
		head, figure := qperfHead.FindStringSubmatch(line), qperfLine.FindStringSubmatch(line)
		switch {
		case len(tests) > 0 && (line != "" && strings.Contains("0123456789.,", line[len(line)-1:]) || strings.TrimSpace(line) == "") && len(line) == len(raw):
			return nil, halfLine(number, line)
		case len(tests) == 0 && figure != nil:
			return nil, fmt.Errorf("line %d belongs to no test, because no heading precedes it: %.200q", number, line)
		case head != nil:
			tests = append(tests, qperfTest{name: head[1], line: number, lines: make(map[string]string)})
		case len(tests) == 0, strings.TrimSpace(line) == "": // printed by a shell before
		case figure == nil:
			return nil, fmt.Errorf("line %d: %.200s", number, strings.TrimSpace(line))
		case !qperfNames.MatchString(figure[1]):
			return nil, fmt.Errorf("line %d: qperf has no figure %.100q", number, figure[1])
		default:
			of := tests[len(tests)-1]
			if _, twice := of.lines[figure[1]]; twice {
				return nil, fmt.Errorf("line %d: %s has %s twice, and qperf prints it once: give its output as it was printed, with a heading for each run", number, of.name, figure[1])
			}
			of.lines[figure[1]] = strings.TrimSpace(figure[2])
		}
	}
	return slices.DeleteFunc(tests, func(t qperfTest) bool { return t.name == "conf" || t.name == "quit" }), nil
}

func (q qperf) parse(w spec.Workload, output []byte) (record.Endpoint, error) {
	tests, err := qperfTests(output)
	switch {
	case err != nil:
		return record.Endpoint{}, err
	case len(tests) != 1 || tests[0].name != q.test(w):
		return record.Endpoint{}, fmt.Errorf("there is no %s in its output, which begins with %.200q", q.test(w), output)
	}
	return qperfAll(w, tests[0])
}

// qperfAll reads a test that has printed every figure.
func qperfAll(w spec.Workload, test qperfTest) (record.Endpoint, error) {
	var e record.Endpoint
	f := qperfFigures{lines: test.lines}
	if w.PingPong != nil {
		e.Seconds = f.number("loc_real_time", "ns") / 1e9
		e.Messages, e.Bytes = f.count("loc_recv_msgs", ""), f.count("loc_recv_bytes", "bytes")
		// The latency is one-way: the time divided by the messages that both ends have received (calc_results in qperf.c). A
		// round trip is twice that. It is also the time divided by the messages of one end, from which the rate is computed.
		// The two must agree.
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
			e.Messages = 0 // a message is only what one read returned
		}
	}
	if f.err != nil {
		return e, f.err
	}
	return e, plausible(e)
}

// qperfFigures holds the lines of an output, and the first error in them.
type qperfFigures struct {
	lines map[string]string
	err   error
}

func (f *qperfFigures) number(name, unit string) float64 {
	text, ok := f.lines[name]
	if !ok {
		f.fail(fmt.Errorf("its output has no %s: it ended too early, or comes from a version other than 0.4", name))
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

// qperfUnits maps the units of each kind of figure. Those of bytes and bits are powers of 1000 (view_band in qperf.c), those of
// sizes powers of 1024.
var qperfUnits = map[string]map[string]float64{
	"s": {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "sec": 1},
	"bit/s": {
		"bytes/sec": 8, "KB/sec": 8e3, "MB/sec": 8e6, "GB/sec": 8e9, "TB/sec": 8e12,
		"bits/sec": 1, "Kb/sec": 1e3, "Mb/sec": 1e6, "Gb/sec": 1e9, "Tb/sec": 1e12,
	},
	"bytes": {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20},
}

// quantity parses a figure with its unit, "6.31 us" or "64 KiB (65,536)". It returns 0 if there is none.
func (t qperfTest) quantity(name, of string) (float64, error) {
	text, ok := t.lines[name]
	if !ok {
		return 0, nil
	}
	value, rest, _ := strings.Cut(text, " ")
	unit, exact, _ := strings.Cut(strings.TrimSpace(rest), " ")
	v, err := qperfNumber(value)
	scale, known := qperfUnits[of][unit]
	if err != nil || !known || !(v >= 0) || math.IsInf(v*scale, 0) {
		return 0, fmt.Errorf("%s of %q, want a number in %s", name, text, strings.Join(slices.Sorted(maps.Keys(qperfUnits[of])), ", "))
	}
	if n, err := qperfNumber(strings.Trim(exact, "()")); exact != "" && err == nil {
		return n, nil
	}
	return v * scale, nil
}

// qperfThousands matches a number with commas between thousands. qperf writes no other commas: one in "38,2" is somebody else's
// decimal comma, and 382 would be wrong.
var qperfThousands = regexp.MustCompile(`^\d{1,3}(,\d{3})+(\.\d+)?$`)

func qperfNumber(text string) (float64, error) {
	if qperfThousands.MatchString(text) {
		text = strings.ReplaceAll(text, ",", "")
	}
	return strconv.ParseFloat(text, 64)
}

// workload returns the traffic of a test.
func (t qperfTest) workload() (spec.Workload, error) {
	protocol, kind, _ := strings.Cut(t.name, "_")
	traffic := &spec.Traffic{Tool: spec.ToolQperf, Protocol: protocol, Connections: 1}
	w := spec.Workload{PingPong: traffic}
	if kind == "bw" {
		w = spec.Workload{Stream: traffic}
	}
	if protocol != "tcp" && protocol != "udp" || kind != "bw" && kind != "lat" {
		return w, fmt.Errorf("the test %s is not read: tcp_bw, udp_bw, tcp_lat and udp_lat are", t.name)
	}
	size, err := t.quantity("msg_size", "bytes")
	if err == nil && size > 1<<20 {
		err = fmt.Errorf("messages of %g bytes", size)
	}
	traffic.Size = spec.Bytes(size)
	return w, err
}

// isQperf recognises the heading of a test, followed by a figure.
func isQperf(output []byte) bool {
	var before []byte
	for line := range bytes.Lines(output) {
		line = bytes.TrimRight(line, "\r\n")
		if qperfHead.Match(before) && (qperfLine.Match(line) || bytes.Contains(line, []byte("failed to"))) {
			return true
		}
		before = line
	}
	return false
}

// readQperf reads the tests in an output. If the same test occurs again, it is another run.
func readQperf(output []byte, known Known) ([]Reading, error) {
	tests, err := qperfTests(output)
	if err != nil {
		return nil, err
	}
	var all []Reading
	for _, t := range tests {
		r, err := t.read(known.Window)
		if err == nil {
			if i := slices.IndexFunc(all, func(r Reading) bool { return r.Test == t.name }); i >= 0 {
				err = all[i].add(r)
			} else {
				all = append(all, r)
			}
		}
		if err != nil {
			return nil, fmt.Errorf("%s in line %d: %w", t.name, t.line, err)
		}
	}
	if len(all) == 0 {
		return nil, errors.New("it has no test of qperf that measures something")
	}
	for _, r := range all {
		if err := qperfLoop(r, tests); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// qperfSpread is the largest ratio between the figures of two runs of the same traffic.
const qperfSpread = 3

// qperfLoop returns an error if the runs of a test may be a loop over sizes (-oo msg_size:1:64K:*2), which qperf prints only
// with -v: all runs of a test come before those of the next test, or their figures are far apart.
func qperfLoop(r Reading, tests []qperfTest) error {
	if len(r.Runs) < 2 || r.Workload.Traffic().Size != 0 {
		return nil
	}
	first := slices.IndexFunc(tests, func(t qperfTest) bool { return t.name == r.Test })
	inOrder := tests[min(first+1, len(tests)-1)].name == r.Test && slices.ContainsFunc(tests, func(t qperfTest) bool { return t.name != r.Test })
	least, most := math.Inf(1), 0.0
	for _, run := range r.Runs {
		e := run.Pairs[0]
		v := e.BitsPerSecond + e.Percentiles[metrics.LatencyMean]
		least, most = min(least, v), max(most, v)
	}
	if inOrder || most > qperfSpread*least {
		return fmt.Errorf("%s occurs %d times, from line %d on, and may be of messages of several sizes (-oo msg_size:…), which it does not print: run qperf with -v, or give a file for each run",
			r.Test, len(r.Runs), tests[first].line)
	}
	return nil
}

// read reads every figure of a test if all are there. Otherwise it reads the only figure of a plain run, which does not print
// its window.
func (t qperfTest) read(window time.Duration) (Reading, error) {
	w, err := t.workload()
	if err != nil {
		return Reading{}, err
	}
	seconds, err := t.quantity("time", "s")
	if err != nil {
		return Reading{}, err
	}
	if seconds >= 1e-3 && seconds < 1e6 {
		window = time.Duration(seconds * 1e9)
	}
	id := ""
	e, err := qperfAll(w, t)
	if err != nil {
		e, err = t.plain(w, window, err)
	} else {
		id = fmt.Sprint(t.name, t.lines)
	}
	if err != nil {
		return Reading{}, err
	}
	traffic := w.Traffic()
	traffic.Duration = spec.Duration(window)
	if traffic.Duration <= 0 {
		traffic.Duration = spec.Duration(math.Round(e.Seconds) * 1e9)
	}
	return Reading{Workload: w, Test: t.name, Runs: []Run{{ID: id, Pairs: []record.Endpoint{e}}}}, nil
}

// plain computes messages and bytes from the figure and the window. why is the error of qperfAll.
func (t qperfTest) plain(w spec.Workload, window time.Duration, why error) (record.Endpoint, error) {
	oneWay, err := t.quantity("latency", "s")
	bits, sent := 0.0, 0.0
	for name, to := range map[string]*float64{"bw": &bits, "recv_bw": &bits, "send_bw": &sent} {
		if t.lines[name] == "" {
			continue
		}
		var wrong error
		*to, wrong = t.quantity(name, "bit/s")
		err = errors.Join(err, wrong)
	}
	switch {
	case err != nil:
		return record.Endpoint{}, err
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
		e.Messages, e.Bytes = uint64(math.Round(n)), uint64(math.Round(n*float64(w.PingPong.Size)))
		e.Percentiles = map[string]float64{metrics.LatencyMean: 2 * oneWay}
		return e, nil
	}
	e.BitsPerSecond, e.Bytes = bits, uint64(n)
	if sent > 0 {
		// Both have three digits.
		if bits > 1.01*sent {
			return record.Endpoint{}, fmt.Errorf("it received %g bit/s and sent %g", bits, sent)
		}
		loss := max(0, 1-bits/sent)
		e.LossShare = &loss
	}
	return e, nil
}
