//go:build linux

package cluster

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/testenv"
)

// steering returns every receive steering setting of a node, in its own namespace and in
// each named one. It leaves out the bridge, which appears with the node's first pod, and
// the flow table, which belongs to the machine.
func steering(t testing.TB, n *Node) string {
	t.Helper()
	const list = `grep -H . /sys/class/net/*/queues/rx-*/rps_cpus /sys/class/net/*/queues/rx-*/rps_flow_cnt`
	out, err := output(n.Command(t.Context(), "sh", "-c", list+`
		for ns in /run/netns/*; do
			test -e "$ns" || continue
			echo "$ns"
			nsenter --net="$ns" unshare --mount sh -c 'mount -t sysfs sysfs /sys && `+list+`' || true
		done`))
	if err != nil {
		t.Fatal(err)
	}
	return regexp.MustCompile(`(?m)^.*/cni0/.*\n`).ReplaceAllString(out+"\n", "")
}

// Tests that change the machine's flow table hold flowTableLock, because each of them
// compares the table before and after.
var flowTableLock sync.Mutex

// testWalk runs the commands of docs/tutorial/kubernetes.md, in order, as a reader would.
func testWalk(t *testing.T, c *Cluster) {
	blocks := regexp.MustCompile("(?s)```sh\n(.*?)```").FindAllStringSubmatch(readPage(t, "docs/tutorial/kubernetes.md"), -1)
	if len(blocks) < 8 {
		t.Fatalf("the page has %d blocks of commands", len(blocks))
	}

	flowTableLock.Lock()
	t.Cleanup(flowTableLock.Unlock)
	before, table := []string{steering(t, c.Node("node0")), steering(t, c.Node("node1"))}, read(t, flowTable)

	// All commands run in one shell, which prints where each block begins.
	var script strings.Builder
	for _, b := range blocks {
		script.WriteString("echo '==='\n" + b[1])
	}
	said := asReader(t, c, script.String())
	for _, want := range []string{
		"stream throughput, Gb/s", // the verdicts of the run
		"## Comparison",           // the report
		"engine-parity",           // the output of the plugin
		"nodeacceleration.slipstream.dev/node0 condition met", // the policy is applied
		`release "slipstream" uninstalled`,                    // and removed
	} {
		if !strings.Contains(said, want) {
			t.Errorf("nothing says %q in:\n%s", want, said)
		}
	}
	if got := kubectl(t, c, nil, "get", "namespaces", "-o", "name"); strings.Contains(got, "slipstream") {
		t.Errorf("namespaces are left:\n%s", got)
	}
	for i, name := range []string{"node0", "node1"} {
		if diff := cmp.Diff(before[i], steering(t, c.Node(name))); diff != "" {
			t.Errorf("%s is not as before:\n%s", name, diff)
		}
	}
	if now := read(t, flowTable); now != table {
		t.Errorf("the machine's flow table has %s entries, had %s", now, table)
	}
}

// readPage returns a page of the documents.
func readPage(t testing.TB, name string) string {
	t.Helper()
	root, err := checkout(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(page)
}

// asReader runs commands of a page as a reader would: in a folder with the chart, with the programs in PATH. It returns what
// they print.
func asReader(t testing.TB, c *Cluster, script string) string {
	t.Helper()
	helm := testenv.NeedProgram(t, "helm", "make bin/tools/helm")
	root, err := checkout(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	bin := filepath.Join(dir, "bin")
	for name, path := range map[string]string{
		"bin/slipstream": program, "bin/kubectl-slipstream": program, "bin/helm": helm,
		"bin/kubectl": filepath.Join(c.parts, "kubectl"), "charts": filepath.Join(root, "charts"),
	} {
		to := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(path, to); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", script)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.Kubeconfig(), "PATH="+bin+":"+os.Getenv("PATH"), "HELM_CACHE_HOME="+dir, "HELM_CONFIG_HOME="+dir, "HELM_DATA_HOME="+dir)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return string(out)
}
