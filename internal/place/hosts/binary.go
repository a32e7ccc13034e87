package hosts

import (
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
)

// binary is a build of this program. system and arch are Go's names.
type binary struct {
	file, system, arch string
	size               int64
	sum                string // SHA-256, in hexadecimal
}

// hostSystems are the operating systems that a worker runs on.
var hostSystems = []string{"linux", "windows"}

// mainPackage names this program in the build information of a binary.
const mainPackage = "slipstream.dev/cmd/slipstream"

// binaries returns the files that the user names, and this program itself if its system can run workers.
func binaries(named []string) (all []binary, err error) {
	for _, file := range named {
		info, err := buildinfo.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("--host-binary %s: it is not a build of this program: %w", file, err)
		}
		setting := func(key string) string {
			for _, s := range info.Settings {
				if s.Key == key {
					return s.Value
				}
			}
			return ""
		}
		if info.Path != mainPackage || !slices.Contains(hostSystems, setting("GOOS")) {
			return nil, fmt.Errorf("--host-binary %s: must be slipstream for Linux or Windows, is %s for %s", file, info.Path, setting("GOOS"))
		}
		all = append(all, binary{file: file, system: setting("GOOS"), arch: setting("GOARCH")})
	}
	if slices.Contains(hostSystems, runtime.GOOS) {
		self, err := os.Executable()
		if err != nil {
			return nil, fmt.Errorf("find this program: %w", err)
		}
		all = append(all, binary{file: self, system: runtime.GOOS, arch: runtime.GOARCH})
	}
	for i := range all {
		if err := all[i].measure(); err != nil {
			return nil, err
		}
	}
	return all, nil
}

func (b *binary) measure() error {
	f, err := os.Open(b.file)
	if err != nil {
		return fmt.Errorf("read the program to copy: %w", err)
	}
	defer f.Close()
	sum := sha256.New()
	if b.size, err = io.Copy(sum, f); err != nil {
		return fmt.Errorf("read the program to copy: %w", err)
	}
	b.sum = hex.EncodeToString(sum.Sum(nil))
	return nil
}

// architectures maps the names that uname -m and Windows print to Go's.
var architectures = map[string]string{"x86_64": "amd64", "aarch64": "arm64", "AMD64": "amd64"}

// fitting returns the binary for a machine. uname is the output of uname -sm, such as "Linux x86_64", or of factsWindows, such
// as "Windows AMD64".
func fitting(all []binary, name, uname string) (binary, error) {
	system, machine, _ := strings.Cut(uname, " ")
	system = strings.ToLower(system)
	if !slices.Contains(hostSystems, system) {
		return binary{}, fmt.Errorf("host %s runs %s, and a worker needs Linux or Windows: name another host", name, uname)
	}
	arch := architectures[machine]
	if arch == "" {
		builds := map[string]string{"linux": "Linux on x86_64 and aarch64", "windows": "Windows on AMD64"}[system]
		return binary{}, fmt.Errorf("host %s is of the architecture %s; there are builds of this program for %s", name, machine, builds)
	}
	if i := slices.IndexFunc(all, func(b binary) bool { return b.system == system && b.arch == arch }); i >= 0 {
		return all[i], nil
	}
	how := "make image leaves bin/image/" + arch + "/slipstream"
	if system == "windows" {
		how = "make windows leaves bin/slipstream.exe"
	}
	return binary{}, fmt.Errorf("host %s needs a build of this program for %s/%s, and none was found: build one (%s) and name it with --host-binary", name, system, arch, how)
}
