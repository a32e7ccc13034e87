//go:build linux

package lab

import (
	"cmp"
	"context"
	"crypto/sha1"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/lab/balancer"
	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/place/lab/overlay"
	"slipstream.dev/internal/place/lab/services"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
)

// A test that needs another process runs this binary with one of these set.
const (
	childUp    = "SLIPSTREAM_TEST_LAB_UP"    // creates the lab of this name in childDir, until its input ends
	childProbe = "SLIPSTREAM_TEST_LAB_PROBE" // tries to create one, and prints the error
	childDir   = "SLIPSTREAM_TEST_LAB_DIR"
	childShape = "SLIPSTREAM_TEST_LAB_SHAPE"
	childKeep  = "SLIPSTREAM_TEST_LAB_KEEP"
	childMode  = "SLIPSTREAM_TEST_LAB_MODE" // of services in front of node1/pod0
	childProxy = "SLIPSTREAM_TEST_LAB_PROXY"
)

// forwarderCommand and balancerCommand run this binary as the forwarder and as the built-in proxy.
var (
	forwarderCommand = []string{"/proc/self/exe", "forward"}
	balancerCommand  = []string{"/proc/self/exe", "balance"}
)

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == forwarderCommand[1] {
		if err := overlay.Forward(context.Background()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if len(os.Args) == 2 && os.Args[1] == balancerCommand[1] {
		if err := balancer.Run(context.Background()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	name := os.Getenv(childUp) + os.Getenv(childProbe)
	if name == "" {
		os.Exit(m.Run())
	}
	c := config(name)
	c.Shape = cmp.Or(os.Getenv(childShape), c.Shape)
	if mode := os.Getenv(childMode); mode != "" {
		c.Services = &services.Config{Mode: mode, Backends: 1000, Total: 1, Servers: []place.Position{{Node: 1, Pod: 0}}, Transports: []place.Transport{tcp4}}
	}
	if proxy := os.Getenv(childProxy); proxy != "" {
		balanced(proxy, 1)(&c)
	}
	_, err := Up(context.Background(), c, Options{Dir: os.Getenv(childDir), Keep: os.Getenv(childKeep) != "", Forwarder: forwarderCommand, Balancer: balancerCommand})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("up")
	_, _ = io.Copy(io.Discard, os.Stdin)
}

func config(name string) Config {
	return Config{
		Name: name, Nodes: 2, Pods: 2, Shape: spec.ShapeFlannel,
		NIC: spec.NIC{Offload: spec.OffloadFull, MTU: 1500},
	}
}

// labName returns a name that no other test uses, nor the same test in another
// process.
func labName(t testing.TB) string {
	return fmt.Sprintf("test-%x", sha1.Sum(fmt.Appendf(nil, "%s %d", t.Name(), os.Getpid())))[:13]
}

// up creates a lab, and removes it when the test ends.
func up(t *testing.T, change func(*Config)) *Lab {
	t.Helper()
	testenv.NeedRoot(t)
	c := config(labName(t))
	change(&c)
	l, err := Up(t.Context(), c, Options{Dir: t.TempDir(), Forwarder: forwarderCommand, Balancer: balancerCommand, Log: slog.New(slog.NewTextHandler(t.Output(), nil))})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Down(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return l
}

// in runs f in the network namespace of a place or of the switch.
func in(t *testing.T, l *Lab, place string, f func() error) {
	t.Helper()
	ns := switchNS(l.state.Config.Name)
	if place != "switch" {
		var err error
		if ns, err = l.find(place); err != nil {
			t.Fatal(err)
		}
	}
	if err := network.Inside(ns, f); err != nil {
		t.Fatalf("in %s: %v", place, err)
	}
}

func placeOf(t *testing.T, l *Lab, name string) place.Place {
	t.Helper()
	for _, p := range l.Places() {
		if p.Name == name {
			return p
		}
	}
	t.Fatalf("no place %s", name)
	return place.Place{}
}

// connect opens TCP connections from one place to another. The first of each pair is the client's end.
func connect(t *testing.T, l *Lab, from, to string, version, n int) [][2]*net.TCPConn {
	t.Helper()
	var listener *net.TCPListener
	in(t, l, to, func() (err error) {
		listener, err = net.ListenTCP("tcp", &net.TCPAddr{IP: placeOf(t, l, to).IP(version).AsSlice()})
		return err
	})
	defer listener.Close()
	if err := listener.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	var all [][2]*net.TCPConn
	for range n {
		var ends [2]*net.TCPConn
		in(t, l, from, func() error {
			d := net.Dialer{Timeout: 10 * time.Second}
			c, err := d.Dial("tcp", listener.Addr().String())
			if err != nil {
				return err
			}
			ends[0] = c.(*net.TCPConn)
			return nil
		})
		var err error
		if ends[1], err = listener.AcceptTCP(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { ends[0].Close(); ends[1].Close() })
		control(t, ends[0], func(fd int) error {
			return unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, "cubic")
		})
		all = append(all, ends)
	}
	return all
}

func control(t *testing.T, c *net.TCPConn, f func(fd int) error) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err == nil {
		err = errors.Join(raw.Control(func(fd uintptr) { err = f(int(fd)) }), err)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// flood sends as much as possible for d. It returns how many bytes arrived, how long that took, and how many segments were
// retransmitted.
func flood(t *testing.T, l *Lab, from, to string, streams int, d time.Duration) (bytes int64, took time.Duration, again int) {
	t.Helper()
	conns := connect(t, l, from, to, 4, streams)
	begin := time.Now()
	received := make(chan int64, streams)
	for _, c := range conns {
		go func() {
			n, _ := io.Copy(io.Discard, c[1])
			received <- n
		}()
		go func() {
			buf := make([]byte, 128<<10)
			_ = c[0].SetWriteDeadline(begin.Add(d))
			for {
				if _, err := c[0].Write(buf); err != nil {
					_ = c[0].CloseWrite()
					return
				}
			}
		}()
	}
	for range conns {
		bytes += <-received
	}
	took = time.Since(begin)
	for _, c := range conns {
		control(t, c[0], func(fd int) error {
			info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
			again += int(info.Total_retrans)
			return err
		})
	}
	return bytes, took, again
}
