package cli

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// TestDocuments checks that every slipstream azure command on docs/results/documents.md exists, with its flags.
func TestDocuments(t *testing.T) {
	page, err := os.ReadFile("../../../docs/results/documents.md")
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile("`slipstream azure ([^`]+)`").FindAllStringSubmatch(string(page), -1)
	for _, m := range found {
		c, rest, err := Command().Find(strings.Fields(m[1]))
		if err == nil {
			err = c.ParseFlags(rest)
		}
		if err == nil {
			err = c.ValidateArgs(c.Flags().Args())
		}
		if err != nil || !c.Runnable() {
			t.Errorf("%s: %v", m[0], err)
		}
	}
	if len(found) < 4 {
		t.Errorf("only %d commands were found", len(found))
	}
}
