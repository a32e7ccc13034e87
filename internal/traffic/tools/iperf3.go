package tools

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// iperf3 makes streams. Checked against 3.9, 3.12 and 3.19.
type iperf3 struct{}

// iperf3MaxOmit is the longest warm-up that -O took before 3.19.
const iperf3MaxOmit = time.Minute

func (iperf3) Check(w spec.Workload) error {
	if w.Stream == nil {
		return fmt.Errorf("iperf3 makes stream workloads only, not %s", w.Kind())
	}
	if time.Duration(w.Stream.Warmup) > iperf3MaxOmit {
		return fmt.Errorf("iperf3 warms up for %s at most, not %s", iperf3MaxOmit, w.Stream.Warmup)
	}
	return nil
}

func (iperf3) ServerArgv(_ spec.Workload, addr netip.Addr, port uint16) []string {
	// Without --forceflush the line that says it listens stays in a buffer.
	return []string{
		"iperf3", "--server", "--one-off", "--forceflush",
		"--bind", addr.String(), "--port", strconv.Itoa(int(port)),
	}
}

func (iperf3) ServerReady(line []byte) bool {
	return bytes.HasPrefix(line, []byte("Server listening on "))
}

func (iperf3) ClientArgv(w spec.Workload, addr netip.Addr, port uint16, cc, _ string) []string {
	t := w.Stream
	// Interval 0: only the sums are read, and reports of 1000 connections every
	// second add up.
	argv := []string{
		"iperf3", "--client", addr.String(), "--port", strconv.Itoa(int(port)), "--json", "--interval", "0",
		"--parallel", strconv.Itoa(t.Connections),
		"--length", strconv.Itoa(int(t.Size)),
		"--omit", strconv.FormatInt(wholeSeconds(time.Duration(t.Warmup)), 10),
		"--time", strconv.FormatInt(wholeSeconds(time.Duration(t.Duration)), 10),
	}
	switch {
	case t.Protocol == "udp":
		argv = append(argv, "--udp", "--bitrate", "0") // the default for UDP is 1 Mbit/s
	case cc != "":
		argv = append(argv, "--congestion", cc)
	}
	return argv
}

func (iperf3) Lead(w spec.Workload) time.Duration {
	return time.Duration(wholeSeconds(time.Duration(w.Stream.Warmup))) * time.Second
}

// iperf3Report is the part of --json that is read (iperf_print_results in
// iperf_api.c).
type iperf3Report struct {
	Error string
	Start struct {
		Version   string
		Timestamp struct {
			Seconds float64 `json:"timesecs"`
		}
		Connected []struct {
			Host string `json:"local_host"`
		}
		Test struct {
			Protocol              string
			Streams               float64 `json:"num_streams"`
			Size                  float64 `json:"blksize"` // of a message, bytes
			Omit, Duration, Bidir float64
		} `json:"test_start"`
	}
	End struct {
		Streams []struct {
			UDP struct {
				Reordered float64 `json:"out_of_order"`
			}
		}
		Sent     *iperf3Sum `json:"sum_sent"`
		Received *iperf3Sum `json:"sum_received"`
		CPU      struct {
			Client float64 `json:"host_total"`
		} `json:"cpu_utilization_percent"`
	}
}

// iperf3Sum is one end's account of all connections after the warm-up: each end
// starts its counters anew when its own timer of --omit runs out.
type iperf3Sum struct {
	Seconds, Bytes, Retransmits, Packets float64
	Lost                                 float64 `json:"lost_packets"`
	Jitter                               float64 `json:"jitter_ms"` // mean of the connections'
}

// Parse takes bytes, time and rate from the receiver's sum, which leaves the
// warm-up out in every version.
func (iperf3) Parse(w spec.Workload, output []byte) (record.Endpoint, error) {
	e, err := parseIperf3(w, output)
	if err != nil {
		return record.Endpoint{}, fmt.Errorf("iperf3: %w", err)
	}
	return e, nil
}

// decodeIperf3 reads the first report, and returns what follows it. Warnings may
// precede it.
func decodeIperf3(output []byte) (r iperf3Report, behind []byte, err error) {
	start := max(0, bytes.IndexByte(output, '{'))
	report := json.NewDecoder(bytes.NewReader(output[start:]))
	if err := report.Decode(&r); err != nil {
		return r, nil, fmt.Errorf("read its report: %w", err)
	}
	if r.Error != "" {
		return r, nil, errors.New(r.Error)
	}
	return r, bytes.TrimSpace(output[start+int(report.InputOffset()):]), nil
}

func parseIperf3(w spec.Workload, output []byte) (record.Endpoint, error) {
	r, behind, err := decodeIperf3(output)
	if err != nil {
		return record.Endpoint{}, err
	}
	return r.endpoint(w, behind)
}

// endpoint returns what a report says. Errors (of 3.9) may follow it.
func (r iperf3Report) endpoint(w spec.Workload, behind []byte) (record.Endpoint, error) {
	var e record.Endpoint
	sent, received := r.End.Sent, r.End.Received
	if sent == nil || received == nil {
		if w.Stream.Protocol == "udp" {
			return e, fmt.Errorf("its report has no sums of both ends, as none of UDP has before 3.11: this is %s", r.Start.Version)
		}
		return e, fmt.Errorf("its report has no sums of both ends; behind it: %.200q", behind)
	}
	e.Seconds = received.Seconds
	e.BitsPerSecond = received.Bytes * 8 / received.Seconds
	// The share is of the whole run. This assumes that the warm-up costs the same.
	e.CPUSeconds = r.End.CPU.Client / 100 * sent.Seconds
	var err error
	count := func(what string, v float64) (n uint64) {
		if !(v >= 0 && v < math.MaxInt64) {
			err = fmt.Errorf("%s of %g", what, v)
			return 0
		}
		return uint64(v)
	}
	e.Bytes = count("bytes received", received.Bytes)
	e.Retransmits = count("retransmits", sent.Retransmits)
	if w.Stream.Protocol == "udp" {
		if size := r.Start.Test.Size; size >= 1 {
			e.Messages = count("messages received", received.Bytes/size)
		} else {
			err = fmt.Errorf("messages of %g bytes", size)
		}
		e.Lost = count("messages lost", iperf3Lost(float64(e.Messages), sent, received))
		for _, stream := range r.End.Streams {
			e.Reordered += count("messages out of order", stream.UDP.Reordered)
		}
		e.Jitter = received.Jitter / 1e3
	}
	if err != nil {
		return e, err
	}
	return e, plausible(e)
}

// iperf3Lost returns how many datagrams of the window were lost, if arrived have
// arrived. Up to 3.13 the receiver's sum also counts those that the warm-up lost, so
// it does not add up. Then the difference between what was sent and what arrived is
// closer. It is off by what passed between the two ends' starts of the window, which
// are a few milliseconds apart. The result is never more than the sum says.
func iperf3Lost(arrived float64, sent, received *iperf3Sum) float64 {
	if received.Packets-received.Lost == arrived {
		return received.Lost
	}
	return max(0, min(received.Lost, sent.Packets-arrived))
}

func isIperf3(output []byte) bool {
	return bytes.Contains(output, []byte(`"start"`)) && bytes.Contains(output, []byte(`"intervals"`))
}

// readIperf3 reads all reports of an output, a run each.
func readIperf3(output []byte, _ time.Duration) (Reading, error) {
	var all Reading
	for first := true; first || bytes.HasPrefix(output, []byte("{")); first = false {
		r, behind, err := decodeIperf3(output)
		if err != nil {
			return Reading{}, err
		}
		t, err := r.traffic()
		if err != nil {
			return Reading{}, err
		}
		w := spec.Workload{Stream: &t}
		switch {
		case first:
			all.Workload, all.Version = w, ParseVersion(spec.ToolIperf3, []byte(r.Start.Version))
		case *all.Workload.Stream != t:
			return Reading{}, fmt.Errorf("run %d has other traffic than run 1", len(all.Runs)+1)
		}
		e, err := r.endpoint(w, behind)
		if err != nil {
			return Reading{}, err
		}
		run := Run{Pairs: []record.Endpoint{e}}
		if at := r.Start.Timestamp.Seconds; at > 0 && at < 1<<40 {
			run.Started = time.Unix(int64(at), 0).UTC()
		}
		all.Runs, output = append(all.Runs, run), behind
	}
	return all, nil
}

// traffic returns the traffic that a report describes.
func (r iperf3Report) traffic() (spec.Traffic, error) {
	of := r.Start.Test
	t := spec.Traffic{
		Tool: spec.ToolIperf3, Protocol: strings.ToLower(of.Protocol), Connections: int(of.Streams), Size: spec.Bytes(of.Size),
		Warmup: spec.Duration(of.Omit * 1e9), Duration: spec.Duration(of.Duration * 1e9),
	}
	if len(r.Start.Connected) > 0 {
		t.IP = ipVersion(r.Start.Connected[0].Host)
	}
	const day = 24 * 60 * 60
	switch {
	case t.Protocol != "tcp" && t.Protocol != "udp":
		return t, fmt.Errorf("its report has the protocol %q, not TCP or UDP", of.Protocol)
	case of.Bidir != 0:
		return t, errors.New("it sent in both directions at once (--bidir), and a stream has one")
	case of.Duration == 0:
		return t, errors.New("it sent a number of bytes (-n, -k), and ran for no set time")
	case !(of.Duration > 0 && of.Duration <= day && of.Omit >= 0 && of.Omit <= day):
		return t, fmt.Errorf("it ran for %g s after a warm-up of %g s", of.Duration, of.Omit)
	case !(of.Streams >= 1 && of.Streams <= 1024 && of.Size >= 0 && of.Size <= 1<<20):
		return t, fmt.Errorf("%g connections with messages of %g bytes", of.Streams, of.Size)
	}
	return t, nil
}
