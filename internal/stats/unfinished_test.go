package stats

import (
	"slices"
	"testing"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

func TestUnfinished(t *testing.T) {
	exp := experiment("base", "rps") // stream at 1 and 16 pairs, pingpong at 1
	exp.Spec.Runs.N = 2
	all := func(values ...float64) []record.Trial {
		var ts []record.Trial
		for _, v := range []string{"base", "rps"} {
			ts = slices.Concat(ts, trials(v, "stream", 1, metrics.Throughput, values...), trials(v, "stream", 16, metrics.Throughput, values...), trials(v, "pingpong", 1, metrics.LatencyP50, values...))
		}
		return ts
	}
	failed := func(n int) []record.Trial {
		ts := all(1, 1)
		last := ts[len(ts)-1]
		last.Status, last.Metrics = record.StatusFailed, nil
		return append(ts[:len(ts)-1], slices.Repeat([]record.Trial{last}, n)...)
	}
	auto := *exp
	auto.Spec.Runs = spec.Runs{Auto: true, Max: 40, Width: 0.02}
	steady := slices.Repeat([]float64{1, 1.001}, 6)
	for name, c := range map[string]struct {
		exp    *spec.Experiment
		trials []record.Trial
		want   string
	}{
		"done":                {exp, all(1, 1), ""},
		"a block lacks":       {exp, all(1), "6 of 12 trials are done, 1 of 2 blocks are complete"},
		"a trial lacks":       {exp, all(1, 1)[:11], "11 of 12 trials are done, 1 of 2 blocks are complete"},
		"nothing yet":         {exp, nil, "0 of 12 trials are done, 0 of 2 blocks are complete"},
		"failed once":         {exp, failed(1), "11 of 12 trials are done, 1 of 2 blocks are complete"},
		"failed twice":        {exp, failed(2), ""},
		"auto, in the pilot":  {&auto, all(steady[:3]...), "18 of 72 trials are done, 3 of 12 blocks are complete"},
		"auto, as many as it": {&auto, all(steady...), ""},
	} {
		got, err := Unfinished(c.exp, c.trials)
		if err != nil || got != c.want {
			t.Errorf("%s: %q, %v, want %q", name, got, err, c.want)
		}
	}
}
