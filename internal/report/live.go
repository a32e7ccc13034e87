package report

import (
	"fmt"
	"io"
	"time"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/words"
)

// Live is the page of a run under way. A script follows the run.
type Live struct {
	Links
	// Folder is the name of the results folder.
	Folder string
	// Token means that the reader has presented the server's token, and so may pause and stop the run.
	Token, Running bool
}

// HTML writes the page.
func (l Live) HTML(w io.Writer) error { return writePage(w, "live", l) }

// Progress of a run, for the page that watches it.
type Progress struct {
	Done   int    `json:"done"`
	Trials int    `json:"trials"`
	Text   string `json:"text"` // "41 of 96 trials, 2 of 6 blocks, about 3m20s left"
	Last   string `json:"last"` // the last trial
	// Wanted is what the run was asked to do; "" is to continue.
	Wanted record.Wanted `json:"wanted"`
}

// ProgressOf describes how far a run is. left is 0 if it is unknown.
func ProgressOf(p stats.Progress, left time.Duration, trials []record.Trial, wanted record.Wanted) Progress {
	out := Progress{Done: p.Done, Trials: p.Trials, Wanted: wanted}
	out.Text = fmt.Sprintf("%d of %d trials, %d of %d blocks", p.Done, p.Trials, p.WholeBlocks, p.Blocks)
	switch {
	case wanted == record.WantedPause:
		out.Text += "; it pauses when the block is complete"
	case wanted == record.WantedStop:
		out.Text += "; it stops after the trial under way"
	case left > 0:
		out.Text += fmt.Sprintf(", about %s left", left.Round(time.Second))
	}
	if len(trials) > 0 {
		out.Last = describeTrial(trials[len(trials)-1])
	}
	return out
}

// describeTrial says in a line what a trial measured.
func describeTrial(t record.Trial) string {
	what := fmt.Sprintf("Last trial: %s, %s at %s: ", t.Variant, t.Workload, pairs(t.Pairs))
	if t.Status == record.StatusFailed {
		return what + "failed: " + t.Error
	}
	return what + Quantity(t.Metrics[ShownMetric(t.Metrics)], ShownMetric(t.Metrics))
}

// ShownMetric chooses the metric that describes a trial in one line. qperf reports only the mean of latencies. If
// requests of ab failed, there is only a rate.
func ShownMetric(measured map[string]float64) string {
	for _, metric := range []string{metrics.Throughput, metrics.LatencyP50, metrics.LatencyMean} {
		if _, ok := measured[metric]; ok {
			return metric
		}
	}
	return metrics.Rate
}

// SoFar writes the part of the Live page that shows what the run has proved so far.
func (m *Model) SoFar(w io.Writer) error { return writePage(w, "sofar", m) }

// End of a run that was watched.
type End struct {
	Complete bool   `json:"complete"`
	Text     string `json:"text"`
}

// EndOf describes the end of a run. resume is the command that resumes it.
func EndOf(p stats.Progress, resume string) End {
	if p.Done >= p.Trials {
		return End{true, fmt.Sprintf("The run is complete: %s.", words.Count(p.Done, "trial"))}
	}
	return End{false, fmt.Sprintf("The run has stopped after %d of %s. To resume it: %s", p.Done, words.Count(p.Trials, "trial"), resume)}
}
