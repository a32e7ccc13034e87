package cli

import (
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/agent"
	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/testenv"
)

// TestAgentWhoseServerEnds checks that an agent fails, and says why, if a server of it ends by itself.
func TestAgentWhoseServerEnds(t *testing.T) {
	testenv.NeedRoot(t)
	ns, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	dir := t.TempDir()
	policy := filepath.Join(dir, "policy.yaml")
	testenv.WriteFile(t, policy, `apiVersion: slipstream.dev/v1alpha1
kind: AccelerationPolicy
metadata: {name: host}
spec: {accelerate: [{rps: {devices: [nic], cpus: "0"}}]}
`)
	o := agentOptions{policy: policy, journal: filepath.Join(dir, "journal"), serve: agent.ServeOptions{Metrics: ":0"}}
	ended, inside := make(chan error, 1), make(chan netns.ID, 1)
	go func() {
		ended <- netns.Do(ns, func() error {
			id, err := netns.CurrentID()
			if err != nil {
				return err
			}
			inside <- id
			return o.run(t.Context(), Process{Out: io.Discard, Err: io.Discard})
		})
	}()
	id := <-inside
	testenv.Await(t, 10*time.Second, "the server listens", func() bool { return shutListener(t, id.Cookie) })
	select {
	case err := <-ended:
		if err == nil || !strings.Contains(err.Error(), "serve at :0: ") {
			t.Errorf("the agent ended with %v, want what has happened to its server", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the agent runs on without its server")
	}
}

// shutListener makes a listening socket of this process in a network namespace fail, if there is one.
func shutListener(t *testing.T, ns netns.Cookie) bool {
	t.Helper()
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		fd, err := strconv.Atoi(file.Name())
		if err != nil {
			t.Fatal(err)
		}
		listens, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
		if err != nil || listens == 0 {
			continue // most are no sockets
		}
		if cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE); err == nil && netns.Cookie(cookie) == ns {
			return unix.Shutdown(fd, unix.SHUT_RDWR) == nil
		}
	}
	return false
}
