package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestVerify seals a result, verifies the bundle and the folder, and finds a changed byte in both.
func TestVerify(t *testing.T) {
	folder, file := filepath.Join(t.TempDir(), "old"), filepath.Join(t.TempDir(), "old.zip")
	if err := os.CopyFS(folder, os.DirFS("testdata/before-series")); err != nil {
		t.Fatal(err)
	}
	code, out, errs := slipstream(t, "report", folder, "--bundle", file)
	if code != exitGood || out != "" || !strings.Contains(errs, "SHA-256 ") {
		t.Fatalf("exit code %d, %q, %q", code, out, errs)
	}
	sum := errs[strings.Index(errs, "SHA-256 "):]
	code, out, errs = slipstream(t, "verify", file)
	if code != exitGood || errs != "" || !strings.Contains(out, sum) || !strings.Contains(out, "18 trials: the metrics follow from what was measured; 1 more failed") {
		t.Errorf("exit code %d, %q, %q", code, errs, out)
	}
	has(t, "verify", out, "summary.json, summary.csv, report.html and ")
	if code, _, errs = slipstream(t, "verify", folder); code != exitFailed || !strings.Contains(errs, "summary.json: is missing") {
		t.Errorf("the folder has no summary: exit code %d, %q", code, errs)
	}
	if code, _, errs = slipstream(t, "report", folder); code != exitGood {
		t.Fatal(errs)
	}
	if code, out, errs = slipstream(t, "verify", filepath.Join(folder, "report.html")); code != exitGood || errs != "" || strings.Contains(out, "SHA-256") {
		t.Errorf("exit code %d, %q, %q", code, errs, out)
	}
	for _, path := range []string{file, filepath.Join(folder, "summary.json")} {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		at := bytes.Index(data, []byte(`"ratio": `)) + len(`"ratio": `)
		data[at]++
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		if code, out, errs = slipstream(t, "verify", path); code != exitFailed || out != "" || errs == "" {
			t.Errorf("%s was changed: exit code %d, %q, %q", path, code, out, errs)
		}
	}
	for _, args := range [][]string{{"verify"}, {"verify", "/nowhere"}, {"report", folder, folder, "--bundle", "x"}} {
		if code, _, _ := slipstream(t, args...); code != exitUsage {
			t.Errorf("%q: exit code %d", args, code)
		}
	}
}
