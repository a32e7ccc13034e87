//go:build linux && soak

package cluster

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/testenv"
)

const (
	// A Prometheus in the control plane's network scrapes the agents at their nodes' addresses, as the chart's PodMonitor asks.
	prometheusConfig = `
global: {scrape_interval: 15s, evaluation_interval: 15s}
rule_files: [%s, %s]
scrape_configs:
- job_name: agents
  static_configs:
  - {targets: ["%s:9469"], labels: {node: node0}}
  - {targets: ["%s:9469"], labels: {node: node1}}
`
	// This alert fires, which shows that others would be seen.
	controlRule = `
groups:
- name: control
  rules:
  - {alert: Control, expr: slipstream_pods > 0, for: 1m}
`
	prometheusAddr = "127.0.0.1:9090"
)

// TestSoakAlerts evaluates the chart's alerts in a Prometheus while a policy is applied and pods come and go. None may fire.
func TestSoakAlerts(t *testing.T) {
	prometheus := testenv.NeedProgram(t, "prometheus", "apt-get install prometheus")
	c := own(t, Config{Log: os.Stderr})
	run, chart := helm(t, c)
	kubectl(t, c, nil, "create", "namespace", chartNamespace)
	run("install", "slipstream", chart, "--set", "image.tag=test", "--wait", "--timeout", "2m")
	var kernel unix.Utsname
	if err := unix.Uname(&kernel); err != nil {
		t.Fatal(err)
	}
	kubectl(t, c, strings.NewReader(webManifest+"---\n"+accelerationPolicy("all", "{"+everywhere+"accelerate: [{rps: {devices: [nic, overlay, host-veth, pod], cpus: all}}, {fastpath: {}}]}")), "apply", "-f", "-")
	kubectl(t, c, nil, "annotate", "accelerationpolicy", "all", "slipstream.dev/kernel="+unix.ByteSliceToString(kernel.Release[:]))
	wantPods(t, c, "policy on", 4, true)

	p := startPrometheus(t, c, prometheus, filepath.Join(chart, "files/alerts.yaml"))
	began := time.Now()
	rounds := 0
	for ; rounds == 0 || time.Since(began) < *soak; rounds++ {
		for _, replicas := range []int{8, 4} {
			kubectl(t, c, nil, "scale", "deployment/web", fmt.Sprint("--replicas=", replicas))
			kubectl(t, c, nil, "rollout", "status", "deployment/web", "--timeout=120s")
			wantPods(t, c, "pods that come and go", replicas, true)
			time.Sleep(30 * time.Second) // how often a cluster changes; nothing waits for it
		}
	}
	testenv.Eventually(t, 3*time.Minute, "the control alert", func() string {
		if !p.fired(t)["Control"] {
			return "it has not fired"
		}
		return ""
	})
	for alert := range p.fired(t) {
		if alert != "Control" {
			t.Errorf("%s fired", alert)
		}
	}
	p.checkRules(t, "SlipstreamRolloutHalted", "SlipstreamProofOfOtherKernel")
	for _, node := range []string{"node0", "node1"} {
		for query, least := range map[string]float64{
			"min_over_time(up{node=%q}[1w])":                                 1,
			"count_over_time(up{node=%q}[1w])":                               0.9 * time.Since(began).Seconds() / 15,
			"min_over_time(slipstream_fastpath_up{node=%q}[1w])":             1,
			"slipstream_policy_proof_current{node=%q}":                       1,
			`slipstream_policy_state{node=%q,state="applied"}`:               1,
			"delta(slipstream_last_verified_timestamp_seconds{node=%q}[1w])": 1,
		} {
			if got := p.query(t, fmt.Sprintf(query, node)); len(got) != 1 || !(got[0].value() >= least) {
				t.Errorf("%s: %+v, want %g at least", fmt.Sprintf(query, node), got, least)
			}
		}
	}
	t.Logf("%s, %d rounds of pods that came and went: no alert fired", time.Since(began).Round(time.Second), rounds)
}

// server is a Prometheus.
type server struct{ c *Cluster }

func startPrometheus(t *testing.T, c *Cluster, program, rules string) *server {
	t.Helper()
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	control := write("control.yaml", controlRule)
	config := write("prometheus.yaml", fmt.Sprintf(prometheusConfig, rules, control, c.Node("node0").Addr(), c.Node("node1").Addr()))
	cmd := exec.Command("nsenter", "--net="+netnsOf(c.control), program,
		"--config.file="+config, "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+prometheusAddr)
	if err := c.daemon(func(error) {}, "prometheus", cmd); err != nil {
		t.Fatal(err)
	}
	s := &server{c}
	testenv.Eventually(t, time.Minute, "Prometheus", func() string {
		if _, err := s.get("/-/ready", nil); err != nil {
			return err.Error()
		}
		return ""
	})
	return s
}

// get requests a page of the server, in its network namespace.
func (s *server) get(path string, query url.Values) (body []byte, err error) {
	err = onNetns(netnsOf(s.c.control), func() error {
		conn, err := net.DialTimeout("tcp", prometheusAddr, 5*time.Second) // on this thread, unlike http's own dialler
		if err != nil {
			return err
		}
		defer conn.Close()
		r, err := http.NewRequestWithContext(context.Background(), http.MethodGet, "http://"+prometheusAddr+path+"?"+query.Encode(), nil)
		if err == nil {
			err = r.Write(conn)
		}
		if err != nil {
			return err
		}
		answer, err := http.ReadResponse(bufio.NewReader(conn), r)
		if err != nil {
			return err
		}
		defer answer.Body.Close()
		if body, err = io.ReadAll(answer.Body); err == nil && answer.StatusCode != http.StatusOK {
			err = fmt.Errorf("%s: %s: %s", path, answer.Status, body)
		}
		return err
	})
	return body, err
}

// sample is a value of a query's result.
type sample struct {
	Metric map[string]string
	Value  [2]any // time, and the value as text
}

func (s sample) value() float64 {
	text, _ := s.Value[1].(string)
	v, err := strconv.ParseFloat(text, 64)
	if err != nil {
		return math.NaN()
	}
	return v
}

func (s *server) query(t *testing.T, query string) []sample {
	t.Helper()
	var answer struct{ Data struct{ Result []sample } }
	s.read(t, "/api/v1/query", url.Values{"query": {query}}, &answer)
	return answer.Data.Result
}

func (s *server) read(t *testing.T, path string, query url.Values, into any) {
	t.Helper()
	body, err := s.get(path, query)
	if err == nil {
		err = json.Unmarshal(body, into)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// fired returns the alerts that have fired at any time.
func (s *server) fired(t *testing.T) map[string]bool {
	t.Helper()
	alerts := make(map[string]bool)
	for _, a := range s.query(t, `count_over_time(ALERTS{alertstate="firing"}[1w])`) {
		alerts[a.Metric["alertname"]] = true
	}
	return alerts
}

// checkRules checks that the server evaluates its rules, among them those with the given names.
func (s *server) checkRules(t *testing.T, names ...string) {
	t.Helper()
	var answer struct {
		Data struct {
			Groups []struct {
				Rules []struct{ Name, Health, LastError string }
			}
		}
	}
	s.read(t, "/api/v1/rules", nil, &answer)
	seen := make(map[string]bool)
	for _, group := range answer.Data.Groups {
		for _, r := range group.Rules {
			if seen[r.Name] = true; r.Health != "ok" {
				t.Errorf("rule %s: %s %s", r.Name, r.Health, r.LastError)
			}
		}
	}
	for _, name := range names {
		if !seen[name] {
			t.Errorf("no rule %s", name)
		}
	}
}
