package cli

import (
	"encoding/json"
	"encoding/xml"
	"html"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"slipstream.dev/internal/stats"
)

func TestCompareGate(t *testing.T) {
	before := result(t, resultYAML, 6, 1)
	after := result(t, resultYAML, 6, 2)
	effects["rfs"] = [3]float64{0.8, 1, 1}
	slower := result(t, resultYAML, 6, 3)
	effects["rfs"] = [3]float64{1, 1, 1}
	few := result(t, resultYAML, 1, 4)
	fewer := strings.Replace(resultYAML, "  - {name: rfs, accelerate: [{rfs: {devices: [nic]}}]}\n", "", 1)
	missing := result(t, fewer, 6, 5)
	for name, c := range map[string]struct {
		args                  []string
		plain, gate, strict   int
		gateSays, alwaysShown string
	}{
		"with itself":           {[]string{before, before}, 0, 0, 0, "", "0 slower, 10 the same"},
		"noisy with itself":     {[]string{few, few}, 0, 0, 0, "", "is unfinished: 10 of 60 trials are done"},
		"the same again":        {[]string{before, after, "--margin", "0.05"}, 0, 0, 0, "", "10 the same"},
		"slower":                {[]string{before, slower}, 0, 3, 3, "the second result is slower", "rfs: stream throughput −"},
		"slower, not asked for": {[]string{before, slower, "--only", "variant=vxlan,native", "--margin=0.05"}, 0, 0, 0, "", "4 the same"},
		"inconclusive":          {[]string{before, few}, 0, 0, 4, "too much noise", "10 inconclusive"},
		"missing":               {[]string{before, missing, "--margin", "0.05"}, 0, 0, 4, "missing from one of the results", "missing: rfs stream at 1 pair: not in"},
		"interrupts":            {[]string{before, after, "--only", "metric=interrupts_per_gb"}, 0, 0, 0, "", "5 the same"},
		"nothing to compare":    {[]string{before, after, "--only", "metric=completion"}, 0, 4, 4, "in common", "nothing was compared"},
	} {
		t.Run(name, func(t *testing.T) {
			for flag, want := range map[string]int{"": c.plain, "--gate": c.gate, "--gate=strict": c.strict} {
				args := append([]string{"compare"}, c.args...)
				if flag != "" {
					args = append(args, flag)
				}
				code, stdout, stderr := slipstream(t, args...)
				if code != want {
					t.Errorf("%q: exit %d, want %d\n%s%s", flag, code, want, stdout, stderr)
				}
				has(t, "standard output", strings.Join(strings.Fields(stdout), " "), c.alwaysShown)
				if want != 0 {
					has(t, "the error", stderr, c.gateSays)
				}
			}
		})
	}
}

func TestCompareUsage(t *testing.T) {
	dir := result(t, resultYAML, 1, 1)
	for want, args := range map[string][]string{
		`--only path=x: must be variant=NAME`:                                 {"--only", "path=x"},
		`--only variant=fastpth: there is no variant "fastpth"; did you mean`: {"--only", "variant=fastpth"},
		`--only metric=latency: there is no metric "latency"`:                 {"--only", "metric=latency"},
		`--only metric=loss: loss is compared with nothing`:                   {"--only", "metric=loss"},
		`--format pdf: there is no such format`:                               {"--format", "pdf"},
		`--gate=hard: there is no such gate`:                                  {"--gate=hard"},
		`--margin 2: must be above 0`:                                         {"--margin", "2"},
		`write --gate=strict, with =`:                                         {"--gate", "strict"},
	} {
		code, _, stderr := slipstream(t, append([]string{"compare", dir, dir}, args...)...)
		if code != 2 {
			t.Errorf("%v: exit %d", args, code)
		}
		has(t, strings.Join(args, " "), stderr, want)
	}
}

// TestReportOfTwo: one page has both results, and shows what changed and how the runs
// differ. It is written to the second folder.
func TestReportOfTwo(t *testing.T) {
	before := result(t, resultYAML, 6, 1)
	effects["rfs"] = [3]float64{0.8, 1.3, 1}
	after := result(t, strings.Replace(resultYAML, "stream: {duration", "stream: {connections: 3, duration", 1), 5, 2)
	effects["rfs"] = [3]float64{1, 1, 1}
	code, stdout, stderr := slipstream(t, "report", before, after)
	path := filepath.Join(after, "beside-"+filepath.Base(before)+".html")
	if code != 0 || stdout != "Report: "+path+"\n" {
		t.Fatalf("exit %d\n%s%s", code, stdout, stderr)
	}
	page, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	has(t, "the page", html.UnescapeString(string(page)), "Slower: rfs: pingpong median latency +", "connections 1 and 3. It was not compared.", "50 of 60 trials are done", "3 connections per pair",
		`<h2>`+before, `<h2>`+after) // the folders have the same name, so their paths tell them apart
	if code, _, stderr := slipstream(t, "compare", before, after); code != 2 || !strings.Contains(stderr, "connections 1 and 3; name the workloads to compare by --only") {
		t.Errorf("compare of other traffic: exit %d, %s", code, stderr)
	}
	if _, stdout, _ := slipstream(t, "report", before, after, "--format", "html"); stdout != string(page) {
		t.Error("standard output has another page than the folder")
	}
	for want, args := range map[string][]string{
		"--format md: two results side by side are always html; slipstream compare writes": {"--format", "md"},
		"--figures is for one result": {"--figures", "png"},
	} {
		code, _, stderr := slipstream(t, append([]string{"report", before, after}, args...)...)
		if code != 2 {
			t.Errorf("%v: exit %d", args, code)
		}
		has(t, "the error", stderr, want)
	}
}

// TestCompareSetups: a comparison begins with the differences between the setups of the runs.
func TestCompareSetups(t *testing.T) {
	before, same := result(t, resultYAML, 6, 1), result(t, resultYAML, 6, 2)
	other := result(t, strings.Replace(resultYAML, "shape: flannel", "shape: calico", 1), 6, 2)
	_, stdout, _ := slipstream(t, "compare", before, other)
	has(t, "another shape", strings.Join(strings.Fields(stdout), " "), "! Variant vxlan differs: VXLAN (flannel) in ", "VXLAN (calico) in ")
	small := result(t, strings.Replace(resultYAML, "{nodes: 2}", "{nodes: 2, nic: {mtu: 1400}}", 1), 6, 2)
	_, stdout, _ = slipstream(t, "compare", before, small)
	has(t, "another NIC", strings.Join(strings.Fields(stdout), " "), "! Lab differs: NIC offload full, MTU 1500 in ", "NIC offload full, MTU 1400 in ")
	if _, stdout, _ := slipstream(t, "compare", before, same); strings.Contains(stdout, "differs") {
		t.Errorf("the same setup:\n%s", stdout)
	}
}

// TestCompareFormats: each format says what was compared, what is slower, and that a
// result is unfinished.
func TestCompareFormats(t *testing.T) {
	before := result(t, resultYAML, 6, 1)
	effects["rfs"] = [3]float64{0.8, 1, 1}
	after := result(t, resultYAML, 5, 2)
	effects["rfs"] = [3]float64{1, 1, 1}
	for _, format := range []string{"text", "md", "json", "junit", "html"} {
		stdout, _ := succeed(t, "compare", before, after, "--format", format)
		has(t, format, strings.Join(strings.Fields(stdout), " "), "50 of 60 trials are done", "rfs", "slower") // text is wrapped
		switch format {
		case "json":
			var c stats.Comparison
			if err := json.Unmarshal([]byte(stdout), &c); err != nil || c.Gate != stats.GateSlower || len(c.Changes) == 0 {
				t.Errorf("json: %v, gate %s", err, c.Gate)
			}
		case "junit":
			var s struct {
				Tests    int `xml:"tests,attr"`
				Failures int `xml:"failures,attr"`
				Cases    []struct {
					Name    string `xml:"name,attr"`
					Failure *struct {
						Message string `xml:"message,attr"`
					} `xml:"failure"`
				} `xml:"testcase"`
			}
			if err := xml.Unmarshal([]byte(stdout), &s); err != nil {
				t.Fatal(err)
			}
			if s.Tests != 10 || len(s.Cases) != 10 || s.Failures != 1 {
				t.Errorf("junit: %d tests, %d cases, %d failures", s.Tests, len(s.Cases), s.Failures)
			}
			for _, c := range s.Cases {
				if c.Failure != nil {
					has(t, "the failure", c.Failure.Message, "rfs: stream throughput −")
				}
			}
		}
	}
}

// TestCompareAgainst: the result to compare with is chosen by a label.
func TestCompareAgainst(t *testing.T) {
	parent := madeOn(t, 3, 4)
	before := filepath.Join(parent, "made-20260103T150405Z", "environment.json")
	text, err := os.ReadFile(before)
	if err != nil {
		t.Fatal(err)
	}
	labelled := strings.Replace(string(text), `"command":`, `"labels": {"branch": "main"}, "command":`, 1)
	if err := os.WriteFile(before, []byte(labelled), 0o600); err != nil {
		t.Fatal(err)
	}
	out, _ := succeed(t, "compare", filepath.Join(parent, "latest"), "--against", "main")
	has(t, "the comparison", out, "made-20260104T150405Z compared with made-20260103T150405Z")
	code, _, errs := slipstream(t, "compare", filepath.Join(parent, "latest"), "--against", "mai")
	if code != exitUsage {
		t.Errorf("exit %d", code)
	}
	has(t, "the error", errs, "has no other complete result of made with a label mai")
}
