package report

import (
	"encoding/xml"
	"fmt"
	"io"

	"slipstream.dev/internal/plain"
	"slipstream.dev/internal/stats"
)

// JUnit writes a test case for each expectation, for a pipeline to show. An inconclusive expectation fails, because it
// fails the run too. If the experiment expects nothing, the cases are its comparisons, and none of them fails.
func JUnit(w io.Writer, m *Model) error {
	s := junitSuite{Name: plain.Line("slipstream " + m.Name)}
	if m.Unfinished != "" {
		s.Properties = &junitProperties{[]junitProperty{{"unfinished", m.Unfinished}}}
	}
	for _, e := range m.Expected {
		failure := ""
		if e.Outcome != stats.OutcomeMet {
			failure = fmt.Sprintf("%s: %s", e.Outcome, e.Why)
		}
		s.add(plain.Line(m.Name), plain.Line(e.Claim), e.Why, failure, "", true)
	}
	if len(m.Expected) == 0 {
		s.addComparisons(m)
	}
	return s.write(w)
}

func (s *junitSuite) addComparisons(m *Model) {
	for i := range m.summary.Rows {
		r := &m.summary.Rows[i]
		if r.Versus == nil {
			continue
		}
		inconclusive := ""
		if r.Versus.Verdict == stats.Inconclusive {
			inconclusive = "inconclusive: too few blocks, or too much noise"
		}
		name := fmt.Sprintf("%s versus %s: %s %s, %s", r.Variant, r.Versus.Baseline, r.Workload, r.Metric, pairs(r.Pairs))
		s.add(plain.Line(m.Name), plain.Line(name), fmt.Sprintf("%s: %s", r.Versus.Verdict, change(r)), "", inconclusive, false)
	}
}

// The parts of JUnit's format that pipelines show.
type (
	junitSuite struct {
		XMLName    xml.Name         `xml:"testsuite"`
		Name       string           `xml:"name,attr"`
		Tests      int              `xml:"tests,attr"`
		Failures   int              `xml:"failures,attr"`
		Skipped    int              `xml:"skipped,attr"`
		Properties *junitProperties `xml:"properties"`
		Cases      []junitCase      `xml:"testcase"`
	}
	junitProperties struct {
		All []junitProperty `xml:"property"`
	}
	junitProperty struct {
		Name  string `xml:"name,attr"`
		Value string `xml:"value,attr"`
	}
	junitCase struct {
		Class   string        `xml:"classname,attr"`
		Name    string        `xml:"name,attr"`
		Failure *junitMessage `xml:"failure"`
		Skipped *junitMessage `xml:"skipped"`
		Out     string        `xml:"system-out,omitempty"`
	}
	junitMessage struct {
		Message string `xml:"message,attr"`
	}
)

func (s *junitSuite) add(class, name, out string, failure, inconclusive string, strict bool) {
	one := junitCase{Class: class, Name: name, Out: out}
	switch {
	case failure == "" && inconclusive == "":
	case failure != "" || strict:
		one.Failure = &junitMessage{failure + inconclusive}
		s.Failures++
	default:
		one.Skipped = &junitMessage{inconclusive}
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
	return writePlain(w, xml.Header+string(text)+"\n", "junit")
}

func changesJUnit(w io.Writer, c Changes) error {
	s := junitSuite{Name: plain.Line(fmt.Sprintf("slipstream compare %s %s", c.Before.Name, c.After.Name))}
	if notices := c.Notices(); len(notices) > 0 {
		s.Properties = &junitProperties{}
		for _, n := range notices {
			s.Properties.All = append(s.Properties.All, junitProperty{"notice", plain.Line(n)})
		}
	}
	for _, r := range c.Rows() {
		failure, inconclusive := "", ""
		switch r.Verdict {
		case stats.Slower:
			failure = r.description + " is slower"
		case stats.Inconclusive:
			inconclusive = r.description + " is inconclusive: too few blocks, or too much noise"
		}
		s.add(r.Variant, fmt.Sprintf("%s %s, %s", r.Workload, r.Metric, pairs(r.Pairs)), fmt.Sprintf("before %s, after %s %s, ratio %s", r.Before, r.After, r.Unit, r.Ratio), failure, inconclusive, c.Strict)
	}
	for _, m := range c.Missing {
		s.add("missing", plain.Line(m), "", "", "missing", c.Strict)
	}
	return s.write(w)
}
