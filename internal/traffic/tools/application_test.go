package tools

import (
	"bytes"
	"math"
	"net/netip"
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

// TestParseApplications parses what redis-benchmark, wrk and others have printed.
func TestParseApplications(t *testing.T) {
	for _, tt := range []struct {
		tool, kind, file string
		want             record.Endpoint
	}{
		{"redis", "application", "redis-7.0.15-set.txt", record.Endpoint{
			Messages: 10000, Seconds: 10000 / 38910.51, Bytes: 640000, Percentiles: map[string]float64{
				metrics.LatencyMean: 23e-6, metrics.LatencyP50: 23e-6, metrics.LatencyP99: 55e-6, metrics.LatencyMax: 1487e-6,
			},
		}},
		{"nginx", "http", "nginx-wrk-4.1.0-kept.txt", record.Endpoint{
			Messages: 29112, Seconds: 29112 / 26468.68, Bytes: 29112 * 64,
			Percentiles: map[string]float64{metrics.LatencyP50: 233e-6, metrics.LatencyP99: 32.9e-3},
		}},
		{"nginx", "http", "nginx-wrk-4.1.0-close.txt", record.Endpoint{
			Messages: 9149, Seconds: 9149 / 8297.44, Bytes: 9149 * 64,
			Percentiles: map[string]float64{metrics.LatencyP50: 413e-6, metrics.LatencyP99: 6.95e-3},
		}},
		{"memcached", "application", "memcached-1.6.18-get.txt", record.Endpoint{
			Messages: 109130, Seconds: 113230.0 / 113222, Bytes: 109130 * 64,
			Percentiles: map[string]float64{metrics.LatencyMean: 36e-6, metrics.LatencyMax: 3900e-6},
		}},
		{"memcached", "application", "memcached-1.6.18-set.txt", record.Endpoint{
			Messages: 135072, Seconds: 135076.0 / 132855, Bytes: 135072 * 64,
			Percentiles: map[string]float64{metrics.LatencyMean: 29e-6, metrics.LatencyMax: 146369e-6},
		}},
	} {
		got, err := lookup(t, tt.tool).Parse(workload(tt.kind, nil), golden(t, tt.file))
		if err != nil {
			t.Errorf("%s: %v", tt.file, err)
		}
		if diff := cmp.Diff(tt.want, got, cmpopts.EquateApprox(1e-9, 0)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.file, diff)
		}
	}
	for file, want := range map[string]string{
		"nginx-wrk-4.1.0-404.txt":     "all 26247 responses have an error status",
		"nginx-wrk-4.1.0-refused.txt": "unable to connect to 127.0.0.1:17003 Connection refused",
		"postgres-15.18-refused.txt":  `connection to server at "127.0.0.1", port 21439 failed: Connection refused`,
		"memcached-1.6.18-miss.txt":   "memcached had lost 223091 of the requested keys",
		"memcached-1.6.18-early.txt":  "no summary",
		"redis-7.0.15-warmup.txt":     "no summary",
		"redis-7.0.15-refused.txt":    "Could not connect to Redis at 127.0.0.1:17002: Connection refused",
	} {
		tool, _, _ := strings.Cut(file, "-")
		kind := "application"
		if tool == "nginx" {
			kind = "http"
		}
		if _, err := lookup(t, tool).Parse(workload(kind, nil), golden(t, file)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", file, err, want)
		}
	}
}

// TestRedisRequests checks that the number of requests follows from the warm-up's rate and the window.
func TestRedisRequests(t *testing.T) {
	w := workload("application", func(t *spec.Traffic) { t.Duration = spec.Duration(2 * time.Second) })
	addr := netip.MustParseAddr("10.0.0.2")
	argv, err := redis{}.CountedArgv(w, addr, 5001, golden(t, "redis-7.0.15-warmup.txt"))
	if want := "redis-benchmark -h 10.0.0.2 -p 5001 -t get -d 64 -c 1 -P 1 -n 42247"; err != nil || strings.Join(argv, " ") != want {
		t.Errorf("%q, %v, want %q", argv, err, want)
	}
	for _, warmup := range []string{"", "SET: rps=0.0 (overall: -nan) avg_msec=-nan (overall: -nan)", "(overall: 0.0) avg_msec", "(overall: 1.2.3) avg_msec"} {
		if argv, err := (redis{}).CountedArgv(w, addr, 5001, []byte(warmup)); err == nil {
			t.Errorf("after %q: %q", warmup, argv)
		}
	}
	argv, err = redis{}.CountedArgv(w, addr, 5001, []byte("(overall: 99999999999999999999.0) avg_msec"))
	if err != nil || !slices.Contains(argv, "1000000000") {
		t.Errorf("%q, %v, want no more requests than redis-benchmark takes", argv, err)
	}
}

// TestParsePgbench parses the output and log of a pgbench run that logged one of a hundred transactions.
func TestParsePgbench(t *testing.T) {
	text := golden(t, "postgres-15.18-tpcb.txt")
	e, err := postgres{}.Parse(workload("application", nil), text)
	if err != nil {
		t.Fatal(err)
	}
	h, err := record.DecodeHistogram(e.Latency)
	if err != nil {
		t.Fatal(err)
	}
	if e.Messages != 6625 || e.Bytes != 0 || math.Abs(float64(e.Messages)/e.Seconds-6618.467573) > 1e-6 || e.Errors != nil {
		t.Errorf("%+v", e)
	}
	if n := int64(bytes.Count(text[bytes.Index(text, []byte("connection time)\n")):], []byte("\n")) - 1); h.TotalCount() != n {
		t.Errorf("%d latencies of %d in the log", h.TotalCount(), n)
	}
	if p50 := float64(h.ValueAtQuantile(50)) / 1e9; p50 < 200e-6 || p50 > 800e-6 {
		t.Errorf("a median of %g s, where the mean is 604 µs", p50)
	}
	summary, _, _ := bytes.Cut(text, []byte("\n0 "))
	if _, err := (postgres{}).Parse(workload("application", nil), summary); err == nil || !strings.Contains(err.Error(), "its log has no transaction") {
		t.Errorf("without a log: %v", err)
	}
	failed := bytes.Replace(text, []byte("failed transactions: 0 "), []byte("failed transactions: 3 "), 1)
	if e, err := (postgres{}).Parse(workload("application", nil), failed); err != nil || e.Errors[record.ErrOther] != 3 {
		t.Errorf("%v, %v, want 3 errors", e.Errors, err)
	}
}

// TestPgbenchSample checks that a run logs its transactions where the parser looks for them, and that a long run logs only as
// many as a short one.
func TestPgbenchSample(t *testing.T) {
	for seconds, want := range map[int]string{2: "", 5: "", 50: "--sampling-rate 0.1"} {
		w := workload("application", func(t *spec.Traffic) { t.Duration = spec.Duration(time.Duration(seconds) * time.Second) })
		argv := strings.Join(postgres{}.ClientArgv(w, netip.MustParseAddr("10.0.0.2"), 5001, "", ""), " ")
		if !strings.Contains(argv, " --log --log-prefix "+LogPrefix+" ") {
			t.Errorf("%d s: %s, want a log", seconds, argv)
		}
		if strings.Contains(argv, "--sampling-rate") != (want != "") || !strings.Contains(argv, want) {
			t.Errorf("%d s: %s, want %q", seconds, argv, want)
		}
	}
}

// TestPostgresAccess checks that the superuser of PostgreSQL cannot log in over the network, and other roles cannot through the
// socket. Find must skip the wrapper of pgbench in PATH, but no other program.
func TestPostgresAccess(t *testing.T) {
	access := string(postgres{}.Files(workload("application", nil), netip.Addr{}, 0)[postgresAccess])
	if want := "local all postgres trust\nhost postgres pgbench all trust\n"; access != want {
		t.Errorf("%q lets in others than %q", access, want)
	}
	if file := Find("/usr/bin", "pgbench"); file != "" && filepath.Dir(file) == "/usr/bin" {
		t.Errorf("pgbench is %s", file)
	}
	if file := Find("/usr/bin", "createdb"); file != "" && filepath.Dir(file) != "/usr/bin" {
		t.Errorf("createdb, which is no tool of ours, is %s", file)
	}
}
