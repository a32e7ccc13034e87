package v1alpha1

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Rule is what the checks of Parse demand of a field, whatever else the file says. It is
// for those who describe the file: the JSON Schema and the reference of its fields.
type Rule struct {
	// Required: the file must have the field.
	Required bool
	// Defaults are what the field is if it is left out, as it is written in a file. There
	// are several if that depends on other fields.
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
	// OneOf are fields of which exactly one must be there.
	OneOf []string
}

// lesson is what reading one file teaches: the rules that were applied, and the fields and
// types that Go has for it, all by field path.
type lesson struct {
	rules         map[string]*Rule
	fields, types map[string]string
}

// rule is where a check notes what it demands of a field.
func (r *reader) rule(path string) *Rule {
	if r.learned == nil {
		return new(Rule) // nobody asks
	}
	if r.learned.rules[path] == nil {
		r.learned.rules[path] = new(Rule)
	}
	return r.learned.rules[path]
}

// structure notes that a path is a structure, be its fields there or not.
func (l *lesson) structure(path, typeName string, fields []string) {
	if l == nil || typeName == "" {
		return
	}
	l.types[path] = typeName
	for _, name := range fields {
		l.fields[join(path, name)] = typeName + "." + name
	}
}

// place is where a field could stand in a file, and what the checks demanded there.
type place struct {
	Rule
	present bool
}

// Rules applies the checks to valid experiment files and returns what they demand, by Go
// type and field: "NIC.mtu", "Spec.pairs[]" for an element, "Path" for the type as a whole.
// What is demanded of a field in one place and not in another is left out. The files must
// have every field somewhere, so that every check is met.
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
			p.OneOf = nil // that is of its type
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

// common is what is demanded in all places of a field. Ranges, values and defaults are
// those of any place.
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

// written is a default as a file has it.
func written(v any) string {
	data, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("no JSON of the default %v: %v", v, err)) // a new type, not a file, leads here
	}
	return newReader("").parse(data, "").inline()
}
