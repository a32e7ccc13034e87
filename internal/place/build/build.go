// Package build finds builds of this program for machines to which a run copies it: hosts, and pods whose image lacks it. It has the
// shell command by which such a machine checks the copy. It copies nothing; place/hosts and place/kube do.
package build

import (
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

// Build is a build of this program. System and Arch are Go's names.
type Build struct {
	File, System, Arch string
	Size               int64
	Sum                string // SHA-256, in hexadecimal
}

// Systems are the operating systems that a worker runs on.
var Systems = []string{"linux", "windows"}

// mainPackage names this program in the build information of a binary.
const mainPackage = "slipstream.dev/cmd/slipstream"

// Find returns the builds that the user names, this program itself if its system can run workers, and, for other architectures, those that make
// image has left beside it. It ignores builds older than this program, which may be of another version.
func Find(named []string) (all []Build, err error) {
	for _, file := range named {
		b, err := read(file)
		if err != nil {
			return nil, fmt.Errorf("--host-binary %s: %w", file, err)
		}
		all = append(all, b)
	}
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	own, err := os.Stat(self)
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	if slices.Contains(Systems, runtime.GOOS) {
		all = append(all, Build{File: self, System: runtime.GOOS, Arch: runtime.GOARCH})
	}
	for _, arch := range []string{"amd64", "arm64"} {
		if slices.ContainsFunc(all, func(b Build) bool { return b.System == "linux" && b.Arch == arch }) {
			continue // Fit would not choose it, so do not hash it
		}
		file := filepath.Join(filepath.Dir(self), "image", arch, "slipstream")
		if info, err := os.Stat(file); err != nil || info.ModTime().Before(own.ModTime()) {
			continue
		}
		if b, err := read(file); err == nil {
			all = append(all, b)
		}
	}
	for i := range all {
		if err := all[i].measure(); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// read returns the build in a file, not measured yet.
func read(file string) (Build, error) {
	info, err := buildinfo.ReadFile(file)
	if err != nil {
		return Build{}, fmt.Errorf("it is not a build of this program: %w", err)
	}
	setting := func(key string) string {
		for _, s := range info.Settings {
			if s.Key == key {
				return s.Value
			}
		}
		return ""
	}
	if info.Path != mainPackage || !slices.Contains(Systems, setting("GOOS")) {
		return Build{}, fmt.Errorf("must be slipstream for Linux or Windows, is %s for %s", info.Path, setting("GOOS"))
	}
	return Build{File: file, System: setting("GOOS"), Arch: setting("GOARCH")}, nil
}

func (b *Build) measure() error {
	f, err := os.Open(b.File)
	if err != nil {
		return fmt.Errorf("read the program to copy: %w", err)
	}
	defer f.Close()
	sum := sha256.New()
	if b.Size, err = io.Copy(sum, f); err != nil {
		return fmt.Errorf("read the program to copy: %w", err)
	}
	b.Sum = hex.EncodeToString(sum.Sum(nil))
	return nil
}

// Fit returns the first build for a system and an architecture. Its error names the machine that needs one, such as "host a".
func Fit(all []Build, machine, system, arch string) (Build, error) {
	if i := slices.IndexFunc(all, func(b Build) bool { return b.System == system && b.Arch == arch }); i >= 0 {
		return all[i], nil
	}
	how := "make image leaves bin/image/" + arch + "/slipstream"
	if system == "windows" {
		how = "make windows leaves bin/slipstream.exe"
	}
	return Build{}, fmt.Errorf("%s needs a build of this program for %s/%s, and none was found: build one (%s) and name it with --host-binary", machine, system, arch, how)
}

// sums are programs that print the SHA-256 of their standard input as the first word. Almost every machine has one of them.
var sums = []string{"sha256sum", "shasum -a 256", "openssl dgst -sha256 -r"}

// SumCommand is the shell command that runs the first of sums that a machine has. It prints none if there is none.
var SumCommand = func() string {
	var text strings.Builder
	for _, sum := range sums {
		program, _, _ := strings.Cut(sum, " ")
		fmt.Fprintf(&text, "if command -v %s >/dev/null 2>&1; then %s; el", program, sum)
	}
	return text.String() + "se echo none; fi"
}()
