package tools

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"slices"
)

// foreigners are outputs that Read recognises but cannot read. Each has a line that no other output has.
var foreigners = []struct {
	line  *regexp.Regexp
	marks []string // texts, one of which is in such a line
	what  string   // the tool, and what to do instead
}{
	{regexp.MustCompile(`(?m)\[ *\d+\] local .* connected to\b|^Accepted connection from .*, port \d+|^iperf3: |^Server listening on \d+ \(test #|^Connecting to host .*, port \d+|^\[ ID\](\[Role\])? Interval +Transfer +Bitrate`),
		[]string{"connected to", "Accepted connection from", "iperf3: ", "(test #", "Connecting to host", "Bitrate"}, "iperf3's text, which slipstream does not read: run iperf3 with -J"},
	{regexp.MustCompile(`(?m)^(MIGRATED )?(TCP|UDP|SCTP)\b.* TEST( from|$)|^(TCP|UDP|SCTP)_(STREAM|MAERTS|SENDFILE|RR|CRR).* TEST\b|^MIGRATED |^OMNI Send TEST|^(THROUGHPUT|THROUGHPUT_UNITS|TRANSACTION_RATE|MEAN_LATENCY|ELAPSED_TIME|LOCAL_SEND_THROUGHPUT)=|Throughput,Throughput Units,`),
		[]string{"TEST", "THROUGHPUT", "TRANSACTION_RATE", "MEAN_LATENCY", "ELAPSED_TIME", "Throughput Units"}, "netperf's, which slipstream does not read: measure with iperf3 -J (TCP_STREAM) or sockperf pp (TCP_RR)"},
	{regexp.MustCompile(`(?m)^Driver,Profile,Same node,|"profile": *"(TCP|UDP)_(RR|CRR|STREAM)"|^Generator +: knb|^(ALL TESTCASE|MSS +),? *Maximum,`), []string{"Driver,Profile", `"profile"`, "Generator", "Maximum,"},
		"a table of k8s-netperf, knb or perf-tests, which slipstream does not read: import the output of the tool that it ran (iperf3 -J)"},
	{regexp.MustCompile(`"x_values": *\[`), []string{`"x_values"`}, "flent's, which slipstream does not read: measure with iperf3 -J (TCP_STREAM) or sockperf pp (TCP_RR)"},
	{regexp.MustCompile(`"metric": *"(TCP|UDP)_(RR|CRR|STREAM)\w*"|"product_name": *"PerfKitBenchmarker"`), []string{`"metric"`, "PerfKitBenchmarker"},
		"PerfKit Benchmarker's samples, which slipstream does not read: measure with iperf3 -J (TCP_STREAM) or sockperf pp (TCP_RR), and import what the tool printed"},
	{regexp.MustCompile(`(?m)^Fortio [0-9.]+ running at |^Aggregated Function Time : |^# target 50% `), []string{"Fortio ", "Aggregated Function Time", "# target 50%"}, "fortio's text, which slipstream does not read: run fortio load with -json, and keep stderr out of the file"},
	{regexp.MustCompile(`"Count": *"\d+"|"Labels": *"[^"]*Nighthawk`), []string{`"DurationHistogram"`}, "nighthawk's in the form of fortio's, which slipstream does not read: measure with fortio load -json"},
	{regexp.MustCompile(`(?m)^Bombarding http`), []string{"Bombarding http"}, "bombardier's, which slipstream does not read: measure with ab -e or wrk --latency"},
	{regexp.MustCompile(`(?m)^Requests +\[total, rate|^\{"latencies": *\{"total"`), []string{"[total, rate", `"latencies"`}, "vegeta's, which slipstream does not read: measure with ab -e or wrk --latency"},
	{regexp.MustCompile(`This is ApacheBench, Version [0-9.]+(-dev)? <i>`), []string{"<i>"}, "ab's HTML, which slipstream does not read: run ab without -w"},
	{regexp.MustCompile(`(?m)^ethr: |^\[ *\d+\] +(TCP|UDP) +\d{3}-\d{3} sec`), []string{"ethr: ", " sec"}, "ethr's, which slipstream does not read: measure with iperf3 -J"},
	{regexp.MustCompile(`(?m)^\{("metric":"\w+",)?"type":"(Metric|Point)"|^metric_name,timestamp,metric_value`), []string{`"type":"Metric"`, `"type":"Point"`, "metric_name,"}, "k6's samples (--out), which slipstream does not read: run k6 with --summary-export"},
	{regexp.MustCompile(`(?m)^ *http_req_duration\.*:`), []string{"http_req_duration"}, "k6's text, which slipstream does not read: run k6 with --summary-export"},
	{regexp.MustCompile(`(?m)^│ Stat +│`), []string{"│ Stat"}, "autocannon's, which slipstream does not read: measure with ab -e or wrk --latency"},
	{regexp.MustCompile(`(?m)^Summary:\n +Success rate:|"successRate": *[0-9.]+,`), []string{"Success rate:", `"successRate"`}, "oha's, which slipstream does not read: measure with ab -e or wrk --latency"},
	{regexp.MustCompile(`(?m)^finished in [0-9.]+[a-z]+, [0-9.]+ req/s`), []string{"finished in "}, "h2load's, which slipstream does not read: measure with ab -e, wrk --latency or fortio load -h2 -json"},
	{regexp.MustCompile(`(?m)^Transactions:\s+\d+ +hits|^\s*"transactions":\s+\d+,`), []string{"Transactions:", `"transactions"`}, "siege's, which slipstream does not read: measure with ab -e or wrk --latency"},
	{regexp.MustCompile(`(?m)^Total: connections \d+ requests \d+ replies`), []string{"Total: connections"}, "httperf's, which slipstream does not read: measure with ab -e or wrk --latency"},
	{regexp.MustCompile(`(?m)^timeStamp,elapsed,label,|^summary [+=] +\d+ in |^Type,Name,Request Count,Failure Count|^---- Global Information -`), []string{"timeStamp,", "summary ", "Type,Name,", "Global Information"}, "that of JMeter, Locust or Gatling, which slipstream does not read: measure with ab -e or wrk --latency"},
	{regexp.MustCompile(`(?m)^Summary:\n +Total:\s+[0-9.]+ secs|^response-time,DNS`), []string{"Summary:\n", "response-time,"}, "hey's, which slipstream does not read: measure with ab -e"},
	{regexp.MustCompile(`(?m)^(PING .* bytes of data\.?$|Reply from \S+ bytes=|\d+ bytes from .*: icmp_seq=|\d+ packets transmitted, )`), []string{"bytes of data", "Reply from", "icmp_seq=", "packets transmitted"}, "ping's, which slipstream does not read: measure with sockperf pp"},
	{regexp.MustCompile(`(?m)^ *\d+: .*\d times -->`), []string{"times -->"}, "NetPIPE's, which slipstream does not read: measure with iperf3 -J or sockperf pp"},
	{regexp.MustCompile(`(?m)^nuttcp|^ *[0-9.]+ MB / +[0-9.]+ sec = +[0-9.]+ Mbps`), []string{"nuttcp", " Mbps"}, "nuttcp's, which slipstream does not read: measure with iperf3 -J"},
	{regexp.MustCompile(`(?m)^Starting \d+ threads running profile:|^Total +[0-9.]+[KMG]?B / `), []string{"threads running profile", "Total "}, "uperf's, which slipstream does not read: measure with iperf3 -J"},
	{regexp.MustCompile(`(?m)^NTTTCP for Linux|^#### +(Connections|Network activity|Totals:) +####|^Copyright Version 5\.|^NTttcp|^<ntttcp[sr]? `), []string{"NTTTCP", "NTttcp", "<ntttcp", "####", "Copyright Version 5"}, "ntttcp's, which slipstream does not read: measure with iperf3 -J"},
	{regexp.MustCompile(`(?m)^ *T\(sec\) +N +Pend +Failed`), []string{"T(sec)"}, "that of cps or ncps, which slipstream does not read: measure connections with ab without -k"},
	{regexp.MustCompile(`(?m)^PsPing v|^TCP connect statistics:|^TCP roundtrip latency statistics`), []string{"PsPing", "TCP connect statistics", "TCP roundtrip latency"}, "psping's, which slipstream does not read: measure with latte or sockperf pp"},
	{regexp.MustCompile(`(?m)^Type +Ops/sec +(Hits/sec|Avg\. Latency)`), []string{"Ops/sec"}, "memtier_benchmark's: use the tool redis or memcached of slipstream run"},
	{regexp.MustCompile(`(?m)^====== (PING_INLINE|PING_MBULK|[A-Z]+) ======$|^"test","rps"`), []string{"====== ", "\"test\",\"rps\""}, "redis-benchmark's: use the tool redis of slipstream run"},
	{regexp.MustCompile(`(?m)^(starting vacuum|transaction type: |pgbench \()`), []string{"starting vacuum", "transaction type", "pgbench ("}, "pgbench's: use the tool postgres of slipstream run"},
	{regexp.MustCompile(`(?m)^.{1,24}[ \t](CPU +%us.*%iowait +%steal|IFACE +rxpck/s)`), []string{"%steal", "rxpck/s"}, "sar's, which slipstream does not read: run mpstat -P ALL with an interval and a count"},
	{regexp.MustCompile(`(?m)^.{1,24}[ \t]UID +(TGID +)?.*PID +%usr`), []string{"PID"}, "pidstat's, which slipstream does not read: run mpstat -P ALL with an interval and a count"},
	{regexp.MustCompile(`(?m)^top - \d\d:\d\d:\d\d up |^procs -+memory-+|^avg-cpu: `), []string{"top - ", "procs -", "avg-cpu"}, "that of top, vmstat or iostat: run mpstat -P ALL with an interval and a count"},
	{regexp.MustCompile(`(?m)^\[SERVER\] listen on:|sockperf: \[SERVER\]`), []string{"[SERVER]"}, "a sockperf server's: give what the client printed"},
	{regexp.MustCompile(`(?m)^(Waiting to start test|ready for requests)`), []string{"Waiting to start test", "ready for requests"}, "a qperf server's: give what the client printed"},
}

// foreign returns an error if an output contains that of one of the foreigners.
func foreign(output []byte) error {
	if at, what := foreigner(output); what != "" {
		return fmt.Errorf("line %d is not read: it is %s", lineOf(output, at), what)
	}
	return nil
}

// foreigner returns the offset of the first line of one of the foreigners, and which one it is.
func foreigner(output []byte) (at int, what string) {
	for _, f := range foreigners {
		if !slices.ContainsFunc(f.marks, func(mark string) bool { return bytes.Contains(output, []byte(mark)) }) {
			continue
		}
		if at := f.line.FindIndex(output); at != nil {
			return at[0], f.what
		}
	}
	return 0, ""
}

// jsonError matches {"error": "…"}, all that iperf3 prints if it did not start.
var jsonError = regexp.MustCompile(`^\{\s*"error":\s*"((?:[^"\\]|\\.)*)"\s*\}$`)

// quoted matches the prefixes of lines that are quoted in mails and documents.
var quoted = regexp.MustCompile(`(?m)^[ \t>#|]+`)

// errQuoted means that an output could be read if its lines had no prefixes.
var errQuoted = errors.New("its lines are indented, quoted or commented: give it as it was printed")

// parts matches lines of incomplete outputs, which Read cannot read.
var parts = []struct {
	line *regexp.Regexp
	what string
}{
	{regexp.MustCompile(`"test_start"`), "a part of a report of iperf3 -J"},
	{regexp.MustCompile(`(?m)^\[ *(\d+|SUM)\] +[0-9.]+- *[0-9.]+ +sec .*/sec`), "lines of a report of iperf 2 or iperf3, without the heading with the traffic"},
	{regexp.MustCompile(`(?m)^Server Software: |^Requests per second: +[0-9.]+ \[#/sec\]`), "a part of what ab prints, which begins with \"This is ApacheBench\""},
	{regexp.MustCompile(`(?m)^starttime\tseconds\tctime\tdtime|^Percentage served,Time in ms`), "the file of ab -g or -e alone, and no text that ab printed"},
}

// unknown returns why Read cannot read an output, and names the tool if it is recognised.
func unknown(output []byte) error {
	if _, what := foreigner(output); what != "" {
		return errors.New("it is " + what)
	}
	text := bytes.TrimSpace(output)
	if m := jsonError.FindSubmatch(text); m != nil {
		return fmt.Errorf("it has no report, only an error, as iperf3 -J prints it: %.300s", m[1])
	}
	for _, p := range parts {
		if p.line.Match(text) {
			return fmt.Errorf("it has %s: give it whole", p.what)
		}
	}
	plain := quoted.ReplaceAll(text, nil)
	for _, f := range formats {
		if f.is(plain) {
			return fmt.Errorf("it may be the output of %s, but its lines are indented, quoted or commented: give it as %s printed it", f.name, f.name)
		}
	}
	first, _, _ := bytes.Cut(text, []byte("\n"))
	return fmt.Errorf("it is not the output of a known tool: iperf3 -J, iperf 2, sockperf, qperf, ab, latte, wrk, fortio -json, k6 --summary-export, mpstat, or a log of runs; it begins with %.100q", first)
}
