//go:build linux

package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/place/lab/balancer"
	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
)

var proxies = []string{spec.ProxyHAProxy, spec.ProxyBuiltin}

// balanced gives a lab a balancer.
func balanced(proxy string, backends int) func(*Config) {
	return func(c *Config) {
		c.Nodes, c.Pods = 2+backends, 0
		c.Balancer = &balancer.Config{Backends: backends, Proxy: proxy, Pairs: 2}
	}
}

// backend listens on a node, and calls serve for each connection.
func backend(t *testing.T, l *Lab, node string, version int, port uint16, serve func(*net.TCPConn)) {
	t.Helper()
	var listener *net.TCPListener
	in(t, l, node, func() (err error) {
		listener, err = net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(placeOf(t, l, node).IP(version), port)))
		return err
	})
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			c, err := listener.AcceptTCP()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				serve(c)
			}()
		}
	}()
}

// dial connects to the proxy from the client's node.
func dial(t *testing.T, l *Lab, version int, port uint16) *net.TCPConn {
	t.Helper()
	c, err := tryDial(t, l, version, port)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func tryDial(t *testing.T, l *Lab, version int, port uint16) (*net.TCPConn, error) {
	t.Helper()
	to := netip.AddrPortFrom(placeOf(t, l, "node1").IP(version), port)
	var c net.Conn
	var refused error
	in(t, l, "node0", func() error {
		c, refused = net.DialTimeout("tcp", to.String(), 10*time.Second)
		return nil
	})
	if refused != nil {
		return nil, refused
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return c.(*net.TCPConn), nil
}

// TestBalancer checks that the connections of each pair go to the backends in turn, with both proxies and IP versions, and that
// a half-closed connection still carries data in the other direction.
func TestBalancer(t *testing.T) {
	for _, proxy := range proxies {
		t.Run(proxy, func(t *testing.T) {
			const backends = 3
			l := up(t, balanced(proxy, backends))
			if got, err := l.Proxy(t.Context()); err != nil || !strings.HasPrefix(got, proxy) {
				t.Errorf("the proxy is %q, %v", got, err)
			}
			service := placeOf(t, l, "node1").Service
			for pair := range uint16(2) {
				for _, version := range []int{4, 6} {
					balances(t, l, version, service.Port+pair, backends)
				}
			}
		})
	}
}

// balances checks that connections to a port of the proxy go to the backends in
// turn.
func balances(t *testing.T, l *Lab, version int, port uint16, backends int) {
	t.Helper()
	const size, rounds = 300_000, 4
	for i := range backends {
		node := fmt.Sprintf("node%d", 2+i)
		backend(t, l, node, version, port, func(c *net.TCPConn) {
			if from := c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr(); from != placeOf(t, l, "node1").IP(version) {
				t.Errorf("a connection comes to %s from %s, which is not the proxy's", node, from)
			}
			all, err := io.ReadAll(c) // up to the client's FIN
			if err == nil {
				_, err = fmt.Fprintf(c, "%s %d", node, len(all))
			}
			if err != nil {
				t.Errorf("%s: %v", node, err)
			}
		})
	}
	var came []string
	for range backends * rounds {
		c := dial(t, l, version, port)
		if _, err := c.Write(make([]byte, size)); err != nil {
			t.Fatal(err)
		}
		if err := c.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		answer, err := io.ReadAll(c)
		if err != nil {
			t.Fatal(err)
		}
		name, received, _ := strings.Cut(string(answer), " ")
		if received != strconv.Itoa(size) {
			t.Fatalf("port %d, IPv%d: the answer is %q", port, version, answer)
		}
		came = append(came, name)
	}
	for i := range came {
		if came[i] != came[i%backends] {
			t.Errorf("port %d, IPv%d: not in turns: %v", port, version, came)
			break
		}
	}
	if n := len(slices.Compact(slices.Sorted(slices.Values(came)))); n != backends {
		t.Errorf("port %d, IPv%d: %d of %d backends are used: %v", port, version, n, backends, came)
	}
}

// TestBalancerBrokenBackend checks that if nobody listens at a backend, or it resets a connection, its client gets an error and
// not the end of the data, and that the other backends keep working.
func TestBalancerBrokenBackend(t *testing.T) {
	for _, proxy := range proxies {
		t.Run(proxy, func(t *testing.T) {
			l := up(t, balanced(proxy, 2))
			port := placeOf(t, l, "node1").Service.Port
			backend(t, l, "node3", 4, port, func(c *net.TCPConn) {
				_, _ = c.Read(make([]byte, 1))
				_, _ = c.Write([]byte("whole"))
			})
			whole := 0
			for range 2 { // each backend gets one of two connections in a row
				c, err := tryDial(t, l, 4, port)
				if errors.Is(err, unix.ECONNRESET) {
					continue // the reset may arrive before connect returns
				} else if err != nil {
					t.Fatal(err)
				}
				_, _ = c.Write([]byte("x"))
				switch answer, err := io.ReadAll(c); {
				case string(answer) == "whole" && err == nil:
					whole++
				case len(answer) == 0: // an end without an answer, or an error
				default:
					t.Errorf("the answer is %q, %v", answer, err)
				}
			}
			if whole == 0 {
				t.Error("the backend that is there has answered nobody")
			}
			// The built-in proxy resets the connection.
			backend(t, l, "node2", 4, port, func(c *net.TCPConn) {
				_, _ = c.Read(make([]byte, 1))
				_, _ = c.Write([]byte("half"))
				_ = c.SetLinger(0)
			})
			reset := 0
			for range 2 {
				c := dial(t, l, 4, port)
				_, _ = c.Write([]byte("x"))
				if _, err := io.ReadAll(c); errors.Is(err, unix.ECONNRESET) {
					reset++
				}
			}
			if proxy == spec.ProxyBuiltin && reset != 1 {
				t.Errorf("%d of 2 connections are reset, one is by its backend", reset)
			}
		})
	}
}

// TestBalancerRates checks that every node's NIC has the rate of its role in both directions, or the lab's if the role has
// none.
func TestBalancerRates(t *testing.T) {
	l := up(t, func(c *Config) {
		balanced(spec.ProxyBuiltin, 1)(c)
		c.Nodes = 4 // one more than the balancer has
		c.NIC.Rate = "3Gbit"
		c.Balancer.NICs = spec.RoleNICs{Proxy: spec.RoleNIC{Rate: "1Gbit"}, Backend: spec.RoleNIC{Rate: "400Mbit"}}
	})
	want := map[string]uint64{"node0": 3e9, "node1": 1e9, "node2": 400e6, "node3": 3e9}
	rates := func(where, device string) (bits uint64) {
		in(t, l, where, func() error {
			link, err := netlink.LinkByName(device)
			if err != nil {
				return err
			}
			all, err := netlink.QdiscList(link)
			for _, q := range all {
				if tbf, ok := q.(*netlink.Tbf); ok {
					bits = 8 * tbf.Rate
				}
			}
			return err
		})
		return bits
	}
	var roles []string
	for _, p := range l.Places() {
		roles = append(roles, p.Role)
		if p.NICRate != want[p.Name] || rates(p.Name, network.NIC) != want[p.Name] || rates("switch", p.Name) != want[p.Name] {
			t.Errorf("%s: rate %d, sends at %d and receives at %d, want %d", p.Name, p.NICRate, rates(p.Name, network.NIC), rates("switch", p.Name), want[p.Name])
		}
	}
	if diff := cmp.Diff([]string{"client", "proxy", "backend", ""}, roles); diff != "" {
		t.Errorf("roles (-want +got):\n%s", diff)
	}
}

// TestProxyDies checks that a warning is logged when the proxy dies, and that nothing of it is left.
func TestProxyDies(t *testing.T) {
	testenv.NeedRoot(t)
	for _, proxy := range proxies {
		t.Run(proxy, func(t *testing.T) {
			c := config(labName(t))
			balanced(proxy, 1)(&c)
			before := machine(t, "slip-"+c.Name)
			var log lines
			l, err := Up(t.Context(), c, Options{Dir: t.TempDir(), Balancer: balancerCommand, Log: slog.New(slog.NewTextHandler(&log, nil))})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = l.Down(context.Background()) })
			all := running(t, c)
			if len(all) != 1 {
				t.Fatalf("processes %v, want the proxy", all)
			}
			pid, err := strconv.Atoi(all[0])
			if err == nil {
				err = unix.Kill(pid, unix.SIGKILL)
			}
			if err != nil {
				t.Fatal(err)
			}
			testenv.Await(t, 20*time.Second, "its end is told", func() bool { return strings.Contains(log.String(), "the proxy exited") })
			if !strings.Contains(log.String(), "node=node1") || !strings.Contains(log.String(), "killed") {
				t.Errorf("told is %s", log.String())
			}
			if err := l.Down(t.Context()); err != nil {
				t.Fatal(err)
			}
			if after := machine(t, "slip-"+c.Name); len(after) != len(before) {
				t.Errorf("before there was %v, now %v", before, after)
			}
		})
	}
}

// TestProxyDoesNotStart checks that if a proxy does not start, the error has its output, and the lab is not created.
func TestProxyDoesNotStart(t *testing.T) {
	testenv.NeedRoot(t)
	dir, c := t.TempDir(), config(labName(t))
	balanced(spec.ProxyBuiltin, 1)(&c)
	before := machine(t, "slip-"+c.Name)
	for what, try := range map[string]struct {
		command []string
		want    string
	}{
		"none":    {nil, "needs Options.Balancer"},
		"missing": {[]string{"/nonexistent"}, "/nonexistent"},
		"fails":   {[]string{"sh", "-c", "echo no such verb >&2; exit 2"}, "exited before it listened (exit status 2): no such verb"},
	} {
		var log lines
		_, err := Up(t.Context(), c, Options{Dir: dir, Balancer: try.command, Log: slog.New(slog.NewTextHandler(&log, nil))})
		if err == nil || !strings.Contains(err.Error(), try.want) {
			t.Errorf("%s: %v, want it to say %q", what, err, try.want)
		}
		if log.String() != "" {
			t.Errorf("%s: told twice: %s", what, log.String())
		}
		if after := machine(t, "slip-"+c.Name); len(after) != len(before) {
			t.Errorf("%s: before there was %v, now %v", what, before, after)
		}
		if left := files(t, dir); left != nil {
			t.Errorf("%s: files left: %v", what, left)
		}
	}
}

// TestBalancerErrors checks that a balancer that does not fit its lab is refused before anything is created.
func TestBalancerErrors(t *testing.T) {
	for want, change := range map[string]func(*Config){
		"backends must be 1 to 14, are 0":                                             func(c *Config) { c.Balancer.Backends = 0 },
		"backends must be 1 to 14, are 15":                                            func(c *Config) { c.Balancer.Backends = 15 },
		"the client, the proxy and 2 backends need 4 nodes, and there are 3":          func(c *Config) { c.Nodes = 3 },
		"pairs must be 1 to 64, are 65":                                               func(c *Config) { c.Balancer.Pairs = 65 },
		`proxy must be haproxy or builtin, is "nginx"`:                                func(c *Config) { c.Balancer.Proxy = "nginx" },
		`rate of the proxy's NIC must be a rate such as 10Gbit or 500Mbit, is "fast"`: func(c *Config) { c.Balancer.NICs.Proxy.Rate = "fast" },
	} {
		c := config("x")
		balanced("", 2)(&c)
		if err := c.Validate(); err != nil {
			t.Fatal(err)
		}
		change(&c)
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}
