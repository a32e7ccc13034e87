package stats

import (
	"encoding/csv"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"gonum.org/v1/gonum/stat"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats/estimate"
	"slipstream.dev/internal/traffic/tools"
)

// publishedVariants are five variants of "Accelerated Flow Processing in Kubernetes Overlay Networks" (IEEE, 2024): the file name,
// and the heading in its tables. The logs have twenty runs of each at four numbers of pairs. testdata/published has their bit rates
// without the CPU times, which are nine tenths of each log.
var publishedVariants = [][2]string{{"baseline", "Baseline"}, {"rps", "RPS"}, {"rfs", "RFS"}, {"rps-plus", "RPS+"}, {"rfs-plus", "RFS+"}}

// TestPublished analyses those logs with our statistics, reconstructs how the published intervals were computed, and compares
// docs/results/published.md with the figures.
func TestPublished(t *testing.T) {
	const dir = "testdata/published"
	ratios := publishedTable(t, filepath.Join(dir, "finalized_bitrate.csv"))
	widths := publishedTable(t, filepath.Join(dir, "confidence_bitrate.csv"))

	exp := experiment("Baseline", "RPS", "RFS", "RPS+", "RFS+")
	exp.Spec.Pairs, exp.Spec.Target.Imported = []int{1, 2, 4, 16}, &spec.Imported{}
	for _, pairs := range exp.Spec.Pairs {
		var base Row
		var baseTrials []record.Trial
		for i, v := range publishedVariants {
			runs := runsOf(t, filepath.Join(dir, fmt.Sprintf("%s-%d.txt", v[0], pairs)), pairs)
			var totals []float64
			for _, run := range runs {
				totals = append(totals, sum(run))
			}
			own := trials(v[1], "stream", pairs, metrics.Throughput, totals...)
			var r Row
			if i == 0 {
				baseTrials = own
				base = analyze(t, exp, own)[0]
				r = base
			} else {
				r = analyze(t, exp, baseTrials, own)[1]
			}
			name := fmt.Sprintf("%s at %d", v[1], pairs)
			heading := fmt.Sprintf("%d Replica", pairs)
			ratio, width := ratios[heading][v[1]], widths[heading][v[1]]

			near(t, name+": published ratio", r.Mean/base.Mean, ratio, 1e-9)
			half := estimate.Mean(mixed(runs), 0).HalfWidth()
			near(t, name+": published half-width", half/base.Mean, width, 1e-11)
			if pairs > 1 && math.Abs(half-(r.CI95[1]-r.Mean)) < 1e-6 {
				t.Errorf("%s: runs mixed or not, the interval is the same", name)
			}

			line := fmt.Sprintf("| %d | %s | %.0f ± %.0f | ±%.2f%% | ±%.2f%% | %+.0f%% | %.3f | ", pairs, v[1],
				r.Mean, r.CI95[1]-r.Mean, 100*(r.CI95[1]/r.Mean-1), 100*half/r.Mean,
				100*(stat.Mean(totals[15:], nil)/stat.Mean(totals[:5], nil)-1), ratio)
			if i == 0 {
				line += "|"
			} else {
				line += fmt.Sprintf("%.3f (%.3f–%.3f) |", r.Versus.Ratio, r.Versus.CI95[0], r.Versus.CI95[1])
			}
			shown(t, "results/published.md", line)

			if name == "Baseline at 16" {
				near(t, name, [2]float64{math.Round(r.Mean), math.Round(r.CI95[1] - r.Mean)}, [2]float64{4118, 150}, 0)
				near(t, name, codes(r), []string{record.WarnApart}, 0)
			}
		}
	}
}

// mixed returns the totals as the publication computed them: it arranges all lines of a file in an array with one row for each pair
// and twenty columns, and adds up each column. That mixes the runs: each line of a column is from another run.
func mixed(runs [][]float64) []float64 {
	lines := slices.Concat(runs...)
	totals := make([]float64, len(runs))
	for i, x := range lines {
		totals[i%len(runs)] += x
	}
	return totals
}

func sum(xs []float64) float64 { return stat.Mean(xs, nil) * float64(len(xs)) }

// runsOf returns the bit rates of a log's runs, in Mb/s, one for each pair.
func runsOf(t *testing.T, path string, pairs int) [][]float64 {
	t.Helper()
	log, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	readings, err := tools.Read(log, tools.Known{Window: time.Second})
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	r := readings[0]
	var runs [][]float64
	for i, run := range r.Runs {
		var rates []float64
		for _, e := range run.Pairs {
			rates = append(rates, e.BitsPerSecond/1e6)
		}
		if len(r.Runs) != 20 || len(rates) != pairs {
			t.Fatalf("%s: run %d of %d has %d pairs, want 20 of %d", path, i+1, len(r.Runs), len(rates), pairs)
		}
		runs = append(runs, rates)
	}
	return runs
}

// publishedTable reads a table by row ("16 Replica", with or without an s) and column.
func publishedTable(t *testing.T, path string) map[string]map[string]float64 {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	lines, err := csv.NewReader(f).ReadAll()
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	out := make(map[string]map[string]float64)
	for _, line := range lines[1:] {
		row := make(map[string]float64)
		for i, cell := range line[1:] {
			if row[lines[0][i+1]], err = strconv.ParseFloat(cell, 64); err != nil {
				t.Fatalf("%s: %v", path, err)
			}
		}
		out[strings.TrimSuffix(line[0], "s")] = row
	}
	return out
}
