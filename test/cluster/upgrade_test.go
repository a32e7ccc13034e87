//go:build linux

package cluster

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"slipstream.dev/internal/testenv"
)

// testUpgrade upgrades a release of an earlier chart by the commands of docs/how-to/agent.md: the agents are replaced, they keep
// the policy and what the user set, and write no setting of the nodes meanwhile.
func testUpgrade(t *testing.T, c *Cluster) {
	const namespace = "slipstream-system"
	nodes := []string{"node0", "node1"}
	before := map[string]string{}
	for _, n := range nodes {
		before[n] = steering(t, c.Node(n))
	}
	t.Cleanup(func() {
		kubectl(t, c, nil, "delete", "namespace", namespace, "--ignore-not-found")
		kubectl(t, c, nil, "delete", "crd", "accelerationpolicies.slipstream.dev", "nodeaccelerations.slipstream.dev", "--ignore-not-found")
	})
	asReader(t, c, "helm install slipstream "+olderChart(t)+" --namespace "+namespace+" --create-namespace --set image.tag=older,metrics.address=127.0.0.1 --wait --timeout 2m")
	kubectl(t, c, strings.NewReader(accelerationPolicy("held", "{"+everywhere+"accelerate: [{rps: {devices: [nic, overlay], cpus: all}}]}")), "apply", "-f", "-")
	writes := map[string]*writeWatch{}
	held := func(agent string) {
		t.Helper()
		for _, n := range nodes {
			testenv.Eventually(t, agentPatience, "state of "+n, func() string {
				s := stateOf(t, c, n).Status
				if len(s.Observed) != 1 || s.Observed[0].State != "applied" || s.Settings == 0 || s.Verified != s.Settings || s.Agent != agent {
					return fmt.Sprintf("%+v", s)
				}
				return ""
			})
		}
	}
	for _, n := range nodes {
		writes[n] = watchWrites(t, c.Node(n))
	}
	held("") // the earlier CRD does not know the field
	applied := map[string]string{}
	for _, n := range nodes {
		applied[n] = steering(t, c.Node(n))
		if len(writes[n].drain(t)) == 0 || applied[n] == before[n] {
			t.Fatalf("%s: the policy is applied, and no write was seen", n)
		}
	}
	older := agentPods(t, c, namespace)

	commands := regexp.MustCompile(`(?s)## Upgrade the agents of a cluster\n\n((?:    .*?\n)+)`).FindStringSubmatch(readPage(t, "docs/how-to/agent.md"))
	if commands == nil {
		t.Fatal("the page does not say how to upgrade")
	}
	asReader(t, c, strings.ReplaceAll(commands[1], "VERSION", "test"))
	kubectl(t, c, nil, "rollout", "status", "daemonset/slipstream", "--namespace", namespace, "--timeout=3m")
	newer := agentPods(t, c, namespace)
	if len(newer) != 2 || len(older) != 2 {
		t.Fatalf("agents before: %v, after: %v", older, newer)
	}
	for i := range newer {
		if newer[i].uid == older[i].uid || older[i].image != "slipstream.dev/slipstream:older" || newer[i].image != "slipstream.dev/slipstream:test" {
			t.Errorf("agent before: %+v, after: %+v", older[i], newer[i])
		}
	}
	held(namespace + "/slipstream")
	for _, n := range nodes {
		if seen := writes[n].drain(t); len(seen) > 0 {
			t.Errorf("%s: during the upgrade somebody wrote %q", n, seen)
		}
		if diff := cmp.Diff(applied[n], steering(t, c.Node(n))); diff != "" {
			t.Errorf("%s: other settings after the upgrade:\n%s", n, diff)
		}
		// The address is what the user had set for the older release.
		if value := agentMetrics(t, c.Node(n)); value("slipstream_settings_repaired_total") != 0 || value("slipstream_errors_total") != 0 {
			t.Errorf("%s: the newer agent repaired settings, or had errors", n)
		}
	}

	asReader(t, c, "helm uninstall slipstream --namespace "+namespace+" --wait")
	for _, n := range nodes {
		testenv.Eventually(t, time.Minute, n+" as before", func() string { return cmp.Diff(before[n], steering(t, c.Node(n))) })
		if len(writes[n].drain(t)) == 0 {
			t.Errorf("%s: it is restored, and no write was seen", n)
		}
	}
}

// olderChart makes a chart of an earlier version: without a value that the present templates need, and without one field of a CRD.
func olderChart(t *testing.T) (dir string) {
	t.Helper()
	root, err := checkout(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	dir = filepath.Join(t.TempDir(), "slipstream")
	if err := os.CopyFS(dir, os.DirFS(filepath.Join(root, "charts/slipstream"))); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(dir, "values.schema.json")); err != nil {
		t.Fatal(err)
	}
	template := filepath.Join(dir, "templates/daemonset.yaml")
	text, err := os.ReadFile(template)
	if err == nil {
		err = os.WriteFile(template, []byte(strings.ReplaceAll(string(text), "{{ .Values.health.port }}", "9470")), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	edit := func(file string, change func(map[string]any)) {
		t.Helper()
		path := filepath.Join(dir, file)
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var object map[string]any
		if err := yaml.Unmarshal(text, &object); err != nil {
			t.Fatal(err)
		}
		change(object)
		if text, err = yaml.Marshal(object); err == nil {
			err = os.WriteFile(path, text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	edit("Chart.yaml", func(chart map[string]any) { chart["version"] = "0.0.1" })
	edit("values.yaml", func(values map[string]any) { delete(values, "health") })
	edit("crds/slipstream.dev_nodeaccelerations.yaml", func(crd map[string]any) {
		version := at(crd, "spec", "versions").([]any)[0].(map[string]any)
		delete(at(version, "schema", "openAPIV3Schema", "properties", "status", "properties").(map[string]any), "agent")
	})
	return dir
}

// at returns a value deep in an object.
func at(object map[string]any, path ...string) any {
	for _, name := range path[:len(path)-1] {
		object = object[name].(map[string]any)
	}
	return object[path[len(path)-1]]
}

type agentPod struct{ node, uid, image string }

// agentPods returns the pods of the agents, by node.
func agentPods(t *testing.T, c *Cluster, namespace string) (pods []agentPod) {
	t.Helper()
	out := kubectl(t, c, nil, "get", "pods", "--namespace", namespace, "-l", "app.kubernetes.io/name=slipstream",
		"-o", `jsonpath={range .items[*]}{.spec.nodeName} {.metadata.uid} {.spec.containers[0].image}{"\n"}{end}`)
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		pods = append(pods, agentPod{f[0], f[1], f[2]})
	}
	slices.SortFunc(pods, func(a, b agentPod) int { return strings.Compare(a.node, b.node) })
	return pods
}

// writeWatch sees each write to receive steering settings of a node's devices, even one that is undone at once.
type writeWatch struct {
	fd    int
	files map[int32]string
}

// watchWrites watches the devices that a node has now.
func watchWrites(t *testing.T, n *Node) *writeWatch {
	t.Helper()
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	w := &writeWatch{fd, map[int32]string{}}
	found, err := filepath.Glob(fmt.Sprintf("/proc/%d/root/sys/class/net/*/queues/rx-*/rps_*", n.PID()))
	if err != nil || len(found) == 0 {
		t.Fatalf("%s has no receive queues: %v", n.name, err)
	}
	for _, file := range found {
		wd, err := unix.InotifyAddWatch(fd, file, unix.IN_MODIFY)
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		w.files[int32(wd)] = file
	}
	return w
}

// drain returns the files that were written since the last call.
func (w *writeWatch) drain(t *testing.T) (files []string) {
	t.Helper()
	buf := make([]byte, 64<<10)
	for {
		n, err := unix.Read(w.fd, buf)
		if errors.Is(err, unix.EAGAIN) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		for events := buf[:n]; len(events) > 0; {
			wd, length := int32(binary.NativeEndian.Uint32(events)), binary.NativeEndian.Uint32(events[12:])
			file, ok := w.files[wd]
			if !ok {
				t.Fatal("more was written than is told")
			}
			if events = events[unix.SizeofInotifyEvent+length:]; !slices.Contains(files, file) {
				files = append(files, file)
			}
		}
	}
}
