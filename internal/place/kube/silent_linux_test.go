package kube_test

import (
	"context"
	"encoding/json"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/net/websocket"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/cli"
	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/kube"
	"slipstream.dev/internal/testenv"
	"slipstream.dev/internal/worker"
)

// The program in pods is this test.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "worker" {
		os.Exit(cli.Main(context.Background(), cli.Process{
			Args: os.Args, Version: "test", Hurry: make(chan struct{}), Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
		}))
	}
	os.Exit(m.Run())
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// pod runs commands as an API server does, in a network namespace and with a /run of its own.
type pod struct {
	ctx context.Context // ends the commands
	ns  netns.Handle
	run string
}

// exec runs a command. Once its connection is silent, it moves nothing, and the command does not notice.
func (p pod) exec(ws *websocket.Conn, silent *atomic.Bool) {
	defer ws.Close()
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	const mounted = `mount --bind "$0" /run && exec "$@"`
	arguments := ws.Request().URL.Query()["command"][1:]
	cmd := exec.CommandContext(p.ctx, "unshare", append([]string{"--mount", "sh", "-c", mounted, p.run, self}, arguments...)...)
	in, err := cmd.StdinPipe()
	if err != nil {
		panic(err)
	}
	cmd.Stdout, cmd.Stderr = channel{ws, 1, silent}, channel{ws, 2, silent}
	if err := netns.Do(p.ns, cmd.Start); err != nil {
		panic(err)
	}
	go func() {
		for {
			var message []byte
			err := websocket.Message.Receive(ws, &message)
			switch {
			case silent.Load():
				return // the input stays open
			case err != nil, message[0] == 255: // the client closes a channel
				_ = in.Close()
				return
			case message[0] == 0:
				_, _ = in.Write(message[1:])
			}
		}
	}()
	status := metav1.Status{Status: metav1.StatusSuccess}
	if cmd.Wait() != nil {
		status = metav1.Status{Status: metav1.StatusFailure, Reason: "NonZeroExitCode", Details: &metav1.StatusDetails{Causes: []metav1.StatusCause{{Type: "ExitCode", Message: "1"}}}}
	}
	text, _ := json.Marshal(status) // which always works
	_ = websocket.Message.Send(ws, append([]byte{3}, text...))
}

// channel sends what a command writes.
type channel struct {
	ws     *websocket.Conn
	number byte
	silent *atomic.Bool
}

func (c channel) Write(b []byte) (int, error) {
	if c.silent.Load() {
		return len(b), nil
	}
	return len(b), websocket.Message.Send(c.ws, append([]byte{c.number}, b...))
}

// TestSilent checks that a worker does not begin while its predecessor, whose connection has broken silently, holds settings: the
// next trial would be measured with them.
func TestSilent(t *testing.T) {
	t.Parallel()
	testenv.NeedRoot(t)
	ns, err := netns.New()
	must(t, err)
	t.Cleanup(func() { ns.Close() })
	must(t, netns.Do(ns, func() error {
		nic := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "far"}
		if err := netlink.LinkAdd(nic); err != nil {
			return err
		}
		address, err := netlink.ParseAddr("192.0.2.1/24")
		if err != nil {
			return err
		}
		return netlink.AddrAdd(nic, address)
	}))
	setting := func() string {
		var text []byte
		must(t, netns.Do(ns, func() error {
			sys, err := netns.Sysfs()
			if err != nil {
				return err
			}
			defer sys.Close()
			text, err = fs.ReadFile(sys.FS(), "class/net/eth0/queues/rx-0/rps_cpus")
			return err
		}))
		return strings.TrimSpace(string(text))
	}
	found := setting()

	p := pod{t.Context(), ns, t.TempDir()}
	var begun, silent atomic.Bool // of the first connection
	server := httptest.NewServer(websocket.Server{
		Handshake: func(c *websocket.Config, _ *http.Request) error {
			c.Protocol = []string{"v5.channel.k8s.io"}
			return nil
		},
		Handler: func(ws *websocket.Conn) {
			if begun.Swap(true) {
				p.exec(ws, new(atomic.Bool))
				return
			}
			p.exec(ws, &silent)
		},
	})
	t.Cleanup(server.Close)
	node := place.Place{Name: "node0", Kind: place.Node, Node: "node0"}
	pods := kube.PodOn(node, server.URL)
	start := func() *worker.Client {
		s, err := pods.Open(node, place.ForControl)
		must(t, err)
		w, err := worker.Attach(t.Context(), s)
		must(t, err)
		t.Cleanup(func() { _ = w.Close() })
		return w
	}
	first := start()
	_, err = first.Apply(t.Context(), place.Steering{Place: node, Owner: "test",
		Accelerators: []v1alpha1.Accelerator{{RPS: &v1alpha1.RPS{Devices: []string{"nic"}, CPUs: "all"}}}})
	must(t, err)
	if now := setting(); now == found {
		t.Fatalf("RPS is not applied: %s", now)
	}
	silent.Store(true)
	second := start()
	_, err = second.Revert(t.Context())
	must(t, err)
	if now := setting(); now != found {
		t.Errorf("the next worker begins while rps_cpus is %s, was %s", now, found)
	}
}
