package cli

import (
	"io"
	"os"
	"regexp"
	"strings"
	"testing"

	"slipstream.dev/internal/experiment"
)

// TestDocuments: every command of slipstream on docs/results/documents.md exists, with its flags, and every
// experiment that one of them runs has a plan.
func TestDocuments(t *testing.T) {
	page, err := os.ReadFile("../../docs/results/documents.md")
	if err != nil {
		t.Fatal(err)
	}
	words := regexp.MustCompile(`'[^']*'|[^ ]+`)
	runs, others := 0, 0
	for _, m := range regexp.MustCompile("`(?:sudo )?slipstream ([^`]+)`").FindAllStringSubmatch(string(page), -1) {
		var args []string
		for _, word := range words.FindAllString(m[1], -1) {
			args = append(args, strings.Trim(word, "'"))
		}
		if args[0] == "azure" { // another program, which TestDocuments of internal/azure/cli checks
			continue
		}
		c, rest, err := Command().Find(args)
		if err != nil || c.ParseFlags(rest) != nil || c.ValidateArgs(c.Flags().Args()) != nil {
			t.Errorf("%s: %v, %v, %v", m[0], err, c.ParseFlags(rest), c.ValidateArgs(c.Flags().Args()))
			continue
		}
		if c.Name() != "run" || c.Flags().Arg(0) == "my.yaml" {
			others++
			continue
		}
		runs++
		var o runOptions
		for flag, to := range map[string]*string{"on": &o.on, "runs": &o.runs, "duration": &o.duration} {
			*to, _ = c.Flags().GetString(flag)
		}
		o.set, _ = c.Flags().GetStringArray("set")
		exp, err := o.load(c.Flags().Args())
		if err != nil {
			t.Errorf("%s: %v", m[0], err)
			continue
		}
		if err := experiment.New(exp).Outline().Print(io.Discard); err != nil {
			t.Errorf("%s: %v", m[0], err)
		}
	}
	if runs < 25 || others < 3 {
		t.Errorf("only %d runs and %d other commands were found", runs, others)
	}
}
