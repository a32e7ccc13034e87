package tools

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/record"
)

// What redis-benchmark and wrk printed on a run.
func TestParseApplications(t *testing.T) {
	for _, tt := range []struct {
		tool, kind, file string
		want             record.Endpoint
	}{
		{"redis", "application", "redis-7.0.15-set.txt", record.Endpoint{
			Messages: 10000, Seconds: 10000 / 38910.51, Bytes: 640000, Percentiles: map[string]float64{
				record.LatencyMean: 23e-6, record.LatencyP50: 23e-6, record.LatencyP99: 55e-6, record.LatencyMax: 1487e-6,
			},
		}},
		{"nginx", "http", "nginx-wrk-4.1.0-kept.txt", record.Endpoint{
			Messages: 29112, Seconds: 29112 / 26468.68, Bytes: 29112 * 64,
			Percentiles: map[string]float64{record.LatencyP50: 233e-6, record.LatencyP99: 32.9e-3},
		}},
		{"nginx", "http", "nginx-wrk-4.1.0-close.txt", record.Endpoint{
			Messages: 9149, Seconds: 9149 / 8297.44, Bytes: 9149 * 64,
			Percentiles: map[string]float64{record.LatencyP50: 413e-6, record.LatencyP99: 6.95e-3},
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
		"nginx-wrk-4.1.0-404.txt":     "no request was answered: status 26247",
		"nginx-wrk-4.1.0-refused.txt": "unable to connect to 127.0.0.1:17003 Connection refused",
		"redis-7.0.15-warmup.txt":     "no summary",
		"redis-7.0.15-refused.txt":    "Could not connect to Redis at 127.0.0.1:17002: Connection refused",
	} {
		tool, _, _ := strings.Cut(file, "-")
		kind := map[string]string{"redis": "application", "nginx": "http"}[tool]
		if _, err := lookup(t, tool).Parse(workload(kind, nil), golden(t, file)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", file, err, want)
		}
	}
}

// The warm-up's rate, and the window, say how many requests are to be made.
func TestRedisRequests(t *testing.T) {
	w := workload("application", func(t *v1alpha1.Traffic) { t.Duration = v1alpha1.Duration(2 * time.Second) })
	addr := netip.MustParseAddr("10.0.0.2")
	argv, err := redis{}.MeasuredArgv(w, addr, 5001, golden(t, "redis-7.0.15-warmup.txt"))
	if want := "redis-benchmark -h 10.0.0.2 -p 5001 -t get -d 64 -c 1 -P 1 -n 42247"; err != nil || strings.Join(argv, " ") != want {
		t.Errorf("%q, %v, want %q", argv, err, want)
	}
	for _, warmup := range []string{"", "SET: rps=0.0 (overall: -nan) avg_msec=-nan (overall: -nan)", "(overall: 0.0) avg_msec", "(overall: 1.2.3) avg_msec"} {
		if argv, err := (redis{}).MeasuredArgv(w, addr, 5001, []byte(warmup)); err == nil {
			t.Errorf("after %q: %q", warmup, argv)
		}
	}
	argv, err = redis{}.MeasuredArgv(w, addr, 5001, []byte("(overall: 99999999999999999999.0) avg_msec"))
	if err != nil || !slices.Contains(argv, "1000000000") {
		t.Errorf("%q, %v, want no more requests than redis-benchmark takes", argv, err)
	}
}
