package metrics

import (
	"go/ast"
	"go/parser"
	"go/token"
	"strconv"
	"testing"
)

// TestEveryNameHasARow: a metric without a row would be refused in trials, one with two would be summarised twice.
func TestEveryNameHasARow(t *testing.T) {
	parsed, err := parser.ParseFile(token.NewFileSet(), "metrics.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	rows := make(map[string]int)
	for _, m := range table {
		rows[m.Name]++
	}
	ast.Inspect(parsed, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok || spec.Type != nil || len(spec.Values) != 1 {
			return true
		}
		if literal, ok := spec.Values[0].(*ast.BasicLit); ok {
			name, _ := strconv.Unquote(literal.Value)
			if rows[name] != 1 {
				t.Errorf("%s = %q has %d rows, want 1", spec.Names[0], name, rows[name])
			}
			delete(rows, name)
		}
		return true
	})
	for name := range rows {
		t.Errorf("the row %q is of no constant", name)
	}
}

func TestLookupOfDaemonSet(t *testing.T) {
	m, known := Lookup(OfDaemonSet(DaemonSetCPU, "kube-system/cilium"))
	if !known || m.Name != "daemonset_cpu:kube-system/cilium" || m.Title != "CPU of kube-system/cilium" || m.Shown != "millicores" {
		t.Errorf("%+v, %v", m, known)
	}
	for _, name := range []string{OfDaemonSet(Throughput, "kube-system/cilium"), "daemonset_cpu:", "daemonset_cpu:cilium", "daemonset_cpu:/cilium", "daemonset_cpu:a/<b>", "daemonset_cpu:a/b/c", "daemonset_cpu:a/b\x1b"} {
		if m, known := Lookup(name); known {
			t.Errorf("%q is %+v", name, m)
		}
	}
}

func TestRowsAreComplete(t *testing.T) {
	for _, m := range table {
		if m.Unit == "" || m.Meaning == "" || m.Title == "" || m.Shown == "" || m.Scale <= 0 || m.Better != Higher && m.Better != Lower {
			t.Errorf("%s lacks something: %+v", m.Name, m)
		}
	}
}
