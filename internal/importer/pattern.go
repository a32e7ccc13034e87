package importer

import (
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"slipstream.dev/internal/spec"
)

// Placeholders of a pattern.
const (
	variantField  = "variant"
	workloadField = "workload"
	blockField    = "block"
	runField      = "run"
	pairsField    = "pairs"
	pairField     = "pair"
	nodeField     = "node"
)

// fields maps the placeholders of patterns to what each of them matches.
var fields = map[string]string{
	variantField: `[^/]+`, workloadField: `[^/]+`, nodeField: `[^/]+`,
	blockField: `\d{1,6}`, runField: `\d{1,6}`, pairsField: `\d{1,6}`, pairField: `\d{1,6}`,
}

// pattern matches file names, and finds the variant, the workload and the numbers in them.
type pattern struct {
	expr   *regexp.Regexp
	depth  int // number of path elements to match
	fields []string
}

var placeholder = regexp.MustCompile(`\{([^{}]*)\}|\*`)

func parsePattern(text string) (*pattern, error) {
	if text == "" {
		return nil, errors.New("--pattern: describe the file names, such as '{variant}-{block}.json'")
	}
	if !utf8.ValidString(text) {
		return nil, fmt.Errorf("--pattern %q: it is not UTF-8", text)
	}
	p := &pattern{depth: strings.Count(text, "/") + 1}
	expr, rest := "^", text
	for rest != "" {
		at := placeholder.FindStringSubmatchIndex(rest)
		if at == nil {
			expr, rest = expr+regexp.QuoteMeta(rest), ""
			break
		}
		expr += regexp.QuoteMeta(rest[:at[0]])
		if at[2] < 0 {
			expr += `[^/]*`
		} else {
			name := rest[at[2]:at[3]]
			if err := p.add(name); err != nil {
				return nil, fmt.Errorf("--pattern %s: %w", text, err)
			}
			expr += "(" + fields[name] + ")"
		}
		rest = rest[at[1]:]
	}
	switch {
	case !p.has(variantField):
		return nil, fmt.Errorf("--pattern %s: it has no {variant}", text)
	case p.has(blockField) && p.has(runField):
		return nil, fmt.Errorf("--pattern %s: it has {block} and {run}: write {block} if each block has every variant, measured close in time, or {run} if each variant was measured on its own", text)
	}
	p.expr = regexp.MustCompile(expr + "$") // consists of quoted text and known parts only
	return p, nil
}

func (p *pattern) add(name string) error {
	if fields[name] == "" {
		return fmt.Errorf("there is no placeholder {%s}; choose from {variant}, {block} or {run}, {workload}, {pairs}, {pair}, {node}, and * for anything", name)
	}
	if p.has(name) {
		return fmt.Errorf("it has {%s} twice", name)
	}
	p.fields = append(p.fields, name)
	return nil
}

func (p *pattern) has(field string) bool { return slices.Contains(p.fields, field) }

// name has the parts of a file's name. A number that the name does not have is -1.
type name struct {
	variant, workload, node string
	number, pairs, pair     int
}

// match reads a file's name, from as many path elements as the pattern has.
func (p *pattern) match(path string) (n name, ok bool) {
	parts := strings.Split(filepath.ToSlash(path), "/")
	found := p.expr.FindStringSubmatch(strings.Join(parts[max(0, len(parts)-p.depth):], "/"))
	if found == nil {
		return n, false
	}
	n.number, n.pairs, n.pair = -1, -1, -1
	for i, text := range found[1:] {
		switch p.fields[i] {
		case variantField:
			n.variant = text
		case workloadField:
			n.workload = text
		case nodeField:
			n.node = text
		case pairsField:
			n.pairs, _ = strconv.Atoi(text) // few digits, so it cannot fail; the same holds for the others
		case pairField:
			n.pair, _ = strconv.Atoi(text)
		default:
			n.number, _ = strconv.Atoi(text)
		}
	}
	return n, true
}

// check returns an error if a variant or a workload cannot have the name.
func (n name) check() error {
	for what, text := range map[string]string{variantField: n.variant, workloadField: n.workload} {
		if text != "" && !spec.ValidName(text) {
			return fmt.Errorf("{%s} is %q; a name has only A-Z, a-z, 0-9 and + / . _ -, and begins with a letter or digit", what, text)
		}
	}
	if n.pairs == 0 || n.pairs > spec.MaxPairs {
		return fmt.Errorf("{pairs} is %d; it must be 1 to %d", n.pairs, spec.MaxPairs)
	}
	return nil
}
