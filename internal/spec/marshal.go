package spec

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// Marshal writes an experiment as YAML, with every default that Parse filled in. Parse
// reads it back the same. What fits on one line is written on one line, as in a file
// that a person wrote. It fails if Parse would refuse the result for its size.
func Marshal(e *Experiment) ([]byte, error) {
	data, err := marshal(e)
	if err == nil && len(data) > maxFile {
		return nil, fmt.Errorf("with all its defaults the experiment has %d KiB, and must have at most %d KiB: leave out variants or workloads", len(data)>>10, maxFile>>10)
	}
	return data, err
}

func marshal(v any) ([]byte, error) {
	data, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("write as YAML: %w", err)
	}
	rd := newReader("")
	root := rd.parse(data, "")
	if err := rd.err(); err != nil {
		return nil, fmt.Errorf("write as YAML: %w", err)
	}
	var b strings.Builder
	for _, f := range root.fields {
		f.write(&b, "")
	}
	return []byte(b.String()), nil
}

const lineWidth = 110

// write writes a field as a block, or on one line if it fits and is not a section of
// the file.
func (f field) write(b *strings.Builder, indent string) {
	line := indent + f.name + ": " + f.value.inline()
	section := f.name == "spec" || f.value.kind == sequence && len(f.value.items) > 0 && f.value.items[0].kind == mapping && indent == "  "
	if f.value.kind == scalar || len(line) <= lineWidth && !section {
		b.WriteString(line + "\n")
		return
	}
	b.WriteString(indent + f.name + ":\n")
	for _, inner := range f.value.fields {
		inner.write(b, indent+"  ")
	}
	for _, item := range f.value.items {
		b.WriteString(indent + "- " + item.inline() + "\n")
	}
}

// plain matches text that every YAML reader takes for a string without quotes, unless
// it is a number or one of the keywords, which mean something else in YAML 1.1.
var (
	plain    = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9+/._-]*$`)
	keywords = regexp.MustCompile(`^(?i:null|true|false|yes|no|on|off|y|n)$`)
)

func (n *node) inline() string {
	var parts []string
	switch n.kind {
	case scalar:
		_, err := strconv.ParseFloat(n.text, 64)
		_, intErr := strconv.ParseInt(n.text, 0, 64)
		if n.quoted && (!plain.MatchString(n.text) || keywords.MatchString(n.text) || err == nil || intErr == nil) {
			q, _ := json.Marshal(n.text) // a string always has a form in JSON
			return string(q)
		}
		return n.text
	case mapping:
		for _, f := range n.fields {
			parts = append(parts, (&node{kind: scalar, text: f.name, quoted: true}).inline()+": "+f.value.inline())
		}
		return "{" + strings.Join(parts, ", ") + "}"
	case sequence:
		for _, item := range n.items {
			parts = append(parts, item.inline())
		}
		return "[" + strings.Join(parts, ", ") + "]"
	}
	return "null"
}
