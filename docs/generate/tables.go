//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/goccy/go-yaml"
	"github.com/invopop/jsonschema"
)

// reflectTypes makes the schema of a Go type, with the comments of the folders as
// descriptions and the struct tag unit as an extra.
func reflectTypes(r *jsonschema.Reflector, v any, folders ...string) (*jsonschema.Schema, error) {
	for _, folder := range folders {
		if err := r.AddGoComments("slipstream.dev", folder, jsonschema.WithFullComment()); err != nil {
			return nil, err
		}
	}
	s := r.Reflect(v)
	annotate(s, s.Definitions, reflect.TypeOf(v))
	for _, def := range s.Definitions {
		def.Description = prose(def.Description, "")
	}
	s.Description = prose(s.Description, "")
	return s, nil
}

// annotate adds units to the fields of a Go type. It replaces the Go name at the start of a
// description by the name that a file uses.
func annotate(s *jsonschema.Schema, defs jsonschema.Definitions, t reflect.Type) {
	for i := range t.NumField() {
		f := t.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		p, ok := s.Properties.Get(name)
		if !ok {
			continue
		}
		unit := f.Tag.Get("unit")
		if unit != "" {
			p.Extras = with(p.Extras, "unit", unit)
		}
		p.Description = prose(p.Description, name)
		to := f.Type
		for to.Kind() == reflect.Pointer || to.Kind() == reflect.Slice {
			to = to.Elem()
		}
		if def := defs[to.Name()]; def != nil && def.Properties != nil && def.Extras == nil {
			def.Extras = map[string]any{"annotated": true}
			annotate(def, defs, to)
		}
	}
}

// marker matches a line of a comment that is for a tool.
var marker = regexp.MustCompile(`(?m)^\+.*\n?`)

// prose returns a Go comment as running text, for the field with a name. Go comments begin with the
// name of what they describe. The table has it in another column, so prose removes "Name is".
func prose(comment, name string) string {
	text := strings.Join(strings.Fields(marker.ReplaceAllString(comment, "")), " ")
	first := word.FindString(text)
	if name == "" || !strings.EqualFold(first, strings.NewReplacer("-", "", "_", "").Replace(name)) {
		return text
	}
	rest := text[len(first):]
	if m := copula.FindString(rest); m != "" {
		return strings.ToUpper(rest[len(m):len(m)+1]) + rest[len(m)+1:]
	}
	if strings.ToLower(name) == name && !strings.ContainsAny(name, "_-") && noun.MatchString(rest) {
		return first + rest
	}
	return "`" + name + "`" + rest
}

var (
	copula = regexp.MustCompile(`^ (is|are) `)
	// noun matches what follows a name that is not the subject of a verb.
	noun = regexp.MustCompile(`^( (of|that|to|by|in|on|per|who|where) |[.,:])`)
)

var word = regexp.MustCompile(`^\w+`)

func with(extras map[string]any, key string, value any) map[string]any {
	if extras == nil {
		extras = make(map[string]any)
	}
	extras[key] = value
	return extras
}

func number(n int) json.Number { return json.Number(strconv.Itoa(n)) }

// column is the third column of a table, besides names with their types, and descriptions.
type column struct {
	head string
	of   func(s *jsonschema.Schema, required bool) string
}

// defaults shows the value of a field that is left out.
var defaults = column{"default", func(s *jsonschema.Schema, required bool) string {
	switch all, _ := s.Extras["defaults"].([]string); {
	case required:
		return "**required**"
	case all != nil:
		return "`" + strings.Join(all, "`, `") + "`"
	case s.Default != nil:
		return "`" + inline(s.Default) + "`"
	}
	return ""
}}

// always shows which fields may be missing.
var always = column{"present", func(_ *jsonschema.Schema, required bool) string {
	if required {
		return "always"
	}
	return "unless empty"
}}

func inline(v any) string {
	data, err := yaml.MarshalWithOptions(v, yaml.Flow(true))
	if err != nil {
		panic(err) // a schema's default came from YAML or JSON
	}
	return strings.TrimSpace(string(data))
}

// page is a document with one table for each structure.
type page struct {
	*bytes.Buffer
	third column
	// defs has the definitions of the current schema, todo its structures that a table links to,
	// and titles the titles of the tables of all schemas so far, each with its description.
	defs   jsonschema.Definitions
	todo   []section
	titles map[string]string
}

type section struct {
	title string
	of    *jsonschema.Schema
}

func newPage(b *bytes.Buffer, third column) *page {
	return &page{Buffer: b, third: third, titles: make(map[string]string)}
}

// tables writes a table of the fields of a schema, and one for each structure that they lead to. The
// title is the heading of the first table, which has no heading if it is empty. tables fails if a
// field has no description.
func (p *page) tables(title string, s *jsonschema.Schema) error {
	p.defs, p.todo = s.Definitions, []section{{title, s}}
	for len(p.todo) > 0 {
		next := p.todo[0]
		p.todo = p.todo[1:]
		if err := p.section(next); err != nil {
			return err
		}
	}
	return nil
}

func (p *page) def(ref string) *jsonschema.Schema { return p.defs[strings.TrimPrefix(ref, "#/$defs/")] }

func (p *page) section(s section) error {
	if s.title != "" {
		fmt.Fprintf(p, "\n## %s\n", s.title)
	}
	if s.of.Description != "" {
		fmt.Fprintf(p, "\n%s\n", escape(s.of.Description))
	}
	fmt.Fprintf(p, "\n| field | type | %s | meaning |\n|---|---|---|---|\n", p.third.head)
	for f := s.of.Properties.Oldest(); f != nil; f = f.Next() {
		path := f.Key
		if strings.ToLower(s.title) == s.title && s.title != "" { // a path, not a type
			path = s.title + "." + f.Key
		}
		if f.Value.Description == "" {
			return fmt.Errorf("the field %s of %q has no comment in Go", f.Key, s.title)
		}
		kind := p.typeOf(path, f.Value)
		if unit, ok := f.Value.Extras["unit"]; ok {
			kind += fmt.Sprintf(", %s", unit)
		}
		fmt.Fprintf(p, "| `%s` | %s | %s | %s |\n", f.Key, kind,
			p.third.of(f.Value, slices.Contains(s.of.Required, f.Key)), escape(meaning(f.Value)))
	}
	return nil
}

// typeOf returns the type of a field in words, with a link to the table of a structure.
func (p *page) typeOf(path string, s *jsonschema.Schema) string {
	title := path
	if s.Ref != "" {
		title = strings.TrimPrefix(s.Ref, "#/$defs/")
		s = p.def(s.Ref)
	}
	switch own, ok := s.Extras["type"].(string); {
	case ok:
		return own
	case s.Type == "array":
		of := p.typeOf(path+"[]", s.Items)
		if of == s.Items.Type {
			of += "s"
		}
		return "list of " + of
	case s.Properties != nil && s.Properties.Len() > 0:
		if described, ok := p.titles[title]; !ok {
			p.titles[title] = s.Description
			p.todo = append(p.todo, section{title, s})
		} else if described != s.Description {
			panic("two structures have the name " + title + ": readers would find the table of the first only")
		}
		return fmt.Sprintf("[%s](#%s)", title, anchor(title))
	case s.AdditionalProperties != nil && s.AdditionalProperties.Type != "":
		return "names, each with " + p.typeOf(path, s.AdditionalProperties)
	case s.Type == "object":
		return "`{}`"
	case s.Format == "date-time":
		return "time"
	}
	return s.Type
}

var notAnchor = regexp.MustCompile(`[^a-z0-9_-]`)

func anchor(title string) string { return notAnchor.ReplaceAllString(strings.ToLower(title), "") }

// meaning returns the description of a field and its limits.
func meaning(s *jsonschema.Schema) string {
	parts := []string{sentence(s.Description)}
	if s.MinItems != nil && s.MaxItems == nil {
		parts = append(parts, "At least one.")
	}
	each := "One of "
	if s.Items != nil {
		s, each = s.Items, "Each is one of "
	}
	var values []string
	for _, value := range s.Enum {
		values = append(values, fmt.Sprintf("`%v`", value))
	}
	if len(values) > 0 {
		parts = append(parts, each+strings.Join(values, ", ")+".")
	}
	if s.Minimum != "" && s.Maximum != "" {
		parts = append(parts, fmt.Sprintf("%s to %s.", s.Minimum, s.Maximum))
	}
	if text, ok := s.Extras["limits"].(string); ok {
		parts = append(parts, sentence(text))
	}
	return strings.TrimSpace(strings.Join(parts, " "))
}

// sentence makes text begin with a capital and end with a full stop.
func sentence(text string) string {
	_, first := utf8.DecodeRuneInString(text)
	return strings.ToUpper(text[:first]) + strings.TrimSuffix(text[first:], ".") + "."
}

// escape makes text fit into one cell of a table. It leaves text in backticks as it is.
func escape(text string) string {
	parts := strings.Split(strings.ReplaceAll(text, "|", `\|`), "`")
	for i := 0; i < len(parts); i += 2 {
		parts[i] = strings.NewReplacer("<", "&lt;", "*", `\*`, "_", `\_`).Replace(parts[i])
	}
	return strings.Join(parts, "`")
}
