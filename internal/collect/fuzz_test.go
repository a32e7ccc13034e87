//go:build linux

package collect

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func seed(f *testing.F, name string) {
	files, err := filepath.Glob(filepath.Join("testdata", "*", "*", name))
	if err != nil || len(files) == 0 {
		f.Fatalf("no %s in testdata: %v", name, err)
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
}

func FuzzStat(f *testing.F) {
	seed(f, "stat")
	f.Fuzz(func(t *testing.T, b []byte) {
		var s Snapshot
		if s.parseStat(b) != nil {
			return
		}
		if len(s.cpus) == 0 || s.cpus[0].id < 0 {
			t.Fatalf("CPUs %v", s.cpus)
		}
		if !slices.IsSortedFunc(s.cpus, func(a, b cpu) int { return a.id - b.id }) {
			t.Fatal("CPUs out of order")
		}
		for i := range s.cpus {
			if at, ok := find(s.cpus, s.cpus[i].id); !ok || at != i {
				t.Fatalf("CPU %d is not found", s.cpus[i].id)
			}
		}
	})
}

// online returns a snapshot with the CPUs that parseStat would find. The other parsers fill them in.
func online() Snapshot { return Snapshot{cpus: []cpu{{id: 0}, {id: 1}, {id: 3}}} }

// sameCPUs fails if a parser changed which CPUs there are.
func sameCPUs(t *testing.T, s Snapshot) {
	for i, c := range online().cpus {
		if len(s.cpus) != 3 || s.cpus[i].id != c.id {
			t.Fatalf("CPUs are now %v", s.cpus)
		}
	}
}

// fuzzPerCPU fuzzes the parser of a file with counters of CPUs.
func fuzzPerCPU(f *testing.F, file string, parse func(*Snapshot, []byte) error) {
	seed(f, file)
	f.Fuzz(func(t *testing.T, b []byte) {
		s := online()
		_ = parse(&s, b)
		sameCPUs(t, s)
	})
}

func FuzzSoftirqs(f *testing.F) { fuzzPerCPU(f, "softirqs", (*Snapshot).parseSoftirqs) }

func FuzzInterrupts(f *testing.F) { fuzzPerCPU(f, "interrupts", (*Snapshot).parseInterrupts) }

func FuzzSoftnet(f *testing.F) { fuzzPerCPU(f, "net/softnet_stat", (*Snapshot).parseSoftnet) }

func FuzzConntrack(f *testing.F) { fuzzPerCPU(f, "net/stat/nf_conntrack", (*Snapshot).parseConntrack) }

func FuzzDevices(f *testing.F) {
	seed(f, "net/dev")
	f.Fuzz(func(t *testing.T, b []byte) {
		var s Snapshot
		if s.parseDevices(b) != nil {
			return
		}
		lines := bytes.Count(b, []byte("\n"))
		if !bytes.HasSuffix(b, []byte("\n")) {
			lines++
		}
		if len(s.devices) != lines-2 {
			t.Fatalf("%d devices in %d lines", len(s.devices), lines)
		}
	})
}

func FuzzThrottled(f *testing.F) {
	f.Add([]byte("nr_periods 20\nnr_throttled 17\nthrottled_usec 530007\n"))
	f.Add([]byte("nr_throttled 2\nthrottled_time 31000000\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var s Snapshot
		if err := s.parseThrottled(b); (err == nil) != (len(s.throttled) == 1) {
			t.Fatalf("%d entries, error %v", len(s.throttled), err)
		}
	})
}
