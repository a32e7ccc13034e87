package azure_test

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/azure"
	"slipstream.dev/internal/azure/azuretest"
)

// memory returns a subscription with a family of sizes. The smallest size does not support Accelerated Networking.
func memory() *azuretest.Cloud {
	c := azuretest.New()
	c.PageSize = 3
	c.Families, c.VCPUs, c.Refused = make(map[string]string), make(map[string]int), map[string]bool{"Standard_DS15_v2": true}
	for name, vcpus := range map[string]int{"Standard_DS1_v2": 1, "Standard_DS2_v2": 2, "Standard_DS13_v2": 8, "Standard_DS15_v2": 20} {
		c.Sizes[name], c.Families[name], c.VCPUs[name] = vcpus > 1, "standardDSv2Family", vcpus
	}
	return c
}

// A size is looked up in the list of sizes, and the subscription need not have a machine, or allow anything but that
// list to be read.
func TestAuditSize(t *testing.T) {
	c := memory()
	c.Fault = func(_ int, r *http.Request) azuretest.Fault {
		if !strings.Contains(r.URL.Path, "/Microsoft.Compute/skus") {
			return azuretest.Forbidden
		}
		return azuretest.None
	}
	for _, location := range []string{"westeurope", "WestEurope", "West Europe"} {
		a, err := open(t, c).AuditSize(t.Context(), "standard_ds13_V2", location)
		if err != nil {
			t.Fatal(err)
		}
		a.Time = a.Time.Add(-1e18)
		want := &azure.SizeAudit{Version: 1, Time: a.Time, Subscription: azuretest.Subscription, Location: "westeurope", Family: "standardDSv2Family",
			Size: azure.Size{Name: "Standard_DS13_v2", VCPUs: 8, Possible: azure.Yes},
			Others: []azure.Size{
				{Name: "Standard_DS1_v2", VCPUs: 1, Possible: azure.No},
				{Name: "Standard_DS2_v2", VCPUs: 2, Possible: azure.Yes},
				{Name: "Standard_DS15_v2", VCPUs: 20, Possible: azure.Yes, Restricted: true},
			}}
		if diff := cmp.Diff(want, a); diff != "" {
			t.Errorf("%s: %s", location, diff)
		}
	}
}

func TestAuditSizeErrors(t *testing.T) {
	for _, test := range []struct {
		size, location string
		fault          azuretest.Fault
		says           string
		unknown        bool
	}{
		{size: "Standard_DS13v2", location: "westeurope", says: "location westeurope has no size Standard_DS13v2; near it: Standard_DS13_v2", unknown: true},
		{size: "DS14_v2", location: "westeurope", says: "near it: Standard_DS13_v2, Standard_DS15_v2", unknown: true},
		{size: "m5.large", location: "westeurope", says: "and 6 others (az vm list-skus --location westeurope", unknown: true},
		{size: "Standard_LRS", location: "westeurope", says: "has no size Standard_LRS", unknown: true}, // a disk
		{size: "Standard_DS13_v2", location: "westeurop", says: "no sizes in location westeurop (az account list-locations", unknown: true},
		{size: "Standard_DS13_v2", location: "westeurope", fault: azuretest.Forbidden, says: "list sizes of westeurope: 403"},
	} {
		c := memory()
		c.Fault = func(int, *http.Request) azuretest.Fault { return test.fault }
		_, err := open(t, c).AuditSize(t.Context(), test.size, test.location)
		if err == nil || !strings.Contains(err.Error(), test.says) || errors.Is(err, azure.ErrNoSize) != test.unknown {
			t.Errorf("%s in %s: %v", test.size, test.location, err)
			continue
		}
		azuretest.CheckSecrets(t, "the error", err.Error())
	}
	o := azuretest.New().Options()
	o.Subscriptions = append(o.Subscriptions, "00000000-0000-4000-8000-000000000001")
	two, err := azure.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := two.AuditSize(t.Context(), can, azuretest.Location); err == nil || !strings.Contains(err.Error(), "one subscription") {
		t.Errorf("two subscriptions: %v", err)
	}
}

func TestSizeFormats(t *testing.T) {
	a, err := open(t, memory()).AuditSize(t.Context(), "Standard_DS13_v2", azuretest.Location)
	if err != nil {
		t.Fatal(err)
	}
	out := make(map[string]string)
	for name, write := range azure.SizeFormats {
		var b bytes.Buffer
		if err := write(&b, a); err != nil {
			t.Fatal(err)
		}
		out[name] = b.String()
	}
	const text = `Standard_DS13_v2 supports Accelerated Networking (westeurope, family standardDSv2Family)

OTHERS OF THE FAMILY  VCPUS  POSSIBLE  RESTRICTED
Standard_DS1_v2       1      no        no
Standard_DS2_v2       2      yes       no
Standard_DS15_v2      20     yes       yes
`
	if diff := cmp.Diff(text, out["text"]); diff != "" {
		t.Error(diff)
	}
	var again azure.SizeAudit
	if err := json.Unmarshal([]byte(out["json"]), &again); err != nil || !cmp.Equal(a, &again) {
		t.Errorf("%v: %s", err, out["json"])
	}
	rows, err := csv.NewReader(strings.NewReader(out["csv"])).ReadAll()
	if err != nil || len(rows) != 5 || strings.Join(rows[1][3:], " ") != "Standard_DS13_v2 8 yes false" || strings.Join(rows[4][3:], " ") != "Standard_DS15_v2 20 yes true" {
		t.Errorf("%v: %v", err, rows)
	}

	path := filepath.Join(t.TempDir(), "size.json")
	if err := os.WriteFile(path, []byte(out["json"]), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := azure.ReadAudit(path); err == nil || !strings.Contains(err.Error(), "without --size") {
		t.Errorf("the answer about a size was taken for an audit of machines: %v", err)
	}
}

// Whether a size supports Accelerated Networking is told first, even if the subscription may not use the size.
func TestSizeTextOfARefusedSize(t *testing.T) {
	c := memory()
	c.Refused["Standard_B2s"], c.Families["Standard_B2s"] = true, "standardBSFamily"
	a, err := open(t, c).AuditSize(t.Context(), "Standard_B2s", azuretest.Location)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := azure.SizeFormats["text"](&b, a); err != nil {
		t.Fatal(err)
	}
	const want = `Standard_B2s does not support Accelerated Networking (westeurope, family standardBSFamily)
this subscription may not use it in westeurope
its family has no other sizes here
`
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Error(diff)
	}
}
