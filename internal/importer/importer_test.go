package importer

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf16"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/testenv"
)

// output returns the output of a tool, from the test data of the parsers.
func output(t *testing.T, name string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("../traffic/tools/testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// folder writes files into a new folder. It replaces FILE by the name of the file, so reports made by stream are of different runs.
func folder(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, data := range files {
		testenv.WriteFile(t, filepath.Join(dir, name), strings.ReplaceAll(data, "FILE", name))
	}
	return dir
}

// stream returns a report of iperf3 with a rate in Mbit/s and a start time.
func stream(mbits, at int) string {
	return fmt.Sprintf(`{"start":{"version":"iperf 3.12","cookie":"stream in FILE of %[1]d Mbit/s at %[2]d","timestamp":{"timesecs":%[2]d},"test_start":{"protocol":"TCP","num_streams":1,"blksize":131072,"omit":1,"duration":10}},
"intervals":[],"end":{"sum_sent":{"seconds":10},"sum_received":{"seconds":10,"bytes":%[3]d}}}`, mbits, at, mbits*1e6/8*10)
}

// later turns the output of ab into that of another run with the same figures: it changes only one that is not read.
func later(ab string) string {
	return strings.Replace(ab, "Total transferred:      ", "Total transferred:      1", 1)
}

func run(t *testing.T, dir, pattern string) *Result {
	t.Helper()
	r, err := Import([]string{dir}, Options{Pattern: pattern, Baseline: "base"})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestPattern(t *testing.T) {
	none := name{number: -1, pairs: -1, pair: -1}
	for _, tt := range []struct {
		pattern, path string
		want          name
		no            bool
	}{
		{pattern: "{variant}-{block}.json", path: "a/rps-plus-12.json", want: name{variant: "rps-plus", number: 12, pairs: -1, pair: -1}},
		{pattern: "{variant}-{block}.json", path: "rps-plus-12.jsonx", no: true},
		{pattern: "{variant}-{block}.json", path: "rps-x.json", no: true},
		{pattern: "{variant}-{block}.json", path: "rps-12xjson", no: true},
		{pattern: "{variant}/{workload}_{pairs}.{pair}.r{run}*", path: "deep/RPS+/Bulk_4.2.r07.iperf3.json", want: name{variant: "RPS+", workload: "Bulk", number: 7, pairs: 4, pair: 2}},
		{pattern: "{variant}/{run}", path: "7", no: true},
		{pattern: "{variant}.*.{node}", path: "base.mpstat.node-A", want: name{variant: "base", node: "node-A", number: -1, pairs: -1, pair: -1}},
		{pattern: "{variant}", path: "x/base", want: func() name { n := none; n.variant = "base"; return n }()},
		{pattern: "{variant}-{run}", path: "base-1234567", no: true}, // too many digits for the number of a run
	} {
		p, err := parsePattern(tt.pattern)
		if err != nil {
			t.Fatal(err)
		}
		got, ok := p.match(tt.path)
		if ok == tt.no || ok && got != tt.want {
			t.Errorf("%s of %s: %+v, %v, want %+v", tt.pattern, tt.path, got, ok, tt.want)
		}
	}
	for text, want := range map[string]string{
		"":                      "describe the file names",
		"{block}.json":          "it has no {variant}",
		"{variant}-{trial}":     "there is no placeholder {trial}",
		"{variant}-{variant}":   "it has {variant} twice",
		"{variant}{block}{run}": "write {block} if each block has every variant",
	} {
		if _, err := parsePattern(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want %q", text, err, want)
		}
	}
}

// TestTests: a file with several tests, such as qperf writes, yields a trial of each.
func TestTests(t *testing.T) {
	tests := output(t, "qperf-0.4.11-bw-lat-conf.txt")
	for pattern, want := range map[string]string{
		"{variant}-{run}.txt":            "base pingpong 1 base pingpong 2 base stream 1 base stream 2",
		"{variant}_{workload}-{run}.txt": "base small-pingpong 1 base small-pingpong 2 base small-stream 1 base small-stream 2",
	} {
		name := strings.NewReplacer("{variant}", "base", "{workload}", "small").Replace(pattern)
		dir := folder(t, map[string]string{strings.Replace(name, "{run}", "1", 1): tests, strings.Replace(name, "{run}", "2", 1): tests})
		r, err := Import([]string{dir}, Options{Pattern: pattern, Window: 2 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, tr := range r.Trials {
			got = append(got, fmt.Sprintf("%s %s %d", tr.Variant, tr.Workload, tr.Block))
			for name, v := range map[string]float64{metrics.Throughput: 332e6 * 8, metrics.LatencyMean: 38.2e-6} {
				if got, ok := tr.Metrics[name]; ok && math.Abs(got/v-1) > 1e-9 {
					t.Errorf("%s of %g, want %g", name, got, v)
				}
			}
		}
		slices.Sort(got)
		if strings.Join(got, " ") != want || len(r.Imported.Files) != 2 || !strings.Contains(r.Note, "from 2 files") {
			t.Errorf("%s: trials %v, %d files, %s", pattern, got, len(r.Imported.Files), r.Note)
		}
	}
	// Several tests of the same kind keep their names in the file. Each time that a test appears there is a run of it.
	dir := folder(t, map[string]string{"base.txt": "tcp_lat:\n    latency  =  2 us\nudp_lat:\n    latency  =  3 us\ntcp_lat:\n    latency  =  4 us\n"})
	r, err := Import([]string{dir}, Options{Pattern: "{variant}.txt", Window: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, tr := range r.Trials {
		got = append(got, fmt.Sprintf("%s %d %.0f", tr.Workload, tr.Block, tr.Metrics[metrics.LatencyMean]*1e6))
		if _, ok := tr.Metrics[metrics.Loss]; ok {
			t.Errorf("%s has a loss, which qperf does not count", tr.Workload)
		}
	}
	slices.Sort(got)
	if want := []string{"tcp_lat 1 4", "tcp_lat 2 8", "udp_lat 1 6"}; !slices.Equal(got, want) {
		t.Errorf("trials %v, want %v", got, want)
	}
}

// TestDocumentedCommands: each import line of the how-to reads what its command prints.
func TestDocumentedCommands(t *testing.T) {
	text, err := os.ReadFile("../../docs/how-to/import.md")
	if err != nil {
		t.Fatal(err)
	}
	qperf, latte, pp := output(t, "qperf-0.4.11-bw-lat-conf.txt"), output(t, "latte-iterations.txt"), output(t, "sockperf-3.7-half-rtt.txt")
	iperf2, lat, ab := output(t, "iperf2-2.1.8-tcp.txt"), output(t, "qperf-0.4.11-terse.txt"), output(t, "ab-2.3-plain.txt")
	tp, ul, mpstat := output(t, "sockperf-3.7-stream-64.txt"), output(t, "sockperf-3.7-underload-max.txt"), output(t, "mpstat-12.6.1.txt")
	for _, tt := range []struct {
		command string
		files   map[string]string
		want    []string
	}{
		{"--pattern '{variant}-{run}.txt' --baseline A2 --duration 2s", map[string]string{"A2-1.txt": qperf, "D2-1.txt": qperf},
			[]string{"A2 pingpong latency_mean rate", "A2 stream throughput", "D2 pingpong latency_mean rate", "D2 stream throughput"}},
		{"--pattern '{variant}-{workload}-{run}.txt' --baseline off", map[string]string{"off-pp64-1.txt": pp, "off-tp64-1.txt": tp, "off-ul1472-1.txt": ul},
			[]string{
				"off pp64 latency_max latency_mean latency_p50 latency_p99 latency_p999 rate", "off tp64 message_rate throughput",
				"off ul1472 latency_max latency_mean latency_p50 latency_p99 latency_p999 rate",
			}},
		{"--pattern '{variant}_{workload}_{run}.txt' --baseline off", map[string]string{"off_64_1.txt": latte},
			[]string{"off 64 client_cpu context_switches_per_message interrupts_per_message latency_mean rate"}},
		{"--pattern '{variant}.{workload}.{run}.txt' --baseline off --duration 2s", map[string]string{"off.iperf.1.txt": iperf2, "off.qperf.1.txt": lat},
			[]string{"off iperf throughput", "off qperf latency_mean rate"}},
		{"--pattern '{variant}.{workload}.{run}.txt' --baseline kube-proxy", map[string]string{"kube-proxy.16000.1.txt": ab, "cilium.16000.1.txt": later(ab)},
			[]string{
				"cilium 16000 completion errors latency_max latency_mean latency_p99 rate",
				"kube-proxy 16000 completion errors latency_max latency_mean latency_p99 rate",
			}},
		{"--pattern '{variant}-{pairs}-{run}-*' --baseline baseline", map[string]string{"baseline-1-1-iperf3.json": stream(1000, 1), "baseline-1-1-mpstat.txt": mpstat},
			[]string{"baseline stream cpu_per_gb softirq_per_gb throughput"}},
	} {
		if !strings.Contains(string(text), "`slipstream import "+tt.command) {
			t.Errorf("the how-to lacks %s", tt.command)
		}
		o := Options{Window: 2 * time.Second}
		_, after, _ := strings.Cut(tt.command, "'")
		o.Pattern, after, _ = strings.Cut(after, "'")
		o.Baseline = strings.Fields(after)[1]
		r, err := Import([]string{folder(t, tt.files)}, o)
		if err != nil {
			t.Errorf("%s: %v", tt.command, err)
			continue
		}
		var got []string
		for _, tr := range r.Trials {
			got = append(got, strings.Join(append([]string{tr.Variant, tr.Workload}, slices.Sorted(maps.Keys(tr.Metrics))...), " "))
		}
		slices.Sort(got)
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.command, diff)
		}
	}
}

// TestNotMeasured: of what a receiver of UDP counts, a tool's plain output has only the loss.
func TestNotMeasured(t *testing.T) {
	dir := folder(t, map[string]string{"base.txt": "udp_bw:\n    send_bw  =  1.2 GB/sec\n    recv_bw  =  900 MB/sec\n"})
	r, err := Import([]string{dir}, Options{Pattern: "{variant}.txt", Window: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]float64{metrics.Throughput: 7.2e9, metrics.Loss: 0.25}, r.Trials[0].Metrics, cmpopts.EquateApprox(1e-9, 0)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestMachine: latte's figures of its machine are metrics, and its mean is the primary one.
func TestMachine(t *testing.T) {
	r, err := Import([]string{folder(t, map[string]string{"base.txt": output(t, "latte-iterations.txt")})}, Options{Pattern: "{variant}.txt"})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]float64{
		metrics.LatencyMean: 2920.8e-6, metrics.Rate: 1 / 2920.8e-6, metrics.ClientCPU: 0.068,
		metrics.InterruptsPerMessage: 13.16, metrics.SwitchesPerMessage: 17.13,
	}
	if diff := cmp.Diff(want, r.Trials[0].Metrics, cmpopts.EquateApprox(1e-9, 0)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	s, err := stats.Analyze(r.Experiment, r.Trials)
	if err != nil {
		t.Fatal(err)
	}
	if w := r.Experiment.Spec.Workloads[0]; s.Primary(w.Name) != metrics.LatencyMean || w.PingPong.Iterations != 65000 {
		t.Errorf("primary %s of %+v", s.Primary(w.Name), w.PingPong)
	}
}

// TestMessageRate: a stream has a message rate only if its messages are small, such as sockperf's.
func TestMessageRate(t *testing.T) {
	dir := folder(t, map[string]string{"base_64.txt": output(t, "sockperf-3.7-stream-64.txt"), "base_128K.txt": stream(1000, 100)})
	r, err := Import([]string{dir}, Options{Pattern: "{variant}_{workload}.txt"})
	if err != nil {
		t.Fatal(err)
	}
	for _, tr := range r.Trials {
		got, ok := tr.Metrics[metrics.MessageRate]
		if small := tr.Workload == "64"; small != ok || small && math.Abs(got-153367/1.048) > 1 {
			t.Errorf("%s: %g messages a second, %v", tr.Workload, got, ok)
		}
	}
}

// TestPlain: text with the line ends and encodings of Windows is read as the same text.
func TestPlain(t *testing.T) {
	latte := output(t, "latte-iterations.txt")
	windows := strings.ReplaceAll(latte, "\n", "\r\n")
	units := utf16.Encode([]rune(windows))
	little, big := []byte{0xff, 0xfe}, []byte{0xfe, 0xff}
	for _, u := range units {
		little, big = binary.LittleEndian.AppendUint16(little, u), binary.BigEndian.AppendUint16(big, u)
	}
	for name, data := range map[string]string{"CRLF": windows, "UTF-8 with a mark": "\ufeff" + windows, "UTF-16": string(little), "UTF-16, big end first": string(big)} {
		if got, err := decodeText([]byte(data)); err != nil || string(got) != latte {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	for data, want := range map[string]string{string(little[2:]): "line 1 has a byte 0", " \n": "it is empty", "\xff\xfe": "it is empty"} {
		if _, err := decodeText([]byte(data)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want %q", data, err, want)
		}
	}
}

// FuzzPlain: whatever a file has, decodeText returns either an error or text that is not empty and has no byte 0.
func FuzzPlain(f *testing.F) {
	f.Add([]byte("\xff\xfea\x00\r\x00\n\x00"))
	f.Add([]byte("\xfe\xff\x00a\x00"))
	f.Add([]byte("\xef\xbb\xbfa\r\nb"))
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := decodeText(data)
		if err != nil {
			if got != nil {
				t.Errorf("an error and a text too: %q", got)
			}
			return
		}
		if bytes.IndexByte(got, 0) >= 0 || len(bytes.TrimSpace(got)) == 0 {
			t.Errorf("%q of %q", got, data)
		}
	})
}

// TestBlocks imports variants that took turns, with their CPUs, and a file that is not a result.
func TestBlocks(t *testing.T) {
	dir := folder(t, map[string]string{
		"base-1.json": stream(1000, 100), "tuned-1.json": stream(1100, 120), "tuned-2.json": stream(1200, 140), "base-2.json": stream(1050, 160),
		"tuned-2.mpstat": output(t, "mpstat-12.6.1.txt"), "notes.md": "a note", ".git/x-1.json": "hidden",
	})
	r := run(t, dir, "{variant}-{block}.*")
	if len(r.Skipped) != 1 || filepath.Base(r.Skipped[0].Path) != "notes.md" {
		t.Errorf("skipped %v", r.Skipped)
	}
	var got []string
	for _, tr := range r.Trials {
		got = append(got, fmt.Sprintf("%d: block %d, %s %s %d, %.0f, %d hosts, %d files", tr.Order, tr.Block, tr.Variant, tr.Workload, tr.Pairs, tr.Metrics[metrics.Throughput]/1e6, len(tr.Hosts), len(tr.Files)))
	}
	want := []string{ // by start time
		"1: block 1, base stream 1, 1000, 0 hosts, 1 files", "2: block 1, tuned stream 1, 1100, 0 hosts, 1 files",
		"3: block 2, tuned stream 1, 1200, 1 hosts, 2 files", "4: block 2, base stream 1, 1050, 0 hosts, 1 files",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	// Both cores, 0.7653 and 0.6165 busy, for 1.2 Gbit/s.
	if got, want := r.Trials[2].Metrics[metrics.CPUPerGB], (0.7653+0.6165)/(1.2/8); !cmp.Equal(got, want, cmpopts.EquateApprox(1e-9, 0)) {
		t.Errorf("CPU %g s/GB, want %g", got, want)
	}
	if len(r.Imported.Files) != 5 || r.Imported.Files[0].Version != "3.12" || len(r.Imported.Files[0].SHA256) != 64 {
		t.Errorf("imported %+v", r.Imported)
	}
	e, w := r.Experiment, r.Experiment.Spec.Workloads[0].Stream
	if !e.Spec.Target.Imported.Interleaved || e.Spec.Runs.N != 2 || e.Spec.Baseline != "base" || e.Spec.Variants[0].Name != "base" {
		t.Errorf("experiment %+v", e.Spec)
	}
	// Only what iperf3 reported, without defaults.
	if diff := cmp.Diff(spec.Traffic{Protocol: "tcp", Size: 128 << 10, Connections: 1, Warmup: 1e9, Duration: 10e9, Tool: "iperf3"}, *w); diff != "" || e.Spec.Path != (spec.Path{}) {
		t.Errorf("traffic (-want +got):\n%s\npath %s", diff, e.Spec.Path)
	}
}

// TestPairs imports a file for each pair. Their rates add up.
func TestPairs(t *testing.T) {
	files := map[string]string{}
	for _, v := range []string{"base", "tuned"} {
		for pair := range 3 {
			files[fmt.Sprintf("%s/run0/%d.json", v, pair)] = stream(100*(pair+1), 0)
		}
	}
	r := run(t, folder(t, files), "{variant}/run{run}/{pair}.json")
	tr := r.Trials[0]
	if tr.Pairs != 3 || len(tr.PerPair) != 3 || tr.Metrics[metrics.Throughput] != 600e6 || tr.PerPair[2].Client.BitsPerSecond != 300e6 || tr.Block != 1 {
		t.Errorf("trial %+v", tr)
	}
	if r.Experiment.Spec.Target.Imported.Interleaved {
		t.Error("runs are no blocks")
	}
}

// TestManyRuns imports several runs from one file. Workloads of other kinds beside them are named after their kinds.
func TestManyRuns(t *testing.T) {
	r := run(t, folder(t, map[string]string{
		"base.json": stream(1000, 0) + stream(1010, 0) + stream(1020, 0), "base.txt": output(t, "sockperf-3.7-half-rtt.txt"), "base.ab": output(t, "ab-2.3-kept.txt"),
	}), "{variant}.*")
	got := map[string]int{}
	for _, tr := range r.Trials {
		got[tr.Workload]++
	}
	if diff := cmp.Diff(map[string]int{"stream": 3, "pingpong": 1, "http": 1}, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestRequests: if every file has the same number of requests, a number was asked for. Otherwise the runs ended by time.
func TestRequests(t *testing.T) {
	same := output(t, "ab-2.3-kept.txt")
	other := strings.Replace(same, "Complete requests:      30802", "Complete requests:      30902", 1)
	for want, second := range map[int]string{30802: same, 0: other} {
		r := run(t, folder(t, map[string]string{"base-1": same, "base-2": later(second)}), "{variant}-{run}")
		_, completion := r.Trials[0].Metrics[metrics.Completion]
		if got := r.Experiment.Spec.Workloads[0].HTTP.Requests; got != want || completion != (want > 0) {
			t.Errorf("%d requests, want %d; completion %v", got, want, completion)
		}
	}
}

// TestProblems: the error names every bad file, and what to do about it.
func TestProblems(t *testing.T) {
	good := stream(1000, 0)
	cpu := output(t, "mpstat-12.6.1.txt")
	for _, tt := range []struct {
		name, pattern string
		files         map[string]string
		want          []string
	}{
		{"all of them", "{variant}-{run}", map[string]string{"base-1": good, "base-2": "x", "base-3": `{"start":{},"intervals":[],"error":"refused"}`},
			[]string{"base-2: it is not the output of a known tool", "base-3: iperf3: refused"}},
		{"none matches", "{variant}.json", map[string]string{"base-1": good}, []string{"it matches none of 1 file, such as "}},
		{"empty folder", "{variant}.json", nil, []string{"it matches none of 0 files"}},
		{"several runs of a number", "{variant}-{run}", map[string]string{"base-1": good + stream(1010, 20)}, []string{"base-1: it has 2 runs, and its name has the number of one"}},
		{"no window", "{variant}", map[string]string{"base": output(t, "rps-rfs-log.txt")}, []string{"give it with --duration"}},
		{"other traffic", "{variant}-{run}", map[string]string{"base-1": good, "base-2": strings.Replace(good, `"num_streams":1`, `"num_streams":4`, 1)},
			[]string{"base-2: its traffic differs from that of", "connections 4, not 1"}},
		{"other kind", "{variant}-{workload}-{run}", map[string]string{"base-x-1": good, "base-x-2": output(t, "sockperf-3.7-half-rtt.txt")}, []string{"its traffic differs from that of ", "pingpong, not stream"}},
		{"the same twice", "{variant}-{run}.*", map[string]string{"base-1.a": good, "base-1.b": good}, []string{"base-1.b: it belongs to the same trial as", "base-1.a"}},
		{"fewer pairs than named", "{variant}-{pairs}-{pair}", map[string]string{"base-2-1": good}, []string{"base-2-1: its trial has files for 1 of 2 pairs"}},
		{"connections for pairs", "{variant}-{pairs}", map[string]string{"base-2": good}, []string{"base-2: it has 1 pair, and its name says 2"}},
		{"a pair is missing", "{variant}-{run}-{pair}", map[string]string{"base-1-1": good, "base-1-2": good, "base-2-1": good}, []string{"base-2-1: its trial has files for 1 pair, and others have 2"}},
		{"CPUs of nothing", "{variant}-{run}", map[string]string{"base-1": good, "base-2": cpu}, []string{"base-2: no file has the traffic of its trial"}},
		{"CPUs of two", "{variant}.*", map[string]string{"base.x": good, "base.y": output(t, "sockperf-3.7-half-rtt.txt"), "base.cpu": cpu}, []string{"base.cpu: it fits 2 trials"}},
		{"CPUs of a node twice", "{variant}.*", map[string]string{"base.x": good, "base.cpu": cpu, "base.cpu2": strings.Replace(cpu, "11/23/26", "11/24/26", 1)}, []string{"it belongs to the same node and trial", "{node}"}},
		{"CPUs alone", "{variant}", map[string]string{"base": cpu}, []string{"no file has the traffic of its trial"}},
		{"no name", "{variant}-{run}", map[string]string{"b se-1": good}, []string{`{variant} is "b se"`}},
		{"no pairs", "{variant}-{pairs}", map[string]string{"base-0": good}, []string{"{pairs} is 0; it must be 1 to 64"}},
		{"no blocks", "{variant}-{block}", map[string]string{"base-1": stream(1, 1), "base-2": stream(1, 2), "tuned-1": stream(1, 3), "tuned-2": stream(1, 4)},
			[]string{"by the times in the files, all of tuned was measured after all of base", "write {run} in place of {block}"}},
		{"CPUs of fewer nodes", "{variant}-{run}-{node}.*", map[string]string{
			"base-1-a.net": good, "base-1-b.cpu": cpu, "base-2-a.net": stream(1000, 20), "base-2-b.cpu": strings.Replace(cpu, "11/23/26", "11/24/26", 1),
			"base-2-c.cpu": strings.Replace(cpu, "11/23/26", "11/25/26", 1),
		}, []string{"base-1-b.cpu: its trial has the CPUs of 1 node, and others have those of 2"}},
		{"pairs one after another", "{variant}-{run}-{pair}", map[string]string{"base-1-1": stream(1, 100), "base-1-2": stream(1, 400)},
			[]string{"base-1-2: by the times in the files, it did not run at the same time as", "write {run} in place of {pair}"}},
		{"no baseline", "{variant}-{run}", map[string]string{"a-1": good, "b-1": good}, []string{"--baseline base: no file has this variant"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Import([]string{folder(t, tt.files)}, Options{Pattern: tt.pattern, Baseline: "base"})
			if err == nil {
				t.Fatal("no error")
			}
			for _, want := range tt.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %v, want %q", err, want)
				}
			}
		})
	}
	if _, err := Import([]string{folder(t, map[string]string{"a-1": good, "b-1": good})}, Options{Pattern: "{variant}-{run}"}); err == nil || !strings.Contains(err.Error(), "name the variant that the others are compared with: a, b") {
		t.Errorf("error %v", err)
	}
	if _, err := Import([]string{"/nowhere"}, Options{Pattern: "{variant}"}); err == nil || !strings.Contains(err.Error(), "/nowhere") {
		t.Errorf("error %v", err)
	}
}

// TestPublishedCPUs imports the shares of every core and the rates of the pairs from one log.
func TestPublishedCPUs(t *testing.T) {
	dir := folder(t, map[string]string{"base-2.txt": output(t, "rps-rfs-log.txt")})
	r, err := Import([]string{dir}, Options{Pattern: "{variant}-{pairs}.txt", Window: 30 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	tr := r.Trials[0]
	if len(r.Trials) != 2 || tr.Pairs != 2 || tr.Metrics[metrics.Throughput] != 3310e6 || len(tr.Hosts[0].CPUs) != 4 {
		t.Fatalf("%d trials, %+v", len(r.Trials), tr)
	}
	if got, want := tr.Metrics[metrics.SoftirqPerGB], (0.0758+0.0764+0.0327+0.2424)/(3.31/8); !cmp.Equal(got, want, cmpopts.EquateApprox(1e-9, 0)) {
		t.Errorf("softirq %g s/GB, want %g", got, want)
	}
	if keys := slices.Sorted(maps.Keys(tr.Metrics)); !slices.Equal(keys, []string{"cpu_per_gb", "softirq_per_gb", "throughput"}) {
		t.Errorf("metrics %v", keys)
	}
}

// FuzzPattern: if a valid pattern matches a path, each value that it extracts is a part of the path.
func FuzzPattern(f *testing.F) {
	f.Add("{variant}-{block}.json", "rps-1.json")
	f.Add("{variant}/*{run}", `a\b/c/7`)
	f.Fuzz(func(t *testing.T, text, path string) {
		p, err := parsePattern(text)
		if err != nil {
			return
		}
		if n, ok := p.match(path); ok && (n.variant == "" || !bytes.Contains([]byte(filepath.ToSlash(path)), []byte(n.variant))) {
			t.Errorf("%q of %q: %+v", text, path, n)
		}
	})
}

// TestHuge: the error names a file that is too large, or that would take far more memory than its size, and the limit.
func TestHuge(t *testing.T) {
	dir := folder(t, map[string]string{"a-1.json": `{"start": {"version": "iperf 3"}, "intervals": [` + strings.Repeat("{},", 2<<20) + "{}]}", "a-2.json": ""})
	if err := os.Truncate(filepath.Join(dir, "a-2.json"), 1<<30); err != nil {
		t.Fatal(err)
	}
	_, err := Import([]string{dir}, Options{Pattern: "{variant}-{block}.json"})
	for _, want := range []string{"a-1.json: it has 2097155 JSON objects, and at most 1048576 are read", "a-2.json: it has more than 64 MiB"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}
