package cli

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore/to"

	"slipstream.dev/internal/azure"
	"slipstream.dev/internal/azure/azuretest"
)

const (
	can    = "Standard_D4s_v5"
	cannot = "Standard_B2s"
)

// slipstream runs a command against a subscription.
func slipstream(t *testing.T, c *azuretest.Cloud, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	t.Setenv("AZURE_SUBSCRIPTION_ID", azuretest.Subscription)
	t.Setenv("XDG_STATE_HOME", t.TempDir())
	var out, log bytes.Buffer
	code = Main(t.Context(), Process{Args: append([]string{"slipstream-azure"}, args...), Version: "test", Out: &out, Err: &log,
		Azure: func(o azure.Options) (*azure.Cloud, error) {
			with := c.Options()
			with.Subscriptions = o.Subscriptions
			return azure.Open(with)
		}})
	azuretest.CheckSecrets(t, fmt.Sprintf("the output of %v", args), out.String()+log.String())
	return code, out.String(), log.String()
}

func has(t *testing.T, text, want string) {
	t.Helper()
	if !strings.Contains(text, want) {
		t.Errorf("no %q in:\n%s", want, text)
	}
}

// The exit code of an audit is that of its worst finding.
func TestAuditExitCodes(t *testing.T) {
	forbid := func(_ int, r *http.Request) azuretest.Fault {
		if strings.HasSuffix(r.URL.Path, "/managedClusters") {
			return azuretest.Forbidden
		}
		return azuretest.None
	}
	for _, test := range []struct {
		name     string
		size     string
		wanted   bool
		fault    func(int, *http.Request) azuretest.Fault
		args     string
		code     int
		says     string
		complete bool
	}{
		{name: "all is well", size: can, wanted: true, args: "--gate", code: 0},
		{name: "a finding without a gate", size: can, args: "", code: 0},
		{name: "a finding", size: can, args: "--gate", code: 3, says: "there are findings"},
		{name: "it cannot be wanted", size: cannot, args: "--gate", code: 0},
		{name: "not all was read", size: can, wanted: true, fault: forbid, args: "", code: 4, says: "incomplete"},
		{name: "a finding, and not all was read", size: can, fault: forbid, args: "--gate", code: 3},
		{name: "no such format", args: "-o xml", code: 2, says: "--output xml: there is no such format"},
		{name: "no such file", args: "--since /nowhere", code: 2, says: "/nowhere"},
		{name: "no such flag", args: "--gait", code: 2, says: "see slipstream azure audit --help"},
		{name: "no such cluster", size: can, wanted: true, args: "--kubeconfig /nowhere", code: 4, says: "incomplete"},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := azuretest.New()
			c.Fault = test.fault
			c.AddVM("rg", "vm", test.size, test.wanted)
			code, _, stderr := slipstream(t, c, append([]string{"audit"}, strings.Fields(test.args)...)...)
			if code != test.code {
				t.Errorf("exit code %d, not %d: %s", code, test.code, stderr)
			}
			has(t, stderr, test.says)
		})
	}
}

// With an earlier audit, the exit code depends on what has changed, not on faults that were there before.
func TestAuditGateOfDrift(t *testing.T) {
	c := azuretest.New()
	c.AddVM("rg", "vm", can, false)
	_, before, _ := slipstream(t, c, "audit", "-o", "json")
	path := filepath.Join(t.TempDir(), "audit.json")
	if err := os.WriteFile(path, []byte(before), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, out, stderr := slipstream(t, c, "audit", "--since", path, "--gate"); code != 0 {
		t.Errorf("nothing changed, and the exit code is %d: %s%s", code, out, stderr)
	}
	c.NICs["rg/vm-nic0"].Properties.EnableAcceleratedNetworking = to.Ptr(true)
	code, out, stderr := slipstream(t, c, "audit", "--since", path, "--gate")
	if code != 3 {
		t.Errorf("exit code %d", code)
	}
	has(t, out, "rg/vm: wanted yes, was no")
	has(t, stderr, "something changed")
}

// A size is looked up without any machine. An unknown one is an error of the command line.
func TestAuditOfASize(t *testing.T) {
	for args, want := range map[string]struct {
		code int
		says string
	}{
		"--size " + can + " --location westeurope --gate":    {0, can + " supports Accelerated Networking"},
		"--size " + cannot + " --location westeurope":        {0, cannot + " does not support Accelerated Networking"},
		"--size " + cannot + " --location westeurope --gate": {3, "gate: " + cannot + " does not support"},
		"--size " + can + " --location westeurope -o json":   {0, `"possible": "yes"`},
		"--size Standard_D4s_v4 --location westeurope":       {2, "near it: " + can},
		"--size " + can:         {2, "--size and --location need each other"},
		"--location westeurope": {2, "--size and --location need each other"},
		"--size " + can + " --location westeurope -o xml":           {2, "--output xml"},
		"--size " + can + " --location westeurope -g net":           {2, "--resource-group is about machines"},
		"--size " + can + " --location westeurope --since a.json":   {2, "--since is about machines"},
		"--size " + can + " --location westeurope --kubeconfig f":   {2, "--kubeconfig is about machines"},
		"--size " + can + " --location westeurope --subscription x": {0, can + " supports"},
	} {
		code, out, stderr := slipstream(t, azuretest.New(), append([]string{"audit"}, strings.Fields(args)...)...)
		if code != want.code {
			t.Errorf("%s: exit code %d, not %d: %s", args, code, want.code, stderr)
		}
		has(t, out+stderr, want.says)
	}
}

func TestErrorsNameWhatWasWritten(t *testing.T) {
	c := azuretest.New()
	for args, want := range map[string]string{
		"enable":      "slipstream azure enable TARGET",
		"migrate":     "slipstream azure migrate POOL",
		"migrate net": `--cluster "": name the cluster as GROUP/NAME`,
		"migrate net --cluster rg/prod --accept all": "--accept all: choose bare-pods or local-storage",
		"migrate net --cluster rg/prod --blocks 2":   "--blocks: must be at least 3",
		"audits":  `there is no command "audits"`,
		"audit x": "see slipstream azure audit --help",
	} {
		code, _, stderr := slipstream(t, c, strings.Fields(args)...)
		if code != 2 {
			t.Errorf("%s: exit code %d", args, code)
		}
		has(t, stderr, want)
	}
	t.Setenv("AZURE_SUBSCRIPTION_ID", "")
	var log bytes.Buffer
	if code := Main(t.Context(), Process{Args: []string{"slipstream-azure", "audit"}, Out: &log, Err: &log}); code != 2 {
		t.Errorf("without a subscription: exit code %d", code)
	}
	has(t, log.String(), "name a subscription: --subscription ID")
}

// Without --yes a switch only prints its plan. With --yes it runs, and --undo restores the state before it, once.
func TestEnablePrintsThenDoesThenUndoes(t *testing.T) {
	c := azuretest.New()
	c.AddVM("rg", "vm", can, false)
	wanted := func() bool { return *c.NICs["rg/vm-nic0"].Properties.EnableAcceleratedNetworking }
	state := t.TempDir()
	for _, step := range []struct {
		args, says string
		wanted     bool
	}{
		{"enable rg/vm", "plan (--yes carries it out):\n  deallocate vm, which is running", false},
		{"enable rg/vm --yes", "rg/vm is done", true},
		{"enable rg/vm --yes", "rg/vm: nothing to do", true},
		{"enable rg/vm --undo --yes", "start vm", false},
		{"enable rg/vm --undo --yes", "nothing to undo", false},
	} {
		code, out, stderr := slipstream(t, c, append(strings.Fields(step.args), "--state", state)...)
		if code != 0 || wanted() != step.wanted {
			t.Errorf("%s: exit code %d, wanted %v: %s", step.args, code, wanted(), stderr)
		}
		has(t, out, step.says)
	}
}
