package tools

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
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

// ab is ApacheBench, a client that the engine's own server answers. Checked against 2.3 of Apache 2.4.
//
// It has no warm-up, and prints percentiles in whole milliseconds. Those of its CSV have three more digits, but end at the
// 99th.
type ab struct{}

// abMost is more than ab can request in a second, so that the time limit always ends a run. ab reserves 40 bytes for each
// request, but touches only those of the requests that it makes.
const abMost = 200_000

func (ab) Check(w spec.Workload) error {
	switch {
	case w.HTTP == nil:
		return fmt.Errorf("ab makes http workloads only, not %s", w.Kind())
	case w.HTTP.Page:
		return errors.New("ab requests a single object, not a page")
	case w.HTTP.Requests > 0 && w.HTTP.Requests < w.HTTP.Connections:
		return fmt.Errorf("ab needs at least as many requests as connections, has %d requests and %d connections", w.HTTP.Requests, w.HTTP.Connections)
	}
	return nil
}

// ServerArgv returns nil: the engine serves.
func (ab) ServerArgv(spec.Workload, netip.Addr, uint16) []string { return nil }

func (ab) ServerReady([]byte) bool { return true }

// ClientArgv ignores cc: ab cannot set a congestion control.
func (ab) ClientArgv(w spec.Workload, addr netip.Addr, port uint16, _, path string) []string {
	t := w.HTTP
	// Errors are counted and do not end the run. The timeout of a response is that of the engine.
	argv := []string{"ab", "-q", "-r", "-s", "5", "-c", strconv.Itoa(t.Connections)}
	if t.KeepAlive {
		argv = append(argv, "-k")
	}
	n := t.Requests
	if n == 0 {
		seconds := wholeSeconds(time.Duration(t.Duration))
		argv = append(argv, "-t", strconv.FormatInt(seconds, 10))
		n = int(seconds) * abMost // after -t, which sets it too
	}
	return append(argv, "-n", strconv.Itoa(n), "-e", "/dev/stdout", fmt.Sprintf("http://%s%s/", netip.AddrPortFrom(addr, port), path))
}

func (ab) Lead(spec.Workload) time.Duration { return 0 }

func (ab) Parse(w spec.Workload, output []byte) (record.Endpoint, error) {
	e, err := parseAB(w, output)
	return parsed("ab", e, err)
}

var (
	// abFigure matches "Complete requests:      200".
	abFigure = regexp.MustCompile(`^(Time taken for tests|Complete requests|Failed requests|Non-2xx responses|HTML transferred|Time per request): +([0-9.]+)( seconds| bytes| \[ms\] \(mean\))?$`)
	// abNames are the beginnings of the lines that abFigure must match, except for the time per request across all.
	abNames = regexp.MustCompile(`^(Time taken for tests|Complete requests|Failed requests|Non-2xx responses|HTML transferred|Time per request):`)
	// abAcross is "Time per request:       0.032 [ms] (mean, across all concurrent requests)".
	abAcross = regexp.MustCompile(`\(mean, across all concurrent requests\)$`)
	// abAnyFigure is a line of the results.
	abAnyFigure = regexp.MustCompile(`(?m)^(?:[A-Z][A-Za-z0-9 /-]+: +[0-9][0-9.]*.*| *\d+% +\d+.*|(?:Connect|Processing|Waiting|Total): +\d.*)$`)
	// abTLS is "SSL/TLS Protocol:       TLSv1.2,ECDHE-RSA-AES256-GCM-SHA384,2048,256".
	abTLS = regexp.MustCompile(`(?m)^SSL/TLS Protocol: +(.*)$`)
	// abHead begins an output.
	abHead = regexp.MustCompile(`(?m)^This is ApacheBench`)
	// abFailed matches "   (Connect: 0, Receive: 20, Length: 0, Exceptions: 10)"; ab of Apache 2.0 has no Receive.
	abFailed = regexp.MustCompile(`^ +\(Connect: (\d+),(?: Receive: (\d+),)? Length: (\d+), Exceptions: (\d+)\)$`)
	// abPercentile is "50,0.437" of the CSV.
	abPercentile = regexp.MustCompile(`^(\d+),([0-9.]+)$`)
	// abServed is "  50%     12", in whole milliseconds, the last one " 100%    345 (longest request)".
	abServed = regexp.MustCompile(`^ *(50|99|100)% +(\d+)(?: \(longest request\))?$`)
	// abPercentiles are the names of the percentiles in a record.
	abPercentiles = map[string]string{"50": metrics.LatencyP50, "99": metrics.LatencyP99, "100": metrics.LatencyMax}
	// abTraffic are "Concurrency Level:      8", "Keep-Alive requests:    30492" and
	// "Document Length:        1024 bytes".
	abTraffic = regexp.MustCompile(`(?m)^(Concurrency Level|Keep-Alive requests|Document Length|Complete requests): +(\d+)(?: bytes)?$`)
)

func parseAB(w spec.Workload, output []byte) (record.Endpoint, error) {
	e := record.Endpoint{Percentiles: make(map[string]float64)}
	o := abOutput{figures: make(map[string]float64), served: make(map[string]float64), precise: e.Percentiles}
	number := 0
	for raw := range bytes.Lines(output) {
		number++
		line := bytes.TrimSuffix(raw, []byte("\n"))
		if n := len(line); n == len(raw) && line[n-1] >= '0' && line[n-1] <= '9' {
			return e, halfLine(number, string(line))
		}
		if err := o.line(line); err != nil {
			return e, &lineError{number, err}
		}
	}
	if err := o.complete(); err != nil {
		return e, err
	}
	complete, status := o.figures["Complete requests"], o.figures["Non-2xx responses"]
	e.Seconds = o.figures["Time taken for tests"]
	e.Bytes = uint64(o.figures["HTML transferred"])
	e.Errors = abErrors(o.kinds, status)
	failed := 0.0
	for _, n := range e.Errors {
		failed += float64(n)
	}
	e.Messages = uint64(max(0, complete-failed))
	if o.figures["Failed requests"] > 0 && failed == 0 {
		return e, fmt.Errorf("%g requests failed, and it does not say how", o.figures["Failed requests"])
	}
	if e.Messages == 0 {
		return e, fmt.Errorf("every request failed: connect %g, receive %g, length %g, others %g, status %g",
			o.kinds[0], o.kinds[1], o.kinds[2], o.kinds[3], status)
	}
	if n := e.Errors[record.ErrShort]; n > 0 && float64(n) == failed {
		e.Warnings = append(e.Warnings, record.Warnf(record.WarnErrors,
			"all %d failed requests got answers of another length than the first, which need not be a failure if the page changes: run ab with -l", n))
	}
	if failed > 0 {
		// The percentiles include failed requests.
		e.Percentiles = nil
	} else if err := abLatency(&e, o.served, o.figures["Time per request"]/1e3); err != nil {
		return e, err
	}
	if n := w.HTTP.Requests; n > 0 {
		if complete < float64(n) {
			return e, fmt.Errorf("%g of %d requests were done", complete, n)
		}
		e.Completion = e.Seconds
	}
	return e, plausible(e)
}

// abOutput holds what ab printed.
type abOutput struct {
	figures map[string]float64 // by their names
	kinds   [4]float64         // of failures: connect, receive, length, exceptions
	// precise are the percentiles of the CSV, served those in whole milliseconds. Both are in seconds.
	precise, served map[string]float64
	unexpected      string // the first unknown line
}

func (o *abOutput) line(line []byte) (err error) {
	if m := abFigure.FindSubmatch(line); m != nil {
		if _, again := o.figures[string(m[1])]; again {
			return fmt.Errorf("another run has no heading: %q occurs again", m[1])
		}
		if o.figures[string(m[1])], err = strconv.ParseFloat(string(m[2]), 64); err != nil {
			return fmt.Errorf("%s of %q", m[1], m[2])
		}
	} else if abNames.Match(line) && !abAcross.Match(line) {
		return fmt.Errorf("it is not understood: %.200q", line)
	} else if m := abFailed.FindSubmatch(line); m != nil {
		for i := range o.kinds {
			o.kinds[i], _ = strconv.ParseFloat(string(m[i+1]), 64) // only digits, or nothing
		}
	} else if m := abPercentile.FindSubmatch(line); m != nil {
		err := abPercentileOf(o.precise, m)
		delete(o.precise, metrics.LatencyMax) // the longest request comes from served
		return err
	} else if m := abServed.FindSubmatch(line); m != nil {
		return abPercentileOf(o.served, m)
	} else if i := bytes.Index(line, []byte("apr_")); i >= 0 { // the error that ended the run
		return fmt.Errorf("%.200s", bytes.TrimSpace(line[i:]))
	} else if text := strings.TrimSpace(string(line)); text != "" && o.unexpected == "" && !abSays(text) {
		o.unexpected = text
	}
	return nil
}

// abPercentileOf adds a percentile in ms to percentiles, if records have that one.
func abPercentileOf(percentiles map[string]float64, m [][]byte) error {
	ms, err := strconv.ParseFloat(string(m[2]), 64)
	if err != nil {
		return fmt.Errorf("percentile %s of %q", m[1], m[2])
	}
	if name := abPercentiles[string(m[1])]; name != "" {
		percentiles[name] = ms / 1e3
	}
	return nil
}

// complete returns an error for the first missing or impossible figure.
func (o *abOutput) complete() error {
	for _, name := range []string{"Time taken for tests", "Complete requests", "Failed requests", "HTML transferred"} {
		v, ok := o.figures[name]
		switch {
		case !ok && o.unexpected != "":
			return fmt.Errorf("its output is not understood at %.200q", o.unexpected)
		case !ok:
			return fmt.Errorf("its output has no %q: it ended too early, or comes from a version other than 2.3", name)
		case !(v >= 0 && v < math.MaxInt64):
			return fmt.Errorf("%s of %g", name, v)
		}
	}
	return nil
}

// abLatency adds the mean, in seconds, and the longest request, in whole milliseconds, to the percentiles of the CSV. Without
// -e there is no CSV, and the percentiles are in whole milliseconds too. Those that this rounds by more than a twentieth are left
// out: two medians of 1.4 and 1.6 ms would be 1 and 2.
func abLatency(e *record.Endpoint, served map[string]float64, mean float64) error {
	longest, found := served[metrics.LatencyMax]
	delete(served, metrics.LatencyMax)
	rounded := len(e.Percentiles) == 0
	if rounded {
		maps.Copy(e.Percentiles, served)
	}
	if len(e.Percentiles) != 2 {
		return errors.New("its output has no percentiles: it ended too early, or some were left out")
	}
	// The longest request is rounded, and useless if it is less than the 99th percentile, which is exact to the microsecond.
	if found && longest > 0 && longest >= e.Percentiles[metrics.LatencyP99] {
		e.Percentiles[metrics.LatencyMax] = longest
	}
	if rounded {
		maps.DeleteFunc(e.Percentiles, func(_ string, seconds float64) bool { return seconds < abLeastRounded })
		if _, ok := e.Percentiles[metrics.LatencyP50]; !ok {
			e.Warnings = append(e.Warnings, record.Warnf(record.WarnCoarse, "no median: ab printed it in whole milliseconds, which is too coarse; run ab with -e FILE.csv"))
		}
	}
	if mean > 0 {
		e.Percentiles[metrics.LatencyMean] = mean
	}
	return nil
}

// abLeastRounded is the shortest latency, in seconds, that is taken from a figure in whole milliseconds.
const abLeastRounded = 0.01

// abErrors converts ab's kinds of failures to those of a record. A broken connection is also an exception of the poller, and
// its response has the wrong length. So has a response with an error status, in general, which ab counts in both.
func abErrors(kinds [4]float64, status float64) map[string]uint64 {
	errs := make(map[string]uint64)
	for kind, n := range map[string]float64{
		record.ErrRefused: kinds[0], record.ErrReset: max(kinds[1], kinds[3]),
		record.ErrShort: max(0, kinds[2]-max(kinds[1], kinds[3])-status), record.ErrStatus: status,
	} {
		if n > 0 && n < math.MaxInt64/8 {
			errs[kind] = uint64(n)
		}
	}
	if len(errs) == 0 {
		return nil
	}
	return errs
}

// abSays reports whether a line is known but not used.
func abSays(line string) bool {
	for _, start := range []string{
		"This is ApacheBench", "Copyright ", "Licensed to ", "Benchmarking ", "Completed ", "Percentage ", "0,", "Server ", "Document ", "Concurrency ",
		"Total", "Requests per second", "Time per request", "Transfer rate", "Connection Times", "min ", "Connect:", "Processing:", "Waiting:",
		"50%", "66%", "75%", "80%", "90%", "95%", "98%", "99%", "100%", "Finished ", "WARNING", "Write errors", "..done",
	} {
		if strings.HasPrefix(line, start) {
			return true
		}
	}
	return false
}

func isAB(output []byte) bool { return bytes.Contains(output, []byte("This is ApacheBench")) }

// readAB assumes that the number of completed requests was set. A time limit may have ended the run instead, but ab does not
// print that.
func readAB(output []byte, _ Known) (Reading, error) {
	t := spec.Traffic{Tool: spec.ToolAB, Protocol: "tcp"}
	w := spec.Workload{HTTP: &t}
	for _, m := range abTraffic.FindAllSubmatch(output, -1) {
		n, err := strconv.Atoi(string(m[2]))
		if err != nil {
			return Reading{}, fmt.Errorf("%s of %q", m[1], m[2])
		}
		switch string(m[1]) {
		case "Concurrency Level":
			t.Connections = n
		case "Keep-Alive requests":
			t.KeepAlive = n > 0 // printed with -k, even if the server closes each connection
		case "Document Length":
			t.Size = spec.Bytes(n)
		case "Complete requests":
			t.Requests = n
		}
	}
	e, err := parseAB(w, output)
	if err != nil {
		return Reading{}, err
	}
	t.Duration = spec.Duration(math.Ceil(e.Seconds) * 1e9)
	conditions := map[string]string{TLS: NoTLS}
	if m := abTLS.FindSubmatch(output); m != nil {
		conditions[TLS] = string(m[1])
	}
	return Reading{Workload: w, Conditions: conditions, Counted: true, Runs: []Run{{Pairs: []record.Endpoint{e}}}}, nil
}
