package tools

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"strconv"
	"time"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// iperf3 makes streams. Checked against 3.9, 3.12 and 3.19.
type iperf3 struct{}

// iperf3MaxOmit is the longest warm-up that -O accepted before 3.19.
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
	// Without --forceflush, the line that says that it listens stays in a buffer.
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
	// Interval 0: only the sums are read, and the intervals of 1000 connections would be a lot of output.
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

// iperf3Report is the part of --json that is used (iperf_print_results in iperf_api.c).
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
		Cookie   string
		Accepted *struct{} `json:"accepted_connection"` // only in a server's report
		Test     struct {
			Protocol              string
			Streams               float64 `json:"num_streams"`
			Size                  float64 `json:"blksize"` // of a message, in bytes
			Omit, Duration, Bidir float64
			Bytes, Blocks         float64
			Reverse               *float64 // nil before 3.1
			Rate                  *float64 `json:"target_bitrate"` // nil before 3.10
			PacketRate            float64  `json:"fqrate"`         // of --fq-rate, bits per second
		} `json:"test_start"`
	}
	End struct {
		Streams []struct {
			UDP struct {
				Reordered *float64 `json:"out_of_order"`
			}
			Sender struct {
				Sends *bool `json:"sender"` // of the end that reports
			}
		}
		Sent     *iperf3Sum `json:"sum_sent"`
		Received *iperf3Sum `json:"sum_received"`
		// The other direction of --bidir, since 3.11.
		SentBack     *iperf3Sum `json:"sum_sent_bidir_reverse"`
		ReceivedBack *iperf3Sum `json:"sum_received_bidir_reverse"`
		CPU          struct {
			Own   float64 `json:"host_total"`
			Other float64 `json:"remote_total"`
		} `json:"cpu_utilization_percent"`
	}
}

// iperf3Sum holds the counts of one end for all connections after the warm-up: each end resets its counters when its own
// timer of --omit expires.
type iperf3Sum struct {
	Seconds, Bytes, Retransmits, Packets float64
	Lost                                 *float64 `json:"lost_packets"`
	Jitter                               *float64 `json:"jitter_ms"` // mean over the connections
}

// Parse takes bytes, time and rate from the receiver's sum, which excludes the warm-up in every version.
func (iperf3) Parse(w spec.Workload, output []byte) (record.Endpoint, error) {
	e, err := parseIperf3(w, output)
	return parsed("iperf3", e, err)
}

// decodeIperf3 decodes the first report, and returns what follows it. Warnings may precede it.
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

// endpoint converts a report. Errors (of 3.9) may follow it.
func (r iperf3Report) endpoint(w spec.Workload, behind []byte) (record.Endpoint, error) {
	var e record.Endpoint
	sent, received := r.End.Sent, r.End.Received
	if sent == nil || received == nil {
		if w.Stream.Protocol == "udp" {
			return e, fmt.Errorf("its report has no sums of both ends (sum_sent and sum_received), without which %q does not say how long what arrived took: measure with 3.11 or later, and give the whole report", r.Start.Version)
		}
		if len(bytes.TrimSpace(behind)) == 0 {
			return e, errors.New("its report has no sums of both ends, sum_sent and sum_received: give the whole report of iperf3 -J")
		}
		return e, fmt.Errorf("its report has no sums of both ends; behind it: %.200q", behind)
	}
	e.Seconds = received.Seconds
	e.BitsPerSecond = received.Bytes * 8 / received.Seconds
	// The CPU share is that of the whole run. This assumes that the warm-up costs the same.
	e.CPUSeconds = r.End.CPU.Own / 100 * sent.Seconds
	if r.Start.Accepted != nil { // the server reports it
		e.CPUSeconds = r.End.CPU.Other / 100 * received.Seconds
	}
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
		if err == nil {
			err = r.arrived(&e)
		}
	}
	if err != nil {
		return e, err
	}
	return e, plausible(e)
}

// arrived adds what a UDP receiver reports about the order of datagrams and their jitter.
func (r iperf3Report) arrived(e *record.Endpoint) error {
	received := r.End.Received
	if received.Lost == nil || received.Jitter == nil || len(r.End.Streams) == 0 {
		return errors.New("its report lacks what arrived over UDP (lost_packets, jitter_ms, or the streams)")
	}
	for _, stream := range r.End.Streams {
		late := stream.UDP.Reordered
		if late == nil {
			return errors.New("its report lacks the out_of_order of a stream")
		}
		if !(*late >= 0 && *late < math.MaxInt64) {
			return fmt.Errorf("messages out of order of %g", *late)
		}
		e.Reordered += uint64(*late)
	}
	e.Jitter = *received.Jitter / 1e3
	return nil
}

// iperf3Lost returns how many datagrams of the window were lost, given how many arrived. Up to 3.13, the receiver's sum also
// counts losses of the warm-up. Then the difference between sent and arrived datagrams is a better estimate, although the two
// ends start the window a few milliseconds apart. The result is never more than the sum.
func iperf3Lost(arrived float64, sent, received *iperf3Sum) float64 {
	lost := 0.0
	if received.Lost != nil {
		lost = *received.Lost
	}
	if received.Packets-lost == arrived {
		return lost
	}
	return max(0, min(lost, sent.Packets-arrived))
}
