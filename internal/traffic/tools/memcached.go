package tools

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"strconv"
	"time"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// memcached is a memcached server and the client memaslap, which Debian calls memcaslap. Checked against memcached 1.6 and
// memaslap 1.0.
//
// memcaslap takes whole seconds. It prints the mean and the longest latency. There are no percentiles, because its histogram
// has a bucket for each power of two, which is too coarse to compare. At the beginning of the window it sets 1024 keys per
// connection, which it counts separately.
type memcached struct{}

// memcachedConfig is memcaslap's configuration file, which defines its requests.
const memcachedConfig = "memcaslap.conf"

func (memcached) Check(w spec.Workload) error {
	if w.Application == nil {
		return fmt.Errorf("memcached makes application workloads only, not %s", w.Kind())
	}
	return nil
}

// Files returns the configuration, with keys of 16 bytes. Command 0 is set, command 1 is get.
func (memcached) Files(w spec.Workload, _ netip.Addr, _ uint16) map[string][]byte {
	t := w.Application
	set := 0
	if t.Operation == spec.OperationSet {
		set = 1
	}
	return map[string][]byte{memcachedConfig: fmt.Appendf(nil, "key\n16 16 1\nvalue\n%d %d 1\ncmd\n0 %d\n1 %d\n", t.Size, t.Size, set, 1-set)}
}

func (memcached) Prepare(spec.Workload, netip.Addr, uint16) Preparation {
	return Preparation{Silent: true}
}

// ServerArgv leaves room for all keys, and for more than the default of 1024 connections: those of a warm-up may still exist.
func (memcached) ServerArgv(w spec.Workload, addr netip.Addr, port uint16) []string {
	return []string{
		"memcached", "-l", addr.String(), "-p", strconv.Itoa(int(port)), "-U", "0", "-m", "512", "-c", strconv.Itoa(2*w.Application.Connections + 1024),
	}
}

func (memcached) ServerReady([]byte) bool { return false }

func (m memcached) WarmupArgv(w spec.Workload, addr netip.Addr, port uint16) []string {
	return m.argv(w, addr, port, untilKilled)
}

func (m memcached) ClientArgv(w spec.Workload, addr netip.Addr, port uint16, _, _ string) []string {
	return m.argv(w, addr, port, wholeSeconds(time.Duration(w.Application.Duration)))
}

// argv sets a number of threads that divides the number of connections. memcaslap prints statistics at the end only if it also
// prints them at intervals, so set an interval that is longer than any run.
func (memcached) argv(w spec.Workload, addr netip.Addr, port uint16, seconds int64) []string {
	n := w.Application.Connections
	return []string{
		"memcaslap", "-s", netip.AddrPortFrom(addr, port).String(), "-T", strconv.Itoa(2 - n%2), "-c", strconv.Itoa(n), "-w", "1k",
		"-F", memcachedConfig, "-S", "100d", "-t", fmt.Sprintf("%ds", seconds),
	}
}

func (memcached) Lead(spec.Workload) time.Duration { return 0 }

var (
	// memcaslapTotal matches "Total Statistics (546034 events)", which the mean and the longest latency follow, in µs.
	memcaslapTotal = regexp.MustCompile(`(?m)^Total Statistics \((\d+) events\)\n +Min: +\d+\n +Max: +(\d+)\n +Avg: +(\d+)$`)
	memcaslapMiss  = regexp.MustCompile(`(?m)^get_misses: (\d+)$`)
	// memcaslapTime matches "Run time: 3.0s Ops: 627962 TPS: 209297 Net_rate: 23.9M/s", which includes the operations before
	// the run.
	memcaslapTime = regexp.MustCompile(`(?m)^Run time: ([0-9.]+)s Ops: (\d+) TPS: (\d+) `)
)

func (memcached) Parse(w spec.Workload, output []byte) (record.Endpoint, error) {
	e, err := parseMemcaslap(w, output)
	return parsed("memcaslap", e, err)
}

func parseMemcaslap(w spec.Workload, output []byte) (e record.Endpoint, err error) {
	total, miss, took := memcaslapTotal.FindSubmatch(output), memcaslapMiss.FindSubmatch(output), memcaslapTime.FindSubmatch(output)
	if total == nil || miss == nil || took == nil {
		return e, errors.New("its output has no summary: it ended too early, or comes from a version other than 1.0")
	}
	if string(miss[1]) != "0" {
		return e, fmt.Errorf("memcached had lost %s of the requested keys", miss[1])
	}
	numbers := make([]float64, 0, 5)
	for _, text := range [][]byte{total[1], total[2], total[3], took[2], took[3]} {
		n, err := strconv.ParseUint(string(text), 10, 53)
		if err != nil {
			return e, fmt.Errorf("a figure of %q", text)
		}
		numbers = append(numbers, float64(n))
	}
	events, longest, mean, ops, rate := numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]
	if events == 0 || rate == 0 {
		return e, errors.New("no request was answered")
	}
	// The printed time is rounded to tenths of a second: compute it from the rate instead.
	e.Messages, e.Seconds = uint64(events), ops/rate
	e.Bytes = payload(e.Messages, int(w.Application.Size))
	e.Percentiles = map[string]float64{metrics.LatencyMean: mean / 1e6, metrics.LatencyMax: longest / 1e6}
	return e, plausible(e)
}
