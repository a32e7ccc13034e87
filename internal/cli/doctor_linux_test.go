package cli

import (
	"encoding/json"
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"slipstream.dev/internal/doctor"
	"slipstream.dev/internal/testenv"
)

// TestDoctor: both formats show a serious finding, and the exit code is 3.
func TestDoctor(t *testing.T) {
	testenv.EnterNamespace(t)
	under := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "dr0", MTU: 1500}, PeerName: "dr1"}
	overlay := &netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: "dr.vx"}, VxlanId: 7, SrcAddr: net.IPv4(10, 9, 0, 1), Port: 8472}
	for _, step := range []func() error{
		func() error { return netlink.LinkAdd(under) },
		func() error { overlay.VtepDevIndex = under.Index; return netlink.LinkAdd(overlay) },
		func() error { return netlink.LinkSetUp(under) },
		func() error { return netlink.LinkSetUp(overlay) },
		func() error { return netlink.LinkSetMTU(under, 1400) },
	} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	const want = "The MTU of dr.vx is 100 bytes too large for dr0, which carries its packets."
	code, text, errs := slipstream(t, "doctor", "--for", "100ms")
	if code != 3 || !strings.Contains(text, "\nSERIOUS: "+want+" (mtu-too-large)\n  read   /sys/class/net/dr.vx/mtu: 1450") || errs != "" {
		t.Errorf("exit code %d, standard error %q:\n%s", code, errs, text)
	}
	code, text, _ = slipstream(t, "doctor", "--for", "100ms", "--format", "json")
	var d diagnosis
	if err := json.Unmarshal([]byte(text), &d); err != nil || code != 3 {
		t.Fatalf("exit code %d, %v:\n%s", code, err, text)
	}
	if !slices.ContainsFunc(d.Findings, func(f doctor.Finding) bool { return f.Severity == doctor.Serious && f.What == want }) || len(d.Facts) == 0 {
		t.Errorf("finds %+v", d)
	}
}

// TestDoctorHealthy: without findings the text says so, and JSON has an empty list.
func TestDoctorHealthy(t *testing.T) {
	d := diagnosis{WindowSeconds: 1, Findings: doctor.Examine(doctor.Facts{BTF: true})}
	var text, encoded strings.Builder
	if err := writeDiagnosis(&text, d, 0); err != nil || !strings.Contains(text.String(), "Nothing found. Counters were read twice, 1.0 s apart.") {
		t.Errorf("%v: %q", err, text.String())
	}
	if err := writeJSON(&encoded, d); err != nil || !strings.Contains(encoded.String(), `"findings": []`) {
		t.Errorf("%v: %q", err, encoded.String())
	}
}
