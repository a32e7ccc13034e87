package cli

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/history"
	"slipstream.dev/internal/serve"
)

// BenchmarkServe shows a folder of 10,000 results. The files of all are those of a few, so the disk has no part in it.
func BenchmarkServe(b *testing.B) {
	parent := b.TempDir()
	some := madeOn(b, 3, 4, 5)
	for i := range 10_000 {
		folder := filepath.Join(parent, fmt.Sprintf("demo%d-%s", i%7, time.Date(2026, 1, 2, i, 0, 0, 0, time.UTC).Format("20060102T150405Z")))
		link(b, filepath.Join(some, fmt.Sprintf("made-2026010%dT150405Z", 3+i%3)), folder)
	}
	fresh := func() *serve.Server {
		folder, err := history.Open(parent)
		if err != nil {
			b.Fatal(err)
		}
		return serve.New(folder, results{}, nil, "slipstream", "")
	}
	get := func(b *testing.B, s *serve.Server, path, want string) {
		w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "http://localhost"+path, nil)
		s.ServeHTTP(w, r)
		if w.Code != http.StatusOK || !strings.Contains(w.Body.String(), want) {
			b.Fatalf("%s: %d, %.3000s", path, w.Code, w.Body)
		}
	}
	for _, page := range []struct{ name, path, want string }{
		{"list", "/", "10000 results, here 1 to 25"},
		{"search", "/?q=slower+6.12", "10000 results found"},
		{"trend", "/trend?experiment=demo1", "over 200 runs"},
	} {
		b.Run(page.name+"/first", func(b *testing.B) {
			before := cpuTime(b)
			for b.Loop() {
				get(b, fresh(), page.path, page.want)
			}
			b.ReportMetric(float64(cpuTime(b)-before)/1e6/float64(b.N), "cpu-ms/op")
		})
		b.Run(page.name+"/again", func(b *testing.B) {
			s := fresh()
			get(b, s, page.path, page.want)
			before := cpuTime(b)
			for b.Loop() {
				get(b, s, page.path, page.want)
			}
			b.ReportMetric(float64(cpuTime(b)-before)/1e6/float64(b.N), "cpu-ms/op")
			var m runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&m)
			b.ReportMetric(float64(m.HeapAlloc)/(1<<20), "heap-MiB")
			runtime.KeepAlive(s)
		})
	}
}

// cpuTime returns the CPU time of this process in nanoseconds: on a busy machine it says more than a clock.
func cpuTime(b *testing.B) int64 {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return u.Utime.Nano() + u.Stime.Nano()
}

// link makes a folder with the files of another one, without those in folders.
func link(b *testing.B, from, to string) {
	files, err := os.ReadDir(from)
	if err == nil {
		err = os.Mkdir(to, 0o755)
	}
	for _, f := range files {
		if err == nil && !f.IsDir() {
			err = os.Link(filepath.Join(from, f.Name()), filepath.Join(to, f.Name()))
		}
	}
	if err != nil {
		b.Fatal(err)
	}
}
