package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
)

func write(t *testing.T, name, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestArchive(t *testing.T) {
	dir := t.TempDir()
	programs := []string{"linux/amd64=" + write(t, "x", "for amd64"), "linux/arm64=" + write(t, "y", "for arm64")}
	var archives [2][]byte
	for i := range archives {
		out := filepath.Join(dir, "out.tar")
		if err := run(out, "slipstream.dev/slipstream:v1", programs); err != nil {
			t.Fatal(err)
		}
		var err error
		if archives[i], err = os.ReadFile(out); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(archives[0], archives[1]) {
		t.Error("the same programs give another archive")
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("beside the archive there is something left: %v %v", entries, err)
	}
	index, err := layout.ImageIndexFromPath(unpack(t, archives[0]))
	if err != nil {
		t.Fatal(err)
	}
	top, err := index.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	if len(top.Manifests) != 1 {
		t.Fatalf("the archive has %d names, want 1", len(top.Manifests))
	}
	for key, want := range map[string]string{
		"io.containerd.image.name":          "slipstream.dev/slipstream:v1",
		"org.opencontainers.image.ref.name": "v1",
	} {
		if got := top.Manifests[0].Annotations[key]; got != want {
			t.Errorf("annotation %s is %q, want %q", key, got, want)
		}
	}
	image, err := index.ImageIndex(top.Manifests[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	platforms, err := image.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	if len(platforms.Manifests) != 2 {
		t.Fatalf("the image has %d platforms, want 2", len(platforms.Manifests))
	}
	for i, want := range []string{"amd64", "arm64"} {
		m := platforms.Manifests[i]
		if !m.Platform.Satisfies(v1.Platform{OS: "linux", Architecture: want}) {
			t.Errorf("platform %d is %s, want linux/%s", i, m.Platform, want)
		}
		img, err := image.Image(m.Digest)
		if err != nil {
			t.Fatal(err)
		}
		config, err := img.ConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		if config.Architecture != want || config.Config.User != "65532:65532" || strings.Join(config.Config.Entrypoint, " ") != "/slipstream" {
			t.Errorf("configuration of %s: %s, user %s, runs %s", want, config.Architecture, config.Config.User, config.Config.Entrypoint)
		}
		layers, err := img.Layers()
		if err != nil || len(layers) != 1 {
			t.Fatalf("layers: %d, %v", len(layers), err)
		}
		r, err := layers[0].Uncompressed()
		if err != nil {
			t.Fatal(err)
		}
		tr := tar.NewReader(r)
		h, err := tr.Next()
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(tr)
		if err != nil || h.Name != "slipstream" || h.Mode != 0o755 || string(content) != "for "+want {
			t.Errorf("file of %s: %s, mode %o, %q, %v", want, h.Name, h.Mode, content, err)
		}
		if h, err := tr.Next(); !errors.Is(err, io.EOF) {
			t.Errorf("another file of %s: %v, %v", want, h, err)
		}
	}
}

// unpack makes a folder of an archive.
func unpack(t *testing.T, archive []byte) string {
	t.Helper()
	dir := t.TempDir()
	tr := tar.NewReader(bytes.NewReader(archive))
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return dir
		}
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(tr)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, h.Name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func TestBadUse(t *testing.T) {
	program := write(t, "x", "x")
	for name, c := range map[string]struct {
		ref      string
		programs []string
		want     string
	}{
		"no reference":   {"", []string{"linux/amd64=" + program}, "reference"},
		"no tag":         {"slipstream.dev/slipstream", []string{"linux/amd64=" + program}, "reference"},
		"no program":     {"slipstream.dev/some:1", nil, "nothing to pack"},
		"no platform":    {"slipstream.dev/some:1", []string{program}, "must be OS/ARCH=PROGRAM"},
		"no such file":   {"slipstream.dev/some:1", []string{"linux/amd64=/nowhere"}, "no such file"},
		"empty platform": {"slipstream.dev/some:1", []string{"a/b/c/d=" + program}, "platform"},
	} {
		out := filepath.Join(t.TempDir(), "out.tar")
		err := run(out, c.ref, c.programs)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error is %v, want %q in it", name, err, c.want)
		}
		if _, err := os.Stat(out); err == nil {
			t.Errorf("%s: there is an archive", name)
		}
	}
}
