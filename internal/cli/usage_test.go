package cli

import (
	"bytes"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"slipstream.dev/examples"
	"slipstream.dev/internal/experiment"
)

// TestErrorsNameWhatWasWritten: an error of usage names the flag, command or preset that the user wrote, and
// suggests the likely intended one.
func TestErrorsNameWhatWasWritten(t *testing.T) {
	for args, want := range map[string]string{
		"dem":                             `no command "dem": did you mean slipstream run demo?`,
		"demo":                            `no command "demo": did you mean slipstream run demo?`,
		"rnu":                             `no command "rnu": did you mean slipstream run?`,
		"rum":                             `no command "rum": did you mean slipstream run?`,
		"comparre a b":                    `no command "comparre": did you mean slipstream compare?`,
		"xyzzyxyzzy":                      `no command "xyzzyxyzzy" (see slipstream --help)`,
		"validate":                        "it takes at least 1 argument, not 0: slipstream validate FILE|PRESET|-... (see slipstream validate --help)",
		"run dem":                         "dem is neither a file nor a preset; did you mean demo?",
		"run kube":                        "did you mean kubernetes?",
		"run testdata/validate/godo.yaml": "no such file or directory; did you mean testdata/validate/good.yaml?",
		"run nowhere/dmeo.yaml":           "no such file or directory; did you mean demo?",
		"run nowhere/xyzzy.yaml":          "no such file or directory\n",
		"run demo --drry-run":             "unknown flag: --drry-run, did you mean --dry-run?",
		"run demo --runs 0":               "--runs 0: must be 1 to 100000",
		"run demo --runs many":            "--runs many: must be a whole number, auto",
		"run demo --duration 5":           "--duration 5: must be a length of time such as 30s",
		"run demo --client-node a":        "--client-node is for runs in a cluster, and demo runs in a lab",
		"run kubernetes --client-node A_": "--client-node A_: must be the name of a node",
		"run kubernetes --image :":        "--image :: must be a reference to an image",
		"run kubernetes --selector pool":  "--selector: must be KEY=VALUE",
		"run kubernetes --selector a_=b!": `--selector: "a_=b!" is no label`,
		"run demo --set pairs=[1]":        "--set pairs=[1]: pairs: unknown field; did you mean spec.pairs?",
		"run demo --context x":            "--context is for runs in a cluster, and demo runs in a lab",
		"run demo -n 3":                   "--namespace is for runs in a cluster, and demo runs in a lab",
		"run demo --out --dry-run":        "--out has the value --dry-run, which is an option: give --out a value, or leave it out",
		"run demo --set --dry-run":        "--set has the value --dry-run, which is an option",
		"run demo --runs=":                "--runs is empty: give it a value, or leave it out",
		"run demo --set=":                 "--set is empty",
		"run demo —dry-run":               "—dry-run begins with a typographic dash: type --dry-run",
		"run “demo”":                      "“demo” begins with a typographic quote, which a shell does not know: type ' or \" instead",
		"run testdata/validate":           "testdata/validate is a folder: name a file in it",
		"run latest":                      "latest: there is no result in results yet",
		"lab list":                        `no command "list": did you mean slipstream lab ls?`,
		"accel undo":                      `no command "undo": did you mean slipstream accel revert?`,
		"testdata/validate/good.yaml":     "did you mean slipstream run testdata/validate/good.yaml?",
		"history --limit ten":             `invalid argument "ten" for "--limit" flag: not a number`,
		"run demo --set spec.pair=[1]":    "--set spec.pair=[1]: spec.pair: unknown field; did you mean pairs?",
		"report":                          "it takes 1 to 2 arguments, not 0: slipstream report RESULT [SECOND] (see slipstream report --help)",
		"compare a":                       "name the result to compare with too, or the label of one with --against: slipstream compare [BEFORE] AFTER",
		"policy a":                        "it takes 2 arguments, not 1: slipstream policy RESULT VARIANT",
		"doctor lab x":                    "it takes at most 1 argument, not 2: slipstream doctor",
		"run":                             "name a preset (slipstream run --list) or a file",
		"doctor --format xml":             `"xml" for "-o, --format" flag: there is no such format; choose text or json`,
		"run demo -o json":                "--format is for --list and --dry-run",
		"run --list demo":                 "--list lists all presets; for what demo does: slipstream run demo --dry-run",
		"help foo":                        `no command "foo" (see slipstream --help)`,
		"help lab foo":                    `no command "foo" (see slipstream lab --help)`,
		"completion foo":                  `no command "foo" (see slipstream completion --help)`,
		"preset dmeo":                     `no preset "dmeo"; did you mean demo?`,
		"report latest":                   "latest: there is no result in results yet",
		"report results/nothing":          "there is no results folder results/nothing",
		"cleanup results/nothing":         "slipstream: there is no results folder results/nothing",
		"doctor --for 0s":                 "--for 0s: must be at least 100ms",
		"doctor labs":                     "doctor labs: must be lab, kubernetes, hosts:HOST,... or nothing, for this machine",
		"doctor lab --context x":          "--kubeconfig, --context and --namespace are for doctor kubernetes",
		"doctor --client-node a":          "--client-node is for doctor kubernetes",
		"doctor lab --host-binary x":      "--host-binary is for doctor hosts:HOST,...",
		"doctor hosts:a,,b":               "hosts:a,,b: must be names of hosts with commas between them, each once",
		"report /nowhere --format x":      "/nowhere",
		"image push name":                 "name: must be REGISTRY/NAME or REGISTRY/NAME:TAG",
		"image push localhost:1/x":        "there is no slipstream-image.tar or slipstream_test_image.tar beside slipstream or here: name it with --archive FILE",
	} {
		code, stdout, stderr := slipstream(t, strings.Fields(args)...)
		if code != 2 || stdout != "" {
			t.Errorf("%s: exit %d, standard output %q", args, code, stdout)
		}
		has(t, args, stderr, want)
		if strings.Count(stderr, "slipstream: ") > 1 {
			t.Errorf("%s: says it more than once:\n%s", args, stderr)
		}
	}
}

// planOf returns the plan of a preset, as a dry run prints it. It runs the command only for presets with a lab.
// For others, the command would also connect to the cluster of this machine, or to hosts with the preset's names.
func planOf(t *testing.T, name string) string {
	t.Helper()
	exp, err := runOptions{}.load([]string{name})
	if err != nil {
		t.Fatal(err)
	}
	if exp.Spec.Target.Lab != nil {
		_, plan, _ := slipstream(t, "run", name, "--dry-run")
		return plan
	}
	var plan strings.Builder
	if err := experiment.New(exp).Outline().Print(&plan); err != nil {
		t.Fatal(err)
	}
	return plan.String()
}

// TestListAndDryRunAgree: the list of presets and a dry run give the same time for each preset.
func TestListAndDryRunAgree(t *testing.T) {
	list, _ := succeed(t, "run", "--list")
	for _, name := range examples.Names() {
		plan := planOf(t, name)
		found := regexp.MustCompile(`(?m)^time +(\S.*)$`).FindStringSubmatch(plan)
		if found == nil {
			t.Fatalf("%s: the plan has no time:\n%s", name, plan)
		}
		duration, _, _ := strings.Cut(found[1], ", ") // the list does not count switch commands
		if line := regexp.MustCompile(fmt.Sprintf(`(?m)^%s +%s  `, regexp.QuoteMeta(name), regexp.QuoteMeta(duration))); !line.MatchString(list) {
			t.Errorf("%s takes %s by its plan, and the list says:\n%s", name, found[1], list)
		}
	}
	has(t, "the list", list, "at most 6 h 31 min") // the number of requests may end them earlier
	for line := range strings.Lines(list) {
		if n := utf8.RuneCountInString(line) - 1; n > listWidth {
			t.Errorf("%d columns: %s", n, line)
		}
	}
}

func TestCompletion(t *testing.T) {
	dir := result(t, resultYAML, 6, 1)
	for _, c := range []struct {
		args      []string
		has, lack string
	}{
		{[]string{"run", "serv"}, "service-routing\t", ""},
		{[]string{"policy", dir, ""}, "fastpath\n", "native\n"},
		{[]string{"validate", ""}, "yaml\nyml\n:8\n", "demo"}, // 8: complete files with these extensions
	} {
		_, stdout, _ := slipstream(t, append([]string{"__complete"}, c.args...)...)
		has(t, strings.Join(c.args, " "), stdout, c.has)
		if c.lack != "" && strings.Contains(stdout, c.lack) {
			t.Errorf("%v completes %q", c.args, c.lack)
		}
	}
}

// TestHelp: the help begins with run, has every verb in a group, and lists no verb that is not for people.
func TestHelp(t *testing.T) {
	_, help, _ := slipstream(t, "--help")
	_, list, _ := strings.Cut(help, "Measure:\n")
	if !strings.HasPrefix(list, "  run ") {
		t.Errorf("the first verb is not run:\n%s", help)
	}
	for _, verb := range []string{"Additional Commands", "  worker ", "  forward "} {
		if strings.Contains(help, verb) {
			t.Errorf("the help has %q:\n%s", verb, help)
		}
	}
	code, version, _ := slipstream(t, "version")
	if code != 0 || !strings.HasPrefix(version, "slipstream version test (") {
		t.Errorf("exit %d, version %q", code, version)
	}
	if _, flag, _ := slipstream(t, "--version"); flag != "slipstream version test\n" {
		t.Errorf("--version says %q", flag) // docs/tutorial/kubernetes.md uses the third word
	}
}

// TestHelpFits: the help of each command fits a terminal of 80 columns, except for the examples, which are not broken.
func TestHelpFits(t *testing.T) {
	found := 0
	var visit func(*cobra.Command)
	visit = func(c *cobra.Command) {
		found++
		var out bytes.Buffer
		c.SetOut(&out)
		if err := c.Help(); err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(strings.Replace(out.String(), c.Example, "", 1)) {
			if n := utf8.RuneCountInString(strings.TrimRight(line, "\n")); n > helpWidth {
				t.Errorf("%s --help: %d columns: %s", c.CommandPath(), n, line)
			}
		}
		for _, sub := range c.Commands() {
			if sub.Name() != "completion" { // its texts are cobra's
				visit(sub)
			}
		}
	}
	visit(Command())
	if found < 25 {
		t.Errorf("only %d commands were found", found)
	}
}

// TestPlanFits: the plans of the presets that the README names fit a terminal of 80 columns.
func TestPlanFits(t *testing.T) {
	for _, name := range []string{"demo", "kubernetes", "kubernetes-short"} {
		for line := range strings.Lines(planOf(t, name)) {
			if n := utf8.RuneCountInString(line) - 1; n > 80 {
				t.Errorf("%s: %d columns: %s", name, n, line)
			}
		}
	}
}
