package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/partial"
)

func write(t *testing.T, name, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestWindowsLayer checks that an image for Windows has the format of Windows' layers, and no Linux
// user.
func TestWindowsLayer(t *testing.T) {
	img, err := image(write(t, "x.exe", "for Windows"), "/slipstream", nil, v1.Platform{OS: "windows", Architecture: "amd64"})
	if err != nil {
		t.Fatal(err)
	}
	config, err := img.ConfigFile()
	if err != nil || config.OS != "windows" || config.OSVersion != "" || config.Config.User != "" || config.Config.Entrypoint != nil {
		t.Errorf("configuration %+v, %v", config, err)
	}
	layers, err := img.Layers()
	if err != nil || len(layers) != 1 {
		t.Fatalf("%d layers, %v", len(layers), err)
	}
	r, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	tr := tar.NewReader(r)
	for _, want := range []struct {
		name, attributes, content string
		rights                    bool
	}{{"Hives/", "16", "", false}, {"Files/", "16", "", false}, {"Files/slipstream.exe", "32", "for Windows", true}} {
		h, err := tr.Next()
		if err != nil {
			t.Fatalf("%s: %v", want.name, err)
		}
		content, err := io.ReadAll(tr)
		if err != nil || strings.TrimSuffix(h.Name, "/") != strings.TrimSuffix(want.name, "/") || string(content) != want.content ||
			h.PAXRecords["MSWINDOWS.fileattr"] != want.attributes || (h.PAXRecords["MSWINDOWS.rawsd"] != "") != want.rights {
			t.Errorf("%s has %q and records %v, want %+v; %v", h.Name, content, h.PAXRecords, want, err)
		}
	}
	if _, err := tr.Next(); !errors.Is(err, io.EOF) {
		t.Errorf("after the program: %v", err)
	}
	if _, err := image(write(t, "x.exe", ""), "/slipstream", []string{"/etc/hosts"}, v1.Platform{OS: "windows"}); err == nil {
		t.Error("other files are left out in silence")
	}
}

func TestArchive(t *testing.T) {
	dir := t.TempDir()
	programs := []string{"linux/amd64=" + write(t, "x", "for amd64"), "linux/arm64=" + write(t, "y", "for arm64")}
	var archives [2][]byte
	for i := range archives {
		out := filepath.Join(dir, "out.tar")
		if err := run(out, "slipstream.dev/slipstream:v1,slipstream.dev/slipstream:devel,slipstream.dev/slipstream:v1", programs); err != nil {
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
	if len(top.Manifests) != 2 || top.Manifests[0].Digest != top.Manifests[1].Digest {
		t.Fatalf("the archive has the names %+v, want two of one image", top.Manifests)
	}
	for i, tag := range []string{"v1", "devel"} {
		for key, want := range map[string]string{
			"io.containerd.image.name":          "slipstream.dev/slipstream:" + tag,
			"org.opencontainers.image.ref.name": tag,
		} {
			if got := top.Manifests[i].Annotations[key]; got != want {
				t.Errorf("annotation %s is %q, want %q", key, got, want)
			}
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
		if config.Architecture != want || config.Config.User != "65532:65532" || strings.Join(config.Config.Entrypoint, " ") != "/slipstream" || config.Config.Env != nil {
			t.Errorf("configuration of %s: %s, user %s, runs %s with %q", want, config.Architecture, config.Config.User, config.Config.Entrypoint, config.Config.Env)
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

// TestOtherFiles checks that other files keep their paths, even through links, and that programs among
// them are found and have a writable folder.
func TestOtherFiles(t *testing.T) {
	out, program, tool := filepath.Join(t.TempDir(), "out.tar"), write(t, "x", "program"), write(t, "tool", "a tool")
	library := filepath.Join(t.TempDir(), "library.so.1")
	if err := os.Symlink(write(t, "library.so.1.2.3", "a library"), library); err != nil {
		t.Fatal(err)
	}
	if err := run(out, "slipstream.dev/slipstream:v1-tools", []string{"linux/amd64=" + program + ",relative"}); err == nil || !strings.Contains(err.Error(), "must be an absolute path") {
		t.Errorf("a relative path: %v", err)
	}
	if err := run(out, "slipstream.dev/slipstream:v1-tools", []string{"linux/amd64=" + program + "," + tool + "," + library}); err != nil {
		t.Fatal(err)
	}
	archive, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	index, err := layout.ImageIndexFromPath(unpack(t, archive))
	if err != nil {
		t.Fatal(err)
	}
	got := make(map[string]string)
	platforms, err := partial.FindIndexes(index, func(v1.Descriptor) bool { return true })
	if err != nil || len(platforms) != 1 {
		t.Fatalf("%d indexes, %v", len(platforms), err)
	}
	images, err := partial.FindImages(platforms[0], func(v1.Descriptor) bool { return true })
	if err != nil || len(images) != 1 {
		t.Fatalf("%d images, %v", len(images), err)
	}
	config, err := images[0].ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"PATH=/usr/bin", "TMPDIR=/dev/shm"}; !slices.Equal(config.Config.Env, want) {
		t.Errorf("its environment is %q, want %q", config.Config.Env, want)
	}
	content := mutate.Extract(images[0])
	defer content.Close()
	tr := tar.NewReader(content)
	for h, err := tr.Next(); !errors.Is(err, io.EOF); h, err = tr.Next() {
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(tr)
		if err != nil || h.Mode != 0o755 {
			t.Errorf("%s: mode %o, %v", h.Name, h.Mode, err)
		}
		got["/"+h.Name] = string(data)
	}
	if want := (map[string]string{"/slipstream": "program", tool: "a tool", library: "a library"}); !maps.Equal(got, want) {
		t.Errorf("it has %v, want %v", got, want)
	}
}

// unpack extracts an archive into a folder.
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
