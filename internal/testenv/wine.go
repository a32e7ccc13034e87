//go:build linux

package testenv

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// Wine runs Windows programs on Linux. Speeds measured under it say nothing about Windows.
type Wine struct {
	// Home is the user's folder on drive C.
	Home string

	prefix string
	env    []string
}

// wine64 is the path in Debian. Without the package that adds scripts it is not on PATH.
const wine64 = "/usr/lib/wine/wine64"

// NeedWine creates a Wine prefix for a test, which takes some seconds. It skips the test if Wine is not installed.
func NeedWine(t testing.TB) *Wine {
	t.Helper()
	NeedMachine(t)
	if _, err := os.Stat(wine64); err != nil {
		t.Skip("needs Wine (apt-get install wine64)")
	}
	prefix, err := os.MkdirTemp("", "slipstream-wine-")
	if err != nil {
		t.Fatal(err)
	}
	w := &Wine{prefix: prefix, env: append(os.Environ(), "WINEPREFIX="+prefix, "WINEDEBUG=-all", "WINEDLLOVERRIDES=mscoree,mshtml=")}
	t.Cleanup(func() {
		// The Wine server lingers after the last program, and holds the files.
		stop := exec.Command("/usr/lib/wine/wineserver64", "-k", "-w")
		stop.Env = w.env
		_ = stop.Run() // it fails if no server is running
		if err := os.RemoveAll(prefix); err != nil {
			t.Error(err)
		}
	})
	if out, err := w.Command("cmd", "/c", "ver").CombinedOutput(); err != nil {
		t.Fatalf("start Wine: %v: %s", err, out)
	}
	if err := os.WriteFile(filepath.Join(prefix, "drive_c/windows/system32/bcryptprimitives.dll"), prngLibrary(), 0o644); err != nil {
		t.Fatal(err)
	}
	homes, err := filepath.Glob(filepath.Join(prefix, "drive_c/users/*/Temp"))
	if err != nil || len(homes) != 1 {
		t.Fatalf("users of Wine: %v %v", homes, err)
	}
	w.Home = filepath.Dir(homes[0])
	return w
}

// Command returns a command that runs a Windows program in the user's folder.
func (w *Wine) Command(argv ...string) *exec.Cmd {
	cmd := exec.Command(wine64, argv...)
	cmd.Env, cmd.Dir = w.env, w.Home
	cmd.WaitDelay = 10 * time.Second
	return cmd
}

// Program builds slipstream for Windows.
func (w *Wine) Program(t testing.TB) string {
	t.Helper()
	return w.Build(t, "slipstream.exe", "slipstream.dev/cmd/slipstream")
}

// Build builds a Go program for Windows. Programs that run under Wine find it on their PATH.
func (w *Wine) Build(t testing.TB, name, pkg string) string {
	t.Helper()
	program := filepath.Join(w.prefix, "drive_c/windows", name)
	if err := BuildForWindows(program, pkg); err != nil {
		t.Fatal(err)
	}
	return program
}

// BuildForWindows builds a Go program for Windows.
func BuildForWindows(file, pkg string) error {
	build := exec.Command("go", "build", "-ldflags", "-s -w", "-o", file, pkg)
	build.Env = append(os.Environ(), "GOOS=windows", "GOARCH=amd64", "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s for Windows: %w: %s", pkg, err, out)
	}
	return nil
}
