//go:build linux

package cluster

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/testenv"
)

// resultsVolume is a folder of node0 that belongs to root, as volumes do when they are new.
const resultsVolume = `
apiVersion: v1
kind: PersistentVolume
metadata: {name: results}
spec:
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteOnce]
  storageClassName: results
  local: {path: /var/lib/results}
  nodeAffinity: {required: {nodeSelectorTerms: [{matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [node0]}]}]}}
`

// testNightly runs two Jobs of the chart's CronJob. Both record a mesh in the volume, which the commands of docs/how-to/mesh.md
// show, and leave nothing else behind.
func testNightly(t *testing.T, c *Cluster) {
	run, chart := helm(t, c)
	node := c.Node("node0")
	folder := filepath.Join(node.dir, "lib/results") // where the node has /var/lib/results
	if err := os.Mkdir(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	kubectl(t, c, strings.NewReader(resultsVolume), "apply", "-f", "-")
	kubectl(t, c, nil, "create", "namespace", chartNamespace)
	t.Cleanup(func() {
		kubectl(t, c, nil, "delete", "namespace", chartNamespace)
		kubectl(t, c, nil, "delete", "persistentvolume", "results")
		kubectl(t, c, nil, "delete", "crd", "accelerationpolicies.slipstream.dev", "nodeaccelerations.slipstream.dev", "--ignore-not-found")
	})
	// The image has the name of a repository of the user, which the pods of the run must get too.
	run("install", "slipstream", chart, "--wait", "--timeout", "2m", "--set", "image.repository=example.test/slipstream,image.tag=test",
		"--set", "nightly.enabled=true,nightly.maxMbit=20,nightly.runs=2,nightly.storageClass=results")
	t.Cleanup(func() { run("uninstall", "slipstream", "--wait") })

	for _, night := range []string{"first", "second"} {
		kubectl(t, c, nil, "create", "job", night, "--from=cronjob/slipstream-nightly", "--namespace", chartNamespace)
		awaitJob(t, c, night)
		const image = "example.test/slipstream:test"
		if log := kubectl(t, c, nil, "logs", "job/"+night, "--container=doctor", "--namespace", chartNamespace); !strings.Contains(log, image) {
			t.Errorf("doctor looked for another image than %s:\n%s", image, log)
		}
	}
	if pods := kubectl(t, c, nil, "get", "pods,leases", "--namespace", chartNamespace, "-l", "app.kubernetes.io/component=run", "-o", "name"); pods != "" {
		t.Errorf("the runs left %s", pods)
	}
	found, err := filepath.Glob(filepath.Join(folder, "nightly-*"))
	if err != nil || len(found) != 2 {
		t.Fatalf("the volume has %q, %v", found, err)
	}
	for _, path := range found {
		checkNight(t, path)
	}
	trend := invoke(t, c.Kubeconfig(), "trend", "primary", folder, "-o", "json")
	var course struct{ Runs, Series []any }
	if code := trend.exit(t, time.Minute); code != 0 || json.Unmarshal(trend.stdout.Bytes(), &course) != nil || len(course.Runs) != 2 || len(course.Series) == 0 {
		t.Errorf("trend: exit %d\n%s%s", code, trend.stdout.String(), trend.said())
	}
	page := readResults(t, c)
	for _, path := range found {
		if !strings.Contains(page, filepath.Base(path)) {
			t.Errorf("the page lacks %s:\n%.2000s", filepath.Base(path), page)
		}
	}
}

// awaitJob waits until a Job of the CronJob is complete.
func awaitJob(t *testing.T, c *Cluster, name string) {
	t.Helper()
	logs := func() string {
		out, err := tryKubectl(c, nil, "logs", "job/"+name, "--all-containers", "--prefix", "--namespace", chartNamespace)
		pods, _ := tryKubectl(c, nil, "describe", "pods", "-l", "job-name="+name, "--namespace", chartNamespace)
		return fmt.Sprintf("%s\n%v\n%s", out, err, pods)
	}
	testenv.Eventually(t, 5*time.Minute, name, func() string {
		job, err := c.client.BatchV1().Jobs(chartNamespace).Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		for _, condition := range job.Status.Conditions {
			switch {
			case condition.Type == batchv1.JobFailed && condition.Status == "True":
				t.Fatalf("%s: %s\n%s", name, condition.Message, logs())
			case condition.Type == batchv1.JobComplete && condition.Status == "True":
				return ""
			}
		}
		return "it is not complete"
	})
}

// checkNight checks a result: both nodes sent to each other in both variants, no more than the chart was told. On a busy machine
// messages that were due before the window may be sent within it.
func checkNight(t *testing.T, path string) {
	t.Helper()
	d, err := record.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	trials, err := d.Trials()
	if err != nil {
		t.Fatal(err)
	}
	trials = measured(trials)
	if len(trials) != 2*2*2 { // blocks, rounds and variants
		t.Errorf("%d trials in %s, want 8", len(trials), path)
	}
	for _, tr := range trials {
		if rate := tr.Metrics[metrics.Rate]; tr.Status != record.StatusOK || rate < 100 || rate > 300 {
			t.Errorf("%s: %s %s, %g messages of 0.1 Mbit a second, want 200", tr.Variant, tr.Status, tr.Error, rate)
		}
	}
	if _, err := os.Stat(filepath.Join(path, "report.html")); err != nil {
		t.Error(err)
	}
}

// readResults starts the pod of docs/how-to/mesh.md, and returns the page that its command makes reachable.
func readResults(t *testing.T, c *Cluster) string {
	t.Helper()
	block := regexp.MustCompile(`(?s)    # results.yaml\n(.*?)\n\n    kubectl apply`).FindStringSubmatch(readPage(t, "docs/how-to/mesh.md"))
	if block == nil {
		t.Fatal("the page has no results.yaml")
	}
	manifest := strings.ReplaceAll(strings.ReplaceAll("\n"+block[1], "\n    ", "\n"), "IMAGE", "example.test/slipstream:test")
	kubectl(t, c, strings.NewReader(manifest), "apply", "--namespace", chartNamespace, "-f", "-")
	kubectl(t, c, nil, "wait", "--for=condition=Ready", "pod/results", "--namespace", chartNamespace, "--timeout=1m")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	forward := exec.CommandContext(ctx, filepath.Join(c.parts, "kubectl"), "--kubeconfig="+c.Kubeconfig(), "port-forward", "--namespace", chartNamespace, "pod/results", ":7788")
	said, err := forward.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := forward.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { cancel(); _ = forward.Wait() }()
	line, err := bufio.NewReader(said).ReadString('\n')
	address := regexp.MustCompile(`127\.0\.0\.1:\d+`).FindString(line)
	if err != nil || address == "" {
		t.Fatalf("port-forward says %q, %v", line, err)
	}
	var page string
	testenv.Eventually(t, 30*time.Second, "the page", func() string {
		answer, err := http.Get("http://" + address + "/")
		if err != nil {
			return err.Error()
		}
		defer answer.Body.Close()
		text, err := io.ReadAll(answer.Body)
		if page = string(text); err != nil || answer.StatusCode != http.StatusOK {
			return fmt.Sprint(answer.Status, err)
		}
		return ""
	})
	return page
}
