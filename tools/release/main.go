// Command release packs programs that are built already into the files of a release:
//
//	release -from DIR -o DIR -version VERSION -date SECONDS [-url URL] [-image REPOSITORY]
//
// It runs in the root of the repository. The folder OS_ARCH of -from has the programs of each platform, and its folders man
// and completions are those that docs/generate writes. The files are archives, packages for Debian and Red Hat (nfpm), the
// chart, a bill of materials for each archive and for the image, the manifests of krew and Homebrew, the notes of the
// release, and the checksums of everything in the folder. The same files give the same release, byte for byte.
//
// Its neighbour image packs the image; make snapshot runs both.
package main

import (
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// release is what all files of a release share.
type release struct {
	version string
	// date is the modification time of every packed file.
	date time.Time
	// url is the address under which the files are published, and image the repository of the image.
	url, image string
	// from has what was built, and out gets the release.
	from, out string
}

// platform is a system that the programs are built for.
type platform struct{ os, arch string }

func main() {
	var r release
	var seconds int64
	flag.StringVar(&r.from, "from", "", "folder with the built programs, manual pages and completions")
	flag.StringVar(&r.out, "o", "", "folder to write to")
	flag.StringVar(&r.version, "version", "", "version without a leading v")
	flag.Int64Var(&seconds, "date", 0, "modification time of all files, in seconds of the Unix epoch")
	flag.StringVar(&r.url, "url", "https://slipstream.dev/releases", "address under which the files will be published")
	flag.StringVar(&r.image, "image", "slipstream.dev/slipstream", "the image's repository, which the chart names")
	flag.Parse()
	r.date = time.Unix(seconds, 0).UTC()
	if err := r.write(); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

func (r release) write() error {
	if r.from == "" || r.out == "" || r.version == "" {
		return errors.New("nothing to pack: name -from, -o and -version")
	}
	platforms, err := r.platforms()
	if err != nil {
		return err
	}
	for _, p := range platforms {
		if err := r.forPlatform(p); err != nil {
			return fmt.Errorf("%s/%s: %w", p.os, p.arch, err)
		}
	}
	for what, write := range map[string]func([]platform) error{
		"bill of materials of the image": r.billOfImage, "chart": r.chart, "krew's manifest": r.krew, "Homebrew's formula": r.brew, "notes": r.notes,
	} {
		if err := write(platforms); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
	return r.checksums()
}

func (r release) forPlatform(p platform) error {
	programs, err := filepath.Glob(filepath.Join(r.dir(p), "*"))
	if err != nil {
		return err
	}
	if err := r.archive(p, programs); err != nil {
		return fmt.Errorf("archive: %w", err)
	}
	if err := r.bill(r.name(p), programs); err != nil {
		return fmt.Errorf("bill of materials: %w", err)
	}
	if p.os == "linux" {
		return r.packages(p.arch)
	}
	return nil
}

// platforms lists the platforms that programs were built for.
func (r release) platforms() (all []platform, err error) {
	entries, err := os.ReadDir(r.from)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if system, arch, is := strings.Cut(e.Name(), "_"); is && e.IsDir() {
			all = append(all, platform{system, arch})
		}
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%s has no folder OS_ARCH with programs", r.from)
	}
	return all, nil
}

// dir returns the folder of a platform's programs.
func (r release) dir(p platform) string { return filepath.Join(r.from, p.os+"_"+p.arch) }

// name returns the name of a platform's files, without an extension.
func (r release) name(p platform) string {
	return strings.Join([]string{"slipstream", r.version, p.os, p.arch}, "_")
}

// checksums writes the SHA-256 of every file, in the format of sha256sum.
func (r release) checksums() error {
	entries, err := os.ReadDir(r.out)
	if err != nil {
		return err
	}
	var text strings.Builder
	for _, e := range entries {
		sum, err := checksum(filepath.Join(r.out, e.Name()))
		if err != nil {
			return err
		}
		fmt.Fprintf(&text, "%s  %s\n", sum, e.Name())
	}
	return os.WriteFile(filepath.Join(r.out, "checksums.txt"), []byte(text.String()), 0o644)
}

func checksum(file string) (string, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%x", sha256.Sum256(content)), nil
}

// notes writes the section of CHANGELOG.md about this version, or, for a development version, the section Unreleased.
func (r release) notes([]platform) error {
	changes, err := os.ReadFile("CHANGELOG.md")
	if err != nil {
		return err
	}
	section, is := sectionOf(string(changes), r.version)
	if !is && strings.Contains(r.version, "-") {
		section, is = sectionOf(string(changes), "Unreleased")
	}
	if !is {
		return fmt.Errorf("CHANGELOG.md has no section [%s]", r.version)
	}
	return os.WriteFile(filepath.Join(r.out, "notes.md"), []byte(section), 0o644)
}

func sectionOf(changes, version string) (section string, is bool) {
	_, after, is := strings.Cut(changes, "\n## ["+version+"]")
	_, after, _ = strings.Cut(after, "\n")
	section, _, _ = strings.Cut(after, "\n## ")
	return strings.TrimSpace(section) + "\n", is
}
