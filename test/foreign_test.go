package test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/testenv"
)

// foreignLab creates a lab with test/foreign/lab.sh, and returns the prefix of its namespaces' names.
func foreignLab(t testing.TB, shape string) string {
	t.Helper()
	name := "foreign-" + shape
	script := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("foreign/lab.sh", args...).CombinedOutput(); err != nil {
			t.Fatalf("lab.sh %v: %v\n%s", args, err, out)
		}
	}
	script("down", name)
	script("up", shape, name)
	t.Cleanup(func() { script("down", name) })
	return name
}

// startAgent starts an agent with the fast path in a namespace. It returns a function that reads one of the
// agent's metrics.
func startAgent(t testing.TB, ns string) (*exec.Cmd, func(metric string) float64) {
	t.Helper()
	policy := filepath.Join(t.TempDir(), "policy.yaml")
	text := "apiVersion: slipstream.dev/v1alpha1\nkind: AccelerationPolicy\nmetadata: {name: fast}\nspec: {accelerate: [{fastpath: {}}]}\n"
	if err := os.WriteFile(policy, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	agent := exec.Command("ip", "netns", "exec", ns, program, "agent", "--policy", policy, "--journal", t.TempDir())
	var log bytes.Buffer
	agent.Stdout, agent.Stderr = &log, &log
	if err := agent.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if agent.ProcessState == nil {
			_ = agent.Process.Signal(os.Interrupt)
			_ = agent.Wait()
		}
		if t.Failed() {
			t.Logf("agent of %s:\n%s", ns, log.String())
		}
	})
	return agent, func(metric string) (value float64) {
		value = -1
		_ = inside(ns, func() error {
			c, err := net.DialTimeout("tcp", "127.0.0.1:9469", time.Second)
			if err != nil {
				return err
			}
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(5 * time.Second))
			_, _ = io.WriteString(c, "GET /metrics HTTP/1.0\r\n\r\n")
			page, err := io.ReadAll(c)
			if m := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(metric) + ` (.*)$`).FindSubmatch(page); m != nil {
				value, err = strconv.ParseFloat(string(m[1]), 64)
			}
			return err
		})
		return value
	}
}

// inside runs fn in a named network namespace.
func inside(ns string, fn func() error) error { return netns.DoAt("/run/netns/"+ns, fn) }

func congestionControl(t testing.TB, c *net.TCPConn) (name string) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var optErr error
	err = raw.Control(func(fd uintptr) { name, optErr = unix.GetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION) })
	if err != nil || optErr != nil {
		t.Fatal(err, optErr)
	}
	return strings.TrimRight(name, "\x00")
}

// echo listens in a namespace, and sends back whatever the first connection sends.
func echo(t testing.TB, ns string) (port int) {
	t.Helper()
	var l net.Listener
	err := inside(ns, func() (err error) {
		l, err = net.Listen("tcp4", ":0")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		_, _ = io.Copy(c, c)
	}()
	return l.Addr().(*net.TCPAddr).Port
}

// TestForeignLabs checks the fast path in labs made with iproute2 and nft, in the shapes of flannel, Calico
// and kube-proxy. The fast path carries a connection in both directions on both nodes, and the connection
// outlives the agents.
func TestForeignLabs(t *testing.T) {
	testenv.NeedRoot(t)
	for shape, address := range map[string]string{"flannel": "10.42.1.2", "calico": "10.42.1.2", "kube-proxy": "10.96.0.10"} {
		t.Run(shape, func(t *testing.T) {
			t.Parallel()
			name := foreignLab(t, shape)
			var agents []*exec.Cmd
			var metrics []func(string) float64
			for i := range 2 {
				agent, metric := startAgent(t, fmt.Sprintf("%s-n%d", name, i))
				agents, metrics = append(agents, agent), append(metrics, metric)
			}
			for i, metric := range metrics {
				// If the probe's own packets are late, the agent probes again up to six minutes later.
				testenv.Await(t, 7*time.Minute, fmt.Sprintf("the fast path of n%d", i), func() bool { return metric("slipstream_fastpath_up") == 1 })
			}

			port := echo(t, name+"-n1p0")
			var c net.Conn
			err := inside(name+"-n0p0", func() (err error) {
				c, err = net.DialTimeout("tcp4", net.JoinHostPort(address, strconv.Itoa(port)), 5*time.Second)
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if got := congestionControl(t, c.(*net.TCPConn)); got != "cubic" {
				t.Errorf("the connection has the congestion control %s; measure.sh needs cubic from the first packet", got)
			}
			sent, got := bytes.Repeat([]byte("slipstream "), 100), make([]byte, 1100)
			trips := func(n int) {
				t.Helper()
				for range n {
					_ = c.SetDeadline(time.Now().Add(20 * time.Second))
					if _, err := c.Write(sent); err != nil {
						t.Fatal(err)
					}
					if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(sent, got) {
						t.Fatalf("got %d bytes, %v", len(got), err)
					}
				}
			}
			carried := func(way string) (all float64) {
				for _, metric := range metrics {
					n := metric(`slipstream_fastpath_packets_total{kind="vxlan",reason="fast-` + way + `"}`)
					if n <= 0 {
						return 0
					}
					all += n
				}
				return all
			}
			testenv.Await(t, time.Minute, "the connection is on the fast path", func() bool {
				// This is longer than the time between the agent's checks for busy connections.
				for began := time.Now(); time.Since(began) < 400*time.Millisecond; {
					trips(10)
				}
				return carried("out") > 0 && carried("in") > 0
			})
			const n = 2000
			testenv.Retry(t, 3, func() error { // an agent may lose its lease once
				out, in := carried("out"), carried("in")
				if out == 0 || in == 0 {
					return errors.New("an agent has no figures")
				}
				trips(n)
				// A round trip is one packet each way, and acknowledgements travel with them. An agent answers scrapes
				// in quick succession with the same figures.
				for began := time.Now(); time.Since(began) < 10*time.Second; time.Sleep(20 * time.Millisecond) {
					if carried("out")-out >= 1.8*n && carried("in")-in >= 1.8*n {
						return nil
					}
				}
				return fmt.Errorf("of %d round trips %.0f packets left and %.0f arrived by the fast path", n, carried("out")-out, carried("in")-in)
			})

			for _, agent := range agents {
				if err := agent.Process.Kill(); err != nil {
					t.Fatal(err)
				}
				_ = agent.Wait()
			}
			trips(n)
		})
	}
}
