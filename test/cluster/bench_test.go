//go:build linux

package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/testenv"
)

// thirty returns the manifest of 30 pods on node1, and a function that reads the
// agent's metrics while a policy accelerates all pods.
func thirty(b *testing.B, c *Cluster) (manifest string, metrics func() func(string) float64) {
	b.Helper()
	startAgent(b, c)
	kubectl(b, c, strings.NewReader(accelerationPolicy("all", policyForAll)), "apply", "-f", "-")
	b.Cleanup(func() { kubectl(b, c, nil, "delete", "accelerationpolicy", "all") })
	manifest = strings.Replace(webManifest, "    spec:\n", "    spec:\n      nodeName: node1\n", 1)
	return strings.Replace(manifest, "replicas: 4", "replicas: 30", 1), func() func(string) float64 { return agentMetrics(b, c.Node("node1")) }
}

// BenchmarkNewPods starts 30 pods on one node at once. It reports how many of their
// interfaces were accelerated within 10, 20, 50 and 100 ms of the first message about
// their veth.
func BenchmarkNewPods(b *testing.B) {
	c := shared(b)
	manifest, metrics := thirty(b, c)
	before := metrics()
	for b.Loop() {
		kubectl(b, c, strings.NewReader(manifest), "apply", "-f", "-")
		wantPods(b, c, "new pods", 30, true)
		kubectl(b, c, strings.NewReader(manifest), "delete", "-f", "-", "--timeout=120s")
		kubectl(b, c, nil, "wait", "--for=delete", "pod", "-l", "app=web", "--timeout=120s")
	}
	came := metrics()
	added := func(name string) float64 { return came(name) - before(name) }
	b.ReportMetric(added("slipstream_pod_latency_seconds_count"), "new-pods")
	for _, ms := range []int{10, 20, 50, 100} {
		b.ReportMetric(added(fmt.Sprintf(`slipstream_pod_latency_seconds_bucket{le="%g"}`, float64(ms)/1000)), fmt.Sprintf("within-%dms", ms))
	}
}

// BenchmarkAgent reports the cost of an idle agent, including its watches of the API
// server, on a node with 30 pods, with and without 1,000 other veths. It leaves out
// the garbage of the start, which an agent returns after ten seconds.
func BenchmarkAgent(b *testing.B) {
	c := shared(b)
	n := c.Node("node1")
	manifest, _ := thirty(b, c)
	kubectl(b, c, strings.NewReader(manifest), "apply", "-f", "-")
	b.Cleanup(func() { kubectl(b, c, strings.NewReader(manifest), "delete", "-f", "-", "--timeout=120s") })
	wantPods(b, c, "new pods", 30, true)
	pid, err := agentOn(n)
	if err != nil || pid == 0 {
		b.Fatalf("no agent on node1: %v", err)
	}
	for _, veths := range []int{0, 1000} {
		b.Run(fmt.Sprintf("pods=30/veths=%d", veths), func(b *testing.B) {
			if veths > 0 {
				if _, err := output(n.Command(b.Context(), "sh", "-c", fmt.Sprintf(`ip netns add idle &&
					for i in $(seq %d); do echo "link add idle$i type veth peer name end$i netns idle"; done | ip -batch -`, veths))); err != nil {
					b.Fatal(err)
				}
				b.Cleanup(func() {
					if _, err := output(n.Command(context.Background(), "ip", "netns", "del", "idle")); err != nil {
						b.Error(err)
					}
				})
				testenv.Eventually(b, time.Minute, "veths", func() string {
					if s := stateOf(b, c, "node1").Status; s.Settings < veths || s.Verified != s.Settings {
						return fmt.Sprintf("%d of %d settings verified", s.Verified, s.Settings)
					}
					return ""
				})
			}
			time.Sleep(90 * time.Second)
			const window = 2 * time.Minute
			var cpu, rss float64
			for b.Loop() {
				before := agentMetrics(b, n)("process_cpu_seconds_total")
				for end := time.Now().Add(window); time.Now().Before(end); time.Sleep(5 * time.Second) {
					now, err := UsageOf(pid)
					if err != nil {
						b.Fatal(err)
					}
					rss = max(rss, now.MiB)
				}
				cpu += agentMetrics(b, n)("process_cpu_seconds_total") - before
			}
			b.ReportMetric(cpu/window.Seconds()/float64(b.N)*1000, "millicores")
			b.ReportMetric(rss, "resident-MiB")
		})
	}
}

// comparedVariants run both in the lab and in the cluster.
var comparedVariants = []string{
	"{name: baseline}", "{name: native, path: {native: {}}}",
	"{name: rps, accelerate: [{rps: {devices: [nic, overlay, host-veth], cpus: all}}]}",
	"{name: rps+, accelerate: [{rps: {devices: [nic, overlay, host-veth, pod], cpus: all}}]}",
	"{name: rfs, accelerate: [{rfs: {devices: [nic, overlay, host-veth]}}]}",
	"{name: rfs+, accelerate: [{rfs: {devices: [nic, overlay, host-veth, pod]}}]}",
}

// BenchmarkLab runs one experiment in a lab with flannel's shape and in a cluster
// with flannel, in alternating blocks. For each cell it reports the ratio of the
// cluster's figure to the lab's. It pins the cluster's pods to CPUs as a lab does
// with its own; Kubernetes would leave the choice to the scheduler.
//
// It also measures two reasons for a difference: a lab whose workers are each in
// control groups like a container's, for the first two variants, and the CPU time of
// the cluster's own processes.
func BenchmarkLab(b *testing.B) {
	c := shared(b)
	sysctl, err := os.ReadFile("/proc/sys/net/ipv4/tcp_congestion_control")
	if err != nil {
		b.Fatal(err)
	}
	lab := "target: {lab: {congestionControl: " + strings.TrimSpace(string(sysctl)) + "}}, path: {vxlan: {shape: flannel}}"
	places := []struct {
		name, target string
		variants     []string
		look         func(*invocation)
		// own is the CPU time of the cluster's processes, and took the duration.
		own, took time.Duration
	}{
		{name: "lab", target: lab, variants: comparedVariants, look: func(*invocation) {}},
		{name: "cluster", target: "target: {kubernetes: {clientNode: node0, serverNode: node1}}, path: {pod: {}}", variants: comparedVariants,
			look: func(v *invocation) { placePods(b, c, v.ended) }},
		{name: "lab in groups", target: lab, variants: comparedVariants[:2], look: func(v *invocation) { groupWorkers(b, c, v) }},
	}
	var trials []record.Trial
	block := 0
	for b.Loop() {
		block++
		for i := range places {
			p := &places[(block+i)%len(places)]
			out := b.TempDir()
			own, began := ownTime(b, c), time.Now()
			v := invoke(b, c.Kubeconfig(), "run", sideBySide(b, p.target, p.variants), "--out", out)
			p.look(v)
			if code := v.exit(b, 5*time.Minute); code != 0 {
				b.Fatalf("%s: exit %d:\n%s", p.name, code, v.said())
			}
			p.own += ownTime(b, c) - own
			p.took += time.Since(began)
			_, done := resultsOf(b, out)
			for _, t := range done {
				t.Block, t.Variant = block, p.name+" "+t.Variant
				trials = append(trials, t)
			}
		}
	}
	for _, p := range places {
		b.ReportMetric(p.own.Seconds()/p.took.Seconds(), strings.ReplaceAll(p.name, " ", "-")+"-own-CPUs")
	}
	if block < 2 {
		return // too few blocks for an interval
	}
	exp, err := spec.Parse("experiment.yaml", []byte(sideBySideText(lab, comparedVariants)), nil)
	if err != nil {
		b.Fatal(err)
	}
	var variants []spec.Variant
	for i, v := range exp.Spec.Variants {
		of := "lab " + v.Name
		variants = append(variants, spec.Variant{Name: of}, spec.Variant{Name: "cluster " + v.Name, Versus: of})
		if i < 2 {
			variants = append(variants, spec.Variant{Name: "lab in groups " + v.Name, Versus: of})
		}
	}
	exp.Spec.Variants, exp.Spec.Baseline = variants, "lab baseline"
	summary, err := stats.Analyze(exp, trials)
	if err != nil {
		b.Fatal(err)
	}
	rows := slices.DeleteFunc(summary.Rows, func(r stats.Row) bool {
		return r.Versus == nil || !strings.HasPrefix(r.Variant, "cluster") && !strings.HasPrefix(r.Variant, "lab in groups") || r.Metric == metrics.LatencyP999
	})
	slices.SortStableFunc(rows, func(x, y stats.Row) int {
		return cmp.Or(cmp.Compare(x.Metric, y.Metric), cmp.Compare(x.Pairs, y.Pairs))
	})
	for _, r := range rows { // the log of a benchmark is cut after ten lines
		fmt.Printf("%-8s × %d  %-14s  %-22s  %.4g %s, of the lab's %.3f (%.3f–%.3f), n %d\n",
			r.Workload, r.Pairs, r.Metric, r.Variant, r.Mean, r.Unit, r.Versus.Ratio, r.Versus.CI95[0], r.Versus.CI95[1], r.Versus.N)
	}
}

// ownTime returns the CPU time that the processes of a cluster have used, without
// those in pods.
func ownTime(b *testing.B, c *Cluster) time.Duration {
	b.Helper()
	v2, err := unified()
	if err != nil {
		b.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(v2, cgroupName(filepath.Base(c.dir)), "processes", "cpu.stat"))
	if err != nil {
		b.Fatal(err)
	}
	var us int64
	if _, err := fmt.Sscanf(string(text), "usage_usec %d", &us); err != nil {
		b.Fatalf("cpu.stat: %v", err)
	}
	return time.Duration(us) * time.Microsecond
}

// groupWorkers puts each worker of a run into its own control groups, nested as
// deeply as those of a container in a pod, until the run has ended.
func groupWorkers(b *testing.B, c *Cluster, v *invocation) {
	b.Helper()
	all, err := hierarchies()
	if err != nil {
		b.Fatal(err)
	}
	all = slices.DeleteFunc(all, func(root string) bool { return filepath.Base(root) == "cpuset" }) // a lab pins its workers itself
	top := filepath.Join(cgroupName(filepath.Base(c.dir)), "node0", "lab")
	b.Cleanup(func() {
		for _, root := range all {
			if err := removeGroup(filepath.Join(root, top)); err != nil {
				b.Error(err)
			}
		}
	})
	grouped := make(map[string]bool)
	for tick := time.NewTicker(100 * time.Millisecond); ; {
		select {
		case <-v.ended:
			tick.Stop()
			return
		case <-tick.C:
		}
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", v.Process.Pid))
		if err != nil {
			b.Fatal(err)
		}
		var children []string
		for _, file := range threads {
			text, _ := os.ReadFile(file) // an error means that the thread has ended
			children = append(children, strings.Fields(string(text))...)
		}
		for _, pid := range children {
			cmdline, err := os.ReadFile("/proc/" + pid + "/cmdline")
			if err != nil || !strings.Contains(string(cmdline), "\x00worker\x00") || grouped[pid] {
				continue
			}
			grouped[pid] = true
			for _, root := range all {
				dir := filepath.Join(root, top)
				for _, level := range []string{"", "besteffort", "pod" + pid, "container"} {
					parent := dir
					dir = filepath.Join(dir, level)
					if level == "" {
						parent = filepath.Dir(dir)
					}
					err := os.Mkdir(dir, 0o755)
					if err == nil {
						err = delegate(parent, dir)
					}
					if err != nil && !errors.Is(err, fs.ErrExist) {
						b.Fatal(err)
					}
				}
				if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(pid), 0); err != nil && !errors.Is(err, unix.ESRCH) {
					b.Fatal(err)
				}
			}
		}
	}
}

// sideBySide writes the experiment for a target.
func sideBySide(b *testing.B, target string, variants []string) string {
	b.Helper()
	file := filepath.Join(b.TempDir(), "quick.yaml")
	if err := os.WriteFile(file, []byte(sideBySideText(target, variants)), 0o644); err != nil {
		b.Fatal(err)
	}
	return file
}

func sideBySideText(target string, variants []string) string {
	return fmt.Sprintf(`{apiVersion: slipstream.dev/v1alpha1, kind: Experiment, metadata: {name: quick}, spec: {%s,
baseline: baseline, variants: [%s],
workloads: [{name: stream, stream: {warmup: 300ms, duration: 1s}}, {name: pingpong, pingpong: {warmup: 300ms, duration: 1s}}],
pairs: [1, 4], runs: 1}}
`, target, strings.Join(variants, ", "))
}

// placePods pins the pods of a run's pairs to the CPUs that a lab of two nodes with
// shared CPUs would choose, until the run has ended.
func placePods(b *testing.B, c *Cluster, ended <-chan struct{}) {
	b.Helper()
	cpuset := filepath.Join(cgroupDir, "cpuset")
	if _, err := os.Stat(cpuset); err != nil {
		cpuset = cgroupDir // version 2
	}
	role := regexp.MustCompile(`^(client|server)-([0-9]+)`)
	want := make(map[string]int) // by UID
	for tick := time.NewTicker(200 * time.Millisecond); ; {
		select {
		case <-ended:
			tick.Stop()
			return
		case <-tick.C:
		}
		pods, err := filepath.Glob(filepath.Join(cpuset, cgroupName(filepath.Base(c.dir)), "node*", "kubepods", "*", "pod*"))
		if err != nil {
			b.Fatal(err)
		}
		for _, pod := range pods {
			uid := strings.TrimPrefix(filepath.Base(pod), "pod")
			if _, known := want[uid]; !known {
				want[uid] = -1
				list := kubectl(b, c, nil, "get", "pods", "-A", "-o", `jsonpath={range .items[*]}{.metadata.uid} {.metadata.name}{"\n"}{end}`)
				_, name, _ := strings.Cut(list, uid+" ")
				if m := role.FindStringSubmatch(name); m != nil {
					pair, err := strconv.Atoi(m[2])
					if err != nil {
						b.Fatal(err)
					}
					want[uid] = (pair + strings.Index("cs", m[1][:1])) % runtime.NumCPU()
				}
			}
			if want[uid] < 0 {
				continue
			}
			// The CPUs of a child must be a subset of its parent's, so the loop starts with
			// the leaves. A group that does not exist yet, or cannot be written, is retried in
			// the next round.
			var groups []string
			_ = filepath.WalkDir(pod, func(path string, d os.DirEntry, err error) error {
				if err == nil && d.IsDir() {
					groups = append(groups, path)
				}
				return nil
			})
			// Writing moves every thread of the group, even to the CPU that it is on.
			cpu := strconv.Itoa(want[uid])
			for _, g := range slices.Backward(groups) {
				file := filepath.Join(g, "cpuset.cpus")
				if text, err := os.ReadFile(file); err == nil && strings.TrimSpace(string(text)) != cpu {
					_ = os.WriteFile(file, []byte(cpu), 0)
				}
			}
		}
	}
}
