//go:build linux

package cluster

import (
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/testenv"
)

// programsOn returns the names of a node's devices, once for each TCX program.
func programsOn(t testing.TB, n *Node) (names []string) {
	t.Helper()
	if err := onNetns(n.Netns(), func() error {
		links, err := netlink.LinkList()
		if err != nil {
			return err
		}
		for _, l := range links {
			for _, at := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
				q, err := link.QueryPrograms(link.QueryOptions{Target: l.Attrs().Index, Attach: at})
				if errors.Is(err, unix.ENODEV) {
					continue // it has gone meanwhile, as the device of a pod does
				}
				if err != nil {
					return err
				}
				for range q.Programs {
					names = append(names, l.Attrs().Name)
				}
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	slices.Sort(names)
	return names
}

// webPod is a pod of the deployment web.
type webPod struct{ name, ip, netns string }

func webPodOn(t testing.TB, c *Cluster, node string) webPod {
	t.Helper()
	all := webPodsOn(t, c, node)
	if len(all) == 0 {
		t.Fatalf("no pod of web on %s", node)
	}
	return all[0]
}

// webPodsOn returns the pods of web on a node that are not being deleted.
func webPodsOn(t testing.TB, c *Cluster, node string) (all []webPod) {
	t.Helper()
	out := kubectl(t, c, nil, "get", "pods", "-n", "default", "-l", "app=web", "--field-selector", "status.phase=Running,spec.nodeName="+node,
		"-o", `jsonpath={range .items[*]}{.metadata.name} {.status.podIP} {.metadata.deletionTimestamp}{"\n"}{end}`)
	for line := range strings.Lines(out) {
		if f := strings.Fields(line); len(f) == 2 {
			all = append(all, webPod{f[0], f[1], podNetns(t, c.Node(node), f[1])})
		}
	}
	return all
}

// listen makes a pod accept connections at a port, until the test ends.
func listen(t testing.TB, at webPod, port string) (l net.Listener) {
	t.Helper()
	if err := onNetns(at.netns, func() (err error) {
		l, err = (&net.ListenConfig{KeepAlive: -1}).Listen(t.Context(), "tcp4", net.JoinHostPort(at.ip, port))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// talk connects from the namespace of one pod to an address where the other listens.
// It returns a function that sends a line and waits until it comes back.
func talk(t testing.TB, from webPod, listener net.Listener, to string) func() {
	t.Helper()
	var near net.Conn
	// kube-proxy refuses connections to a service until it knows the service's pods.
	testenv.Eventually(t, time.Minute, "connection to "+to, func() string {
		if err := onNetns(from.netns, func() (err error) {
			// No keepalive probes: the rules of testRules drop most of them, and nine lost in a
			// row would end the connection.
			near, err = (&net.Dialer{Timeout: 20 * time.Second, KeepAlive: -1}).Dial("tcp4", to)
			return err
		}); err != nil {
			return err.Error()
		}
		return ""
	})
	far, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { near.Close(); far.Close() })
	go func() { _, _ = io.Copy(far, far) }()
	n := 0
	return func() {
		t.Helper()
		n++
		sent := fmt.Sprintf("%s %20d\n", to, n)
		got := make([]byte, len(sent))
		_ = near.SetDeadline(time.Now().Add(20 * time.Second))
		_, err := near.Write([]byte(sent))
		if err == nil {
			_, err = io.ReadFull(near, got)
		}
		if err != nil || string(got) != sent {
			t.Fatalf("sent %q, came back %q: %v", sent, got, err)
		}
	}
}

const fastForAll = "{" + everywhere + "accelerate: [{fastpath: {}}]}"

// TestFlannelThatRoutes covers flannel's two ways to send packets between nodes of one subnet without VXLAN. With DirectRouting
// the nodes have a VXLAN device that no packet takes.
func TestFlannelThatRoutes(t *testing.T) {
	t.Parallel()
	for _, cni := range []string{FlannelHostGW, FlannelDirect} {
		t.Run(cni, func(t *testing.T) {
			c := own(t, Config{CNI: cni})
			settings := nodeSettings(t, c)
			t.Run("installed", func(t *testing.T) {
				startAgent(t, c)
				kubectl(t, c, strings.NewReader(webManifest), "apply", "-f", "-")
				kubectl(t, c, nil, "rollout", "status", "deployment/web", "--timeout=120s")
				testFastpath(t, c, "routed")
			})
			if diff := cmp.Diff(settings, nodeSettings(t, c)); diff != "" {
				t.Errorf("settings (-before +after):\n%s", diff)
			}
		})
	}
}

// testFastpath applies the fast path with the agents of a cluster. It checks that
// packets between pods of two nodes, including those to a service, are accelerated
// and counted as packets of the kind, and that nothing is left of the fast path
// afterwards. It needs running agents, and four pods of the deployment web.
func testFastpath(t *testing.T, c *Cluster, kind string) {
	nodes := []string{"node0", "node1"}
	before := map[string][]string{}
	for _, n := range nodes {
		before[n] = programsOn(t, c.Node(n))
	}
	near, far := webPodOn(t, c, "node0"), webPodOn(t, c, "node1")
	listener := listen(t, far, "4000")
	kubectl(t, c, nil, "label", "-n", "default", "pod", far.name, "fast=far")
	kubectl(t, c, strings.NewReader(`{apiVersion: v1, kind: Service, metadata: {name: fast, namespace: default},
		spec: {selector: {fast: far}, ports: [{port: 80, targetPort: 4000}]}}`), "apply", "-f", "-")
	defer kubectl(t, c, nil, "delete", "-n", "default", "service", "fast")
	service := kubectl(t, c, nil, "get", "-n", "default", "service", "fast", "-o", "jsonpath={.spec.clusterIP}")

	kubectl(t, c, strings.NewReader(accelerationPolicy("fast", fastForAll)), "apply", "-f", "-")
	defer kubectl(t, c, nil, "delete", "accelerationpolicy", "fast", "--ignore-not-found")
	for _, n := range nodes {
		testenv.Eventually(t, agentPatience, "fast path of "+n, func() string {
			s := stateOf(t, c, n).Status
			for _, at := range s.Conditions {
				if at.Type == "Fastpath" && at.Status == "True" && len(s.Observed) == 1 && s.Observed[0].State == "applied" {
					return ""
				}
			}
			return fmt.Sprintf("%+v", s)
		})
	}
	direct := talk(t, near, listener, net.JoinHostPort(far.ip, "4000"))
	byService := talk(t, near, listener, net.JoinHostPort(service, "80"))
	metrics := func(n string) string {
		text, err := scrape(c.Node(n))
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	packets := func(n, way string) float64 { return carriedOf(metrics(n), kind, way) }
	testenv.Eventually(t, time.Minute, "packets between pods are accelerated", func() string {
		for range 200 {
			direct()
		}
		for _, n := range nodes {
			for _, way := range []string{"out", "in"} {
				if packets(n, way) < 100 {
					return fmt.Sprintf("%s of %s is %.0f", way, n, packets(n, way))
				}
			}
		}
		return ""
	})
	// Connections to a service are accelerated, too, on the node where kube-proxy
	// translates them.
	testenv.Eventually(t, time.Minute, "packets to a service are accelerated", func() string {
		out, in := packets("node0", "out"), packets("node0", "in")
		trips := 0.0
		// This takes longer than the time for which scrapes share one reading of the counters.
		for began := time.Now(); time.Since(began) < 500*time.Millisecond; trips++ {
			byService()
		}
		out, in = packets("node0", "out")-out, packets("node0", "in")-in
		if min(out, in) < trips*3/4 {
			return fmt.Sprintf("of %.0f there and back %.0f and %.0f", trips, out, in)
		}
		return ""
	})

	t.Run("run", func(t *testing.T) {
		file := experimentFile(t, "", "  - {name: fast, accelerate: [{fastpath: {}}]}", brief)
		v := invoke(t, c.Kubeconfig(), "run", file, "--out", t.TempDir())
		if code := v.exit(t, 2*time.Minute); code != 1 || !strings.Contains(v.said(), "variant fast needs the fast path of node0, which is in use (the fast path by agent (process ") {
			t.Errorf("exit %d:\n%s", code, v.said())
		}
	})
	t.Run("rules", func(t *testing.T) {
		testRules(t, c, near, far, func() float64 { return packets("node0", "out") })
	})
	t.Run("services", func(t *testing.T) {
		testServices(t, c, func(node string) float64 { // also packets between pods of the node
			text := metrics(node)
			return carriedIn(text, "out") + carriedIn(text, "in")
		})
	})

	// After the policy is deleted nothing is left of the fast path, and connections
	// continue.
	kubectl(t, c, nil, "delete", "accelerationpolicy", "fast")
	for _, n := range nodes {
		testenv.Eventually(t, time.Minute, n+" without programs", func() string {
			if now := programsOn(t, c.Node(n)); !slices.Equal(now, before[n]) {
				return fmt.Sprintf("%v, were %v", now, before[n])
			}
			return ""
		})
	}
	direct()
	byService()
}
