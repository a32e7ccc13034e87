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

// All tests share the program, its image, and most of them one cluster. Tests that kill things, need another kind of cluster,
// or take long, create their own cluster and run in parallel.
var (
	program string // built as make build does, with the version test
	image   string // the archive of slipstream.dev/slipstream:test, which also has the other references of imageRefs

	common struct {
		once    sync.Once
		cluster *Cluster
		err     error
	}
)

// imageRefs are the names of the one image: that of the program's version, the one that an upgrade replaces, and one of another
// repository.
const imageRefs = "slipstream.dev/slipstream:test,slipstream.dev/slipstream:older,example.test/slipstream:test"

// A test that needs another process runs this binary with one of these variables set.
const (
	// childUp starts a cluster, reports that, and keeps the cluster until its input ends. Tests kill this process.
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
		return m.Run() // without root, every test skips
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

// build builds the program and its image.
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
	return packImage(ctx, root, image, imageRefs, program)
}

// shared returns the cluster that most tests share: two nodes, flannel, and kube-proxy in mode nftables. A test leaves it as
// it found it.
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

// ownClusters has a place for each cluster that tests may have at a time, besides the shared one. All clusters use inotify
// instances of the same user, who has 128 by default (fs.inotify.max_user_instances). A control plane uses 6, and a node 7: with
// one cluster of three nodes, these are 127.
var ownClusters = make(chan struct{}, 5)

// own creates a cluster for one test, once there is a place for it. A test has one at a time.
func own(t testing.TB, config Config) *Cluster {
	t.Helper()
	testenv.NeedRoot(t)
	ownClusters <- struct{}{}
	t.Cleanup(func() { <-ownClusters })
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

// kubectl runs kubectl as the administrator, and returns its output. It also works in a test's cleanup.
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
