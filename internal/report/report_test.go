package report

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"image/png"
	"io"
	"math"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/report/draw"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/testenv/golden"
)

type writer func(io.Writer, *Model) error

// writers returns the formats of a report by the ending of their golden files. JUnit has only the expectations, and formats for
// other programs have no text for people: see exports_test.go.
func writers() map[string]writer {
	all := make(map[string]writer)
	for _, f := range Formats() {
		all[f.Name] = f.Write
	}
	all["txt"] = all["text"]
	for _, name := range []string{"text", "junit", "openmetrics", "otlp", "bencher"} {
		delete(all, name)
	}
	return all
}

func render(t *testing.T, write writer, m *Model) string {
	t.Helper()
	var b strings.Builder
	if err := write(&b, m); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// eventful is the demo as real runs are: with a retry, a cell that never worked, and warnings. It has published
// figures with every verdict.
func eventful(t *testing.T) (*fixture, *stats.Summary) {
	f := demo(t)
	f.exp.Spec.Published, f.exp.Spec.Precision = publications(), 1.5
	retried := f.trials[3]
	retried.Status, retried.Error, retried.Metrics = record.StatusFailed, "client node0/pod0: connect: connection refused", nil
	f.trials = slices.Insert(f.trials, 3, retried)
	for i := range f.trials {
		if tr := &f.trials[i]; tr.Variant == "rfs+" && tr.Workload == "pingpong" && tr.Pairs == 4 && tr.Status == record.StatusOK {
			*tr = record.Trial{Block: tr.Block, Variant: tr.Variant, Workload: tr.Workload, Pairs: tr.Pairs, Attempt: 1,
				Status: record.StatusFailed, Error: "server node1/pod3: read tcp: i/o timeout"}
			again := *tr
			again.Attempt = 2
			f.trials = append(f.trials, again)
		}
	}
	s := f.summary()
	warn(s, record.Warning{Code: record.WarnSharedCPUs, Message: "node0 and node1 share CPUs 0-1"}, func(stats.Row) bool { return true })
	warn(s, record.Warning{Code: record.WarnRetransmits, Message: "1.2% of the segments were sent again, up to 2.1% in block 3"}, func(r stats.Row) bool {
		return r.Variant == "rfs" && r.Workload == "stream" && r.Pairs == 4
	})
	return f, s
}

func TestGolden(t *testing.T) {
	f, s := eventful(t)
	m := New(f.exp, s, f.trials, f.env)
	for ending, write := range writers() {
		t.Run(ending, func(t *testing.T) {
			golden.Compare(t, "testdata/demo."+ending, render(t, write, m))
		})
	}
}

func TestHTMLNeedsNothingElse(t *testing.T) {
	f, s := eventful(t)
	page := render(t, HTML, New(f.exp, s, f.trials, f.env))
	for _, pattern := range []string{`https?:`, `\ssrc=`, `url\((?:[^d]|d[^a])`, `@import`, `fetch\(`, `XMLHttp`, `import\(`, `<link`, `<iframe`, `<object`, `href="[^#]`, `ZgotmplZ`} {
		if hit := regexp.MustCompile(pattern).FindString(page); hit != "" {
			t.Errorf("the page has %q", hit)
		}
	}
}

func TestHTMLOfPublishedExperimentIsSmall(t *testing.T) {
	page := render(t, HTML, published(t, 64).model())
	if len(page) >= 1_000_000 {
		t.Errorf("the page has %d bytes, which is 1 MB or more", len(page))
	}
}

// TestHTMLIsAccessible checks what screen readers and keyboard users need.
func TestHTMLIsAccessible(t *testing.T) {
	f, s := eventful(t)
	m := New(f.exp, s, f.trials, f.env)
	page := render(t, HTML, m)
	count := func(pattern string) int { return len(regexp.MustCompile(pattern).FindAllString(page, -1)) }
	for _, tag := range []string{"table", "section", "figure", "details", "div", "tr", "td", "th", "svg", "g", "dl", "ul", "li", "main", "header", "nav"} {
		if open, closed := count(`<`+tag+`[\s>]`), count(`</`+tag+`>`); open != closed {
			t.Errorf("%d <%s> and %d </%s>", open, tag, closed, tag)
		}
	}
	if tables, captions := count(`<table`), count(`<caption`); tables != captions {
		t.Errorf("%d tables have %d captions", tables, captions)
	}
	if bare := count(`<th(?: class="[^"]*")?>`); bare > 0 {
		t.Errorf("%d headers have no scope", bare)
	}
	if scrolls, focusable := count(`class="scroll`), count(`class="scroll[^"]*" tabindex="0" role="region" aria-label`); scrolls != focusable {
		t.Errorf("%d of %d scrolling areas can be reached and have a name", focusable, scrolls)
	}
	if bars, described := count(`<svg class="bar`), count(`<svg class="bar [^>]*role="img"><title>[^<]{20,}`); bars == 0 || bars != described {
		t.Errorf("%d of %d bars have a text alternative", described, bars)
	}
	if pictures := count(`<svg [^>]*role="img" aria-label="[^"]{20,}"`); pictures != len(m.Figures) {
		t.Errorf("%d of %d figures have a text alternative", pictures, len(m.Figures))
	}
	anchorsFit(t, page)
}

// anchorsFit checks that every link of a page leads to exactly one place.
func anchorsFit(t *testing.T, page string) {
	t.Helper()
	for _, id := range regexp.MustCompile(`href="#([^"]+)"`).FindAllStringSubmatch(page, -1) {
		if !strings.Contains(page, `id="`+id[1]+`"`) {
			t.Errorf("link to #%s leads nowhere", id[1])
		}
	}
	ids := map[string]bool{}
	for _, id := range regexp.MustCompile(`\sid="([^"]+)"`).FindAllStringSubmatch(page, -1) {
		if ids[id[1]] {
			t.Errorf("id %s is there twice", id[1])
		}
		ids[id[1]] = true
	}
}

func TestFigures(t *testing.T) {
	formats := draw.Formats()
	if testing.Short() {
		formats = []string{"svg"} // pixels take minutes with the race detector
	}
	for name, m := range map[string]*Model{"demo": demo(t).model(), "published": published(t, 64).model()} {
		figures := m.Figures
		// Scaling of two workloads; at the fewest and the most pairs, CPU and cores of both and latency of one; at
		// the most pairs, the course of both.
		if len(figures) != 14 {
			t.Errorf("%s has %d figures, want 14", name, len(figures))
		}
		for _, f := range figures {
			t.Run(name+"/"+f.Name, func(t *testing.T) {
				if !regexp.MustCompile(`\d`).MatchString(f.Alt) || f.Title == "" || f.Caption == "" || len(f.Data.Rows) == 0 {
					t.Errorf("no text with numbers: title %q, caption %q, alt %q, %d rows", f.Title, f.Caption, f.Alt, len(f.Data.Rows))
				}
				for _, row := range f.Data.Rows {
					if len(row) != len(f.Data.Columns) {
						t.Errorf("row %q has %d of %d columns", row, len(row), len(f.Data.Columns))
					}
				}
				for _, format := range formats {
					var a, b bytes.Buffer
					if err := errors.Join(f.Write(&a, format), f.Write(&b, format)); err != nil {
						t.Fatal(err)
					}
					if !bytes.Equal(a.Bytes(), b.Bytes()) {
						t.Errorf("%s: the same figure gave different bytes", format)
					}
					if err := readable(format, a.Bytes()); err != nil {
						t.Errorf("%s: %v", format, err)
					}
				}
			})
		}
	}
}

func readable(format string, b []byte) error {
	switch format {
	case "png":
		_, err := png.Decode(bytes.NewReader(b))
		return err
	case "svg":
		if !bytes.Contains(b, []byte("<text")) {
			return errors.New("no text")
		}
		d := xml.NewDecoder(bytes.NewReader(b))
		for {
			if _, err := d.Token(); errors.Is(err, io.EOF) {
				return nil
			} else if err != nil {
				return err
			}
		}
	}
	if !bytes.HasPrefix(b, []byte("%PDF-")) || !bytes.Contains(b, []byte("D:20000101000000")) {
		return errors.New("no PDF, or one that tells when it was written")
	}
	return nil
}

func TestRenderUnknownFormat(t *testing.T) {
	err := demo(t).model().Figures[0].Write(io.Discard, "gif")
	if err == nil || !strings.Contains(err.Error(), "svg, png, pdf") {
		t.Errorf("error %v does not say what is allowed", err)
	}
}

// TestInlineColours finds colours that would not follow the page's theme.
func TestInlineColours(t *testing.T) {
	for _, f := range demo(t).model().Figures {
		if hit := regexp.MustCompile(`(?:fill|stroke):#\w+`).FindString(f.Picture.InlineSVG(f.Alt)); hit != "" {
			t.Errorf("%s: %s is no variable", f.Name, hit)
		}
		if hit := regexp.MustCompile("[\ue000-\uf8ff]").FindString(f.Picture.InlineSVG(f.Alt) + f.Picture.SVG()); hit != "" {
			t.Errorf("%s: a mark of the pen was left in a text", f.Name)
		}
	}
}

func TestHostileNames(t *testing.T) {
	const evil = `a|b/<script>alert("1")</script>&+`
	f := demo(t)
	f.exp.Metadata.Name, f.exp.Metadata.Description = evil, evil
	f.exp.Spec.Variants[2].Name = evil
	f.exp.Spec.Workloads[0].Name = "str/eam+"
	f.env.Command = "slipstream run '" + evil + "'"
	f.env.Nodes[0].CPUModel = evil
	f.run(t)
	f.trials = append(f.trials, record.Trial{Block: 1, Variant: evil, Workload: "str/eam+", Pairs: 1, Status: record.StatusFailed, Error: evil})
	s := f.summary()
	warn(s, record.Warning{Code: record.WarnDrops, Message: evil}, func(r stats.Row) bool { return r.Variant == evil })
	m := New(f.exp, s, f.trials, f.env)
	if page := render(t, HTML, m); strings.Count(page, "<script") != 1 || strings.Contains(page, "<script>alert") {
		t.Error("a name became markup in the page")
	}
	text := render(t, Markdown, m)
	code := "    " + f.env.Command // verbatim, because it is code
	if strings.Contains(strings.Replace(text, code, "", 1), "<script") {
		t.Error("a name became markup in Markdown")
	}
	width := 0
	for _, line := range strings.Split(text, "\n") {
		n := strings.Count(strings.ReplaceAll(line, `\|`, ""), "|")
		if strings.HasPrefix(line, "|") && width > 0 && n != width {
			t.Errorf("row has %d cell borders, the one above %d: %s", n, width, line)
		}
		if width = n; !strings.HasPrefix(line, "|") {
			width = 0
		}
	}
	for _, fig := range m.Figures {
		if fig.Name != filepath.Base(fig.Name) || strings.ContainsAny(fig.Name, `<>&"+ `) {
			t.Errorf("%q is no name for a file", fig.Name)
		}
		var b bytes.Buffer
		if err := fig.Write(&b, "svg"); err != nil {
			t.Fatal(err)
		}
		if err := readable("svg", b.Bytes()); err != nil {
			t.Errorf("%s: %v", fig.Name, err)
		}
	}
}

// TestUnusualResults goes through results that leave something out.
func TestUnusualResults(t *testing.T) {
	tests := []struct {
		name     string
		change   func(*fixture)
		summary  func(*stats.Summary)
		headline string
		page     []string
	}{
		{
			name:     "one variant",
			change:   func(f *fixture) { f.exp.Spec.Variants = f.exp.Spec.Variants[1:2] },
			headline: "vxlan has a stream throughput of 11.9 Gb/s (11.6–12.2) at 1 pair; nothing was compared with it.",
		},
		{
			name:     "no latency",
			change:   func(f *fixture) { f.exp.Spec.Workloads = f.exp.Spec.Workloads[:1] },
			headline: "Compared with vxlan, rfs+ gains the most: stream throughput +31% ",
			page:     []string{"Here VXLAN has 42%"},
		},
		{
			name:     "latency only",
			change:   func(f *fixture) { f.exp.Spec.Workloads = f.exp.Spec.Workloads[1:] },
			headline: "Compared with vxlan, rfs+ gains the most: pingpong median latency −23% ",
			page:     []string{"Here VXLAN has 241%"},
		},
		{
			name:     "one block has no interval",
			change:   func(f *fixture) { f.blocks = 1 },
			headline: "Nothing is proven faster than vxlan.",
			page:     []string{"inconclusive", "1 block", "Here VXLAN has 41% of the host network&#39;s stream throughput and 237% of its pingpong median latency, at 1 pair."},
		},
		{
			name: "every trial failed",
			change: func(f *fixture) {
				for i := range f.trials {
					f.trials[i] = record.Trial{Block: f.trials[i].Block, Variant: f.trials[i].Variant, Workload: f.trials[i].Workload, Pairs: f.trials[i].Pairs,
						Status: record.StatusFailed, Error: "create vxlan device: operation not supported"}
				}
			},
			headline: "No trial gave a result: create vxlan device: operation not supported.",
			page:     []string{`<td class="missing" colspan="6">failed</td>`, "144 trials"},
		},
		{
			name:     "nothing ran",
			change:   func(f *fixture) { f.trials = nil },
			headline: "No trial gave a result.",
			page:     []string{`<td class="missing" colspan="6">not measured</td>`},
		},
		{
			name: "compared with the host network, two NIC profiles",
			change: func(f *fixture) {
				none := &spec.NIC{Offload: spec.OffloadNone}
				native := &spec.Path{Native: &spec.Plain{}}
				calico := &spec.Path{VXLAN: &spec.VXLAN{Shape: spec.ShapeCalico}}
				f.exp.Spec.Baseline = "native"
				f.exp.Spec.Variants = []spec.Variant{
					{Name: "native", Path: native}, {Name: "flannel"}, {Name: "calico", Path: calico},
					{Name: "native/none", Path: native, NIC: none}, {Name: "flannel/none", NIC: none, Versus: "native/none"},
				}
				f.run(t)
			},
			headline: "Here the overlays have, of the host network's stream throughput at 1 pair: flannel 42% ",
			page:     []string{"relative to native", "relative to native/none", "NIC offload none", "slower</span> <span class=\"quiet\">vs native/none"},
		},
		{
			name: "tools compared",
			change: func(f *fixture) {
				f.exp.Spec.Baseline = "engine"
				f.exp.Spec.Variants = []spec.Variant{{Name: "engine"}, {Name: "iperf3", Tools: map[string]string{"stream": "iperf3"}}}
				f.run(t)
			},
			headline: "Nothing is proven faster than engine.",
		},
		{
			name: "thirty variants",
			change: func(f *fixture) {
				for i := range 26 {
					f.exp.Spec.Variants = append(f.exp.Spec.Variants, accelerated(fmt.Sprintf("rps-%d", i), "nic"))
				}
				f.run(t)
			},
			headline: "Compared with vxlan, rps-13 gains the most: ",
		},
		{
			name: "two machines of 64 cores",
			change: func(f *fixture) {
				f.cpus = 64
				f.run(t)
				for i := range f.trials {
					other := f.trials[i].Hosts[0]
					other.Boot, other.Nodes = "b1", []string{"node1"}
					f.trials[i].Hosts[0].Nodes = []string{"node0"}
					f.trials[i].Hosts = append(f.trials[i].Hosts, other)
				}
			},
			headline: "Compared with vxlan, rfs+ gains the most: ",
			page:     []string{"the mean of 2 neighbouring cores"},
		},
		{
			name: "numbers that are none",
			summary: func(s *stats.Summary) {
				for i := range s.Rows {
					s.Rows[i].CI95 = [2]float64{math.Inf(-1), math.Inf(1)}
					if v := s.Rows[i].Versus; v != nil {
						v.Ratio, v.CI95, v.P, v.Verdict = math.NaN(), [2]float64{math.NaN(), math.NaN()}, math.NaN(), stats.Inconclusive
					}
				}
			},
			headline: "native has a stream throughput of 27.7 Gb/s at 1 pair; nothing",
		},
		{
			name:     "no CPUs recorded, a histogram that cannot be read",
			headline: "Compared with vxlan, rfs+ gains the most: ",
			change: func(f *fixture) {
				for i := range f.trials {
					f.trials[i].Hosts = nil
					if f.trials[i].Latency != "" {
						f.trials[i].Latency = "AAAA"
					}
				}
			},
			page: []string{"latency-unreadable"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := demo(t)
			if tt.change != nil {
				blocks := f.blocks
				tt.change(f)
				if f.blocks != blocks || len(f.exp.Spec.Variants) == 1 || len(f.exp.Spec.Workloads) == 1 {
					f.run(t)
				}
			}
			s := f.summary()
			if tt.summary != nil {
				tt.summary(s)
			}
			m := New(f.exp, s, f.trials, f.env)
			if !strings.HasPrefix(m.Headline, tt.headline) {
				t.Errorf("headline %q, want it to start %q", m.Headline, tt.headline)
			}
			if strings.Contains(m.Headline, "–∞") || strings.Contains(m.Headline, "NaN") {
				t.Errorf("headline %q has a number that is none", m.Headline)
			}
			page := render(t, HTML, m)
			for _, want := range tt.page {
				if !strings.Contains(page, want) {
					t.Errorf("the page does not say %q", want)
				}
			}
			if len(page) >= 1_000_000 {
				t.Errorf("the page has %d bytes", len(page))
			}
			if hit := regexp.MustCompile(`NaN|\+?Inf\b|<no value>|ZgotmplZ|%!`).FindString(page); hit != "" {
				t.Errorf("the page has %q", hit)
			}
			for _, write := range []writer{Markdown, CSV, Text} {
				render(t, write, m)
			}
			for _, fig := range m.Figures {
				var b bytes.Buffer
				if err := fig.Write(&b, "svg"); err != nil {
					t.Fatal(err)
				}
				if err := readable("svg", b.Bytes()); err != nil {
					t.Errorf("%s: %v", fig.Name, err)
				}
			}
		})
	}
}

// TestConclusion: the sentences at the end name every workload's metric, the largest gain with its costs, and
// the harmful variants.
func TestConclusion(t *testing.T) {
	row := func(variant, workload, metric string, ratio, lo, hi float64, v stats.Verdict) stats.Row {
		return stats.Row{Variant: variant, Workload: workload, Pairs: 1, Metric: metric, Primary: metric != metrics.LatencyP99, N: 10, Mean: 1e10, CI95: [2]float64{9e9, 11e9},
			Versus: &stats.Versus{Baseline: "vxlan", N: 10, Ratio: ratio, CI95: [2]float64{lo, hi}, Verdict: v}}
	}
	stream := func(variant string, ratio, lo, hi float64, v stats.Verdict) stats.Row {
		return row(variant, "stream", metrics.Throughput, ratio, lo, hi, v)
	}
	latency := func(variant string, ratio, lo, hi float64, v stats.Verdict) stats.Row {
		return row(variant, "pingpong", metrics.LatencyP50, ratio, lo, hi, v)
	}
	for _, tt := range []struct {
		name string
		rows []stats.Row
		want []string
		keep string
	}{
		{"cost, gain, harm and nothing", []stats.Row{
			stream("native", 2.44, 2.33, 2.56, stats.Faster), latency("native", 0.5, 0.4, 0.6, stats.Faster),
			stream("rps", 1.5, 1.4, 1.6, stats.Faster), latency("rps", 1.42, 1.38, 1.46, stats.Slower),
			stream("rps+", 1.001, 0.99, 1.01, stats.Same), latency("rps+", 1, 0.99, 1.01, stats.Same),
			stream("rfs+", 1.12, 1.10, 1.14, stats.Faster), latency("rfs+", 0.9, 0.88, 0.92, stats.Faster),
			stream("rfs", 0.9, 0.5, 1.4, stats.Inconclusive), latency("rfs", 0.9, 0.5, 1.4, stats.Inconclusive),
		}, []string{
			"Here VXLAN has 41% (39–43) of the host network's stream throughput and 200% (167–250) of its pingpong median latency, at 1 pair.",
			"Compared with vxlan, rfs+ gains the most without making anything worse: stream throughput +12% (10–14) at 1 pair, pingpong median latency −10% (−12 to −8) at 1 pair.",
			"Worse with rps: pingpong median latency +42% (38–46) at 1 pair despite stream throughput +50% (40–60) at 1 pair.",
			"No difference from vxlan: rps+.",
			"Inconclusive: rfs. More blocks may settle it.",
		}, "rfs+"},
		{"more harm than a line has room for", []stats.Row{
			stream("rps", 0.9, 0.8, 0.95, stats.Slower), stream("rps+", 0.5, 0.4, 0.6, stats.Slower), stream("rfs", 0.7, 0.6, 0.8, stats.Slower), stream("rfs+", 0.8, 0.7, 0.9, stats.Slower),
		}, []string{
			"Nothing is proven faster than vxlan.",
			"Worse with rps+: stream throughput −50% (−60 to −40) at 1 pair; with rfs: stream throughput −30% (−40 to −20) at 1 pair; with rfs+: stream throughput −20% (−30 to −10) at 1 pair; with 1 more variant.",
		}, ""},
		{"the best has its cost", []stats.Row{
			stream("rps", 1.5, 1.4, 1.6, stats.Faster), latency("rps", 1.42, 1.38, 1.46, stats.Slower),
		}, []string{"Compared with vxlan, rps gains the most: stream throughput +50% (40–60) at 1 pair, at the cost of pingpong median latency +42% (38–46) at 1 pair."}, ""},
		{"a gain of more than twice is a factor", []stats.Row{stream("rfs", 2.2, 2.1, 2.3, stats.Faster)},
			[]string{"Compared with vxlan, rfs gains the most: stream throughput ×2.20 (2.10–2.30) at 1 pair."}, "rfs"},
		{"inconclusive", []stats.Row{stream("rfs", 1.1, 0.9, 1.3, stats.Inconclusive)},
			[]string{"Nothing is proven faster than vxlan.", "Inconclusive: rfs. More blocks may settle it."}, ""},
		{"a narrow interval keeps a decimal", []stats.Row{stream("rps", 1.032, 1.030, 1.034, stats.Faster)},
			[]string{"Compared with vxlan, rps gains the most: stream throughput +3.2% (3.0–3.4) at 1 pair."}, "rps"},
		{"another NIC beside the cost of the overlay", []stats.Row{stream("native", 2.44, 2.33, 2.56, stats.Faster), stream("jumbo", 1.5, 1.4, 1.6, stats.Faster)}, []string{
			"Here VXLAN has 41% (39–43) of the host network's stream throughput, at 1 pair.",
			"Compared with vxlan, jumbo gains the most: stream throughput +50% (40–60) at 1 pair.",
		}, ""},
		{"another NIC beside two ways to run the same pods", []stats.Row{stream("rps", 1.032, 1.030, 1.034, stats.Faster), stream("jumbo", 1.5, 1.4, 1.6, stats.Faster)},
			[]string{"Compared with vxlan, rps gains the most: stream throughput +3.2% (3.0–3.4) at 1 pair."}, "rps"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := demo(t)
			f.exp.Spec.Variants = append(f.exp.Spec.Variants, spec.Variant{Name: "jumbo", NIC: &spec.NIC{MTU: 9000}})
			m := New(f.exp, &stats.Summary{Baseline: "vxlan", Rows: tt.rows}, nil, record.Environment{})
			if diff := cmp.Diff(tt.want, m.conclusion); diff != "" {
				t.Errorf("it concludes (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tt.want, append([]string{m.Headline}, m.More...)); len(tt.want) == 1 && diff != "" {
				t.Errorf("headline and more (-want +got):\n%s", diff)
			}
			if got := m.Recommended(); got != tt.keep {
				t.Errorf("a policy should keep %q, want %q", got, tt.keep)
			}
			text := render(t, Text, m)
			if last := wrap(tt.want[len(tt.want)-1], textWidth); !strings.HasSuffix(text, last) {
				t.Errorf("the terminal's last lines are not %q:\n%s", last, text)
			}
		})
	}
}

// TestExpectationNamesWhatDecided: for a claim on many workloads, the report names those that failed, wherever
// they are.
func TestExpectationNamesWhatDecided(t *testing.T) {
	row := func(workload string, ratio float64) stats.Row {
		return stats.Row{Workload: workload, Pairs: 1, Metric: metrics.Throughput,
			Versus: &stats.Versus{N: 6, Ratio: ratio, CI95: [2]float64{ratio - 0.01, ratio + 0.01}}}
	}
	rows := []stats.Row{row("a", 1.1), row("b", 1.2), row("c", 1.3), row("d", 0.5), row("e", 1.4)}
	all := []*stats.Row{&rows[0], &rows[1], &rows[2], &rows[4]}
	for want, x := range map[string]stats.Expected{
		"d throughput −50% (−51 to −49) at 1 pair":        {Rows: rows, Decided: []*stats.Row{&rows[3]}},
		"its comparison was not measured":                 {},
		"no comparison for d at 1 pair":                   {Rows: rows, Missing: []string{"d at 1 pair"}},
		"c throughput +30% (29–31) at 1 pair, and 1 more": {Rows: rows, Decided: all},
	} {
		if got := expectations([]stats.Expected{x})[0].Why; !strings.HasSuffix(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// TestUnfinishedIsSaidFirst: every format says at the top that a run is not complete.
func TestUnfinishedIsSaidFirst(t *testing.T) {
	const want = "7 of 48 trials are done"
	f := demo(t)
	s := f.summary()
	s.Unfinished = want
	m := New(f.exp, s, f.trials, f.env)
	for format, write := range writers() {
		text := render(t, write, m)
		at, first := strings.Index(text, want), strings.Index(text, "throughput")
		if format == "html" {
			text = text[strings.Index(text, "<body>"):]
			at, first = strings.Index(text, want), strings.Index(text, "throughput")
		}
		if at < 0 || at > first && format != "csv" { // in a table each row says it, in its last column
			t.Errorf("%s says it at %d, and throughput at %d", format, at, first)
		}
	}
	s.Unfinished = ""
	for format, write := range writers() {
		if text := render(t, write, New(f.exp, s, f.trials, f.env)); strings.Contains(text, "unfinished: ") || strings.Contains(text, "is unfinished") {
			t.Errorf("%s says it of a run that is done", format)
		}
	}
}

// TestLeftOutIsSaid: a report for people says which variants could not be applied, and why.
func TestLeftOutIsSaid(t *testing.T) {
	f := demo(t)
	f.env.LeftOut = []record.LeftOut{{Variant: "fastpath", Why: "this kernel lacks tcx (since Linux 6.6)"}}
	m := New(f.exp, f.summary(), f.trials, f.env)
	for format, write := range map[string]func(io.Writer, *Model) error{"html": HTML, "markdown": Markdown, "text": Text} {
		text := strings.Join(strings.Fields(render(t, write, m)), " ")
		if !strings.Contains(text, "Left out here: fastpath: this kernel lacks tcx (since Linux 6.6)") {
			t.Errorf("%s does not say it:\n%.2000s", format, text)
		}
	}
}

// TestDesignIsSaid: a report for people names the design of an experiment with a switch, the number of periods,
// and what switches. It warns if there are few periods.
func TestDesignIsSaid(t *testing.T) {
	f := demo(t)
	f.exp.Spec.Variants = f.exp.Spec.Variants[:2]
	f.exp.Spec.TrialsPerPeriod = 1
	f.exp.Spec.Variants[0].Switch = &spec.Switch{To: []string{"an", "on"}, Back: []string{"an", "off"}}
	f.trials = slices.DeleteFunc(f.trials, func(tr record.Trial) bool { return tr.Block > 3 || tr.Variant != "vxlan" && tr.Variant != "native" })
	for i := range f.trials {
		tr := &f.trials[i]
		tr.Repeat, tr.Period = 1, 2*tr.Block-1
		if (tr.Variant == "native") == (tr.Block%2 == 1) {
			tr.Period++
		}
	}
	m := New(f.exp, f.summary(), f.trials, f.env)
	for format, write := range map[string]func(io.Writer, *Model) error{"html": HTML, "markdown": Markdown, "text": Text} {
		text := strings.Join(strings.Fields(render(t, write, m)), " ")
		for _, want := range []string{"Switch-back design: 6 periods, in each of which a variant has 1 trial per workload and number of pairs.", "the interval rests on 3 periods of the variant, and should rest on at least 4"} {
			if !strings.Contains(text, want) {
				t.Errorf("%s does not say %q:\n%.2000s", format, want, text)
			}
		}
		if format != "text" && !strings.Contains(text, "switched by an on") {
			t.Errorf("%s does not say what switches", format)
		}
	}
}

func TestTerminalFitsAScreen(t *testing.T) {
	f, s := eventful(t)
	text := render(t, Text, New(f.exp, s, f.trials, f.env))
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	if len(lines) > 40 {
		t.Errorf("%d lines, want at most 40", len(lines))
	}
	m := published(t, 2).model()
	for columns, most := range map[int]int{0: 80, 5: 80, 60: 60, 200: 80} {
		text := render(t, func(w io.Writer, m *Model) error { return TerminalText(w, m, columns) }, m)
		for line := range strings.Lines(text) {
			if n := utf8.RuneCountInString(line) - 1; n > most {
				t.Errorf("%d columns of %d: %s", n, columns, line)
			}
		}
	}
	for _, line := range lines {
		if n := utf8.RuneCountInString(line); n > 80 {
			t.Errorf("%d columns: %s", n, line)
		}
	}
}

func TestCSVAndJSONCarryTheSummary(t *testing.T) {
	f, s := eventful(t)
	m := New(f.exp, s, f.trials, f.env)
	var back stats.Summary
	if err := json.Unmarshal([]byte(render(t, JSON, m)), &back); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(*s, back, cmpopts.IgnoreFields(stats.Row{}, "Blocks")); diff != "" {
		t.Errorf("JSON differs from the summary (-want +got):\n%s", diff)
	}
	rows, err := csv.NewReader(strings.NewReader(render(t, CSV, m))).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	if len(rows) != len(s.Rows)+1 {
		t.Fatalf("CSV has %d rows, the summary %d", len(rows)-1, len(s.Rows))
	}
	for i, r := range s.Rows {
		want := fmt.Sprintf("%g", r.Mean)
		if r.N == 0 {
			want = ""
		}
		if got := rows[i+1][6]; got != want {
			t.Errorf("mean of row %d is %s, want %s", i, got, want)
		}
	}
}

// TestDaemonSets: what an observed DaemonSet uses has tables, in the units of Kubernetes.
func TestDaemonSets(t *testing.T) {
	f := demo(t)
	for i := range f.trials {
		f.trials[i].Metrics[metrics.OfDaemonSet(metrics.DaemonSetCPU, "kube-system/cilium")] = 0.15
		f.trials[i].Metrics[metrics.OfDaemonSet(metrics.DaemonSetMemory, "kube-system/cilium")] = 500 << 20
	}
	page := render(t, Markdown, f.model())
	for title, row := range map[string]string{
		"stream CPU of kube-system/cilium, millicores, lower is better": "| 4 | rps | 150 (150–150) |",
		"pingpong memory of kube-system/cilium, MiB, lower is better":   "| 4 | rps | 500 (500–500) |",
	} {
		_, table, _ := strings.Cut(page, "### "+title)
		if table, _, _ = strings.Cut(table, "\n###"); !strings.Contains(table, row) {
			t.Errorf("no %q under %q:\n%s", row, title, table)
		}
	}
}

func TestJSONThatCannotBe(t *testing.T) {
	f := demo(t)
	s := &stats.Summary{Rows: []stats.Row{{Mean: math.NaN()}}}
	if err := JSON(io.Discard, New(f.exp, s, nil, f.env)); err == nil {
		t.Error("NaN was written as JSON")
	}
}

func TestAdvice(t *testing.T) {
	f, s := eventful(t)
	m := New(f.exp, s, f.trials, f.env)
	if len(m.Advice) != 4 { // two workloads at two pair counts
		t.Fatalf("%d pieces of advice, want 4", len(m.Advice))
	}
	for _, a := range m.Advice {
		best := "rfs+"
		if a.Workload == "pingpong" && a.Pairs == 4 {
			best = "rps+" // rfs+ gave nothing there
		}
		if !strings.HasPrefix(a.Use, best+": ") {
			t.Errorf("%s at %d pairs: use %q, want %s", a.Workload, a.Pairs, a.Use, best)
		}
		if !slices.ContainsFunc(a.Harms, func(h string) bool { return strings.HasPrefix(h, "rfs: ") }) {
			t.Errorf("%s at %d pairs: harms %q, want rfs among them", a.Workload, a.Pairs, a.Harms)
		}
		for _, all := range [][]string{a.Also, a.Harms, a.Same, a.Inconclusive, {a.Use}} {
			if strings.Contains(strings.Join(all, " "), "native") {
				t.Errorf("the host network is nothing to switch on: %q", all)
			}
		}
	}
}

func TestShares(t *testing.T) {
	tests := []struct {
		name string
		cpu  record.CPU
		want [parts]float64
	}{
		{"all parts", record.CPU{Busy: 8, Softirq: 3, IRQ: 1, Steal: 1}, [parts]float64{partProcess: 0.3, partSoftirq: 0.3, partIRQ: 0.1, partSteal: 0.1, partIdle: 0.2}},
		{"softirq beyond busy time", record.CPU{Busy: 1, Softirq: 2}, [parts]float64{partSoftirq: 0.2, partIdle: 0.8}},
		{"more than the window", record.CPU{Busy: 12, Softirq: 6}, [parts]float64{partProcess: 0.5, partSoftirq: 0.5}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			near := cmp.Comparer(func(a, b float64) bool { return math.Abs(a-b) < 1e-9 })
			if diff := cmp.Diff(tt.want, shares(tt.cpu, 10), near); diff != "" {
				t.Errorf("shares (-want +got):\n%s", diff)
			}
		})
	}
}

// TestChange: if the interval of a change includes no change, the change may be a rise or a fall, and the text
// says so.
func TestChange(t *testing.T) {
	for _, c := range []struct {
		ratio, lo, hi float64
		want          string
	}{
		{1.12, 1.10, 1.14, "+12% (10–14)"}, {0.92, 0.90, 0.94, "−8% (−10 to −6)"}, {2.48, 2.40, 2.56, "×2.48 (2.40–2.56)"},
		{0.40, 0.14, 1.13, "−60% (−86 to +13)"}, {1.34, 0.38, 4.69, "+34% (−62 to +369)"},
	} {
		r := &stats.Row{Versus: &stats.Versus{N: 5, Ratio: c.ratio, CI95: [2]float64{c.lo, c.hi}}}
		if got := change(r); got != c.want {
			t.Errorf("%v: %q, want %q", c, got, c.want)
		}
	}
}

func TestWords(t *testing.T) {
	for got, want := range map[string]string{
		slug("rps+", "a/b"):      "rps-plus-a-2fb",
		wrap("one two three", 7): "one two\n  three\n",
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// TestMachines: nodes with the same facts are described once, and so are their devices if they are the same.
func TestMachines(t *testing.T) {
	links := func(mtu int) []record.Link {
		return []record.Link{{Name: "eth0", MTU: mtu, NIC: &record.NIC{Driver: "ena"}}}
	}
	var got []string
	for _, m := range machines([]record.Node{
		{Name: "n0", Kernel: "6.1", Links: links(1500)}, {Name: "n1", Kernel: "6.1", Links: links(9000)}, {Name: "n2", Kernel: "6.1", Links: links(1500)}, {Name: "n3", Kernel: "6.12"},
	}) {
		got = append(got, m.Nodes)
		for _, d := range m.Devices {
			got = append(got, fmt.Sprintf("%s: MTU %d", d.Nodes, d.Links[0].MTU))
		}
	}
	if want := []string{"n0, n1 and n2", "n0 and n2: MTU 1500", "n1: MTU 9000", "n3"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestVariantsSayWhichWayPacketsTook: the label of a variant follows from the packets of its trials, not from
// its definition.
func TestVariantsSayWhichWayPacketsTook(t *testing.T) {
	f := demo(t)
	shares := map[string][]uint64{"native": {999, 990}, "vxlan": {0, 3}, "rps": {999, 400}, "rps+": {999, 0}, "rfs": {500}}
	for i := range f.trials {
		of := shares[f.trials[i].Variant]
		if len(of) > 0 {
			u := record.VFUse{Place: "node0", NIC: "eth0", VF: "eth1", TxPackets: 1000, VFTxPackets: of[f.trials[i].Block%len(of)], Up: true}
			f.trials[i].VFs = []record.VFUse{u}
		}
	}
	failed := f.trials[0]
	failed.Status, failed.VFs = record.StatusFailed, []record.VFUse{{RxPackets: 10}}
	for v := range shares {
		failed.Variant = v
		f.trials = append(f.trials, failed)
	}
	want := map[string]string{
		"native": "packets took the VF (99.0 to 99.9% through the VF)",
		"vxlan":  "packets took the paravirtual device (0.0 to 0.3% through the VF)",
		"rps":    "packets took both ways (40.0 to 99.9% through the VF)",
		"rps+":   "packets took both ways (0.0 to 99.9% through the VF)",
		"rfs":    "packets took both ways (50.0% through the VF)",
		"rfs+":   "",
	}
	for _, v := range New(f.exp, f.summary(), f.trials, f.env).Variants {
		_, got, _ := strings.Cut(v.Text, "; packets")
		if got != "" {
			got = "packets" + got
		}
		if got != want[v.Name] {
			t.Errorf("%s: %q, want %q", v.Name, got, want[v.Name])
		}
	}
}

// TestVariantsSayWhichHostsAndAddresses: between hosts, the label of a variant has its hosts and the addresses
// that its packets use.
func TestVariantsSayWhichHostsAndAddresses(t *testing.T) {
	exp := &spec.Experiment{Spec: spec.Spec{
		Target: spec.Target{Hosts: []spec.Host{
			{Name: "east1"}, {Name: "east2"}, {Name: "west1", Labels: map[string]string{"zone": "west"}},
		}},
		Path: spec.Path{Native: &spec.Plain{}},
		Variants: []spec.Variant{
			{Name: "within"},
			{Name: "between", Hosts: &spec.Ends{Server: map[string]string{"zone": "west"}}},
			{Name: "weave", Path: &spec.Path{Address: "weave"}},
		},
	}}
	want := []Definition{
		{"within", "host network; clients on east1, servers on east2"},
		{"between", "host network; clients on east1, servers on west1"},
		{"weave", "the hosts' addresses named weave; clients on east1, servers on east2"},
	}
	if got, _ := definitions(exp); !cmp.Equal(got, want) {
		t.Error(cmp.Diff(want, got))
	}
}
