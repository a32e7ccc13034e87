//go:build linux

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"slipstream.dev/internal/spec"
)

// compile makes a validator from the schema, as generate would write it.
func compile(t *testing.T) *jsonschema.Schema {
	t.Helper()
	t.Chdir("../..")
	var b bytes.Buffer
	if err := experimentSchema(&b); err != nil {
		t.Fatal(err)
	}
	doc, err := jsonschema.UnmarshalJSON(&b)
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("experiment.schema.json", doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("experiment.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func accepts(t *testing.T, s *jsonschema.Schema, file []byte) error {
	t.Helper()
	data, err := yaml.YAMLToJSON(file)
	if err != nil {
		t.Fatal(err)
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	return s.Validate(doc)
}

// TestSchemaAcceptsValidFiles: the schema accepts valid files as they are written, and
// as a run records them, with every default.
func TestSchemaAcceptsValidFiles(t *testing.T) {
	s := compile(t)
	var files []string
	for _, pattern := range []string{"examples/*.yaml", fields} {
		found, err := filepath.Glob(pattern)
		if err != nil || len(found) == 0 {
			t.Fatalf("%s: %v, %v", pattern, found, err)
		}
		files = append(files, found...)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if err := accepts(t, s, data); err != nil {
			t.Errorf("%s: %v", file, err)
		}
		exp, err := spec.Parse(file, data, nil)
		if err != nil {
			t.Fatal(err)
		}
		resolved, err := spec.Marshal(exp)
		if err != nil {
			t.Fatal(err)
		}
		if err := accepts(t, s, resolved); err != nil {
			t.Errorf("%s with every default: %v\n%s", file, err, resolved)
		}
	}
}

// TestSchemaRefuses: the schema refuses a value that Parse refuses whatever the other
// fields are.
func TestSchemaRefuses(t *testing.T) {
	s := compile(t)
	file, err := os.ReadFile("internal/spec/testdata/fields-lab.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ was, is string }{
		{"kind: Experiment", "kind: AccelerationPolicy"},
		{"  baseline: vxlan\n", ""},
		{"nodes: 3", "nodes: 1"},
		{"nodes: 3", "node: 3"},
		{"nodes: 3", "nodes: three"},
		{"offload: none", "offload: ful"},
		{"rate: 10Gbit", "rate: 10 Gbit"},
		{"price: 0.085 USD", "price: 0.085"},
		{"{lab: {", "{kubernetes: {}, lab: {"},
		{"{native: {}}", "{native: {}, udp: {}}"},
		{"devices: [nic]", "devices: [nick]"},
		{"devices: [nic]", "devices: []"},
		{"unseenBy: [tcx]", "unseenBy: [xdp]"},
		{"protocol: tcp", "protocol: sctp"},
		{"ip: 4", "ip: 5"},
		{"size: 64KiB", "size: 64kb"},
		{"duration: 10s", "duration: 10"},
		{"warmup: 1s, duration: 10s", "warmup: 1s"},
		{"tool: native", "tool: netperf"},
		{"pairs: [1, 4]", "pairs: [0]"},
		{"pairs: [1, 4]", "pairs: []"},
		{"max: 20", "max: 7"},
		{"faster: vxlan", "faster: vxlan, same: vxlan"},
		{"name: stream,", "name: -stream,"},
		{"margin: 0.02", "margin: 0.5"},
		{"precision: 1.5", "precision: none"},
	} {
		changed := bytes.Replace(file, []byte(c.was), []byte(c.is), 1)
		if bytes.Equal(file, changed) {
			t.Fatalf("there is no %q", c.was)
		}
		if _, err := spec.Parse("x.yaml", changed, nil); err == nil {
			t.Errorf("%s: Parse accepts it", c.is)
		}
		if err := accepts(t, s, changed); err == nil {
			t.Errorf("%s in place of %s: the schema accepts it", c.is, c.was)
		}
	}
}

func TestSentence(t *testing.T) {
	for in, want := range map[string]string{"at most 3": "At most 3.", "élan.": "Élan."} {
		if got := sentence(in); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
