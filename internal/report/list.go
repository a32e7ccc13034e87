package report

import (
	"fmt"
	"io"
	"net/url"
	"strings"

	"slipstream.dev/internal/history"
	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/words"
)

// Links makes the addresses of the pages of a folder of results: on a server or, with Files, as files beside each
// other.
type Links struct{ Files bool }

// Index returns the address of the list, as seen from another page.
func (l Links) Index() string {
	if l.Files {
		return "index.html"
	}
	return "/"
}

// Result returns the address of a result.
func (l Links) Result(name string) string {
	if l.Files {
		return url.PathEscape(name) + "/report.html"
	}
	return "/result/" + url.PathEscape(name)
}

// Live returns the address of a run under way.
func (l Links) Live(name string) string { return "/live/" + url.PathEscape(name) }

// Trend returns the address of the trend of an experiment's primary metrics.
func (l Links) Trend(experiment string) string {
	if l.Files {
		return url.PathEscape(TrendFile(experiment))
	}
	return "/trend?" + url.Values{"experiment": {experiment}}.Encode()
}

// TrendFile returns the name of the file with the trend of an experiment.
func TrendFile(experiment string) string { return "trend-" + url.PathEscape(experiment) + ".html" }

// List is the page of a folder of results.
type List struct {
	Links
	// Folder is the path of the folder, for the title.
	Folder      string
	Experiments []string
	Results     []history.Result
	Total       int
	// Query and Experiment are what was searched for.
	Query, Experiment string
	// Skip is the number of newer results that are not on the page.
	Skip int
	// Fleet is the address of the page of a cluster; empty if there is none.
	Fleet string
	// Previous and Next are the addresses of other pages; empty if there are none.
	Previous, Next string
}

// HTML writes the page.
func (l List) HTML(w io.Writer) error { return writePage(w, "list", l) }

// Count says how many results there are, and which of them the page has.
func (l List) Count() string {
	text := words.Count(l.Total, "result")
	if l.Query != "" || l.Experiment != "" {
		text += " found"
	}
	if len(l.Results) < l.Total {
		text += fmt.Sprintf(", here %d to %d", l.Skip+1, l.Skip+len(l.Results))
	}
	return text
}

// Address returns the address of a result, or "" if there is no page of it.
func (l List) Address(r history.Result) string {
	switch {
	case r.State == history.Running && !l.Files:
		return l.Live(r.Name)
	case r.State == history.Complete, r.State == history.Unfinished && (!l.Files || len(r.Verdicts) > 0):
		return l.Result(r.Name)
	}
	return ""
}

// MeasuredOn describes where a result was measured, with which program, and its labels.
func (l List) MeasuredOn(r history.Result) string {
	var all []string
	for _, name := range []string{history.FactKernel, history.FactNIC, history.FactOverlay, history.FactCPU} {
		if text := r.Fact(name); text != "" {
			all = append(all, text)
		}
	}
	for _, f := range r.Facts {
		if f.Name == history.FactProgram || strings.HasPrefix(f.Name, history.LabelFact) {
			all = append(all, strings.TrimPrefix(f.Name, history.LabelFact)+" "+f.Text)
		}
	}
	return strings.Join(all, ", ")
}

// Verdicts counts the verdicts of a result in signs: "▲ 3 ▼ 1 = 2".
func Verdicts(count map[stats.Verdict]int) string {
	var all []string
	for _, v := range verdictCounts(count) {
		all = append(all, fmt.Sprint(verdictSign(v.Verdict), v.N))
	}
	return strings.Join(all, " ")
}

// VerdictCount is the number of comparisons with one verdict.
type VerdictCount struct {
	Verdict stats.Verdict
	N       int
}

// verdictCounts returns the counts above 0 in the order of the verdicts.
func verdictCounts(count map[stats.Verdict]int) (all []VerdictCount) {
	for _, v := range []stats.Verdict{stats.Faster, stats.Slower, stats.Same, stats.Inconclusive} {
		if n := count[v]; n > 0 {
			all = append(all, VerdictCount{v, n})
		}
	}
	return all
}

// Says returns the most notable fact about a result: its problem, else its largest gain, else its largest loss.
func Says(r history.Result) string {
	switch {
	case r.Problem != "":
		return r.Problem
	case r.Best != nil:
		return r.Best.Variant + ": " + Describe(r.Best)
	case r.Worst != nil:
		return r.Worst.Variant + ": " + Describe(r.Worst)
	}
	return ""
}

// Message is a page with a message in place of the one that was requested.
type Message struct {
	Index, Title, Text string
	// Login asks for the token of the server.
	Login bool
}

// HTML writes the page.
func (m Message) HTML(w io.Writer) error { return writePage(w, "message", m) }
