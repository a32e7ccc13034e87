package bundle

import (
	"archive/zip"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"slipstream.dev/internal/experiment"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

const experimentText = `
apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: sealed}
spec:
  target: {lab: {}}
  path: {vxlan: {}}
  baseline: vxlan
  variants:
  - name: vxlan
  - name: native
    path: {native: {}}
  workloads:
  - name: stream
    stream: {duration: 1s}
  - name: pingpong
    pingpong: {duration: 1s}
  pairs: [2]
  runs: 5
`

var this = Program{"v1.2.3", "amd64"}

// folder makes the results folder of a run with two pairs, without what is computed from it.
func folder(tb testing.TB) *record.Dir {
	tb.Helper()
	exp, err := spec.Parse("experiment.yaml", []byte(experimentText), nil)
	if err != nil {
		tb.Fatal(err)
	}
	text, err := spec.Marshal(exp)
	if err != nil {
		tb.Fatal(err)
	}
	at := time.Date(2026, 9, 1, 8, 30, 0, 0, time.UTC)
	dir, err := record.Create(tb.TempDir(), "sealed", at, text, record.Environment{Version: this.Version, Started: at, Nodes: []record.Node{{Name: "node0", Boot: "b"}, {Name: "node1", Boot: "b"}}})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { dir.Close() })
	r := rand.New(rand.NewPCG(1, 2))
	order := 0
	for block := 1; block <= 5; block++ {
		for _, v := range exp.Spec.Variants {
			for _, w := range exp.Spec.Workloads {
				order++
				if err := dir.Append(trial(tb, r, exp, block, order, v, w)); err != nil {
					tb.Fatal(err)
				}
			}
		}
	}
	return dir
}

// trial makes a trial whose metrics are computed like those of a run.
func trial(tb testing.TB, r *rand.Rand, exp *spec.Experiment, block, order int, v spec.Variant, w spec.Workload) record.Trial {
	tb.Helper()
	t := record.Trial{Block: block, Order: order, Variant: v.Name, Workload: w.Name, Pairs: 2, Attempt: 1, Status: record.StatusOK}
	for i := range 2 {
		var p record.Pair
		p.Client = record.Endpoint{Place: fmt.Sprintf("pod%d", i), Seconds: 1, Messages: 1000 + r.Uint64N(100)}
		p.Server = record.Endpoint{Place: fmt.Sprintf("pod%d", i+2), Seconds: 1, Bytes: 1e9 + r.Uint64N(1e8)}
		p.Server.BitsPerSecond = float64(8 * p.Server.Bytes)
		if w.PingPong != nil {
			h := record.NewHistogram()
			for range 200 {
				if err := h.RecordValue(20_000 + r.Int64N(10_000)); err != nil {
					tb.Fatal(err)
				}
			}
			var err error
			if p.Client.Latency, err = record.EncodeHistogram(h); err != nil {
				tb.Fatal(err)
			}
		}
		t.PerPair = append(t.PerPair, p)
	}
	t.Hosts = []record.Host{{Boot: "b", Nodes: []string{"node0", "node1"}, Seconds: 1, Source: record.SoftirqEBPF, CPUs: []record.CPU{{Busy: 0.5 + r.Float64()/10, Softirq: 0.2}}}}
	if err := experiment.Imported(experiment.Cell{Variant: v, Workload: exp.WorkloadFor(v, w), Pairs: 2}, &t); err != nil {
		tb.Fatal(err)
	}
	return t
}

func sealed(tb testing.TB, dir *record.Dir) []byte {
	tb.Helper()
	var b bytes.Buffer
	if err := Seal(&b, dir, this); err != nil {
		tb.Fatal(err)
	}
	return b.Bytes()
}

func TestSeal(t *testing.T) {
	dir := folder(t)
	data := sealed(t, dir)
	if !bytes.Equal(data, sealed(t, dir)) {
		t.Error("the same result gave other bytes")
	}
	b, err := Open(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	v, err := b.Verify(this)
	if err != nil {
		t.Fatal(err)
	}
	if v.Trials != 20 || v.Unmeasured != 0 || len(v.Otherwise) != 0 || v.Hash != hash(data) || v.Result != filepath.Base(dir.Path) {
		t.Errorf("verified %+v", v)
	}
	for _, want := range []string{"summary.json", "summary.csv", "report.html"} {
		if !slices.Contains(v.Files, want) {
			t.Errorf("%s was not verified", want)
		}
	}
	if !slices.ContainsFunc(v.Files, func(name string) bool { return strings.HasPrefix(name, "figures/") }) {
		t.Error("no figure was verified")
	}
	// Other programs read it: each file is below one folder.
	z, err := zip.NewReader(bytes.NewReader(data), int64(len(data)))
	if err != nil {
		t.Fatal(err)
	}
	if err := fs.WalkDir(z, ".", func(path string, d fs.DirEntry, err error) error {
		if err == nil && path != "." && !strings.HasPrefix(path, v.Result) {
			t.Errorf("%s is outside of %s", path, v.Result)
		}
		return err
	}); err != nil {
		t.Error(err)
	}
}

// parts returns the files of a bundle, the manifest first, and their folder.
func parts(tb testing.TB, data []byte) ([]file, string) {
	tb.Helper()
	z, err := zip.NewReader(bytes.NewReader(data), int64(len(data)))
	if err != nil {
		tb.Fatal(err)
	}
	all, folder, err := unpack(z, uint64(len(data)))
	if err != nil {
		tb.Fatal(err)
	}
	for i := range all {
		all[i].data = bytes.Clone(all[i].data)
	}
	return all, folder
}

func bundled(tb testing.TB, folder string, files []file) []byte {
	tb.Helper()
	var b bytes.Buffer
	if err := write(&b, folder, files); err != nil {
		tb.Fatal(err)
	}
	return b.Bytes()
}

// verifyFiles verifies a bundle of these files.
func verifyFiles(tb testing.TB, folder string, files []file, by Program) (Verified, error) {
	tb.Helper()
	b, err := Open(bytes.NewReader(bundled(tb, folder, files)))
	if err != nil {
		tb.Fatal(err)
	}
	return b.Verify(by)
}

// TestChangedByte changes a byte of each file, without other hashes.
func TestChangedByte(t *testing.T) {
	data := sealed(t, folder(t))
	count, name := parts(t, data)
	for i := range count[1:] {
		files, _ := parts(t, data)
		f := &files[i+1]
		f.data[len(f.data)/2] ^= 1
		_, err := verifyFiles(t, name, files, this)
		d, ok := errors.AsType[Difference](err)
		if !ok || d.File != f.name {
			t.Errorf("%s was changed: %v", f.name, err)
		}
		b, err := Open(bytes.NewReader(bundled(t, name, files)))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.Result(); !errors.Is(err, d) {
			t.Errorf("%s was changed, and the result was read: %v", f.name, err)
		}
		if strings.HasSuffix(f.name, lines) && (!strings.Contains(d.Is, "line 1") || !strings.Contains(d.Is, "changed after it was sealed")) {
			t.Errorf("%v does not name the line", err)
		}
	}
	files, _ := parts(t, data)
	files[3].data = append(files[3].data, "{}\n"...)
	if _, err := verifyFiles(t, name, files, this); err == nil || !strings.Contains(err.Error(), "line 21 was added") {
		t.Errorf("a line was added: %v", err)
	}
	files, _ = parts(t, data)
	files[3].data = files[3].data[:bytes.LastIndexByte(files[3].data[:len(files[3].data)-1], '\n')+1]
	if _, err := verifyFiles(t, name, files, this); err == nil || !strings.Contains(err.Error(), "line 20 was sealed, and is missing") {
		t.Errorf("a line was removed: %v", err)
	}
	files, _ = parts(t, data)
	if _, err := verifyFiles(t, name, files[:len(files)-1], this); err == nil || !strings.Contains(err.Error(), "is missing") {
		t.Errorf("a file was removed: %v", err)
	}
}

// change replaces text in a file, once.
func change(tb testing.TB, files []file, name, old, by string) {
	tb.Helper()
	i := slices.IndexFunc(files, func(f file) bool { return f.name == name })
	if i < 0 || !bytes.Contains(files[i].data, []byte(old)) {
		tb.Fatalf("%s has no %q", name, old)
	}
	files[i].data = bytes.Replace(files[i].data, []byte(old), []byte(by), 1)
}

// reseal makes a manifest for changed files, as somebody could who wants to hide a change.
func reseal(tb testing.TB, files []file, by Program) {
	tb.Helper()
	var m manifest
	if err := json.Unmarshal(files[0].data, &m); err != nil {
		tb.Fatal(err)
	}
	m.Program, m.Files = by, nil
	for _, f := range files[1:] {
		m.Files = append(m.Files, sumOf(f))
	}
	var err error
	if files[0].data, err = json.Marshal(m); err != nil {
		tb.Fatal(err)
	}
}

// TestResealed: what was changed before it was sealed does not follow from the rest.
func TestResealed(t *testing.T) {
	data := sealed(t, folder(t))
	files, _ := parts(t, data)
	figure := files[len(files)-1].name
	trials, err := record.ReadTrials(bytes.NewReader(files[3].data))
	if err != nil {
		t.Fatal(err)
	}
	pings, streams := trials[1], trials[0]
	quoted := func(v any) string {
		text, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	for name, tt := range map[string]struct{ file, old, by, want string }{
		"a trial's metric":    {"trials.jsonl", `"throughput":` + quoted(streams.Metrics["throughput"]), `"throughput":3e10`, "line 1 (block 1, vxlan, stream at 2 pairs): throughput is recorded as 3e+10, but what was measured gives"},
		"a pair's bytes":      {"trials.jsonl", `"bits_per_second":`, `"bits_per_second":1`, "line 1 (block 1, vxlan, stream at 2 pairs): "},
		"a latency":           {"trials.jsonl", `"latency_p99":` + quoted(pings.Metrics["latency_p99"]), `"latency_p99":1e-6`, "latency_p99 is recorded as 1e-06"},
		"a trial's histogram": {"trials.jsonl", `"latency":` + quoted(pings.Latency), `"latency":` + quoted(trials[5].Latency), "its histogram is not that of its pairs"},
		"a pair's histogram":  {"trials.jsonl", quoted(pings.PerPair[0].Client.Latency), quoted(pings.PerPair[1].Client.Latency), "line 2 (block 1, vxlan, pingpong at 2 pairs): "},
		"the summary":         {"summary.json", `"ratio": `, `"ratio": 1`, "stream at 2 pairs, throughput: ratio is 1"},
		"a verdict":           {"summary.json", `"verdict": "`, `"verdict": "s`, "and the trials give"},
		"the table":           {"summary.csv", "vxlan,stream,2,throughput", "vxlan,stream,3,throughput", "line 2 is another"},
		"the report":          {"report.html", "pairs", "pears", "does not follow from the trials: line"},
		"a figure":            {figure, "</svg>", "<g/></svg>", "does not follow from the trials: line"},
	} {
		t.Run(name, func(t *testing.T) {
			files, folder := parts(t, data)
			change(t, files, tt.file, tt.old, tt.by)
			reseal(t, files, this)
			_, err := verifyFiles(t, folder, files, this)
			if d, ok := errors.AsType[Difference](err); !ok || d.File != tt.file || !strings.Contains(d.Is, tt.want) {
				t.Errorf("got %v, want %s: … %s", err, tt.file, tt.want)
			}
		})
	}
	t.Run("a file", func(t *testing.T) {
		files, folder := parts(t, data)
		files = append(files, file{"figures/zz.svg", []byte("<svg/>")})
		reseal(t, files, this)
		if _, err := verifyFiles(t, folder, files, this); err == nil || !strings.Contains(err.Error(), "figures/zz.svg: does not follow") {
			t.Errorf("got %v", err)
		}
	})
}

// TestOtherVersion: another version may lay a report out otherwise, but its numbers have to be the same.
func TestOtherVersion(t *testing.T) {
	data := sealed(t, folder(t))
	old := Program{"v1.0.0", this.Arch}
	files, folder := parts(t, data)
	change(t, files, "report.html", "pairs", "Pairs")
	reseal(t, files, old)
	v, err := verifyFiles(t, folder, files, this)
	if err != nil || !slices.Equal(v.Otherwise, []string{"report.html"}) || slices.Contains(v.Files, "report.html") {
		t.Errorf("verified %+v, %v", v, err)
	}
	for _, version := range []string{"devel", "0.0.1-dev.20261129.abcdef.dirty"} { // .ci/version writes these
		of := Program{version, this.Arch}
		reseal(t, files, of)
		if v, err := verifyFiles(t, folder, files, of); err != nil || len(v.Otherwise) != 1 {
			t.Errorf("of two programs of no commit, verified %+v, %v", v, err)
		}
	}
	change(t, files, "summary.json", `"ratio": `, `"ratio": 1`)
	reseal(t, files, old)
	if _, err = verifyFiles(t, folder, files, this); err == nil || !strings.Contains(err.Error(), "slipstream v1.0.0 wrote it and this is v1.2.3") {
		t.Errorf("a number was changed: %v", err)
	}
}

// TestFolder: a folder needs no manifest, and lines that a run is writing do not count.
func TestFolder(t *testing.T) {
	dir := folder(t)
	if _, err := Folder(dir, this); err == nil || err.Error() != "summary.json: is missing" {
		t.Errorf("without a summary: %v", err)
	}
	r, err := Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range r.files() {
		if err := dir.WriteFile(f.Name, f.Write); err != nil {
			t.Fatal(err)
		}
	}
	v, err := Folder(dir, this)
	if err != nil || v.Trials != 20 || len(v.Files) < 4 {
		t.Errorf("verified %+v, %v", v, err)
	}
	f, err := os.OpenFile(filepath.Join(dir.Path, "trials.jsonl"), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	whole := sealed(t, dir)
	if _, err := io.WriteString(f, `{"block":6,`); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(whole, sealed(t, dir)) {
		t.Error("half a line was sealed")
	}
}

// TestHostile: archives that somebody may have made to mislead or to harm.
func TestHostile(t *testing.T) {
	data := sealed(t, folder(t))
	good, name := parts(t, data)
	archive := func(change func(z *zip.Writer)) []byte {
		var b bytes.Buffer
		z := zip.NewWriter(&b)
		for _, f := range good {
			h := &zip.FileHeader{Name: name + "/" + f.name, Method: zip.Store}
			h.SetMode(0o644)
			w, err := z.CreateHeader(h)
			if err == nil {
				_, err = w.Write(f.data)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		change(z)
		if err := z.Close(); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	add := func(h zip.FileHeader, content string) []byte {
		return archive(func(z *zip.Writer) {
			w, err := z.CreateHeader(&h)
			if err == nil {
				_, err = io.WriteString(w, content)
			}
			if err != nil {
				t.Fatal(err)
			}
		})
	}
	link := zip.FileHeader{Name: name + "/figures/a.svg"}
	link.SetMode(fs.ModeSymlink | 0o777)
	later := slices.Clone(good)
	later[0].data = bytes.Replace(later[0].data, []byte(`"bundle": 1`), []byte(`"bundle": 2`), 1)
	unknown := slices.Clone(good)
	unknown[0].data = bytes.Replace(unknown[0].data, []byte(`"bundle": 1`), []byte(`"x": 1`), 1)
	for what, tt := range map[string]struct {
		data []byte
		want string
	}{
		"path traversal":    {add(zip.FileHeader{Name: name + "/../../etc/cron.d/x"}, "x"), "not as slipstream"},
		"an absolute path":  {add(zip.FileHeader{Name: "/etc/passwd"}, "x"), "not as slipstream"},
		"a backslash":       {add(zip.FileHeader{Name: name + `/figures\a.svg`}, "x"), "not as slipstream"},
		"another folder":    {add(zip.FileHeader{Name: "other/a.svg"}, "x"), "not as slipstream"},
		"a folder":          {add(zip.FileHeader{Name: name + "/figures/"}, ""), "not as slipstream"},
		"a link":            {add(link, "/etc/passwd"), "not as slipstream"},
		"a bomb":            {add(zip.FileHeader{Name: name + "/figures/a.svg", Method: zip.Deflate}, strings.Repeat("0", 10<<20)), "not as slipstream"},
		"a name twice":      {add(zip.FileHeader{Name: name + "/report.html"}, "x"), "not as slipstream"},
		"a copy":            {bundled(t, name, append(slices.Clone(good), good[5])), "not as slipstream"},
		"a comment":         {archive(func(z *zip.Writer) { _ = z.SetComment("x") }), "not as slipstream"},
		"sizes behind data": {archive(func(*zip.Writer) {}), "not as slipstream"},
		"bytes before it":   {append([]byte("#!/bin/sh\n"), data...), "not as slipstream"},
		"bytes after it":    {append(bytes.Clone(data), "x"...), "not as slipstream"},
		"half of it":        {data[:len(data)/2], "not a bundle"},
		"nothing":           {nil, "not a bundle"},
		"no manifest":       {bundled(t, name, good[1:]), "manifest.json is not its first file"},
		"a later format":    {bundled(t, name, later), "format 2"},
		"another manifest":  {bundled(t, name, unknown), "unknown field"},
		"no file":           {bundled(t, name, nil), "manifest.json is not its first file"},
		"a parent folder":   {bundled(t, "..", good), "not as slipstream"},
	} {
		if _, err := Open(bytes.NewReader(tt.data)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want %q", what, err, tt.want)
		}
	}
	for i := range 30 { // the bytes of the first file's header, which other programs read and Go does not
		changed := bytes.Clone(data)
		changed[i] ^= 1
		if _, err := Open(bytes.NewReader(changed)); err == nil {
			t.Errorf("byte %d was changed, and nothing said so", i)
		}
	}
}

// FuzzOpen: whatever a bundle is, reading it ends without a panic, and what is read is all that is in it.
func FuzzOpen(f *testing.F) {
	r, err := Read(folder(f))
	if err != nil {
		f.Fatal(err)
	}
	var summary bytes.Buffer
	if err := r.files()[0].Write(&summary); err != nil {
		f.Fatal(err)
	}
	manifest := `{"bundle":1,"slipstream":{"version":"v","arch":"a"},"result":"r","files":[{"name":"trials.jsonl","sha256":"","lines":["",""]}]}`
	f.Add([]byte(manifest), "trials.jsonl", []byte("{}\n"), uint(0), byte(0))
	f.Add([]byte(manifest), "summary.json", summary.Bytes(), uint(40), byte(1))
	f.Add([]byte("{}"), "figures/a.svg", []byte("<svg/>"), uint(1000), byte(8))
	f.Fuzz(func(t *testing.T, manifest []byte, name string, content []byte, at uint, by byte) {
		var archive bytes.Buffer
		if err := write(&archive, "r", []file{{manifestFile, manifest}, {name, content}}); err != nil {
			return
		}
		data := archive.Bytes()
		data[at%uint(len(data))] ^= by
		_ = differentRow(content, r.Summary)
		b, err := Open(bytes.NewReader(data))
		if err != nil {
			return
		}
		size := 0
		for _, f := range b.files {
			size += len(f.data)
			if !goodName.MatchString(f.name) {
				t.Errorf("a file has the name %q", f.name)
			}
		}
		if size > len(data) {
			t.Errorf("%d bytes became %d", len(data), size)
		}
		_, _ = b.Verify(this)
	})
}
