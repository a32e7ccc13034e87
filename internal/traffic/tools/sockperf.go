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

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/record"
)

// sockperf makes streams (throughput), ping-pong and load. Checked against 3.7;
// the formats are those of client.cpp and have not moved up to 3.10.
//
// Its course is fixed: a client sleeps for 2 s, then runs for --time. Ping-pong
// and under-load leave the first 400 ms and the last 50 ms of that out of their
// figures, throughput leaves out nothing. None of it can be set (--pre-warmup-wait
// only makes the sleep longer), so a workload's warm-up has no effect; Lead says
// when the window begins.
type sockperf struct{}

const (
	sockperfSleep    = 2 * time.Second
	sockperfWarmup   = 400 * time.Millisecond // TEST_START_WARMUP_MSEC
	sockperfCooldown = 50 * time.Millisecond  // TEST_END_COOLDOWN_MSEC
)

func (sockperf) Check(w v1alpha1.Workload) error {
	t := w.Traffic()
	if t.Connections != 1 {
		return fmt.Errorf("sockperf makes one connection a pair, not %d", t.Connections)
	}
	if w.Stream != nil && t.Protocol == "udp" {
		return errors.New("sockperf tells how much UDP it sent, not how much arrived: use iperf3")
	}
	return nil
}

func (s sockperf) ServerArgv(w v1alpha1.Workload, addr netip.Addr, port uint16) []string {
	return s.argv("server", w, addr, port)
}

// ServerReady waits for what a server says once its sockets are bound:
// "sockperf: [tid 7] using recvfrom() to block on socket(s)".
func (sockperf) ServerReady(line []byte) bool {
	return bytes.Contains(line, []byte("to block on socket(s)"))
}

// ClientArgv has no use for cc: sockperf cannot set a congestion control.
func (s sockperf) ClientArgv(w v1alpha1.Workload, addr netip.Addr, port uint16, _, _ string) []string {
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
	// Every message is answered, so that none of the rate goes unmeasured.
	return append(s.argv("under-load", w, addr, port), append(length, "--full-rtt", "--mps", rate, "--reply-every", "1")...)
}

// argv is what a client and its server have in common. Both need the size: it
// is the most that a server takes.
func (sockperf) argv(mode string, w v1alpha1.Workload, addr netip.Addr, port uint16) []string {
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

func (sockperf) Lead(w v1alpha1.Workload) time.Duration {
	if w.Stream != nil {
		return sockperfSleep
	}
	return sockperfSleep + sockperfWarmup
}

// Parse reads the lines that it knows. A stream's figures are the sender's, of
// the whole run: over TCP the receiver's are the same but for what the socket
// buffers hold. Latencies are round trips of the messages that came back.
func (s sockperf) Parse(w v1alpha1.Workload, output []byte) (record.Endpoint, error) {
	e, err := parseSockperf(w, output)
	if err != nil {
		return record.Endpoint{}, fmt.Errorf("sockperf: %w", err)
	}
	return e, nil
}

func parseSockperf(w v1alpha1.Workload, output []byte) (record.Endpoint, error) {
	e := record.Endpoint{Percentiles: make(map[string]float64)}
	var p sockperfOutput
	// Some lines are in colour, on a terminal or not.
	plain := regexp.MustCompile(`\x1b\[[0-9;]*m`).ReplaceAll(output, nil)
	for raw := range bytes.Lines(plain) {
		line := strings.TrimSpace(string(raw))
		if line == "" {
			continue
		}
		p.last = line
		// Half a line may end in half a number.
		if bytes.HasSuffix(raw, []byte("\n")) {
			p.line(line, &e)
		}
	}
	complete := p.valid && p.dropped && p.roundTrip && len(e.Percentiles) == 3
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

// sockperfReached is what share of the set rate counts as that rate.
const sockperfReached = 0.99

// sockperfOutput is what has been seen of a client's output.
type sockperfOutput struct {
	total                     bool // "Total of …", which is all that a stream says
	valid, dropped, roundTrip bool
	sent                      uint64 // valid, of load
	// unexpected is the first line that is not known, last the last one at all.
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
		p.total = true
	case scan("[Valid Duration] RunTime=%g sec; SentMessages=%d; ReceivedMessages=%d", &e.Seconds, &p.sent, &e.Messages):
		p.valid = true
	case scan("# dropped messages = %d", &e.Lost):
		p.dropped = true
	case scan("Summary: Round trip is %g usec", &usec):
		// --full-rtt was heeded; else the figures were halves of round trips.
		p.roundTrip = true
	case scan("---> percentile %g = %g", &percentile, &usec):
		switch percentile {
		case 50:
			e.Percentiles[record.LatencyP50] = usec / 1e6
		case 99:
			e.Percentiles[record.LatencyP99] = usec / 1e6
		case 99.9:
			e.Percentiles[record.LatencyP999] = usec / 1e6
		}
	case p.unexpected == "" && !sockperfSays(rest):
		p.unexpected = line
	}
}

// sockperfSays knows the lines that tell nothing of use.
func sockperfSays(line string) bool {
	for _, start := range []string{
		"== version #", "sockperf[CLIENT] send on:", "[ 0] IP =", "Warmup stage", "Starting test",
		"Test end", "[Total Run]", "=========", "====>", "Total ", "Summary: Message Rate", "Summary: BandWidth",
		"NOTE: ", "---> <MAX> observation", "---> <MIN> observation",
	} {
		if strings.HasPrefix(line, start) {
			return true
		}
	}
	return false
}
