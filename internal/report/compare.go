package report

import (
	"encoding/json"
	"encoding/xml"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"slipstream.dev/internal/plain"
	"slipstream.dev/internal/stats"
)

// Changes shows a comparison of two runs: the rows that its gate considers. If Strict
// is true, an inconclusive row is a failure.
type Changes struct {
	*stats.Comparison
	Strict bool
}

// changed is one row, as text.
type changed struct {
	Variant, Workload, Metric, Unit string
	Pairs                           int
	Before, After, Ratio            string
	Verdict                         stats.Verdict
	// Bar shows how many times better the second run is.
	Bar *Bar

	says string
}

// Name returns the name of the first or the second run.
func (c Changes) Name(i int) string { return [...]string{c.Before.Name, c.After.Name}[i] }

// scale returns the scale of all bars.
func (c Changes) scale() scale {
	var all []spread
	for i := range c.Comparison.Changes {
		if r := &c.Comparison.Changes[i]; r.Primary {
			all = append(all, spreadOf(&r.Row).gains(r.Metric))
		}
	}
	return scaleOf(all)
}

// Ticks returns the axis under the bars.
func (c Changes) Ticks() []Tick { return c.scale().ticks() }

// Rows returns the rows that the gate considers.
func (c Changes) Rows() []changed {
	var out []changed
	axis := c.scale()
	for i := range c.Comparison.Changes {
		r := &c.Comparison.Changes[i]
		if !r.Primary {
			continue
		}
		q := quantityOf(r.Metric)
		show := func(v float64) string { return significant(v * q.scale) }
		out = append(out, changed{
			Variant: r.Variant, Workload: r.Workload, Metric: q.name, Unit: q.unit, Pairs: r.Pairs,
			Before: show(r.Before), After: show(r.Mean),
			Ratio: estimate(r.Versus.Ratio, of(r.Versus.CI95, r.Versus.N), 2).String(), Verdict: r.Versus.Verdict,
			Bar:  axis.bar(spreadOf(&r.Row).gains(r.Metric), r.Versus.Verdict, tip(&r.Row)),
			says: r.Variant + ": " + Says(&r.Row),
		})
	}
	return out
}

// Notices returns what a reader must know before reading anything else.
func (c Changes) Notices() []string {
	var out []string
	for _, side := range []stats.Side{c.Before, c.After} {
		if side.Unfinished != "" {
			out = append(out, fmt.Sprintf("%s is unfinished: %s.", side.Name, side.Unfinished))
		}
	}
	return out
}

// Summary describes the comparison in a sentence or two.
func (c Changes) Summary() string {
	count := map[stats.Verdict]int{}
	var slower []string
	rows := c.Rows()
	for _, r := range rows {
		count[r.Verdict]++
		if r.Verdict == stats.Slower {
			slower = append(slower, r.says)
		}
	}
	if len(rows) == 0 {
		return "The results have no variant, workload and number of pairs in common, so nothing was compared."
	}
	text := fmt.Sprintf("%s compared with %s: %d faster, %d slower, %d the same, %d inconclusive.", c.After.Name, c.Before.Name,
		count[stats.Faster], count[stats.Slower], count[stats.Same], count[stats.Inconclusive])
	if len(slower) > 0 {
		text += " Slower: " + strings.Join(slower[:min(len(slower), few)], "; ")
		if more := len(slower) - few; more > 0 {
			text += fmt.Sprintf("; and %d more", more)
		}
		text += "."
	}
	return text
}

// CompareFormats has the writers of a comparison, by format.
var CompareFormats = map[string]func(io.Writer, Changes) error{
	"text": compareText, "md": compareMarkdown, "json": compareJSON, "junit": compareJUnit, "html": compareHTML,
}

func compareText(w io.Writer, c Changes) error {
	var b strings.Builder
	for _, n := range c.Notices() {
		b.WriteString(wrap("! "+n, 80, "  "))
	}
	tw := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "VARIANT\tWORKLOAD\tPAIRS\tMETRIC\tBEFORE\tAFTER\tUNIT\tRATIO\tVERDICT")
	for _, r := range c.Rows() {
		fmt.Fprintf(tw, "%s\t%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s %s\n", plain.Line(r.Variant), plain.Line(r.Workload), r.Pairs, r.Metric, r.Before, r.After, r.Unit, r.Ratio, mark(r.Verdict), r.Verdict)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	for _, m := range c.Missing {
		fmt.Fprintln(&b, "missing:", plain.Line(m))
	}
	b.WriteString("\n" + wrap(c.Summary(), 80, "  "))
	return put(w, b.String(), "text")
}

func compareMarkdown(w io.Writer, c Changes) error {
	var b strings.Builder
	for _, n := range c.Notices() {
		fmt.Fprintf(&b, "> ⚠ **%s**\n\n", escapeMarkdown(n))
	}
	fmt.Fprintf(&b, "**%s**\n\n| variant | workload | pairs | metric | before | after | unit | ratio | verdict |\n|---|---|---:|---|---:|---:|---|---|---|\n", escapeMarkdown(c.Summary()))
	for _, r := range c.Rows() {
		fmt.Fprintf(&b, "| %s | %s | %d | %s | %s | %s | %s | %s | %s %s |\n", escapeMarkdown(r.Variant), escapeMarkdown(r.Workload), r.Pairs, r.Metric, r.Before, r.After, r.Unit, r.Ratio, mark(r.Verdict), r.Verdict)
	}
	for i, m := range c.Missing {
		if i == 0 {
			b.WriteByte('\n')
		}
		fmt.Fprintf(&b, "- missing: %s\n", escapeMarkdown(m))
	}
	return put(w, b.String(), "markdown")
}

func compareJSON(w io.Writer, c Changes) error {
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetIndent("", "  ")
	if err := e.Encode(c.Comparison); err != nil {
		return fmt.Errorf("comparison as json: %w", err)
	}
	return put(w, b.String(), "json")
}

// The parts of JUnit's format that pipelines show.
type (
	junitSuite struct {
		XMLName    xml.Name    `xml:"testsuite"`
		Name       string      `xml:"name,attr"`
		Tests      int         `xml:"tests,attr"`
		Failures   int         `xml:"failures,attr"`
		Skipped    int         `xml:"skipped,attr"`
		Properties *junitProps `xml:"properties"`
		Cases      []junitCase `xml:"testcase"`
	}
	junitProps struct {
		All []junitProp `xml:"property"`
	}
	junitProp struct {
		Name  string `xml:"name,attr"`
		Value string `xml:"value,attr"`
	}
	junitCase struct {
		Class   string    `xml:"classname,attr"`
		Name    string    `xml:"name,attr"`
		Failure *junitWhy `xml:"failure"`
		Skipped *junitWhy `xml:"skipped"`
		Out     string    `xml:"system-out,omitempty"`
	}
	junitWhy struct {
		Message string `xml:"message,attr"`
	}
)

func (s *junitSuite) add(class, name, out string, failure, inconclusive string, strict bool) {
	one := junitCase{Class: class, Name: name, Out: out}
	switch {
	case failure == "" && inconclusive == "":
	case failure != "" || strict:
		one.Failure = &junitWhy{failure + inconclusive}
		s.Failures++
	default:
		one.Skipped = &junitWhy{inconclusive}
		s.Skipped++
	}
	s.Tests++
	s.Cases = append(s.Cases, one)
}

func (s *junitSuite) write(w io.Writer) error {
	text, err := xml.MarshalIndent(s, "", "  ")
	if err != nil {
		return fmt.Errorf("report as junit: %w", err)
	}
	return put(w, xml.Header+string(text)+"\n", "junit")
}

func compareJUnit(w io.Writer, c Changes) error {
	s := junitSuite{Name: plain.Line(fmt.Sprintf("slipstream compare %s %s", c.Before.Name, c.After.Name))}
	if notices := c.Notices(); len(notices) > 0 {
		s.Properties = &junitProps{}
		for _, n := range notices {
			s.Properties.All = append(s.Properties.All, junitProp{"unfinished", plain.Line(n)})
		}
	}
	for _, r := range c.Rows() {
		failure, inconclusive := "", ""
		switch r.Verdict {
		case stats.Slower:
			failure = r.says + " is slower"
		case stats.Inconclusive:
			inconclusive = r.says + " is inconclusive: too few blocks, or too much noise"
		}
		s.add(r.Variant, fmt.Sprintf("%s %s, %s", r.Workload, r.Metric, pairs(r.Pairs)), fmt.Sprintf("before %s, after %s %s, ratio %s", r.Before, r.After, r.Unit, r.Ratio), failure, inconclusive, c.Strict)
	}
	for _, m := range c.Missing {
		s.add("missing", plain.Line(m), "", "", "missing", c.Strict)
	}
	return s.write(w)
}

func compareHTML(w io.Writer, c Changes) error { return putPage(w, "compare", c) }

// Decided reports whether there was any row for a gate to consider.
func (c Changes) Decided() bool {
	return slices.ContainsFunc(c.Comparison.Changes, func(r stats.Change) bool { return r.Primary })
}
