//go:build linux

package cluster

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/testenv"
)

// The agent without the chart, with only the rights that it uses. testWalk installs the chart, whose rights are compared with
// these.
const agentManifest = `
apiVersion: v1
kind: Namespace
metadata: {name: agents, labels: {pod-security.kubernetes.io/enforce: privileged}}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: agent, namespace: agents}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: agents}
rules:
- {apiGroups: [""], resources: [nodes, pods], verbs: [list, watch]}
- {apiGroups: [slipstream.dev], resources: [accelerationpolicies], verbs: [list, watch]}
- {apiGroups: [slipstream.dev], resources: [accelerationpolicies/status, nodeaccelerations/status], verbs: [patch]}
- {apiGroups: [slipstream.dev], resources: [nodeaccelerations], verbs: [get, list, create, delete]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: agents}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: agents}
subjects: [{kind: ServiceAccount, name: agent, namespace: agents}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: agents, namespace: default}
rules: [{apiGroups: [""], resources: [events], verbs: [create]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: agents, namespace: default}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: agents}
subjects: [{kind: ServiceAccount, name: agent, namespace: agents}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: agent, namespace: agents}
rules:
- {apiGroups: [apps], resources: [daemonsets], resourceNames: [agent], verbs: [get]}
- {apiGroups: [""], resources: [namespaces], resourceNames: [agents], verbs: [get]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: agent, namespace: agents}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: agent}
subjects: [{kind: ServiceAccount, name: agent, namespace: agents}]
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: agent, namespace: agents}
spec:
  selector: {matchLabels: {app: agent}}
  template:
    metadata: {labels: {app: agent}}
    spec:
      serviceAccountName: agent
      hostPID: true
      hostNetwork: true
      containers:
      - name: agent
        image: slipstream.dev/slipstream:test
        imagePullPolicy: Never
        args: [agent, --node, $(NODE_NAME), --daemonset, agents/agent]
        env: [{name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]
        securityContext:
          runAsUser: 0
          readOnlyRootFilesystem: true
          capabilities: {drop: [ALL], add: [SYS_ADMIN, NET_ADMIN, NET_RAW, SYS_PTRACE, DAC_OVERRIDE]}
          seccompProfile: {type: RuntimeDefault}
        resources: {requests: {cpu: 100m, memory: 32Mi}}
        livenessProbe: {httpGet: {host: 127.0.0.1, path: /healthz, port: 9470}}
        volumeMounts:
        - {name: journal, mountPath: /run/slipstream}
        - {name: netns, mountPath: /run/netns, mountPropagation: HostToContainer, readOnly: true}
      volumes:
      - {name: journal, hostPath: {path: /run/slipstream, type: DirectoryOrCreate}}
      - {name: netns, hostPath: {path: /run/netns, type: DirectoryOrCreate}}
`

const webManifest = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: default}
spec:
  replicas: 4
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 1
      containers: [{name: web, image: "slipstream.dev/slipstream:test", imagePullPolicy: Never, args: [worker, --hold]}]
`

func accelerationPolicy(name, spec string) string {
	return fmt.Sprintf("apiVersion: slipstream.dev/v1alpha1\nkind: AccelerationPolicy\nmetadata: {name: %s}\nspec: %s\n", name, spec)
}

type nodeState struct {
	Status struct {
		Settings, Verified int
		Agent              string
		Observed           []struct{ Policy, State, Reason, Message string }
		Conditions         []struct{ Type, Status, Reason string }
	}
}

func stateOf(t testing.TB, c *Cluster, node string) (s nodeState) {
	t.Helper()
	out := kubectl(t, c, nil, "get", "nodeacceleration", node, "--ignore-not-found", "-o", "json")
	if out == "" {
		return s
	}
	if err := json.Unmarshal([]byte(out), &s); err != nil {
		t.Fatal(err)
	}
	return s
}

// wantPods waits until the RPS mask of every web pod's own interface is set, or until none is.
func wantPods(t testing.TB, c *Cluster, what string, pods int, set bool) {
	t.Helper()
	testenv.Eventually(t, time.Minute, what, func() string {
		out := kubectl(t, c, nil, "get", "pods", "-n", "default", "-l", "app=web", "--field-selector", "status.phase=Running",
			"-o", `jsonpath={range .items[*]}{.spec.nodeName} {.status.podIP} {.metadata.deletionTimestamp}{"\n"}{end}`)
		seen := 0
		for line := range strings.Lines(out) {
			f := strings.Fields(line)
			if len(f) != 2 {
				continue // it is being deleted, or has no address yet
			}
			seen++
			space, err := findPod(c.Node(f[0]), f[1])
			if err != nil {
				return err.Error()
			}
			var mask []byte
			if err := onNetns(space, func() error {
				sys, err := netns.Sysfs()
				if err != nil {
					return err
				}
				defer sys.Close()
				mask, err = sys.ReadFile("class/net/eth0/queues/rx-0/rps_cpus")
				return err
			}); err != nil {
				return err.Error()
			}
			if is := strings.Trim(string(mask), "0,\n") != ""; is != set {
				return fmt.Sprintf("the mask of %s is %s", f[1], mask)
			}
		}
		if seen != pods {
			return fmt.Sprintf("%d pods run, want %d", seen, pods)
		}
		return ""
	})
}

// everywhere selects every node at once. The test of rollouts covers several steps.
const everywhere = "all: true, rollout: {stepPercent: 100, pauseSeconds: 1}, "

const policyForAll = "{" + everywhere + "accelerate: [{rps: {devices: [nic, overlay, host-veth, pod], cpus: all}}]}"

// agentPatience is longer than any interval of an agent. An agent writes counts that changed earlier after half a minute, then
// after one, two, four and five minutes, each up to a fifth sooner or later. If its probe of the fast path finds its own packets
// late, as it may beside five clusters, it probes again up to six minutes later.
const agentPatience = 7 * time.Minute

// startAgent runs an agent on every node until the test ends.
func startAgent(t testing.TB, c *Cluster) {
	t.Helper()
	root, err := checkout(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	crds := filepath.Join(root, "charts/slipstream/crds")
	kubectl(t, c, nil, "apply", "-f", crds)
	t.Cleanup(func() { kubectl(t, c, nil, "delete", "-f", crds, "--ignore-not-found") })
	kubectl(t, c, nil, "wait", "--for=condition=Established", "--timeout=60s", "-f", crds)
	kubectl(t, c, strings.NewReader(agentManifest), "apply", "-f", "-")
	t.Cleanup(func() {
		kubectl(t, c, strings.NewReader(agentManifest), "delete", "-f", "-", "--ignore-not-found", "--timeout=120s")
	})
	kubectl(t, c, nil, "rollout", "status", "-n", "agents", "daemonset/agent", "--timeout=120s")
}

func testAgent(t *testing.T, c *Cluster) {
	before, programs := map[string]string{}, map[string][]string{}
	for _, n := range []string{"node0", "node1"} {
		before[n], programs[n] = steering(t, c.Node(n)), programsOn(t, c.Node(n))
	}
	startAgent(t, c)
	apply := func(text string) { kubectl(t, c, strings.NewReader(text), "apply", "-f", "-") }
	apply(webManifest)
	kubectl(t, c, nil, "rollout", "status", "deployment/web", "--timeout=120s")

	testFastpath(t, c, "vxlan")

	apply(accelerationPolicy("all", policyForAll))
	wantPods(t, c, "policy on", 4, true)

	// Add pods, up to thirty in all.
	kubectl(t, c, nil, "scale", "deployment/web", "--replicas=30")
	kubectl(t, c, nil, "rollout", "status", "deployment/web", "--timeout=180s")
	wantPods(t, c, "new pods", 30, true)
	for n := range before {
		testenv.Eventually(t, agentPatience, "state of "+n, func() string {
			s := stateOf(t, c, n).Status
			if len(s.Observed) != 1 || s.Observed[0].State != "applied" || s.Settings < 10 || s.Verified != s.Settings {
				return fmt.Sprintf("%+v", s)
			}
			return ""
		})
	}
	for n := range before {
		value := agentMetrics(t, c.Node(n))
		t.Logf("%s: %.0f pods; of %.0f that came, %.0f were accelerated within 50 ms of their veth", n, value("slipstream_pods"),
			value("slipstream_pod_latency_seconds_count"), value(`slipstream_pod_latency_seconds_bucket{le="0.05"}`))
		if value("slipstream_errors_total") != 0 || value("slipstream_pods_missing") != 0 {
			t.Errorf("%s: errors or missing pods", n)
		}
	}

	// A run that applies accelerators refuses nodes that have some, before it creates anything, and its dry run says the same.
	for _, dry := range []string{"--dry-run=true", "--dry-run=false"} {
		v := invoke(t, c.Kubeconfig(), "run", experimentFile(t, "", "  - {name: rps, accelerate: [{rps: {devices: [nic], cpus: all}}]}", brief), "--out", t.TempDir(), dry)
		if code := v.exit(t, time.Minute); code != 1 || !strings.Contains(v.said(), "node node0 is accelerated already, by policy all") {
			t.Errorf("%s: exit %d\n%s", dry, code, v.said())
		}
	}

	// The doctor says that they have some, and looks into them all the same. With --all-nodes it prints no facts.
	for _, args := range [][]string{{"--probe"}, {"--probe", "--all-nodes"}} {
		code, d := diagnose(t, c, args...)
		facts := slices.ContainsFunc(d.Facts, func(f fact) bool { return f.Where == "node0" })
		if code != 0 || len(d.Findings) != 1 || d.Findings[0].Rule != "accelerated" || facts != (len(args) == 1) {
			t.Errorf("doctor %v of accelerated nodes: exit code %d, facts of node0: %t, found %+v", args, code, facts, d.Findings)
		}
	}

	// Policies without a clear choice of nodes, and accelerators that no agent could apply.
	for spec, want := range map[string]string{
		"{accelerate: [{fastpath: {}}]}":                                       "either nodeSelector with labels that they have, or all: true",
		"{nodeSelector: {}, accelerate: [{fastpath: {}}]}":                     "either nodeSelector with labels that they have, or all: true",
		"{nodeSelector: {a: b}, all: true, accelerate: [{fastpath: {}}]}":      "either nodeSelector with labels that they have, or all: true",
		"{all: true, rollout: {stepPercent: 0}, accelerate: [{fastpath: {}}]}": "spec.rollout.stepPercent",
		"{all: true, accelerate: [{rps: {devices: [eth0], cpus: all}}]}":       `spec.accelerate[0].rps.devices[0]: Unsupported value: "eth0"`,
		"{all: true, accelerate: [{rps: {devices: [], cpus: all}}]}":           "spec.accelerate[0].rps.devices",
		"{all: true, accelerate: [{rps: {devices: [nic], cpus: foo}}]}":        "spec.accelerate[0].rps.cpus",
		"{all: true, accelerate: [{rfs: {devices: [nic], entries: 1000}}]}":    "spec.accelerate[0].rfs.entries: Unsupported value: 1000",
	} {
		cmd := exec.CommandContext(t.Context(), filepath.Join(c.parts, "kubectl"), "--kubeconfig", c.Kubeconfig(), "apply", "-f", "-")
		cmd.Stdin = strings.NewReader(accelerationPolicy("unclear", spec))
		if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), want) {
			t.Errorf("%s: %v, no %q in %s", spec, err, want, out)
		}
	}

	// A policy that contradicts an earlier one, one that no node can apply, and one that selects no node.
	apply(accelerationPolicy("later", "{"+everywhere+"accelerate: [{rps: {devices: [nic], cpus: \"0\"}}]}"))
	apply(accelerationPolicy("impossible", "{"+everywhere+"accelerate: [{rps: {devices: [nic], cpus: \"8000\"}}]}"))
	apply(accelerationPolicy("nowhere", "{nodeSelector: {no: where}, accelerate: [{rps: {devices: [nic], cpus: all}}]}"))
	if out := kubectl(t, c, nil, "get", "accelerationpolicy", "nowhere", "-o", "jsonpath={.status.conditions[*].status}"); out != "Unknown Unknown" {
		t.Errorf("before any agent has looked, the conditions are %q", out)
	}
	testenv.Eventually(t, time.Minute, "reasons", func() string {
		reasons := make(map[string]string)
		for _, o := range stateOf(t, c, "node0").Status.Observed {
			reasons[o.Policy] = o.Reason
		}
		return cmp.Diff(map[string]string{"all": "Applied", "later": "Conflict", "impossible": "Impossible"}, reasons)
	})
	testenv.Eventually(t, time.Minute, "conditions", func() string {
		return cmp.Diff("all True\nimpossible True\nlater True\nnowhere False", kubectl(t, c, nil, "get", "accelerationpolicies",
			"-o", `jsonpath={range .items[*]}{.metadata.name} {.status.conditions[?(@.type=="Selected")].status}{"\n"}{end}`))
	})
	// What kubectl prints hides no failure.
	testenv.Eventually(t, 2*time.Minute, "columns", func() string {
		out := kubectl(t, c, nil, "get", "accelerationpolicies,nodeaccelerations")
		for _, row := range []string{
			`/all +True +True +2 +0 +Complete`, `/impossible +False +True +2 +2 `, `/later +False +True +2 +2 `, `/nowhere +Unknown +False `,
			`/node0 +False +(later failed \(Conflict\)|impossible failed \(Impossible\)|, ){3}, all applied `, // the two may have the same age
		} {
			if !regexp.MustCompile(row).MatchString(out) {
				return "no " + row + " in\n" + out
			}
		}
		return ""
	})
	testenv.Eventually(t, time.Minute, "events", func() string {
		if out := kubectl(t, c, nil, "get", "events", "-n", "default"); !strings.Contains(out, "policy later: policy all takes precedence") {
			return out
		}
		return ""
	})
	kubectl(t, c, nil, "delete", "accelerationpolicies", "later", "impossible", "nowhere")

	// An upgrade: the agents restart, and the settings stay.
	kubectl(t, c, nil, "rollout", "restart", "-n", "agents", "daemonset/agent")
	kubectl(t, c, nil, "rollout", "status", "-n", "agents", "daemonset/agent", "--timeout=120s")
	wantPods(t, c, "after an upgrade", 30, true)

	kubectl(t, c, nil, "scale", "deployment/web", "--replicas=4")
	kubectl(t, c, nil, "rollout", "status", "deployment/web", "--timeout=120s")
	kubectl(t, c, nil, "delete", "accelerationpolicy", "all")
	wantPods(t, c, "policy off", 4, false)

	// Uninstall while policies are applied, and delete the agents' rights at the same moment.
	apply(accelerationPolicy("all", policyForAll))
	apply(accelerationPolicy("fast", fastForAll))
	wantPods(t, c, "on again", 4, true)
	near, far := webPodOn(t, c, "node0"), webPodOn(t, c, "node1")
	trip := talk(t, near, listen(t, far, "4001"), net.JoinHostPort(far.ip, "4001"))
	for n := range before {
		testenv.Eventually(t, agentPatience, "programs on "+n, func() string {
			for range 200 {
				trip()
			}
			if slices.Equal(programs[n], programsOn(t, c.Node(n))) {
				return "none"
			}
			return ""
		})
	}
	kubectl(t, c, strings.NewReader(agentManifest), "delete", "-f", "-", "--timeout=120s")
	wantPods(t, c, "uninstalled", 4, false)
	kubectl(t, c, strings.NewReader(webManifest), "delete", "-f", "-", "--timeout=120s")
	for n, was := range before {
		testenv.Eventually(t, time.Minute, n+" as before", func() string {
			return cmp.Diff(was, steering(t, c.Node(n))) + cmp.Diff(programs[n], programsOn(t, c.Node(n)))
		})
	}
}

// testAgentNamespace checks that agents restore their nodes when their namespace is deleted, although each agent stops while its
// DaemonSet still exists. Before that, the DaemonSet selects no node for a while: the settings stay, and doctor names the nodes.
func testAgentNamespace(t *testing.T, c *Cluster) {
	nodes := []string{"node0", "node1"}
	before := map[string]string{}
	for _, n := range nodes {
		before[n] = steering(t, c.Node(n))
	}
	startAgent(t, c)
	kubectl(t, c, strings.NewReader(accelerationPolicy("nic", "{"+everywhere+"accelerate: [{rps: {devices: [nic, overlay], cpus: all}}]}")), "apply", "-f", "-")
	applied := func() {
		t.Helper()
		for _, n := range nodes {
			testenv.Eventually(t, agentPatience, "state of "+n, func() string {
				s := stateOf(t, c, n).Status
				if len(s.Observed) != 1 || s.Observed[0].State != "applied" || s.Settings == 0 || before[n] == steering(t, c.Node(n)) {
					return fmt.Sprintf("%+v", s)
				}
				return ""
			})
		}
	}
	applied()
	gone := func(line string) bool { return strings.HasPrefix(line, "warning agent-gone node0, node1: ") }
	if _, found := doctorSays(t, c); slices.ContainsFunc(found, gone) {
		t.Errorf("while the agents run, doctor finds %q", found)
	}

	where := func(selector string) {
		kubectl(t, c, nil, "patch", "daemonset", "agent", "-n", "agents", "-p", `{"spec":{"template":{"spec":{"nodeSelector":`+selector+`}}}}`)
	}
	where(`{"no":"where"}`)
	kubectl(t, c, nil, "wait", "-n", "agents", "--for=delete", "pod", "-l", "app=agent", "--timeout=120s")
	if _, found := doctorSays(t, c); !slices.ContainsFunc(found, gone) {
		t.Errorf("without agents, doctor finds %q", found)
	}
	applied()
	where("null")
	kubectl(t, c, nil, "rollout", "status", "-n", "agents", "daemonset/agent", "--timeout=120s")

	kubectl(t, c, nil, "delete", "namespace", "agents", "--timeout=120s")
	for n, was := range before {
		testenv.Eventually(t, time.Minute, n+" as before", func() string { return cmp.Diff(was, steering(t, c.Node(n))) })
	}
	if left := kubectl(t, c, nil, "get", "nodeaccelerations", "-o", "name"); left != "" {
		t.Errorf("agents that are gone left %s", left)
	}
}

// agentMetrics scrapes the agent of a node, and returns a function that gives the value of a metric.
func agentMetrics(t testing.TB, n *Node) func(metric string) float64 {
	t.Helper()
	text, err := scrape(n)
	if err != nil {
		t.Fatal(err)
	}
	return func(name string) float64 {
		t.Helper()
		v, ok := metricIn(text, name)
		if !ok {
			t.Fatalf("no %s in\n%s", name, text)
		}
		return v
	}
}

// scrape returns the metrics of a node's agent.
func scrape(n *Node) (text string, err error) {
	err = onNetns(n.Netns(), func() error {
		conn, err := net.DialTimeout("tcp", "127.0.0.1:9469", 5*time.Second) // on this thread, unlike http's own dialler
		if err != nil {
			return err
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
		request, err := http.NewRequest("GET", "http://127.0.0.1:9469/metrics", nil)
		if err != nil {
			return err
		}
		if err := request.Write(conn); err != nil {
			return err
		}
		r, err := http.ReadResponse(bufio.NewReader(conn), request)
		if err != nil {
			return err
		}
		defer r.Body.Close()
		b, err := io.ReadAll(r.Body)
		text = string(b)
		return err
	})
	return text, err
}

// metricIn returns the value of a metric, and whether the text contains it.
func metricIn(text, name string) (v float64, ok bool) {
	m := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(name) + ` (.*)$`).FindStringSubmatch(text)
	if m == nil {
		return 0, false
	}
	v, err := strconv.ParseFloat(m[1], 64)
	return v, err == nil
}

// carriedIn returns how many packets of all kinds took the fast path one way, out or in.
func carriedIn(text, way string) (all float64) {
	for _, kind := range []string{"vxlan", "routed", "local"} {
		all += carriedOf(text, kind, way)
	}
	return all
}

// carriedOf returns how many packets of a kind took the fast path one way.
func carriedOf(text, kind, way string) float64 {
	n, _ := metricIn(text, `slipstream_fastpath_packets_total{kind="`+kind+`",reason="fast-`+way+`"}`)
	return n
}

// agentOn returns the process ID of the agent on a node, or 0 if there is none.
func agentOn(n *Node) (pid int, err error) {
	pids, err := processesOn(n, func(args []string) bool { return len(args) > 1 && args[0] == "/slipstream" && args[1] == "agent" })
	if err != nil || len(pids) == 0 {
		return 0, err
	}
	return pids[0], nil
}

// processesOn returns the process IDs of the programs in a node's network namespace whose arguments match.
func processesOn(n *Node, match func(args []string) bool) (pids []int, err error) {
	where, err := os.Readlink(n.Netns())
	if err != nil {
		return nil, err
	}
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		// An error means that the process has ended.
		cmdline, _ := os.ReadFile(file)
		netns, _ := os.Readlink(filepath.Join(filepath.Dir(file), "ns/net"))
		if netns == where && match(strings.Split(string(cmdline), "\x00")) {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
			if err != nil {
				return nil, err
			}
			pids = append(pids, pid)
		}
	}
	return pids, nil
}
