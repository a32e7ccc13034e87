//go:build linux

package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/testenv"
)

// invocation is a run of the program against a cluster.
type invocation struct {
	*exec.Cmd
	stdout bytes.Buffer

	mu     sync.Mutex
	stderr bytes.Buffer
	more   chan struct{}
	ended  chan struct{}
}

func (v *invocation) Write(b []byte) (int, error) {
	v.mu.Lock()
	v.stderr.Write(b)
	v.mu.Unlock()
	select {
	case v.more <- struct{}{}:
	default:
	}
	return len(b), nil
}

func (v *invocation) said() string {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.stderr.String()
}

// invoke starts the program with a kubeconfig.
func invoke(t testing.TB, kubeconfig string, args ...string) *invocation {
	t.Helper()
	v := &invocation{Cmd: exec.Command(program, args...), more: make(chan struct{}, 1), ended: make(chan struct{})}
	v.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig)
	v.Stdout, v.Stderr = &v.stdout, v
	if err := v.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { _ = v.Wait(); close(v.ended) }()
	t.Cleanup(func() {
		_ = v.Process.Signal(os.Interrupt)
		select {
		case <-v.ended:
		case <-time.After(time.Minute):
			_ = v.Process.Kill()
			<-v.ended
		}
	})
	return v
}

// await waits until stderr contains text.
func (v *invocation) await(t *testing.T, text string) {
	t.Helper()
	limit := time.After(2 * time.Minute)
	for !strings.Contains(v.said(), text) {
		select {
		case <-v.more:
		case <-v.ended:
			if !strings.Contains(v.said(), text) {
				t.Fatalf("ended without %q:\n%s", text, v.said())
			}
		case <-limit:
			t.Fatalf("no %q within two minutes:\n%s", text, v.said())
		}
	}
}

// exit waits until the program ends, and returns its exit code.
func (v *invocation) exit(t testing.TB, limit time.Duration) int {
	t.Helper()
	select {
	case <-v.ended:
	case <-time.After(limit):
		t.Fatalf("still runs after %s:\n%s", limit, v.said())
	}
	return v.ProcessState.ExitCode()
}

// experimentFile writes an experiment in a cluster, with the baseline and the given variants. Its traffic leaves CPU
// time to the clusters of other tests.
func experimentFile(t *testing.T, kubernetes, variants, traffic string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "quick.yaml")
	text := fmt.Sprintf(`apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: quick}
spec:
  target: {kubernetes: {%s}}
  baseline: baseline
  variants:
  - {name: baseline}
%s
  workloads:
  - {name: paced, underload: {rate: 500, size: 4KiB, %s}}
  pairs: [1, 2]
  runs: 1
`, kubernetes, variants, traffic)
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return file
}

const (
	brief = "warmup: 100ms, duration: 200ms"
	// Other tests run clusters at the same time. With settled, all traffic flows before the window begins. With awake,
	// the fast path has found its connections by then. The window is too long for one end to wait for a CPU all through
	// it.
	settled = "warmup: 1s, duration: 600ms"
	awake   = "warmup: 4s, duration: 600ms"
	long    = "warmup: 100ms, duration: 60s"
	onAll   = `[nic, overlay, host-veth, pod]`
)

// resultsOf opens the only results folder below out.
func resultsOf(t testing.TB, out string) (*record.Dir, []record.Trial) {
	t.Helper()
	found, _ := filepath.Glob(filepath.Join(out, "*-*"))
	if len(found) != 1 {
		t.Fatalf("%d results folders in %s", len(found), out)
	}
	d, err := record.Open(found[0])
	if err != nil {
		t.Fatal(err)
	}
	trials, err := d.Trials()
	if err != nil {
		t.Fatal(err)
	}
	return d, trials
}

// measured returns the trials without those that the run repeated because a connection stalled.
func measured(trials []record.Trial) []record.Trial {
	return slices.DeleteFunc(trials, func(tr record.Trial) bool { return tr.Stalled })
}

func within(t *testing.T, limit time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	return ctx
}

// podMasks returns the RPS masks of eth0 in every pod on a node.
func podMasks(t *testing.T, n *Node) []string {
	t.Helper()
	out, err := output(n.Command(t.Context(), "sh", "-c", `for ns in /run/netns/*; do
		nsenter --net="$ns" unshare -m sh -c 'mount -t sysfs sysfs /mnt && cat /mnt/class/net/eth0/queues/rx-0/rps_cpus' 2>/dev/null; done; true`))
	if err != nil {
		t.Fatal(err)
	}
	return strings.Fields(out)
}

// testRun runs the most common experiment: the accelerators with 1 and 2 pairs, by pod IP and by ClusterIP, and the
// host network.
func testRun(t *testing.T, c *Cluster) {
	flowTableLock.Lock()
	t.Cleanup(flowTableLock.Unlock)
	before := snapshotOf(t, c)
	measure := func(variants, traffic string, count int) *record.Dir {
		out := t.TempDir()
		v := invoke(t, c.Kubeconfig(), "run", experimentFile(t, "", variants, traffic), "--out", out)
		if code := v.exit(t, 5*time.Minute); code != 0 {
			t.Fatalf("exit %d:\n%s", code, v.said())
		}
		d, trials := resultsOf(t, out)
		trials = measured(trials)
		if len(trials) != count {
			t.Errorf("%d trials, want %d", len(trials), count)
		}
		for _, tr := range trials {
			checkTrial(t, tr)
		}
		return d
	}
	d := measure(`  - {name: native, path: {native: {}}}
  - {name: pod/rps, accelerate: [{rps: {devices: [nic, overlay, host-veth], cpus: all}}]}
  - {name: pod/rfs+, accelerate: [{rfs: {devices: `+onAll+`}}]}
  - {name: service/baseline, path: {service: {}}}
  - {name: service/rps+, path: {service: {}}, accelerate: [{rps: {devices: `+onAll+`, cpus: all}}]}
  - {name: service/rfs, path: {service: {}}, accelerate: [{rfs: {devices: [nic, overlay, host-veth]}}]}`, settled, 2*7)
	measure("  - {name: pod/fastpath, accelerate: [{fastpath: {}}]}", awake, 2*2)
	env, err := d.Environment()
	if err != nil {
		t.Fatal(err)
	}
	if len(env.Nodes) != 2 || env.Nodes[0].Name != "node0" || env.Nodes[1].Name != "node1" || !strings.Contains(env.Placement, "node0") || env.Nodes[0].Distribution == "" {
		t.Errorf("environment %+v", env)
	}
	unchanged(t, c, before)
}

// checkTrial checks the conditions of a testRun trial: the settings, the fast path, and the path of the traffic.
func checkTrial(t *testing.T, tr record.Trial) {
	t.Helper()
	name := fmt.Sprintf("%s × %d", tr.Variant, tr.Pairs)
	if tr.Status != record.StatusOK || tr.Metrics[metrics.LatencyP50] <= 0 {
		t.Errorf("%s: %s %s", name, tr.Status, tr.Error)
		return
	}
	if len(tr.Hosts) != 1 || tr.Hosts[0].Source != record.SoftirqEBPF {
		t.Errorf("%s: hosts %+v, want this machine's CPUs, exact", name, tr.Hosts)
	}
	pods := map[string]bool{}
	nodes := map[string]bool{}
	for _, s := range tr.Settings {
		if s.Got != s.Want {
			t.Errorf("%s: %s of %s reads %q, not %q", name, s.Path, s.Place, s.Got, s.Want)
		}
		if strings.Contains(s.Place, "/") {
			pods[s.Place] = true
		} else {
			nodes[s.Place] = true
		}
	}
	wantPods, wantNodes := 0, 0
	if strings.Contains(tr.Variant, "/r") || strings.HasSuffix(tr.Variant, "/fastpath") {
		wantNodes = 2
	}
	if fast := len(tr.Fastpath); strings.HasSuffix(tr.Variant, "/fastpath") {
		if fast != 2 || tr.Fastpath[0].Packets[record.FastOut+"-vxlan"] == 0 || tr.Fastpath[1].Packets[record.FastIn+"-vxlan"] == 0 {
			t.Errorf("%s: the fast path forwarded nothing: %+v", name, tr.Fastpath)
		}
	} else if fast > 0 {
		t.Errorf("%s: there is a fast path: %+v", name, tr.Fastpath)
	}
	if strings.HasSuffix(tr.Variant, "+") {
		wantPods = 2 * tr.Pairs
	}
	if len(pods) != wantPods || len(nodes) != wantNodes {
		t.Errorf("%s: set on nodes %v and pods %v, want %d and %d", name, nodes, pods, wantNodes, wantPods)
	}
	// Either all of the traffic went through the overlay, or none. The fast path bypasses the overlay's device.
	var overlay uint64
	for _, dev := range tr.Devices {
		if dev.Name == "flannel.1" {
			overlay += dev.RxBytes
		}
	}
	if native := tr.Variant == "native"; len(tr.Fastpath) == 0 && native != (overlay < 100_000) {
		t.Errorf("%s: %d bytes over the overlay", name, overlay)
	}
}

// snapshotOf returns what a run must leave as it found it.
func snapshotOf(t *testing.T, c *Cluster) []string {
	t.Helper()
	all := []string{
		kubectl(t, c, nil, "get", "namespaces", "-o", "name"),
		kubectl(t, c, nil, "get", "pods,services,leases", "-A", "-l", "app.kubernetes.io/component=run", "-o", "name"),
	}
	return append(all, nodeSettings(t, c)...)
}

// nodeSettings returns the settings of every receive queue of the nodes, and the contents of their journals. It leaves
// out the devices of pods.
func nodeSettings(t *testing.T, c *Cluster) (all []string) {
	t.Helper()
	for i := range c.config.Nodes {
		n := c.Node(fmt.Sprint("node", i))
		out, err := output(n.Command(t.Context(), "sh", "-c", `
			unshare -m sh -c 'mount -t sysfs sysfs /mnt && grep -H . /mnt/class/net/*/queues/rx-*/rps_* | grep -Ev "/(veth|cni0|lxc)"'
			grep -h path /run/slipstream/journal/*.json 2>/dev/null || true`))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, n.name+"\n"+out)
	}
	return all
}

func unchanged(t *testing.T, c *Cluster, before []string) {
	t.Helper()
	if diff := cmp.Diff(before, snapshotOf(t, c)); diff != "" {
		t.Errorf("the cluster is not as it was (-before +after):\n%s", diff)
	}
}

// testSteeredPods inspects the pods with the node's tools during a run, and then interrupts the run: all settings are
// restored, and the recorded trials are kept.
func testSteeredPods(t *testing.T, c *Cluster) {
	before := snapshotOf(t, c)
	out := t.TempDir()
	variants := "  - {name: rps+, accelerate: [{rps: {devices: " + onAll + ", cpus: all}}]}"
	file := experimentFile(t, "", variants, brief)
	v := invoke(t, c.Kubeconfig(), "run", file, "--out", out, "--set", "spec.pairs=[1]", "--set", "spec.runs=200")
	v.await(t, "rps+  paced at 1 pair")
	steered := false
	if err := poll(within(t, time.Minute), 20*time.Millisecond, func() (bool, error) {
		masks := podMasks(t, c.Node("node1"))
		steered = slices.ContainsFunc(masks, func(m string) bool { return strings.Trim(m, "0,") != "" })
		return steered, nil
	}); err != nil {
		t.Fatalf("no pod was seen steered: %v", err)
	}
	if err := v.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if code := v.exit(t, 3*time.Minute); code != 1 || !strings.Contains(v.said(), "to resume: slipstream run --resume") {
		t.Errorf("exit %d:\n%s", code, v.said())
	}
	if _, trials := resultsOf(t, out); len(trials) < 2 {
		t.Errorf("%d trials are kept", len(trials))
	}
	unchanged(t, c, before)
}

// testControllerKilled checks that workers restore the settings when their streams end. Cleanup skips the run while
// its lease is valid, and removes it when told to.
func testControllerKilled(t *testing.T, c *Cluster) {
	before := snapshotOf(t, c)
	variants := "  - {name: rps+, accelerate: [{rps: {devices: " + onAll + ", cpus: all}}]}"
	v := invoke(t, c.Kubeconfig(), "run", experimentFile(t, "", variants, long), "--out", t.TempDir(), "--set", "spec.pairs=[1]")
	v.await(t, "results go to")
	if err := v.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-v.ended
	cleanup := func(want string, args ...string) {
		t.Helper()
		v := invoke(t, c.Kubeconfig(), append([]string{"cleanup"}, args...)...)
		if code := v.exit(t, 2*time.Minute); code != 0 || !strings.HasPrefix(v.stdout.String(), want) {
			t.Errorf("cleanup %v: exit %d: %s%s", args, code, v.stdout.String(), v.said())
		}
	}
	cleanup("skipped: run ") // its lease is valid for 60 s
	settled := nodeSettings(t, c)
	if err := poll(within(t, time.Minute), 200*time.Millisecond, func() (bool, error) {
		settled = nodeSettings(t, c)
		return cmp.Equal(before[2:], settled), nil
	}); err != nil {
		t.Errorf("not put back: %v\n%s", err, cmp.Diff(before[2:], settled))
	}
	cleanup("would remove: run ", "--all", "--dry-run")
	cleanup("removed: run ", "--all")
	cleanup("no runs found")
	unchanged(t, c, before)
}

// workerIn returns the process ID of the worker for traffic in the cluster's pod whose name begins with prefix. Other clusters on
// this machine have pods whose names begin with it too.
func workerIn(t *testing.T, c *Cluster, prefix string) int {
	t.Helper()
	pods, err := c.client.CoreV1().Pods(metav1.NamespaceAll).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(pods.Items, func(p corev1.Pod) bool { return strings.HasPrefix(p.Name, prefix) })
	if i < 0 {
		t.Fatalf("the cluster has no pod %s…", prefix)
	}
	all, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range all {
		cmdline, err := os.ReadFile(filepath.Join(dir, "cmdline"))
		if err != nil || string(cmdline) != "/slipstream\x00worker\x00--remote\x00" {
			continue // another program, or gone
		}
		environ, err := os.ReadFile(filepath.Join(dir, "environ"))
		if err != nil || !strings.Contains("\x00"+string(environ), "\x00HOSTNAME="+pods.Items[i].Name+"\x00") {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil {
			t.Fatal(err)
		}
		return pid
	}
	t.Fatalf("no worker runs in pod %s", pods.Items[i].Name)
	return 0
}

// testWorkerKilled checks that the trial is recorded as failed, and repeated.
func testWorkerKilled(t *testing.T, c *Cluster) {
	before := snapshotOf(t, c)
	out := t.TempDir()
	v := invoke(t, c.Kubeconfig(), "run", experimentFile(t, "", "", "warmup: 100ms, duration: 2s"), "--out", out, "--set", "spec.runs=2")
	v.await(t, "block 1  baseline  paced at 1 pair")
	if err := syscall.Kill(workerIn(t, c, "server-0-"), syscall.SIGKILL); err != nil { // every trial needs it
		t.Fatal(err)
	}
	if code := v.exit(t, 3*time.Minute); code != 0 {
		t.Fatalf("exit %d:\n%s", code, v.said())
	}
	_, trials := resultsOf(t, out)
	var failed []string
	good := 0
	for _, tr := range trials {
		switch {
		case tr.Status != record.StatusFailed:
			good++
		case !tr.Stalled:
			failed = append(failed, tr.Error)
		}
	}
	// If the connection closes before the status arrives, client-go reports success.
	killed := regexp.MustCompile(`the worker in pod \S+/server-0-\S+ (ended with signal 9|exited unexpectedly)`)
	if good != 4 || len(failed) != 1 || !killed.MatchString(failed[0]) {
		t.Errorf("%d good trials, failed: %q", good, failed)
	}
	unchanged(t, c, before)
}

// windowsNode is the manifest of a node that runs Windows.
const windowsNode = `apiVersion: v1
kind: Node
metadata: {name: %s, labels: {kubernetes.io/os: windows}}
`

// noHostNetwork is a policy of the cluster against pods in the host network.
const noHostNetwork = `
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: no-host-network}
spec:
  matchConstraints: {resourceRules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [pods]}]}
  validations: [{expression: "!has(object.spec.hostNetwork) || !object.spec.hostNetwork", message: the host network is for administrators}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: no-host-network}
spec: {policyName: no-host-network, validationActions: [Deny]}
`

// testCannotRun checks the reasons not to start a run: each is reported, and nothing is left.
func testCannotRun(t *testing.T, c *Cluster) {
	before := snapshotOf(t, c)
	plain := experimentFile(t, "", "", brief)
	steer := experimentFile(t, "", "  - {name: rps, accelerate: [{rps: {devices: [nic], cpus: all}}]}", brief)
	fails := func(t *testing.T, kubeconfig string, limit time.Duration, want []string, args ...string) {
		t.Helper()
		out := t.TempDir()
		v := invoke(t, kubeconfig, append(append([]string{"run"}, args...), "--out", out)...)
		code := v.exit(t, limit)
		for _, w := range want {
			if code == 0 || !strings.Contains(v.said(), w) {
				t.Errorf("exit %d, want %q:\n%s", code, w, v.said())
			}
		}
		if entries, err := os.ReadDir(out); err == nil && len(entries) > 0 {
			t.Errorf("there are results: %v", entries)
		}
	}
	t.Run("no cluster", func(t *testing.T) {
		none := filepath.Join(t.TempDir(), "none")
		fails(t, none, time.Minute, []string{"no kubeconfig found, as KUBECONFIG names " + none + ", which does not exist: correct it, or name one with --kubeconfig"}, plain)
	})
	t.Run("no such context", func(t *testing.T) {
		fails(t, c.Kubeconfig(), time.Minute, []string{"it has no context nonesuch; it has "}, plain, "--context", "nonesuch")
	})
	t.Run("no permission", func(t *testing.T) {
		kubectl(t, c, nil, "create", "serviceaccount", "nobody")
		t.Cleanup(func() { after(t, c, "delete", "serviceaccount", "nobody") })
		token := kubectl(t, c, nil, "create", "token", "nobody")
		data, err := os.ReadFile(c.Kubeconfig())
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(t.TempDir(), "kubeconfig")
		if err := os.WriteFile(file, data, 0o600); err != nil {
			t.Fatal(err)
		}
		set := exec.CommandContext(t.Context(), filepath.Join(c.parts, "kubectl"), "--kubeconfig="+file, "config", "set-credentials", "nobody", "--token="+token)
		if _, err := output(set); err != nil {
			t.Fatal(err)
		}
		set = exec.CommandContext(t.Context(), filepath.Join(c.parts, "kubectl"), "--kubeconfig="+file, "config", "set-context", "--current", "--user=nobody")
		if _, err := output(set); err != nil {
			t.Fatal(err)
		}
		fails(t, file, time.Minute, []string{"nodes is forbidden", "kubectl create clusterrolebinding slipstream-nodes --clusterrole=slipstream-nodes --serviceaccount=default:nobody"}, plain)
		kubectl(t, c, nil, "create", "clusterrole", "sees-nodes", "--verb=get,list", "--resource=nodes")
		kubectl(t, c, nil, "create", "clusterrolebinding", "sees-nodes", "--clusterrole=sees-nodes", "--serviceaccount=default:nobody")
		t.Cleanup(func() { after(t, c, "delete", "clusterrole,clusterrolebinding", "sees-nodes") })
		fails(t, file, time.Minute, []string{
			"system:serviceaccount:default:nobody lacks permissions that a run needs:",
			"create namespaces\n", "create pods/exec in all namespaces", "patch leases.coordination.k8s.io in all",
		}, plain)
	})
	t.Run("one node", func(t *testing.T) {
		kubectl(t, c, nil, "cordon", "node1")
		t.Cleanup(func() { after(t, c, "uncordon", "node1") })
		fails(t, c.Kubeconfig(), time.Minute, []string{"a run needs two nodes", "node node1 is cordoned, so somebody keeps pods off it: when that is over, kubectl uncordon node1"}, plain)
	})
	t.Run("taint", func(t *testing.T) {
		kubectl(t, c, nil, "taint", "nodes", "node1", "gpu=yes:NoSchedule")
		t.Cleanup(func() { after(t, c, "taint", "nodes", "node1", "gpu-") })
		fails(t, c.Kubeconfig(), time.Minute, []string{"a run needs two nodes", "node node1 has the taint gpu=yes:NoSchedule"}, plain)
		v := invoke(t, c.Kubeconfig(), "run", plain, "--server-node", "node1", "--out", t.TempDir())
		if code := v.exit(t, 2*time.Minute); code != 0 {
			t.Errorf("a node that is named: exit %d\n%s", code, v.said())
		}
	})
	t.Run("no such node", func(t *testing.T) {
		fails(t, c.Kubeconfig(), time.Minute, []string{"node node7 does not exist; the nodes are node0, node1"}, plain, "--client-node", "node7")
	})
	t.Run("too large", func(t *testing.T) {
		fails(t, c.Kubeconfig(), time.Minute, []string{"cannot be scheduled", "Insufficient cpu"}, plain, "--set", "spec.target.kubernetes.resources={cpu: 500}")
	})
	t.Run("Windows", func(t *testing.T) {
		// These nodes have no kubelet. They have no CPU, so that the scheduler ignores those of their pods that the API
		// server accepts.
		for _, name := range []string{"win0", "win1"} {
			kubectl(t, c, strings.NewReader(fmt.Sprintf(windowsNode, name)), "create", "-f", "-")
			t.Cleanup(func() { after(t, c, "delete", "node", name) })
			kubectl(t, c, nil, "patch", "node", name, "--subresource=status", "--patch", `{"status": {"conditions": [{"type": "Ready", "status": "True"}]}}`)
		}
		windows := []string{plain, "--selector", "kubernetes.io/os=windows", "--set", "spec.target.kubernetes.resources={cpu: 100m}"}
		fails(t, c.Kubeconfig(), time.Minute, []string{"node win0 runs Windows, and its pods for traffic are host processes", "give every variant the path native"}, windows...)
		fails(t, c.Kubeconfig(), time.Minute, []string{"client-0-", "on node win0 cannot be scheduled", "Insufficient cpu"}, append(windows, "--set", "spec.path={native: {}}")...)
	})
	t.Run("image that cannot be pulled", func(t *testing.T) {
		fails(t, c.Kubeconfig(), time.Minute, []string{"has no image: registry.invalid/slipstream:none cannot be pulled", "--image"}, plain, "--image", "registry.invalid/slipstream:none")
	})
	t.Run("selector", func(t *testing.T) {
		fails(t, c.Kubeconfig(), time.Minute, []string{"no node has the labels kubernetes.io/os=plan9 of nodeSelector (--selector); nodes have kubernetes.io/os=linux"}, plain, "--selector", "kubernetes.io/os=plan9")
	})
	t.Run("quota", func(t *testing.T) {
		kubectl(t, c, nil, "create", "namespace", "small")
		t.Cleanup(func() { after(t, c, "delete", "namespace", "small") })
		kubectl(t, c, nil, "create", "quota", "q", "-n", "small", "--hard=limits.cpu=2,pods=10")
		testenv.Eventually(t, time.Minute, "quota", func() string {
			if got := kubectl(t, c, nil, "get", "quota", "q", "-n", "small", "-o", "jsonpath={.status.hard.pods}"); got != "10" {
				return "it has no status yet"
			}
			return ""
		})
		inSmall := []string{plain, "-n", "small"}
		fails(t, c.Kubeconfig(), time.Minute, []string{"must specify limits.cpu", "--set spec.target.kubernetes.resources="}, inSmall...)
		fails(t, c.Kubeconfig(), time.Minute, []string{"must specify limits.cpu"}, append(inSmall, "--dry-run")...)
		fails(t, c.Kubeconfig(), time.Minute, []string{"ResourceQuota q of namespace small has room for 2 of limits.cpu, and the run needs "}, append(inSmall, "--dry-run", "--set", "spec.target.kubernetes.resources={cpu: 1}")...)
		v := invoke(t, c.Kubeconfig(), append([]string{"run"}, append(inSmall, "--dry-run", "--set", "spec.target.kubernetes.resources={cpu: 100m}")...)...)
		if code := v.exit(t, time.Minute); code != 0 {
			t.Errorf("with resources: exit %d\n%s", code, v.said())
		}
	})
	t.Run("LimitRange", func(t *testing.T) {
		kubectl(t, c, nil, "create", "namespace", "ranged")
		t.Cleanup(func() { after(t, c, "delete", "namespace", "ranged") })
		kubectl(t, c, strings.NewReader(`{apiVersion: v1, kind: LimitRange, metadata: {name: r, namespace: ranged}, spec: {limits: [{type: Container, default: {cpu: 100m}}]}}`), "apply", "-f", "-")
		kubectl(t, c, strings.NewReader(`{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: default-deny, namespace: ranged}, spec: {podSelector: {}, policyTypes: [Ingress]}}`), "apply", "-f", "-")
		v := invoke(t, c.Kubeconfig(), "run", plain, "-n", "ranged", "--dry-run")
		code := v.exit(t, time.Minute)
		for _, want := range []string{"to cpu=100m, which may throttle what is measured", "NetworkPolicy default-deny of namespace ranged admits no traffic"} {
			if code != 0 || !strings.Contains(v.stdout.String(), want) {
				t.Errorf("exit %d, want %s in %s%s", code, want, v.stdout.String(), v.said())
			}
		}
	})
	t.Run("admission policy", func(t *testing.T) {
		kubectl(t, c, strings.NewReader(noHostNetwork), "apply", "-f", "-")
		t.Cleanup(func() {
			after(t, c, "delete", "validatingadmissionpolicy,validatingadmissionpolicybinding", "no-host-network")
		})
		const denied = "denied request: the host network is for administrators"
		// The API server enforces a new policy only after a moment, and does not for another moment when a controller first writes
		// the policy's status.
		testenv.Eventually(t, 3*time.Minute, "the policy", func() string {
			v := invoke(t, c.Kubeconfig(), "run", steer, "--out", t.TempDir())
			if code := v.exit(t, time.Minute); code != 1 || !strings.Contains(v.said(), denied) {
				return v.said()
			}
			return ""
		})
		fails(t, c.Kubeconfig(), time.Minute, []string{denied, "exempt namespaces with the label app.kubernetes.io/name=slipstream"}, steer)
		fails(t, c.Kubeconfig(), time.Minute, []string{denied, "asked in namespace default"}, steer, "--dry-run")
	})
	t.Run("pod security", func(t *testing.T) {
		kubectl(t, c, nil, "create", "namespace", "strict")
		t.Cleanup(func() { after(t, c, "delete", "namespace", "strict") })
		kubectl(t, c, nil, "label", "namespace", "strict", "pod-security.kubernetes.io/enforce=restricted")
		fails(t, c.Kubeconfig(), time.Minute, []string{"the API server rejects pod strict/client-node-", "violates PodSecurity", "leave out -n"}, steer, "-n", "strict")
		// A run that only uses these pods to sample continues without them.
		out := t.TempDir()
		v := invoke(t, c.Kubeconfig(), "run", plain, "--out", out, "-n", "strict")
		if code := v.exit(t, 2*time.Minute); code != 0 || !strings.Contains(v.said(), "CPU use is not measured: the API server rejects pod") {
			t.Errorf("exit %d:\n%s", code, v.said())
		}
		_, trials := resultsOf(t, out)
		for _, tr := range measured(trials) {
			_, cpu := tr.Metrics[metrics.CPUPerGB]
			if tr.Status != record.StatusOK || cpu || !warned(tr, record.WarnNoCPUs) {
				t.Errorf("trial %+v", tr)
			}
		}
		if left := kubectl(t, c, nil, "get", "pods,services,leases", "-n", "strict", "-o", "name"); left != "" {
			t.Errorf("left in the user's namespace: %s", left)
		}
	})
	unchanged(t, c, before)
}

// after runs kubectl in a cleanup, when the test's context has ended.
func after(t *testing.T, c *Cluster, args ...string) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if _, err := output(exec.CommandContext(ctx, filepath.Join(c.parts, "kubectl"), append([]string{"--kubeconfig=" + c.Kubeconfig()}, args...)...)); err != nil {
		t.Error(err)
	}
}

func good(tr record.Trial) bool { return tr.Status == record.StatusOK }

func warned(tr record.Trial, code string) bool {
	return slices.ContainsFunc(tr.Warnings, func(w record.Warning) bool { return w.Code == code })
}

// testThrottled checks that a trial has a warning if a CPU limit throttled a pod.
func testThrottled(t *testing.T, c *Cluster) {
	before := snapshotOf(t, c)
	// This limit is 2 ms in a period of 100 ms, less than one time slice. On a busy machine a pod with so little weight
	// does not get enough CPU time to reach a much larger limit.
	file := experimentFile(t, "unprivileged: true, resources: {cpu: 20m, memory: 128Mi}", "", brief)
	var trials []record.Trial
	testenv.Retry(t, 3, func() error { // with one cell, a run ends at its first failed trial
		out := t.TempDir()
		v := invoke(t, c.Kubeconfig(), "run", file, "--out", out, "--set", "spec.pairs=[1]",
			"--set", "spec.workloads=[{name: stream, stream: {warmup: 100ms, duration: 1s}}]")
		code := v.exit(t, 3*time.Minute)
		if code != 0 {
			t.Logf("exit %d:\n%s", code, v.said())
		}
		if _, trials = resultsOf(t, out); code == 0 {
			return nil
		}
		if n := len(trials); n == 0 || !trials[n-1].Stalled {
			t.Fatalf("trials %+v", trials)
		}
		return errors.New("the connections stalled")
	})
	if len(trials) != 1 || !warned(trials[0], record.WarnThrottled) || !warned(trials[0], record.WarnNoCPUs) {
		t.Errorf("trials %+v", trials)
	}
	unchanged(t, c, before)
}

// testNodeDies checks that the run ends and names the node. The recorded trials are kept, and cleanup knows what is
// left.
func testNodeDies(t *testing.T, c *Cluster) {
	out := t.TempDir()
	// A run also ends if every trial of a block fails. With several trials after the one in which the node dies, one of
	// them finds that the node is gone.
	v := invoke(t, c.Kubeconfig(), "run", experimentFile(t, "", "", brief), "--out", out, "--set", "spec.runs=1000", "--set", "spec.pairs=[1,2,3,4]")
	v.await(t, "block 2  ")
	if err := c.Node("node1").Kill(); err != nil {
		t.Fatal(err)
	}
	if code := v.exit(t, 4*time.Minute); code != 1 || !strings.Contains(v.said(), "the target is lost: node node1 is not ready") {
		t.Errorf("exit %d:\n%s", code, v.said())
	}
	if !strings.Contains(v.said(), "To remove them: slipstream cleanup") || !strings.Contains(v.said(), "run --resume") {
		t.Errorf("does not say what is left and how to go on:\n%s", v.said())
	}
	if _, trials := resultsOf(t, out); len(trials) < 2 || !slices.ContainsFunc(trials, good) {
		t.Errorf("trials %+v", trials)
	}
	list := invoke(t, c.Kubeconfig(), "cleanup", "--dry-run", "--all")
	if code := list.exit(t, time.Minute); code != 0 || !strings.Contains(list.stdout.String(), "would remove: run ") {
		t.Errorf("cleanup: exit %d: %s%s", code, list.stdout.String(), list.said())
	}
}

// testAPIServerDies checks that the run ends with an explanation, and keeps the recorded trials.
func testAPIServerDies(t *testing.T, c *Cluster) {
	out := t.TempDir()
	variants := "  - {name: rps+, accelerate: [{rps: {devices: " + onAll + ", cpus: all}}]}"
	before := nodeSettings(t, c)
	v := invoke(t, c.Kubeconfig(), "run", experimentFile(t, "", variants, brief), "--out", out, "--set", "spec.runs=1000", "--set", "spec.pairs=[1,2,3,4]")
	v.await(t, "block 2  ")
	kill(t, c, "kube-apiserver")
	if code := v.exit(t, 4*time.Minute); code != 1 || !strings.Contains(v.said(), "the target is lost: the API server has not answered for") {
		t.Errorf("exit %d:\n%s", code, v.said())
	}
	if _, trials := resultsOf(t, out); len(trials) < 2 || !slices.ContainsFunc(trials, good) {
		t.Errorf("trials %+v", trials)
	}
	if err := poll(within(t, time.Minute), 200*time.Millisecond, func() (bool, error) { return cmp.Equal(before, nodeSettings(t, c)), nil }); err != nil {
		t.Errorf("the nodes are not put back: %s", cmp.Diff(before, nodeSettings(t, c)))
	}
}

// kill kills a program of the cluster.
func kill(t *testing.T, c *Cluster, name string) {
	t.Helper()
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range files {
		cmdline, err := os.ReadFile(file)
		if err != nil || !bytes.HasPrefix(cmdline, []byte(filepath.Join(c.parts, name)+"\x00")) || !bytes.Contains(cmdline, []byte(c.dir)) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err == nil {
			err = syscall.Kill(pid, syscall.SIGKILL)
		}
		if err != nil && !errors.Is(err, syscall.ESRCH) {
			t.Fatal(err)
		}
		return
	}
	t.Fatalf("there is no %s", name)
}
