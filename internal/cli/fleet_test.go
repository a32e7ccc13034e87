package cli

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"slipstream.dev/internal/history"
	"slipstream.dev/internal/place/kube"
	"slipstream.dev/internal/serve"
	"slipstream.dev/internal/testenv"
)

// fleetOf has the answers of an API server by path.
func fleetOf(now time.Time) map[string]string {
	ago := func(d time.Duration) string { return now.Add(-d).UTC().Format(time.RFC3339) }
	node := func(name, state, reason, message string, settings, verified int, ready string) string {
		return fmt.Sprintf(`{"metadata": {"name": %q}, "status": {"agent": "net/slipstream", "settings": %d, "verified": %d,
			"observed": [{"policy": "fast", "generation": 3, "uid": "u1", "state": %q, "reason": %q, "message": %q, "settings": %[2]d, "verified": %[3]d}],
			"conditions": [{"type": "Ready", "status": %[7]q, "reason": %[5]q, "message": %[6]q}]}}`, name, settings, verified, state, reason, message, ready)
	}
	return map[string]string{
		"/apis/slipstream.dev/v1alpha1/accelerationpolicies": `{"apiVersion": "slipstream.dev/v1alpha1", "kind": "AccelerationPolicyList", "items": [
			{"metadata": {"name": "fast", "uid": "u1", "generation": 3, "annotations": {"slipstream.dev/variant": "fastpath", "slipstream.dev/baseline": "vxlan",
				"slipstream.dev/metric": "throughput", "slipstream.dev/workload": "stream", "slipstream.dev/ratio": "1.510", "slipstream.dev/interval": "1.480-1.540",
				"slipstream.dev/blocks": "6", "slipstream.dev/measured": "` + ago(40*24*time.Hour) + `", "slipstream.dev/measured-in": "kubernetes", "slipstream.dev/kernel": "6.12.1"}},
			 "spec": {"nodeSelector": {"pool": "net"}, "accelerate": [{"fastpath": {}}, {"rps": {"devices": ["nic"], "cpus": "all"}}]},
			 "status": {"rollout": {"generation": 3, "percent": 20, "started": null, "failedNodes": ["c"], "passed": []},
				"conditions": [{"type": "Ready", "status": "False", "reason": "Halted", "message": "c failed a check"}]}},
			{"metadata": {"name": "any", "uid": "u2", "generation": 1}, "spec": {"all": true, "accelerate": [{"vf": {}}]}}]}`,
		"/apis/slipstream.dev/v1alpha1/nodeaccelerations": `{"apiVersion": "slipstream.dev/v1alpha1", "kind": "NodeAccelerationList", "items": [` + strings.Join([]string{
			node("a", "applied", "Applied", "", 4, 4, "True"),
			node("b", "applied", "Applied", "", 4, 3, "True"),
			node("c", "failed", "RolledBack", "pings were lost <script>alert(1)</script>", 0, 0, "False"),
			node("d", "pending", "Waiting", "", 0, 0, "True"),
			strings.Replace(node("e", "applied", "Applied", "", 4, 4, "True"), `"generation": 3`, `"generation": 2`, 1),
		}, ",") + `]}`,
		"/api/v1/namespaces/default/events": `{"apiVersion": "v1", "kind": "EventList", "items": [
			{"metadata": {"name": "1"}, "involvedObject": {"kind": "Node", "name": "a"}, "message": "2 settings of a are restored", "lastTimestamp": "` + ago(2*time.Hour) + `"},
			{"metadata": {"name": "2"}, "involvedObject": {"kind": "Node", "name": "b"}, "message": "1 settings of b are restored", "lastTimestamp": "` + ago(time.Hour) + `"}]}`,
	}
}

// servedFleet serves a fleet that an API server with these answers tells of, and returns the address. What it lacks is
// refused.
func servedFleet(t *testing.T, answers map[string]string) string {
	t.Helper()
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		answer, ok := answers[r.URL.Path]
		switch {
		case r.URL.Path == "/api/v1/namespaces/default/events" && r.FormValue("fieldSelector") != "reason=Repaired,source=slipstream-agent":
			answer, ok = "", false
		case answer == "none":
			w.WriteHeader(http.StatusNotFound)
			answer = `{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}`
		}
		if !ok {
			w.WriteHeader(http.StatusForbidden)
			answer = `{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Forbidden", "code": 403, "message": "no"}`
		}
		_, _ = w.Write([]byte(answer))
	}))
	t.Cleanup(api.Close)
	config, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": "test",
		"contexts": []any{map[string]any{"name": "test", "context": map[string]any{"cluster": "test"}}},
		"clusters": []any{map[string]any{"name": "test", "cluster": map[string]any{"server": api.URL}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(file, config, 0o600); err != nil {
		t.Fatal(err)
	}
	fleet, err := serveOptions{fleet: true, access: kube.Access{Kubeconfig: file}}.readFleet()
	if err != nil {
		t.Fatal(err)
	}
	folder, err := history.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(serve.New(folder, results{}, fleet, "slipstream", ""))
	t.Cleanup(server.Close)
	return server.URL
}

// TestServeFleet: the page has each policy with its share of nodes, its proof and the age of that, what is wrong where, and what
// was repaired; and it says what it could not read.
func TestServeFleet(t *testing.T) {
	at := servedFleet(t, fleetOf(time.Now()))
	_, page := fetch(t, at+"/")
	has(t, "the list", page, `href="/fleet"`)
	_, page = fetch(t, at+"/fleet")
	has(t, "the fleet", page,
		"3 of 5 nodes with an agent (60%) have settings of a policy; 2 findings.",
		`<th scope="row">fast</th><td>fastpath and rps</td><td class="text" data-label="nodes">pool=net</td><td class="num" data-label="applied">2 of 5</td>`,
		`ready-no" data-label="ready">no <span class="quiet">Halted: c failed a check`, "halted: c", "throughput of stream", "(1.480–\u20601.540)", "40 days ago, ", ", kubernetes, kernel 6.12.1",
		`<th scope="row">any</th><td>vf</td><td class="text" data-label="nodes">all</td><td class="num" data-label="applied">0 of 0</td>`, `<span class="quiet">none</span>`,
		`<th scope="row">b</th><td>policy fast</td><td>NotVerified</td><td class="text">3 of 4 settings have the value`,
		`<th scope="row">c</th><td>policy fast</td><td>RolledBack</td><td class="text">pings were lost &lt;script&gt;`)
	if n := strings.Count(page, `<th scope="row">c</th>`); n != 1 {
		t.Errorf("node c has %d rows: its condition says what its policy says", n)
	}
	for _, fine := range []string{`<th scope="row">a</th>`, `<th scope="row">d</th>`, "<script>alert"} {
		if strings.Contains(page, fine) {
			t.Errorf("the page has %s", fine)
		}
	}
	if newer, older := strings.Index(page, "1 settings of b are restored"), strings.Index(page, "2 settings of a are restored"); newer < 0 || older < newer {
		t.Errorf("repairs at %d and %d", newer, older)
	}
	_, page = fetch(t, servedFleet(t, fleetOf(time.Now().AddDate(0, 0, 50)))+"/fleet")
	has(t, "a proof measured where the clock is ahead", page, "0 days ago, ")

	for what, c := range map[string]struct {
		change map[string]string
		code   int
		want   string
	}{
		"no right to events": {map[string]string{"/api/v1/namespaces/default/events": ""}, 200, "Unknown: you may not list events in the namespace default."},
		"no right to nodes":  {map[string]string{"/apis/slipstream.dev/v1alpha1/nodeaccelerations": ""}, 422, "list the states of agents: "},
		"no chart":           {map[string]string{"/apis/slipstream.dev/v1alpha1/accelerationpolicies": "none"}, 422, "install the chart first"},
		"no agents": {map[string]string{"/apis/slipstream.dev/v1alpha1/nodeaccelerations": `{"items": []}`, "/apis/slipstream.dev/v1alpha1/accelerationpolicies": `{"items": []}`,
			"/api/v1/namespaces/default/events": `{"items": []}`}, 200, "No agent has reported yet."},
	} {
		answers := fleetOf(time.Now())
		for path, answer := range c.change {
			if answers[path] = answer; answer == "" {
				delete(answers, path)
			}
		}
		answer, page := fetch(t, servedFleet(t, answers)+"/fleet")
		if answer.StatusCode != c.code {
			t.Errorf("%s: %s, want %d", what, answer.Status, c.code)
		}
		has(t, what, page, c.want)
	}
	none, _ := served(t, t.TempDir(), "")
	if answer, page := fetch(t, none+"/fleet"); answer.StatusCode != 422 || !strings.Contains(page, "serve with --fleet") {
		t.Errorf("without a cluster: %s", answer.Status)
	}
	if code, _, errs := slipstream(t, "serve", "--context", "x", t.TempDir()); code != exitUsage || !strings.Contains(errs, "are for --fleet") {
		t.Errorf("exit %d, %s", code, errs)
	}
}

// TestBrowserFleet shows the fleet to a browser, wide, narrow and dark.
func TestBrowserFleet(t *testing.T) {
	at := servedFleet(t, fleetOf(time.Now()))
	b := testenv.NewBrowser(t)
	for name, width := range map[string]int{"wide": 1400, "narrow": 390, "dark": 1000} {
		b.Screen(width, 900, name == "dark")
		b.Open(at + "/fleet")
		if wide := b.Eval("document.documentElement.scrollWidth - document.documentElement.clientWidth").(float64); wide > 0 {
			t.Errorf("%s: %g pixels are beside the screen", name, wide)
		}
		b.Screenshot("fleet-" + name)
	}
	if problems := b.Problems(); problems != "" {
		t.Error(problems)
	}
}
