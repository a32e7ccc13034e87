//go:build linux && peers

package cluster

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestPeersChurn measures the CPU time and the memory of the programs that make a cluster's network, on both nodes: at rest, while pods
// are replaced, and while services come and go. It judges nothing.
func TestPeersChurn(t *testing.T) {
	for _, config := range []Config{{CNI: Flannel, Proxy: IPTables}, {CNI: Cilium}} {
		t.Run(config.CNI, func(t *testing.T) {
			c := own(t, config)
			startAgent(t, c)
			kubectl(t, c, strings.NewReader(accelerationPolicy("fast", fastForAll)), "apply", "-f", "-")
			defer kubectl(t, c, nil, "delete", "accelerationpolicy", "fast")
			if config.CNI == Flannel { // with Cilium it is never ready
				kubectl(t, c, nil, "wait", "accelerationpolicy/fast", "--for=condition=Ready", "--timeout=5m")
			}
			kubectl(t, c, strings.NewReader(webManifest), "apply", "-f", "-")
			kubectl(t, c, nil, "rollout", "status", "deployment/web", "--timeout=120s")
			measureWhile(t, c, "pods: 8 are replaced at a time", func(n int) error {
				if _, err := tryKubectl(c, nil, "scale", "deployment/web", fmt.Sprint("--replicas=", 4+8*(n%2))); err != nil {
					return err
				}
				_, err := tryKubectl(c, nil, "rollout", "status", "deployment/web", "--timeout=60s")
				return err
			})
			measureWhile(t, c, "services: 10 come or go at a time", func(n int) error {
				var all strings.Builder
				for i := range 10 {
					fmt.Fprintf(&all, "{apiVersion: v1, kind: Service, metadata: {name: churn%d, namespace: default}, spec: {selector: {app: web}, ports: [{port: 80}]}}\n---\n", i)
				}
				_, err := tryKubectl(c, strings.NewReader(all.String()), []string{"apply", "delete"}[n%2], "-f", "-")
				return err
			})
			measureWhile(t, c, "at rest", func(int) error {
				time.Sleep(time.Second)
				return nil
			})
		})
	}
}

// programsOfNetworks are the programs that are measured, by the last part of their path.
var programsOfNetworks = map[string]string{"flanneld": "flannel", "kube-proxy": "kube-proxy", "cilium-agent": "cilium-agent", "slipstream": "slipstream's agent"}

// measureWhile logs what the programs take in a minute while f runs again and again, with the number of the call.
func measureWhile(t *testing.T, c *Cluster, what string, f func(n int) error) {
	t.Helper()
	time.Sleep(5 * time.Second) // what came before settles; this measures, and waits for nothing
	before, began, times := usedBy(t, c), time.Now(), 0
	for ; time.Since(began) < time.Minute; times++ {
		if err := f(times); err != nil {
			t.Fatal(err)
		}
	}
	after, took := usedBy(t, c), time.Since(began)
	for _, program := range slices.Sorted(maps.Keys(after)) {
		t.Logf("%s, %d times in %.0f s: %s %.1f millicores a node, %.0f MiB", what, times, took.Seconds(), program,
			(after[program].CPU-before[program].CPU).Seconds()*1000/took.Seconds()/float64(len(c.nodes)), after[program].MiB/float64(len(c.nodes)))
	}
}

// usedBy returns what the programs use on all nodes.
func usedBy(t *testing.T, c *Cluster) map[string]Usage {
	t.Helper()
	all := map[string]Usage{}
	for _, n := range c.nodes {
		for file, name := range programsOfNetworks {
			pids, err := processesOn(n, func(args []string) bool {
				return filepath.Base(args[0]) == file && (file != "slipstream" || len(args) > 1 && args[1] == "agent")
			})
			if err != nil {
				t.Fatal(err)
			}
			for _, pid := range pids {
				u, err := UsageOf(pid)
				if err != nil {
					t.Fatal(err)
				}
				all[name] = Usage{all[name].CPU + u.CPU, all[name].MiB + u.MiB}
			}
		}
	}
	return all
}
