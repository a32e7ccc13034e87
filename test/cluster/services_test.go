//go:build linux

package cluster

import (
	"bufio"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"slipstream.dev/internal/testenv"
)

// servicesManifest has services of each kind, all at port 80, which select pods by a label. It also has
// a pod with a host port.
const servicesManifest = `
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Service, metadata: {name: anywhere, namespace: default}, spec: {type: NodePort, selector: {anywhere: "yes"}, ports: [{port: 80, targetPort: 4002, nodePort: 31001}]}}
- {apiVersion: v1, kind: Service, metadata: {name: local, namespace: default}, spec: {type: NodePort, externalTrafficPolicy: Local, selector: {local: "yes"}, ports: [{port: 80, targetPort: 4002, nodePort: 31002}]}}
- {apiVersion: v1, kind: Service, metadata: {name: sticky, namespace: default}, spec: {sessionAffinity: ClientIP, selector: {sticky: "yes"}, ports: [{port: 80, targetPort: 4002}]}}
- {apiVersion: v1, kind: Service, metadata: {name: own, namespace: default}, spec: {selector: {own: "yes"}, ports: [{port: 80, targetPort: 4002}]}}
- {apiVersion: v1, kind: Service, metadata: {name: moving, namespace: default}, spec: {selector: {moving: "yes"}, ports: [{port: 80, targetPort: 4002}]}}
- {apiVersion: v1, kind: Pod, metadata: {name: hosted, namespace: default, labels: {app: hosted}}, spec: {nodeName: node1, terminationGracePeriodSeconds: 1,
    containers: [{name: web, image: "slipstream.dev/slipstream:test", imagePullPolicy: Never, args: [worker, --hold], ports: [{containerPort: 4002, hostPort: 31003}]}]}}
`

// serveName makes a pod answer each line with its name.
func serveName(t *testing.T, p webPod) {
	t.Helper()
	l := listen(t, p, "4002")
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				for lines := bufio.NewScanner(conn); lines.Scan(); {
					if _, err := fmt.Fprintln(conn, p.name); err != nil {
						return
					}
				}
			}()
		}
	}()
}

// asker is a connection to a pod that answers with its name.
type asker struct {
	net.Conn
	answers *bufio.Reader
}

// dial connects from a network namespace.
func dial(netns, to string) (asker, error) {
	var a asker
	err := onNetns(netns, func() (err error) {
		a.Conn, err = (&net.Dialer{Timeout: 3 * time.Second, KeepAlive: -1}).Dial("tcp4", to)
		return err
	})
	if err == nil {
		a.answers = bufio.NewReader(a)
	}
	return a, err
}

func (a asker) ask() (name string, err error) {
	if err := a.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		return "", err
	}
	if _, err := fmt.Fprintln(a, "who"); err != nil {
		return "", err
	}
	name, err = a.answers.ReadString('\n')
	return strings.TrimSpace(name), err
}

// asks sends requests for half a second, and checks that the given pod answers each of them. It returns
// their number.
func (a asker) asks(t *testing.T, pod string) (times float64) {
	t.Helper()
	for began := time.Now(); time.Since(began) < 500*time.Millisecond; times++ {
		if name, err := a.ask(); err != nil || name != pod {
			t.Fatalf("%q answered, want %q: %v", name, pod, err)
		}
	}
	return times
}

// testServices checks that connections to services of each kind reach the pods that kube-proxy chooses,
// and stay with them. They are accelerated if their packets go from a pod, or from a node, to a pod of
// another node, or from a pod to another pod of its node.
func testServices(t *testing.T, c *Cluster, accelerated func(node string) float64) {
	on0, on1 := webPodsOn(t, c, "node0"), webPodsOn(t, c, "node1")
	if len(on0) < 2 || len(on1) < 2 {
		t.Fatalf("there are %d and %d pods on the nodes, want two each", len(on0), len(on1))
	}
	near, beside, far, further := on0[0], on0[1], on1[0], on1[1]
	label := func(p webPod, labels ...string) {
		t.Helper()
		kubectl(t, c, nil, append([]string{"label", "--overwrite", "-n", "default", "pod", p.name}, labels...)...)
	}
	kubectl(t, c, strings.NewReader(servicesManifest), "apply", "-f", "-")
	t.Cleanup(func() {
		kubectl(t, c, strings.NewReader(servicesManifest), "delete", "-f", "-", "--timeout=60s")
	})
	label(near, "own=yes")
	label(beside, "anywhere=yes")
	label(far, "local=yes", "sticky=yes", "moving=yes")
	label(further, "sticky=yes")
	kubectl(t, c, nil, "wait", "--for=condition=Ready", "--timeout=60s", "-n", "default", "pod", "hosted")
	ip := kubectl(t, c, nil, "get", "-n", "default", "pod", "hosted", "-o", "jsonpath={.status.podIP}")
	hosted := webPod{"hosted", ip, podNetns(t, c.Node("node1"), ip)}
	for _, p := range []webPod{near, beside, far, further, hosted} {
		serveName(t, p)
	}
	address := func(service string) string {
		t.Helper()
		return net.JoinHostPort(kubectl(t, c, nil, "get", "-n", "default", "service", service, "-o", "jsonpath={.spec.clusterIP}"), "80")
	}
	// connect waits until one of these pods answers at a service, and returns the connection and the pod's
	// name.
	connect := func(t *testing.T, netns, to string, pods ...string) (a asker, pod string) {
		t.Helper()
		testenv.Eventually(t, time.Minute, "connection to "+to, func() string {
			var err error
			if a, err = dial(netns, to); err != nil {
				return err.Error()
			}
			pod, err = a.ask()
			for _, p := range pods {
				if err == nil && p == pod {
					return ""
				}
			}
			a.Close()
			return fmt.Sprintf("%q answers: %v", pod, err)
		})
		t.Cleanup(func() { a.Close() })
		return a, pod
	}
	// isAccelerated waits until most packets of a connection are accelerated in both directions on these
	// nodes.
	isAccelerated := func(t *testing.T, a asker, pod string, nodes ...string) {
		t.Helper()
		for _, n := range nodes {
			testenv.Eventually(t, time.Minute, "it is accelerated on "+n, func() string {
				before := accelerated(n)
				if times, fast := a.asks(t, pod), accelerated(n); fast-before < 2*times*3/4 {
					return fmt.Sprintf("%.0f packets in %.0f round trips", fast-before, times)
				}
				return ""
			})
		}
	}
	port1 := func(port string) string { return net.JoinHostPort(c.Node("node1").Addr(), port) }
	moving := address("moving")
	for _, tt := range []struct {
		name, from, to string
		pod            webPod
		accelerated    []string
	}{
		// Node1 forwards these connections to the pod on node0, in its own name.
		{"a node's port", near.netns, port1("31001"), beside, []string{"node0"}},
		{"a node's port from a node", c.Node("node0").Netns(), port1("31001"), beside, []string{"node0"}},
		{"a node's port of its own pods", c.Node("node0").Netns(), port1("31002"), far, nil},
		{"a pod's port of its node", c.Node("node0").Netns(), port1("31003"), hosted, nil},
		{"a pod's port of its node from a pod", near.netns, port1("31003"), hosted, nil},
		{"a pod's own service", near.netns, address("own"), near, nil},
		{"a service of a pod beside", beside.netns, address("own"), near, []string{"node0"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a, pod := connect(t, tt.from, tt.to, tt.pod.name)
			isAccelerated(t, a, pod, tt.accelerated...)
			if tt.accelerated != nil {
				return
			}
			before := accelerated("node0") + accelerated("node1")
			times := a.asks(t, pod)
			if n := accelerated("node0") + accelerated("node1") - before; n > times/10 {
				t.Errorf("%.0f packets were accelerated in %.0f round trips", n, times)
			}
		})
	}
	t.Run("session affinity", func(t *testing.T) {
		to := address("sticky")
		first, pod := connect(t, near.netns, to, far.name, further.name)
		isAccelerated(t, first, pod, "node0", "node1")
		for range 10 {
			if _, name := connect(t, near.netns, to, far.name, further.name); name != pod {
				t.Fatalf("%s answers, and before did %s", name, pod)
			}
		}
		isAccelerated(t, first, pod, "node0", "node1")
	})
	t.Run("pods change", func(t *testing.T) {
		old, _ := connect(t, near.netns, moving, far.name)
		isAccelerated(t, old, far.name, "node0", "node1")
		before := far
		for _, next := range []webPod{further, beside} {
			label(before, "moving-")
			label(next, "moving=yes")
			a, _ := connect(t, near.netns, moving, next.name)
			isAccelerated(t, old, far.name, "node0", "node1")
			a.asks(t, next.name)
			before = next
		}
	})
}
