package spec

import (
	"cmp"
	"encoding"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"slipstream.dev/internal/words"
)

// reader decodes a tree into Go values and collects what is wrong on the way.
// It is a decoder of its own because the ones that exist stop at the first
// problem, forget where a value stood, and cannot tell a zero from a field that
// was left out.
type reader struct {
	file string
	// nodes has the nodes that decoding has reached, by field path.
	nodes  map[string]*node
	errors Errors
	// malformed is the number of errors that decoding found. They are the first of
	// errors. Later checks skip the fields near them, which would only repeat the
	// problem.
	malformed int
	// currency is that of the first price, and currencyOf the price's field.
	currency, currencyOf string
	// learned collects what the checks demand, for Rules. It is nil for every other
	// caller.
	learned *lesson
}

func newReader(file string) *reader {
	return &reader{file: file, nodes: map[string]*node{}}
}

func (r *reader) err() error {
	if len(r.errors) == 0 {
		return nil
	}
	slices.SortStableFunc(r.errors, func(a, b *Error) int {
		return cmp.Or(strings.Compare(a.Override, b.Override), a.Line-b.Line, a.Column-b.Column, strings.Compare(a.Field, b.Field))
	})
	return r.errors
}

func (r *reader) problem(at position, path, format string, args ...any) {
	r.errors = append(r.errors, &Error{
		File: r.file, Line: at.line, Column: at.column, Override: at.override,
		Field: path, Problem: fmt.Sprintf(format, args...),
	})
}

// fail records a problem with a field, at the position of its value. If the file lacks
// the field, that is the position of the value that should contain it.
func (r *reader) fail(path, format string, args ...any) {
	r.problem(r.locate(path), path, format, args...)
}

func (r *reader) locate(path string) position {
	for at := path; ; at = parent(at) {
		if n := r.nodes[at]; n != nil {
			return n.pos
		}
		if at == "" {
			return position{line: 1, column: 1}
		}
	}
}

func parent(path string) string { return path[:max(0, strings.LastIndexAny(path, ".["))] }

// has reports whether the file sets a field, even if to zero.
func (r *reader) has(path string) bool { return r.nodes[path] != nil }

func (r *reader) missing(path string) { r.fail(path, "is missing") }

// value decodes a node into what v points to.
func (r *reader) value(n *node, v any, path string) { r.decode(n, reflect.ValueOf(v).Elem(), path) }

func (r *reader) decode(n *node, v reflect.Value, path string) {
	if n.kind == null {
		return // as if it were not there
	}
	r.nodes[path] = n
	switch to := v.Addr().Interface().(type) {
	case interface{ decode(*reader, *node, string) }:
		to.decode(r, n, path)
		return
	case encoding.TextUnmarshaler:
		text := n.text
		if n.kind != scalar {
			text = n.String()
		}
		if err := to.UnmarshalText([]byte(text)); err != nil {
			r.fail(path, "%s", err)
		}
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		r.decode(n, v.Elem(), path)
	case reflect.Struct:
		if r.is(n, mapping, path, "a mapping") {
			r.structure(n, v, path)
		}
	case reflect.Map:
		if r.is(n, mapping, path, "a mapping") && len(n.fields) > 0 {
			v.Set(reflect.MakeMap(v.Type()))
			for _, f := range n.fields {
				value := reflect.New(v.Type().Elem()).Elem()
				r.decode(f.value, value, join(path, f.name))
				v.SetMapIndex(reflect.ValueOf(f.name), value)
			}
		}
	case reflect.Slice:
		if r.is(n, sequence, path, "a list") && len(n.items) > 0 {
			v.Set(reflect.MakeSlice(v.Type(), len(n.items), len(n.items)))
			for i, item := range n.items {
				at := fmt.Sprintf("%s[%d]", path, i)
				if item.kind == null {
					r.problem(item.pos, at, "is empty")
				}
				r.decode(item, v.Index(i), at)
			}
		}
	case reflect.String:
		if r.is(n, scalar, path, "text") {
			v.SetString(n.text)
		}
	case reflect.Bool:
		if n.kind != scalar || n.quoted || n.text != "true" && n.text != "false" {
			r.fail(path, "must be true or false, is %s", n)
		}
		v.SetBool(n.text == "true")
	case reflect.Int:
		i, err := strconv.Atoi(n.text)
		r.number(n, err, path, "a whole number")
		v.SetInt(int64(i))
	case reflect.Uint64:
		u, err := strconv.ParseUint(n.text, 10, 64)
		r.number(n, err, path, "a whole number, not negative")
		v.SetUint(u)
	case reflect.Float64:
		f, err := strconv.ParseFloat(n.text, 64)
		r.number(n, err, path, "a number")
		v.SetFloat(f)
	default:
		panic("no decoding into " + v.Type().String()) // a field of a new type, not a file, leads here
	}
}

// misplaced says why a type does not have a field that another type has, by type and
// field.
var misplaced = map[string]string{
	"Accelerator.vf": "is for a policy: it verifies and changes nothing, so this variant would be the same as without it. " +
		"Leave it out; every trial records which share of the packets took the virtual function",
}

// fieldsOf returns the names of the fields of a structure in a file, and their indexes.
func fieldsOf(t reflect.Type) (names []string, indexes [][]int) {
	for _, f := range reflect.VisibleFields(t) {
		if f.Anonymous { // its fields are among them
			continue
		}
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		names, indexes = append(names, name), append(indexes, f.Index)
	}
	return names, indexes
}

func (r *reader) structure(n *node, v reflect.Value, path string) {
	names, fields := fieldsOf(v.Type())
	r.learned.structure(path, v.Type().Name(), names)
	for _, f := range n.fields {
		at := join(path, f.name)
		if i := slices.Index(names, f.name); i >= 0 {
			r.decode(f.value, v.FieldByIndex(fields[i]), at)
		} else if why := misplaced[v.Type().Name()+"."+f.name]; why != "" {
			r.problem(f.pos, at, "%s", why)
		} else if inSpec, _ := fieldsOf(reflect.TypeFor[Spec]()); path == "" && slices.Contains(inSpec, f.name) {
			r.problem(f.pos, at, "unknown field; did you mean spec.%s?", f.name)
		} else {
			r.problem(f.pos, at, "unknown field; %s", Suggest(f.name, names))
		}
	}
}

func (r *reader) is(n *node, want kind, path, text string) bool {
	if n.kind != want {
		r.fail(path, "must be %s, is %s", text, n)
	}
	return n.kind == want
}

func (r *reader) number(n *node, err error, path, text string) {
	if n.kind != scalar || n.quoted || err != nil {
		r.fail(path, "must be %s, is %s", text, n)
	}
}

// Suggest suggests allowed names: those near the given name, or all of them if none is
// near.
func Suggest(name string, allowed []string) string {
	if near := Near(name, allowed); len(near) > 0 {
		return "did you mean " + words.Or(near) + "?"
	}
	if len(allowed) == 0 {
		return "none is allowed"
	}
	return "allowed are " + strings.Join(allowed, ", ")
}

// Near returns the allowed names that the user probably meant: the nearest ones, if no more than a third of their
// letters differ, or the shortest that begins with the given text.
func Near(name string, allowed []string) []string {
	var begun string
	for _, a := range allowed {
		if len(name) > 2 && strings.HasPrefix(a, name) && (begun == "" || len(a) < len(begun)) {
			begun = a
		}
	}
	if begun != "" {
		return []string{begun}
	}
	var near []string
	least := len(name)
	for _, a := range allowed {
		d := distance(strings.ToLower(name), strings.ToLower(a))
		if longer := max(len(name), len(a)); d > least || d > max(1, longer/3) || d == longer {
			continue
		}
		if d < least {
			near, least = nil, d
		}
		near = append(near, a)
	}
	return near
}

// distance counts the insertions, deletions, substitutions and swaps of neighbours that turn a into b (optimal string
// alignment).
func distance(a, b string) int {
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		rows[i][0] = i
	}
	for j := range rows[0] {
		rows[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			change := rows[i-1][j-1]
			if a[i-1] != b[j-1] {
				change++
			}
			rows[i][j] = min(change, rows[i-1][j]+1, rows[i][j-1]+1)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				rows[i][j] = min(rows[i][j], rows[i-2][j-2]+1)
			}
		}
	}
	return rows[len(a)][len(b)]
}
