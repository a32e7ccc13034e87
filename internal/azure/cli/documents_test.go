package cli

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"slipstream.dev/internal/spec"
)

// TestDocuments checks that every slipstream azure command on docs/results/documents.md exists, with its flags.
func TestDocuments(t *testing.T) {
	page, err := os.ReadFile("../../../docs/results/documents.md")
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile("`slipstream azure ([^`]+)`").FindAllStringSubmatch(string(page), -1)
	for _, m := range found {
		exists(t, m[0], m[1])
	}
	if len(found) < 4 {
		t.Errorf("only %d commands were found", len(found))
	}
}

// exists fails the test unless the command line has a command, with its flags and arguments.
func exists(t *testing.T, text, line string) {
	t.Helper()
	c, rest, err := Command().Find(strings.Fields(line))
	if err == nil {
		err = c.ParseFlags(rest)
	}
	if err == nil {
		err = c.ValidateArgs(c.Flags().Args())
	}
	if err != nil || !c.Runnable() {
		t.Errorf("%s: %v", text, err)
	}
}

// page reads a page of docs/how-to.
func page(t *testing.T, name string) string {
	t.Helper()
	data, err := os.ReadFile("../../../docs/how-to/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// TestHowTo checks that every command in a block of docs/how-to/azure.md exists, and that every experiment there is
// one, whose switch runs such commands too.
func TestHowTo(t *testing.T) {
	page := page(t, "azure.md")
	found := 0
	for _, m := range regexp.MustCompile(`(?m)^    slipstream azure (\S+(?: \S+)*)`).FindAllStringSubmatch(page, -1) { // two spaces begin a comment
		found++
		exists(t, m[0], m[1])
	}
	switched := 0
	for _, block := range regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(page, -1) {
		exp, err := spec.Parse("azure.md", []byte(block[1]), nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range exp.Spec.Variants {
			if v.Switch == nil {
				continue
			}
			for _, argv := range [][]string{v.Switch.To, v.Switch.Back} {
				for _, m := range regexp.MustCompile(`slipstream azure ([^&;]+)`).FindAllStringSubmatch(strings.Join(argv, " "), -1) {
					switched++
					exists(t, m[0], m[1])
				}
			}
		}
	}
	if found < 9 || switched != 4 {
		t.Errorf("%d commands, and %d in switches, were found", found, switched)
	}
}

// TestClusters checks that docs/how-to/aks.md quotes what the program says, and that its commands exist.
func TestClusters(t *testing.T) {
	page := page(t, "aks.md")
	for quoted, file := range map[string]string{
		"the fast path saw no packet: no connection was eligible": "experiment/metrics.go",
		"the fast path supports no VXLAN device of this node":     "accel/fast.go",
		"each packet has its own tunnel key (external)":           "accel/fastpath/devices.go",
		", which the fast path would bypass":                      "accel/fastpath/devices.go",
		"The fast path cannot run here.":                          "doctor/rules_ability.go",
	} {
		source, err := os.ReadFile("../../" + file)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(page, quoted) || !strings.Contains(string(source), quoted) {
			t.Errorf("%q is not on the page, or not in %s", quoted, file)
		}
	}
	found := regexp.MustCompile("`slipstream azure ([^`]+)`").FindAllStringSubmatch(page, -1)
	for _, m := range found {
		if strings.Contains(m[1], " ") { // a name alone only refers to the command
			exists(t, m[0], m[1])
		}
	}
	if len(found) < 3 {
		t.Errorf("only %d commands were found", len(found))
	}
}
