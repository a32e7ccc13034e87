//go:build linux

package cluster

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	authentication "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"slipstream.dev/internal/testenv"
)

// chartNamespace is where testChart installs the chart.
const chartNamespace = "chart"

// testChart installs the chart with metrics that authorized clients can scrape. It checks
// that every accelerator can be applied and removed from an unprivileged container, that an
// agent's token can only write about its own node, and that a scrape needs a token.
func testChart(t *testing.T, c *Cluster) {
	flowTableLock.Lock()
	t.Cleanup(flowTableLock.Unlock)
	run, chart := helm(t, c)
	kubectl(t, c, strings.NewReader(webManifest), "apply", "-f", "-")
	t.Cleanup(func() { kubectl(t, c, strings.NewReader(webManifest), "delete", "-f", "-", "--timeout=120s") })
	kubectl(t, c, nil, "rollout", "status", "deployment/web", "--timeout=120s")
	before, table, programs := steering(t, c.Node("node0")), read(t, flowTable), programsOn(t, c.Node("node0"))
	kubectl(t, c, nil, "create", "namespace", chartNamespace)
	t.Cleanup(func() {
		kubectl(t, c, nil, "delete", "namespace", chartNamespace)
		kubectl(t, c, nil, "delete", "crd", "accelerationpolicies.slipstream.dev", "nodeaccelerations.slipstream.dev", "--ignore-not-found")
	})
	run("install", "slipstream", chart, "--set", "image.tag=test,metrics.auth=true", "--wait", "--timeout", "2m")
	installed := true
	uninstall := func() {
		if installed {
			installed = false
			run("uninstall", "slipstream", "--wait")
		}
	}
	t.Cleanup(uninstall)
	kubectl(t, c, strings.NewReader(accelerationPolicy("everything", `{nodeSelector: {kubernetes.io/hostname: node0}, accelerate: [
		{rfs: {devices: [nic, overlay, host-veth, pod], cpus: all, entries: 4096}}, {fastpath: {}}]}`)), "apply", "-f", "-")
	testenv.Eventually(t, agentPatience, "everything on", func() string {
		s := stateOf(t, c, "node0").Status
		if len(s.Observed) != 1 || s.Observed[0].State != "applied" || s.Settings < 10 || s.Verified != s.Settings {
			return fmt.Sprintf("%+v", s)
		}
		return ""
	})
	for _, s := range stateOf(t, c, "node0").Status.Conditions {
		if s.Status != "True" {
			t.Errorf("%+v", s)
		}
	}
	testTokens(t, c)
	testScrape(t, c)

	uninstall()
	testenv.Eventually(t, time.Minute, "as before", func() string {
		return cmp.Diff(before, steering(t, c.Node("node0"))) + cmp.Diff(table, read(t, flowTable)) + cmp.Diff(programs, programsOn(t, c.Node("node0")))
	})
}

// helm returns a function that runs helm in the chart's namespace, and the folder of the
// chart.
func helm(t testing.TB, c *Cluster) (run func(args ...string), chart string) {
	t.Helper()
	program := testenv.NeedProgram(t, "helm", "make bin/tools/helm")
	root, err := checkout(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return func(args ...string) {
		t.Helper()
		cmd := exec.Command(program, append(args, "--namespace", chartNamespace)...)
		dir := t.TempDir()
		cmd.Env = append(os.Environ(), "KUBECONFIG="+c.Kubeconfig(), "HELM_CACHE_HOME="+dir, "HELM_CONFIG_HOME="+dir, "HELM_DATA_HOME="+dir)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("helm %v: %v: %s", args, err, out)
		}
	}, filepath.Join(root, "charts/slipstream")
}

// withToken returns a client that has only the token of a service account. The token is bound
// to a pod if one is given.
func withToken(t testing.TB, c *Cluster, account, pod string) (kubernetes.Interface, string) {
	t.Helper()
	request := &authentication.TokenRequest{}
	if pod != "" {
		request.Spec.BoundObjectRef = &authentication.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod}
	}
	got, err := c.client.CoreV1().ServiceAccounts(chartNamespace).CreateToken(t.Context(), account, request, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	config, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	config = rest.AnonymousClientConfig(config)
	config.BearerToken = got.Status.Token
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return client, got.Status.Token
}

// testTokens writes with the tokens of the agents' pods.
func testTokens(t *testing.T, c *Cluster) {
	pods, err := c.client.CoreV1().Pods(chartNamespace).List(t.Context(), metav1.ListOptions{FieldSelector: "spec.nodeName=node0"})
	if err != nil || len(pods.Items) != 1 {
		t.Fatalf("%d agents on node0, %v", len(pods.Items), err)
	}
	const objects = "/apis/slipstream.dev/v1alpha1/nodeaccelerations/"
	of, _ := withToken(t, c, "slipstream", pods.Items[0].Name)
	nobody, _ := withToken(t, c, "slipstream", "")
	for name, tt := range map[string]struct {
		client          kubernetes.Interface
		verb, node, why string
	}{
		"its own state":          {of, "patch", "node0", ""},
		"another node's state":   {of, "patch", "node1", "the agent of node node0 may write its NodeAcceleration alone, and not that of node1"},
		"a new object":           {of, "create", "node9", "and not that of node9"},
		"another node's object":  {of, "delete", "node1", "and not that of node1"},
		"a token without a node": {nobody, "patch", "node0", "the agent's token does not say which node it is of"},
	} {
		t.Run(name, func(t *testing.T) { wantWrite(t, tt.client, tt.verb, objects, tt.node, tt.why) })
	}
	// This runs last, because the other cases need the object.
	t.Run("its own object", func(t *testing.T) { wantWrite(t, of, "delete", objects, "node0", "") })
}

// wantWrite writes a NodeAcceleration. If why is given, the API server must refuse the write
// for that reason.
func wantWrite(t *testing.T, client kubernetes.Interface, verb, objects, node, why string) {
	t.Helper()
	r := client.Discovery().RESTClient()
	var err error
	switch verb {
	case "patch":
		err = r.Patch(types.MergePatchType).AbsPath(objects + node + "/status").Body([]byte(`{"status":{"settings":1}}`)).Do(t.Context()).Error()
	case "create":
		err = r.Post().AbsPath(strings.TrimSuffix(objects, "/")).SetHeader("Content-Type", "application/json").
			Body([]byte(`{"apiVersion":"slipstream.dev/v1alpha1","kind":"NodeAcceleration","metadata":{"name":"` + node + `"}}`)).Do(t.Context()).Error()
	case "delete":
		err = r.Delete().AbsPath(objects + node).Do(t.Context()).Error()
	}
	if why == "" && err != nil || why != "" && (!apierrors.IsForbidden(err) || !strings.Contains(err.Error(), why)) {
		t.Errorf("%s %s: %v, want %q", verb, node, err, why)
	}
}

// testScrape scrapes metrics at the node's address with a token, before and after the token
// is authorized.
func testScrape(t *testing.T, c *Cluster) {
	kubectl(t, c, nil, "create", "serviceaccount", "scraper", "--namespace", chartNamespace)
	_, token := withToken(t, c, "scraper", "")
	scrape := func(token string) string {
		r, err := http.NewRequest("GET", "https://agent/metrics", nil)
		if err != nil {
			t.Fatal(err)
		}
		if token != "" {
			r.Header.Set("Authorization", "Bearer "+token)
		}
		return answerOf(t, c.Node("node0"), net.JoinHostPort(fmt.Sprintf(nodeAddr, 10), "9469"), r)
	}
	if got := scrape(""); got != "401" {
		t.Errorf("a scrape without a token: %s", got)
	}
	if got := scrape(token); got != "403" {
		t.Errorf("a scrape with a token that may not: %s", got)
	}
	kubectl(t, c, nil, "create", "clusterrolebinding", "scraper", "--clusterrole=slipstream-metrics", "--serviceaccount="+chartNamespace+":scraper")
	t.Cleanup(func() { kubectl(t, c, nil, "delete", "clusterrolebinding", "scraper") })
	testenv.Eventually(t, time.Minute, "a scrape with a token that may", func() string {
		if got := scrape(token); got != "200 with settings" {
			return got
		}
		return ""
	})
}

// answerOf sends a request to an agent over TLS from its node's network namespace. It returns
// the status code, and whether the answer contains the agent's own metrics.
func answerOf(t testing.TB, n *Node, address string, r *http.Request) (got string) {
	t.Helper()
	if err := onNetns(n.Netns(), func() error {
		conn, err := net.Dial("tcp", address) // on this thread, unlike http's own dialler
		if err != nil {
			return err
		}
		defer conn.Close()
		secure := tls.Client(conn, &tls.Config{InsecureSkipVerify: true})
		if err := r.Write(secure); err != nil {
			return err
		}
		answer, err := http.ReadResponse(bufio.NewReader(secure), r)
		if err != nil {
			return err
		}
		defer answer.Body.Close()
		b, err := io.ReadAll(answer.Body)
		if got = fmt.Sprint(answer.StatusCode); strings.Contains(string(b), "slipstream_policy_settings{") {
			got += " with settings"
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return got
}
