package tools

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// A run log has the format of the raw data of "Accelerated Flow Processing in Kubernetes Overlay Networks" (IEEE, 2024; see
// docs/explanation/published.md): for each run a heading, and a bit rate in Mb/s for each pair, and after all runs
// optionally averages of mpstat for each run. Everything else in it is computed from these, and ignored.

var runLogHead = []byte("Running experiment ")

func isRunLog(output []byte) bool { return bytes.HasPrefix(output, runLogHead) }

// readRunLog takes the length of a run from known.Window, because a log does not have it.
func readRunLog(output []byte, known Known) (Reading, error) {
	window := known.Window
	if window <= 0 {
		return Reading{}, errNoWindow
	}
	rates, rest, err := runLogRates(output)
	if err != nil {
		return Reading{}, err
	}
	var averages [][]record.CPU
	if len(bytes.TrimSpace(rest)) > 0 {
		if averages, err = parseMpstat(rest); err != nil {
			return Reading{}, fmt.Errorf("mpstat: %w", err)
		}
		if len(averages) != len(rates) {
			return Reading{}, fmt.Errorf("it has averages of mpstat for %d of %d runs", len(averages), len(rates))
		}
	}
	r := Reading{Workload: spec.Workload{Stream: &spec.Traffic{Duration: spec.Duration(window)}}}
	for i, of := range rates {
		var run Run
		for _, mbits := range of {
			bits := mbits * 1e6
			run.Pairs = append(run.Pairs, record.Endpoint{
				Seconds: window.Seconds(), BitsPerSecond: bits, Bytes: uint64(bits / 8 * window.Seconds()),
			})
		}
		if averages != nil {
			run.CPUs = averages[i]
		}
		r.Runs = append(r.Runs, run)
	}
	return r, nil
}

// runLogRates returns the bit rates of each run's pairs, and what follows them.
func runLogRates(output []byte) (runs [][]float64, rest []byte, err error) {
	if i := bytes.Index(output, []byte("\nAverage:")); i >= 0 {
		output, rest = output[:i+1], output[i+1:]
	}
	for raw := range bytes.Lines(output) {
		switch line := strings.TrimSpace(string(raw)); {
		case strings.HasPrefix(line, string(runLogHead)):
			runs = append(runs, nil)
		case line == "", strings.HasPrefix(line, "Experiment ") && strings.HasSuffix(line, " completed."):
		default:
			mbits, err := strconv.ParseFloat(line, 64)
			if err != nil || !(mbits > 0 && mbits < 1e7) || len(runs) == 0 || !bytes.HasSuffix(raw, []byte("\n")) {
				return nil, nil, fmt.Errorf("its output is not understood at %.100q, want a bit rate in Mb/s", line)
			}
			runs[len(runs)-1] = append(runs[len(runs)-1], mbits)
		}
	}
	for i, of := range runs {
		if len(of) == 0 || len(of) != len(runs[0]) {
			return nil, nil, fmt.Errorf("run %d has %d bit rates, run 1 has %d", i+1, len(of), len(runs[0]))
		}
	}
	if len(runs) == 0 {
		return nil, nil, errors.New("it has no runs")
	}
	return runs, rest, nil
}
