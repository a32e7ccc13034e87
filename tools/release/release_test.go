package main

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
)

const version = "1.2.3-dev.4.gabc"

// built returns a folder with a small program in place of every real one. The working directory becomes the root of the repository.
func built(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	write := func(name, content string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	source := filepath.Join(dir, "main.go")
	write(source, "package main\n\nfunc main() {}\n")
	program := filepath.Join(dir, "program")
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", program, source)
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	content, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	from := filepath.Join(dir, "from")
	for _, system := range []string{"linux", "darwin", "windows"} {
		for _, arch := range []string{"amd64", "arm64"} {
			for _, name := range []string{"slipstream", "slipstream-azure"} {
				if system == "windows" {
					name += ".exe"
				}
				write(filepath.Join(from, system+"_"+arch, name), string(content))
			}
		}
	}
	write(filepath.Join(from, "man", "slipstream.1"), ".TH")
	for _, shell := range []string{"bash", "zsh", "fish", "ps1"} {
		write(filepath.Join(from, "completions", "slipstream."+shell), "# "+shell)
	}
	t.Chdir("../..")
	return from
}

func written(t *testing.T, from string) string {
	t.Helper()
	r := release{version: version, date: time.Unix(1_700_000_000, 0).UTC(), url: "https://example.test/v1", image: "example.test/slipstream", from: from, out: t.TempDir()}
	if err := r.write(); err != nil {
		t.Fatal(err)
	}
	return r.out
}

func read(t *testing.T, names ...string) []byte {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(names...))
	if err != nil {
		t.Fatal(err)
	}
	return content
}

func TestRelease(t *testing.T) {
	from := built(t)
	out := written(t, from)
	for name, test := range map[string]func(*testing.T, string){
		"files": testFiles, "archives": testArchives, "krew": testKrew, "brew": testBrew, "chart": testChart, "bill of materials": testBillOfMaterials,
	} {
		t.Run(name, func(t *testing.T) { test(t, out) })
	}
	testReproducible(t, from, out)
}

// testFiles checks which files a release consists of, and that each has its checksum.
func testFiles(t *testing.T, out string) {
	var want []string
	for _, name := range []string{
		"slipstream_V_linux_amd64.tar.gz", "slipstream_V_linux_arm64.tar.gz", "slipstream_V_darwin_amd64.tar.gz", "slipstream_V_darwin_arm64.tar.gz",
		"slipstream_V_windows_amd64.zip", "slipstream_V_windows_arm64.zip",
		"slipstream_V_linux_amd64.cdx.json", "slipstream_V_linux_arm64.cdx.json", "slipstream_V_darwin_amd64.cdx.json", "slipstream_V_darwin_arm64.cdx.json",
		"slipstream_V_windows_amd64.cdx.json", "slipstream_V_windows_arm64.cdx.json", "slipstream_V_image.cdx.json",
		"slipstream_V_amd64.deb", "slipstream_V_arm64.deb", "slipstream-azure_V_amd64.deb", "slipstream-azure_V_arm64.deb",
		"slipstream-V-1.x86_64.rpm", "slipstream-V-1.aarch64.rpm", "slipstream-azure-V-1.x86_64.rpm", "slipstream-azure-V-1.aarch64.rpm",
		"slipstream-V.tgz", "slipstream.yaml", "slipstream.rb", "notes.md",
	} {
		want = append(want, strings.Replace(name, "V", version, 1))
	}
	slices.Sort(want)
	var got []string
	for line := range strings.Lines(string(read(t, out, "checksums.txt"))) {
		sum, name, _ := strings.Cut(strings.TrimSpace(line), "  ")
		got = append(got, name)
		if is, err := checksum(filepath.Join(out, name)); err != nil || is != sum {
			t.Errorf("%s has the checksum %s, %v, and not %s", name, is, err, sum)
		}
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("it has\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// testReproducible: neither the time, nor the files' times and permissions, nor the order of things change a release.
func testReproducible(t *testing.T, from, one string) {
	t.Helper()
	err := filepath.WalkDir(from, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		return errors.Join(os.Chtimes(name, time.Time{}, time.Unix(1, 0)), os.Chmod(name, 0o600))
	})
	if err != nil {
		t.Fatal(err)
	}
	other := written(t, from)
	entries, err := os.ReadDir(one)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !bytes.Equal(read(t, one, e.Name()), read(t, other, e.Name())) {
			t.Errorf("%s differs", e.Name())
		}
	}
}

// contents returns the modes of the files of an archive.
func contents(t *testing.T, name string) map[string]fs.FileMode {
	t.Helper()
	all := make(map[string]fs.FileMode)
	if strings.HasSuffix(name, ".zip") {
		r, err := zip.OpenReader(name)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		for _, f := range r.File {
			all[f.Name] = f.Mode().Perm()
		}
		return all
	}
	eachOfTar(t, name, func(h *tar.Header, _ []byte) { all[h.Name] = fs.FileMode(h.Mode) })
	return all
}

func eachOfTar(t *testing.T, name string, do func(*tar.Header, []byte)) {
	t.Helper()
	zr, err := gzip.NewReader(bytes.NewReader(read(t, name)))
	if err != nil {
		t.Fatal(err)
	}
	tr := tar.NewReader(zr)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(tr)
		if err != nil {
			t.Fatal(err)
		}
		do(h, content)
	}
}

func testArchives(t *testing.T, out string) {
	common := map[string]fs.FileMode{
		"LICENSE": 0o644, "README.md": 0o644, "CHANGELOG.md": 0o644, "man/slipstream.1": 0o644, "completions/slipstream.bash": 0o644,
		"completions/slipstream.zsh": 0o644, "completions/slipstream.fish": 0o644, "completions/slipstream.ps1": 0o644,
	}
	for name, more := range map[string]map[string]fs.FileMode{
		"linux_arm64.tar.gz":  {"slipstream": 0o755, "slipstream-azure": 0o755, "slipstream-agent.service": 0o644, "policy.yaml": 0o644},
		"darwin_amd64.tar.gz": {"slipstream": 0o755, "slipstream-azure": 0o755},
		"windows_amd64.zip":   {"slipstream.exe": 0o755, "slipstream-azure.exe": 0o755},
	} {
		folder, _, _ := strings.Cut(name, ".")
		want := make(map[string]fs.FileMode)
		for _, files := range []map[string]fs.FileMode{common, more} {
			for file, mode := range files {
				want[path.Join("slipstream_"+version+"_"+folder, file)] = mode
			}
		}
		if got := contents(t, filepath.Join(out, "slipstream_"+version+"_"+name)); !maps.Equal(got, want) {
			t.Errorf("%s has\n%v, want\n%v", name, got, want)
		}
	}
}

// testKrew checks what krew's index asks of a manifest, beyond what krew's own validation does.
func testKrew(t *testing.T, out string) {
	var manifest struct {
		Spec struct {
			Version   string
			Short     string `yaml:"shortDescription"`
			Platforms []struct {
				Selector struct {
					MatchLabels struct{ OS, Arch string } `yaml:"matchLabels"`
				}
				URI, SHA256, Bin string
				Files            []struct{ From, To string }
			}
		}
	}
	if err := yaml.Unmarshal(read(t, out, "slipstream.yaml"), &manifest); err != nil {
		t.Fatal(err)
	}
	s := manifest.Spec
	if s.Version != "v"+version || s.Short == "" || len(s.Short) > 50 || strings.HasSuffix(s.Short, ".") {
		t.Errorf("version %s, short description %q of %d characters", s.Version, s.Short, len(s.Short))
	}
	selected := make(map[string]bool)
	for _, p := range s.Platforms {
		labels := p.Selector.MatchLabels
		selected[labels.OS+"/"+labels.Arch] = true
		archive, is := strings.CutPrefix(p.URI, "https://example.test/v1/")
		if sum, err := checksum(filepath.Join(out, archive)); !is || err != nil || sum != p.SHA256 {
			t.Errorf("%s has the checksum %s, %v, and not %s", p.URI, sum, err, p.SHA256)
		}
		files := contents(t, filepath.Join(out, archive))
		for _, name := range []string{p.Bin, "LICENSE"} {
			if _, is := files[path.Join(path.Dir(p.Files[0].From), name)]; !is {
				t.Errorf("%s has no %s", archive, name)
			}
		}
	}
	for _, want := range []string{"linux/amd64", "linux/arm64", "darwin/amd64", "darwin/arm64", "windows/amd64", "windows/arm64"} {
		if !selected[want] {
			t.Errorf("no platform is for %s", want)
		}
	}
}

func testBrew(t *testing.T, out string) {
	formula := string(read(t, out, "slipstream.rb"))
	if desc := regexp.MustCompile(`desc "(.*)"`).FindStringSubmatch(formula); desc == nil || len(desc[1]) > 80 {
		t.Errorf("Homebrew refuses this description: %q", desc)
	}
	found := regexp.MustCompile(`(?m)^  on_(\w+) do$|^    on_(\w+) do\n      url "https://example\.test/v1/(.*)"\n      sha256 "(.*)"$`).FindAllStringSubmatch(formula, -1)
	system, archives := "", make(map[string]string)
	for _, m := range found {
		if m[1] != "" {
			system = m[1]
			continue
		}
		archives[system+" "+m[2]] = m[3]
		if sum, err := checksum(filepath.Join(out, m[3])); err != nil || sum != m[4] {
			t.Errorf("%s has the checksum %s, %v, and not %s", m[3], sum, err, m[4])
		}
	}
	want := make(map[string]string)
	for on, name := range map[string]string{"macos arm": "darwin_arm64", "macos intel": "darwin_amd64", "linux arm": "linux_arm64", "linux intel": "linux_amd64"} {
		want[on] = "slipstream_" + version + "_" + name + ".tar.gz"
	}
	if !maps.Equal(archives, want) {
		t.Errorf("it has %v, want %v in\n%s", archives, want, formula)
	}
}

func testChart(t *testing.T, out string) {
	found := 0
	eachOfTar(t, filepath.Join(out, "slipstream-"+version+".tgz"), func(h *tar.Header, content []byte) {
		for file, lines := range map[string][]string{
			"slipstream/Chart.yaml":  {"\nversion: " + version + "\n", "\nappVersion: " + version + "\n"},
			"slipstream/values.yaml": {"\n  repository: example.test/slipstream\n"},
		} {
			for _, line := range lines {
				if file == h.Name && strings.Contains(string(content), line) {
					found++
				}
			}
		}
	})
	if found != 3 {
		t.Errorf("%d of 3 lines are those of the release", found)
	}
	if _, err := (release{}).edit("Chart.yaml", []byte("version: 1\nversion: 2\n")); err == nil {
		t.Error("a chart with two versions is taken")
	}
}

func testBillOfMaterials(t *testing.T, out string) {
	var bill struct {
		BOMFormat string
		Metadata  struct {
			Component struct{ Name, Version string }
		}
		Components []struct{ Name, Version, PURL string }
	}
	if err := json.Unmarshal(read(t, out, "slipstream_"+version+"_image.cdx.json"), &bill); err != nil {
		t.Fatal(err)
	}
	if c := bill.Metadata.Component; bill.BOMFormat != "CycloneDX" || c.Name != "slipstream" || c.Version != version {
		t.Errorf("%+v", bill)
	}
	if len(bill.Components) != 1 || bill.Components[0].Name != "std" || !strings.HasPrefix(bill.Components[0].PURL, "pkg:golang/std@1.") {
		t.Errorf("a program without modules has %+v", bill.Components)
	}
}

func TestNotes(t *testing.T) {
	const changes = "# Changelog\n\n## [Unreleased]\n\n- new\n\n## [0.2.0] - 2026-01-02\n\n- old\n\n## [0.1.0] - 2026-01-01\n\n- first\n"
	for version, want := range map[string]string{"Unreleased": "- new\n", "0.2.0": "- old\n", "0.1.0": "- first\n"} {
		if got, is := sectionOf(changes, version); !is || got != want {
			t.Errorf("of %s: %q", version, got)
		}
	}
	t.Chdir("../..")
	if err := (release{version: "99.0.0", out: t.TempDir()}).notes(nil); err == nil || !strings.Contains(err.Error(), "no section [99.0.0]") {
		t.Errorf("a release that CHANGELOG.md does not have: %v", err)
	}
}

func TestNothingBuilt(t *testing.T) {
	for want, r := range map[string]release{
		"name -from":        {},
		"has no folder":     {from: t.TempDir(), out: t.TempDir(), version: version},
		"no such file or d": {from: filepath.Join(t.TempDir(), "none"), out: t.TempDir(), version: version},
	} {
		if err := r.write(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}
