//go:build linux

package cluster

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/stats"
)

// BenchmarkAgent puts 30 pods on one node at once, and then 1,000 veths beside them:
// how soon after its veth a pod is accelerated, and what an agent costs that has
// nothing to do but to look on, watches of the API server included. The start's garbage
// is not idling: an agent has given it back by its third verification.
func BenchmarkAgent(b *testing.B) {
	c := shared(b)
	startAgent(b, c)
	n := c.Node("node1")
	manifest := strings.Replace(webManifest, "    spec:\n", "    spec:\n      nodeName: node1\n", 1)
	apply := func(text string) { kubectl(b, c, strings.NewReader(text), "apply", "-f", "-") }
	apply(accelerationPolicy("all", policyForAll))
	b.Cleanup(func() { kubectl(b, c, nil, "delete", "accelerationpolicy", "all") })
	apply(strings.Replace(manifest, "replicas: 4", "replicas: 30", 1))
	b.Cleanup(func() { kubectl(b, c, strings.NewReader(manifest), "delete", "-f", "-", "--timeout=120s") })
	wantPods(b, c, "new pods", 30, true)
	came := agentMetrics(b, n)

	pid, err := output(n.Command(b.Context(), "sh", "-c", `for p in /proc/[0-9]*; do
		case "$(tr '\0' ' ' <$p/cmdline 2>/dev/null)" in "/slipstream agent "*) echo ${p#/proc/};; esac; done`))
	if err != nil {
		b.Fatal(err)
	}
	pid = strings.TrimSpace(pid)
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
				until(b, "veths", func() string {
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
					rss = max(rss, residentMiB(b, n, pid))
				}
				cpu += agentMetrics(b, n)("process_cpu_seconds_total") - before
			}
			b.ReportMetric(cpu/window.Seconds()/float64(b.N)*1000, "millicores")
			b.ReportMetric(rss, "resident-MiB")
			b.ReportMetric(came("slipstream_pod_latency_seconds_count"), "new-pods")
			b.ReportMetric(came(`slipstream_pod_latency_seconds_bucket{le="0.05"}`), "within-50ms")
		})
	}
}

// residentMiB is the memory of a process on a node.
func residentMiB(t testing.TB, n *Node, pid string) float64 {
	t.Helper()
	out, err := output(n.Command(t.Context(), "awk", "/^VmRSS:/ {print $2}", "/proc/"+pid+"/status"))
	if err != nil {
		t.Fatal(err)
	}
	kib, err := strconv.ParseFloat(strings.TrimSpace(out), 64)
	if err != nil {
		t.Fatal(err)
	}
	return kib / 1024
}

// comparedVariants are run in the lab and in the cluster.
const comparedVariants = `[
  {name: native, path: {native: {}}}, {name: baseline},
  {name: rps, accelerate: [{rps: {devices: [nic, overlay, host-veth], cpus: all}}]},
  {name: rps+, accelerate: [{rps: {devices: [nic, overlay, host-veth, pod], cpus: all}}]},
  {name: rfs, accelerate: [{rfs: {devices: [nic, overlay, host-veth]}}]},
  {name: rfs+, accelerate: [{rfs: {devices: [nic, overlay, host-veth, pod]}}]}]`

// BenchmarkLab runs one experiment in a lab in the shape of flannel and in a cluster
// with flannel, a block here and a block there in turns, and tells of each
// cell what the cluster's is of the lab's. The pods of the cluster are given CPUs as
// a lab gives them to its own; Kubernetes leaves them where the scheduler puts them.
func BenchmarkLab(b *testing.B) {
	c := shared(b)
	sysctl, err := os.ReadFile("/proc/sys/net/ipv4/tcp_congestion_control")
	if err != nil {
		b.Fatal(err)
	}
	targets := map[string]string{
		"lab":     "target: {lab: {congestionControl: " + strings.TrimSpace(string(sysctl)) + "}}, path: {vxlan: {shape: flannel}}",
		"cluster": "target: {kubernetes: {clientNode: node0, serverNode: node1}}, path: {pod: {}}",
	}
	exp := &v1alpha1.Experiment{}
	var trials []record.Trial
	block := 0
	for b.Loop() {
		block++
		order := []string{"lab", "cluster"}
		if block%2 == 0 {
			slices.Reverse(order)
		}
		for _, name := range order {
			out := b.TempDir()
			v := invoke(b, c.Kubeconfig(), "run", sideBySide(b, targets[name]), "--out", out)
			if name == "cluster" {
				placePods(b, c, v.ended)
			}
			if code := v.exit(b, 5*time.Minute); code != 0 {
				b.Fatalf("%s: exit %d:\n%s", name, code, v.said())
			}
			d, done := resultsOf(b, out)
			if exp.Spec.Variants == nil {
				text, err := d.Experiment()
				if err != nil {
					b.Fatal(err)
				}
				if exp, err = v1alpha1.Parse("experiment.yaml", text, nil); err != nil {
					b.Fatal(err)
				}
			}
			for _, t := range done {
				t.Block, t.Variant = block, name+" "+t.Variant
				trials = append(trials, t)
			}
		}
	}
	if block < 2 {
		return // no interval yet
	}
	var variants []v1alpha1.Variant
	for _, v := range exp.Spec.Variants {
		variants = append(variants, v1alpha1.Variant{Name: "lab " + v.Name}, v1alpha1.Variant{Name: "cluster " + v.Name, Versus: "lab " + v.Name})
	}
	exp.Spec.Variants, exp.Spec.Baseline = variants, "lab baseline"
	summary, err := stats.Analyze(exp, trials)
	if err != nil {
		b.Fatal(err)
	}
	rows := slices.DeleteFunc(summary.Rows, func(r stats.Row) bool {
		return r.Versus == nil || !strings.HasPrefix(r.Variant, "cluster") || r.Metric == record.LatencyP999
	})
	slices.SortStableFunc(rows, func(x, y stats.Row) int {
		return cmp.Or(cmp.Compare(x.Metric, y.Metric), cmp.Compare(x.Pairs, y.Pairs))
	})
	for _, r := range rows {
		b.Logf("%-8s × %d  %-14s  %-16s  cluster %.4g %s, of the lab's %.3f (%.3f–%.3f), n %d",
			r.Workload, r.Pairs, r.Metric, r.Variant, r.Mean, r.Unit, r.Versus.Ratio, r.Versus.CI95[0], r.Versus.CI95[1], r.Versus.N)
	}
}

// sideBySide is the experiment, on a target.
func sideBySide(b *testing.B, target string) string {
	b.Helper()
	file := filepath.Join(b.TempDir(), "quick.yaml")
	text := fmt.Sprintf(`{apiVersion: slipstream.dev/v1alpha1, kind: Experiment, metadata: {name: quick}, spec: {%s,
baseline: baseline, variants: %s,
workloads: [{name: stream, stream: {warmup: 300ms, duration: 1s}}, {name: pingpong, pingpong: {warmup: 300ms, duration: 1s}}],
pairs: [1, 4], runs: 1}}
`, target, comparedVariants)
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		b.Fatal(err)
	}
	return file
}

// placePods gives the pods of a run's pairs the CPUs that a lab of two nodes gives
// its own where nodes share CPUs, until the run has ended.
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
			// A child's CPUs are among its parent's: from the leaves up. What is not
			// there yet, or is in the way, is so at the next look no more.
			var groups []string
			_ = filepath.WalkDir(pod, func(path string, d os.DirEntry, err error) error {
				if err == nil && d.IsDir() {
					groups = append(groups, path)
				}
				return nil
			})
			// Writing moves every thread of the group, to where it is, too.
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
