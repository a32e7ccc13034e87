package tools

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"strconv"
	"strings"
	"time"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// HTTP clients whose results are read, but which no experiment runs on their own.
const (
	wrkFormat = "wrk"
	wrk2      = "wrk2"
	fortio    = "fortio"
	k6        = "k6"
)

// Texts that occur exactly once in a result.
var (
	fortioMain = []byte(`"ActualQPS"`)
	k6Main     = []byte(`"http_reqs"`)
)

var (
	// wrkHead begins an output of wrk: "Running 10s test @ http://10.0.0.2:8080/".
	wrkHead = regexp.MustCompile(`(?m)^Running ([0-9.]+)([smh]) test @ (https?)://`)
	// wrkConnections is "  2 threads and 10 connections".
	wrkConnections = regexp.MustCompile(`(?m)^ +\d+ threads and (\d+) connections$`)
	// wrkLatency matches "    Latency   635.91us    0.89ms  12.92ms   93.69%": mean, deviation, maximum.
	wrkLatency = regexp.MustCompile(`(?m)^ +Latency +([0-9.]+)(us|ms|s|m|h) +[0-9.]+(?:us|ms|s|m|h) +([0-9.]+)(us|ms|s|m|h) `)
	// wrkColumns matches the heading with the maximum in the third column, where wrk2 of DeathStarBench has the 99th
	// percentile.
	wrkColumns = regexp.MustCompile(`(?m)^ +Thread Stats +Avg +Stdev +Max +`)
	// wrk2Only matches a line that only wrk2 prints.
	wrk2Only = regexp.MustCompile(`(?m)^ +Thread calibration: |\(HdrHistogram - `)
	// wrkFigure is a line of the results.
	wrkFigure = regexp.MustCompile(`(?m)^ +\d+ requests in .*$|^Requests/sec:.*$|^ +[0-9.]+% +[0-9.]+[a-z]+ *$|^ +(?:Latency|Req/Sec) +.*$`)
)

func isWrk(output []byte) bool {
	return bytes.Contains(output, []byte(" test @ http")) && wrkHead.Match(output)
}

// readWrk reads the output of wrk and wrk2, which print percentiles only with --latency.
func readWrk(output []byte, _ Known) (Reading, error) {
	head, connections := wrkHead.FindSubmatch(output), wrkConnections.FindSubmatch(output)
	if head == nil || connections == nil {
		return Reading{}, errors.New("it does not say how many connections there were")
	}
	if n := len(wrkRate.FindAll(output, -1)); n > 1 {
		return Reading{}, fmt.Errorf("it has the results of %d runs with one heading", n)
	}
	if last := output[bytes.LastIndexByte(output, '\n')+1:]; len(last) > 0 && wrkFigure.Match(last) {
		return Reading{}, halfLine(lineOf(output, len(output)), string(last))
	}
	t := spec.Traffic{Protocol: "tcp", KeepAlive: true}
	length, err := time.ParseDuration(string(head[1]) + string(head[2]))
	if err != nil {
		return Reading{}, err
	}
	planned := length
	if string(head[2]) != "s" { // the heading is rounded, to 2m of 90 s
		planned -= map[string]time.Duration{"m": time.Minute, "h": time.Hour}[string(head[2])] / 2
	}
	n, err := strconv.Atoi(string(connections[1]))
	if err != nil {
		return Reading{}, err
	}
	if done := wrkDone.FindSubmatch(output); done != nil && planned != length {
		if length, err = time.ParseDuration(string(done[2])); err != nil {
			return Reading{}, err
		}
		length = length.Round(time.Second)
	}
	if length <= 0 {
		return Reading{}, fmt.Errorf("a run of %s", length)
	}
	t.Connections, t.Duration = n, spec.Duration(length)
	w := spec.Workload{HTTP: &t}
	e, err := parseWrk(w, output)
	if err == nil {
		err = stopped(e, planned)
	}
	if err != nil {
		return Reading{}, err
	}
	if m := wrkLatency.FindSubmatch(output); m != nil && e.Percentiles != nil {
		var mean, most float64
		if err := numbers(map[*float64]string{&mean: string(m[1]), &most: string(m[3])}); err != nil {
			return Reading{}, err
		}
		e.Percentiles[metrics.LatencyMean] = mean * wrkUnits[string(m[2])]
		if wrkColumns.Match(output) {
			e.Percentiles[metrics.LatencyMax] = most * wrkUnits[string(m[4])]
		}
	}
	format := wrkFormat
	if wrk2Only.Match(output) {
		format = wrk2
	}
	conditions := map[string]string{Client: format, TLS: tlsOf(string(head[3]) == "https")}
	return Reading{Format: format, Workload: w, Conditions: conditions, Runs: []Run{{Pairs: []record.Endpoint{e}}}}, nil
}

// stopped returns an error for a run that ended before half of its planned time, because somebody interrupted it.
func stopped(e record.Endpoint, planned time.Duration) error {
	if e.Seconds < planned.Seconds()/2 {
		return fmt.Errorf("it was stopped after %.3g s of %.3g s: leave it out, or run it again", e.Seconds, planned.Seconds())
	}
	return nil
}

// tlsOf returns the condition TLS for an output that does not say which version.
func tlsOf(encrypted bool) string {
	if encrypted {
		return AnyTLS
	}
	return NoTLS
}

func isFortio(output []byte) bool {
	return bytes.Contains(output, []byte(`"DurationHistogram"`)) && bytes.Contains(output, fortioMain)
}

// fortioReport is the part of fortio's JSON that is used. Times are in seconds, but ActualDuration is in ns.
type fortioReport struct {
	RunType, RequestedQPS string
	RequestedDuration     string // "10s", or "exactly 100 calls"
	StartTime             time.Time
	ActualDuration        float64
	NumThreads            int
	Version, URL          string
	DisableKeepAlive      bool
	H2                    *bool // nil if the version does not report it
	Histogram             *struct {
		Count, Avg, Max float64
		Percentiles     []struct{ Percentile, Value float64 }
	} `json:"DurationHistogram"`
	RetCodes map[string]float64
}

// readFortio reads fortio's JSON for HTTP load.
func readFortio(output []byte, _ Known) (Reading, error) {
	return eachJSON(output, fortioMain, func(text []byte) (Reading, error) {
		var r fortioReport
		if err := json.Unmarshal(text, &r); err != nil {
			return Reading{}, fmt.Errorf("%w; give what fortio load -json wrote", err)
		}
		if r.RunType != "HTTP" || r.Histogram == nil {
			return Reading{}, fmt.Errorf("a run of the type %q, and only HTTP is read: run fortio load with an http:// URL", r.RunType)
		}
		e := record.Endpoint{Seconds: r.ActualDuration / 1e9, Percentiles: map[string]float64{
			metrics.LatencyMean: r.Histogram.Avg, metrics.LatencyMax: r.Histogram.Max,
		}}
		names := map[float64]string{50: metrics.LatencyP50, 99: metrics.LatencyP99, 99.9: metrics.LatencyP999}
		for _, p := range r.Histogram.Percentiles {
			if name := names[p.Percentile]; name != "" {
				e.Percentiles[name] = p.Value
			}
		}
		all, failed := 0.0, 0.0
		for code, n := range r.RetCodes {
			all += n
			if !strings.HasPrefix(code, "2") {
				failed += n
			}
		}
		if all != r.Histogram.Count {
			return Reading{}, fmt.Errorf("it has the status of %g requests, and made %g", all, r.Histogram.Count)
		}
		if err := requests(&e, r.Histogram.Count, failed); err != nil {
			return Reading{}, err
		}
		t := spec.Traffic{Protocol: "tcp", KeepAlive: !r.DisableKeepAlive, Connections: r.NumThreads}
		length, err := time.ParseDuration(r.RequestedDuration)
		counted := err != nil
		if t.Duration = spec.Duration(length); counted {
			t.Duration = spec.Duration(math.Ceil(e.Seconds) * 1e9)
		} else if err := stopped(e, length); err != nil {
			return Reading{}, err
		}
		if t.Connections < 1 || t.Duration <= 0 {
			return Reading{}, fmt.Errorf("%d connections in %s", t.Connections, time.Duration(t.Duration))
		}
		return Reading{
			Version: r.Version, Workload: spec.Workload{HTTP: &t}, Conditions: r.conditions(), Counted: counted,
			Runs: []Run{{Started: r.StartTime, Pairs: []record.Endpoint{e}}},
		}, nil
	})
}

func (r fortioReport) conditions() map[string]string {
	conditions := map[string]string{Client: fortio, RateLimit: NoLimit, TLS: tlsOf(strings.HasPrefix(r.URL, "https:"))}
	if r.RequestedQPS != "max" {
		conditions[RateLimit] = r.RequestedQPS + "/s"
	}
	if r.H2 != nil {
		conditions[HTTP] = HTTP1
		if *r.H2 {
			conditions[HTTP] = "2"
		}
	}
	return conditions
}

func isK6(output []byte) bool {
	return bytes.Contains(output, []byte(`"http_req_duration"`)) && bytes.Contains(output, k6Main) && bytes.Contains(output, []byte(`"metrics"`))
}

// readK6 reads the JSON of k6 --summary-export, and that of handleSummary, in which the values are one level deeper.
func readK6(output []byte, _ Known) (Reading, error) {
	return eachJSON(output, k6Main, func(text []byte) (Reading, error) {
		var r struct{ Metrics map[string]json.RawMessage }
		if err := json.Unmarshal(text, &r); err != nil {
			var is *json.UnmarshalTypeError
			if errors.As(err, &is) && is.Value == "array" && strings.EqualFold(is.Field, "metrics") {
				return Reading{}, errors.New("its metrics are a list, as in k6's newer summary, which is not supported: run k6 with --summary-export alone")
			}
			return Reading{}, err
		}
		took, count := k6Values(r.Metrics["http_req_duration"]), k6Values(r.Metrics["http_reqs"])
		users := k6Values(r.Metrics["vus_max"])["value"]
		if count["rate"] <= 0 || took == nil || users < 1 || users > 1<<20 {
			return Reading{}, errors.New("its summary lacks http_reqs, http_req_duration or vus_max")
		}
		e := record.Endpoint{Seconds: count["count"] / count["rate"], Percentiles: make(map[string]float64)}
		for key, name := range map[string]string{"avg": metrics.LatencyMean, "med": metrics.LatencyP50, "p(99)": metrics.LatencyP99, "p(99.9)": metrics.LatencyP999, "max": metrics.LatencyMax} {
			if ms, ok := took[key]; ok {
				e.Percentiles[name] = ms / 1e3
			}
		}
		failed := k6Values(r.Metrics["http_req_failed"])
		share, ok := failed["value"]
		if !ok {
			share, ok = failed["rate"]
		}
		if !ok {
			return Reading{}, errors.New("its summary lacks http_req_failed")
		}
		if err := requests(&e, count["count"], math.Round(share*count["count"])); err != nil {
			return Reading{}, err
		}
		t := spec.Traffic{Protocol: "tcp", KeepAlive: true, Connections: int(users), Duration: spec.Duration(math.Ceil(e.Seconds) * 1e9)}
		if t.Duration <= 0 {
			return Reading{}, fmt.Errorf("a run of %g s", e.Seconds)
		}
		conditions := map[string]string{Client: k6}
		if shake, ok := k6Values(r.Metrics["http_req_tls_handshaking"])["max"]; ok {
			conditions[TLS] = tlsOf(shake > 0)
		}
		return Reading{Workload: spec.Workload{HTTP: &t}, Conditions: conditions, Counted: true, Runs: []Run{{Pairs: []record.Endpoint{e}}}}, nil
	})
}

func k6Values(text json.RawMessage) map[string]float64 {
	var deep struct{ Values map[string]float64 }
	if json.Unmarshal(text, &deep) == nil && deep.Values != nil {
		return deep.Values
	}
	var flat map[string]json.RawMessage
	if json.Unmarshal(text, &flat) != nil {
		return nil
	}
	values := make(map[string]float64)
	for key, v := range flat {
		var n float64
		if json.Unmarshal(v, &n) == nil {
			values[key] = n
		}
	}
	return values
}

// requests records how many requests were answered and how many failed. It drops percentiles that include failed ones.
func requests(e *record.Endpoint, all, failed float64) error {
	switch {
	case all >= 1 && failed == all:
		return fmt.Errorf("all %.0f requests failed", all)
	case !(all >= 1 && all < 1<<53 && failed >= 0 && failed < all):
		return fmt.Errorf("%g requests, of which %g failed", all, failed)
	}
	e.Messages = uint64(all - failed)
	if failed > 0 {
		e.Errors = map[string]uint64{record.ErrStatus: uint64(failed)}
		e.Percentiles = nil
	}
	return plausible(*e)
}

// eachJSON reads concatenated JSON texts, one per run. Each must have the key exactly once.
func eachJSON(output, key []byte, read func([]byte) (Reading, error)) (Reading, error) {
	var all Reading
	d := json.NewDecoder(bytes.NewReader(output))
	for n := 1; ; n++ {
		var text json.RawMessage
		at := int(d.InputOffset())
		err := d.Decode(&text)
		switch {
		case err == io.EOF && n > 1:
			return all, nil
		case err != nil:
			return Reading{}, fmt.Errorf("after line %d is no whole JSON text: %w; keep other output out of the file, such as stderr", lineOf(output, at), err)
		}
		if found := bytes.Count(text, key); found != 1 {
			return Reading{}, fmt.Errorf("JSON text %d has %s %d times, and the result of a run has it once", n, key, found)
		}
		r, err := read(text)
		if err == nil {
			r.Runs[0].ID = identity(text, anyFigure)
			if n == 1 {
				all = r
			} else {
				err = all.add(r)
			}
		}
		if err != nil {
			return Reading{}, fmt.Errorf("run %d: %w", n, err)
		}
	}
}
