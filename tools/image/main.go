// Command image packs programs, one an architecture, into an OCI archive
// without a Docker daemon:
//
//	image -o ARCHIVE -ref REFERENCE OS/ARCH=PROGRAM...
//
// The image holds the program alone, named as the reference's repository, and
// runs it as a user without rights. The same programs give the same archive,
// byte for byte.
package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// user has no rights anywhere: the number that images without a distribution
// have agreed on.
const user = "65532:65532"

func main() {
	out := flag.String("o", "", "the archive to write")
	ref := flag.String("ref", "", "the image's reference")
	flag.Parse()
	if err := run(*out, *ref, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

func run(out, ref string, programs []string) error {
	tag, err := name.NewTag(ref, name.StrictValidation)
	if err != nil {
		return fmt.Errorf("reference: %w", err)
	}
	if out == "" || len(programs) == 0 {
		return errors.New("nothing to pack: image -o ARCHIVE -ref REFERENCE OS/ARCH=PROGRAM... (one or more programs)")
	}
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, p := range programs {
		platform, program, ok := strings.Cut(p, "=")
		if !ok {
			return fmt.Errorf("%s: must be OS/ARCH=PROGRAM", p)
		}
		pf, err := v1.ParsePlatform(platform)
		if err != nil {
			return fmt.Errorf("platform %s: %w", platform, err)
		}
		img, err := image(program, "/"+path.Base(tag.RepositoryStr()), *pf)
		if err != nil {
			return fmt.Errorf("image of %s: %w", program, err)
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: pf}})
	}
	dir, err := os.MkdirTemp(filepath.Dir(out), ".image-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	// A tool that loads the archive takes the name from one of these: the first
	// is containerd's, the second the specification's.
	named := mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: index, Descriptor: v1.Descriptor{Annotations: map[string]string{
		"io.containerd.image.name":          tag.Name(),
		"org.opencontainers.image.ref.name": tag.TagStr(),
	}}})
	if _, err := layout.Write(filepath.Join(dir, "layout"), named); err != nil {
		return err
	}
	archive := filepath.Join(dir, "archive")
	if err := pack(archive, filepath.Join(dir, "layout")); err != nil {
		return err
	}
	return os.Rename(archive, out)
}

// image of one program.
func image(program, as string, pf v1.Platform) (v1.Image, error) {
	data, err := os.ReadFile(program)
	if err != nil {
		return nil, err
	}
	var layer bytes.Buffer
	tw := tar.NewWriter(&layer)
	if err := writeFile(tw, as, 0o755, data); err != nil {
		return nil, err
	}
	if err := tw.Close(); err != nil {
		return nil, err
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(layer.Bytes())), nil },
		tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, err
	}
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	if img, err = mutate.AppendLayers(img, l); err != nil {
		return nil, err
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture, config.Variant = pf.OS, pf.Architecture, pf.Variant
	config.Config = v1.Config{Entrypoint: []string{as}, User: user, WorkingDir: "/"}
	return mutate.ConfigFile(img, config)
}

// pack writes the files of a folder, in the order of their names.
func pack(archive, dir string) error {
	f, err := os.Create(archive)
	if err != nil {
		return err
	}
	defer f.Close()
	tw := tar.NewWriter(f)
	root := os.DirFS(dir)
	if err := fs.WalkDir(root, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := fs.ReadFile(root, path)
		if err != nil {
			return err
		}
		return writeFile(tw, path, 0o644, data)
	}); err != nil {
		return err
	}
	return errors.Join(tw.Close(), f.Close())
}

// writeFile adds a file of root's, as old as time.
func writeFile(tw *tar.Writer, path string, mode int64, data []byte) error {
	if err := tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: strings.TrimPrefix(path, "/"), Mode: mode, Size: int64(len(data))}); err != nil {
		return err
	}
	_, err := tw.Write(data)
	return err
}
