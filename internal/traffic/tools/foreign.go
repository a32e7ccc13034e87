package tools

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"slices"
)

// foreigners are outputs that Read knows and does not read, by a line that only they have.
var foreigners = []struct {
	line  *regexp.Regexp
	marks []string // texts of which such a line has one
	what  string   // and what to do
}{
	{regexp.MustCompile(`(?m)\[ *\d+\] local .* connected to\b|^Accepted connection from .*, port \d+|^iperf3: |^Server listening on \d+ \(test #|^Connecting to host .*, port \d+|^\[ ID\](\[Role\])? Interval +Transfer +Bitrate`),
		[]string{"connected to", "Accepted connection from", "iperf3: ", "(test #", "Connecting to host", "Bitrate"}, "iperf3's text, which slipstream does not read: run iperf3 with -J"},
	{regexp.MustCompile(`(?m)^(MIGRATED )?(TCP|UDP|SCTP)\w*[ _](STREAM|MAERTS|SENDFILE|RR|CRR|REQUEST/RESPONSE|CONNECT/REQUEST/RESPONSE)\b.*TEST|^MIGRATED |^OMNI Send TEST|^(THROUGHPUT|THROUGHPUT_UNITS|TRANSACTION_RATE|MEAN_LATENCY|ELAPSED_TIME|LOCAL_SEND_THROUGHPUT)=|Throughput,Throughput Units,`),
		[]string{"TEST", "THROUGHPUT", "TRANSACTION_RATE", "MEAN_LATENCY", "ELAPSED_TIME", "Throughput Units"}, "netperf's, which slipstream does not read: measure with iperf3 -J (TCP_STREAM) or sockperf pp (TCP_RR)"},
	{regexp.MustCompile(`"metric": *"(TCP|UDP)_(RR|CRR|STREAM)\w*"|"product_name": *"PerfKitBenchmarker"`), []string{`"metric"`, "PerfKitBenchmarker"},
		"PerfKit Benchmarker's samples, which slipstream does not read: measure with iperf3 -J (TCP_STREAM) or sockperf pp (TCP_RR), and import what the tool printed"},
	{regexp.MustCompile(`(?m)^Fortio [0-9.]+ running at |^Aggregated Function Time : |^# target 50% `), []string{"Fortio ", "Aggregated Function Time", "# target 50%"}, "fortio's text, which slipstream does not read: run fortio load with -json, and keep stderr out of the file"},
	{regexp.MustCompile(`(?m)^Bombarding http`), []string{"Bombarding http"}, "bombardier's, which slipstream does not read: measure with ab -e or wrk --latency"},
	{regexp.MustCompile(`(?m)^Requests +\[total, rate`), []string{"[total, rate"}, "vegeta's, which slipstream does not read: measure with ab -e or wrk --latency"},
	{regexp.MustCompile(`This is ApacheBench, Version [0-9.]+(-dev)? <i>`), []string{"<i>"}, "ab's HTML, which slipstream does not read: run ab without -w"},
	{regexp.MustCompile(`(?m)^ethr: |^\[ *\d+\] +(TCP|UDP) +\d{3}-\d{3} sec`), []string{"ethr: ", " sec"}, "ethr's, which slipstream does not read: measure with iperf3 -J"},
	{regexp.MustCompile(`(?m)^ *http_req_duration\.*:`), []string{"http_req_duration"}, "k6's text, which slipstream does not read: run k6 with --summary-export"},
	{regexp.MustCompile(`(?m)^Summary:\n +Total:\s+[0-9.]+ secs`), []string{"Summary:\n"}, "hey's, which slipstream does not read: measure with ab -e"},
	{regexp.MustCompile(`(?m)^(PING .* bytes of data\.?$|\d+ bytes from .*: icmp_seq=|\d+ packets transmitted, )`), []string{"bytes of data", "icmp_seq=", "packets transmitted"}, "ping's, which slipstream does not read: measure with sockperf pp"},
	{regexp.MustCompile(`(?m)^nuttcp|^ *[0-9.]+ MB / +[0-9.]+ sec = +[0-9.]+ Mbps`), []string{"nuttcp", " Mbps"}, "nuttcp's, which slipstream does not read: measure with iperf3 -J"},
	{regexp.MustCompile(`(?m)^Starting \d+ threads running profile:|^Total +[0-9.]+[KMG]?B / `), []string{"threads running profile", "Total "}, "uperf's, which slipstream does not read: measure with iperf3 -J"},
	{regexp.MustCompile(`(?m)^NTTTCP for Linux|^#### +(Connections|Network activity|Totals:) +####|^Copyright Version 5\.|^NTttcp`), []string{"NTTTCP", "NTttcp", "####", "Copyright Version 5"}, "ntttcp's, which slipstream does not read: measure with iperf3 -J"},
	{regexp.MustCompile(`(?m)^PsPing v|^TCP connect statistics:|^TCP roundtrip latency statistics`), []string{"PsPing", "TCP connect statistics", "TCP roundtrip latency"}, "psping's, which slipstream does not read: measure with latte or sockperf pp"},
	{regexp.MustCompile(`(?m)^====== (PING_INLINE|PING_MBULK|[A-Z]+) ======$|^"test","rps"`), []string{"====== ", "\"test\",\"rps\""}, "redis-benchmark's: use the tool redis of slipstream run"},
	{regexp.MustCompile(`(?m)^(starting vacuum|transaction type: |pgbench \()`), []string{"starting vacuum", "transaction type", "pgbench ("}, "pgbench's: use the tool postgres of slipstream run"},
	{regexp.MustCompile(`(?m)^\S+ +(AM |PM )?(CPU +%user +%nice +%system +%iowait +%steal|IFACE +rxpck/s)`), []string{"%steal", "rxpck/s"}, "sar's: run mpstat -P ALL with an interval and a count"},
	{regexp.MustCompile(`(?m)^top - \d\d:\d\d:\d\d up |^procs -+memory-+|^avg-cpu: `), []string{"top - ", "procs -", "avg-cpu"}, "that of top, vmstat or iostat: run mpstat -P ALL with an interval and a count"},
	{regexp.MustCompile(`(?m)^\[SERVER\] listen on:|sockperf: \[SERVER\]`), []string{"[SERVER]"}, "a sockperf server's: give what the client printed"},
	{regexp.MustCompile(`(?m)^(Waiting to start test|ready for requests)`), []string{"Waiting to start test", "ready for requests"}, "a qperf server's: give what the client printed"},
}

// foreign returns an error if an output has a part that is of a tool that Read does not read.
func foreign(output []byte) error {
	if at, what := foreigner(output); what != "" {
		return fmt.Errorf("line %d is not read: it is %s", lineOf(output, at), what)
	}
	return nil
}

// foreigner returns the offset of the first line of such a tool, and what it is of.
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

// jsonError is {"error": "…"}, which iperf3 prints alone if it did not start.
var jsonError = regexp.MustCompile(`^\{\s*"error":\s*"((?:[^"\\]|\\.)*)"\s*\}$`)

// quoted is what mails and documents put before each line.
var quoted = regexp.MustCompile(`(?m)^[ \t>#|]+`)

// errQuoted means that an output would be read without what stands before its lines.
var errQuoted = errors.New("its lines are indented, quoted or commented: give it as it was printed")

// parts are lines of outputs that are read whole only.
var parts = []struct {
	line *regexp.Regexp
	what string
}{
	{regexp.MustCompile(`"test_start"`), "a part of a report of iperf3 -J"},
	{regexp.MustCompile(`(?m)^Server Software: |^Requests per second: +[0-9.]+ \[#/sec\]`), "a part of what ab prints, which begins with \"This is ApacheBench\""},
	{regexp.MustCompile(`(?m)^starttime\tseconds\tctime\tdtime|^Percentage served,Time in ms`), "the file of ab -g or -e alone, and no text that ab printed"},
}

// unknown says what an output is that Read cannot read, if it is a known tool's.
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
