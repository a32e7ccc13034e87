package promql

import (
	"strings"
	"testing"
)

func TestProblems(t *testing.T) {
	metrics := map[string][]string{"a_total": {"node", "reason"}, "b": {"node"}}
	for query, want := range map[string]string{
		`sum by (node) (rate(a_total{reason=~"x|y"}[5m])) / on (node) b > 0`: "",
		`sum by (nod) (rate(a_total[5m]))`:                                   `none of its metrics has the label "nod"`,
		`a_total{reson="x"}`:                                                 `a_total has no label "reson"`,
		`b{reason="x"}`:                                                      `b has no label "reason"`,
		`time() - c`:                                                         `there is no metric "c"`,
		`a_total / on (pod) b`:                                               `none of its metrics has the label "pod"`,
		`sum(`:                                                               "unclosed",
	} {
		got := strings.Join(problems(query, metrics), "\n")
		if want == "" && got != "" || !strings.Contains(got, want) {
			t.Errorf("%s: got %q, want %q", query, got, want)
		}
	}
}
