package test

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/testenv"
)

// BenchmarkTrial runs trials of 1 and of 16 pairs and reports what they cost besides
// their traffic: the dead time of a trial (all but warm-up and window), and the
// peaks of resident memory of the controller and of the largest worker. Most of that
// memory is pages of the program, which all its processes share (PSS is a worker's
// share, measured once per trial). A worker has two peaks: from its start to the end
// of the first trial, and over all later trials.
func BenchmarkTrial(b *testing.B) {
	testenv.NeedRoot(b)
	for _, pairs := range []int{1, 16} {
		b.Run(fmt.Sprintf("pairs=%d", pairs), func(b *testing.B) {
			var out string
			file := experiment(b, "runs: 2", "runs: 5", "pairs: [1, 2]", fmt.Sprintf("pairs: [%d]", pairs), ", pairs: [1]}", "}")
			var controller, begun, worker, share float64
			for b.Loop() {
				out = b.TempDir() // the figures come from the last run, the peaks from all
				p := start(b, nil, "run", file, "--out", out)
				for n := 1; p.await(b, "left", n); n++ {
					controller = max(controller, memoryMiB(p.Process.Pid, "status", "VmHWM:"))
					for _, pid := range workers() {
						peak := memoryMiB(pid, "status", "VmHWM:")
						if n == 1 {
							begun = max(begun, peak)
							forgetPeak(b, pid)
						} else {
							worker = max(worker, peak)
						}
						share = max(share, memoryMiB(pid, "smaps_rollup", "Pss:"))
					}
				}
				if code := p.exit(b); code != 0 {
					b.Fatalf("exit %d\n%s", code, p.stderr())
				}
			}
			var dead []float64
			for _, t := range trials(b, results(b, out)) {
				if t.Status == record.StatusOK {
					dead = append(dead, t.Took-(250*time.Millisecond).Seconds())
				}
			}
			slices.Sort(dead)
			b.ReportMetric(dead[len(dead)/2], "dead-s-median")
			b.ReportMetric(dead[len(dead)-1], "dead-s-max")
			b.ReportMetric(float64(len(dead)), "trials")
			b.ReportMetric(controller, "controller-MiB")
			b.ReportMetric(begun, "worker-start-MiB")
			b.ReportMetric(worker, "worker-MiB")
			b.ReportMetric(share, "worker-PSS-MiB")
		})
	}
}

// forgetPeak resets a process's peak of resident memory (proc_pid_clear_refs(5)).
func forgetPeak(b *testing.B, pid int) {
	err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", pid), []byte("5"), 0)
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ESRCH) {
		b.Fatal(err)
	}
}

// memoryMiB returns a line of the kernel's report on a process's memory, or 0 if the
// process has ended.
func memoryMiB(pid int, file, line string) float64 {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
	if err != nil {
		return 0
	}
	_, rest, ok := bytes.Cut(status, []byte("\n"+line))
	if fields := bytes.Fields(rest); ok && len(fields) > 0 {
		if kib, err := strconv.ParseFloat(string(fields[0]), 64); err == nil {
			return kib / 1024
		}
	}
	return 0
}
