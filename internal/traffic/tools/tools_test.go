package tools

import (
	"bufio"
	"bytes"
	"context"
	"math"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
)

// workload returns a workload of a kind, with the defaults that the parsers need and the settings of change.
func workload(kind string, change func(*spec.Traffic)) spec.Workload {
	t := &spec.Traffic{Protocol: "tcp", IP: 4, Size: 64, Connections: 1, Duration: spec.Duration(time.Second)}
	if change != nil {
		change(t)
	}
	switch kind {
	case "stream":
		return spec.Workload{Name: kind, Stream: t}
	case "pingpong":
		return spec.Workload{Name: kind, PingPong: t}
	case "application":
		t.Operation, t.Pipeline = spec.OperationGet, 1
		return spec.Workload{Name: kind, Application: t}
	case "http":
		return spec.Workload{Name: kind, HTTP: t}
	}
	return spec.Workload{Name: kind, UnderLoad: t}
}

func udp(t *spec.Traffic) { t.Protocol = "udp" }

func lookup(t testing.TB, name string) Tool {
	tool, ok := Lookup(name)
	if !ok {
		t.Fatalf("Lookup(%q) finds nothing", name)
	}
	return tool
}

func golden(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestLookup(t *testing.T) {
	if _, ok := Lookup(spec.ToolNative); ok {
		t.Error("the native engine is no tool")
	}
	for name := range Programs() {
		lookup(t, name)
	}
}

func TestArgv(t *testing.T) {
	v4, v6 := netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fd00::2")
	seconds := func(d, warmup float64) func(*spec.Traffic) {
		return func(t *spec.Traffic) {
			t.Duration, t.Warmup = spec.Duration(d*1e9), spec.Duration(warmup*1e9)
		}
	}
	for _, tt := range []struct {
		name, tool, cc string
		workload       spec.Workload
		addr           netip.Addr
		server, client string
		lead           time.Duration
	}{{
		name: "odd connections", tool: "memcached", addr: v4,
		workload: workload("application", func(t *spec.Traffic) {
			seconds(2, 0.5)(t)
			t.Connections = 3
		}),
		server: "memcached -l 10.0.0.2 -p 5001 -U 0 -m 512 -c 1030",
		client: "memcaslap -s 10.0.0.2:5001 -T 1 -c 3 -w 1k -F memcaslap.conf -S 100d -t 2s",
	}, {
		name: "tcp", tool: "iperf3", addr: v4, cc: "cubic",
		workload: workload("stream", func(t *spec.Traffic) {
			seconds(10, 1)(t)
			t.Size, t.Connections = 128<<10, 4
		}),
		server: "iperf3 --server --one-off --forceflush --bind 10.0.0.2 --port 5001",
		client: "iperf3 --client 10.0.0.2 --port 5001 --json --interval 0 --parallel 4 --length 131072 --omit 1 --time 10 --congestion cubic",
		lead:   time.Second,
	}, {
		name: "tcp", tool: "iperf2", addr: v4, cc: "cubic",
		workload: workload("stream", seconds(2, 0.5)),
		server:   "iperf --server --bind 10.0.0.2 --port 5001 --len 64",
		client:   "iperf --client 10.0.0.2 --port 5001 --reportstyle C --interval 1 --parallel 1 --len 64 --time 3 -Z cubic",
		lead:     time.Second,
	}, {
		name: "tcp over IPv6", tool: "iperf2", addr: v6,
		workload: workload("stream", seconds(2, 1)),
		server:   "iperf --server --bind fd00::2 --port 5001 --len 64 --ipv6_domain",
		client:   "iperf --client fd00::2 --port 5001 --reportstyle C --interval 1 --parallel 1 --len 64 --time 3 --ipv6_domain",
		lead:     time.Second,
	}, {
		name: "udp over IPv6, part of a second", tool: "iperf3", addr: v6, cc: "cubic",
		workload: workload("stream", func(t *spec.Traffic) {
			seconds(2.5, 0.5)(t)
			udp(t)
			t.Size = 1400
		}),
		server: "iperf3 --server --one-off --forceflush --bind fd00::2 --port 5001",
		client: "iperf3 --client fd00::2 --port 5001 --json --interval 0 --parallel 1 --length 1400 --omit 1 --time 3 --udp --bitrate 0",
		lead:   time.Second,
	}, {
		name: "no congestion control, no warm-up", tool: "iperf3", addr: v4,
		workload: workload("stream", nil),
		server:   "iperf3 --server --one-off --forceflush --bind 10.0.0.2 --port 5001",
		client:   "iperf3 --client 10.0.0.2 --port 5001 --json --interval 0 --parallel 1 --length 64 --omit 0 --time 1",
	}, {
		name: "stream", tool: "sockperf", addr: v4, cc: "cubic",
		workload: workload("stream", seconds(10, 1)),
		server:   "sockperf server --ip 10.0.0.2 --port 5001 --msg-size 64 --tcp",
		client:   "sockperf throughput --ip 10.0.0.2 --port 5001 --msg-size 64 --tcp --time 10",
		lead:     2 * time.Second,
	}, {
		name: "ping-pong", tool: "sockperf", addr: v4,
		workload: workload("pingpong", seconds(10, 0.5)),
		server:   "sockperf server --ip 10.0.0.2 --port 5001 --msg-size 64 --tcp",
		client:   "sockperf ping-pong --ip 10.0.0.2 --port 5001 --msg-size 64 --tcp --time 11 --full-rtt",
		lead:     2400 * time.Millisecond,
	}, {
		name: "udp under load", tool: "sockperf", addr: v4,
		workload: workload("underload", func(t *spec.Traffic) {
			udp(t)
			t.Rate = 5000
		}),
		server: "sockperf server --ip 10.0.0.2 --port 5001 --msg-size 64",
		client: "sockperf under-load --ip 10.0.0.2 --port 5001 --msg-size 64 --time 2 --full-rtt --mps 5000 --reply-every 1",
		lead:   2400 * time.Millisecond,
	}, {
		name: "as fast as it can", tool: "sockperf", addr: v4,
		workload: workload("underload", nil),
		server:   "sockperf server --ip 10.0.0.2 --port 5001 --msg-size 64 --tcp",
		client:   "sockperf under-load --ip 10.0.0.2 --port 5001 --msg-size 64 --tcp --time 2 --full-rtt --mps max --reply-every 1",
		lead:     2400 * time.Millisecond,
	}, {
		name: "stream", tool: "qperf", addr: v4, cc: "cubic",
		workload: workload("stream", func(t *spec.Traffic) {
			seconds(2.5, 1)(t)
			t.Size = 128 << 10
		}),
		server: "qperf --debug --listen_port 5001",
		client: "qperf --listen_port 5001 -vv --unify_units --precision 9 --time 3 --msg_size 131072 10.0.0.2 tcp_bw",
	}, {
		name: "ports", tool: "qperf", addr: v4,
		workload: workload("pingpong", func(t *spec.Traffic) { t.Port = 5001 }),
		server:   "qperf --debug --listen_port 5001",
		client:   "qperf --listen_port 5001 --ip_port 5002 -vv --unify_units --precision 9 --time 1 --msg_size 64 10.0.0.2 tcp_lat",
	}, {
		name: "udp ping-pong over IPv6", tool: "qperf", addr: v6, workload: workload("pingpong", udp),
		server: "qperf --debug --listen_port 5001",
		client: "qperf --listen_port 5001 -vv --unify_units --precision 9 --time 1 --msg_size 64 fd00::2 udp_lat",
	}, {
		name: "for a time", tool: "ab", addr: v4,
		workload: workload("http", func(t *spec.Traffic) {
			seconds(2.5, 1)(t)
			t.Connections = 8
		}),
		client: "ab -q -r -s 5 -c 8 -t 3 -n 600000 -e /dev/stdout http://10.0.0.2:5001/secret/",
	}, {
		name: "a number, kept alive, over IPv6", tool: "ab", addr: v6,
		workload: workload("http", func(t *spec.Traffic) { t.Requests, t.KeepAlive = 50_000, true }),
		client:   "ab -q -r -s 5 -c 1 -k -n 50000 -e /dev/stdout http://[fd00::2]:5001/secret/",
	}, {
		name: "tcp", tool: "latte", addr: v4,
		workload: workload("pingpong", func(t *spec.Traffic) {
			seconds(2.5, 1)(t)
			t.Size = 4
		}),
		server: "latte -tcp -a 10.0.0.2:5001 -m 4 -t 63",
		client: "latte -tcp -a 10.0.0.2:5001 -m 4 -t 3 -c -hist -hl 1 -hc 9998",
	}, {
		name: "iterations", tool: "latte", addr: v4,
		workload: workload("pingpong", func(t *spec.Traffic) { t.Size, t.Iterations = 10_000, 65_100 }),
		server:   "latte -tcp -a 10.0.0.2:5001 -m 10000 -i 65100",
		client:   "latte -tcp -a 10.0.0.2:5001 -m 10000 -i 65100 -c -hist -hl 1 -hc 9998",
	}, {
		name: "udp", tool: "latte", addr: v6,
		workload: workload("pingpong", udp),
		server:   "latte -udp -a [fd00::2]:5001 -m 64 -t 61",
		client:   "latte -udp -a [fd00::2]:5001 -m 64 -t 1 -c -hist -hl 1 -hc 9998",
	}} {
		t.Run(tt.tool+" "+tt.name, func(t *testing.T) {
			tool := lookup(t, tt.tool)
			if err := tool.Check(tt.workload); err != nil {
				t.Error(err)
			}
			if got := strings.Join(tool.ServerArgv(tt.workload, tt.addr, 5001), " "); got != tt.server {
				t.Errorf("server:\n got %s\nwant %s", got, tt.server)
			}
			if got := strings.Join(tool.ClientArgv(tt.workload, tt.addr, 5001, tt.cc, "/secret"), " "); got != tt.client {
				t.Errorf("client:\n got %s\nwant %s", got, tt.client)
			}
			if got := tool.Lead(tt.workload); got != tt.lead {
				t.Errorf("lead %s, want %s", got, tt.lead)
			}
		})
	}
}

func TestCheck(t *testing.T) {
	for _, tt := range []struct {
		tool     string
		workload spec.Workload
		want     string
	}{
		{"iperf3", workload("pingpong", nil), "stream workloads only"},
		{"iperf3", workload("stream", func(t *spec.Traffic) { t.Warmup = spec.Duration(61e9) }), "1m0s at most, not 1m1s"},
		{"sockperf", workload("pingpong", func(t *spec.Traffic) { t.Connections = 2 }), "one connection a pair, not 2"},
		{"iperf2", workload("pingpong", nil), "streams over TCP only"},
		{"iperf2", workload("stream", udp), "streams over TCP only"},
		{"sockperf", workload("stream", udp), "use iperf3"},
		{"qperf", workload("underload", nil), "stream and pingpong workloads only"},
		{"qperf", workload("stream", func(t *spec.Traffic) { t.Connections = 2 }), "one connection a pair, not 2"},
		{"ab", workload("stream", nil), "http workloads only"},
		{"ab", workload("http", func(t *spec.Traffic) { t.Page = true }), "not a page"},
		{"ab", workload("http", func(t *spec.Traffic) { t.Requests, t.Connections = 2, 3 }), "has 2 requests and 3 connections"},
		{"latte", workload("stream", nil), "pingpong workloads only"},
		{"latte", workload("pingpong", func(t *spec.Traffic) { t.Connections, t.Size = 2, 4 }), "one connection a pair, not 2"},
	} {
		err := lookup(t, tt.tool).Check(tt.workload)
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s, %s: error %v, want %q", tt.tool, tt.workload.Name, err, tt.want)
		}
	}
}

func TestServerReady(t *testing.T) {
	for tool, lines := range map[string]map[string]bool{
		"iperf3": {
			"-----------------------------------------------------------":                      false,
			"Server listening on 5201":                                                         true, // 3.9
			"Server listening on 5201 (test #1)":                                               true,
			"iperf3: error - unable to start listener for connections: Address already in use": false,
		},
		"iperf2": {"-----------------------------------------------------------": false, "Server listening on TCP port 5001": true},
		"sockperf": {
			"sockperf: [SERVER] listen on:":                                false,
			"sockperf: Warmup stage (sending a few dummy messages)...":     false,
			"sockperf: [tid 14219] using recvfrom() to block on socket(s)": true,
		},
		"qperf": {"ready for requests": true, "received request: tcp_lat": false},
		"latte": {"Protocol      TCP": true, "": false},
	} {
		for line, want := range lines {
			if got := lookup(t, tool).ServerReady([]byte(line)); got != want {
				t.Errorf("%s: ServerReady(%q) = %t", tool, line, got)
			}
		}
	}
}

// TestIperf3Reordered checks that reordered datagrams are counted, which each connection reports but the sums do not.
func TestIperf3Reordered(t *testing.T) {
	for got, want := range map[string]uint64{"7": 14, "0": 0} {
		text := bytes.ReplaceAll(golden(t, "iperf3-3.19.1-udp.json"), []byte(`"out_of_order":	0`), []byte(`"out_of_order":	`+got))
		e, err := iperf3{}.Parse(workload("stream", udp), text)
		if err != nil || e.Reordered != want {
			t.Errorf("%s a connection: %d reordered, %v, want %d", got, e.Reordered, err, want)
		}
	}
	text := bytes.ReplaceAll(golden(t, "iperf3-3.19.1-udp.json"), []byte(`"out_of_order":	0`), []byte(`"out_of_order":	-1`))
	if e, err := (iperf3{}).Parse(workload("stream", udp), text); err == nil {
		t.Errorf("taken: %+v", e)
	}
}

// TestParse parses what the tools printed over loopback. Losses are high because nothing slows down a UDP sender there.
func TestParse(t *testing.T) {
	latency := func(p50, p99, p999 float64) map[string]float64 {
		return map[string]float64{metrics.LatencyP50: p50, metrics.LatencyP99: p99, metrics.LatencyP999: p999}
	}
	latencies := func(mean, p50, p99, p999, longest float64) map[string]float64 {
		all := latency(p50, p99, p999)
		all[metrics.LatencyMean], all[metrics.LatencyMax] = mean, longest
		return all
	}
	two := func(seconds float64) spec.Workload { // connections, after a second of warm-up
		return workload("stream", func(t *spec.Traffic) {
			t.Connections, t.Warmup, t.Duration = 2, 1e9, spec.Duration(seconds*1e9)
		})
	}
	size := func(n int) func(*spec.Traffic) { return func(t *spec.Traffic) { t.Size = spec.Bytes(n) } }
	for _, tt := range []struct {
		file     string
		workload spec.Workload
		want     record.Endpoint
		err      string
	}{
		{file: "iperf2-2.1.8-tcp.csv", workload: two(1), want: record.Endpoint{Seconds: 1, Bytes: 13107200, BitsPerSecond: 104857600}},
		{file: "iperf2-2.1.8-tcp.csv", workload: two(2), err: "2 of the window's 4 seconds of connections; it ended too early"},
		{file: "iperf2-2.1.8-refused.txt", workload: two(1), err: "Connection refused"},
		{file: "iperf3-3.9-tcp.json", workload: workload("stream", nil), want: record.Endpoint{
			Seconds: 2.043103, Bytes: 13109952512, BitsPerSecond: 51333496204.55, Retransmits: 3, CPUSeconds: 0.738548,
		}},
		{file: "iperf3-3.12-tcp.json", workload: workload("stream", nil), want: record.Endpoint{
			Seconds: 2.000355, Bytes: 11213864960, BitsPerSecond: 44847499408.85, Retransmits: 1, CPUSeconds: 0.858722,
		}},
		{file: "iperf3-3.19.1-tcp.json", workload: workload("stream", nil), want: record.Endpoint{
			Seconds: 2.008814, Bytes: 29525278720, BitsPerSecond: 117582926921.06, CPUSeconds: 1.524771,
		}},
		// The sum says 993219 of 947316 lost, including those of the warm-up.
		{file: "iperf3-3.12-udp.json", workload: workload("stream", udp), want: record.Endpoint{
			Seconds: 2.006636, Bytes: 370231400, BitsPerSecond: 1476028138.64, Messages: 264451, Lost: 697509, Jitter: 0.000850553, CPUSeconds: 1.230450,
		}},
		{file: "iperf3-3.19.1-udp.json", workload: workload("stream", udp), want: record.Endpoint{
			Seconds: 1.985328, Bytes: 823923800, BitsPerSecond: 3320051094.83, Messages: 588517, Lost: 906367, Jitter: 9.95491808e-7, CPUSeconds: 2.287877,
		}},
		{file: "iperf3-3.9-udp.json", workload: workload("stream", udp), err: "measure with 3.11 or later"},
		{file: "iperf3-3.9-refused.json", workload: workload("stream", nil), err: "unable to send control message: Bad file descriptor"},
		{file: "iperf3-3.12-refused.json", workload: workload("stream", nil), err: "iperf3: unable to connect to server: Connection refused"},
		{file: "iperf3-3.19.1-refused.json", workload: workload("stream", nil), err: "use a different port, firewall issue, etc.: Connection refused"},

		{file: "sockperf-3.7-pingpong-tcp.txt", workload: workload("pingpong", nil), want: record.Endpoint{
			Seconds: 0.549, Bytes: 66889 * 64, Messages: 66889, Percentiles: latencies(8.181e-6, 5.006e-6, 23.399e-6, 473.261e-6, 5269.827e-6),
		}},
		{file: "sockperf-3.7-pingpong-udp.txt", workload: workload("pingpong", udp), want: record.Endpoint{
			Seconds: 0.55, Bytes: 60839 * 64, Messages: 60839, Percentiles: latencies(8.994e-6, 5.349e-6, 32.480e-6, 1280.448e-6, 4076.536e-6),
		}},
		// Without --full-rtt it prints halves: 2.563, 32.927 and 504.708.
		{file: "sockperf-3.7-half-rtt.txt", workload: workload("pingpong", nil), want: record.Endpoint{
			Seconds: 0.55, Bytes: 53014 * 64, Messages: 53014, Percentiles: latencies(10.342e-6, 5.126e-6, 65.854e-6, 1009.416e-6, 5339.020e-6),
		}},
		{file: "sockperf-3.7-underload-tcp.txt", workload: workload("underload", nil), want: record.Endpoint{
			Seconds: 0.55, Bytes: 2751 * 64, Messages: 2751, Percentiles: latencies(716.286e-6, 53.236e-6, 4963.470e-6, 7566.305e-6, 8162.634e-6),
		}},
		{file: "sockperf-3.7-underload-udp.txt", workload: workload("underload", udp), want: record.Endpoint{
			Seconds: 0.555, Bytes: 2752 * 64, Messages: 2752, Percentiles: latencies(1344.352e-6, 100.479e-6, 9261.086e-6, 10748.392e-6, 11076.471e-6),
		}},
		{file: "sockperf-3.7-stream-tcp.txt", workload: workload("stream", size(1400)), want: record.Endpoint{
			Seconds: 1.001, Bytes: 620626 * 1400, Messages: 620626, BitsPerSecond: 620626 * 1400 * 8 / 1.001,
		}},
		{file: "sockperf-3.7-stream-tcp.txt", workload: workload("pingpong", nil), err: "ends too early"},
		{file: "sockperf-3.7-pingpong-tcp.txt", workload: workload("stream", nil), err: "ends too early"},
		{file: "sockperf-3.7-no-server.txt", workload: workload("pingpong", udp), err: `not understood at "sockperf: No messages were received from the server. Is the server down?"`},
		{file: "sockperf-3.7-refused.txt", workload: workload("pingpong", nil), err: "(errno=111 Connection refused)"},
		{file: "sockperf-3.7-ipv6.txt", workload: workload("pingpong", nil), err: "'-i' Invalid address: ::1"},
		// 4737.33828 ns one way is 105544 round trips in a second.
		{file: "qperf-0.4.11-tcp_lat.txt", workload: workload("pingpong", nil), want: record.Endpoint{
			Seconds: 1, Bytes: 6754816, Messages: 105544, Percentiles: map[string]float64{metrics.LatencyMean: 1. / 105544},
		}},
		{file: "qperf-0.4.11-udp_lat.txt", workload: workload("pingpong", udp), want: record.Endpoint{
			Seconds: 1, Bytes: 7674880, Messages: 119920, Percentiles: map[string]float64{metrics.LatencyMean: 1. / 119920},
		}},
		{file: "qperf-0.4.11-tcp_bw.txt", workload: workload("stream", nil), want: record.Endpoint{
			Seconds: 1, Bytes: 2012872704, BitsPerSecond: 2012872704 * 8,
		}},
		{file: "qperf-0.4.11-udp_bw.txt", workload: workload("stream", udp), want: record.Endpoint{
			Seconds: 1, Bytes: 307017200, BitsPerSecond: 307017200 * 8, Messages: 219298, Lost: 473732 - 219298,
		}},
		{file: "qperf-0.4.11-refused.txt", workload: workload("pingpong", nil), err: "127.0.0.1: failed to connect"},
		{file: "qperf-0.4.11-terse.txt", workload: workload("pingpong", nil), err: "from a version other than 0.4"},
		{file: "qperf-0.4.11-tcp_lat.txt", workload: workload("stream", nil), err: "there is no tcp_bw in its output"},

		{file: "ab-2.3-kept.txt", workload: workload("http", nil), want: record.Endpoint{
			Seconds: 1, Bytes: 31541248, Messages: 30802, Percentiles: map[string]float64{metrics.LatencyMean: 260e-6, metrics.LatencyP50: 127e-6, metrics.LatencyP99: 1931e-6, metrics.LatencyMax: 0.087},
		}},
		{file: "ab-2.3-refused.txt", workload: workload("http", nil), err: "every request failed: connect 0, receive 20"},
		{file: "ab-2.3-status.txt", workload: workload("http", nil), err: "status 20"},
		{file: "ab-2.3-died.txt", workload: workload("http", nil), want: record.Endpoint{
			Seconds: 0.087, Bytes: 1022976, Messages: 995, Errors: map[string]uint64{record.ErrReset: 1004, record.ErrShort: 1},
		}},
		{file: "ab-2.3-no-host.txt", workload: workload("http", nil), err: "apr_socket_recv: Connection refused (111)"},

		{file: "latte-udp.txt", workload: workload("pingpong", udp), want: record.Endpoint{
			Seconds: 699.8, Bytes: 40_000_000, Messages: 10_000_000, Percentiles: map[string]float64{metrics.LatencyMean: 69.98e-6, metrics.LatencyMax: 0.018},
			Machine: &record.Machine{Busy: 0.028, Interrupts: 3.86, Switches: 2.29},
		}},
		{file: "latte-no-histogram.txt", workload: workload("pingpong", nil), err: "no histogram; it ends with"},
	} {
		t.Run(tt.file, func(t *testing.T) {
			name, _, _ := strings.Cut(tt.file, "-")
			got, err := lookup(t, name).Parse(tt.workload, golden(t, tt.file))
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("error %v, want %q", err, tt.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got, cmpopts.EquateApprox(1e-6, 0)); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// TestParseAmongOthers checks that neither a warning before iperf3's report nor an unknown line in sockperf's output hides the
// figures.
func TestParseAmongOthers(t *testing.T) {
	warned := append([]byte("warning: UDP block size exceeds TCP MSS\n"), golden(t, "iperf3-3.12-udp.json")...)
	if _, err := lookup(t, "iperf3").Parse(workload("stream", udp), warned); err != nil {
		t.Error(err)
	}
	news := append(golden(t, "sockperf-3.7-pingpong-tcp.txt"), "sockperf: all is well\n"...)
	if _, err := lookup(t, "sockperf").Parse(workload("pingpong", nil), news); err != nil {
		t.Error(err)
	}
}

// TestParseTruncated truncates outputs at every byte up to the end of the last significant line, as a killed tool leaves them,
// and checks that a truncated number is refused.
func TestParseTruncated(t *testing.T) {
	for _, tt := range []struct {
		file, last string
		workload   spec.Workload
	}{
		{"iperf3-3.12-tcp.json", "}", workload("stream", nil)},
		{"sockperf-3.7-pingpong-tcp.txt", "percentile 50.000 =    5.006", workload("pingpong", nil)},
		{"sockperf-3.7-stream-tcp.txt", "messages sent in 1.001 sec", workload("stream", nil)},
		{"qperf-0.4.11-tcp_lat.txt", "loc_recv_msgs    =      105544 ", workload("pingpong", nil)},
		{"qperf-0.4.11-tcp_bw.txt", "recv_msgs         =       15357 ", workload("stream", nil)},
		{"ab-2.3-kept.txt", "HTML transferred:       31541248 bytes", workload("http", nil)},
		{"latte-udp.txt", "      0          9999967", workload("pingpong", udp)},
	} {
		name, _, _ := strings.Cut(tt.file, "-")
		whole := golden(t, tt.file)
		end := bytes.LastIndex(whole, []byte(tt.last)) + len(tt.last)
		for n := range end {
			if e, err := lookup(t, name).Parse(tt.workload, whole[:n]); err == nil {
				t.Errorf("%s: the first %d bytes of %d give %+v", tt.file, n, end, e)
			}
		}
		if _, err := lookup(t, name).Parse(tt.workload, whole[:end+1]); err != nil {
			t.Errorf("%s: the first %d bytes: %v", tt.file, end+1, err)
		}
	}
}

// TestParseHostile checks well-formed figures that no run can have.
func TestParseHostile(t *testing.T) {
	sums := func(sent, received string) string {
		return `{"start":{"test_start":{"blksize":1400}},"end":{"sum_sent":{` + sent + `},"sum_received":{` + received + `}}}`
	}
	latencies := func(valid, p50 string) string {
		return "[Valid Duration] RunTime=" + valid + "\n# dropped messages = 0\nSummary: Round trip is 1 usec\n" +
			"---> <MAX> observation = 4\n---> percentile 99.900 = 3\n---> percentile 99.000 = 2\n---> percentile 50.000 = " + p50 + "\n"
	}
	for _, tt := range []struct {
		tool     string
		workload spec.Workload
		output   string
		want     string // of the error, none if empty
	}{
		{"iperf3", workload("stream", nil), sums(`"seconds":1`, `"seconds":1,"bytes":8`), ""},
		{"iperf3", workload("stream", nil), sums(`"seconds":1`, `"seconds":0,"bytes":8`), "a window of 0 s"},
		{"iperf3", workload("stream", nil), sums(`"seconds":1`, `"seconds":-1,"bytes":8`), "a window of -1 s"},
		{"iperf3", workload("stream", nil), sums(`"seconds":1`, `"seconds":1,"bytes":0`), "nothing arrived"},
		{"iperf3", workload("stream", nil), sums(`"seconds":1`, `"seconds":1,"bytes":-8`), "bytes received of -8"},
		{"iperf3", workload("stream", nil), sums(`"seconds":1`, `"seconds":1,"bytes":1e300`), "bytes received of 1e+300"},
		{"iperf3", workload("stream", nil), sums(`"seconds":1`, `"seconds":1e-320,"bytes":8`), "bits per second of +Inf"},
		{"iperf3", workload("stream", nil), sums(`"seconds":1,"retransmits":-1`, `"seconds":1,"bytes":8`), "retransmits of -1"},
		{"iperf3", workload("stream", udp), sums(`"seconds":1`, `"seconds":1,"bytes":1400,"packets":0,"lost_packets":-1`), "messages lost of -1"},
		{"iperf3", workload("stream", udp), strings.Replace(sums(`"seconds":1`, `"seconds":1,"bytes":8`), "1400", "0", 1), "messages of 0 bytes"},
		{"iperf3", workload("stream", nil), "", "read its report: EOF"},
		{"iperf3", workload("stream", nil), "null", "no sums of both ends"},

		{"sockperf", workload("pingpong", nil), latencies("1 sec; SentMessages=3; ReceivedMessages=3", "1"), ""},
		{"sockperf", workload("pingpong", nil), latencies("NaN sec; SentMessages=3; ReceivedMessages=3", "1"), "a window of NaN s"},
		{"sockperf", workload("pingpong", nil), latencies("1 sec; SentMessages=3; ReceivedMessages=0", "1"), "nothing arrived"},
		{"sockperf", workload("pingpong", nil), latencies("1 sec; SentMessages=3; ReceivedMessages=3", "-1"), "latency_p50 of -1e-06"},
		{"sockperf", workload("pingpong", nil), latencies("1 sec; SentMessages=3; ReceivedMessages=3", "Inf"), "latency_p50 of +Inf"},
		{"sockperf", workload("pingpong", nil), latencies("1 sec; SentMessages=3; ReceivedMessages=18446744073709551615", "1"), "18446744073709551615 messages"},
		{"sockperf", workload("stream", nil), "Total of 3 messages sent in Inf sec\n", "a window of +Inf s"},
		{"sockperf", workload("stream", nil), "", "ends too early"},
	} {
		_, err := lookup(t, tt.tool).Parse(tt.workload, []byte(tt.output))
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s, %s: error %v, want %q, of\n%s", tt.tool, tt.workload.Name, err, tt.want, tt.output)
		}
	}
}

func TestParseVersion(t *testing.T) {
	for _, tt := range []struct{ tool, output, want string }{
		{"iperf3", string(golden(t, "iperf3-3.12-version.txt")), "3.12"},
		{"iperf3", "iperf 3.9 (cJSON 1.7.13)\n", "3.9"},
		{"iperf3", "bash: iperf3: not found\n", ""},
		{"iperf3", "", ""},
		{"sockperf", string(golden(t, "sockperf-3.7-version.txt")), "3.7-no.git"},
		{"qperf", string(golden(t, "qperf-0.4.11-version.txt")), "0.4.11"},
		{"ab", string(golden(t, "ab-2.3-version.txt")), "2.3"},
		{"postgres", "postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)\n", "15.18"},
		{"memcached", "memcached 1.6.18\n", "1.6.18"},
		{"netperf", "iperf 3.9", ""},
	} {
		if got := ParseVersion(tt.tool, []byte(tt.output)); got != tt.want {
			t.Errorf("ParseVersion(%s, %q) = %q, want %q", tt.tool, tt.output, got, tt.want)
		}
	}
}

func FuzzIperf3(f *testing.F)   { fuzz(f, "iperf3") }
func FuzzSockperf(f *testing.F) { fuzz(f, "sockperf") }
func FuzzQperf(f *testing.F)    { fuzz(f, "qperf") }
func FuzzAB(f *testing.F)       { fuzz(f, "ab") }
func FuzzRedis(f *testing.F)    { fuzz(f, "redis") }
func FuzzNginx(f *testing.F)    { fuzz(f, "nginx") }
func FuzzLatte(f *testing.F)    { fuzz(f, "latte") }

func FuzzPostgres(f *testing.F)  { fuzz(f, "postgres") }
func FuzzMemcached(f *testing.F) { fuzz(f, "memcached") }

// fuzz checks that a parser does not panic, and returns finite, non-empty figures or an error.
func fuzz(f *testing.F, name string) {
	files, err := filepath.Glob(filepath.Join("testdata", name+"-*"))
	if err != nil || len(files) == 0 {
		f.Fatalf("no seeds: %v", err)
	}
	for _, file := range files {
		f.Add(golden(f, filepath.Base(file)))
	}
	tool := lookup(f, name)
	workloads := []spec.Workload{workload("stream", nil)}
	switch name {
	case "iperf3":
		workloads = append(workloads, workload("stream", udp))
	case "sockperf":
		workloads = append(workloads, workload("pingpong", nil))
	case "qperf":
		workloads = append(workloads, workload("stream", udp), workload("pingpong", nil))
	case "ab":
		workloads = []spec.Workload{workload("http", nil), workload("http", func(t *spec.Traffic) { t.Requests = 10 })}
	case "redis", "postgres", "memcached":
		workloads = []spec.Workload{workload("application", nil)}
	case "nginx":
		workloads = []spec.Workload{workload("http", nil)}
	case "latte":
		workloads = []spec.Workload{workload("pingpong", nil)}
	}
	f.Fuzz(func(t *testing.T, output []byte) {
		for _, w := range workloads {
			e, err := tool.Parse(w, output)
			if err != nil {
				if diff := cmp.Diff(record.Endpoint{}, e); diff != "" {
					t.Errorf("an error and figures too: %s", diff)
				}
				continue
			}
			figures := []float64{e.Seconds, e.BitsPerSecond, e.CPUSeconds}
			for _, v := range e.Percentiles {
				figures = append(figures, v)
			}
			for _, v := range figures {
				if !(v >= 0) || math.IsInf(v, 0) {
					t.Errorf("figure %g in %+v", v, e)
				}
			}
			if e.Seconds == 0 || e.Bytes == 0 && e.Messages == 0 {
				t.Errorf("no error and no figures: %+v", e)
			}
			_ = ParseVersion(name, output)
		}
	})
}

// TestLive runs the tools that are installed here with the drivers' arguments,
// over loopback.
func TestLive(t *testing.T) {
	second := func(t *spec.Traffic) { t.Warmup = spec.Duration(1e9) }
	for _, tt := range []struct {
		name, tool, addr string
		workload         spec.Workload
	}{
		{"tcp", "iperf3", "127.0.0.1", workload("stream", func(t *spec.Traffic) {
			second(t)
			t.Size, t.Connections = 128<<10, 2
		})},
		{"tcp6", "iperf3", "::1", workload("stream", nil)},
		{"udp", "iperf3", "127.0.0.1", workload("stream", func(t *spec.Traffic) {
			second(t)
			udp(t)
			t.Size = 1400
		})},
		{"stream", "sockperf", "127.0.0.1", workload("stream", nil)},
		{"pingpong", "sockperf", "127.0.0.1", workload("pingpong", nil)},
		{"pingpong udp", "sockperf", "127.0.0.1", workload("pingpong", udp)},
		{"tcp_bw", "qperf", "127.0.0.1", workload("stream", func(t *spec.Traffic) { t.Size = 128 << 10 })},
		{"udp_bw", "qperf", "127.0.0.1", workload("stream", udp)},
		{"tcp_lat", "qperf", "127.0.0.1", workload("pingpong", nil)},
		{"udp_lat", "qperf", "::1", workload("pingpong", udp)},
		{"underload", "sockperf", "127.0.0.1", workload("underload", func(t *spec.Traffic) { t.Rate = 1000 })},
	} {
		t.Run(tt.tool+" "+tt.name, func(t *testing.T) {
			testenv.NeedProgram(t, tt.tool, "make test-deps")
			t.Parallel()
			tool, addr := lookup(t, tt.tool), netip.MustParseAddr(tt.addr)
			port := serve(t, tool, tt.workload, addr)
			argv := tool.ClientArgv(tt.workload, addr, port, "cubic", "")
			started := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			output, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
			took := time.Since(started)
			if err != nil {
				t.Fatalf("%s: %v\n%s", strings.Join(argv, " "), err, output)
			}
			e, err := tool.Parse(tt.workload, output)
			if err != nil {
				t.Fatalf("%v\n%s", err, output)
			}
			want := time.Duration(tt.workload.Traffic().Duration).Seconds()
			// stall limits how long a tool may wait for a CPU on a busy machine.
			const stall = 5.0
			if e.Seconds < 0.9*want || e.Seconds > want+stall {
				t.Errorf("a window of %g s, want %g s or a little more", e.Seconds, want)
			}
			if lead := tool.Lead(tt.workload); took.Seconds() < lead.Seconds()+0.9*e.Seconds {
				t.Errorf("took %s, less than %s before a window of %g s", took, lead, e.Seconds)
			}
			if tt.workload.Stream != nil {
				if e.BitsPerSecond < 1e6 || math.Abs(e.BitsPerSecond*e.Seconds/8-float64(e.Bytes)) > 1 {
					t.Errorf("%g bit/s of %d bytes in %g s", e.BitsPerSecond, e.Bytes, e.Seconds)
				}
				return
			}
			if tt.tool == "qperf" { // it reports no percentiles
				if e.Messages < 10 {
					t.Errorf("%d round trips in a second", e.Messages)
				}
				return
			}
			p50, p99 := e.Percentiles[metrics.LatencyP50], e.Percentiles[metrics.LatencyP99]
			if p50 < 1e-6 || p50 > p99 || p99 > stall {
				t.Errorf("percentiles %v", e.Percentiles)
			}
			if tt.workload.PingPong != nil {
				// One message is in flight at a time, so round trips fill the window.
				if mean := e.Seconds / float64(e.Messages); mean < p50/4 || mean > 10*p99+stall/float64(e.Messages) {
					t.Errorf("a message every %g s, but round trips of %g s", mean, p50)
				}
			}
		})
	}
}

// serve runs a tool's server until the test ends, and returns its port. Another process may take a free port before the server
// does, but not three times in a row.
func serve(t *testing.T, tool Tool, w spec.Workload, addr netip.Addr) uint16 {
	t.Helper()
	for range 3 {
		if port := freePort(t, addr); listens(t, tool.ServerReady, tool.ServerArgv(w, addr, port)) {
			return port
		}
	}
	t.Fatalf("%T: three servers ended before they listened", tool)
	return 0
}

// listens starts a server, which ends with the test, and reports whether it listens; otherwise it has exited.
func listens(t *testing.T, isReady func([]byte) bool, argv []string) bool {
	t.Helper()
	server := exec.CommandContext(t.Context(), argv[0], argv[1:]...)
	stdout, err := server.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	server.Stderr = server.Stdout
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	ready, ended := make(chan struct{}, 1), make(chan struct{})
	go func() {
		defer close(ended)
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			if isReady(lines.Bytes()) {
				ready <- struct{}{}
			}
		}
	}()
	t.Cleanup(func() {
		<-ended
		_ = server.Wait() // killed with the test's context
	})
	select {
	case <-ready:
		return true
	case <-ended:
		t.Logf("%s: ended before it listened", strings.Join(argv, " "))
		return false
	}
}

func freePort(t *testing.T, addr netip.Addr) uint16 {
	t.Helper()
	l, err := net.Listen("tcp", netip.AddrPortFrom(addr, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).AddrPort().Port()
}

// TestSockperfRate checks that the result warns if sockperf did not reach the rate.
func TestSockperfRate(t *testing.T) {
	text := golden(t, "sockperf-3.7-underload-tcp.txt")
	for rate, want := range map[int]int{0: 0, 100: 0, 1_000_000: 1} {
		w := workload("underload", func(t *spec.Traffic) { t.Rate = rate })
		e, err := sockperf{}.Parse(w, text)
		if err != nil {
			t.Fatal(err)
		}
		if len(e.Warnings) != want || want == 1 && e.Warnings[0].Code != record.WarnGeneratorBound {
			t.Errorf("a rate of %d: %v", rate, e.Warnings)
		}
	}
}
