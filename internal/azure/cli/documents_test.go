package cli

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"slipstream.dev/examples"
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

// TestHowTo checks that every command in a block of docs/how-to/azure.md exists, and so do the commands of the switch in the preset
// that the page runs.
func TestHowTo(t *testing.T) {
	found := 0
	for _, m := range regexp.MustCompile(`(?m)^    slipstream azure (\S+(?: \S+)*)`).FindAllStringSubmatch(page(t, "azure.md"), -1) { // two spaces begin a comment
		found++
		exists(t, m[0], m[1])
	}
	preset, _ := examples.Preset("an-vms")
	exp, err := spec.Parse("an-vms.yaml", preset, []string{"spec.parameters.group=net"})
	if err != nil {
		t.Fatal(err)
	}
	s := exp.Spec.Variants[1].Switch
	switched := regexp.MustCompile(`slipstream azure ([^&;]+)`).FindAllStringSubmatch(strings.Join(slices.Concat(s.To, s.Back), " "), -1)
	for _, m := range switched {
		exists(t, m[0], m[1])
	}
	if found < 9 || len(switched) != 4 {
		t.Errorf("%d commands, and %d in switches, were found", found, len(switched))
	}
}

// TestClusters checks that docs/how-to/clusters.md quotes what the program says, and that its commands exist.
func TestClusters(t *testing.T) {
	page := page(t, "clusters.md")
	source := source(t)
	for _, quoted := range []string{
		"the fast path saw no packet: no connection was eligible",
		"the fast path supports no VXLAN device and no NIC of this node",
		"all devices: ",
		"Cilium's programs already handle the packets of pods (",
		", which the fast path would bypass",
		"The fast path cannot run here.",
		"is for the paths vxlan, routed, bridge, pod and service, the path is ",
		"its pods for traffic are host processes, which have the node's own network",
	} {
		if !strings.Contains(page, quoted) || !strings.Contains(source, quoted) {
			t.Errorf("%q is not on the page, or the program does not say it", quoted)
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

// source returns the program's source.
func source(t *testing.T) string {
	t.Helper()
	var all strings.Builder
	err := fs.WalkDir(os.DirFS("../.."), ".", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		b, err := os.ReadFile(filepath.Join("../..", path))
		all.Write(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all.String()
}
