// Package text checks the words of the repository, and the links of its documents.
package text

import (
	"bufio"
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// replaced lists words of our own, with the field's terms for them.
var replaced = []struct{ was, is string }{
	{`\b(leave|land|arrive|deliver|tunnel|wire)_of\b`, "encap_ip, nic_decap_ip, vxlan_ingress_ip, observe_*_ip"},
	{`\b(outer|pod)_places\b`, "encap_templates, pod_links"},
	{`\bASK_[A-Z]+\b`, "EVENT_*"},
	{`"(odd-flags|unsummed|last-hop|no-room|unanswered)"`, "the reasons in docs/explanation/fastpath.md"},
	{`LeftAlone|left_alone`, "Skipped, skipped"},
	{`\bworth it\b`, "eligible"},
	{`\basleep\b`, "idle"},
	{`\b(its|the process's) heart\b|\bheart beats\b`, "the lease"},
	{`\bwhys\b`, "reasons"},
	{`\bscouts?\b`, "detector, sampling"},
	{`\bsent to see\b`, "revalidates the flow"},
	{`\bTestBeside\b`, "TestDifferential"},
	// Idioms of our own.
	{`\bare what they are\b`, "say what cannot be changed"},
	{`\b(had|has|have) trouble\b`, "failed a health check"},
	{`\bputs? back what\b|\bwhat was found is (put )?back\b`, "restore the original state"},
	{`\b(goes|go) on from (here|there|where|what)\b`, "continue; run the same command again"},
	{`\bkernel (does not |does )?notif(y|ies) (it|them|that|of|rules)\b`, "the kernel announces it"},
	{`\bthe ways? (between|from) (them|each|one|hosts|machines|its|nodes)\b`, "the path"},
	{`\bkeep an acceleration on\b`, "keep an acceleration applied"},
	{`\bwhat the line above says\b`, "name what to do"},
	{`\b(NIC|machine)s? (asks?|ask) for it\b`, "it is enabled on the NIC"},
}

// TestGlossary fails for each line of code or text that contains a replaced word.
func TestGlossary(t *testing.T) {
	root := filepath.Join("..", "..")
	for _, r := range replaced {
		was := regexp.MustCompile(r.was)
		for _, top := range []string{"api", "bpf", "charts", "cmd", "docs", "examples", "internal", "packaging", "test", "tools", "CONTRIBUTING.md", "Makefile", "README.md"} {
			err := filepath.WalkDir(filepath.Join(root, top), func(path string, d fs.DirEntry, err error) error {
				if err != nil || d.IsDir() || filepath.Base(path) == "glossary_test.go" {
					return err
				}
				switch ext := filepath.Ext(path); ext {
				case ".go", ".c", ".h", ".md", ".yaml", ".html", "":
				default:
					return nil
				}
				b, err := os.ReadFile(path)
				if err != nil {
					return err
				}
				lines := bufio.NewScanner(bytes.NewReader(b))
				lines.Buffer(nil, len(b)+1)
				for n := 1; lines.Scan(); n++ {
					if m := was.FindString(lines.Text()); m != "" {
						t.Errorf("%s:%d: %q: the glossary has %s", strings.TrimPrefix(path, root+"/"), n, m, r.is)
					}
				}
				return lines.Err()
			})
			if err != nil {
				t.Fatal(err)
			}
		}
	}
}
