//go:build linux

package cluster

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"slipstream.dev/internal/record"
)

// baseImage is an image without slipstream. Its programs, and the libraries that they load, are those of this machine.
const baseImage = "example.test/base:test"

// importBase packs baseImage, and imports it on every node.
func importBase(t *testing.T, c *Cluster) {
	t.Helper()
	files := []string{"/bin/sh", "/bin/sh"} // the first is the program of the image, at /base
	for _, program := range []string{"sleep", "head", "gzip", "chmod", "mv", "rm", "sha256sum"} {
		files = append(files, filepath.Join("/usr/bin", program))
	}
	linked, err := output(exec.CommandContext(t.Context(), "ldd", files[1:]...))
	if err != nil {
		t.Fatal(err)
	}
	seen := make(map[string]bool)
	for line := range strings.Lines(linked) {
		for _, word := range strings.Fields(line) {
			if strings.HasPrefix(word, "/") && !strings.HasSuffix(word, ":") && !seen[word] {
				seen[word] = true
				files = append(files, word)
			}
		}
	}
	root, err := checkout(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(t.TempDir(), "base.tar")
	if err := packImage(t.Context(), root, archive, baseImage, strings.Join(files, ",")); err != nil {
		t.Fatal(err)
	}
	for _, n := range []string{"node0", "node1"} {
		if err := c.Node(n).importImage(t.Context(), archive); err != nil {
			t.Fatal(err)
		}
	}
}

// testBaseImage measures with pods into which slipstream is copied, and leaves nothing. testDoctor, before it, has imported the image and
// examined such pods.
func testBaseImage(t *testing.T, c *Cluster) {
	before := snapshotOf(t, c)
	out := t.TempDir()
	variants := "  - {name: rps+, accelerate: [{rps: {devices: " + onAll + ", cpus: all}}]}"
	v := invoke(t, c.Kubeconfig(), "run", experimentFile(t, "baseImage: "+baseImage, variants, brief), "--out", out, "--set", "spec.pairs=[1]")
	if code := v.exit(t, 3*time.Minute); code != 0 {
		t.Fatalf("exit %d:\n%s", code, v.said())
	}
	if said := "pods start from the image " + baseImage + ", and slipstream copies itself into each of the 4"; !strings.Contains(v.said(), said) {
		t.Errorf("it does not say %q:\n%s", said, v.said())
	}
	d, trials := resultsOf(t, out)
	for _, tr := range measured(trials) {
		if tr.Status != record.StatusOK || (len(tr.Settings) > 0) != (tr.Variant == "rps+") || len(tr.Hosts) != 1 {
			t.Errorf("%s: %s %s, settings %v, hosts %v", tr.Variant, tr.Status, tr.Error, tr.Settings, tr.Hosts)
		}
	}
	env, err := d.Environment()
	if err != nil || !strings.Contains(env.Placement, "They started from "+baseImage+", with a copy of this program (SHA-256 ") {
		t.Errorf("placement %q, %v", env.Placement, err)
	}
	v = invoke(t, c.Kubeconfig(), "run", "rps-rfs", "--on", "kubernetes", "--base-image", "docker.io/library/busybox:1.37", "--out", t.TempDir())
	if code := v.exit(t, time.Minute); code == 0 || !strings.Contains(v.said(), "needs programs that the image docker.io/library/busybox:1.37 does not have") {
		t.Errorf("a preset with iperf3: exit %d\n%s", code, v.said())
	}
	unchanged(t, c, before)
}
