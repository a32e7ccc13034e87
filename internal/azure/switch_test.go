package azure_test

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore/to"
	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/compute/armcompute/v7"

	"slipstream.dev/internal/azure"
	"slipstream.dev/internal/azure/azuretest"
)

// state returns everything that a switch may change: power, NICs and models.
func state(c *azuretest.Cloud) string {
	c.Lock()
	defer c.Unlock()
	var lines []string
	for id, nic := range c.NICs {
		lines = append(lines, fmt.Sprint(id, " ", *nic.Properties.EnableAcceleratedNetworking))
	}
	for id, power := range c.Power {
		lines = append(lines, id+" "+power)
	}
	for id, set := range c.Sets {
		lines = append(lines, fmt.Sprint(id, " ", *set.Properties.VirtualMachineProfile.NetworkProfile.NetworkInterfaceConfigurations[0].Properties.EnableAcceleratedNetworking))
	}
	return sortedLines(lines)
}

// everyNIC returns the state after all NICs and models have been switched.
func everyNIC(before string, want bool) string {
	if want {
		return strings.ReplaceAll(before, " false", " true")
	}
	return strings.ReplaceAll(before, " true", " false")
}

var targets = map[string]func(*azuretest.Cloud){
	"vm": func(c *azuretest.Cloud) { c.AddVM("rg", "it", can, false, true, false) },
	"deallocated vm": func(c *azuretest.Cloud) {
		vm := c.AddVM("rg", "it", can, false)
		c.Power[strings.ToLower(*vm.ID)] = "deallocated"
	},
	"manual set": func(c *azuretest.Cloud) {
		c.AddSet("rg", "it", can, false, armcompute.UpgradeModeManual, 3)
		c.Power[strings.ToLower(azuretest.ID("rg", azuretest.TypeSet, "it")+"/virtualMachines/1")] = "deallocated"
	},
	"automatic set": func(c *azuretest.Cloud) { c.AddSet("rg", "it", can, false, armcompute.UpgradeModeAutomatic, 2) },
}

func run(c *azuretest.Cloud, o azure.SwitchOptions) error {
	cloud, err := azure.Open(c.Options())
	if err != nil {
		return err
	}
	s, err := cloud.PlanSwitch(ctx, o)
	if err != nil {
		return err
	}
	return s.Run(ctx, func(string) {})
}

// Whichever request a switch is interrupted at, and however, the same command completes it, and --undo restores
// the original state, interrupted or not.
func TestSwitchGoesOnAfterEveryInterruption(t *testing.T) {
	for kind, add := range targets {
		for name, fault := range azuretest.Interruptions {
			t.Run(kind+"/"+name, func(t *testing.T) {
				t.Parallel()
				stopped := 0
				for at := 1; ; at += azuretest.Stride() {
					c := azuretest.New()
					c.Strict = true
					add(c)
					before := state(c)
					o := azure.SwitchOptions{Target: "rg/it", Want: true, Dir: t.TempDir()}
					switched := c.InterruptAt(at, fault)
					if err := run(c, o); err != nil {
						stopped++
					}
					c.Fault = nil
					if err := run(c, o); err != nil {
						t.Fatalf("stopped at request %d, the second run: %v", at, err)
					}
					if got := state(c); got != everyNIC(before, true) {
						t.Fatalf("stopped at request %d:\n%s\nnot\n%s", at, got, everyNIC(before, true))
					}
					o.Undo = true
					undone := c.InterruptAt(at, fault)
					if err := run(c, o); err != nil {
						stopped++
					}
					c.Fault = nil
					for range 2 { // running it again is safe
						if err := run(c, o); err != nil {
							t.Fatalf("stopped at request %d, undo: %v", at, err)
						}
					}
					if got := state(c); got != before {
						t.Fatalf("undone after request %d:\n%s\nnot\n%s", at, got, before)
					}
					if !switched() && !undone() {
						if stopped == 0 && name != "429" {
							t.Error("nothing was stopped")
						}
						return
					}
				}
			})
		}
	}
}

// A machine is deallocated before its NICs change, unless the switch is live.
func TestSwitchPlan(t *testing.T) {
	c := azuretest.New()
	c.AddVM("rg", "vm", can, false, true)
	c.AddSet("rg", "set", can, true, armcompute.UpgradeModeManual, 1)
	for _, test := range []struct {
		o    azure.SwitchOptions
		want string
	}{
		{azure.SwitchOptions{Target: "rg/vm", Want: true}, "deallocate vm, which is running; turn Accelerated Networking of NIC vm-nic0 on; start vm"},
		{azure.SwitchOptions{Target: "rg/vm", Want: true, Live: true}, "turn Accelerated Networking of NIC vm-nic0 on"},
		{azure.SwitchOptions{Target: azuretest.ID("rg", azuretest.TypeVM, "vm")}, "deallocate vm, which is running; turn Accelerated Networking of NIC vm-nic1 off; start vm"},
		{azure.SwitchOptions{Target: "rg/set", Want: true}, ""},
		{azure.SwitchOptions{Target: "rg/set"}, "turn Accelerated Networking of NIC nic0 in the model of set off; deallocate instance 0; give instance 0 the new model; start instance 0"},
		{azure.SwitchOptions{Target: "rg/set", Undo: true}, ""},
	} {
		test.o.Dir = t.TempDir()
		s, err := open(t, c).PlanSwitch(ctx, test.o)
		if err != nil {
			t.Fatal(err)
		}
		plan, err := s.Plan(ctx)
		if got := strings.Join(plan, "; "); err != nil || got != test.want {
			t.Errorf("%+v: %s, %v", test.o, got, err)
		}
		if files, _ := os.ReadDir(test.o.Dir); len(files) > 0 {
			t.Errorf("a plan wrote %v", files)
		}
	}
}

func TestSwitchRefuses(t *testing.T) {
	c := azuretest.New()
	c.AddVM("rg", "small", cannot, false)
	c.AddSet("MC", "aks", can, false, armcompute.UpgradeModeManual, 1).Tags["aks-managed-poolName"] = to.Ptr("net")
	c.AddSet("rg", "flex", can, false, armcompute.UpgradeModeManual, 0).Properties.OrchestrationMode = to.Ptr(armcompute.OrchestrationModeFlexible)
	c.AddSet("rg", "behind", can, false, armcompute.UpgradeModeManual, 2)
	c.Members["rg/behind"][1].Properties.LatestModelApplied = to.Ptr(false)
	for target, want := range map[string]string{
		"rg/small": "size Standard_B2s, which does not support Accelerated Networking", "MC/aks": "slipstream azure migrate net", "rg/flex": "flexible scale set",
		"rg/behind": "instance 1 of behind differs from its model", "rg/none": "no virtual machine or scale set rg/none", "vm": "as GROUP/NAME",
		"/subscriptions/other/resourceGroups/rg/providers/Microsoft.Compute/virtualMachines/vm": "name that with --subscription",
		azuretest.ID("rg", azuretest.TypeNIC, "nic"):                                            "name a virtual machine or a scale set",
	} {
		before := state(c)
		if err := run(c, azure.SwitchOptions{Target: target, Want: true, Dir: t.TempDir()}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", target, err)
		}
		if state(c) != before {
			t.Errorf("%s: changed", target)
		}
	}
}

// A switch does not overwrite what somebody else has changed since it read the state, and neither journal nor
// errors contain a secret.
func TestSwitchJournalAndErrorsHaveNoSecret(t *testing.T) {
	c := azuretest.New()
	c.AddVM("rg", "it", can, false)
	dir := t.TempDir()
	c.Fault = func(_ int, r *http.Request) azuretest.Fault {
		if r.Method == http.MethodPut {
			return azuretest.Forbidden
		}
		return azuretest.None
	}
	err := run(c, azure.SwitchOptions{Target: "rg/it", Want: true, Dir: dir})
	if err == nil || !strings.Contains(err.Error(), "403 AuthorizationFailed: you lack the permission for Microsoft.Test/things/put") {
		t.Errorf("%v", err)
	}
	files, _ := filepath.Glob(filepath.Join(dir, "*.json"))
	if len(files) != 1 {
		t.Fatalf("%d journals", len(files))
	}
	data, _ := os.ReadFile(files[0])
	azuretest.CheckSecrets(t, "the journal", string(data))
	azuretest.CheckSecrets(t, "the error", fmt.Sprint(err)+fmt.Sprint(errors.Unwrap(err)))
}

// People start and stop machines between two switches. The second switch leaves the machines as they are by then,
// and checks the target anew.
func TestSwitchLeavesPowerAsItIsNow(t *testing.T) {
	c := azuretest.New()
	vm := c.AddVM("rg", "it", can, false)
	id := strings.ToLower(*vm.ID)
	dir := t.TempDir()
	c.Power[id] = "deallocated"
	if err := run(c, azure.SwitchOptions{Target: "rg/it", Want: true, Dir: dir}); err != nil || c.Power[id] != "deallocated" {
		t.Fatalf("%v, %s", err, c.Power[id])
	}
	c.Power[id] = "running"
	if err := run(c, azure.SwitchOptions{Target: "rg/it", Dir: dir}); err != nil || c.Power[id] != "running" {
		t.Errorf("turned off: %v, and the machine is %s", err, c.Power[id])
	}
	c.Power[id] = "deallocated"
	if err := run(c, azure.SwitchOptions{Target: "rg/it", Undo: true, Dir: dir}); err != nil || c.Power[id] != "deallocated" {
		t.Errorf("undone: %v, and the machine is %s", err, c.Power[id])
	}

	c.Power[id] = "running"
	if err := run(c, azure.SwitchOptions{Target: "rg/it", Want: true, Dir: dir}); err != nil {
		t.Fatal(err)
	}
	if err := run(c, azure.SwitchOptions{Target: "rg/it", Dir: dir}); err != nil {
		t.Fatal(err)
	}
	delete(c.Power, id)
	if err := run(c, azure.SwitchOptions{Target: "rg/it", Want: true, Dir: t.TempDir()}); err == nil || !strings.Contains(err.Error(), "the power state of it is unknown") {
		t.Errorf("of unknown power state: %v", err)
	}
	c.Power[id] = "running"
	vm.Properties.HardwareProfile.VMSize = to.Ptr(armcompute.VirtualMachineSizeTypes(cannot))
	if err := run(c, azure.SwitchOptions{Target: "rg/it", Want: true, Dir: dir}); err == nil || !strings.Contains(err.Error(), "does not support") || c.Power[id] != "running" {
		t.Errorf("of a size without Accelerated Networking: %v, and the machine is %s", err, c.Power[id])
	}
}
