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

// sockperf makes streams (throughput), ping-pong and under-load. Checked against 3.7; the formats are those of client.cpp,
// which did not change up to 3.10.
//
// The course of a run is fixed: a client sleeps for 2 s, then runs for --time. Ping-pong and under-load exclude the first 400
// ms and the last 50 ms of that from their figures; throughput excludes nothing. None of it can be set (--pre-warmup-wait only
// prolongs the sleep), so a workload's warm-up has no effect. Lead tells when the window begins.
type sockperf struct{}

const (
	sockperfSleep    = 2 * time.Second
	sockperfWarmup   = 400 * time.Millisecond // TEST_START_WARMUP_MSEC
	sockperfCooldown = 50 * time.Millisecond  // TEST_END_COOLDOWN_MSEC
)

func (sockperf) Check(w spec.Workload) error {
	t := w.Traffic()
	if t.Connections != 1 {
		return fmt.Errorf("sockperf makes one connection a pair, not %d", t.Connections)
	}
	if w.Stream != nil && t.Protocol == "udp" {
		return errors.New("sockperf reports how much UDP it sent, not how much arrived: use iperf3")
	}
	return nil
}

func (s sockperf) ServerArgv(w spec.Workload, addr netip.Addr, port uint16) []string {
	return s.argv("server", w, addr, port)
}

// ServerReady waits for what a server prints once its sockets are bound: "sockperf: [tid 7] using recvfrom() to block on
// socket(s)".
func (sockperf) ServerReady(line []byte) bool {
	return bytes.Contains(line, []byte("to block on socket(s)"))
}

// ClientArgv ignores cc: sockperf cannot set a congestion control.
func (s sockperf) ClientArgv(w spec.Workload, addr netip.Addr, port uint16, _, _ string) []string {
	t := w.Traffic()
	run := time.Duration(t.Duration)
	if w.Stream == nil {
		run += sockperfWarmup + sockperfCooldown
	}
	length := []string{"--time", strconv.FormatInt(wholeSeconds(run), 10)}
	switch {
	case w.Stream != nil:
		return append(s.argv("throughput", w, addr, port), length...)
	case w.PingPong != nil:
		return append(s.argv("ping-pong", w, addr, port), append(length, "--full-rtt")...)
	}
	rate := "max"
	if t.Rate > 0 {
		rate = strconv.Itoa(t.Rate)
	}
	// Request an answer to every message, so that the whole rate is measured.
	return append(s.argv("under-load", w, addr, port), append(length, "--full-rtt", "--mps", rate, "--reply-every", "1")...)
}

// argv returns the arguments that a client and its server share. Both need the size, because the server accepts no larger
// messages.
func (sockperf) argv(mode string, w spec.Workload, addr netip.Addr, port uint16) []string {
	t := w.Traffic()
	argv := []string{
		"sockperf", mode, "--ip", addr.String(), "--port", strconv.Itoa(int(port)),
		"--msg-size", strconv.Itoa(int(t.Size)),
	}
	if t.Protocol == "tcp" {
		argv = append(argv, "--tcp")
	}
	return argv
}

func (sockperf) Lead(w spec.Workload) time.Duration {
	if w.Stream != nil {
		return sockperfSleep
	}
	return sockperfSleep + sockperfWarmup
}

// Parse reads the lines that it knows. The figures of a stream are the sender's, for the whole run; over TCP, those of the
// receiver differ only by the socket buffers. Latencies are round trips of the messages that came back.
func (s sockperf) Parse(w spec.Workload, output []byte) (record.Endpoint, error) {
	e, err := parseSockperf(w, output)
	return parsed("sockperf", e, err)
}

func parseSockperf(w spec.Workload, output []byte) (record.Endpoint, error) {
	e := record.Endpoint{Percentiles: make(map[string]float64)}
	var p sockperfOutput
	number := 0
	for raw := range bytes.Lines(sockperfPlain(output)) {
		number++
		line := strings.TrimSpace(string(raw))
		if line == "" {
			continue
		}
		p.last = line
		// A truncated line may end with a truncated number.
		if bytes.HasSuffix(raw, []byte("\n")) {
			p.line(line, &e)
		}
		if p.again {
			return e, &lineError{number, fmt.Errorf("results of another run follow, without its heading: %.200q", line)}
		}
	}
	complete := p.valid && p.dropped && len(e.Percentiles) == 5
	if w.Stream != nil {
		complete = p.total
	}
	switch {
	case complete:
	case p.unexpected != "":
		return e, fmt.Errorf("its output is not understood at %.200q", p.unexpected)
	default:
		return e, fmt.Errorf("its output ends too early, after %.200q", p.last)
	}
	size := uint64(max(1, w.Traffic().Size))
	if e.Messages > math.MaxInt64/size {
		return e, fmt.Errorf("%d messages", e.Messages)
	}
	e.Bytes = e.Messages * size
	if p.halves {
		for name := range e.Percentiles {
			e.Percentiles[name] *= 2
		}
	}
	if w.Stream != nil {
		e.Percentiles = nil
		e.BitsPerSecond = float64(e.Bytes) * 8 / e.Seconds
	}
	if t := w.UnderLoad; t != nil && float64(p.sent) < sockperfReached*float64(t.Rate)*e.Seconds {
		e.Warnings = append(e.Warnings, record.Warnf(record.WarnGeneratorBound,
			"the rate that was set was not reached: sockperf sent %.0f messages a second, not %d", float64(p.sent)/e.Seconds, t.Rate))
	}
	return e, plausible(e)
}

// sockperfReached is the share of the set rate that has to be sent for the rate to count as reached.
const sockperfReached = 0.99

// sockperfOutput holds what was found in a client's output so far.
type sockperfOutput struct {
	total          bool // "Total of …", all that a stream reports
	valid, dropped bool
	again          bool   // results of another run follow
	halves         bool   // latencies are half round trips, as without --full-rtt
	sent           uint64 // messages within the valid duration
	// unexpected is the first unknown line, last the last line.
	unexpected, last string
}

func (p *sockperfOutput) line(line string, e *record.Endpoint) {
	rest, _ := strings.CutPrefix(line, "sockperf: ")
	scan := func(format string, into ...any) bool {
		_, err := fmt.Sscanf(rest, format, into...)
		return err == nil
	}
	var percentile, usec float64
	switch {
	case scan("Total of %d messages sent in %g sec", &e.Messages, &e.Seconds):
		p.again, p.total = p.total || p.valid, true
	case scan("[Valid Duration] RunTime=%g sec; SentMessages=%d; ReceivedMessages=%d", &e.Seconds, &p.sent, &e.Messages):
		p.again, p.valid = p.total || p.valid, true
	case scan("# dropped messages = %d", &e.Lost):
		p.dropped = true
	case scan("Summary: Round trip is %g usec", &usec), scan("====> avg-rtt=%g", &usec): // the file of --full-log has no summary
		e.Percentiles[metrics.LatencyMean] = usec / 1e6
	case scan("Summary: Latency is %g usec", &usec), scan("====> avg-latency=%g", &usec), scan("====> avg-lat=%g", &usec):
		e.Percentiles[metrics.LatencyMean], p.halves = usec/1e6, true
	case scan("---> <MAX> observation = %g", &usec):
		e.Percentiles[metrics.LatencyMax] = usec / 1e6
	case scan("---> percentile %g = %g", &percentile, &usec):
		switch percentile {
		case 50:
			e.Percentiles[metrics.LatencyP50] = usec / 1e6
		case 99:
			e.Percentiles[metrics.LatencyP99] = usec / 1e6
		case 99.9:
			e.Percentiles[metrics.LatencyP999] = usec / 1e6
		}
	case p.unexpected == "" && !sockperfSays(rest):
		p.unexpected = line
	}
}

// sockperfSays reports whether a line is known but not used.
func sockperfSays(line string) bool {
	for _, start := range []string{
		"== version #", "sockperf[CLIENT] send on:", "[ 0] IP =", "Warmup stage", "Starting test",
		"Test end", "[Total Run]", "=========", "====>", "Total ", "Summary: Message Rate", "Summary: BandWidth",
		"NOTE: ", "---> <MIN> observation",
		"------", "test was performed using", "txTime, rxTime", // of --full-log
	} {
		if strings.HasPrefix(line, start) {
			return true
		}
	}
	return sockperfTimes.MatchString(line)
}

// sockperfPlain removes the colours, which sockperf prints even without a terminal.
func sockperfPlain(output []byte) []byte { return sockperfColour.ReplaceAll(output, nil) }

var (
	sockperfColour = regexp.MustCompile(`\x1b\[[0-9;]*m`)
	// sockperfPeer is "[ 0] IP = 127.0.0.1       PORT =  5302 # TCP".
	sockperfPeer = regexp.MustCompile(`(?m)^\[ *\d+\] IP = +(\S+) .*# (TCP|UDP)`)
	// sockperfRun is "[Total Run] RunTime=1.003 sec; Warm up time=400 msec; SentMessages=98094; ReceivedMessages=98093".
	sockperfRun = regexp.MustCompile(`\[Total Run\] RunTime=([0-9.]+) sec;.* SentMessages=(\d+); ReceivedMessages=(\d+)`)
	// sockperfValid is "[Valid Duration] RunTime=9.550 sec; SentMessages=95520; ReceivedMessages=95500", and what was dropped.
	sockperfValid = regexp.MustCompile(`(?s)\[Valid Duration\] RunTime=([0-9.]+) sec; SentMessages=(\d+); ReceivedMessages=(\d+)\n.*# dropped messages = (\d+);`)
	// sockperfMean is "====> avg-rtt=1344.352 (std-dev=2119.244)".
	sockperfMean = regexp.MustCompile(`====> avg-(rtt|latency|lat)= *([0-9.]+)`)
	// sockperfSent is "Total of 620626 messages sent in 1.001 sec".
	sockperfSent = regexp.MustCompile(`Total of (\d+) messages sent in ([0-9.]+) sec`)
	// sockperfWidth is "BandWidth is 827.533 MBps", in units of 2^20 bytes.
	sockperfWidth = regexp.MustCompile(`(?s)Message Rate is (\d+) \[msg/sec\].*BandWidth is ([0-9.]+) MBps`)
	// sockperfNote is "NOTE: test was performed, using msg-size=1400.".
	sockperfNote = regexp.MustCompile(`using msg-size=(\d+)\.`)
	// sockperfUsed is "--mps=100 --burst=1 --reply-every=1 --msg-size=64 --time=20", of --full-log.
	sockperfUsed = regexp.MustCompile(`test was performed using the following parameters: (.*)`)
	// sockperfOption is one of these options.
	sockperfOption = regexp.MustCompile(`--([a-z-]+)(?:=(\S+))?`)
	// sockperfTimes is "2.061917619, 2.061974462", of --full-log.
	sockperfTimes = regexp.MustCompile(`^\d+\.\d+, *\d+\.\d+$`)
	// sockperfHead begins an output.
	sockperfHead = regexp.MustCompile(`(?m)^sockperf: (?:\x1b\[[0-9;]*m)?== version #|^-+\ntest was performed using the following parameters:`)
	// sockperfFigure is a line of the results.
	sockperfFigure = regexp.MustCompile(`(?m)^sockperf: .*(?:\[(?:Total Run|Valid Duration)\]|avg-(?:rtt|lat)|Summary: |observation|percentile|Total of|# dropped).*$`)
	// sockperfVersion is "sockperf: == version #3.7-no.git == ".
	sockperfVersion = regexp.MustCompile(`== version #(\S+)`)
)

func isSockperf(output []byte) bool {
	return bytes.Contains(output, []byte("sockperf: ")) || bytes.Contains(output, []byte("sockperf["))
}

// readSockperf recognises the kind of workload by the output, unless the user has given it.
func readSockperf(output []byte, known Known) (Reading, error) {
	plain := sockperfPlain(output)
	t := spec.Traffic{Tool: spec.ToolSockperf, Connections: 1}
	switch peers := sockperfPeer.FindAllSubmatch(plain, -1); len(peers) {
	case 0: // the parser returns what is there instead
	case 1:
		t.IP, t.Protocol = ipVersion(string(peers[0][1])), strings.ToLower(string(peers[0][2]))
	default:
		return Reading{}, fmt.Errorf("it has %d connections, and one result for all of them", len(peers))
	}
	options := sockperfOptions(plain)
	w, length := spec.Workload{PingPong: &t}, ""
	if m := sockperfSent.FindSubmatch(plain); m != nil {
		w, length = spec.Workload{Stream: &t}, string(m[2])
		t.Size = sockperfSize(plain)
		if t.Size == 0 {
			return Reading{}, errors.New("it does not say how large its messages are")
		}
	} else if m := sockperfRun.FindSubmatch(plain); m != nil {
		length = string(m[1])
		load, err := sockperfLoad(plain, options, known.Kind)
		if err != nil {
			return Reading{}, err
		}
		if load {
			w = spec.Workload{UnderLoad: &t}
		}
	}
	if n, err := strconv.Atoi(options["msg-size"]); err == nil {
		t.Size = spec.Bytes(n)
	}
	if err := (sockperf{}).Check(w); err != nil {
		return Reading{}, err
	}
	e, err := parseSockperf(w, output)
	if err != nil {
		return Reading{}, err
	}
	if length == "" {
		return Reading{}, errors.New("it has no [Total Run], which says how long it ran: give the whole output")
	}
	seconds, err := strconv.ParseFloat(length, 64)
	if err != nil || !(seconds >= 0.5 && seconds < 1e6) {
		return Reading{}, fmt.Errorf("a run of %q s", length)
	}
	t.Duration = spec.Duration(math.Round(seconds) * 1e9)
	if t.Size == 0 {
		e.Bytes = 0 // the output lacks the size of a message
	}
	r := Reading{Workload: w, Conditions: make(map[string]string), Runs: []Run{{Pairs: []record.Endpoint{e}}}}
	if m := sockperfVersion.FindSubmatch(plain); m != nil {
		r.Version = string(m[1])
	}
	for _, name := range []string{"mps", "burst", "reply-every"} {
		if value, ok := options[name]; ok {
			r.Conditions["--"+name] = value
		}
	}
	return r, nil
}

// sockperfOptions returns the options that the file of --full-log lists.
func sockperfOptions(plain []byte) map[string]string {
	options := make(map[string]string)
	if m := sockperfUsed.FindSubmatch(plain); m != nil {
		for _, o := range sockperfOption.FindAllSubmatch(m[1], -1) {
			options[string(o[1])] = string(o[2])
		}
	}
	return options
}

// sockperfCounts holds what sockperf counted in a run.
type sockperfCounts struct {
	sent, received            float64 // in total
	seconds                   float64 // of the measured time, to which the fields below refer, too
	validSent, valid, dropped float64
	trip                      float64 // mean round trip, s
}

func (c *sockperfCounts) read(plain []byte) (ok bool) {
	run, valid := sockperfRun.FindSubmatch(plain), sockperfValid.FindSubmatch(plain)
	if run == nil || valid == nil {
		return false
	}
	err := numbers(map[*float64]string{
		&c.sent: string(run[2]), &c.received: string(run[3]), &c.seconds: string(valid[1]),
		&c.validSent: string(valid[2]), &c.valid: string(valid[3]), &c.dropped: string(valid[4]),
	})
	if m := sockperfMean.FindSubmatch(plain); m != nil && err == nil {
		err = numbers(map[*float64]string{&c.trip: string(m[2])})
		c.trip /= 1e6
		if string(m[1]) != "rtt" {
			c.trip *= 2
		}
	}
	return err == nil
}

// inFlight returns the mean number of messages in flight: the sum of their round trips divided by the time.
func (c *sockperfCounts) inFlight() float64 { return c.valid * c.trip / c.seconds }

// sockperfLoad reports whether a run is of under-load, by everything that its output says about the client:
//   - a client of ping-pong has one message in flight at a time, and sends the next one when that has come back or is lost;
//   - it asks for an answer to every message, which under-load does only if told so (--reply-every=1);
//   - it continues after a lost message, which sockperf counts as dropped, so dropped messages account for all unanswered ones.
func sockperfLoad(plain []byte, options map[string]string, kind string) (bool, error) {
	var c sockperfCounts
	if !c.read(plain) {
		return false, nil // the parser returns what is missing
	}
	unanswered := c.sent > c.received+1 && !(c.dropped > 0 && c.validSent-c.valid <= c.dropped+1)
	load := unanswered || c.inFlight() > 1.1
	if n, err := strconv.Atoi(options["reply-every"]); err == nil && n > 1 {
		load = true
	}
	switch kind {
	case "pingpong":
		if load {
			return false, fmt.Errorf("its name says pingpong, but on average %.3g messages were under way at a time, and %.0f of %.0f were answered: it is under-load", c.inFlight(), c.received, c.sent)
		}
		return false, nil
	case "underload":
		if !load && c.inFlight() > 0.9 {
			return false, fmt.Errorf("its name says underload, but each message was sent when the one before it was back (%.3g under way at a time): it is ping-pong", c.inFlight())
		}
		return true, nil
	}
	return load, nil
}

// sockperfSize returns the size of a stream's messages, as printed or computed from the rates.
func sockperfSize(plain []byte) spec.Bytes {
	if m := sockperfNote.FindSubmatch(plain); m != nil {
		n, _ := strconv.Atoi(string(m[1]))
		return spec.Bytes(n)
	}
	m := sockperfWidth.FindSubmatch(plain)
	if m == nil {
		return 0
	}
	rate, err1 := strconv.ParseFloat(string(m[1]), 64)
	width, err2 := strconv.ParseFloat(string(m[2]), 64)
	// The rate is exact to half a message, the bandwidth to half of 0.001.
	if size := width * (1 << 20) / rate; err1 == nil && err2 == nil && size >= 1 && size <= 1<<16 &&
		size*(0.5/rate+0.0005/width) < 0.5 {
		return spec.Bytes(math.Round(size))
	}
	return 0
}
