package cli

import (
	"errors"
	"io"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"

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
		c, err := parsed(args)
		if err != nil {
			t.Errorf("%s: %v", m[0], err)
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

// parsed returns the command that a command line is for, with its flags.
func parsed(args []string) (*cobra.Command, error) {
	c, rest, err := Command().Find(args)
	if err != nil {
		return nil, err
	}
	err = c.ParseFlags(rest)
	return c, errors.Join(err, c.ValidateArgs(c.Flags().Args()))
}

// TestReadme: every command of slipstream in README.md exists, with its flags, and takes these arguments.
func TestReadme(t *testing.T) {
	page, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, pattern := range []string{"`(?:sudo )?(?:bin/)?slipstream ([^`]+)`", `(?m)^    (?:\$ |ssh -t NODE )?(?:sudo )?(?:bin/|\./)?slipstream (.+?)(?: > .*|  .*)?$`} {
		for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(string(page), -1) {
			found++
			args := strings.Fields(m[1])
			if c, rest, err := Command().Find(args); err == nil && c.HasParent() && len(rest) == 0 {
				continue // a sentence names the command
			}
			if _, err := parsed(args); err != nil {
				t.Errorf("%s: %v", m[0], err)
			}
		}
	}
	if found < 19 {
		t.Errorf("only %d commands were found", found)
	}
}
