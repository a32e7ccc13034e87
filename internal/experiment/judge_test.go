package experiment

import (
	"errors"
	"testing"
	"time"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// TestJudge: a trial counts unless its figures are those of an outage, whatever made its traffic. Much loss, few replies on a slow path,
// and pairs that get less than others are results.
func TestJudge(t *testing.T) {
	const second = spec.Duration(1e9)
	tcp := spec.Traffic{Protocol: "tcp", Tool: spec.ToolNative, Duration: 5 * second, Connections: 1}
	udp := spec.Traffic{Protocol: "udp", Tool: spec.ToolNative, Duration: 5 * second, Connections: 1}
	with := func(t spec.Traffic, change func(*spec.Traffic)) *spec.Traffic { change(&t); return &t }
	ping, stream := spec.Workload{PingPong: &tcp}, spec.Workload{Stream: &tcp}
	datagrams, pingDatagrams := spec.Workload{Stream: &udp}, spec.Workload{PingPong: &udp}
	client := func(e record.Endpoint) []record.Pair { return []record.Pair{{Client: e}} }
	server := func(e record.Endpoint) []record.Pair {
		return []record.Pair{{Client: record.Endpoint{Seconds: 5, Messages: 1e6}, Server: e}}
	}
	for name, c := range map[string]struct {
		workload spec.Workload
		pairs    []record.Pair
		silent   []time.Duration
		want     string // "" if it counts
	}{
		"a good trial":                        {ping, client(record.Endpoint{Seconds: 5, Messages: 1e5}), nil, ""},
		"an outage of most of the window":     {ping, client(record.Endpoint{Seconds: 5, Messages: 1e5}), []time.Duration{3e9}, "nothing arrived for 3s of the window of 5s"},
		"an outage of less than half":         {ping, client(record.Endpoint{Seconds: 5, Messages: 1e5}), []time.Duration{2e9}, ""},
		"a busy machine in a short window":    {spec.Workload{PingPong: with(tcp, func(t *spec.Traffic) { t.Duration = second / 5 })}, client(record.Endpoint{Seconds: 0.2, Messages: 100}), []time.Duration{150e6}, ""},
		"one reply":                           {pingDatagrams, client(record.Endpoint{Seconds: 5, Messages: 1, Lost: 24}), nil, "1 replies arrived within the window of 5s, and fewer than 3"},
		"none, but the histogram has one":     {pingDatagrams, client(record.Endpoint{Seconds: 5, Lost: 25}), nil, "0 replies arrived within the window of 5s"},
		"a slow path":                         {ping, client(record.Endpoint{Seconds: 5, Messages: 3}), []time.Duration{2e9}, ""},
		"a rate that allows no more":          {spec.Workload{UnderLoad: with(udp, func(t *spec.Traffic) { t.Rate, t.Duration = 1, 2*second })}, client(record.Endpoint{Seconds: 2, Messages: 2}), nil, ""},
		"the pauses of a low rate":            {spec.Workload{UnderLoad: with(udp, func(t *spec.Traffic) { t.Rate, t.Duration = 1, second })}, client(record.Endpoint{Seconds: 1, Messages: 1}), []time.Duration{9e8}, ""},
		"a rate that allows more":             {spec.Workload{UnderLoad: with(udp, func(t *spec.Traffic) { t.Rate = 1 })}, client(record.Endpoint{Seconds: 5, Messages: 2}), nil, "2 replies"},
		"a tool without counts":               {spec.Workload{PingPong: with(tcp, func(t *spec.Traffic) { t.Tool = spec.ToolQperf })}, client(record.Endpoint{Seconds: 5}), nil, ""},
		"an overload":                         {datagrams, server(record.Endpoint{Seconds: 5, Arrived: 1e4, Lost: 1e6 - 1e4}), nil, ""},
		"a lossy path":                        {pingDatagrams, client(record.Endpoint{Seconds: 5, Messages: 200, Lost: 24}), []time.Duration{1e9}, ""},
		"a receiver that heard nothing":       {datagrams, server(record.Endpoint{Seconds: 5, Arrived: 1e4}), []time.Duration{4e9}, "nothing arrived for 4s"},
		"one of two pairs gets little":        {stream, append(server(record.Endpoint{Seconds: 5}), server(record.Endpoint{Seconds: 5})...), []time.Duration{4e9, 0}, ""},
		"no pair gets anything":               {stream, append(server(record.Endpoint{Seconds: 5}), server(record.Endpoint{Seconds: 5})...), []time.Duration{4e9, 3e9}, "nothing arrived for 3s"},
		"a window that is too long":           {ping, client(record.Endpoint{Place: "a", Seconds: 12, Messages: 1e5}), nil, "a measured for 12s in place of 5s"},
		"a receiver's window that is short":   {stream, server(record.Endpoint{Place: "b", Seconds: 1}), nil, "b measured for 1s in place of 5s"},
		"a sender's window that is short":     {stream, []record.Pair{{Client: record.Endpoint{Place: "a", Seconds: 1}, Server: record.Endpoint{Place: "b", Seconds: 5}}}, nil, "a measured for 1s in place of 5s"},
		"a server that awaits messages":       {ping, []record.Pair{{Client: record.Endpoint{Seconds: 5, Messages: 1e5}, Server: record.Endpoint{Seconds: 12}}}, nil, ""},
		"replies at another pair":             {pingDatagrams, append(client(record.Endpoint{Seconds: 5, Messages: 1}), client(record.Endpoint{Seconds: 5, Messages: 2})...), nil, ""},
		"a short window, by a busy machine":   {spec.Workload{PingPong: with(tcp, func(t *spec.Traffic) { t.Duration = second / 10 })}, client(record.Endpoint{Seconds: 0.25, Messages: 100}), nil, ""},
		"a tool that says no window":          {spec.Workload{Stream: with(tcp, func(t *spec.Traffic) { t.Tool = spec.ToolIperf2 })}, client(record.Endpoint{Bytes: 1}), nil, ""},
		"a number of requests, done early":    {spec.Workload{HTTP: with(tcp, func(t *spec.Traffic) { t.Requests = 2 })}, client(record.Endpoint{Seconds: 0.1, Messages: 2}), nil, ""},
		"a number of requests, and a silence": {spec.Workload{HTTP: with(tcp, func(t *spec.Traffic) { t.Requests = 2 })}, client(record.Endpoint{Seconds: 4, Messages: 2}), []time.Duration{3e9}, "nothing arrived for 3s of the window of 4s"},
	} {
		if c.silent == nil {
			c.silent = make([]time.Duration, len(c.pairs))
		}
		err := judge(Cell{Workload: c.workload}, c.pairs, c.silent)
		switch {
		case c.want == "" && err != nil, c.want != "" && (err == nil || len(err.Error()) < len(c.want) || err.Error()[:len(c.want)] != c.want):
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

// TestJudgeMesh: in a mesh, a pair that does not count costs that pair. If none counts, the trial is repeated.
func TestJudgeMesh(t *testing.T) {
	for drops, want := range map[string]string{"node1": "", "": "every pair failed"} {
		f, out := newFake(4), new(memory)
		f.drops = func(place string) time.Duration {
			if drops == "" || drops == place {
				return 900 * time.Millisecond
			}
			return 0
		}
		_, err := measure(t, t.Context(), f, meshOf(t, 4), out, nil)
		if (want == "") != (err == nil) {
			t.Errorf("%q drops everything: %v", drops, err)
		}
		for _, tr := range out.trials {
			if tr.Stalled != (want != "") {
				t.Errorf("%q drops everything: %s, %s", drops, tr.Status, tr.Error)
			}
			for _, p := range tr.PerPair {
				if want == "" && (p.Error != "") != (p.Server.Place == "node1") {
					t.Errorf("%s to %s: %q", p.Client.Place, p.Server.Place, p.Error)
				}
			}
		}
	}
}

// TestSilentNICs: for tools, a silence is what a node's NICs show of it, beside what else they receive.
func TestSilentNICs(t *testing.T) {
	at := func(n int) (all []int64) {
		for i := range n + 1 {
			all = append(all, int64(i)*100_000)
		}
		return all
	}
	repeat := func(n int, rx uint64) (all []uint64) {
		for range n {
			all = append(all, rx)
		}
		return all
	}
	join := func(parts ...[]uint64) (all []uint64) {
		for _, p := range parts {
			all = append(all, p...)
		}
		return all
	}
	for name, c := range map[string]struct {
		rx   []uint64
		want time.Duration
	}{
		"none":                     {repeat(10, 1e6), 0},
		"an outage":                {join(repeat(4, 1e6), repeat(6, 0)), 600 * time.Millisecond},
		"beside a keep-alive":      {join(repeat(4, 1e6), repeat(6, 5e3)), 600 * time.Millisecond},
		"beside a burst":           {join(repeat(9, 1e4), repeat(1, 1e9)), 0},
		"less than tells":          {join(repeat(4, 900), repeat(6, 0)), 0},
		"nothing at all":           {repeat(10, 0), 0},
		"in the middle, and twice": {join(repeat(3, 1e6), repeat(2, 0), repeat(1, 1e6), repeat(3, 0), repeat(1, 1e6)), 300 * time.Millisecond},
		"no reading":               {nil, 0},
	} {
		if got := silentNICs(record.Series{At: at(len(c.rx)), NICs: []record.NICSeries{{Name: "eth0", Rx: c.rx}}}); got != c.want {
			t.Errorf("%s: silent for %s, want %s", name, got, c.want)
		}
	}
	if !errors.As(judge(Cell{Workload: spec.Workload{Stream: &spec.Traffic{Duration: 1e9}}}, make([]record.Pair, 1), []time.Duration{1e9}), new(record.StalledError)) {
		t.Error("an outage is not on record as a stall")
	}
}
