package tools

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"regexp"
	"strconv"
	"time"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// redis is a Redis server and the client redis-benchmark. Checked against 7.0.
//
// redis-benchmark takes a number of requests: as many as fit into the window according to the warm-up. So the window may be
// longer or shorter than configured. All requests have the same key. Latencies are multiples of 8 µs, from a histogram that
// begins at 10 µs. With pipelining they are those of a request in a batch.
type redis struct{}

const (
	// redisMost is more than the number of requests that a warm-up can make.
	redisMost = 1_000_000_000
	// redisFewest keeps a run long enough to be measured.
	redisFewest = 1000
)

func (redis) Check(w spec.Workload) error {
	if w.Application == nil {
		return fmt.Errorf("redis makes application workloads only, not %s", w.Kind())
	}
	return nil
}

// Files returns nil: everything is on the command line.
func (redis) Files(spec.Workload, netip.Addr, uint16) map[string][]byte { return nil }

func (redis) Prepare(spec.Workload, netip.Addr, uint16) Preparation { return Preparation{} }

// ServerArgv disables persistence, because the network is to be measured.
func (redis) ServerArgv(_ spec.Workload, addr netip.Addr, port uint16) []string {
	return []string{
		"redis-server", "--bind", addr.String(), "--port", strconv.Itoa(int(port)),
		"--protected-mode", "no", "--save", "", "--appendonly", "no",
	}
}

func (redis) ServerReady(line []byte) bool {
	return bytes.Contains(line, []byte("Ready to accept connections"))
}

// WarmupArgv always makes SET requests, so that the key of the measured run exists.
func (r redis) WarmupArgv(w spec.Workload, addr netip.Addr, port uint16) []string {
	return r.argv(w, addr, port, spec.OperationSet, redisMost)
}

// redisRate matches "(overall: 38910.5)" of the progress, which is printed every 250 ms.
var redisRate = regexp.MustCompile(`\(overall: ([0-9.]+)\) avg_msec`)

func (r redis) CountedArgv(w spec.Workload, addr netip.Addr, port uint16, warmup []byte) ([]string, error) {
	all := redisRate.FindAllSubmatch(warmup, -1)
	if len(all) == 0 {
		return nil, errors.New("redis-benchmark made no request within the warm-up: make that longer")
	}
	rate, err := strconv.ParseFloat(string(all[len(all)-1][1]), 64)
	if err != nil || rate <= 0 {
		return nil, fmt.Errorf("redis-benchmark made %q requests per second within the warm-up", all[len(all)-1][1])
	}
	n := rate * time.Duration(w.Application.Duration).Seconds()
	return r.argv(w, addr, port, w.Application.Operation, int(min(max(n, redisFewest), redisMost))), nil
}

// ClientArgv is not used: CountedArgv replaces it.
func (r redis) ClientArgv(w spec.Workload, addr netip.Addr, port uint16, _, _ string) []string {
	return r.argv(w, addr, port, w.Application.Operation, redisFewest)
}

func (redis) argv(w spec.Workload, addr netip.Addr, port uint16, operation string, n int) []string {
	t := w.Application
	return []string{
		"redis-benchmark", "-h", addr.String(), "-p", strconv.Itoa(int(port)), "-t", operation, "-d", strconv.Itoa(int(t.Size)),
		"-c", strconv.Itoa(t.Connections), "-P", strconv.Itoa(t.Pipeline), "-n", strconv.Itoa(n),
	}
}

func (redis) Lead(spec.Workload) time.Duration { return 0 }

var (
	// redisDone is "  100000 requests completed in 6.34 seconds".
	redisDone = regexp.MustCompile(`(?m)^ +(\d+) requests completed in [0-9.]+ seconds`)
	// redisThroughput is "  throughput summary: 15649.45 requests per second".
	redisThroughput = regexp.MustCompile(`(?m)^ +throughput summary: ([0-9.]+) requests per second`)
	// redisLatency matches avg, min, p50, p95, p99 and max in ms.
	redisLatency = regexp.MustCompile(`(?m)^ +avg +min +p50 +p95 +p99 +max *\n +([0-9.]+) +[0-9.]+ +([0-9.]+) +[0-9.]+ +([0-9.]+) +([0-9.]+) *$`)
	redisError   = regexp.MustCompile(`(?m)^(Could not connect[^\n]*|Error from server[^\n]*|Error:[^\n]*)`)
)

func (redis) Parse(w spec.Workload, output []byte) (record.Endpoint, error) {
	e, err := parseRedis(w, output)
	return parsed("redis-benchmark", e, err)
}

func parseRedis(w spec.Workload, output []byte) (record.Endpoint, error) {
	e := record.Endpoint{Percentiles: make(map[string]float64)}
	if m := redisError.Find(output); m != nil {
		return e, fmt.Errorf("%.200s", m)
	}
	done, throughput, latency := redisDone.FindSubmatch(output), redisThroughput.FindSubmatch(output), redisLatency.FindSubmatch(output)
	if done == nil || throughput == nil || latency == nil {
		return e, errors.New("its output has no summary: it ended too early, or comes from a version other than 7.0")
	}
	n, err := strconv.ParseUint(string(done[1]), 10, 62)
	if err != nil {
		return e, fmt.Errorf("%q requests", done[1])
	}
	rate, err := strconv.ParseFloat(string(throughput[1]), 64)
	if err != nil || rate <= 0 {
		return e, fmt.Errorf("%q requests per second", throughput[1])
	}
	for i, name := range []string{metrics.LatencyMean, metrics.LatencyP50, metrics.LatencyP99, metrics.LatencyMax} {
		ms, err := strconv.ParseFloat(string(latency[i+1]), 64)
		if err != nil {
			return e, fmt.Errorf("a latency of %q", latency[i+1])
		}
		e.Percentiles[name] = ms / 1e3
	}
	e.Messages, e.Seconds = n, float64(n)/rate
	e.Bytes = payload(n, int(w.Application.Size))
	return e, plausible(e)
}

// payload returns the bytes of n messages of a size, saturated to what a figure can hold.
func payload(n uint64, size int) uint64 {
	if size > 0 && n > math.MaxInt64/uint64(size) {
		return math.MaxInt64
	}
	return n * uint64(max(size, 1))
}
