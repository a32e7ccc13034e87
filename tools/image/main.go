// Command image packs programs, one for each architecture, into an OCI archive without a Docker daemon:
//
//	image -o ARCHIVE -ref REFERENCE[,REFERENCE...] OS/ARCH=PROGRAM[,FILE...]...
//
// The image holds the program, named like the first reference's repository, and runs it as an unprivileged user. The
// archive has the image under each reference. Files beside the program, such as other programs and the libraries that
// they load, keep their absolute paths. The same files give the same archive, byte for byte. For windows/ARCH the layer
// has Windows' own format. Without a base image it can only run as a host-process container.
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
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// user is the unprivileged user's ID that images without a distribution use by convention.
const user = "65532:65532"

func main() {
	out := flag.String("o", "", "the archive to write")
	refs := flag.String("ref", "", "the image's references")
	flag.Parse()
	if err := run(*out, *refs, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

func run(out, refs string, programs []string) error {
	var tags []name.Tag
	for ref := range strings.SplitSeq(refs, ",") {
		tag, err := name.NewTag(ref, name.StrictValidation)
		if err != nil {
			return fmt.Errorf("reference: %w", err)
		}
		if !slices.Contains(tags, tag) {
			tags = append(tags, tag)
		}
	}
	if out == "" || len(programs) == 0 {
		return errors.New("nothing to pack: image -o ARCHIVE -ref REFERENCE[,REFERENCE...] OS/ARCH=PROGRAM[,FILE...]... (one or more programs)")
	}
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, p := range programs {
		platform, list, ok := strings.Cut(p, "=")
		if !ok {
			return fmt.Errorf("%s: must be OS/ARCH=PROGRAM[,FILE...]", p)
		}
		files := strings.Split(list, ",")
		pf, err := v1.ParsePlatform(platform)
		if err != nil {
			return fmt.Errorf("platform %s: %w", platform, err)
		}
		img, err := image(files[0], "/"+path.Base(tags[0].RepositoryStr()), files[1:], *pf)
		if err != nil {
			return fmt.Errorf("image of %s: %w", files[0], err)
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: pf}})
	}
	dir, err := os.MkdirTemp(filepath.Dir(out), ".image-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	// Tools that load the archive take the name from one of these annotations: the first is containerd's, the
	// second the specification's.
	var named v1.ImageIndex = empty.Index
	for _, tag := range tags {
		named = mutate.AppendManifests(named, mutate.IndexAddendum{Add: index, Descriptor: v1.Descriptor{Annotations: map[string]string{
			"io.containerd.image.name":          tag.Name(),
			"org.opencontainers.image.ref.name": tag.TagStr(),
		}}})
	}
	if _, err := layout.Write(filepath.Join(dir, "layout"), named); err != nil {
		return err
	}
	archive := filepath.Join(dir, "archive")
	if err := pack(archive, filepath.Join(dir, "layout")); err != nil {
		return err
	}
	return os.Rename(archive, out)
}

// image builds the image of one program and other files.
func image(program, as string, others []string, pf v1.Platform) (v1.Image, error) {
	windows := pf.OS == "windows"
	if windows && len(others) > 0 {
		return nil, errors.New("an image for Windows has no other files: name the program alone")
	}
	var layer bytes.Buffer
	tw := tar.NewWriter(&layer)
	add := copyFile
	if windows {
		as += ".exe"
		add = copyWindowsFile
	}
	if err := add(tw, as, program); err != nil {
		return nil, err
	}
	for _, file := range others {
		if !path.IsAbs(file) {
			return nil, fmt.Errorf("%s: must be an absolute path, as that is its path in the image", file)
		}
		if err := copyFile(tw, file, file); err != nil {
			return nil, err
		}
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
	if windows { // whoever starts the container gives the path of the program and the account
		config.Config = v1.Config{}
	}
	if len(others) > 0 {
		// iperf3 creates a temporary file for its data. If the container's file system is read-only, /dev/shm can
		// still be written to.
		config.Config.Env = []string{"PATH=/usr/bin", "TMPDIR=/dev/shm"}
	}
	return mutate.ConfigFile(img, config)
}

// pack writes the files of a folder, sorted by name.
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

// copyFile adds an executable file.
func copyFile(tw *tar.Writer, as, file string) error {
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	return writeFile(tw, as, 0o755, data)
}

// windowsRights is the security descriptor of a program in Windows' layers, in base64:
// O:BAG:SYD:(A;;FA;;;BA)(A;;FA;;;SY)(A;;0x1200a9;;;BU), which gives full access to administrators and the
// system, and lets users read and execute.
const windowsRights = "AQAEgBQAAAAkAAAAAAAAADAAAAABAgAAAAAABSAAAAAgAgAAAQEAAAAAAAUSAAAAAgBMAAMAAAAAABgA/wEfAAECAAAAAAAFIAAAACACAAAAABQA/wEf" +
	"AAEBAAAAAAAFEgAAAAAAGACpABIAAQIAAAAAAAUgAAAAIQIAAA=="

// copyWindowsFile adds an executable file to a layer for Windows. Such a layer has the file system in the
// folder Files, the registry in Hives, and attributes as PAX records (the package backuptar of hcsshim reads
// them).
func copyWindowsFile(tw *tar.Writer, as, file string) error {
	const attributes = "MSWINDOWS.fileattr"
	for _, dir := range []string{"Hives", "Files"} {
		if err := tw.WriteHeader(&tar.Header{
			Typeflag: tar.TypeDir, Name: dir, Mode: 0o755, Format: tar.FormatPAX, PAXRecords: map[string]string{attributes: "16"}, // FILE_ATTRIBUTE_DIRECTORY
		}); err != nil {
			return err
		}
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if err := tw.WriteHeader(&tar.Header{
		Typeflag: tar.TypeReg, Name: "Files" + as, Mode: 0o755, Size: int64(len(data)), Format: tar.FormatPAX,
		PAXRecords: map[string]string{attributes: "32", "MSWINDOWS.rawsd": windowsRights}, // FILE_ATTRIBUTE_ARCHIVE
	}); err != nil {
		return err
	}
	_, err = tw.Write(data)
	return err
}

// writeFile adds a file that belongs to root and whose modification time is the Unix epoch.
func writeFile(tw *tar.Writer, path string, mode int64, data []byte) error {
	if err := tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: strings.TrimPrefix(path, "/"), Mode: mode, Size: int64(len(data))}); err != nil {
		return err
	}
	_, err := tw.Write(data)
	return err
}
