package record

import (
	"go/ast"
	"go/parser"
	"go/token"
	"strconv"
	"testing"
)

// TestEveryWarningHasARow: without a row, a report would show a code without saying what it does to the result.
func TestEveryWarningHasARow(t *testing.T) {
	parsed, err := parser.ParseFile(token.NewFileSet(), "warning.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	rows := make(map[string]int)
	for _, k := range warningKinds {
		rows[k.Code]++
		if k.Meaning == "" || k.Effect == "" || k.Severity < Serious || k.Severity > Note {
			t.Errorf("%s lacks something: %+v", k.Code, k)
		}
	}
	ast.Inspect(parsed, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok || len(spec.Values) != 1 {
			return true
		}
		if literal, ok := spec.Values[0].(*ast.BasicLit); ok {
			code, _ := strconv.Unquote(literal.Value)
			if rows[code] != 1 {
				t.Errorf("%s = %q has %d rows, want 1", spec.Names[0], code, rows[code])
			}
			delete(rows, code)
		}
		return true
	})
	for code := range rows {
		t.Errorf("the row %q is of no constant", code)
	}
}
