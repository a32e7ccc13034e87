package spec

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Rule describes what the checks of Parse demand of a field, whatever else the file says. The
// JSON Schema and the reference of the fields are made from it.
type Rule struct {
	// Required: the file must have the field.
	Required bool
	// Defaults are the values that a field has if it is left out, as written in a file.
	// There are several if the default depends on other fields.
	Defaults []string
	// Enum are the allowed values, Low and High the allowed range unless both are 0.
	Enum      []string
	Low, High int
	// Below: the number must be above 0 and below this, unless it is 0.
	Below float64
	// Pattern is a regular expression that the text must match, Text says the same in words.
	Pattern, Text string
	// Some: the list must have an element.
	Some bool
	// OneOf lists fields; exactly one of them must be there.
	OneOf []string
}

// lesson collects what reading one file teaches: the rules that were applied, and the Go fields
// and types, all by field path.
type lesson struct {
	rules         map[string]*Rule
	fields, types map[string]string
}

// rule returns the rule of a field, in which a check notes what it demands.
func (r *reader) rule(path string) *Rule {
	if r.learned == nil {
		return new(Rule) // nobody reads it
	}
	if r.learned.rules[path] == nil {
		r.learned.rules[path] = new(Rule)
	}
	return r.learned.rules[path]
}

// structure notes that a path is a structure, even if none of its fields are there.
func (l *lesson) structure(path, typeName string, fields []string) {
	if l == nil || typeName == "" {
		return
	}
	l.types[path] = typeName
	for _, name := range fields {
		l.fields[join(path, name)] = typeName + "." + name
	}
}

// place is one place in a file where a field could stand, with what the checks demanded there.
type place struct {
	Rule
	present bool
}

// Rules applies the checks to valid experiment files and returns what they demand, by Go type
// and field: "NIC.mtu", "Spec.pairs[]" for an element, "Path" for the type as a whole. It leaves
// out what the checks demand of a field in some places only. Together the files must have every
// field, so that every check runs.
func Rules(files map[string][]byte) (map[string]Rule, error) {
	places := make(map[string][]place)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		r := newReader(name)
		r.learned = &lesson{map[string]*Rule{}, map[string]string{}, map[string]string{}}
		if _, err := r.read(files[name], nil); err != nil {
			return nil, fmt.Errorf("learn the rules of experiment files: %w", err)
		}
		for _, path := range slices.Sorted(maps.Keys(r.learned.fields)) {
			field := r.learned.fields[path]
			p := place{*r.rule(path), r.has(path)}
			p.OneOf = nil // a rule of the type, not of this field
			places[field] = append(places[field], p)
		}
		for _, path := range slices.Sorted(maps.Keys(r.nodes)) {
			if list, ok := r.learned.fields[parent(path)]; ok && strings.HasSuffix(path, "]") {
				places[list+"[]"] = append(places[list+"[]"], place{*r.rule(path), true})
			}
		}
		for _, path := range slices.Sorted(maps.Keys(r.learned.types)) {
			name := r.learned.types[path]
			places[name] = append(places[name], place{Rule{OneOf: r.rule(path).OneOf}, true})
		}
	}
	all := make(map[string]Rule)
	for _, field := range slices.Sorted(maps.Keys(places)) {
		if !slices.ContainsFunc(places[field], func(p place) bool { return p.present }) {
			return nil, fmt.Errorf("learn the rules of experiment files: no file has the field %s", field)
		}
		all[field] = common(places[field])
	}
	return all, nil
}

// common returns what the checks demand in all places of a field. Defaults are the union over
// the places, and so are ranges and allowed values, if every place where the field is present
// has them.
func common(places []place) Rule {
	c := Rule{Required: true, Some: true, OneOf: places[0].OneOf}
	everywhere := map[string]bool{"enum": true, "range": true, "text": true}
	for _, p := range places {
		c.Required = c.Required && p.Required
		c.Defaults = append(c.Defaults, p.Defaults...)
		for _, value := range p.Enum {
			if !slices.Contains(c.Enum, value) {
				c.Enum = append(c.Enum, value)
			}
		}
		if p.High != 0 {
			if c.High == 0 {
				c.Low = p.Low
			}
			c.Low, c.High = min(c.Low, p.Low), max(c.High, p.High)
		}
		if p.present {
			everywhere["enum"] = everywhere["enum"] && p.Enum != nil
			everywhere["range"] = everywhere["range"] && p.High != 0
			everywhere["text"] = everywhere["text"] && p.Pattern+p.Text != ""
			c.Some = c.Some && p.Some
			c.Pattern, c.Text, c.Below = p.Pattern, p.Text, p.Below
		}
	}
	slices.Sort(c.Defaults)
	c.Defaults = slices.Compact(c.Defaults)
	if !everywhere["enum"] {
		c.Enum = nil
	}
	if !everywhere["range"] {
		c.Low, c.High = 0, 0
	}
	if !everywhere["text"] {
		c.Pattern, c.Text, c.Below = "", "", 0
	}
	return c
}

// written returns a default as a file has it.
func written(v any) string {
	data, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("no JSON of the default %v: %v", v, err)) // a new type, not a file, leads here
	}
	return newReader("").parse(data, "").inline()
}
