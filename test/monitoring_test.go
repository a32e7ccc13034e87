package test

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"

	"slipstream.dev/internal/agent"
	"slipstream.dev/internal/testenv"
	"slipstream.dev/internal/testenv/golden"
	"slipstream.dev/internal/testenv/promql"
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
// expression uses only metrics that the agent has.
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
		promql.Check(t, r.Alert, r.Expr, agentMetrics())
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

// TestAgentDashboard checks the dashboard of agents.
func TestAgentDashboard(t *testing.T) {
	metrics := agentMetrics()
	for _, m := range []string{"process_cpu_seconds_total", "process_resident_memory_bytes"} { // of client_golang
		metrics[m] = metrics["slipstream_pods"]
	}
	promql.CheckDashboard(t, chart+"/files/dashboards/agent.json", metrics)
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
	// A ConfigMap has the dashboards as they are in the files.
	got, err = only("monitoring.dashboards=true")
	var object struct {
		Metadata struct{ Labels map[string]string }
		Data     map[string]string
	}
	if err == nil {
		err = yaml.Unmarshal([]byte(got), &object)
	}
	if err != nil || object.Metadata.Labels["grafana_dashboard"] != "1" || len(object.Data) != 2 {
		t.Fatalf("%v, no ConfigMap of dashboards that Grafana's sidecar finds: %.400s", err, got)
	}
	for name, content := range object.Data {
		file, err := os.ReadFile(chart + "/files/dashboards/" + strings.TrimPrefix(name, "slipstream-"))
		if err != nil || strings.TrimSpace(string(file)) != strings.TrimSpace(content) {
			t.Errorf("%s is not the file: %v", name, err)
		}
	}
}
