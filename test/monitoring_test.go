package test

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"

	"slipstream.dev/internal/agent"
	"slipstream.dev/internal/testenv"
	"slipstream.dev/internal/testenv/golden"
)

const (
	alerts     = chart + "/files/alerts.yaml"
	alertTests = "testdata/alerts.test.yaml"
)

func promtool(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command(testenv.NeedProgram(t, "promtool", "apt-get install prometheus"), args...).CombinedOutput(); err != nil {
		t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

func readYAML(t *testing.T, file string, into any) {
	t.Helper()
	data, err := os.ReadFile(file)
	if err == nil {
		err = yaml.Unmarshal(data, into)
	}
	if err != nil {
		t.Fatalf("%s: %v", file, err)
	}
}

// TestAlerts lets promtool test the rules. Each alert fires in one test and is silent in others, the runbook has it, and its
// expression is of metrics that the agent has.
func TestAlerts(t *testing.T) {
	promtool(t, "check", "rules", alerts)
	promtool(t, "test", "rules", alertTests)
	var rules struct {
		Groups []struct {
			Rules []struct{ Alert, Expr string }
		}
	}
	readYAML(t, alerts, &rules)
	var tests struct {
		Tests []struct {
			Cases []struct {
				Alert string `yaml:"alertname"`
				Fires []any  `yaml:"exp_alerts"`
			} `yaml:"alert_rule_test"`
		}
	}
	readYAML(t, alertTests, &tests)
	fires, silent := make(map[string]int), make(map[string]int)
	for _, one := range tests.Tests {
		for _, c := range one.Cases {
			if len(c.Fires) > 0 {
				fires[c.Alert]++
			} else {
				silent[c.Alert]++
			}
		}
	}
	runbook, err := os.ReadFile("../docs/how-to/operate.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rules.Groups[0].Rules {
		if fires[r.Alert] == 0 || silent[r.Alert] < 2 { // once beside the fault, and once in a healthy hour
			t.Errorf("%s fires in %d tests and is silent in %d", r.Alert, fires[r.Alert], silent[r.Alert])
		}
		if !strings.Contains(string(runbook), "`"+r.Alert+"`") {
			t.Errorf("the runbook lacks %s", r.Alert)
		}
		checkQuery(t, r.Alert, r.Expr, agentMetrics())
	}
}

// agentMetrics maps the agent's metrics to their labels, with those of the PodMonitor.
func agentMetrics() map[string][]string {
	all := make(map[string][]string)
	for _, m := range agent.MetricsReference() {
		with := append([]string{"node", "instance", "job", "namespace", "pod"}, m.Labels...)
		all[m.Name] = with
		if m.Type == "histogram" {
			all[m.Name+"_bucket"], all[m.Name+"_count"], all[m.Name+"_sum"] = append(slices.Clone(with), "le"), with, with
		}
	}
	return all
}

// checkQuery fails the test if a query is no PromQL, or names a metric or a label of it that does not exist.
func checkQuery(t *testing.T, where, query string, metrics map[string][]string) {
	t.Helper()
	expr, err := parser.ParseExpr(query)
	if err != nil {
		t.Errorf("%s: %s: %v", where, query, err)
		return
	}
	var known []string // labels of all of its metrics
	parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
		selector, ok := node.(*parser.VectorSelector)
		if !ok {
			return nil
		}
		of, ok := metrics[selector.Name]
		if !ok {
			t.Errorf("%s: %s: there is no metric %q", where, query, selector.Name)
		}
		known = append(known, of...)
		for _, m := range selector.LabelMatchers {
			if m.Name != labels.MetricName && !slices.Contains(of, m.Name) {
				t.Errorf("%s: %s: %s has no label %q", where, query, selector.Name, m.Name)
			}
		}
		return nil
	})
	parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
		var by []string
		switch n := node.(type) {
		case *parser.AggregateExpr:
			by = n.Grouping
		case *parser.BinaryExpr:
			if n.VectorMatching != nil {
				by = slices.Concat(n.VectorMatching.MatchingLabels, n.VectorMatching.Include)
			}
		}
		for _, name := range by {
			if !slices.Contains(known, name) {
				t.Errorf("%s: %s: none of its metrics has the label %q", where, query, name)
			}
		}
		return nil
	})
}

// TestChartMonitoring renders the objects for Prometheus Operator, without and with TLS and tokens.
func TestChartMonitoring(t *testing.T) {
	const on = "monitoring.podMonitor=true,monitoring.prometheusRule=true,monitoring.labels.release=prometheus"
	only := func(set string) (string, error) {
		return render(t, "--show-only", "templates/monitoring.yaml", "--set", set)
	}
	got, err := only(on)
	if err != nil {
		t.Fatalf("%v: %s", err, got)
	}
	golden.Compare(t, "testdata/chart-monitoring.yaml", got)
	got, err = only("monitoring.podMonitor=true,metrics.auth=true,monitoring.tokenSecret=scrape")
	for _, want := range []string{"scheme: https", "insecureSkipVerify: true", `authorization: {credentials: {name: "scrape", key: token}}`} {
		if err != nil || !strings.Contains(got, want) {
			t.Errorf("%v, no %s in %s", err, want, got)
		}
	}
	for set, want := range map[string]string{
		"monitoring.podMonitor=true,metrics.auth=true":         "name a Secret",
		"monitoring.podMonitor=true,metrics.address=127.0.0.1": "cannot reach",
		"monitoring.podMonitors=true":                          "podMonitors",
	} {
		if out, err := render(t, "--set", set); err == nil || !strings.Contains(out, want) {
			t.Errorf("--set %s: %v, no %q in %s", set, err, want, out)
		}
	}
	out, err := render(t)
	if err != nil || strings.Contains(out, "monitoring.coreos.com") {
		t.Errorf("%v, by default the chart needs Prometheus Operator: %s", err, out)
	}
}
