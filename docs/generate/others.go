//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"regexp"
	"strconv"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/invopop/jsonschema"
	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"slipstream.dev/internal/agent"
	azurecli "slipstream.dev/internal/azure/cli"
	"slipstream.dev/internal/cli"
	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/stats"
)

// resourcePage returns a function that writes the page of a custom resource, from the
// definition that controller-gen makes from the Go types.
func resourcePage(file, about string) func(*bytes.Buffer) error {
	return func(b *bytes.Buffer) error {
		file = "charts/slipstream/crds/slipstream.dev_" + file
		data, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		var crd struct {
			Spec struct {
				Names    struct{ Kind string }
				Versions []struct {
					Schema struct {
						OpenAPIV3Schema map[string]any `yaml:"openAPIV3Schema"`
					}
				}
			}
		}
		if err := yaml.Unmarshal(data, &crd); err != nil {
			return err
		}
		if data, err = json.Marshal(crd.Spec.Versions[0].Schema.OpenAPIV3Schema); err != nil {
			return err
		}
		s := new(jsonschema.Schema)
		if err := json.Unmarshal(data, s); err != nil {
			return err
		}
		for _, name := range []string{"apiVersion", "kind", "metadata"} {
			s.Properties.Delete(name) // every Kubernetes object has these
		}
		running(s, "")
		head(b, crd.Spec.Names.Kind, file, about)
		return newPage(b, defaults).tables("", s)
	}
}

// running turns all descriptions in a schema into running text.
func running(s *jsonschema.Schema, name string) {
	s.Description = prose(s.Description, name)
	if s.Items != nil {
		running(s.Items, "")
	}
	for f := s.Properties.Oldest(); f != nil; f = f.Next() {
		running(f.Value, f.Key)
	}
}

func resultsPage(b *bytes.Buffer) error {
	head(b, "The results folder", "internal/record and internal/stats", fmt.Sprintf(`A run or an import creates a folder NAME-TIMESTAMP in `+"`results`"+`:

| file | content |
|---|---|
| `+"`experiment.yaml`"+` | [the experiment file](experiment.md) with every default |
| `+"`environment.json`"+` | the machines and versions: [fields](#environmentjson) |
| `+"`trials.jsonl`"+` | one line for each trial: [fields](#trialsjsonl) |
| `+"`switched.json`"+` | the variant whose [switch](../how-to/switch.md) is in force, while one is |
| `+"`wanted.json`"+` | that the run is to pause or stop, while [somebody wants that](../how-to/history.md#look-at-it-in-a-browser) |
| `+"`summary.json`"+` | every comparison and its verdict: [fields](#summaryjson) |
| `+"`summary.csv`, `report.html`"+` | the comparisons as a table, and the report as one page |

This is version %d of the format (`+"`schemaVersion`"+` in environment.json). The end of this page explains the
[metrics](#metrics), the [warnings](#warnings) and the [errors of HTTP](#errors-of-http).`, record.SchemaVersion))
	p := newPage(b, always)
	for _, file := range []struct {
		name string
		of   any
	}{
		{"environment.json", record.Environment{}}, {"trials.jsonl", record.Trial{}}, {"summary.json", stats.Summary{}},
	} {
		r := jsonschema.Reflector{Anonymous: true, ExpandedStruct: true}
		s, err := reflectTypes(&r, file.of, "internal/record", "internal/stats")
		if err != nil {
			return err
		}
		if err := p.tables(file.name, s); err != nil {
			return err
		}
	}
	b.WriteString(`
## Time series

A trial has a ` + "`series`" + ` for each node. It is base64 of a raw DEFLATE stream (RFC 1951) of unsigned varints, which
have seven bits in each byte, the lowest first, and the eighth bit set in all bytes but the last. They are:

1. the number of readings, and for each the µs since the previous one, for the first since the scheduled start of the window;
2. the number of NICs, and for each the length of its name, the name, and the bytes that it received and those that it
   sent in each interval between two readings;
3. the number of CPUs, and for each its number, and its idle time and its softirq time in each interval, in units of
   10 ms. If several nodes share a machine, only the first has CPUs.
`)
	rows := ""
	for _, k := range record.WarningKinds() {
		rows += nameRow(k.Code, k.Meaning)
	}
	namesTable(b, "Warnings", rows)
	rows, err := errorsOfHTTP("internal/record/record.go")
	if err != nil {
		return err
	}
	namesTable(b, "Errors of HTTP", rows)
	rows = ""
	for _, m := range metrics.OfTrials() {
		rows += nameRow(m.Name, m.Meaning)
	}
	namesTable(b, "Metrics", rows)
	return nil
}

// errorsOfHTTP returns a table row for each error; its text is the comment of the
// constant.
func errorsOfHTTP(file string) (rows string, err error) {
	parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ParseComments)
	if err != nil {
		return "", err
	}
	ast.Inspect(parsed, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok || !strings.HasPrefix(spec.Names[0].Name, "Err") || len(spec.Values) != 1 {
			return true
		}
		if literal, ok := spec.Values[0].(*ast.BasicLit); ok {
			name, _ := strconv.Unquote(literal.Value) // the parser has checked the literal
			rows += nameRow(name, strings.TrimSpace(spec.Comment.Text()))
		}
		return true
	})
	return rows, nil
}

func namesTable(b *bytes.Buffer, title, rows string) {
	fmt.Fprintf(b, "\n## %s\n\n| name | meaning |\n|---|---|\n%s", title, rows)
}

func nameRow(name, text string) string { return fmt.Sprintf("| `%s` | %s |\n", name, escape(text)) }

func commandsPage(b *bytes.Buffer) error {
	head(b, "Commands", "internal/cli and internal/azure/cli", "Every command and flag, as `--help` prints them.")
	return commandTree(b, commands())
}

// commands returns the tree of all commands of both programs.
func commands() *cobra.Command {
	root := cli.Command()
	for _, c := range root.Commands() {
		if c.Name() == "azure" { // a program of its own; its commands replace this one below
			root.RemoveCommand(c)
		}
	}
	azure := azurecli.Command()
	azure.GroupID = "other"
	delete(azure.Annotations, cobra.CommandDisplayNameAnnotation) // which is for a program without a parent
	root.AddCommand(azure)
	return root
}

var part = regexp.MustCompile(`(?m)^### (.*)$`)

func commandTree(b *bytes.Buffer, c *cobra.Command) error {
	c.DisableAutoGenTag = true
	link := func(file string) string {
		return "#" + strings.ReplaceAll(strings.TrimSuffix(file, ".md"), "_", "-")
	}
	var text bytes.Buffer
	if err := doc.GenMarkdownCustom(c, &text, link); err != nil {
		return err
	}
	// The parts of a command do not become sections, because all commands have the
	// same parts.
	parts := strings.ReplaceAll(text.String(), "SEE ALSO", "See also")
	fmt.Fprintf(b, "\n%s\n", strings.TrimSpace(part.ReplaceAllString(parts, "**$1**")))
	for _, sub := range c.Commands() {
		if sub.IsAvailableCommand() && !sub.IsAdditionalHelpTopicCommand() {
			if err := commandTree(b, sub); err != nil {
				return err
			}
		}
	}
	return nil
}

func metricsPage(b *bytes.Buffer) error {
	head(b, "Metrics of the agent", "internal/agent", "The agent serves these at `/metrics`, in addition to the metrics of its Go runtime and process.")
	fmt.Fprint(b, "\n| metric | type | labels | meaning |\n|---|---|---|---|\n")
	for _, m := range agent.MetricsReference() {
		labels := strings.Join(m.Labels, "`, `")
		if labels != "" {
			labels = "`" + labels + "`"
		}
		fmt.Fprintf(b, "| `%s` | %s | %s | %s |\n", m.Name, m.Type, labels, escape(m.Help))
	}
	return nil
}
