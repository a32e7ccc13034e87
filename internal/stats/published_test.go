package stats

import (
	"bufio"
	"cmp"
	"encoding/csv"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"gonum.org/v1/gonum/stat"

	"slipstream.dev/internal/record"
)

// The raw logs of the origin experiment hold twenty runs of five of its
// variants at four numbers of pairs: file name, heading in its tables.
var publishedVariants = [][2]string{{"baseline", "Baseline"}, {"rps", "RPS"}, {"rfs", "RFS"}, {"rps-plus", "RPS+"}, {"rfs-plus", "RFS+"}}

// TestPublished puts those logs through our statistics, finds out how the
// published intervals came about, and holds docs/results/published.md to the figures.
func TestPublished(t *testing.T) {
	dir := filepath.Join(cmp.Or(os.Getenv("SLIPSTREAM_DATA"), "../../../shared/data"), "published-rps-rfs")
	if _, err := os.Stat(dir); err != nil {
		t.Skipf("the published data are not here: %v", err)
	}
	ratios := publishedTable(t, filepath.Join(dir, "finalized_bitrate.csv"))
	widths := publishedTable(t, filepath.Join(dir, "confidence_bitrate.csv"))

	exp := experiment("Baseline", "RPS", "RFS", "RPS+", "RFS+")
	exp.Spec.Pairs = []int{1, 2, 4, 16}
	for _, pairs := range exp.Spec.Pairs {
		var base Row
		var baseLogs estimate
		for i, v := range publishedVariants {
			runs := runsOf(t, filepath.Join(dir, fmt.Sprintf("%s-%d.txt", v[0], pairs)), pairs)
			var totals, logs []float64
			for _, run := range runs {
				total := sum(run)
				totals, logs = append(totals, total), append(logs, math.Log(total))
			}
			r := analyze(t, exp, trials(v[1], "stream", pairs, record.Throughput, totals...))[0]
			own := mean(logs, 0)
			if i == 0 {
				base, baseLogs = r, own
			}
			name := fmt.Sprintf("%s at %d", v[1], pairs)
			heading := fmt.Sprintf("%d Replica", pairs)
			ratio, width := ratios[heading][v[1]], widths[heading][v[1]]

			near(t, name+": published ratio", r.Mean/base.Mean, ratio, 1e-9)
			half := mean(mixed(runs), 0).halfWidth()
			near(t, name+": published half-width", half/base.Mean, width, 1e-11)
			if pairs > 1 && math.Abs(half-(r.CI95[1]-r.Mean)) < 1e-6 {
				t.Errorf("%s: runs mixed or not, the interval is the same", name)
			}

			line := fmt.Sprintf("| %d | %s | %.0f ± %.0f | ±%.2f %% | ±%.2f %% | %+.0f %% | %.3f | ", pairs, v[1],
				r.Mean, r.CI95[1]-r.Mean, 100*(r.CI95[1]/r.Mean-1), 100*half/r.Mean,
				100*(stat.Mean(totals[15:], nil)/stat.Mean(totals[:5], nil)-1), ratio)
			if i == 0 {
				line += "|"
			} else {
				ci := own.minus(baseLogs).interval()
				line += fmt.Sprintf("%.3f (%.3f–%.3f) |", math.Exp(own.mean-baseLogs.mean), math.Exp(ci[0]), math.Exp(ci[1]))
			}
			shown(t, "results/published.md", line)

			if name == "Baseline at 16" {
				near(t, name, [2]float64{math.Round(r.Mean), math.Round(r.CI95[1] - r.Mean)}, [2]float64{4118, 150}, 0)
				near(t, name, codes(r), []string{record.WarnDrift}, 0)
			}
		}
	}
}

// mixed are the totals that were published: all lines of a file as an array of
// as many rows as there are pairs, by twenty columns, and the sum of each
// column. A column takes each of its lines from another run.
func mixed(runs [][]float64) []float64 {
	lines := slices.Concat(runs...)
	totals := make([]float64, len(runs))
	for i, x := range lines {
		totals[i%len(runs)] += x
	}
	return totals
}

func sum(xs []float64) float64 { return stat.Mean(xs, nil) * float64(len(xs)) }

// runsOf reads the bit rates of a log, in Mb/s: a line a pair, after a heading a
// run, up to the averages of mpstat.
func runsOf(t *testing.T, path string, pairs int) [][]float64 {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var runs [][]float64
	lines := bufio.NewScanner(f)
	for lines.Scan() && !strings.HasPrefix(lines.Text(), "Average:") {
		switch line := lines.Text(); {
		case strings.HasPrefix(line, "Running experiment"):
			runs = append(runs, nil)
		case strings.HasPrefix(line, "Experiment"), line == "":
		default:
			x, err := strconv.ParseFloat(line, 64)
			if err != nil {
				t.Fatalf("%s: %v", path, err)
			}
			runs[len(runs)-1] = append(runs[len(runs)-1], x)
		}
	}
	if err := lines.Err(); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	for i, run := range runs {
		if len(runs) != 20 || len(run) != pairs {
			t.Fatalf("%s: run %d of %d has %d lines, want 20 of %d", path, i+1, len(runs), len(run), pairs)
		}
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
