package test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"

	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
	"slipstream.dev/internal/testenv/golden"
)

const chart = "../charts/slipstream"

// helm runs helm, which make test builds.
func helm(t *testing.T, args ...string) (string, error) {
	t.Helper()
	out, err := exec.Command(testenv.NeedProgram(t, "helm", "make bin/tools/helm"), args...).CombinedOutput()
	return string(out), err
}

func render(t *testing.T, args ...string) (string, error) {
	t.Helper()
	return helm(t, append([]string{"template", "accelerate", chart, "--namespace", "net", "--kube-version", "v1.34.0"}, args...)...)
}

const digest = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

// TestChart renders the chart with its defaults, and with everything set.
func TestChart(t *testing.T) {
	if out, err := helm(t, "lint", "--strict", "--kube-version", "v1.34.0", chart); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	for name, args := range map[string][]string{
		"default": nil,
		"all": {
			"--set", "image.repository=example.test/slipstream,image.tag=1.2.3,image.pullPolicy=Always,image.pullSecrets[0].name=key",
			"--set", "image.digest=" + digest,
			"--set", "nodeSelector.fast=yes,metrics.port=9000,priorityClassName=",
			"--set", "metrics.address=2001:db8::1,metrics.auth=true,metrics.tlsSecret=metrics,health.port=9001,admissionPolicy=false",
			"--set-json", `tolerations=[]`, "--set-json", `policies={"rps":{"nodeSelector":{"fast":"yes"},"rollout":{"stepPercent":20,"pauseSeconds":30},"accelerate":[{"rps":{"devices":["nic","pod"],"cpus":"all"}}],"pods":{"matchLabels":{"app":"web"}}}}`,
		},
		"nightly": {"--set", "nightly.enabled=true,nightly.maxMbit=250,nightly.nodeSelector.pool=net,nightly.storageClass=fast,image.repository=example.test/slipstream", "--show-only", "templates/nightly.yaml"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := render(t, args...)
			if err != nil {
				t.Fatalf("%v: %s", err, got)
			}
			golden.Compare(t, "testdata/chart-"+name+".yaml", got)
		})
	}
}

// TestChartRefuses checks that the schema rejects wrong values.
func TestChartRefuses(t *testing.T) {
	for set, want := range map[string]string{
		"image.pulPolicy=Always":        "pulPolicy",
		"image.pullPolicy=Sometimes":    "pullPolicy",
		"image.digest=sha256:abc":       "/image/digest",
		"metrics.port=0":                "/metrics/port",
		"metrics.address=localhost":     "/metrics/address",
		"health.port=0":                 "/health/port",
		"nightly.maxMbit=0":             "/nightly/maxMbit",
		"nightly.runs=1":                "/nightly/runs",
		"nightly.storage=big":           "/nightly/storage",
		"nightly.enable=true":           "enable",
		"admissionPolicy=no":            "/admissionPolicy",
		"policies.rps.acelerate=x":      "acelerate",
		"policies.Rps.accelerate[0].x=": "policies",
		// A policy selects its nodes in exactly one way.
		"policies.rps.accelerate[0].fastpath.x=1":                                                          "/policies/rps",
		"policies.rps.accelerate[0].fastpath.x=1,policies.rps.all=false":                                   "/policies/rps",
		"policies.rps.accelerate[0].fastpath.x=1,policies.rps.all=true,policies.rps.nodeSelector.a=b":      "/policies/rps",
		"policies.rps.accelerate[0].fastpath.x=1,policies.rps.all=true,policies.rps.rollout.stepPercent=0": "stepPercent",
	} {
		if out, err := render(t, "--set", set); err == nil || !strings.Contains(out, want) {
			t.Errorf("--set %s: %v, no %q in %s", set, err, want, out)
		}
	}
}

// TestChartNightly checks that the run of the CronJob is an experiment that sends what the values allow, and where its results go.
func TestChartNightly(t *testing.T) {
	for _, maxMbit := range []int{1, 100, 10000} {
		out, err := render(t, "--set", fmt.Sprintf("nightly.enabled=true,nightly.existingClaim=mine,nightly.maxMbit=%d", maxMbit), "--show-only", "templates/nightly.yaml")
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		var experiment string
		for doc := range strings.SplitSeq(out, "\n---\n") {
			var config struct{ Data map[string]string }
			if err := yaml.Unmarshal([]byte(doc), &config); err != nil {
				t.Fatalf("%v in %s", err, doc)
			}
			experiment += config.Data["nightly.yaml"]
		}
		exp, err := spec.Parse("nightly.yaml", []byte(experiment), nil)
		if err != nil {
			t.Fatalf("%v in %s", err, experiment)
		}
		w := exp.Spec.Workloads[0].UnderLoad
		if got := float64(w.Connections*w.Rate) * float64(w.Size) * 8 / 1e6; got != float64(maxMbit) || len(exp.Spec.Workloads) != 1 || exp.Spec.Mesh == nil {
			t.Errorf("%d Mbit/s are allowed, and it sends %g", maxMbit, got)
		}
		// The default image is known to the program, and has no repository to name.
		if strings.Contains(out, "--image") || strings.Contains(out, "PersistentVolumeClaim") || !strings.Contains(out, `claimName: "mine"`) {
			t.Errorf("an image or a claim that it must not have:\n%s", out)
		}
	}
}

// TestChartImage checks the image that the chart asks for, and its pull policy.
func TestChartImage(t *testing.T) {
	const mine = "image.repository=example.test/slipstream"
	for _, tt := range []struct{ set, image, pull string }{
		{"image.tag=v1", "slipstream.dev/slipstream:v1", "Never"},
		{"image.tag=v1,image.digest=" + digest, "slipstream.dev/slipstream@" + digest, "Never"},
		{"image.pullPolicy=IfNotPresent", "slipstream.dev/slipstream:devel", "IfNotPresent"},
		{mine, "example.test/slipstream:devel", "IfNotPresent"},
		{mine + ",image.tag=v1,image.digest=" + digest, "example.test/slipstream@" + digest, "IfNotPresent"},
		{mine + ",image.pullPolicy=Always", "example.test/slipstream:devel", "Always"},
	} {
		out, err := render(t, "--set", tt.set)
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if want := fmt.Sprintf("image: %q\n        imagePullPolicy: %s\n", tt.image, tt.pull); !strings.Contains(out, want) {
			t.Errorf("--set %s: no %s", tt.set, want)
		}
	}
}

// TestChartDefaultImage checks that make image builds the image that the chart asks for by default.
func TestChartDefaultImage(t *testing.T) {
	out, err := render(t)
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	_, image, _ := strings.Cut(out, "image: \"")
	image, _, _ = strings.Cut(image, "\"")
	for _, target := range []string{"image", "image-windows"} {
		steps, err := exec.Command("make", "-C", "..", "-n", target).CombinedOutput()
		if err != nil {
			t.Fatalf("make -n %s: %v: %s", target, err, steps)
		}
		built := regexp.MustCompile(`(?s)slipstream-(?:windows-)?image\.tar -ref (\S+)`).FindAllStringSubmatch(string(steps), -1)
		if last := built[len(built)-1][1]; !slices.Contains(strings.Split(last, ","), image) {
			t.Errorf("make %s builds %s, and the chart asks for %s", target, last, image)
		}
	}
}

// TestChartSecondRelease checks that a second release in a cluster is refused with the name of the first, before anything is created.
func TestChartSecondRelease(t *testing.T) {
	agents := func(namespace, name, release string) string {
		return fmt.Sprintf(`{"metadata": {"name": "x", "namespace": %q, "labels": {"app.kubernetes.io/name": %q, "app.kubernetes.io/instance": %q}}}`, namespace, name, release)
	}
	for name, tt := range map[string]struct{ daemonSet, want string }{
		"none":                 {`{"metadata": {"name": "kube-proxy", "namespace": "kube-system"}}`, ""},
		"itself":               {agents("net", "slipstream", "accelerate"), ""},
		"another chart":        {agents("net", "other", "other"), ""},
		"another":              {agents("net", "slipstream", "first"), "release first in namespace net has agents in this cluster already"},
		"in another namespace": {agents("old", "slipstream", "accelerate"), "(helm upgrade accelerate … --namespace old)"},
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			answer := map[string]string{
				"/version":                 `{"major": "1", "minor": "34", "gitVersion": "v1.34.0"}`,
				"/api":                     `{"kind": "APIVersions", "versions": ["v1"]}`,
				"/apis":                    `{"kind": "APIGroupList", "apiVersion": "v1", "groups": [{"name": "apps", "versions": [{"groupVersion": "apps/v1", "version": "v1"}]}]}`,
				"/api/v1":                  `{"kind": "APIResourceList", "groupVersion": "v1", "resources": []}`,
				"/apis/apps/v1":            `{"kind": "APIResourceList", "groupVersion": "apps/v1", "resources": [{"name": "daemonsets", "kind": "DaemonSet", "namespaced": true, "verbs": ["get", "list"]}]}`,
				"/apis/apps/v1/daemonsets": `{"kind": "DaemonSetList", "apiVersion": "apps/v1", "items": [` + tt.daemonSet + `]}`,
			}[r.URL.Path]
			w.Header().Set("Content-Type", "application/json")
			if answer == "" {
				w.WriteHeader(http.StatusNotFound)
			}
			_, _ = io.WriteString(w, answer)
		}))
		out, err := render(t, "--dry-run=server", "--kube-apiserver", server.URL)
		server.Close()
		if (err == nil) != (tt.want == "") || !strings.Contains(out, tt.want) {
			t.Errorf("%s: %v, want %q in %.600s", name, err, tt.want, out)
		}
	}
}

// TestChartOldCluster checks a cluster that cannot bind an agent's token to its node: the
// chart fails with an explanation, and works without the admission policy if a user turns
// that off.
func TestChartOldCluster(t *testing.T) {
	if out, err := render(t, "--kube-version", "v1.29.0"); err == nil || !strings.Contains(out, "--set admissionPolicy=false") {
		t.Errorf("%v, nothing says what to do in %s", err, out)
	}
	out, err := render(t, "--kube-version", "v1.29.0", "--set", "admissionPolicy=false")
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if strings.Contains(out, "appArmorProfile") || !strings.Contains(out, "container.apparmor.security.beta.kubernetes.io/agent: unconfined") {
		t.Error("it has a field that the cluster does not know")
	}
}
