package spec

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// position is where something was written: a place in the file, or an override.
type position struct {
	line, column int
	override     string
}

type kind int

const (
	null kind = iota
	scalar
	mapping
	sequence
)

// node is a YAML value with its position. A scalar keeps its text, because the field's type decides whether 10
// is a number or a name.
type node struct {
	kind   kind
	pos    position
	text   string
	quoted bool
	fields []field
	items  []*node
}

type field struct {
	name  string
	pos   position
	value *node
}

func (n *node) String() string {
	switch n.kind {
	case scalar:
		const most = 60 // a file that is not YAML may be a single long text
		if text := []rune(n.text); len(text) > most {
			return strconv.Quote(string(text[:most]) + "…")
		}
		return strconv.Quote(n.text)
	case mapping:
		return "a mapping"
	case sequence:
		return "a list"
	}
	return "empty"
}

// parse returns the tree of a document, or records what is wrong with it and returns nil. override is the text
// of the override whose value is data, or empty for a file.
func (r *reader) parse(data []byte, override string) *node {
	at := position{line: 1, column: 1, override: override}
	if !utf8.Valid(data) {
		r.problem(at, "", "must be UTF-8 text")
		return nil
	}
	tokens := lexer.Tokenize(string(data))
	if t := tooDeep(tokens); t != nil {
		r.problem(positionOfToken(t, override), "", "is nested too deeply: lists and mappings may be nested %d deep", maxDepth)
		return nil
	}
	file, err := parser.Parse(tokens, 0)
	if err != nil {
		msg := err.Error()
		var e yaml.Error
		if errors.As(err, &e) {
			msg = e.GetMessage()
			if t := e.GetToken(); t != nil && t.Position != nil && override == "" {
				at.line, at.column = t.Position.Line, t.Position.Column
			}
		}
		r.problem(at, "", "%s", msg)
		return nil
	}
	var body ast.Node
	for _, doc := range file.Docs {
		switch {
		case doc.Body == nil || doc.Body.Type() == ast.CommentType:
		case body != nil:
			r.problem(positionOf(doc.Body, override), "", "must be one YAML document, is several")
			return nil
		default:
			body = doc.Body
		}
	}
	if body == nil {
		return &node{pos: at}
	}
	before := len(r.errors)
	n := r.tree(body, override)
	if len(r.errors) > before {
		return nil
	}
	return n
}

// tree turns the parser's tree into ours, which excludes some features of YAML:
// anchors would give one value two positions, and tags would contradict the types.
func (r *reader) tree(from ast.Node, override string) *node {
	n := &node{pos: positionOf(from, override)}
	switch from := from.(type) {
	case *ast.NullNode:
	case *ast.MappingNode:
		n.kind = mapping
		if !from.IsFlowStyle && len(from.Values) > 0 {
			n.pos = positionOf(from.Values[0].Key, override)
		}
		for _, f := range from.Values {
			key, ok := f.Key.(ast.ScalarNode)
			if !ok || f.Key.IsMergeKey() || f.Key.Type() == ast.AnchorType || f.Key.Type() == ast.AliasType {
				r.problem(positionOf(f.Key, override), "", "must be the name of a field; anchors, aliases and merge keys are not read")
				continue
			}
			n.fields = append(n.fields, field{key.GetToken().Value, positionOf(key, override), r.tree(f.Value, override)})
		}
	case *ast.SequenceNode:
		n.kind = sequence
		for _, item := range from.Values {
			n.items = append(n.items, r.tree(item, override))
		}
	case *ast.LiteralNode:
		n.kind, n.text, n.quoted = scalar, from.Value.Value, true
	case *ast.StringNode:
		n.kind, n.text = scalar, from.Value
		n.quoted = from.Token.Type == token.SingleQuoteType || from.Token.Type == token.DoubleQuoteType
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.InfinityNode, *ast.NanNode:
		n.kind, n.text = scalar, from.GetToken().Value
	default:
		r.problem(n.pos, "", "must be a plain value; anchors, aliases and tags are not read")
	}
	return n
}

// maxDepth is far above any experiment. The parser's time and stack grow with the depth: 64 KiB of brackets
// take it minutes.
const maxDepth = 100

// tooDeep returns the first token that begins a list or mapping deeper than maxDepth, nil if there is none. It
// counts brackets, and the lists and mappings that begin on one line ("- - a: b"). Deep nesting over several
// lines needs so much indentation that the size limit of a file bounds it.
func tooDeep(tokens token.Tokens) *token.Token {
	depth, line, begun := 0, 0, 0
	for _, t := range tokens {
		if t.Position.Line != line {
			line, begun = t.Position.Line, 0
		}
		switch t.Type {
		case token.SequenceStartType, token.MappingStartType:
			depth++
		case token.SequenceEndType, token.MappingEndType:
			depth--
		case token.SequenceEntryType, token.MappingKeyType:
			begun++
		}
		if depth+begun > maxDepth {
			return t
		}
	}
	return nil
}

func positionOf(n ast.Node, override string) position { return positionOfToken(n.GetToken(), override) }

func positionOfToken(t *token.Token, override string) position {
	if override == "" && t != nil && t.Position != nil {
		return position{line: t.Position.Line, column: t.Position.Column}
	}
	return position{override: override}
}

// field returns the value of a field of a mapping, nil if there is none.
func (n *node) field(name string) *node {
	for _, f := range n.fields {
		if f.name == name {
			return f.value
		}
	}
	return nil
}

// brackets lets an override name an element as an error does: spec.pairs[2].
var brackets = strings.NewReplacer("[", ".", "]", "")

// FieldOf returns the field that an override sets, without brackets: spec.pairs.2 of "spec.pairs[2]=4".
func FieldOf(override string) string {
	field, _, _ := strings.Cut(override, "=")
	return brackets.Replace(field)
}

// override applies "key=value" to the tree. The key is a path of fields joined by dots; it names an element of
// a list by its name or its index. override creates mappings that are not there yet. An empty value removes a
// field.
func (r *reader) override(root *node, set string) {
	key, value, ok := strings.Cut(set, "=")
	if !ok || key == "" {
		r.problem(position{override: set}, "", "must be key=value, such as spec.runs=5")
		return
	}
	if v := r.parse([]byte(value), set); v != nil {
		if err := root.set("", brackets.Replace(key), v); err != nil {
			r.problem(position{override: set}, "", "%s", err)
		}
	}
}

func (n *node) set(path, key string, value *node) error {
	if key == "" {
		*n = *value
		return nil
	}
	switch n.kind {
	case null:
		*n = node{kind: mapping, pos: value.pos}
		return n.set(path, key, value)
	case mapping:
		var names []string
		for _, f := range n.fields {
			names = append(names, f.name)
		}
		name, rest := step(key, names)
		i := slices.Index(names, name)
		if i < 0 {
			i = len(n.fields)
			n.fields = append(n.fields, field{name, value.pos, &node{pos: value.pos}})
		}
		return n.fields[i].value.set(join(path, name), rest, value)
	case sequence:
		var names []string
		for i, item := range n.items {
			name := strconv.Itoa(i)
			if f := item.field("name"); f != nil {
				name = f.text
			}
			names = append(names, name)
		}
		name, rest := step(key, names)
		i := slices.Index(names, name)
		if i < 0 {
			var err error
			if i, err = strconv.Atoi(name); err != nil || i < 0 || i >= len(n.items) {
				return fmt.Errorf("%s has no element %q; it has %s", path, name, strings.Join(names, ", "))
			}
		}
		return n.items[i].set(fmt.Sprintf("%s[%d]", path, i), rest, value)
	}
	return fmt.Errorf("%s is %s, which has no field %q", path, n, key)
}

// step cuts the first name off a key. Names may contain dots, so an existing name takes precedence over a cut
// at the first dot.
func step(key string, names []string) (name, rest string) {
	for _, n := range names {
		if (key == n || strings.HasPrefix(key, n+".")) && len(n) > len(name) {
			name = n
		}
	}
	if name != "" {
		return name, strings.TrimPrefix(key[len(name):], ".")
	}
	name, rest, _ = strings.Cut(key, ".")
	return name, rest
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}
