package text

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestVersion checks the versions that .ci/version derives from tags and commits.
func TestVersion(t *testing.T) {
	script, err := filepath.Abs("../../.ci/version")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	run := func(name string, args ...string) string {
		t.Helper()
		cmd := exec.Command(name, args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null",
			"GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@example.test", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@example.test")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s %v: %v: %s", name, args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	commit := func() { run("git", "commit", "--quiet", "--allow-empty", "--message", "x") }
	want := func(pattern string) {
		t.Helper()
		if got := run(script); !regexp.MustCompile("^" + pattern + "$").MatchString(got) {
			t.Errorf("the version is %s, want %s", got, pattern)
		}
	}
	run("git", "init", "--quiet")
	commit()
	want(`0\.0\.1-dev\.1\.g[0-9a-f]+`)
	run("git", "tag", "v0.1.0")
	want(`0\.1\.0`)
	commit()
	run("git", "tag", "nightly") // not a version
	want(`0\.1\.1-dev\.1\.g[0-9a-f]+`)
	if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	run("git", "add", "file")
	want(`0\.1\.1-dev\.1\.g[0-9a-f]+\.dirty`)
	commit()
	run("git", "tag", "v1.0.0-rc.1")
	want(`1\.0\.0-rc\.1`)
	commit()
	want(`1\.0\.0-rc\.1\.dev\.1\.g[0-9a-f]+`)
	run("git", "tag", "--annotate", "--message", "x", "v1.0.0")
	want(`1\.0\.0`)
}
