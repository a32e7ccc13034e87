package tools

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"time"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// nginx serves one object from a file, and wrk requests it. Checked against nginx 1.22 and wrk 4.1.
type nginx struct{}

func (nginx) Check(w spec.Workload) error {
	switch {
	case w.HTTP == nil:
		return fmt.Errorf("nginx makes http workloads only, not %s", w.Kind())
	case w.HTTP.Page:
		return errors.New("wrk requests a single object from nginx, not a page")
	case w.HTTP.Requests > 0:
		return errors.New("wrk runs for a time, not for a number of requests")
	}
	return nil
}

const nginxObject = "object"

// Files returns the configuration and the object. Log and temporary files are in the same folder. As in the configuration of
// distributions, there is one worker process per CPU.
func (nginx) Files(w spec.Workload, addr netip.Addr, port uint16) map[string][]byte {
	config := fmt.Sprintf(`daemon off;
worker_processes auto;
error_log stderr notice;
pid nginx.pid;
events { worker_connections 4096; }
http {
	access_log off;
	sendfile on;
	tcp_nopush on;
	keepalive_requests 1000000000;
	client_body_temp_path body;
	proxy_temp_path proxy;
	fastcgi_temp_path fastcgi;
	uwsgi_temp_path uwsgi;
	scgi_temp_path scgi;
	server { listen %s; root .; }
}
`, netip.AddrPortFrom(addr, port))
	return map[string][]byte{"nginx.conf": []byte(config), nginxObject: bytes.Repeat([]byte("x"), int(w.HTTP.Size))}
}

func (nginx) Prepare(spec.Workload, netip.Addr, uint16) Preparation { return Preparation{} }

func (nginx) ServerArgv(spec.Workload, netip.Addr, uint16) []string {
	return []string{"nginx", "-e", "stderr", "-p", ".", "-c", "nginx.conf"}
}

// ServerReady waits for the first worker process. nginx starts it after the sockets listen.
func (nginx) ServerReady(line []byte) bool {
	return bytes.Contains(line, []byte("start worker process "))
}

func (n nginx) WarmupArgv(w spec.Workload, addr netip.Addr, port uint16) []string {
	return n.argv(w, addr, port, untilKilled)
}

func (n nginx) ClientArgv(w spec.Workload, addr netip.Addr, port uint16, _, _ string) []string {
	return n.argv(w, addr, port, wholeSeconds(time.Duration(w.HTTP.Duration)))
}

func (nginx) argv(w spec.Workload, addr netip.Addr, port uint16, seconds int64) []string {
	t := w.HTTP
	argv := []string{
		"wrk", "--latency", "-t", strconv.Itoa(min(2, t.Connections)), "-c", strconv.Itoa(t.Connections),
		"-d", fmt.Sprintf("%ds", seconds), "--timeout", "5s",
	}
	if !t.KeepAlive {
		argv = append(argv, "-H", "Connection: close")
	}
	return append(argv, fmt.Sprintf("http://%s/%s", netip.AddrPortFrom(addr, port), nginxObject))
}

func (nginx) Lead(spec.Workload) time.Duration { return 0 }

var (
	// wrkDone is "  29112 requests in 1.10s, 35.09MB read".
	wrkDone = regexp.MustCompile(`(?m)^ +(\d+) requests in ([0-9.]+(?:us|ms|s|m|h)), `)
	// wrkRate is "Requests/sec:  26468.68".
	wrkRate = regexp.MustCompile(`(?m)^Requests/sec: +([0-9.]+)$`)
	// wrkPercentile is "     50%  233.00us".
	wrkPercentile = regexp.MustCompile(`(?m)^ +(50|99)(?:\.000)?% +([0-9.]+)(us|ms|s|m|h) *$`)
	// wrkShare matches any line of a distribution.
	wrkShare    = regexp.MustCompile(`(?m)^ *[0-9.]+% .*$`)
	wrkAnyShare = regexp.MustCompile(`^ *[0-9.]+% +[0-9.]+(us|ms|s|m|h) *$`)
	// wrkErrors is "  Socket errors: connect 0, read 3, write 0, timeout 0".
	wrkErrors = regexp.MustCompile(`(?m)^ +Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)$`)
	wrkStatus = regexp.MustCompile(`(?m)^ +Non-2xx or 3xx responses: (\d+)$`)
	// wrkUncorrected is the heading of the second distribution of wrk2 -U, which ignores late starts.
	wrkUncorrected = regexp.MustCompile(`(?m)^ +Latency Distribution \(HdrHistogram - Uncorrected`)
	wrkFailed      = regexp.MustCompile(`(?m)^unable to [^\n]*`)
)

var wrkUnits = map[string]float64{"us": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}

func (nginx) Parse(w spec.Workload, output []byte) (record.Endpoint, error) {
	e, err := parseWrk(w, output)
	if err == nil && len(e.Percentiles) != 2 && e.Errors[record.ErrStatus] == 0 {
		err = errors.New("its output has no percentiles")
	}
	return parsed("wrk", e, err)
}

func parseWrk(w spec.Workload, output []byte) (record.Endpoint, error) {
	var e record.Endpoint
	if m := wrkFailed.Find(output); m != nil {
		return e, fmt.Errorf("%.200s", m)
	}
	done, second := wrkDone.FindSubmatch(output), wrkRate.FindSubmatch(output)
	if done == nil || second == nil {
		return e, errors.New("its output has no summary: it ended too early, or comes from a version other than 4.1")
	}
	n, err := strconv.ParseUint(string(done[1]), 10, 62)
	if err != nil {
		return e, fmt.Errorf("%q requests", done[1])
	}
	rate, err := strconv.ParseFloat(string(second[1]), 64)
	if err != nil {
		return e, fmt.Errorf("%q requests per second", second[1])
	}
	if e.Errors, err = wrkFailures(output); err != nil {
		return e, err
	}
	status := e.Errors[record.ErrStatus]
	switch {
	case n > 0 && status >= n:
		return e, fmt.Errorf("all %d responses have an error status (not 2xx or 3xx), so its figures are those of errors: correct the URL or the server, and run it again", n)
	case n == 0 || rate <= 0:
		return e, fmt.Errorf("no request was answered%s: check that the server listens, and run it again", failures(e.Errors))
	}
	if e.Percentiles, err = wrkPercentiles(output); err != nil {
		return e, err
	}
	if status > 0 { // percentiles include failed requests
		e.Percentiles = nil
	}
	e.Messages, e.Seconds = n-status, float64(n)/rate
	e.Bytes = payload(e.Messages, int(w.HTTP.Size))
	return e, plausible(e)
}

// wrkPercentiles returns the percentiles that records have, in seconds.
func wrkPercentiles(output []byte) (map[string]float64, error) {
	if at := wrkUncorrected.FindIndex(output); at != nil {
		output = output[:at[0]]
	}
	for _, line := range wrkShare.FindAll(output, -1) {
		if !wrkAnyShare.Match(line) {
			return nil, fmt.Errorf("a percentile is not understood: %.200q; give the output as it was printed", line)
		}
	}
	percentiles := make(map[string]float64)
	for _, m := range wrkPercentile.FindAllSubmatch(output, -1) {
		v, err := strconv.ParseFloat(string(m[2]), 64)
		if err != nil {
			return nil, fmt.Errorf("percentile %s of %q", m[1], m[2])
		}
		name := map[string]string{"50": metrics.LatencyP50, "99": metrics.LatencyP99}[string(m[1])]
		if _, again := percentiles[name]; again {
			return nil, fmt.Errorf("it has the percentile %s%% twice", m[1])
		}
		percentiles[name] = v * wrkUnits[string(m[3])]
	}
	return percentiles, nil
}

// failures formats how many requests failed, by kind.
func failures(errs map[string]uint64) (text string) {
	for _, kind := range slices.Sorted(maps.Keys(errs)) {
		text += fmt.Sprintf(", %s %d", kind, errs[kind])
	}
	return text
}

// wrkFailures converts wrk's kinds of errors to those of a record. wrk counts responses with an error status among the
// requests, but no other failures.
func wrkFailures(output []byte) (map[string]uint64, error) {
	var kinds [5]uint64
	var found [][]byte
	if m := wrkErrors.FindSubmatch(output); m != nil {
		found = m[1:]
	} else {
		found = make([][]byte, 4)
	}
	if m := wrkStatus.FindSubmatch(output); m != nil {
		found = append(found, m[1])
	}
	for i, text := range found {
		if text == nil {
			continue
		}
		n, err := strconv.ParseUint(string(text), 10, 32)
		if err != nil {
			return nil, fmt.Errorf("%q errors", text)
		}
		kinds[i] = n
	}
	errs := make(map[string]uint64)
	for kind, n := range map[string]uint64{
		record.ErrRefused: kinds[0], record.ErrReset: kinds[1] + kinds[2], record.ErrTimeout: kinds[3], record.ErrStatus: kinds[4],
	} {
		if n > 0 {
			errs[kind] = n
		}
	}
	if len(errs) == 0 {
		return nil, nil
	}
	return errs, nil
}
