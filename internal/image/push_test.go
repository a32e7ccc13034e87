package image

import (
	"archive/tar"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"oras.land/oras-go/v2"
	"oras.land/oras-go/v2/content/memory"
	"oras.land/oras-go/v2/content/oci"
	"oras.land/oras-go/v2/registry/remote"
)

// archived returns an archive as tools/image writes it, with images for two platforms, and the digest of what its tags name.
func archived(t *testing.T, tags ...string) (archive, digest string) {
	t.Helper()
	dir := t.TempDir()
	store, err := oci.New(filepath.Join(dir, "layout"))
	if err != nil {
		t.Fatal(err)
	}
	push := func(mediaType string, content any) ocispec.Descriptor {
		t.Helper()
		data, err := json.Marshal(content)
		if err != nil {
			t.Fatal(err)
		}
		d, err := oras.PushBytes(t.Context(), store, mediaType, data)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	index := ocispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageIndex}
	for _, arch := range []string{"amd64", "arm64"} {
		platform := ocispec.Platform{OS: "linux", Architecture: arch}
		d := push(ocispec.MediaTypeImageManifest, ocispec.Manifest{
			Versioned: index.Versioned, MediaType: ocispec.MediaTypeImageManifest,
			Config: push(ocispec.MediaTypeImageConfig, ocispec.Image{Platform: platform}),
			Layers: []ocispec.Descriptor{push(ocispec.MediaTypeImageLayer, "the program for "+arch)},
		})
		d.Platform = &platform
		index.Manifests = append(index.Manifests, d)
	}
	named := push(ocispec.MediaTypeImageIndex, index)
	for _, tag := range tags {
		if err := store.Tag(t.Context(), named, tag); err != nil {
			t.Fatal(err)
		}
	}
	archive = filepath.Join(dir, "image.tar")
	f, err := os.Create(archive)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	tw := tar.NewWriter(f)
	if err := errors.Join(tw.AddFS(os.DirFS(filepath.Join(dir, "layout"))), tw.Close()); err != nil {
		t.Fatal(err)
	}
	return archive, named.Digest.String()
}

// login makes dir the folder of Docker's configuration, with what docker login writes.
func login(t *testing.T, address, user string) {
	t.Helper()
	dir := t.TempDir()
	t.Setenv("DOCKER_CONFIG", dir)
	config := fmt.Sprintf(`{"auths": {%q: {"auth": %q}}}`, address, base64.StdEncoding.EncodeToString([]byte(user)))
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestPush pushes to a registry that takes nothing from strangers, twice, and reads back all platforms.
func TestPush(t *testing.T) {
	archive, digest := archived(t, "v1", "v2") // two tags of one image, as make image writes them
	uploads := 0
	stored := registry.New(registry.Logger(log.New(t.Output(), "", 0)))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if user, password, is := r.BasicAuth(); !is || user+":"+password != "someone:secret" {
			w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		if r.Method == http.MethodPost {
			uploads++
		}
		stored.ServeHTTP(w, r)
	}))
	defer server.Close()
	address := strings.TrimPrefix(server.URL, "http://")

	t.Setenv("DOCKER_CONFIG", t.TempDir())
	if _, err := Push(t.Context(), archive, address+"/some/name", false); err == nil || !strings.Contains(err.Error(), "push to "+address+"/some/name:v1") {
		t.Errorf("a stranger pushes: %v", err)
	}
	login(t, address, "someone:secret")
	for to, want := range map[string]string{"/some/name": "v1", "/some/name:other": "other"} {
		pushed, err := Push(t.Context(), archive, address+to, false)
		if err != nil {
			t.Fatal(err)
		}
		if want := (Pushed{Repository: address + "/some/name", Tag: want, Digest: digest}); pushed != want {
			t.Errorf("%+v, want %+v", pushed, want)
		}
	}
	if uploads != 4 { // a configuration and a layer for each platform
		t.Errorf("%d blobs were uploaded, want 4", uploads)
	}
	server.Config.Handler = stored
	repository, err := remote.NewRepository(address + "/some/name")
	if err != nil {
		t.Fatal(err)
	}
	repository.PlainHTTP = true
	if got, err := oras.Copy(t.Context(), repository, "other", memory.New(), "", oras.DefaultCopyOptions); err != nil || got.Digest.String() != digest {
		t.Errorf("what was pushed is read as %s, %v", got.Digest, err)
	}
}

func TestPushRefuses(t *testing.T) {
	unnamed, _ := archived(t)
	none := filepath.Join(t.TempDir(), "none.tar")
	for _, c := range []struct{ archive, to, want string }{
		{unnamed, "localhost:1/name", "has 0 images, want one"},
		{none, "localhost:1/name", "no such file"},
		{unnamed, "name", "must be REGISTRY/NAME"},
		{unnamed, "localhost:1/name@sha256:" + strings.Repeat("0", 64), "must be REGISTRY/NAME"},
		{unnamed, "localhost:1/Name", "must be REGISTRY/NAME"},
	} {
		if _, err := Push(t.Context(), c.archive, c.to, false); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("push %s to %s: %v, want %q", c.archive, c.to, err, c.want)
		}
	}
}

func TestLoopback(t *testing.T) {
	for address, want := range map[string]bool{
		"localhost": true, "localhost:5000": true, "127.0.0.1:5000": true, "[::1]:5000": true,
		"registry.example": false, "10.0.0.1:5000": false, "localhost.example:5000": false,
	} {
		if loopback(address) != want {
			t.Errorf("%s: %v", address, !want)
		}
	}
}
