package tools

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"testing"
	"time"
)

// mainFigures are lines of each tool that occur once per run.
var mainFigures = map[string]*regexp.Regexp{
	"iperf3":   regexp.MustCompile(`"sum_received"\s*:`),
	"iperf2":   regexp.MustCompile(`(?m)^Client connecting to \S+, (TCP|UDP) port \d`),
	"sockperf": regexp.MustCompile(`(?m)^sockperf: (\[Valid Duration\]|Total of \d+ messages sent)`),
	"qperf":    regexp.MustCompile(`(?m)^(tcp|udp)_(bw|lat):$`),
	"ab":       regexp.MustCompile(`(?m)^Complete requests: `),
	"latte":    regexp.MustCompile(`(?m)^Latency\(usec\)`),
	"wrk":      regexp.MustCompile(`(?m)^Requests/sec: `),
	"fortio":   regexp.MustCompile(`"ActualQPS"`),
	"k6":       regexp.MustCompile(`"http_reqs"`),
	"mpstat":   regexp.MustCompile(`(?m)^[^0-9\n]+\sCPU\s+%(usr|user)\s`),
}

// csvLine matches a line of iperf 2 with -y C.
var csvLine = regexp.MustCompile(`(?m)^[-+]?\d{4}.*,`)

func FuzzAccountIperf3(f *testing.F)   { account(f, "iperf3", "testdata/iperf3-*") }
func FuzzAccountIperf2(f *testing.F)   { account(f, "iperf2", "testdata/iperf2-*") }
func FuzzAccountSockperf(f *testing.F) { account(f, "sockperf", "testdata/sockperf-*") }
func FuzzAccountQperf(f *testing.F)    { account(f, "qperf", "testdata/qperf-*") }
func FuzzAccountAB(f *testing.F)       { account(f, "ab", "testdata/ab-*") }
func FuzzAccountLatte(f *testing.F)    { account(f, "latte", "testdata/latte-*") }
func FuzzAccountMpstat(f *testing.F)   { account(f, "mpstat", "testdata/mpstat-*") }

func FuzzAccountWrk(f *testing.F) { account(f, "wrk", "testdata/nginx-*") }
func FuzzAccountFortio(f *testing.F) {
	account(f, "fortio", "../../importer/testdata/shapes/fortio*/a-*")
}
func FuzzAccountK6(f *testing.F) { account(f, "k6", "../../importer/testdata/shapes/k6*/a-*") }

// account checks that no run of an output is silently left out: there are as many runs, and copies of runs, as lines that occur
// once per run.
func account(f *testing.F, tool, seeds string) {
	files, err := filepath.Glob(seeds)
	if err != nil || len(files) == 0 {
		f.Fatalf("no seeds: %v", err)
	}
	for i, file := range files {
		one, other := contents(f, file), contents(f, files[(i+1)%len(files)])
		f.Add(one)
		f.Add(bytes.Join([][]byte{one, other}, nil))
		f.Add(bytes.Join([][]byte{one, []byte("=== again ===\n"), one, one}, nil))
		f.Add(bytes.Join([][]byte{one, one[len(one)/3:]}, nil))
		f.Add(bytes.Join([][]byte{one[len(one)/3:], one}, nil))
	}
	figure := mainFigures[tool]
	f.Fuzz(func(t *testing.T, output []byte) {
		readings, err := Read(output, Known{Window: time.Second})
		if err != nil || readings[0].Format != tool || bytes.Contains(output, []byte("server_output_json")) {
			return
		}
		runs := 0
		for _, r := range readings {
			runs += len(r.Runs) + r.Copies
		}
		lines := len(figure.FindAll(output, -1))
		// Neither -y C nor -o JSON has such lines.
		other := csvLine.Match(output) || bytes.Contains(output, mpstatJSON)
		if runs < lines || runs > lines && !other {
			t.Errorf("%d runs of %d", runs, lines)
		}
	})
}

func contents(f *testing.F, path string) []byte {
	f.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		f.Fatal(err)
	}
	return data
}
