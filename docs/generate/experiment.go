//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strconv"

	"github.com/goccy/go-yaml"
	"github.com/invopop/jsonschema"

	"slipstream.dev/internal/spec"
)

// fields matches experiment files that together have every field. With them the checks
// report what they demand of each field.
const fields = "internal/spec/testdata/fields-*.yaml"

func experimentSchema(b *bytes.Buffer) error {
	s, err := experiment()
	if err != nil {
		return err
	}
	for _, def := range structures(s) {
		def.Extras = nil // extras are for the page only
		for f := def.Properties.Oldest(); f != nil; f = f.Next() {
			f.Value.Extras = nil
			if f.Value.Items != nil {
				f.Value.Items.Extras = nil
			}
		}
	}
	enc := json.NewEncoder(b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return enc.Encode(s)
}

func experimentPage(b *bytes.Buffer) error {
	s, err := experiment()
	if err != nil {
		return err
	}
	head(b, "The experiment file", "internal/spec", "`slipstream run` runs the experiment in such a file, and `slipstream validate` checks it."+` The presets are examples: [demo](../../examples/demo.yaml).
Editors check and complete the file by its [JSON Schema](experiment.schema.json) if its first line has the path of the schema,
relative to the file:

    # yaml-language-server: $schema=../docs/reference/experiment.schema.json`)
	return newPage(b, defaults).tables("", s)
}

// experiment returns the schema: Go's types and comments, with what the checks demand.
func experiment() (*jsonschema.Schema, error) {
	r := jsonschema.Reflector{
		Anonymous: true, ExpandedStruct: true, RequiredFromJSONSchemaTags: true, Mapper: experimentTypes,
	}
	s, err := reflectTypes(&r, spec.Experiment{}, "internal/spec", "api/v1alpha1")
	if err != nil {
		return nil, err
	}
	names, err := filepath.Glob(fields)
	if err != nil {
		return nil, err
	}
	files := make(map[string][]byte)
	for _, name := range names {
		if files[name], err = os.ReadFile(name); err != nil {
			return nil, err
		}
	}
	rules, err := spec.Rules(files)
	if err != nil {
		return nil, err
	}
	s.Title = "Experiment"
	for name, def := range structures(s) {
		if err := demand(def, name, rules); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// structures returns the structures of the schema by the names of their Go types.
func structures(s *jsonschema.Schema) map[string]*jsonschema.Schema {
	all := map[string]*jsonschema.Schema{"Experiment": s}
	for name, def := range s.Definitions {
		if def.Properties != nil {
			all[name] = def
		}
	}
	return all
}

// experimentTypes returns the schemas of types that files write in a form of their own.
func experimentTypes(t reflect.Type) *jsonschema.Schema {
	switch t {
	case reflect.TypeFor[spec.Duration]():
		return &jsonschema.Schema{
			Type: "string", Pattern: `^([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+$`, Examples: []any{"500ms", "30s"},
			Extras: map[string]any{"type": "duration"},
		}
	case reflect.TypeFor[spec.Bytes]():
		return &jsonschema.Schema{
			AnyOf: []*jsonschema.Schema{{Type: "integer"}, {Type: "string", Pattern: `^[0-9]+(k|M|KiB|MiB)?$`}}, Examples: []any{64, "128k", "64KiB"},
			Extras: map[string]any{"type": "size", "unit": "bytes"},
		}
	case reflect.TypeFor[spec.BitRate]():
		return &jsonschema.Schema{Type: "string", Examples: []any{"10Gbit", "500Mbit"}, Extras: map[string]any{"type": "rate", "unit": "bit/s"}}
	case reflect.TypeFor[spec.Price]():
		return &jsonschema.Schema{Type: "string", Examples: []any{"0.085 USD"}, Extras: map[string]any{"type": "price", "unit": "per hour"}}
	case reflect.TypeFor[spec.Measure]():
		return &jsonschema.Schema{Type: "string", Examples: []any{"4118 Mb/s", "72.9 µs"}, Extras: map[string]any{"type": "number and unit"}}
	case reflect.TypeFor[spec.Runs]():
		limits := jsonschema.NewProperties()
		limits.Set("max", &jsonschema.Schema{Type: "integer", Minimum: number(spec.AutoFirstBlocks)})
		limits.Set("width", &jsonschema.Schema{Type: "number", ExclusiveMinimum: "0", ExclusiveMaximum: "0.5"})
		auto := jsonschema.NewProperties()
		auto.Set("auto", &jsonschema.Schema{Type: "object", Properties: limits, AdditionalProperties: jsonschema.FalseSchema})
		return &jsonschema.Schema{
			AnyOf: []*jsonschema.Schema{
				{Type: "integer", Minimum: "1"}, {Const: "auto"},
				{Type: "object", Properties: auto, AdditionalProperties: jsonschema.FalseSchema, Required: []string{"auto"}},
			},
			Examples: []any{10, "auto"},
			Extras:   map[string]any{"type": "integer, `auto` or `{auto: {max: N, width: W}}`", "unit": "blocks"},
		}
	}
	return nil
}

// demand adds to a structure of a Go type what the checks demand of it and its fields.
func demand(s *jsonschema.Schema, typeName string, rules map[string]spec.Rule) error {
	for _, name := range rules[typeName].OneOf {
		s.OneOf = append(s.OneOf, &jsonschema.Schema{Required: []string{name}})
	}
	for f := s.Properties.Oldest(); f != nil; f = f.Next() {
		name := typeName + "." + f.Key
		rule := rules[name]
		if rule.Required {
			s.Required = append(s.Required, f.Key)
		}
		for _, text := range rule.Defaults {
			var value any
			if err := yaml.Unmarshal([]byte(text), &value); err != nil {
				return err
			}
			f.Value.Default = value
		}
		if len(rule.Defaults) > 1 { // a schema can have one only
			f.Value.Default = nil
			f.Value.Extras = with(f.Value.Extras, "defaults", rule.Defaults)
		}
		limit(f.Value, rule)
		if f.Value.Items != nil {
			limit(f.Value.Items, rules[name+"[]"])
		}
	}
	return nil
}

// limit adds what the checks demand of a value.
func limit(s *jsonschema.Schema, rule spec.Rule) {
	if rule.Some {
		one := uint64(1)
		s.MinItems = &one
	}
	if s.Ref != "" {
		return
	}
	for _, value := range rule.Enum {
		if s.Type == "integer" {
			s.Enum = append(s.Enum, json.Number(value))
		} else {
			s.Enum = append(s.Enum, value)
		}
	}
	if rule.High != 0 && s.Type == "integer" {
		s.Minimum, s.Maximum = number(rule.Low), number(rule.High)
	}
	if rule.High != 0 && s.Type != "integer" { // a size, which may have a unit
		s.AnyOf[0].Minimum, s.AnyOf[0].Maximum = number(rule.Low), number(rule.High)
		s.Extras = with(s.Extras, "limits", strconv.Itoa(rule.Low)+" to "+strconv.Itoa(rule.High))
	}
	if rule.Below != 0 {
		s.ExclusiveMinimum, s.ExclusiveMaximum = "0", json.Number(strconv.FormatFloat(rule.Below, 'g', -1, 64))
	}
	if rule.Pattern != "" {
		s.Pattern = rule.Pattern
	}
	if rule.Text != "" {
		s.Extras = with(s.Extras, "limits", rule.Text)
	}
}
