package tools

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// said describes a reading in a line: the format, the kind of traffic, and the non-zero figures of the first pair of the first
// run.
func said(r Reading) string {
	text := strings.TrimSpace(r.Format + " " + r.Version)
	if t := r.Workload.Traffic(); t != nil {
		text += fmt.Sprintf(": %s %s ip%d size=%d connections=%d warmup=%s duration=%s requests=%d",
			r.Workload.Kind(), t.Protocol, t.IP, t.Size, t.Connections, t.Warmup, t.Duration, t.Requests)
		if t.Iterations > 0 {
			text += fmt.Sprintf(" iterations=%d", t.Iterations)
		}
	}
	text += fmt.Sprintf("; %d runs", len(r.Runs))
	if len(r.Runs[0].Pairs) == 0 {
		return text
	}
	e := r.Runs[0].Pairs[0]
	text += fmt.Sprintf(" of %d pairs: %.4g s, %.6g bit/s, %d messages, %d lost, %d late, jitter %.3g", len(r.Runs[0].Pairs),
		e.Seconds, e.BitsPerSecond, e.Messages, e.Lost, e.Reordered, e.Jitter)
	if e.LossShare != nil {
		text += fmt.Sprintf(", loss %.4g", *e.LossShare)
	}
	if m := e.Machine; m != nil {
		text += fmt.Sprintf(", busy %.4g, interrupts %.4g, switches %.4g", m.Busy, m.Interrupts, m.Switches)
	}
	for _, name := range []string{metrics.LatencyMean, metrics.LatencyP50, metrics.LatencyP99, metrics.LatencyMax} {
		if v, ok := e.Percentiles[name]; ok {
			text += fmt.Sprintf(", %s %.4g", name, v)
		}
	}
	return text
}

func only(t *testing.T, readings []Reading, err error) Reading {
	t.Helper()
	if err != nil || len(readings) != 1 {
		t.Fatalf("%d readings, %v", len(readings), err)
	}
	return readings[0]
}

func TestRead(t *testing.T) {
	for _, tt := range []struct{ file, want, err string }{
		{file: "iperf3-3.12-tcp.json", want: "iperf3 3.12: stream tcp ip4 size=131072 connections=2 warmup=1s duration=2s requests=0; 1 runs of 1 pairs: 2 s, 4.48475e+10 bit/s, 0 messages, 0 lost, 0 late, jitter 0"},
		{file: "iperf3-3.19.1-udp.json", want: "iperf3 3.19.1: stream udp ip4 size=1400 connections=2 warmup=1s duration=2s requests=0; 1 runs of 1 pairs: 1.985 s, 3.32005e+09 bit/s, 588517 messages, 906367 lost, 0 late, jitter 9.95e-07"},
		{file: "iperf3-3.12-refused.json", err: "iperf3: unable to connect to server: Connection refused"},

		{file: "iperf2-2.1.8-tcp.txt", want: "iperf2: stream tcp ip4 size=0 connections=1 warmup=0s duration=1s requests=0; 1 runs of 1 pairs: 1.014 s, 5.27e+07 bit/s, 0 messages, 0 lost, 0 late, jitter 0"},
		{file: "iperf2-2.1.8-tcp-enhanced.txt", want: "iperf2: stream tcp ip4 size=0 connections=1 warmup=0s duration=1s requests=0; 1 runs of 1 pairs: 1.014 s, 5.27e+07 bit/s, 0 messages, 0 lost, 0 late, jitter 0"},
		{file: "iperf2-2.1.8-tcp-sum.txt", want: "iperf2: stream tcp ip4 size=0 connections=2 warmup=0s duration=2s requests=0; 1 runs of 1 pairs: 2 s, 1.06e+08 bit/s, 0 messages, 0 lost, 0 late, jitter 0"},
		// 6.29 MBytes of 2^20 in a second.
		{file: "iperf2-2.1.8-tcp-bytes.txt", want: "iperf2: stream tcp ip4 size=0 connections=1 warmup=0s duration=1s requests=0; 1 runs of 1 pairs: 1.014 s, 5.27643e+07 bit/s, 0 messages, 0 lost, 0 late, jitter 0"},
		// 52603514 and 52596748, with six digits.
		{file: "iperf2-2.1.8-tcp.csv", want: "iperf2: stream tcp ip4 size=0 connections=2 warmup=0s duration=2s requests=0; 1 runs of 1 pairs: 2 s, 1.052e+08 bit/s, 0 messages, 0 lost, 0 late, jitter 0"},
		{file: "iperf2-2.1.8-udp.txt", want: "iperf2: stream udp ip4 size=1470 connections=1 warmup=0s duration=1s requests=0; 1 runs of 1 pairs: 1.003 s, 5.27e+06 bit/s, 449 messages, 0 lost, 0 late, jitter 2e-06"},
		// What arrived on both connections, according to their servers.
		{file: "iperf2-2.0.5-udp-sum.txt", want: "iperf2: stream udp ip4 size=1470 connections=2 warmup=0s duration=1m requests=0; 1 runs of 1 pairs: 60 s, 1.922e+08 bit/s, 980743 messages, 44605 lost, 1 late, jitter 0.000103"},
		{file: "iperf2-2.1.8-udp-no-report.txt", err: "it has 0 reports of the server for 2 connections"},
		{file: "iperf2-2.1.8-udp-no-report.csv", err: "it has 0 reports of the server for 1 connections"},
		{file: "iperf2-2.1.8-refused.txt", err: "iperf2: tcp connect failed: Connection refused"},

		{file: "sockperf-3.7-pingpong-tcp.txt", want: "sockperf 3.7-no.git: pingpong tcp ip4 size=0 connections=1 warmup=0s duration=1s requests=0; 1 runs of 1 pairs: 0.549 s, 0 bit/s, 66889 messages, 0 lost, 0 late, jitter 0, latency_mean 8.181e-06, latency_p50 5.006e-06, latency_p99 2.34e-05, latency_max 0.00527"},
		{file: "sockperf-3.7-underload-udp.txt", want: "sockperf 3.7-no.git: underload udp ip4 size=0 connections=1 warmup=0s duration=1s requests=0; 1 runs of 1 pairs: 0.555 s, 0 bit/s, 2752 messages, 0 lost, 0 late, jitter 0, latency_mean 0.001344, latency_p50 0.0001005, latency_p99 0.009261, latency_max 0.01108"},
		{file: "sockperf-3.7-stream-tcp.txt", want: "sockperf 3.7-no.git: stream tcp ip4 size=1400 connections=1 warmup=0s duration=1s requests=0; 1 runs of 1 pairs: 1.001 s, 6.94407e+09 bit/s, 620626 messages, 0 lost, 0 late, jitter 0"},
		{file: "sockperf-3.7-refused.txt", err: "(errno=111 Connection refused)"},

		{file: "qperf-0.4.11-tcp_lat.txt", want: "qperf: pingpong tcp ip0 size=64 connections=1 warmup=0s duration=1s requests=0; 1 runs of 1 pairs: 1 s, 0 bit/s, 105544 messages, 0 lost, 0 late, jitter 0, latency_mean 9.475e-06"},
		{file: "qperf-0.4.11-udp_bw.txt", want: "qperf: stream udp ip0 size=1400 connections=1 warmup=0s duration=1s requests=0; 1 runs of 1 pairs: 1 s, 2.45614e+09 bit/s, 219298 messages, 254434 lost, 0 late, jitter 0"},
		// 6.31 µs one way are 79239 round trips in a second.
		{file: "qperf-0.4.11-terse.txt", want: "qperf: pingpong tcp ip0 size=0 connections=1 warmup=0s duration=30s requests=0; 1 runs of 1 pairs: 30 s, 0 bit/s, 2377179 messages, 0 lost, 0 late, jitter 0, latency_mean 1.262e-05"},
		{file: "qperf-0.4.11-refused.txt", err: "127.0.0.1: failed to connect"},

		{file: "ab-2.3-kept.txt", want: "ab 2.3: http tcp ip0 size=1024 connections=8 warmup=0s duration=1s requests=30802; 1 runs of 1 pairs: 1 s, 0 bit/s, 30802 messages, 0 lost, 0 late, jitter 0, latency_mean 0.00026, latency_p50 0.000127, latency_p99 0.001931, latency_max 0.087"},
		{file: "ab-2.3-refused.txt", err: "ab: every request failed"},

		{file: "latte-udp.txt", want: "latte: pingpong udp ip0 size=4 connections=1 warmup=0s duration=11m40s requests=0 iterations=10000000; 1 runs of 1 pairs: 699.8 s, 0 bit/s, 10000000 messages, 0 lost, 0 late, jitter 0, busy 0.028, interrupts 3.86, switches 2.29, latency_mean 6.998e-05, latency_max 0.018"},
		{file: "latte-no-histogram.txt", want: "latte: pingpong udp ip0 size=4 connections=1 warmup=0s duration=11m40s requests=0 iterations=10000000; 1 runs of 1 pairs: 699.8 s, 0 bit/s, 10000000 messages, 0 lost, 0 late, jitter 0, busy 0.028, interrupts 3.86, switches 2.29, latency_mean 6.998e-05"},

		{file: "mpstat-12.6.1.txt", want: "mpstat; 1 runs"},
		{file: "mpstat-12.6.1-all.txt", err: "mpstat: it has no line for each CPU: run mpstat with -P ALL"},
		{file: "rps-rfs-log.txt", want: "run log: stream  ip0 size=0 connections=0 warmup=0s duration=30s requests=0; 2 runs of 2 pairs: 30 s, 1.75e+09 bit/s, 0 messages, 0 lost, 0 late, jitter 0"},
		// The commands of published measurements, with several tests in one output: the detailed figures, and a round trip of
		// twice the 19.1 µs one way.
		{file: "qperf-0.4.11-bw-lat-conf.txt", want: "qperf: stream tcp ip0 size=0 connections=1 warmup=0s duration=30s requests=0; 1 runs of 1 pairs: 30 s, 2.656e+09 bit/s, 0 messages, 0 lost, 0 late, jitter 0\n" +
			"qperf: pingpong tcp ip0 size=0 connections=1 warmup=0s duration=30s requests=0; 1 runs of 1 pairs: 30 s, 0 bit/s, 785340 messages, 0 lost, 0 late, jitter 0, latency_mean 3.82e-05"},
		{file: "qperf-0.4.11-bw-lat-conf-v.txt", want: "qperf: stream tcp ip0 size=0 connections=1 warmup=0s duration=1s requests=0; 1 runs of 1 pairs: 1 s, 3.448e+09 bit/s, 0 messages, 0 lost, 0 late, jitter 0\n" +
			"qperf: pingpong tcp ip0 size=0 connections=1 warmup=0s duration=1s requests=0; 1 runs of 1 pairs: 1 s, 0 bit/s, 38168 messages, 0 lost, 0 late, jitter 0, latency_mean 2.62e-05"},
		{file: "qperf-0.4.11-bw-lat-conf-sizes.txt", want: "qperf: stream tcp ip0 size=65536 connections=1 warmup=0s duration=1s requests=0; 1 runs of 1 pairs: 1 s, 2.936e+09 bit/s, 0 messages, 0 lost, 0 late, jitter 0\n" +
			"qperf: pingpong tcp ip0 size=1 connections=1 warmup=0s duration=1s requests=0; 1 runs of 1 pairs: 1 s, 0 bit/s, 30120 messages, 0 lost, 0 late, jitter 0, latency_mean 3.32e-05"},
		{file: "qperf-0.4.11-udp-bw-lat.txt", want: "qperf: stream udp ip0 size=0 connections=1 warmup=0s duration=30s requests=0; 1 runs of 1 pairs: 30 s, 9.6e+09 bit/s, 0 messages, 0 lost, 0 late, jitter 0, loss 0.6013\n" +
			"qperf: pingpong udp ip0 size=0 connections=1 warmup=0s duration=30s requests=0; 1 runs of 1 pairs: 30 s, 0 bit/s, 1127820 messages, 0 lost, 0 late, jitter 0, latency_mean 2.66e-05"},
		{file: "latte-iterations.txt", want: "latte: pingpong tcp ip0 size=4 connections=1 warmup=0s duration=3m10s requests=0 iterations=65000; 1 runs of 1 pairs: 189.9 s, 0 bit/s, 65000 messages, 0 lost, 0 late, jitter 0, busy 0.068, interrupts 13.16, switches 17.13, latency_mean 0.002921"},
		{file: "sockperf-3.7-stream-64.txt", want: "sockperf 3.7-no.git: stream tcp ip4 size=64 connections=1 warmup=0s duration=1s requests=0; 1 runs of 1 pairs: 1.048 s, 7.49274e+07 bit/s, 153367 messages, 0 lost, 0 late, jitter 0"},
		{file: "sockperf-3.7-underload-max.txt", want: "sockperf 3.7-no.git: underload tcp ip4 size=0 connections=1 warmup=0s duration=1s requests=0; 1 runs of 1 pairs: 0.542 s, 0 bit/s, 1303 messages, 0 lost, 0 late, jitter 0, latency_mean 0.009234, latency_p50 0.007406, latency_p99 0.02807, latency_max 0.03273"},
		{file: "ab-2.3-plain.txt", want: "ab 2.3: http tcp ip0 size=6 connections=4 warmup=0s duration=1s requests=500; 1 runs of 1 pairs: 0.871 s, 0 bit/s, 500 messages, 0 lost, 0 late, jitter 0, latency_mean 0.006971, latency_p99 0.063, latency_max 0.319"},
		{file: "iperf2-2.1.8-full-duplex.txt", err: "iperf2: line 7: traffic from the server to the client too"},
		{file: "iperf2-2.1.8-reverse.txt", err: "iperf2: line 7: traffic from the server to the client too"},
		// iperf could not listen for the other direction (-d), so there was none.
		{file: "iperf2-2.1.8-dual-not-bound.txt", want: "iperf2: stream tcp ip4 size=0 connections=1 warmup=0s duration=2s requests=0; 1 runs of 1 pairs: 2.038 s, 3.24e+09 bit/s, 0 messages, 0 lost, 0 late, jitter 0"},
		// Forms that people post in bug reports.
		{file: "iperf2-2.0.5-dual.txt", err: "iperf2: line 6: traffic from the server"},
		{file: "iperf2-2.0.5-tradeoff.txt", err: "iperf2: line 6: traffic from the server"},
		{file: "iperf2-2.1.9-enhanced.csv", want: "iperf2: stream tcp ip4 size=0 connections=1 warmup=0s duration=10s requests=0; 1 runs of 1 pairs: 10 s, 1e+09 bit/s, 0 messages, 0 lost, 0 late, jitter 0"},
		{file: "iperf2-2.2.0-enhanced.csv", want: "iperf2: stream tcp ip4 size=0 connections=1 warmup=0s duration=10s requests=0; 1 runs of 1 pairs: 10 s, 1e+09 bit/s, 0 messages, 0 lost, 0 late, jitter 0"},
		{file: "iperf2-2.0.5-three-runs.csv", want: "iperf2: stream tcp ip4 size=0 connections=1 warmup=0s duration=10s requests=0; 3 runs of 1 pairs: 10 s, 2e+08 bit/s, 0 messages, 0 lost, 0 late, jitter 0"},
		{file: "iperf2-2.0.5-no-line-end.txt", want: "iperf2: stream tcp ip4 size=0 connections=1 warmup=0s duration=10s requests=0; 1 runs of 1 pairs: 10 s, 9.47913e+08 bit/s, 0 messages, 0 lost, 0 late, jitter 0"},
		{file: "mpstat-12-german.txt", want: "mpstat; 1 runs"},
		{file: "mpstat-12-french.txt", want: "mpstat; 1 runs"},
		{file: "mpstat-12-nodes.txt", want: "mpstat; 1 runs"},
		{file: "mpstat-12-offline.txt", want: "mpstat; 1 runs"},
		{file: "mpstat-8.txt", want: "mpstat; 1 runs"},
		{file: "sockperf-3.7-pingpong-udp-dropped.txt", want: "sockperf 3.7-no.git: pingpong udp ip4 size=0 connections=1 warmup=0s duration=10s requests=0; 1 runs of 1 pairs: 9.55 s, 0 bit/s, 95500 messages, 20 lost, 0 late, jitter 0, latency_mean 5e-05, latency_p50 4.8e-05, latency_p99 8e-05, latency_max 0.0003"},
		{file: "sockperf-3.7-full-log.txt", want: "sockperf: pingpong  ip0 size=64 connections=1 warmup=0s duration=20s requests=0; 1 runs of 1 pairs: 19.99 s, 0 bit/s, 2000 messages, 0 lost, 0 late, jitter 0, latency_mean 6.6e-05, latency_p50 6.4e-05, latency_p99 8.6e-05, latency_max 9.8e-05"},
		{file: "ab-2.3-length.txt", want: "ab 2.3: http tcp ip0 size=100 connections=10 warmup=0s duration=2s requests=2000; 1 runs of 1 pairs: 2 s, 0 bit/s, 100 messages, 0 lost, 0 late, jitter 0"},
		{file: "ab-2.0.40-length.txt", want: "ab 2.0.40-dev: http tcp ip0 size=100 connections=10 warmup=0s duration=2s requests=2000; 1 runs of 1 pairs: 2 s, 0 bit/s, 1997 messages, 0 lost, 0 late, jitter 0"},
		{file: "ab-2.3-two-runs.txt", want: "ab 2.3: http tcp ip0 size=100 connections=10 warmup=0s duration=8s requests=2000; 2 runs of 1 pairs: 2 s, 0 bit/s, 2000 messages, 0 lost, 0 late, jitter 0, latency_mean 0.01, latency_p50 0.01, latency_p99 0.025, latency_max 0.041"},
		{file: "mpstat-12.6.1.json", want: "mpstat; 1 runs"},
		{file: "mpstat-12.6.1-everything.txt", want: "mpstat; 1 runs"},
	} {
		t.Run(tt.file, func(t *testing.T) {
			readings, err := Read(golden(t, tt.file), Known{Window: 30 * time.Second})
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("error %v, want %q", err, tt.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, r := range readings {
				got = append(got, said(r))
			}
			if got := strings.Join(got, "\n"); got != tt.want {
				t.Errorf("\n got %s\nwant %s", got, tt.want)
			}
		})
	}
}

// TestReadWithoutWindow checks that an output that does not say how long the run was needs a window.
func TestReadWithoutWindow(t *testing.T) {
	for _, file := range []string{"rps-rfs-log.txt", "qperf-0.4.11-terse.txt"} {
		if _, err := Read(golden(t, file), Known{}); !NoWindow(err) {
			t.Errorf("%s: error %v", file, err)
		}
	}
	if _, err := Read(golden(t, "iperf2-2.1.8-refused.txt"), Known{}); NoWindow(err) {
		t.Errorf("for want of a window: %v", err)
	}
}

// another returns an iperf3 report of another run with the same figures.
func another(report []byte, cookie string) []byte {
	return bytes.Replace(report, []byte(`jxpojjtgc2qc`), []byte(cookie), 1)
}

// TestReadReports checks that several iperf3 reports in one file are several runs, whatever text is between them, if they are
// of the same traffic and different, and that no part of a report is left out.
func TestReadReports(t *testing.T) {
	report := golden(t, "iperf3-3.12-tcp.json")
	second, third := another(report, "kxpojjtgc2qc"), another(report, "lxpojjtgc2qc")
	otherClock := bytes.Replace(report, []byte(`"timesecs":	1795211527`), []byte(`"timesecs":	1795211529`), 1)
	array := bytes.Join([][]byte{[]byte("[\n"), report, []byte(","), second, []byte("]")}, nil)
	half := report[:len(report)/2]
	for name, tt := range map[string]struct {
		text         []byte
		runs, copies int
		err          string
	}{
		"one after another": {text: together(report, second, third), runs: 3},
		"headings":          {text: together([]byte("run 1"), report, []byte("----- run 2 (10 s) -----"), second, []byte("[done]")), runs: 2},
		"a list":            {text: array, runs: 2},
		"lists":             {text: together(array, bytes.Join([][]byte{[]byte("[["), third, []byte("]]")}, nil)), runs: 3},
		"the same":          {text: together(report, report, second), runs: 2, copies: 1},
		"of the other end":  {text: together(report, otherClock, second), runs: 2, copies: 1},
		"lists in lists":    {text: bytes.Join([][]byte{[]byte("[[[[\n"), report, []byte("]]]]")}, nil), err: "line 2 has lists in lists"},
		"error in a list":   {text: bytes.Join([][]byte{[]byte("[\n"), report, []byte(",\n"), report, []byte(",\n{}]")}, nil), err: "line 346 has JSON that is no report"},
		"other traffic":     {text: together(report, bytes.Replace(second, []byte(`"num_streams":	2`), []byte(`"num_streams":	3`), 1)), err: "report 2, in line 173: it was to have 3 connections, and lists 2"},
		"other direction":   {text: together(report, bytes.Replace(second, []byte(`"reverse":	0`), []byte(`"reverse":	1`), 1)), err: "report 2, in line 173: it has other traffic than run 1: direction reverse, not forward"},
		"half":              {text: together(report, half), err: "the report that begins in line 173 is incomplete"},
		"half, then one":    {text: together(half, report), err: "is not JSON"},
		"the second half":   {text: together(report, []byte(`"sum_received": {}`)), err: "line 173 belongs to no report"},
		"text, too":         {text: together(report, []byte("[  5]   0.00-10.00  sec  5.82 GBytes  5.00 Gbits/sec")), err: "line 173 belongs to no report"},
		"an error":          {text: together(report, []byte("iperf3: error - unable to connect")), err: "line 173 is not read: it is iperf3's text"},
		"other JSON":        {text: together(report, []byte(`{"a": 1}`)), err: "line 173 has JSON that is no report of iperf3"},
		"within other JSON": {text: bytes.Join([][]byte{[]byte(`{"result":`), report, []byte("}")}, nil), err: `not at the top, but in "result"`},
	} {
		readings, err := Read(tt.text, Known{})
		switch {
		case tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)):
			t.Errorf("%s: error %v, want %q", name, err, tt.err)
		case tt.err == "" && err != nil:
			t.Errorf("%s: %v", name, err)
		case tt.err == "" && (len(readings[0].Runs) != tt.runs || readings[0].Copies != tt.copies):
			t.Errorf("%s: %d runs, %d copies", name, len(readings[0].Runs), readings[0].Copies)
		}
	}
}

// TestReadLong checks that the time to read an output is linear in its length. The limit is several times what that takes on a
// busy machine, and a fraction of what quadratic time would take.
func TestReadLong(t *testing.T) {
	const n, limit = 80_000, 30 * time.Second
	var events, list, line, connections strings.Builder
	for i := range n {
		fmt.Fprintf(&events, `{"event":"interval","data":{"n":%d}}`+"\n", i)
		fmt.Fprintf(&list, `,{"event":"interval","data":{"n":%d}}`+"\n", i)
		fmt.Fprintf(&line, `- {"event":"interval","data":{"n":%d}}`, i)
		fmt.Fprintf(&connections, "20240101000000,10.0.0.1,%d,10.0.0.2,5001,%d,0.0-10.0,1250,1000\n", 33_000+i%32_000, i+3)
	}
	start := `{"event":"start","data":{"test_start":1,"intervals":[]}}` + "\n"
	for name, output := range map[string]string{
		"events": start + events.String(), "list": "[" + start + list.String() + "]", "line": start + line.String(), "connections": connections.String(),
		"lists in lists": strings.Repeat("[", 9_000) + string(golden(t, "iperf3-3.12-tcp.json")) + strings.Repeat("]", 9_000),
	} {
		begin := time.Now()
		_, err := Read([]byte(output), Known{})
		if took := time.Since(begin); took > limit {
			t.Errorf("%s of %d bytes took %s (%v)", name, len(output), took, err)
		} else {
			t.Logf("%s: %s", name, took)
		}
	}
}

func together(parts ...[]byte) []byte { return bytes.Join(parts, []byte("\n")) }

// TestReadAB checks that a plain run has percentiles in whole milliseconds.
func TestReadAB(t *testing.T) {
	var plain []byte
	for line := range bytes.Lines(golden(t, "ab-2.3-kept.txt")) {
		if !abPercentile.Match(bytes.TrimSpace(line)) {
			plain = append(plain, line...)
		}
	}
	plain = bytes.ReplaceAll(plain, []byte("  0.260 [ms] (mean)"), []byte(" 20.260 [ms] (mean)"))
	// The maximum is rounded like the others, and known to be wrong if it is less than the 99th percentile.
	for longest, want := range map[string]map[string]float64{
		" 100%    678 (longest request)\n": {metrics.LatencyP50: 0.012, metrics.LatencyP99: 0.345, metrics.LatencyMean: 0.02026, metrics.LatencyMax: 0.678},
		" 100%    344 (longest request)\n": {metrics.LatencyP50: 0.012, metrics.LatencyP99: 0.345, metrics.LatencyMean: 0.02026},
	} {
		readings, err := Read(append(slices.Clone(plain), "  50%     12\n  99%    345\n"+longest...), Known{})
		if diff := cmp.Diff(want, only(t, readings, err).Runs[0].Pairs[0].Percentiles, cmpopts.EquateApprox(1e-9, 0)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", longest, diff)
		}
	}
}

// TestSockperfSize checks that the size of messages is computed from the rates, if these have enough digits.
func TestSockperfSize(t *testing.T) {
	for text, want := range map[string]spec.Bytes{
		"Message Rate is 619808 [msg/sec]\nBandWidth is 827.533 MBps":   1400,
		"Message Rate is 619808 [msg/sec]\nBandWidth is 38720.33 MBps":  65506,
		"Message Rate is 20 [msg/sec]\nBandWidth is 0.027 MBps":         0,
		"NOTE: test was performed, using msg-size=1400. For getting ma": 1400,
	} {
		if got := sockperfSize([]byte(text)); got != want {
			t.Errorf("%s: %d, want %d", text, got, want)
		}
	}
}

func TestReadRefuses(t *testing.T) {
	tcp := "Client connecting to 10.0.0.2, TCP port 5001\n"
	for output, want := range map[string]string{
		"":      "not the output of a known tool",
		"a,b\n": "not the output of a known tool",
		"[  5] local 10.0.0.1 port 1 connected to\niperf Done.\n": "which slipstream does not read: run iperf3 with -J",
		tcp: "its output ends too early: there is no summary line",
		tcp + "[  3]  0.0- 1.0 sec  1.0 MBytes  8.0 Mbits/sec\n[  3]  1.0- 2.0 sec  1.0 MBytes  8.0 Mbits/sec\n":                                             "there are intervals, but no summary line",
		tcp + "[  3] local 10.0.0.1 port 1 connected with x\n[  4] local 10.0.0.1 port 2 connected with x\n[  3]  0.0-10.0 sec  1.0 MBytes  8.0 Mbits/sec\n": "1 of 2 connections have a summary line",
		tcp + "[  3]  0.0-10.0 sec  1.0 MBytes  8.0 Mbits/sec\n" + tcp:                                                                                       "run 2, which begins in line 3: its output ends too early",
		"Server listening on TCP port 5001\n[  4]  0.0-10.0 sec  1.09 GBytes   39 Mbits/sec\n":                                                               "give the client's",
		"20140114124826,127.0.0.1,54402,127.0.0.1,5001,5,0.0-10.0,52551090176\n":                                                                             "with 8 fields",
		"10:00:00 CPU %usr %idle\n10:00:01 0 1 99\n":                                                                                                         "it has no averages",
		"Average: CPU %usr %idle\nAverage: 0 1 9\n":                                                                                                          "CPU 0 has shares of 10% in all",
		"Average: CPU %usr %idle\nAverage: 0 1 99\nAverage: 0 1 99\n":                                                                                        "CPU 0 is listed twice",
		"Average: CPU %usr %idle\nAverage: 0 x 99\n":                                                                                                         `%usr of "x" of CPU 0`,
		"Running experiment 1...\nExperiment 1 completed.\n":                                                                                                 "run 1 has 0 bit rates",
		"Running experiment 1...\n1\n2\nRunning experiment 2...\n1\n":                                                                                        "run 2 has 1 bit rates, run 1 has 2",
		"Running experiment 1...\nNaN\n":                                                                                                                     `not understood at "NaN"`,
		"Running experiment 1...\n1\nRunning experiment 2...\n1\nAverage: CPU %usr %idle\nAverage: 0 1 99\n":                                                 "averages of mpstat for 1 of 2 runs",
		`{"start":{"test_start":{"protocol":"SCTP"}},"intervals":[],"end":{}}`:                                                                               `the protocol "SCTP"`,
		`{"start":{"test_start":{"protocol":"TCP","bidir":1}},"intervals":[],"end":{}}`:                                                                      "--bidir",
		`{"start":{"test_start":{"protocol":"TCP","bytes":1}},"intervals":[],"end":{}}`:                                                                      "for no set time",
		`{"start":{"test_start":{"protocol":"TCP","duration":1e99,"num_streams":1}},"intervals":[],"end":{}}`:                                                "it ran for 1e+99 s",
		`{"start":{"test_start":{"protocol":"TCP","duration":1,"num_streams":1e99}},"intervals":[],"end":{}}`:                                                "1e+99 connections",
		"tcp_lat:\n    latency  =  6.31 parsecs\n":                                                                                                           `latency of "6.31 parsecs", want a number in ms, ns, sec, us`,
		"tcp_lat:\n    time  =  2 sec\n":                                                                                                                     "its output has no",
		"tcp_lat:\n    latency  =  1 us\n    lat_p99  =  6.31 us\n":                                                                                          `line 3: qperf has no figure "lat_p99"`,
		"tcp_bw:\n    bw  =  6.31 us\n":                                                                                                                      `bw of "6.31 us"`,
		"tcp_bw:\n    bw  =  6.31 bytes\n":                                                                                                                   `bw of "6.31 bytes"`, // half of bytes/sec
		"rc_bw:\n    bw  =  1 GB/sec\n":                                                                                                                      "rc_bw in line 1: the test rc_bw is not read",
		"tcp_lat:\n    latency  =  1 us\n    latency  =  2 us\n":                                                                                             "line 3: tcp_lat has latency twice",
		"tcp_lat:\n    latency  =  1 us\nserver: gone\n":                                                                                                     "line 3: server: gone",
		"conf:\n    loc_node   =  a\n":                                                                                                                       "it has no test of qperf that measures something",
		"udp_bw:\n    send_bw  =  1 GB/sec\n    recv_bw  =  2 GB/sec\n":                                                                                      "it received 1.6e+10 bit/s and sent 8e+09",
		"tcp_lat:\n    latency  =  1 us\n    msg_size = 1 bytes\ntcp_lat:\n    latency  =  1 us\n    msg_size = 2 bytes\n":                                   "tcp_lat in line 4: it has other traffic than run 1: size 2, not 1",
		"tcp_lat:\n    latency  =  1 us\nThis is ApacheBench, Version 2.3\n":                                                                                 "the outputs of qperf and ab",
		"Protocol  TCP\nLatency(usec) 1,5\n":                                                                                                                 `line 2: it is not understood: "Latency(usec) 1,5"`,
		"Protocol  TCP\nMsgSize(byte) 4\nIterations    9\nLatency(usec) 3.5":                                                                                 "line 4: it has no line end",
		"sockperf: x\n[ 0] IP = 10.0.0.2  PORT =  5302 # UDP\nsockperf: Total of 620626 messages sent in 1.001 sec\nusing msg-size=1400. For":                "use iperf3",
		"sockperf: x\n[ 0] IP = 10.0.0.2  PORT =  5302 # TCP\n[ 1] IP = 10.0.0.2  PORT =  5303 # TCP\n":                                                      "2 connections",
		"sockperf: x\n[ 0] IP = 10.0.0.2  PORT =  5302 # TCP\nsockperf: Total of 620626 messages sent in 1.001 sec\nMessage Rate is 20 [msg/sec]\nBandWidth is 0.027 M": "how large its messages are",
	} {
		if _, err := Read([]byte(output), Known{Window: 30 * time.Second}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q, of\n%s", err, want, output)
		}
	}
}

// TestReadTruncated truncates outputs at every byte up to the end of the last significant line, and checks that they are
// refused.
func TestReadTruncated(t *testing.T) {
	for file, last := range map[string]string{
		"iperf2-2.1.8-tcp.txt":          "52.7 Mbits/sec",
		"iperf2-2.1.8-udp.txt":          "0/449 (",
		"iperf2-2.0.5-udp-sum.txt":      "20000/512674 (",
		"iperf2-2.1.8-tcp-bytes.txt":    "MBytes/sec",
		"mpstat-12.6.1.txt":             "37.31",
		"iperf2-2.1.8-tcp-enhanced.txt": "52.7 Mbits/sec",
	} {
		whole := golden(t, file)
		end := bytes.LastIndex(whole, []byte(last)) + len(last)
		for n := range end {
			if r, err := Read(whole[:n], Known{Window: time.Second}); err == nil {
				t.Errorf("%s: the first %d bytes of %d give %s", file, n, end, said(r[0]))
			}
		}
		if _, err := Read(whole[:end+1], Known{Window: time.Second}); err != nil {
			t.Errorf("%s: the first %d bytes: %v", file, end+1, err)
		}
	}
}

// fewer compares only the percentiles that both have.
var fewer = cmp.Comparer(func(a, b map[string]float64) bool {
	for name, v := range a {
		if other, ok := b[name]; ok && v != other {
			return false
		}
	}
	return true
})

// TestReadHalfLine truncates every output at every byte, and checks that an incomplete number is never taken for a number: a
// truncated line reads like the whole line, or is ignored.
func TestReadHalfLine(t *testing.T) {
	files, err := filepath.Glob(filepath.Join("testdata", "*-*"))
	if err != nil {
		t.Fatal(err)
	}
	tried := 0
	for _, path := range files {
		file := filepath.Base(path)
		whole := golden(t, file)
		if _, err := Read(whole, Known{Window: time.Second}); err != nil || len(whole) > 4<<10 {
			continue
		}
		tried++
		upTo := reader(whole)
		for n := range len(whole) {
			half, err := Read(whole[:n], Known{Window: time.Second})
			if err != nil || whole[n-1] == '\n' {
				continue
			}
			end := len(whole)
			if i := bytes.IndexByte(whole[n:], '\n'); i >= 0 {
				end = n + i + 1
			}
			line, err := upTo(end)
			if err != nil { // another run begins, and is incomplete
				continue
			}
			before, _ := upTo(1 + bytes.LastIndexByte(whole[:n], '\n'))
			if diff := cmp.Diff(line, half, fewer, sameFigures, cmpopts.EquateApprox(0.005, 0)); diff != "" && !cmp.Equal(before, half, sameFigures) {
				t.Errorf("%s: half a line, of %d bytes, is taken for a whole one (-whole +half):\n%s", file, n, diff)
			}
		}
	}
	if tried < 30 {
		t.Errorf("%d outputs tried", tried)
	}
}

// reader returns a function that reads an output up to an offset, and reads no part twice.
func reader(whole []byte) func(end int) ([]Reading, error) {
	type reading struct {
		all []Reading
		err error
	}
	done := make(map[int]reading)
	return func(end int) ([]Reading, error) {
		r, ok := done[end]
		if !ok {
			r.all, r.err = Read(whole[:end], Known{Window: time.Second})
			done[end] = r
		}
		return r.all, r.err
	}
}

var sameFigures = cmp.Options{cmpopts.IgnoreFields(Run{}, "ID"), cmpopts.IgnoreFields(Reading{}, "Copies")}

func TestMpstat(t *testing.T) {
	readings, err := Read(golden(t, "mpstat-12.6.1.txt"), Known{})
	r := only(t, readings, err)
	want := []record.CPU{
		{ID: 0, User: 0.4693, System: 0.2755, Softirq: 0.0204, SoftirqTicks: 0.0204, Idle: 0.2347, Busy: 0.7653},
		{ID: 1, User: 0.4094, System: 0.1865, Softirq: 0.0207, SoftirqTicks: 0.0207, Idle: 0.3835, Busy: 0.6165},
	}
	if diff := cmp.Diff(want, r.Runs[0].CPUs, cmpopts.EquateApprox(0, 1e-9)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	comma := strings.ReplaceAll(string(golden(t, "mpstat-12.6.1.txt")), ".", ",")
	readings, err = Read([]byte(comma), Known{})
	if again := only(t, readings, err); !cmp.Equal(again.Runs, r.Runs, sameFigures) {
		t.Error("with decimal commas it is another")
	}
}

// TestMpstatShapes checks that outputs of other languages, options and versions have the same figures, and that offline CPUs do
// not count.
func TestMpstatShapes(t *testing.T) {
	for file, want := range map[string][]float64{
		"mpstat-12-german.txt": {0.45, 0.15}, "mpstat-12-french.txt": {0.45, 0.15}, "mpstat-12-nodes.txt": {0.45, 0.15},
		"mpstat-8.txt": {0.45, 0.15}, "mpstat-12-offline.txt": {0.45}, "mpstat-12.6.1.json": {1, 1}, "mpstat-12.6.1-everything.txt": {1, 1},
	} {
		readings, err := Read(golden(t, file), Known{})
		var busy []float64
		for _, cpu := range only(t, readings, err).Runs[0].CPUs {
			busy = append(busy, cpu.Busy)
		}
		if diff := cmp.Diff(want, busy, cmpopts.EquateApprox(0, 1e-9)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", file, diff)
		}
	}
	for output, want := range map[string]string{
		"Linux 6 (a)  1/2/26  _x86_64_  (4 CPU)\nAverage: CPU %usr %idle\nAverage: 0 1 99\n":                         "the averages of 1 of 4 CPUs",
		"Average: CPU %usr %idle\nAverage: 0 1.00 9":                                                                 "line 2: CPU 0 has shares of 10%",
		"Average: CPU %usr %idle\nAverage: 0 1.00 99":                                                                "line 2: it has no line end",
		`{"sysstat":{"hosts":[{"number-of-cpus":2,"statistics":[{"cpu-load":[{"cpu":"all","usr":1,"idle":99}]}]}]}}`: "0 of 2 CPUs: run mpstat with -P ALL",
		`{"sysstat":{"hosts":[{"statistics":[{"cpu-load":[{"cpu":"0","usr":1,"idle":9}]}]}]}}`:                       "CPU 0 has shares of 10%",
		`{"sysstat":{"hosts":[{"statistics":[{"cpu-load":[`:                                                          "is incomplete",
	} {
		if _, err := Read([]byte(output), Known{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q, of\n%s", err, want, output)
		}
	}
}

// TestReadTogether checks that concatenated outputs are runs, if they are of the same traffic, and that a duplicate does not
// count as another run, unless it has so few digits that it may be one.
func TestReadTogether(t *testing.T) {
	for file, change := range map[string][2]string{
		"sockperf-3.7-pingpong-tcp.txt": {"8.181", "8.182"}, "latte-iterations.txt": {"2920.", "2922."}, "latte-udp.txt": {"69.98", "69.97"},
		"ab-2.3-plain.txt": {"0.871 sec", "0.872 sec"}, "iperf2-2.1.8-tcp.txt": {"52.7", "52.8"}, "iperf2-2.1.8-tcp.csv": {":", ":"},
		"iperf2-2.1.8-udp.txt": {"0.002 ms", "0.003 ms"}, "iperf3-3.12-tcp.json": {"jxpojjtgc2qc", "kxpojjtgc2qc"},
		"qperf-0.4.11-bw-lat-conf.txt": {},
	} {
		one := golden(t, file)
		other := bytes.ReplaceAll(one, []byte(change[0]), []byte(change[1]))
		switch file {
		case "iperf2-2.1.8-tcp.csv":
			other = bytes.ReplaceAll(one, []byte(",43668"), []byte(",43768"))
			other = bytes.ReplaceAll(other, []byte(",43674"), []byte(",43774"))
		case "qperf-0.4.11-bw-lat-conf.txt":
			other = one
		}
		text := together(one, []byte("C:\\tools> again"), other, one)
		if strings.HasPrefix(file, "qperf") || strings.HasSuffix(file, ".csv") {
			text = bytes.Join([][]byte{one, other, one}, nil)
		}
		want := [2]int{2, 1}
		if strings.HasPrefix(file, "qperf") {
			want = [2]int{3, 0}
		}
		readings, err := Read(text, Known{Window: time.Second})
		if err != nil {
			t.Errorf("%s: %v", file, err)
		}
		for _, r := range readings {
			if got := [2]int{len(r.Runs), r.Copies}; got != want {
				t.Errorf("%s: %d runs and copies, want %d, of %s", file, got, want, said(r))
			}
		}
	}
	_, err := Read(together(golden(t, "sockperf-3.7-pingpong-tcp.txt"), golden(t, "sockperf-3.7-pingpong-udp.txt")), Known{})
	if want := "run 2, which begins in line 27: it has other traffic than run 1: protocol udp, not tcp"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("error %v, want %q", err, want)
	}
}

func TestRunLog(t *testing.T) {
	readings, err := Read(golden(t, "rps-rfs-log.txt"), Known{Window: 10 * time.Second})
	run := only(t, readings, err).Runs[1]
	want := []record.Endpoint{{Seconds: 10, BitsPerSecond: 1510e6, Bytes: 1887500000}, {Seconds: 10, BitsPerSecond: 1640e6, Bytes: 2050000000}}
	if diff := cmp.Diff(want, run.Pairs); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if len(run.CPUs) != 4 || run.CPUs[3].Softirq != 0.2029 {
		t.Errorf("CPUs %+v", run.CPUs)
	}
}

// FuzzRead checks that for any output, Read does not panic, and returns finite figures or an error.
func FuzzRead(f *testing.F) {
	files, err := filepath.Glob(filepath.Join("testdata", "*-*"))
	if err != nil || len(files) < 30 {
		f.Fatalf("%d seeds: %v", len(files), err)
	}
	shapes, err := filepath.Glob("../../importer/testdata/shapes/*/a*")
	if err != nil || len(shapes) < 80 {
		f.Fatalf("%d shapes: %v", len(shapes), err)
	}
	for _, file := range append(files, shapes...) {
		b, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, output []byte) {
		readings, err := Read(output, Known{Window: 30 * time.Second})
		if err != nil {
			if readings != nil {
				t.Errorf("an error and figures too: %+v", readings)
			}
			return
		}
		if len(readings) == 0 {
			t.Error("no error and no readings")
		}
		for _, r := range readings {
			checkReading(t, r)
		}
	})
}

// checkReading fails unless a reading has what every run must have.
func checkReading(t *testing.T, r Reading) {
	t.Helper()
	if len(r.Runs) == 0 {
		t.Error("no error and no runs")
	}
	if w := r.Workload.Traffic(); w != nil && (w.Duration <= 0 || w.Size < 0 || w.Connections < 0 || w.Warmup < 0) {
		t.Errorf("traffic %+v", w)
	}
	for _, run := range r.Runs {
		if (r.Workload.Traffic() != nil) != (len(run.Pairs) > 0) {
			t.Errorf("%d pairs of %+v", len(run.Pairs), r.Workload)
		}
		for _, e := range run.Pairs {
			figures := []float64{e.BitsPerSecond, e.CPUSeconds, e.Jitter}
			for _, v := range e.Percentiles {
				figures = append(figures, v)
			}
			for _, v := range figures {
				if !(v >= 0) || math.IsInf(v, 0) {
					t.Errorf("figure %g in %+v", v, e)
				}
			}
			if !(e.Seconds > 0) || e.Bytes == 0 && e.Messages == 0 {
				t.Errorf("no error and no figures: %+v", e)
			}
		}
		for _, c := range run.CPUs {
			if !(c.Busy >= 0 && c.Busy <= 1 && c.Softirq >= 0 && c.Softirq <= 1) {
				t.Errorf("CPU %+v", c)
			}
		}
	}
}
