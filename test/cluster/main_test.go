//go:build linux

package cluster

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"slipstream.dev/internal/testenv"
)

// What all tests have: the program, its image, and a cluster that most share. Those
// that kill things, want another cluster, or take long make their own and are parallel.
var (
	program string // as `make build` builds it; its version is test
	image   string // the archive of slipstream.dev/slipstream:test

	common struct {
		once    sync.Once
		cluster *Cluster
		err     error
	}
)

// A test that needs another process runs this binary with one of these set.
const (
	// childUp brings up a cluster, says so, and keeps it until its input ends: a
	// harness to be killed.
	childUp = "SLIPSTREAM_TEST_CLUSTER_UP"
	// childThreads calls sendThreadsAway.
	childThreads = "SLIPSTREAM_TEST_CLUSTER_THREADS"
)

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	ctx := context.Background()
	if os.Getenv(childUp) != "" {
		if _, err := Up(ctx, Config{}); err != nil {
			fmt.Println(err)
			return 1
		}
		fmt.Println("up")
		_, _ = io.Copy(io.Discard, os.Stdin)
		return 1
	}
	if os.Getenv(childThreads) != "" {
		if err := sendThreadsAway(); err != nil {
			fmt.Println(err)
			return 1
		}
		fmt.Println("stayed")
		return 0
	}
	if os.Geteuid() != 0 {
		return m.Run() // every test skips
	}
	dir, err := os.MkdirTemp("", "slipstream-test")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	if err := build(ctx, dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code := m.Run()
	if common.cluster != nil {
		if err := common.cluster.Down(ctx); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	return code
}

// build makes the program and its image.
func build(ctx context.Context, dir string) error {
	program = filepath.Join(dir, "slipstream")
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w -X main.version=test", "-o", program, "slipstream.dev/cmd/slipstream")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if _, err := output(cmd); err != nil {
		return fmt.Errorf("build the program: %w", err)
	}
	root, err := checkout(ctx)
	if err != nil {
		return err
	}
	image = filepath.Join(dir, "image.tar")
	return packImage(ctx, root, image, "slipstream.dev/slipstream:test", program)
}

// shared is the cluster of all tests: two nodes, flannel, kube-proxy in mode
// nftables. A test leaves it as it found it.
func shared(t testing.TB) *Cluster {
	t.Helper()
	testenv.NeedRoot(t)
	common.once.Do(func() {
		common.cluster, common.err = Up(context.Background(), Config{Images: []string{image}, Log: os.Stderr})
	})
	if common.err != nil {
		t.Fatal(common.err)
	}
	return common.cluster
}

// own is a cluster of a test's own. At most four parallel tests have one, beside the shared cluster, and each of them one at a
// time: all use inotify instances of one user, of which a machine has 128 by default (fs.inotify.max_user_instances). A control plane has 6, and a node 7.
func own(t testing.TB, config Config) *Cluster {
	t.Helper()
	testenv.NeedRoot(t)
	config.Images = append(config.Images, image)
	c, err := Up(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Down(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return c
}

// kubectl runs it as the administrator, and returns what it prints. It can be
// used to clean up, too.
func kubectl(t testing.TB, c *Cluster, stdin io.Reader, args ...string) string {
	t.Helper()
	out, err := tryKubectl(c, stdin, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func tryKubectl(c *Cluster, stdin io.Reader, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(c.parts, "kubectl"), append([]string{"--kubeconfig=" + c.Kubeconfig()}, args...)...)
	cmd.Stdin = stdin
	cmd.Env = frugal()
	out, err := output(cmd)
	if err != nil {
		return "", fmt.Errorf("kubectl %v: %w", args, err)
	}
	return out, nil
}
