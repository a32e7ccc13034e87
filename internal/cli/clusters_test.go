package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"slipstream.dev/internal/place/kube"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// apiServer answers as the API server of a cluster with two nodes, in which a run has a lease that was renewed by the server's clock.
type apiServer struct {
	uid    string
	clock  time.Duration // ahead of this machine
	denies string        // a resource that the user has no permission for
	// refuses the user's credentials.
	refuses bool

	mu      sync.Mutex
	created []string
}

func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	now := time.Now().Add(s.clock).UTC()
	w.Header().Set("Date", now.Format(http.TimeFormat))
	w.Header().Set("Content-Type", "application/json")
	if s.refuses {
		w.WriteHeader(http.StatusUnauthorized)
		fmt.Fprint(w, `{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Unauthorized", "code": 401, "message": "Unauthorized"}`)
		return
	}
	node := func(name string) string {
		return fmt.Sprintf(`{"apiVersion": "v1", "kind": "Node", "metadata": {"name": %q, "labels": {"kubernetes.io/os": "linux"}}, "status": {
			"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}], "conditions": [{"type": "Ready", "status": "True"}],
			"nodeInfo": {"architecture": %q}}}`, name, runtime.GOARCH)
	}
	list := func(kind string, items ...string) string {
		return fmt.Sprintf(`{"apiVersion": "v1", "kind": %q, "items": [%s]}`, kind+"List", strings.Join(items, ", "))
	}
	meta := func(name string) string {
		return fmt.Sprintf(`{"name": %q, "namespace": "mine", "creationTimestamp": %q, "labels": {"app.kubernetes.io/name": "slipstream", "app.kubernetes.io/component": "run", "slipstream.dev/run": "aaaaaaaa"},
			"annotations": {"slipstream.dev/nodes": "n9"}, "managedFields": [{"manager": "slipstream"}]}`, name, now.Add(-time.Hour).Format(time.RFC3339))
	}
	switch path := r.URL.Path; {
	case strings.HasSuffix(path, "/selfsubjectaccessreviews"):
		var review struct {
			Spec struct{ ResourceAttributes struct{ Resource string } }
		}
		_ = json.NewDecoder(r.Body).Decode(&review)
		w.WriteHeader(http.StatusCreated)
		fmt.Fprintf(w, `{"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "status": {"allowed": %t}}`, review.Spec.ResourceAttributes.Resource != s.denies)
	case strings.HasSuffix(path, "/selfsubjectreviews"):
		w.WriteHeader(http.StatusCreated)
		fmt.Fprint(w, `{"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview", "status": {"userInfo": {"username": "jane"}}}`)
	case r.URL.Query().Get("dryRun") == "All": // answers with what it would create
		object, _ := io.ReadAll(r.Body)
		w.WriteHeader(http.StatusCreated)
		_, _ = w.Write(object)
	case r.Method != http.MethodGet:
		s.mu.Lock()
		s.created = append(s.created, r.Method+" "+path)
		s.mu.Unlock()
		w.WriteHeader(http.StatusInternalServerError)
	case strings.HasSuffix(path, "/namespaces/kube-system"):
		fmt.Fprintf(w, `{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kube-system", "uid": %q}}`, s.uid)
	case strings.HasSuffix(path, "/nodes"):
		fmt.Fprint(w, list("Node", node("n1"), node("n2")))
	case strings.Contains(path, "/nodes/"):
		fmt.Fprint(w, node(filepath.Base(path)))
	case strings.HasSuffix(path, "/namespaces"):
		fmt.Fprint(w, list("Namespace"))
	case strings.HasSuffix(path, "/pods"):
		fmt.Fprint(w, list("Pod"))
	case strings.HasSuffix(path, "/services"):
		fmt.Fprint(w, list("Service"))
	case strings.HasSuffix(path, "/leases"):
		fmt.Fprintf(w, `{"apiVersion": "coordination.k8s.io/v1", "kind": "LeaseList", "items": [{"metadata": %s, "spec": {"holderIdentity": "other", "renewTime": %q}}]}`,
			meta("run-aaaaaaaa"), now.Format("2006-01-02T15:04:05.000000Z"))
	default:
		w.WriteHeader(http.StatusNotFound)
		fmt.Fprint(w, `{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}`)
	}
}

// changed returns what was created or deleted.
func (s *apiServer) changed() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.created
}

// contexts serves API servers, and writes a kubeconfig in which each has a context: the first a, then b and so on. nil is one that does not
// answer.
func contexts(t *testing.T, servers ...*apiServer) string {
	t.Helper()
	var clusters, contexts []string
	for i, s := range servers {
		server := httptest.NewServer(s)
		if s == nil {
			server.Close()
		}
		t.Cleanup(server.Close)
		name := string(rune('a' + i))
		clusters = append(clusters, fmt.Sprintf(`{name: %s, cluster: {server: %q}}`, name, server.URL))
		contexts = append(contexts, fmt.Sprintf(`{name: %s, context: {cluster: %[1]s, user: u}}`, name))
	}
	file := filepath.Join(t.TempDir(), "kubeconfig")
	text := fmt.Sprintf("apiVersion: v1\nkind: Config\ncurrent-context: a\nusers: [{name: u, user: {token: x}}]\nclusters: [%s]\ncontexts: [%s]\n",
		strings.Join(clusters, ", "), strings.Join(contexts, ", "))
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// TestClustersRefused: whatever would make a run fail in one of two clusters ends it before anything is created in the other. The dry run
// says the same.
func TestClustersRefused(t *testing.T) {
	for name, c := range map[string]struct {
		a, b     *apiServer
		clusters string
		in, want string
	}{
		"one cluster":       {&apiServer{uid: "1"}, &apiServer{uid: "1"}, "a,b", "", "clusters a and b are one and the same: the contexts a and b lead to it"},
		"no such context":   {&apiServer{uid: "1"}, &apiServer{uid: "2"}, "a,x", "cluster x: ", "read kubeconfig: it has no context x; it has a, b"},
		"credentials":       {&apiServer{uid: "1"}, &apiServer{refuses: true}, "a,b", "cluster b: ", "the API server does not accept your credentials"},
		"silent":            {&apiServer{uid: "1"}, nil, "a,b", "cluster b: ", "the API server does not answer"},
		"permission":        {&apiServer{uid: "1"}, &apiServer{uid: "2", denies: "leases"}, "a,other=b", "cluster other: ", "leases.coordination.k8s.io"},
		"one context twice": {&apiServer{uid: "1"}, &apiServer{uid: "2"}, "a,again=a", "", `--clusters a,again=a: must be another one than that of cluster a, is "a" too`},
	} {
		t.Run(name, func(t *testing.T) {
			args := []string{"run", "cni", "--kubeconfig", contexts(t, c.a, c.b), "--image", "registry.example/s:1", "--clusters", c.clusters, "--out", t.TempDir()}
			for _, args := range [][]string{args, append(args, "--dry-run")} {
				code, _, stderr := slipstream(t, args...)
				if code == 0 || !strings.Contains(stderr, c.in) || !strings.Contains(stderr, c.want) {
					t.Errorf("%v: exit %d: %s\nwant %s%s", args, code, stderr, c.in, c.want)
				}
				if n := strings.Count(stderr, " with -n"); name == "permission" && n != 1 {
					t.Errorf("%v: says %d times how to do with one namespace: %s", args, n, stderr)
				}
			}
			for _, s := range []*apiServer{c.a, c.b} {
				if s != nil && s.changed() != nil {
					t.Errorf("changed: %v", s.changed())
				}
			}
		})
	}
}

// TestClustersDryRun surveys both clusters.
func TestClustersDryRun(t *testing.T) {
	file := contexts(t, &apiServer{uid: "1"}, &apiServer{uid: "2"})
	code, stdout, stderr := slipstream(t, "run", "cni", "--dry-run", "--kubeconfig", file, "--image", "registry.example/s:1", "--clusters", "a,new=b")
	if code != 0 {
		t.Fatalf("exit %d: %s", code, stderr)
	}
	has(t, "dry run", stdout, "2 nodes of cluster a, 1 pod each", "2 nodes of cluster new, 1 pod each", "new/service", "\ncluster a\n", "\ncluster new\n", "clients on n1, servers on n2", "Nothing is missing")
	code, stdout, stderr = slipstream(t, "run", "cni", "--dry-run", "-o", "json", "--kubeconfig", file, "--image", "registry.example/s:1", "--clusters", "a,new=b")
	var found struct {
		Found []struct {
			Cluster string
			Nodes   []string
		}
	}
	if err := json.Unmarshal([]byte(stdout), &found); err != nil || code != 0 {
		t.Fatalf("exit %d, %v: %s", code, err, stderr)
	}
	if len(found.Found) != 2 || found.Found[1].Cluster != "new" || len(found.Found[1].Nodes) != 2 {
		t.Errorf("found %+v", found)
	}
}

// TestClustersDryRunOfOne: what one cluster has is shown, although the other one does not answer.
func TestClustersDryRunOfOne(t *testing.T) {
	code, stdout, stderr := slipstream(t, "run", "cni", "--dry-run", "--kubeconfig", contexts(t, nil, &apiServer{uid: "1"}), "--image", "registry.example/s:1", "--clusters", "a,b")
	has(t, "dry run", stdout, "\ncluster b\n", "clients on n1, servers on n2")
	if code != 1 || !strings.Contains(stderr, "cluster a: ") || strings.Contains(stdout, "Nothing is missing") {
		t.Errorf("exit %d: %s", code, stderr)
	}
}

// TestClustersUsage: what cannot be combined with several clusters.
func TestClustersUsage(t *testing.T) {
	for args, want := range map[string]string{
		"run cni --clusters a":                   "--clusters compares two clusters or more",
		"run cni --clusters a,a":                 "--clusters a,a: must be unique",
		"run cni --clusters a,admin@b":           `--clusters: "admin@b" must be a name of A-Z, a-z, 0-9 and + / . _ -, or such a name and a context: prod=admin@b`,
		"run demo --clusters a,b":                "--clusters is for runs in a cluster, and demo runs in a lab",
		"run cni --clusters a,b --client-node n": "--client-node n: cannot be combined with clusters",
		"run cni --clusters a,b --context c":     "--context names one cluster, and the experiment compares a and b",
		"run --resume x --clusters a,b":          "--resume continues the experiment of its results folder",
		"run cni --clusters a,b --set spec.target.kubernetes.clusters=[{name: pod}]": "no variant runs in cluster pod",
		"cleanup --clusters a,b --context c":                                         "--context names one cluster, and --clusters several",
		"cleanup x --clusters a":                                                     "--clusters is for cleaning up a cluster",
	} {
		fields := regexp.MustCompile(`\S+\{[^}]*\}\S*|\S+`).FindAllString(args, -1)
		if code, _, stderr := slipstream(t, fields...); code != 2 || !strings.Contains(stderr, want) {
			t.Errorf("%s: exit %d, %s\nwant %s", args, code, stderr, want)
		}
	}
}

// TestCleanupClusters cleans up every cluster that answers. Each lease is compared with the clock of its own API server: the run in it goes
// on, although the clocks differ by two hours.
func TestCleanupClusters(t *testing.T) {
	ahead, behind := &apiServer{uid: "1", clock: time.Hour}, &apiServer{uid: "3", clock: -time.Hour}
	code, stdout, stderr := slipstream(t, "cleanup", "--kubeconfig", contexts(t, ahead, nil, behind), "--clusters", "a,b,old=c")
	has(t, "cleanup", stdout, "cluster a: skipped: run aaaaaaaa", "cluster old: skipped: run aaaaaaaa", "in progress (other)")
	if code == 0 || !strings.Contains(stderr, "cluster b: list namespaces: the API server does not answer") || ahead.changed() != nil || behind.changed() != nil {
		t.Errorf("exit %d: %s\nchanged %v %v", code, stderr, ahead.changed(), behind.changed())
	}
	code, stdout, _ = slipstream(t, "cleanup", "--kubeconfig", contexts(t, ahead, behind), "--clusters", "a,b", "--all", "--dry-run")
	if has(t, "cleanup of all", stdout, "cluster a: would remove: run aaaaaaaa", "cluster b: would remove: run aaaaaaaa"); code != 0 {
		t.Errorf("exit %d", code)
	}
}

// inClusters returns an experiment with a variant in each of the clusters a and b.
func inClusters(t *testing.T, clusters string) *spec.Experiment {
	t.Helper()
	exp, err := spec.Parse("test.yaml", []byte(`
apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: test}
spec:
  target: {kubernetes: {clusters: [`+clusters+`]}}
  baseline: one
  variants: [{name: one, cluster: a}, {name: two, cluster: b}]
  workloads: [{name: stream, stream: {duration: 1s}}]
`), nil)
	if err != nil {
		t.Fatal(err)
	}
	return exp
}

// TestMembers: how each cluster is reached.
func TestMembers(t *testing.T) {
	exp := inClusters(t, "{name: a, context: x@a}, {name: b, kubeconfig: other}")
	members, err := (&kubeOptions{access: kube.Access{Kubeconfig: "file", Namespace: "mine"}}).members(exp, nil)
	if err != nil || len(members) != 2 || members[0].access != (kube.Access{Kubeconfig: "file", Context: "x@a", Namespace: "mine"}) ||
		members[1].access != (kube.Access{Kubeconfig: "other", Context: "b", Namespace: "mine"}) {
		t.Errorf("%+v, %v", members, err)
	}
	if got := strings.Join(programsRun(exp), "; "); got != "pods in the cluster of context x@a; pods in the cluster of context b, with the credentials or their plug-in of other" {
		t.Errorf("a folder of somebody else would make a run use: %s", got)
	}
}

// TestClustersRecordBaseImages: a resumed run starts pods from the image that was chosen in each cluster, or named for it.
func TestClustersRecordBaseImages(t *testing.T) {
	exp := inClusters(t, "{name: a, baseImage: registry.example/small:1}, {name: b}")
	o := kubeOptions{access: kube.Access{Kubeconfig: contexts(t, &apiServer{uid: "1"}, &apiServer{uid: "2"})}}
	if _, err := newKubeTargets(t.Context(), Process{Version: "v1"}, o, nil, exp, func(string) {}); err != nil {
		t.Fatal(err)
	}
	for cluster, want := range map[string]string{"a": "registry.example/small:1", "b": kube.DefaultBase} {
		if got := exp.InCluster(cluster).Spec.Target.Kubernetes.BaseImage; got != want {
			t.Errorf("a resumed run starts the pods of cluster %s from %q, want %q", cluster, got, want)
		}
	}
}

// TestSameNetworks: a run is not resumed after the network of a cluster was replaced.
func TestSameNetworks(t *testing.T) {
	was := []record.Cluster{{Name: "a", Plugin: "flannel", PluginVersion: "v1", PluginMode: "vxlan"}, {Name: "b", KubeProxy: "nftables"}}
	if err := checkSameNetworks(was, []record.Cluster{{Name: "a", Plugin: "flannel"}, {Name: "b"}}); err != nil {
		t.Errorf("what is not known now: %v", err)
	}
	for want, change := range map[string]func([]record.Cluster){
		"": func([]record.Cluster) {},
		"a had flannel v1 vxlan when the run began, and has flannel v2 vxlan now":   func(c []record.Cluster) { c[0].PluginVersion = "v2" },
		"b had kube-proxy nftables when the run began, and has kube-proxy ipvs now": func(c []record.Cluster) { c[1].KubeProxy = "ipvs" },
	} {
		now := append([]record.Cluster(nil), was...)
		change(now)
		if err := checkSameNetworks(was, now); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}
