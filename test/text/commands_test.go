package text

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	goTest   = regexp.MustCompile("go test [^`\n]*(\\./[a-z/]+)[^`\n]*")
	selected = regexp.MustCompile(`-(run|bench) '?([^' ]+)'?`)
	testFunc = regexp.MustCompile(`(?m)^func ((?:Test|Benchmark)\w+)\(`)
)

// TestCommandsFindTests fails for each command in a document that would run tests or benchmarks, but matches none.
func TestCommandsFindTests(t *testing.T) {
	found := 0
	eachDocument(t, func(path, text string) {
		for _, command := range goTest.FindAllStringSubmatch(text, -1) {
			names := testsOf(t, command[1])
			for _, m := range selected.FindAllStringSubmatch(command[0], -1) {
				if m[2] == "^$" || m[2] == "NAME" {
					continue
				}
				found++
				kind := map[string]string{"run": "Test", "bench": "Benchmark"}[m[1]]
				for _, function := range functions(m[2]) {
					if !slices.ContainsFunc(names, func(name string) bool { return strings.HasPrefix(name, kind) && function.MatchString(name) }) {
						t.Errorf("%s: %s: %s has no %s that matches %s", path, command[0], command[1], kind, function)
					}
				}
			}
		}
	})
	if found < 20 {
		t.Errorf("only %d commands were found", found)
	}
}

// functions returns the alternatives of a -run or -bench pattern, without the names of subtests.
func functions(pattern string) (all []*regexp.Regexp) {
	alternatives := []string{pattern}
	if !strings.Contains(pattern, "(") {
		alternatives = strings.Split(pattern, "|")
	}
	for _, a := range alternatives {
		function, _, _ := strings.Cut(a, "/")
		all = append(all, regexp.MustCompile(function))
	}
	return all
}

// testsOf returns the tests and benchmarks of a package.
func testsOf(t *testing.T, folder string) (all []string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("..", "..", folder, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range testFunc.FindAllStringSubmatch(string(text), -1) {
			all = append(all, m[1])
		}
	}
	return all
}
