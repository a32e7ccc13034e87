package azure_test

import (
	"bytes"
	"context"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore/runtime"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/to"
	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/compute/armcompute/v7"
	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/containerservice/armcontainerservice/v6"
	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/azure"
	"slipstream.dev/internal/azure/azuretest"
)

const (
	can    = "Standard_D4s_v5"
	cannot = "Standard_B2s"
)

func open(t *testing.T, c *azuretest.Cloud) *azure.Cloud {
	t.Helper()
	cloud, err := azure.Open(c.Options())
	if err != nil {
		t.Fatal(err)
	}
	return cloud
}

func inventory(t *testing.T, c *azuretest.Cloud, s azure.Scope) *azure.Audit {
	t.Helper()
	a, err := open(t, c).Inventory(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func machine(t *testing.T, a *azure.Audit, name string) azure.Machine {
	t.Helper()
	i := slices.IndexFunc(a.Machines, func(m azure.Machine) bool { return m.Name == name })
	if i < 0 {
		t.Fatalf("no machine %s", name)
	}
	return a.Machines[i]
}

// Every combination of the three facts is kept unchanged, and has the findings that the documents
// list.
func TestInventoryKeepsThreeFactsApart(t *testing.T) {
	want := map[string]string{ // possible wanted used: findings; all others have none
		"yes no yes": "not-wanted used-unwanted", "yes no no": "not-wanted", "yes no unknown": "not-wanted", "yes no not looked": "not-wanted",
		"yes mixed yes": "not-wanted", "yes mixed no": "not-wanted", "yes mixed unknown": "not-wanted", "yes mixed not looked": "not-wanted",
		"yes yes no": "not-used", "unknown yes no": "not-used",
		"no yes yes": "not-possible", "no yes no": "not-possible", "no yes unknown": "not-possible", "no yes not looked": "not-possible",
		"no mixed yes": "not-possible", "no mixed no": "not-possible", "no mixed unknown": "not-possible", "no mixed not looked": "not-possible",
		"no no yes": "used-unwanted", "unknown no yes": "used-unwanted",
	}
	c := azuretest.New()
	sizes := map[azure.Fact]string{azure.Yes: can, azure.No: cannot, azure.Unknown: "Standard_New"}
	nics := map[azure.Fact][]bool{azure.Yes: {true, true}, azure.No: {false}, azure.Mixed: {true, false}, azure.Unknown: {true}}
	uses := make(map[string]azure.Use)
	type facts struct{ possible, wanted, used azure.Fact }
	all := make(map[string]facts)
	for possible, size := range sizes {
		for wanted, values := range nics {
			for _, used := range []azure.Fact{azure.Yes, azure.No, azure.Unknown, azure.NotLooked} {
				name := fmt.Sprintf("vm%d", len(all))
				all[name] = facts{possible, wanted, used}
				vm := c.AddVM("rg", name, size, values...)
				if wanted == azure.Unknown {
					delete(c.NICs, "rg/"+name+"-nic0") // as if its group could not be read
				}
				if used != azure.NotLooked {
					uses[strings.ToLower(*vm.ID)] = azure.Use{Used: used, Reason: "Reason"}
				}
			}
		}
	}
	a := inventory(t, c, azure.Scope{Uses: uses})
	if len(a.Machines) != 48 {
		t.Fatalf("%d machines, not 48", len(a.Machines))
	}
	for name, f := range all {
		m := machine(t, a, name)
		if got := (facts{m.Possible, m.Wanted, m.Used}); got != f {
			t.Errorf("%s: %v, not %v", name, got, f)
		}
		var got []string
		for _, x := range m.Findings {
			got = append(got, string(x))
		}
		combination := fmt.Sprintf("%s %s %s", f.possible, f.wanted, f.used)
		if strings.Join(got, " ") != want[combination] {
			t.Errorf("%s: findings %q, not %q", combination, got, want[combination])
		}
	}
	if a.Complete() {
		t.Error("facts are unknown, and the audit is complete")
	}
}

// The NICs of an instance and the model of its scale set are kept apart, even in a flexible scale
// set.
func TestInventoryTellsInstancesBehindTheirModel(t *testing.T) {
	c := azuretest.New()
	c.AddSet("rg", "web", can, false, armcompute.UpgradeModeManual, 3)
	c.Sets["rg/web"].Properties.VirtualMachineProfile.NetworkProfile.NetworkInterfaceConfigurations[0].Properties.EnableAcceleratedNetworking = to.Ptr(true)
	c.Members["rg/web"][1].Properties.LatestModelApplied = to.Ptr(false)
	flexible := c.AddSet("rg", "flex", can, true, armcompute.UpgradeModeManual, 0)
	flexible.Properties.OrchestrationMode = to.Ptr(armcompute.OrchestrationModeFlexible)
	c.AddVM("rg", "flex_a", can, false).Properties.VirtualMachineScaleSet = &armcompute.SubResource{ID: flexible.ID}
	c.AddVM("rg", "flex_b", can, true).Properties.VirtualMachineScaleSet = &armcompute.SubResource{ID: flexible.ID}
	a := inventory(t, c, azure.Scope{})
	got := make(map[string]string)
	for _, s := range a.ScaleSets {
		got[s.Name] = fmt.Sprint(s.Wanted, " ", s.Behind, " of ", s.Instances, " ", s.Findings)
	}
	if diff := cmp.Diff(map[string]string{"web": "yes 3 of 3 [behind-model]", "flex": "yes 1 of 2 [behind-model]"}, got); diff != "" {
		t.Error(diff)
	}
	if m := machine(t, a, "web_0"); m.Wanted != azure.No || !m.Behind || m.ScaleSet != "web" {
		t.Errorf("web_0: %+v", m)
	}
	if m := machine(t, a, "flex_b"); m.Behind {
		t.Error("flex_b is as its model, and behind")
	}
}

func cluster(c *azuretest.Cloud, group, name, nodes string, pools ...*armcontainerservice.ManagedClusterAgentPoolProfile) {
	id := azuretest.ID(group, azuretest.TypeCluster, name)
	c.Clusters[group+"/"+name] = &armcontainerservice.ManagedCluster{ID: &id, Name: &name, Location: to.Ptr(azuretest.Location),
		Properties: &armcontainerservice.ManagedClusterProperties{NodeResourceGroup: &nodes, AgentPoolProfiles: pools}}
}

// Both kinds of node pools are found, even if only the cluster's own resource group is in scope.
func TestInventoryFindsNodePoolsOfBothKinds(t *testing.T) {
	c := azuretest.New()
	set := c.AddSet("MC_rg", "aks-net-1", can, true, armcompute.UpgradeModeManual, 2)
	set.Tags["aks-managed-poolName"] = to.Ptr("net")
	vm := c.AddVM("MC_rg", "aks-vms-1", can, false)
	c.AddVM("other", "else", can, true)
	cluster(c, "rg", "prod", "MC_rg", &armcontainerservice.ManagedClusterAgentPoolProfile{Name: to.Ptr("net"), Type: to.Ptr(armcontainerservice.AgentPoolTypeVirtualMachineScaleSets)},
		&armcontainerservice.ManagedClusterAgentPoolProfile{Name: to.Ptr("vms"), Type: to.Ptr(armcontainerservice.AgentPoolType("VirtualMachines"))})
	c.Machines["rg/prod/vms"] = []*armcontainerservice.Machine{{Name: to.Ptr("aks-vms-1"), Properties: &armcontainerservice.MachineProperties{ResourceID: vm.ID}}}
	a := inventory(t, c, azure.Scope{Groups: []string{"rg"}})
	got := make(map[string]string)
	for _, m := range a.Machines {
		got[m.Name] = m.Cluster + "/" + m.Pool + " " + string(m.Wanted)
	}
	if diff := cmp.Diff(map[string]string{"aks-net-1_0": "prod/net yes", "aks-net-1_1": "prod/net yes", "aks-vms-1": "prod/vms no"}, got); diff != "" {
		t.Error(diff)
	}
	if !a.Complete() {
		t.Errorf("not read: %v", a.NotRead)
	}
	if whole := inventory(t, c, azure.Scope{}); len(whole.Machines) != 4 {
		t.Errorf("%d machines in the subscription, not 4", len(whole.Machines))
	}
}

// The audit names what could not be read, and contains the rest.
func TestInventoryNamesWhatItMayNotRead(t *testing.T) {
	c := azuretest.New()
	c.AddVM("mine", "a", can, false)
	c.AddVM("theirs", "b", can, false)
	c.AddSet("mine", "set", can, true, armcompute.UpgradeModeManual, 1)
	c.Fault = func(_ int, r *http.Request) azuretest.Fault {
		if strings.Contains(r.URL.Path, "/theirs/") || strings.HasSuffix(r.URL.Path, "/set/networkInterfaces") {
			return azuretest.Forbidden
		}
		return azuretest.None
	}
	a := inventory(t, c, azure.Scope{Groups: []string{"mine", "theirs"}})
	if m := machine(t, a, "a"); m.Wanted != azure.No || m.Possible != azure.Yes {
		t.Errorf("a: %+v", m)
	}
	if m := machine(t, a, "set_0"); m.Wanted != azure.Unknown {
		t.Errorf("set_0: wanted %s, and its NICs may not be read", m.Wanted)
	}
	var got []string
	for _, n := range a.NotRead {
		got = append(got, n.String())
	}
	why := ": 403 AuthorizationFailed: you lack the permission for Microsoft.Test/things/get"
	if diff := cmp.Diff([]string{"AKS clusters of resource group theirs" + why, "network interfaces of resource group theirs" + why,
		"network interfaces of scale set mine/set" + why, "scale sets of resource group theirs" + why, "virtual machines of resource group theirs" + why}, got); diff != "" {
		t.Error(diff)
	}
	if a.Complete() {
		t.Error("complete")
	}
}

// 2,000 NICs, in pages, are read with few requests, throttled or not.
func TestInventoryOfTwoThousandNICs(t *testing.T) {
	c := azuretest.New()
	c.PageSize = 100
	for i := range 1000 {
		c.AddVM(fmt.Sprintf("rg%d", i%20), fmt.Sprintf("vm%d", i), can, i%2 == 0)
	}
	for i := range 10 {
		c.AddSet("sets", fmt.Sprintf("set%d", i), can, true, armcompute.UpgradeModeManual, 100)
	}
	for _, throttled := range []bool{false, true} {
		before := c.Requests()
		var mu sync.Mutex
		asked := make(map[string]int)
		refused := 0
		// Every third page is refused twice. If every third request were refused instead, one page could
		// be refused at each of its attempts, because the inventory sends several requests at once.
		c.Fault = func(_ int, r *http.Request) azuretest.Fault {
			mu.Lock()
			defer mu.Unlock()
			name, _ := r.Context().Value(runtime.CtxAPINameKey{}).(string)
			page := name + " " + r.URL.String()
			if _, again := asked[page]; !again && throttled && len(asked)%3 == 0 {
				asked[page] = 2
			} else if !again {
				asked[page] = 0
			}
			if asked[page] == 0 {
				return azuretest.None
			}
			asked[page]--
			refused++
			return azuretest.Throttled
		}
		start := time.Now()
		a := inventory(t, c, azure.Scope{})
		took, requests := time.Since(start), c.Requests()-before
		nics := 0
		for _, m := range a.Machines {
			nics += len(m.NICs)
		}
		t.Logf("%d NICs: %d requests in %v, %d refused", nics, requests, took.Round(time.Millisecond), refused)
		if nics != 2000 || !a.Complete() {
			t.Errorf("%d NICs, not read: %v", nics, a.NotRead)
		}
		// 10 pages each of machines and NICs; one page each of scale sets, clusters and sizes; two pages
		// for each scale set.
		if want := 43 + refused; requests != want || throttled != (refused == 30) {
			t.Errorf("%d requests, not %d, and %d refused", requests, want, refused)
		}
	}
}

// The inventory waits as long as Retry-After says.
func TestInventoryObeysRetryAfter(t *testing.T) {
	c := azuretest.New()
	c.AddVM("rg", "a", can, true)
	var mu sync.Mutex
	var first, again time.Time
	c.Fault = func(_ int, r *http.Request) azuretest.Fault {
		mu.Lock()
		defer mu.Unlock()
		switch name, _ := r.Context().Value(runtime.CtxAPINameKey{}).(string); {
		case !strings.HasPrefix(name, "VirtualMachinesClient"):
		case first.IsZero():
			first = time.Now()
			return azuretest.ThrottledSecond
		default:
			again = time.Now()
		}
		return azuretest.None
	}
	if a := inventory(t, c, azure.Scope{}); !a.Complete() {
		t.Errorf("not read: %v", a.NotRead)
	}
	if pause := again.Sub(first); pause < time.Second {
		t.Errorf("asked again after %v, and the service said 1 s", pause)
	}
}

func TestInventoryEndsWithItsContext(t *testing.T) {
	c := azuretest.New()
	ctx, cancel := context.WithCancel(t.Context())
	c.Fault = func(int, *http.Request) azuretest.Fault { cancel(); return azuretest.Lost }
	if a, err := open(t, c).Inventory(ctx, azure.Scope{}); err == nil {
		t.Errorf("interrupted, and returned %+v", a)
	}
}

func TestSinceTellsChangesOnly(t *testing.T) {
	c := azuretest.New()
	c.AddVM("rg", "changes", can, true)
	c.AddVM("rg", "stays", can, true)
	c.AddVM("rg", "goes", can, true)
	before := inventory(t, c, azure.Scope{})
	c.NICs["rg/changes-nic0"].Properties.EnableAcceleratedNetworking = to.Ptr(false)
	delete(c.VMs, "rg/goes")
	c.AddVM("rg", "comes", can, true)
	path := filepath.Join(t.TempDir(), "audit.json")
	var b bytes.Buffer
	if err := azure.Formats["json"](&b, before, nil); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	earlier, err := azure.ReadAudit(path)
	if err != nil {
		t.Fatal(err)
	}
	now := inventory(t, c, azure.Scope{})
	var got []string
	for _, d := range now.Since(earlier) {
		got = append(got, fmt.Sprintf("%s %s: %s, %s", d.Name, d.What, d.Before, d.Now))
	}
	want := []string{"rg/changes wanted: yes, no", "rg/comes machine: not there, there", "rg/goes machine: there, gone"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	// A machine that could not be read does not count as gone.
	c.Fault = func(_ int, r *http.Request) azuretest.Fault { return azuretest.Forbidden }
	if drift := inventory(t, c, azure.Scope{}).Since(earlier); len(drift) > 0 {
		t.Errorf("nothing was read, and this changed: %v", drift)
	}
}

// No format contains a secret of the service, and CSV has a line for each NIC.
func TestFormatsHaveNoSecret(t *testing.T) {
	c := azuretest.New()
	c.AddVM("rg", "two", can, true, false)
	c.AddVM("rg", "=cmd", can, true)
	c.AddSet("rg", "set", can, true, armcompute.UpgradeModeManual, 2)
	c.Fault = func(_ int, r *http.Request) azuretest.Fault {
		if strings.HasSuffix(r.URL.Path, "/managedClusters") {
			return azuretest.Forbidden
		}
		return azuretest.None
	}
	a := inventory(t, c, azure.Scope{})
	for name, write := range azure.Formats {
		var b bytes.Buffer
		if err := write(&b, a, []azure.Drift{}); err != nil {
			t.Fatal(err)
		}
		azuretest.CheckSecrets(t, name, b.String())
		switch name {
		case "json":
			if !json.Valid(b.Bytes()) {
				t.Errorf("not JSON: %s", b.Bytes())
			}
		case "csv":
			rows, err := csv.NewReader(&b).ReadAll()
			if err != nil || len(rows) != 6 {
				t.Errorf("%d rows, not 6: %v", len(rows), err)
			}
			if !slices.ContainsFunc(rows, func(r []string) bool { return r[2] == "'=cmd" }) {
				t.Error("a name is a formula")
			}
		case "text":
			for _, line := range []string{"rg/two", "2 instances of scale sets match their models", "AKS clusters of subscription " + azuretest.Subscription + ": 403 AuthorizationFailed"} {
				if !strings.Contains(b.String(), line) {
					t.Errorf("no %q in:\n%s", line, b.String())
				}
			}
		}
	}
}

// ctx is also used by subtests, whose faults cancel it.
var ctx = context.Background()

func sortedLines(lines []string) string {
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}
