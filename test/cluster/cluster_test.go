//go:build linux

package cluster

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"slipstream.dev/internal/azure/azuretest"
	"slipstream.dev/internal/testenv"
)

func TestNodesAreReady(t *testing.T) {
	c := shared(t)
	got := kubectl(t, c, nil, "get", "nodes", "-o", `jsonpath={range .items[*]}{.metadata.name} {.status.conditions[?(@.type=="Ready")].status} {.status.addresses[0].address} {.status.nodeInfo.kubeletVersion}{"\n"}{end}`)
	want := "node0 True 10.99.0.10 v1.34.4\nnode1 True 10.99.0.11 v1.34.4"
	if got != want {
		t.Errorf("nodes are\n%s\nwant\n%s", got, want)
	}
	if got := kubectl(t, c, nil, "get", "serviceaccount", "default", "-o", "name"); got != "serviceaccount/default" {
		t.Errorf("default service account: %q", got)
	}
	if c.Node("node2") != nil {
		t.Error("there is a node2 of two nodes")
	}
}

func TestCommandIsInsideTheNode(t *testing.T) {
	n := shared(t).Node("node1")
	out, err := output(n.Command(t.Context(), "sh", "-c", "hostname; readlink /proc/self/ns/net; cat /proc/1/comm; ls /sys/class/net"))
	if err != nil {
		t.Fatal(err)
	}
	ns, err := os.Readlink(n.Netns())
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"node1\n" + ns + "\npause\n", "\neth0\n", "\nflannel.1"} {
		if !strings.Contains(out, want) {
			t.Errorf("a command in the node sees %q, want %q in it", out, want)
		}
	}
	// A command ends with its context, and so do its child processes.
	ctx, cancel := context.WithCancel(t.Context())
	cmd := n.Command(ctx, "sh", "-c", "echo $$; sleep 1000; true")
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r := bufio.NewReader(stdout)
	if _, err := r.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := io.ReadAll(r); err != nil && !errors.Is(err, os.ErrClosed) {
		t.Error(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Error("a command that was cancelled ended well")
	}
}

// onThread must not move the process itself, whichever threads it uses. The test runs in another process, which has no
// threads that wait for daemons.
func TestThreadsLeaveTheProcess(t *testing.T) {
	testenv.NeedRoot(t)
	child := exec.Command("/proc/self/exe")
	child.Env = append(os.Environ(), childThreads+"=1")
	if out, err := output(child); err != nil || out != "stayed" {
		t.Errorf("%s %v", out, err)
	}
}

// sendThreadsAway moves more threads to other namespaces at once than the process has to spare. So it uses every free
// thread, including the first.
func sendThreadsAway() error {
	where := func() string { return namespaceOf(os.Getpid(), "net") }
	before := where()
	const many = 64
	var away sync.WaitGroup
	away.Add(many)
	var g errgroup.Group
	for range many {
		g.Go(func() error {
			return onThread(func() error {
				defer away.Wait()
				defer away.Done()
				return unix.Unshare(unix.CLONE_NEWNET)
			})
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	if after := where(); after != before {
		return fmt.Errorf("the process was in %s, and is in %s", before, after)
	}
	return nil
}

// clusterTest is a test that leaves a cluster as it found it. Only the last test on a cluster may leave it changed.
type clusterTest struct {
	name string
	test func(*testing.T, *Cluster)
}

func runAll(t *testing.T, c *Cluster, tests ...clusterTest) {
	t.Helper()
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) { tt.test(t, c) })
	}
}

// TestSharedCluster runs tests on the shared cluster one after another, in parallel with tests that have their own
// clusters. Chart, Walk and Run change the machine's flow table, and wait for each other: Chart is the first test of its cluster, Walk the
// second and Run the third. TwoClusters is long, and needs a place for another cluster, which others leave after some minutes.
func TestSharedCluster(t *testing.T) {
	t.Parallel()
	runAll(t, shared(t), clusterTest{"Chart", testChart}, clusterTest{"Pods", testPods}, clusterTest{"SteeredPods", testSteeredPods},
		clusterTest{"WorkerKilled", testWorkerKilled}, clusterTest{"TwoClusters", testTwoClusters})
}

// TestSecondCluster runs tests on a second cluster.
func TestSecondCluster(t *testing.T) {
	t.Parallel()
	runAll(t, own(t, Config{}), clusterTest{"Doctor", testDoctor}, clusterTest{"Walk", testWalk}, clusterTest{"Observe", testObserve}, clusterTest{"BaseImage", testBaseImage}, clusterTest{"Backends", testBackends})
}

// TestThirdCluster runs tests on a third cluster.
func TestThirdCluster(t *testing.T) {
	t.Parallel()
	runAll(t, own(t, Config{}), clusterTest{"ControllerKilled", testControllerKilled}, clusterTest{"Agent", testAgent}, clusterTest{"Run", testRun}, clusterTest{"AgentNamespace", testAgentNamespace})
}

// TestControlPlaneThatDies runs tests on another cluster. The last test kills its API server.
func TestControlPlaneThatDies(t *testing.T) {
	t.Parallel()
	runAll(t, own(t, Config{}), clusterTest{"CannotRun", testCannotRun}, clusterTest{"Throttled", testThrottled}, clusterTest{"Upgrade", testUpgrade},
		clusterTest{"Nightly", testNightly}, clusterTest{"APIServerDies", testAPIServerDies})
}

// TestNodesThatComeAndGo has two clusters one after another, whose nodes are replaced and die.
func TestNodesThatComeAndGo(t *testing.T) {
	t.Parallel()
	t.Run("RoutedIPTables", func(t *testing.T) {
		testRouted(t, own(t, Config{Nodes: 3, CNI: Routed, Proxy: IPTables, Log: os.Stderr}))
	})
	c := own(t, Config{})
	t.Run("Migrate", func(t *testing.T) {
		// Several kinds of faults interrupt it in turn; a soak test uses each kind alone.
		migrateAndBack(t, c, slices.Sorted(maps.Values(azuretest.Interruptions))...)
	})
	t.Run("Run", func(t *testing.T) { testNodeDies(t, c) })
}

// testRouted covers the other CNI shape, the other mode of kube-proxy, more nodes, and a node that dies.
func testRouted(t *testing.T, c *Cluster) {
	testPods(t, c)
	if err := onNetns(c.Node("node0").Netns(), func() error {
		links, err := netlink.LinkList()
		if err != nil {
			return err
		}
		for _, l := range links {
			if l.Type() == "bridge" {
				t.Errorf("the routed shape has bridge %s", l.Attrs().Name)
			}
		}
		_, err = netlink.LinkByName(vxlanName)
		return err
	}); err != nil {
		t.Error(err)
	}

	dead := c.Node("node2")
	if err := dead.Kill(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dead.Netns()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a node that was killed has its namespace still: %v", err)
	}
	began := time.Now()
	kubectl(t, c, nil, "wait", "--for=condition=Ready=Unknown", "node/node2", "--timeout=60s")
	t.Logf("NotReady %.0f s after it was killed", time.Since(began).Seconds())
	kubectl(t, c, nil, "wait", "--for=condition=Ready", "node/node0", "node/node1", "--timeout=60s")
}

// testPods runs a pod on each of two nodes, and checks that they reach each other and the API server.
func testPods(t *testing.T, c *Cluster) {
	t.Helper()
	began := time.Now()
	const namespace = "pods"
	kubectl(t, c, nil, "create", "namespace", namespace)
	t.Cleanup(func() { kubectl(t, c, nil, "delete", "namespace", namespace) })
	var manifest strings.Builder
	for i := range 2 {
		fmt.Fprintf(&manifest, `
apiVersion: v1
kind: Pod
metadata: {name: pod%d, labels: {app: pod%[1]d}}
spec:
  nodeName: node%[1]d
  terminationGracePeriodSeconds: 0
  containers: [{name: pause, image: %q, imagePullPolicy: Never}]
---
apiVersion: v1
kind: Service
metadata: {name: pod%[1]d}
spec: {selector: {app: pod%[1]d}, ports: [{port: 80, targetPort: 8080}]}
---`, i, pauseImage)
	}
	kubectl(t, c, strings.NewReader(manifest.String()), "apply", "--namespace="+namespace, "--filename=-")
	kubectl(t, c, nil, "wait", "--namespace="+namespace, "--for=condition=Ready", "pod", "--all", "--timeout=180s")
	t.Logf("two pods are Ready after %.1f s", time.Since(began).Seconds())
	type pod struct{ ip, service, netns string }
	var pods [2]pod
	for i := range pods {
		get := func(kind, path string) string {
			return kubectl(t, c, nil, "get", kind, fmt.Sprintf("pod%d", i), "--namespace="+namespace, "--output=jsonpath={"+path+"}")
		}
		pods[i] = pod{ip: get("pod", ".status.podIP"), service: get("service", ".spec.clusterIP")}
		pods[i].netns = podNetns(t, c.nodes[i], pods[i].ip)
	}
	for i, server := range pods {
		client := pods[1-i]
		var l net.Listener
		if err := onNetns(server.netns, func() (err error) {
			l, err = net.Listen("tcp", ":8080")
			return err
		}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		from := make(chan string, 100)
		go func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				from <- conn.RemoteAddr().(*net.TCPAddr).IP.String()
				conn.Close()
			}
		}()
		addresses := []string{net.JoinHostPort(server.ip, "8080"), net.JoinHostPort(server.service, "80")}
		if c.config.replacesProxy() {
			addresses = addresses[:1] // it chooses the backend of a socket in a pod's control group, where the test's are not
		}
		for _, addr := range addresses {
			// kube-proxy hears about a Ready pod a moment later.
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			err := poll(ctx, 100*time.Millisecond, func() (bool, error) { return reach(client.netns, addr) == nil, nil })
			cancel()
			if err != nil {
				t.Errorf("pod%d does not reach %s of pod%d: %v", 1-i, addr, i, reach(client.netns, addr))
				continue
			}
			if got := <-from; got != client.ip {
				t.Errorf("pod%d at %s is seen as %s", 1-i, client.ip, got)
			}
		}
		if c.config.replacesProxy() {
			continue
		}
		// The API server is outside the pods' network. An attempt takes at most a second, but a lost SYN is repeated only
		// after that.
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		err := poll(ctx, 100*time.Millisecond, func() (bool, error) {
			return reach(client.netns, net.JoinHostPort(kubernetesService, "443")) == nil, nil
		})
		cancel()
		if err != nil {
			t.Errorf("pod%d does not reach the API server: %v", 1-i, err)
		}
	}
}

func reach(netns, addr string) error {
	return onNetns(netns, func() error {
		conn, err := net.DialTimeout("tcp", addr, time.Second)
		if err != nil {
			return err
		}
		return conn.Close()
	})
}

// podNetns returns the network namespace on a node that has an address.
func podNetns(t testing.TB, n *Node, ip string) string {
	t.Helper()
	path, err := findPod(n, ip)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// findPod is podNetns without failing the test. It tolerates pods that end meanwhile, whose file is gone or no longer a
// namespace.
func findPod(n *Node, ip string) (path string, err error) {
	all, err := filepath.Glob(fmt.Sprintf("/proc/%d/root/run/netns/*", n.PID()))
	if err != nil {
		return "", err
	}
	for _, p := range all {
		err := onNetns(p, func() error {
			addrs, err := netlink.AddrList(nil, unix.AF_INET)
			if slices.ContainsFunc(addrs, func(a netlink.Addr) bool { return a.IP.String() == ip }) {
				path = p
			}
			return err
		})
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.EINVAL) {
			return "", err
		}
	}
	if path == "" {
		return "", fmt.Errorf("no namespace of %s has %s: %v", n.name, ip, all)
	}
	return path, nil
}

func TestDownLeavesNothing(t *testing.T) {
	testenv.NeedRoot(t)
	before := lookAround(t)
	began := time.Now()
	c, err := Up(t.Context(), Config{Images: []string{image}})
	if err != nil {
		t.Fatal(err)
	}
	up := time.Since(began)
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "pod"},
		Spec:       corev1.PodSpec{NodeName: "node0", Containers: []corev1.Container{{Name: "pause", Image: pauseImage, ImagePullPolicy: corev1.PullNever}}},
	}
	if _, err := c.client.CoreV1().Pods("default").Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	kubectl(t, c, nil, "wait", "--for=condition=Ready", "pod/pod", "--timeout=60s")
	its := belongings(t, filepath.Base(c.dir))
	if len(its.processes) < 15 || len(its.namespaces) < 3+3+3 {
		t.Fatalf("a cluster has %d processes and %d namespaces, which cannot be all", len(its.processes), len(its.namespaces))
	}
	began = time.Now()
	if err := c.Down(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Logf("up in %.1f s, down in %.1f s", up.Seconds(), time.Since(began).Seconds())
	its.checkGone(t, filepath.Base(c.dir))
	if diff := cmp.Diff(before, lookAround(t)); diff != "" {
		t.Errorf("the machine was changed (- before, + after):\n%s", diff)
	}
	if err := c.Down(t.Context()); err != nil {
		t.Errorf("down again: %v", err)
	}
}

func TestSweepRemovesWhatWasKilled(t *testing.T) {
	c := shared(t)
	before := clusters(t)
	child := exec.Command("/proc/self/exe")
	child.Env = append(os.Environ(), childUp+"=1")
	stdin, err := child.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	stdout, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	line, _ := bufio.NewReader(stdout).ReadString('\n')
	if err := child.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = child.Wait()
	if line != "up\n" {
		t.Fatalf("the harness that was to be killed said %q", line)
	}
	var id string
	for _, dir := range clusters(t) {
		if !slices.Contains(before, dir) && strings.Contains(holders(t, dir), "free") {
			id = dir
		}
	}
	if id == "" {
		t.Fatalf("a harness that was killed left nothing to find: %v", clusters(t))
	}
	its := belongings(t, id)
	if len(its.processes) < 15 {
		t.Fatalf("a harness that was killed left %d processes, which cannot be all", len(its.processes))
	}
	if err := Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	its.checkGone(t, id)
	// A cluster that another process owns stays.
	if got := kubectl(t, c, nil, "get", "--raw=/readyz"); got != "ok" {
		t.Errorf("after the sweep the shared cluster says %q", got)
	}
}

// holders checks whether another process owns a cluster's folder.
func holders(t *testing.T, id string) string {
	t.Helper()
	f, err := os.Open(filepath.Join(stateDir, id, ownerFile))
	if errors.Is(err, fs.ErrNotExist) {
		return "" // it is being removed right now
	}
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		return "somebody's"
	}
	return "free"
}

func TestUpThatFailsLeavesNothing(t *testing.T) {
	testenv.NeedRoot(t)
	bad := filepath.Join(t.TempDir(), "bad.tar")
	if err := os.WriteFile(bad, []byte("no archive"), 0o644); err != nil {
		t.Fatal(err)
	}
	before := lookAround(t)
	there := clusters(t)
	_, err := Up(t.Context(), Config{Images: []string{bad}})
	if err == nil || !strings.Contains(err.Error(), "import image "+bad) {
		t.Errorf("with an image that is none: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	log := &cancelAt{text: "the API server answers", cancel: cancel}
	if _, err := Up(ctx, Config{Log: log}); !errors.Is(err, context.Canceled) {
		t.Errorf("interrupted: %v", err)
	}
	for _, id := range clusters(t) {
		if !slices.Contains(there, id) && holders(t, id) == "free" {
			t.Errorf("cluster %s was left", id)
		}
	}
	if diff := cmp.Diff(before, lookAround(t)); diff != "" {
		t.Errorf("the machine was changed (- before, + after):\n%s", diff)
	}
}

// cancelAt calls cancel when a text is written to it.
type cancelAt struct {
	text   string
	cancel func()
}

func (c *cancelAt) Write(b []byte) (int, error) {
	if bytes.Contains(b, []byte(c.text)) {
		c.cancel()
	}
	return len(b), nil
}

func TestConfigIsChecked(t *testing.T) {
	for want, config := range map[string]Config{
		`nodes of a cluster must be 2 to 5, are 1`: {Nodes: 1},
		`nodes of a cluster must be 2 to 5, are 6`: {Nodes: 6},
		`CNI must be one of flannel, flannel-direct, flannel-host-gw, routed, cilium, cilium-vxlan, cilium-kube-proxy, cilium-chained, is "calico"`: {CNI: "calico"},
		`there is no kube-proxy with CNI cilium: its mode must be empty, is "iptables"`:                                                             {CNI: Cilium, Proxy: IPTables},
		`mode of kube-proxy must be nftables or iptables, is "ipvs"`:                                                                                {Proxy: "ipvs"},
	} {
		if _, err := Up(t.Context(), config); err == nil || err.Error() != want {
			t.Errorf("error is %v, want %s", err, want)
		}
	}
}

func TestPartsAreBuiltOnce(t *testing.T) {
	home := t.TempDir()
	cache, err := output(exec.Command("go", "env", "GOCACHE"))
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("GOCACHE", cache)
	t.Setenv("XDG_CACHE_HOME", home)
	small := slices.DeleteFunc(slices.Clone(parts), func(p part) bool { return p.pkg != "./pause" })
	if len(small) != 1 {
		t.Fatalf("small parts are %v", small)
	}
	// What a killed build leaves behind.
	half := filepath.Join(home, "slipstream-cluster/building/half")
	if err := os.MkdirAll(half, 0o755); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	locked := &lockedWriter{w: &log}
	var dirs [2]string
	var callers sync.WaitGroup
	for i := range dirs {
		callers.Go(func() {
			dir, err := buildParts(t.Context(), small, locked)
			if err != nil {
				t.Error(err)
			}
			dirs[i] = dir
		})
	}
	callers.Wait()
	if n := strings.Count(log.String(), "building pause"); n != 1 || dirs[0] != dirs[1] || t.Failed() {
		t.Fatalf("two callers built %d times, in %v", n, dirs)
	}
	entries, err := os.ReadDir(dirs[0])
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if diff := cmp.Diff([]string{"pause", "pause.tar"}, names); diff != "" {
		t.Errorf("parts (- want, + got):\n%s", diff)
	}
	if _, err := os.Stat(filepath.Dir(half)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a build that was cut short is there still: %v", err)
	}
}

type lockedWriter struct {
	mu sync.Mutex
	w  io.Writer
}

func (l *lockedWriter) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(b)
}

func clusters(t *testing.T) (ids []string) {
	t.Helper()
	entries, err := os.ReadDir(stateDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.IsDir() {
			ids = append(ids, e.Name())
		}
	}
	return ids
}

// belonging is what a cluster has on the machine while it is up.
type belonging struct {
	processes  map[int]string  // start times by process ID, which may be reused
	namespaces map[string]bool // as links in /proc name them
	// others are processes outside the cluster. A younger process may be in a namespace whose number was reused.
	others map[int]string
}

func belongings(t *testing.T, id string) belonging {
	t.Helper()
	b := belonging{map[int]string{}, map[string]bool{}, map[int]string{}}
	mine := map[string]bool{}
	for _, kind := range namespaceKinds {
		mine[namespaceOf(os.Getpid(), kind)] = true
	}
	for _, pid := range processes(t) {
		group, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		if err != nil || !strings.Contains(string(group), cgroupName(id)+"/") {
			b.others[pid] = startTime(pid)
			continue
		}
		b.processes[pid] = startTime(pid)
		for _, kind := range namespaceKinds {
			if ns := namespaceOf(pid, kind); ns != "" && !mine[ns] {
				b.namespaces[ns] = true
			}
		}
	}
	return b
}

var namespaceKinds = []string{"net", "mnt", "pid"}

func namespaceOf(pid int, kind string) string {
	ns, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, kind))
	return ns
}

// processes returns the processes that have not ended. A zombie does not count, because its parent may not be ours.
func processes(t *testing.T) (pids []int) {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil && startTime(pid) != "" {
			pids = append(pids, pid)
		}
	}
	return pids
}

// startTime returns the start time of a process, or "" if it has ended.
func startTime(pid int) string {
	stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, after, _ := strings.Cut(string(stat), ") ")
	if fields := strings.Fields(after); len(fields) > 19 && fields[0] != "Z" {
		return fields[19]
	}
	return ""
}

// checkGone checks that nothing of a cluster is left.
func (b belonging) checkGone(t *testing.T, id string) {
	t.Helper()
	// If the parent of a process was killed, the machine's init process reaps it, and its namespaces end only then.
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	var left []string
	if err := poll(ctx, 20*time.Millisecond, func() (bool, error) {
		left = b.left(t)
		return len(left) == 0, nil
	}); err != nil {
		t.Errorf("of the cluster there is left: %s", strings.Join(left, "; "))
	}
	roots, err := hierarchies()
	if err != nil {
		t.Fatal(err)
	}
	for _, root := range roots {
		if _, err := os.Stat(filepath.Join(root, cgroupName(id))); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the cluster's control group in %s is left: %v", root, err)
		}
	}
	if _, err := os.Stat(filepath.Join(stateDir, id)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the cluster's folder is left: %v", err)
	}
}

// left returns the cluster's remaining processes, and other processes in its namespaces.
func (b belonging) left(t *testing.T) (all []string) {
	t.Helper()
	for _, pid := range processes(t) {
		comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		if b.processes[pid] == startTime(pid) {
			all = append(all, fmt.Sprintf("process %d, %s", pid, bytes.TrimSpace(comm)))
		}
		if b.others[pid] != startTime(pid) {
			continue
		}
		for _, kind := range namespaceKinds {
			if ns := namespaceOf(pid, kind); b.namespaces[ns] {
				all = append(all, fmt.Sprintf("%s of process %d, %s", ns, pid, bytes.TrimSpace(comm)))
			}
		}
	}
	return all
}

// lookAround records what a cluster could change on the machine outside its own folders and namespaces: settings,
// devices, mounts, and the default folders of its programs.
func lookAround(t *testing.T) map[string]string {
	t.Helper()
	m := map[string]string{}
	for _, name := range []string{
		"vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops", "kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes",
		"net/ipv4/ip_forward", "net/core/rps_sock_flow_entries", "net/netfilter/nf_conntrack_max", "fs/inotify/max_user_instances",
	} {
		m[name] = read(t, "/proc/sys/"+name)
	}
	links, err := netlink.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		m["device "+l.Attrs().Name] = l.Type()
	}
	for line := range strings.Lines(read(t, "/proc/self/mountinfo")) {
		if fields := strings.Fields(line); !strings.HasPrefix(fields[4], "/run/netns/") { // of other tests
			m["mount "+fields[0]+" "+fields[4]] = strings.Join(fields[5:], " ")
		}
	}
	for _, path := range []string{
		"/etc/cni", "/etc/kubernetes", "/opt/cni", "/usr/libexec/kubernetes", "/run/containerd", "/run/flannel", "/run/xtables.lock",
		"/var/lib/cni", "/var/lib/containerd", "/var/lib/kubelet", "/var/log/containers", "/var/log/pods", "/var/run/kubernetes",
	} {
		_, err := os.Lstat(path)
		m["file "+path] = strconv.FormatBool(err == nil)
	}
	return m
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return string(data)
}
