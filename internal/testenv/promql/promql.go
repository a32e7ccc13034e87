// Package promql checks that queries of alerts and dashboards name only metrics and labels that exist, and that dashboards are
// what Grafana reads. Only tests import it. It cannot tell whether a query gives the right number: promtool tests alerts.
package promql

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/cog/variants"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	"github.com/grafana/grafana-foundation-sdk/go/prometheus"
	"github.com/grafana/grafana-foundation-sdk/go/stat"
	"github.com/grafana/grafana-foundation-sdk/go/table"
	"github.com/grafana/grafana-foundation-sdk/go/timeseries"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/promql/parser"
)

// Check fails the test if a query is not PromQL, or names a metric or a label that is not among metrics, which maps the name of a
// metric to its labels.
func Check(t testing.TB, where, query string, metrics map[string][]string) {
	t.Helper()
	for _, problem := range problems(query, metrics) {
		t.Errorf("%s: %s: %s", where, query, problem)
	}
}

func problems(query string, metrics map[string][]string) (all []string) {
	expr, err := parser.ParseExpr(query)
	if err != nil {
		return []string{err.Error()}
	}
	var known []string // labels of all of its metrics
	parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
		selector, ok := node.(*parser.VectorSelector)
		if !ok {
			return nil
		}
		of, ok := metrics[selector.Name]
		if !ok {
			all = append(all, fmt.Sprintf("there is no metric %q", selector.Name))
			return nil
		}
		known = append(known, of...)
		for _, m := range selector.LabelMatchers {
			if m.Name != model.MetricNameLabel && !slices.Contains(of, m.Name) {
				all = append(all, fmt.Sprintf("%s has no label %q", selector.Name, m.Name))
			}
		}
		return nil
	})
	parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
		var names []string
		switch n := node.(type) {
		case *parser.AggregateExpr:
			names = n.Grouping
		case *parser.BinaryExpr:
			if n.VectorMatching != nil {
				names = slices.Concat(n.VectorMatching.MatchingLabels, n.VectorMatching.Include)
			}
		}
		for _, name := range names {
			if !slices.Contains(known, name) {
				all = append(all, fmt.Sprintf("none of its metrics has the label %q", name))
			}
		}
		return nil
	})
	return all
}

// CheckDashboard fails the test if a file is not a dashboard that Grafana reads, if its panels overlap or say nothing, or if one of
// its queries fails Check.
func CheckDashboard(t testing.TB, file string, metrics map[string][]string) {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, config := range []variants.PanelcfgConfig{timeseries.VariantConfig(), stat.VariantConfig(), table.VariantConfig()} {
		cog.NewRuntime().RegisterPanelcfgVariant(config)
	}
	cog.NewRuntime().RegisterDataqueryVariant(prometheus.VariantConfig())
	// The strict reader returns a list of errors even if that is empty, and does not fill in panels then.
	if err := new(dashboard.Dashboard).UnmarshalJSONStrict(data); err != nil && err.Error() != "" { //nolint:staticcheck // every Grafana reads this format, and few its successor
		t.Fatalf("%s: Grafana does not read it: %v", file, err)
	}
	var d dashboard.Dashboard //nolint:staticcheck // see above
	if err := json.Unmarshal(data, &d); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	if d.Uid == nil || d.Title == nil || d.Description == nil {
		t.Errorf("%s lacks a uid, a title or a description", file)
	}
	b := board{t: t, file: file, metrics: metrics, variables: make(map[string]bool), ids: make(map[uint32]bool), taken: make(map[[2]uint32]string)}
	for _, v := range d.Templating.List {
		b.variable(v)
	}
	for _, p := range d.Panels {
		if p.RowPanel != nil {
			b.place(p.RowPanel.Id, *p.RowPanel.Title, *p.RowPanel.GridPos)
			continue
		}
		b.panel(*p.Panel)
	}
}

// board is a dashboard that is being checked.
type board struct {
	t         testing.TB
	file      string
	metrics   map[string][]string
	variables map[string]bool
	ids       map[uint32]bool
	taken     map[[2]uint32]string // cells of the grid
}

var (
	// labelValues matches the query of a variable.
	labelValues = regexp.MustCompile(`^label_values\((.+), (\w+)\)$`)
	reference   = regexp.MustCompile(`\$\{?(\w+)\}?`)
)

func (b *board) variable(v dashboard.VariableModel) {
	b.t.Helper()
	if v.Type == dashboard.VariableTypeQuery {
		m := labelValues.FindStringSubmatch(*v.Query.String)
		if m == nil {
			b.t.Errorf("%s: the variable %s has a query that this test cannot read", b.file, v.Name)
			return
		}
		b.query("the variable "+v.Name, fmt.Sprintf("count by (%s) (%s)", m[2], m[1]))
	}
	b.variables[v.Name] = true // for the variables and panels after it
}

func (b *board) panel(p dashboard.Panel) {
	b.t.Helper()
	if p.Title == nil || p.Description == nil || p.Id == nil || p.GridPos == nil || len(p.Targets) == 0 {
		b.t.Errorf("%s: a panel lacks its title, description, id, place or queries", b.file)
		return
	}
	b.place(*p.Id, *p.Title, *p.GridPos)
	for _, target := range p.Targets {
		q, ok := target.(*prometheus.Dataquery)
		if !ok {
			b.t.Errorf("%s: %s has a query that is not for Prometheus: %T", b.file, *p.Title, target)
			continue
		}
		b.query(*p.Title, q.Expr)
	}
}

// place checks that panels have numbers of their own, and do not overlap on the grid of 24 columns.
func (b *board) place(id uint32, title string, at dashboard.GridPos) {
	b.t.Helper()
	if b.ids[id] || at.X+at.W > 24 || at.W == 0 || at.H == 0 {
		b.t.Errorf("%s: %s has the id of another panel, or no place on the grid", b.file, title)
	}
	b.ids[id] = true
	for x := at.X; x < at.X+at.W; x++ {
		for y := at.Y; y < at.Y+at.H; y++ {
			if other, ok := b.taken[[2]uint32{x, y}]; ok {
				b.t.Errorf("%s: %s overlaps %s", b.file, title, other)
				return
			}
			b.taken[[2]uint32{x, y}] = title
		}
	}
}

// query checks a query as Grafana sends it, with values in place of variables.
func (b *board) query(where, query string) {
	b.t.Helper()
	for _, m := range reference.FindAllStringSubmatch(query, -1) {
		if !b.variables[m[1]] && !strings.HasPrefix(m[1], "__") {
			b.t.Errorf("%s: %s: there is no variable %s", b.file, where, m[1])
		}
	}
	query = strings.ReplaceAll(query, "$__rate_interval", "5m")
	Check(b.t, b.file+": "+where, reference.ReplaceAllString(query, "x"), b.metrics)
}
