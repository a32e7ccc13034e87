package experiment

import (
	"maps"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// TestDatagrams: datagrams that the clients sent and the servers did not get are lost, whatever each end counted
// within its own window.
func TestDatagrams(t *testing.T) {
	udp := func(tool string) Cell {
		return Cell{Workload: spec.Workload{Stream: &spec.Traffic{Protocol: "udp", Tool: tool, Duration: 2e9}}}
	}
	for name, tt := range map[string]struct {
		cell  Cell
		pairs []record.Pair
		want  map[string]float64
		lost  uint64 // of the first pair's receiver
	}{
		"two pairs": {udp(spec.ToolNative), []record.Pair{
			{Client: record.Endpoint{Messages: 1000}, Server: record.Endpoint{Seconds: 2, Messages: 890, Arrived: 900, Reordered: 89, Jitter: 1e-3, BitsPerSecond: 1e6}},
			{Client: record.Endpoint{Messages: 1000}, Server: record.Endpoint{Seconds: 2, Messages: 1110, Arrived: 1000, Jitter: 3e-3, BitsPerSecond: 1e6}},
		}, map[string]float64{metrics.Throughput: 2e6, metrics.Rate: 1000, metrics.Loss: 0.05, metrics.Reorder: 0.0445, metrics.Jitter: 2.11e-3}, 100},
		"nothing lost, and the receiver's window the longer": {udp(spec.ToolNative), []record.Pair{
			{Client: record.Endpoint{Messages: 1000}, Server: record.Endpoint{Seconds: 2, Messages: 1020, Arrived: 1000, BitsPerSecond: 1e6}},
		}, map[string]float64{metrics.Throughput: 1e6, metrics.Rate: 510, metrics.Loss: 0, metrics.Reorder: 0, metrics.Jitter: 0}, 0},
		"none of the window's arrived": {udp(spec.ToolNative), []record.Pair{
			{Client: record.Endpoint{Messages: 1000}, Server: record.Endpoint{Seconds: 2, Messages: 10, BitsPerSecond: 1e6}},
		}, map[string]float64{metrics.Throughput: 1e6, metrics.Rate: 5, metrics.Loss: 1, metrics.Reorder: 0, metrics.Jitter: 0}, 1000},
		"another tool's client tells all": {udp(spec.ToolIperf3), []record.Pair{
			{Client: record.Endpoint{Seconds: 2, Messages: 900, Lost: 100, Reordered: 9, Jitter: 1e-3, BitsPerSecond: 1e6}},
		}, map[string]float64{metrics.Throughput: 1e6, metrics.Rate: 450, metrics.Loss: 0.1, metrics.Reorder: 0.01, metrics.Jitter: 1e-3}, 0},
		"a tool that counts what is lost only": {udp(spec.ToolQperf), []record.Pair{
			{Client: record.Endpoint{Seconds: 2, Messages: 900, Lost: 100, BitsPerSecond: 1e6}},
		}, map[string]float64{metrics.Throughput: 1e6, metrics.Rate: 450, metrics.Loss: 0.1}, 0},
		"a tool that reports a share": {udp(spec.ToolQperf), []record.Pair{
			{Client: record.Endpoint{Seconds: 2, LossShare: new(0.25), BitsPerSecond: 1e6}}, {Client: record.Endpoint{Seconds: 2, LossShare: new(0.5), BitsPerSecond: 1e6}},
		}, map[string]float64{metrics.Throughput: 2e6, metrics.Loss: 0.375}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			trial := record.Trial{PerPair: tt.pairs}
			if err := fillMetrics(tt.cell, &trial); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, trial.Metrics, cmpopts.EquateApprox(1e-9, 0)); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
			if got := trial.PerPair[0].Server.Lost; got != tt.lost {
				t.Errorf("%d on record as lost, want %d", got, tt.lost)
			}
		})
	}
}

// TestWorkloadsGiveWhatIsMeasured checks the table that says which workload gives which metric, by which
// expectations are validated. A trial in which everything was counted has exactly those metrics.
func TestWorkloadsGiveWhatIsMeasured(t *testing.T) {
	h := record.NewHistogram()
	if err := h.RecordValue(1000); err != nil {
		t.Fatal(err)
	}
	latency, err := record.EncodeHistogram(h)
	if err != nil {
		t.Fatal(err)
	}
	end := record.Endpoint{Seconds: 1, Bytes: 1e9, BitsPerSecond: 8e9, Messages: 10, Arrived: 10, Sleeps: 1, Completion: 1, Latency: latency}
	host := record.Host{Seconds: 1, Switches: 1, CPUs: []record.CPU{{Busy: 1, Softirq: 1, Interrupts: 1}}}
	tcp := &spec.Traffic{Protocol: "tcp", Tool: spec.ToolNative, Duration: 1e9}
	udp := &spec.Traffic{Protocol: "udp", Tool: spec.ToolNative, Duration: 1e9}
	small := &spec.Traffic{Protocol: "tcp", Tool: spec.ToolNative, Size: 64, Duration: 1e9}
	lossless := &spec.Traffic{Protocol: "udp", Tool: spec.ToolQperf, Duration: 1e9}
	counts := &spec.Traffic{Protocol: "tcp", Tool: spec.ToolNative, Iterations: 10, Duration: 5e9}
	counted := &spec.Traffic{Protocol: "tcp", Tool: spec.ToolNative, Requests: 10}
	for name, w := range map[string]spec.Workload{
		"stream": {Stream: tcp}, "stream of messages": {Stream: small}, "pingpong by qperf": {PingPong: lossless}, "iterations": {PingPong: counts}, "stream udp": {Stream: udp}, "pingpong": {PingPong: tcp}, "pingpong udp": {PingPong: udp}, "underload": {UnderLoad: tcp},
		"connect": {Connect: tcp}, "http": {HTTP: tcp}, "http requests": {HTTP: counted}, "application": {Application: tcp},
	} {
		trial := record.Trial{PerPair: []record.Pair{{Client: end, Server: end}}, Hosts: []record.Host{host}, DaemonSets: []record.DaemonSet{{Name: "a/b"}}}
		if err := fillMetrics(Cell{Workload: w}, &trial); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		var want []string
		for _, m := range metrics.OfTrials() {
			switch {
			case w.Gives(m.Name) && m.ByDaemonSet:
				want = append(want, metrics.OfDaemonSet(m.Name, "a/b"))
			case w.Gives(m.Name):
				want = append(want, m.Name)
			}
		}
		slices.Sort(want)
		if diff := cmp.Diff(want, slices.Sorted(maps.Keys(trial.Metrics))); diff != "" {
			t.Errorf("%s gives and measures (-table +trial):\n%s", name, diff)
		}
	}
}

// TestPerRoundTrip divides what the CPUs of all machines did by the round trips of the window, for each machine
// by its own clock. Interrupts and switches that are unknown are left out, not 0.
func TestPerRoundTrip(t *testing.T) {
	c := Cell{Workload: spec.Workload{PingPong: &spec.Traffic{Duration: 2e9}}}
	for _, tt := range []struct {
		interrupts, switches uint64
		want                 map[string]float64
	}{
		{3000, 2000, map[string]float64{metrics.CPUPerMessage: 1e-3, metrics.InterruptsPerMessage: 6, metrics.SwitchesPerMessage: 5}},
		{0, 2000, map[string]float64{metrics.CPUPerMessage: 1e-3, metrics.SwitchesPerMessage: 5}},
		{0, 0, map[string]float64{metrics.CPUPerMessage: 1e-3}},
	} {
		one := record.Host{Seconds: 2, Switches: 2 * tt.switches, CPUs: []record.CPU{{Busy: 0.5, Interrupts: tt.interrupts}, {Interrupts: tt.interrupts}}}
		two := record.Host{Seconds: 4, Switches: tt.switches, CPUs: []record.CPU{{Busy: 1}}}
		trial := record.Trial{Hosts: []record.Host{one, two}, PerPair: []record.Pair{{Client: record.Endpoint{Seconds: 2, Messages: 1000}}}}
		if err := fillMetrics(c, &trial); err != nil {
			t.Fatal(err)
		}
		delete(trial.Metrics, metrics.Rate)
		if diff := cmp.Diff(tt.want, trial.Metrics, cmpopts.EquateApprox(1e-9, 0)); diff != "" {
			t.Errorf("%d interrupts, %d switches (-want +got):\n%s", tt.interrupts, tt.switches, diff)
		}
	}
}

// TestPerMessageOfCounted: pairs that stop after a number of messages, each at its own time, share the CPU time until the last one
// stops. Redis' client may take longer than the window, of which the hosts see only a part.
func TestPerMessageOfCounted(t *testing.T) {
	pair := func(messages uint64, seconds float64) record.Pair {
		return record.Pair{Client: record.Endpoint{Messages: messages, Seconds: seconds, Completion: seconds}}
	}
	for name, tt := range map[string]struct {
		of    spec.Workload
		pairs []record.Pair
		want  float64
	}{
		"iterations": {spec.Workload{PingPong: &spec.Traffic{Iterations: 1000, Duration: 60e9}}, []record.Pair{pair(1000, 0.5), pair(1000, 2)}, 1e-3},
		"requests":   {spec.Workload{HTTP: &spec.Traffic{Requests: 1000, Duration: 60e9}}, []record.Pair{pair(1000, 0.5), pair(1000, 2)}, 1e-3},
		"redis":      {spec.Workload{Application: &spec.Traffic{Tool: spec.ToolRedis, Duration: 3e9}}, []record.Pair{pair(1000, 1), pair(3000, 2)}, 0.5e-3},
		"redis late": {spec.Workload{Application: &spec.Traffic{Tool: spec.ToolRedis, Duration: 2e9}}, []record.Pair{pair(1000, 1), pair(2000, 4)}, 1e-3},
	} {
		trial := record.Trial{Hosts: []record.Host{{Seconds: 2, Switches: 4000, CPUs: []record.CPU{{Busy: 2}}}}, PerPair: tt.pairs}
		if err := fillMetrics(Cell{Workload: tt.of}, &trial); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		want := map[string]float64{metrics.CPUPerMessage: tt.want, metrics.SwitchesPerMessage: 2000 * tt.want}
		got := map[string]float64{metrics.CPUPerMessage: trial.Metrics[metrics.CPUPerMessage], metrics.SwitchesPerMessage: trial.Metrics[metrics.SwitchesPerMessage]}
		if diff := cmp.Diff(want, got, cmpopts.EquateApprox(1e-9, 0)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// TestBusyOfIdleCores: idle times are off by a tick or two in both directions, and the errors of idle cores cancel out.
func TestBusyOfIdleCores(t *testing.T) {
	c := Cell{Workload: spec.Workload{PingPong: &spec.Traffic{Duration: 2e9}}}
	core := func(idle, busy float64) record.CPU { return record.CPU{Idle: idle, Busy: busy} } // as collect records them
	for name, tt := range map[string]struct {
		cores []record.CPU
		want  float64
	}{
		"idle ones":  {[]record.CPU{core(1.5, 0.5), core(1.99, 0.01), core(2.01, 0), core(2.02, 0), core(1.98, 0.02)}, 0.5},
		"a full one": {[]record.CPU{core(0, 2), core(2.01, 0), core(1.99, 0.01)}, 2},
		"all idle":   {[]record.CPU{core(2.01, 0.001), {Idle: 2, Busy: 0.002, Softirq: 0.002}}, 0.002},
	} {
		trial := record.Trial{Hosts: []record.Host{{Seconds: 2, CPUs: tt.cores}}, PerPair: []record.Pair{{Client: record.Endpoint{Seconds: 2, Messages: 1000}}}}
		if err := fillMetrics(c, &trial); err != nil {
			t.Fatal(err)
		}
		if got := trial.Metrics[metrics.CPUPerMessage] * 1000; math.Abs(got-tt.want) > 1e-9 {
			t.Errorf("%s: busy for %v s, want %v", name, got, tt.want)
		}
	}
}

// TestSleepsOfStreams: sleeps and interrupts of a stream are divided by what arrived. An end that never slept has
// 0 sleeps. If neither end counts sleeps, the metrics are left out.
// TestDaemonSets: a DaemonSet has the mean over its nodes, or no metric and a warning if a node has no value.
func TestDaemonSets(t *testing.T) {
	all := []record.DaemonSet{
		{Name: "a/b", Node: "x", CPUs: 0.1, Memory: 1000}, {Name: "a/b", Node: "y", CPUs: 0.3, Memory: 3000},
		{Name: "c/d", Node: "x", CPUs: 1, Memory: 1}, {Name: "c/d", Node: "y", Error: "its pod ended"},
	}
	got := make(map[string]float64)
	daemonSetMetrics(all, got)
	if diff := cmp.Diff(map[string]float64{"daemonset_cpu:a/b": 0.2, "daemonset_memory:a/b": 2000}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	var said []string
	for _, w := range warnings(Cell{Workload: spec.Workload{Stream: new(spec.Traffic)}}, &record.Trial{DaemonSets: all}) {
		if w.Code == record.WarnNotObserved {
			said = append(said, w.Message)
		}
	}
	if diff := cmp.Diff([]string{"DaemonSet c/d was not measured on y: its pod ended"}, said); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestSleepsOfStreams(t *testing.T) {
	c := Cell{Workload: spec.Workload{Stream: &spec.Traffic{Tool: spec.ToolNative, Duration: 2e9}}}
	for _, tt := range []struct {
		sender, receiver, interrupts uint64
		want                         map[string]float64
	}{
		{1000, 3000, 500, map[string]float64{metrics.SenderSleepsPerGB: 1000, metrics.ReceiverSleepsPerGB: 3000, metrics.InterruptsPerGB: 250}},
		{0, 3000, 0, map[string]float64{metrics.SenderSleepsPerGB: 0, metrics.ReceiverSleepsPerGB: 3000}},
		{0, 0, 0, map[string]float64{}},
	} {
		pair := record.Pair{Client: record.Endpoint{Seconds: 2, Bytes: 2e9, Sleeps: tt.sender}, Server: record.Endpoint{Seconds: 2, Bytes: 1e9, BitsPerSecond: 4e9, Sleeps: tt.receiver}}
		trial := record.Trial{PerPair: []record.Pair{pair, pair}, Hosts: []record.Host{{Seconds: 2, CPUs: []record.CPU{{Busy: 1, Interrupts: tt.interrupts}}}}}
		if err := fillMetrics(c, &trial); err != nil {
			t.Fatal(err)
		}
		for _, other := range []string{metrics.Throughput, metrics.CPUPerGB, metrics.SoftirqPerGB} {
			delete(trial.Metrics, other)
		}
		if diff := cmp.Diff(tt.want, trial.Metrics, cmpopts.EquateApprox(1e-9, 0)); diff != "" {
			t.Errorf("%d and %d sleeps, %d interrupts (-want +got):\n%s", tt.sender, tt.receiver, tt.interrupts, diff)
		}
	}
}

// TestLatencies: mean, percentiles and maximum, of merged histograms and of figures that tools report.
func TestLatencies(t *testing.T) {
	histogram := func(ms ...int64) record.Endpoint {
		h := record.NewHistogram()
		for _, v := range ms {
			if err := h.RecordValue(v * 1e6); err != nil {
				t.Fatal(err)
			}
		}
		text, err := record.EncodeHistogram(h)
		if err != nil {
			t.Fatal(err)
		}
		return record.Endpoint{Latency: text}
	}
	told := func(mean, longest float64) record.Endpoint {
		return record.Endpoint{Percentiles: map[string]float64{metrics.LatencyMean: mean, metrics.LatencyMax: longest}}
	}
	for name, tt := range map[string]struct {
		clients []record.Endpoint
		want    map[string]float64
	}{
		"two histograms": {[]record.Endpoint{histogram(1, 1, 1), histogram(3, 20)}, map[string]float64{
			metrics.LatencyMean: 5.2e-3, metrics.LatencyP50: 1e-3, metrics.LatencyP99: 20e-3, metrics.LatencyP999: 20e-3, metrics.LatencyMax: 20e-3,
		}},
		"a tool's":     {[]record.Endpoint{told(2e-3, 30e-3), told(4e-3, 10e-3)}, map[string]float64{metrics.LatencyMean: 3e-3, metrics.LatencyMax: 30e-3}},
		"one has none": {[]record.Endpoint{told(2e-3, 30e-3), {}}, map[string]float64{metrics.LatencyMean: 2e-3, metrics.LatencyMax: 30e-3}},
	} {
		var trial record.Trial
		for _, c := range tt.clients {
			trial.PerPair = append(trial.PerPair, record.Pair{Client: c})
		}
		got := map[string]float64{}
		if err := latencyMetrics(&trial, got); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(tt.want, got, cmpopts.EquateApprox(2e-3, 0)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// TestLostConnections: a trial warns of lost connections, because they have no latency.
func TestLostConnections(t *testing.T) {
	for lost, want := range map[uint64]bool{0: false, 1: true} {
		trial := record.Trial{PerPair: []record.Pair{{Client: record.Endpoint{Seconds: 1, Messages: 9, Lost: lost}}}}
		if err := fillMetrics(Cell{Workload: spec.Workload{Connect: &spec.Traffic{}}}, &trial); err != nil {
			t.Fatal(err)
		}
		if got := len(trial.Warnings) == 1 && trial.Warnings[0].Code == record.WarnErrors; got != want {
			t.Errorf("%d lost: %v", lost, trial.Warnings)
		}
	}
}

// TestFailedRequests: a trial, measured or imported, warns of failed requests, and says of which requests it has latencies.
func TestFailedRequests(t *testing.T) {
	failed := func(percentiles map[string]float64) record.Pair {
		return record.Pair{Client: record.Endpoint{Seconds: 1, Messages: 9, Errors: map[string]uint64{record.ErrStatus: 1}, Percentiles: percentiles}}
	}
	some := map[string]float64{metrics.LatencyMean: 1e-3}
	for want, pairs := range map[string][]record.Pair{
		"the latencies are those of the others": {failed(some), failed(some)},
		"there are no latencies,":               {failed(nil), failed(nil)},
		"leave out the clients":                 {failed(some), failed(nil)},
	} {
		trial := record.Trial{PerPair: pairs}
		if err := Imported(Cell{Workload: spec.Workload{HTTP: &spec.Traffic{}}}, &trial); err != nil {
			t.Fatal(err)
		}
		if w := trial.Warnings; len(w) != 1 || w[0].Code != record.WarnErrors || !strings.Contains(w[0].Message, want) {
			t.Errorf("%v, want %q", w, want)
		}
	}
}

// TestSkew warns of a window that is off at an end whose figures are reported: at both ends of a stream, at the
// client of round trips, and at neither end of another tool.
func TestSkew(t *testing.T) {
	cell := func(w spec.Workload, tool string) Cell {
		w.Traffic().Tool = tool
		return Cell{Workload: w}
	}
	stream := func() spec.Workload { return spec.Workload{Stream: &spec.Traffic{}} }
	connect := func() spec.Workload { return spec.Workload{Connect: &spec.Traffic{}} }
	for name, tt := range map[string]struct {
		cell           Cell
		client, server float64
		want           bool
	}{
		"stream":               {cell(stream(), spec.ToolNative), 1.005, 0.995, false},
		"stream, client":       {cell(stream(), spec.ToolNative), 1.05, 1, true},
		"stream, server":       {cell(stream(), spec.ToolNative), 1, 0.95, true},
		"stream, another tool": {cell(stream(), spec.ToolIperf3), 1.05, 1, false},
		"connect, client":      {cell(connect(), spec.ToolNative), 1.05, 1, true},
		"connect, server":      {cell(connect(), spec.ToolNative), 1, 1.05, false},
	} {
		trial := record.Trial{Window: 1, PerPair: []record.Pair{{Client: record.Endpoint{Seconds: tt.client}, Server: record.Endpoint{Seconds: tt.server}}}}
		got := slices.ContainsFunc(warnings(tt.cell, &trial), func(w record.Warning) bool { return w.Code == record.WarnSkew })
		if got != tt.want {
			t.Errorf("%s: warned %t, want %t", name, got, tt.want)
		}
	}
}

// A trial in which TCP retransmitted more than one segment in a thousand, and more than ten, has a warning.
func TestManyRetransmissions(t *testing.T) {
	c := Cell{Workload: spec.Workload{Name: "stream", Stream: &spec.Traffic{}}, Pairs: 1}
	for _, tt := range []struct {
		segments, retransmits uint64
		want                  string
		oneEnd                bool // only one end counts bytes, as with other tools
	}{
		{100_000, 90, "", false},
		{100_000, 90, "", true},
		{1_000, 10, "", false},
		{99_000, 1_000, "TCP retransmitted 1000 segments, about 1% of all it sent", false},
	} {
		bytes := tt.segments * record.SegmentBytes
		trial := record.Trial{Window: 1, PerPair: []record.Pair{{Client: record.Endpoint{Bytes: bytes, Retransmits: tt.retransmits}, Server: record.Endpoint{Bytes: bytes}}}}
		if tt.oneEnd {
			trial.PerPair[0].Server = record.Endpoint{}
		}
		got := ""
		for _, w := range warnings(c, &trial) {
			if w.Code == record.WarnRetransmits {
				got += w.Message
			}
		}
		if got != tt.want {
			t.Errorf("%d of %d: %q, want %q", tt.retransmits, tt.segments, got, tt.want)
		}
	}
}

// A trial warns if more than half of the packets did not take the fast path, and gives the most frequent reason.
func TestSlowPath(t *testing.T) {
	c := Cell{Workload: spec.Workload{Name: "stream", Stream: &spec.Traffic{}}, Pairs: 1}
	for want, packets := range map[string]map[string]uint64{
		"": {record.FastOut + "-vxlan": 30, record.FastIn + "-local": 30, "no-flow": 50},
		"the fast path saw no packet: no connection was eligible (docs/explanation/fastpath.md)":                                    {"no-flow": 0},
		"the fast path of node0 forwarded 25% of 80 packets; most others took the slow path: nat (docs/explanation/fastpath.md)":    {record.FastOut: 20, "no-flow": 29, "nat": 31},
		"the fast path of node0 forwarded 0% of 20 packets; most others took the slow path: no-flow (docs/explanation/fastpath.md)": {"no-flow": 10, "revalidate": 10},
	} {
		trial := record.Trial{Window: 1, Hosts: []record.Host{{}}, Fastpath: []record.Fastpath{{Place: "node0", Packets: packets}}}
		got := ""
		for _, w := range warnings(c, &trial) {
			if w.Code == record.WarnSlowPath {
				got += w.Message
			}
		}
		if got != want {
			t.Errorf("%v: %q, want %q", packets, got, want)
		}
	}
	short := Cell{Workload: spec.Workload{Name: "connect", Connect: &spec.Traffic{}}, Pairs: 1}
	if got := slowPathWarnings(short, []record.Fastpath{{Place: "node0", Packets: map[string]uint64{"no-flow": 1000}}}); got != nil {
		t.Errorf("of connections that are too short: %v", got)
	}
	if fast, all, most := fastpathShare(record.Fastpath{}); fast != 0 || all != 0 || most != "" {
		t.Errorf("of nothing: %d of %d, %s", fast, all, most)
	}
}
