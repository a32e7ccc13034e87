package cli

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/doctor"
	"slipstream.dev/internal/record"
)

// TestExamineNodes looks at 200 nodes of which each takes 5 s to answer, and one does not answer at all. That takes less than a minute, and the text has a line
// for each kind of finding, with its nodes.
func TestExamineNodes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit = 21 * time.Second
		var names []string
		for i := range 200 {
			names = append(names, fmt.Sprintf("node%03d", i))
		}
		address := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 77, byte(i >> 8), byte(i)}) }
		mac := func(i int) string { return fmt.Sprintf("02:00:00:00:%02x:%02x", i>>8, i&255) }
		var running, most atomic.Int64
		look := func(ctx context.Context, name string) (doctor.Facts, error) {
			most.Store(max(most.Load(), running.Add(1)))
			defer running.Add(-1)
			if name == "node008" { // never answers
				<-ctx.Done()
				return doctor.Facts{}, ctx.Err()
			}
			time.Sleep(5 * time.Second)
			var number int
			if _, err := fmt.Sscanf(name, "node%d", &number); err != nil {
				return doctor.Facts{}, err
			}
			if number == 7 {
				return doctor.Facts{}, errors.New("its pod is gone")
			}
			overlay := doctor.Device{Link: record.Link{Name: "flannel.1", Kind: "vxlan", MTU: 1450}, Up: true, VNI: 1, VXLANPort: 8472, MAC: mac(number)}
			for i := range names {
				overlay.FDB = append(overlay.FDB, doctor.FDBEntry{MAC: mac(i), To: address(i)})
			}
			overlay.FDB = append(overlay.FDB[:number], overlay.FDB[number+1:]...)
			if number == 9 { // after the others have learned the old one
				overlay.MAC = "02:00:00:00:ff:ff"
			}
			f := doctor.Facts{Window: time.Second, BTF: number%50 != 0, Devices: []doctor.Device{overlay,
				{Link: record.Link{Name: "eth0"}, Up: true, Addresses: []netip.Prefix{netip.PrefixFrom(address(number), 16)}}}}
			if number >= 100 {
				overlay := &f.Devices[0]
				overlay.Class, overlay.Window.Damaged, overlay.Window.TxDropped = v1alpha1.DeviceOverlay, 100, 0
				if number >= 150 {
					overlay.Window.Damaged, overlay.Window.TxDropped = 0, 100
				}
				f.Stacks = []doctor.Stack{{Counts: map[string]uint64{"Udp.RcvbufErrors": 500, "Udp.InErrors": 500}}}
			}
			return f, nil
		}
		var d diagnosis
		began := time.Now()
		d.Findings = []doctor.Finding{{Rule: "nodes-differ", Severity: doctor.Note, What: "The nodes have different kernels."}, {Rule: "nodes-differ", Severity: doctor.Note, What: "The nodes have different kubelets."}}
		d.cluster = &doctor.Cluster{Nodes: []doctor.ClusterNode{{Name: "node007"}, {Name: "node009"}, {Name: "another"}}}
		if err := d.examineNodes(t.Context(), names, limit, look); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took > time.Minute || most.Load() > looksAtOnce {
			t.Errorf("took %s, %d at once", took, most.Load())
		}
		for _, n := range d.cluster.Nodes {
			if seen := n.Machine != nil && n.Machine.Devices[0].MAC == "02:00:00:00:ff:ff"; seen != (n.Name == "node009") {
				t.Errorf("the cluster has the facts of %s: %v", n.Name, seen)
			}
		}
		doctor.SortWorstFirst(d.Findings)
		var text strings.Builder
		if err := writeDiagnosis(&text, d, 0); err != nil {
			t.Fatal(err)
		}
		words := func(s string) string { return strings.Join(strings.Fields(s), " ") }
		got := words(text.String())
		for _, want := range []string{
			"node007 was not seen, because its pod is gone\nnode008 was not seen, because no answer in 21s\n", "finding severity of 200 nodes", "node-unfit serious 2 node007, node008",
			"udp-buffer-full serious 100 node100, node101, node102, node103, node104, node105 and 94 more",
			"overlay-differs serious 197 node000 to node009, ", "no-btf warning 4 node000, node050, node100, node150",
			"device-drops (rx_errors) serious 50 node100, ", "device-drops (tx_dropped) serious 50 node150, ", "flannel.1 refuses packets", "flannel.1 drops packets", "different kernels.", "different kubelets.",
		} {
			if !strings.Contains(got, words(want)) {
				t.Errorf("%q is not in:\n%s", want, text.String())
			}
		}
		if n := strings.Count(text.String(), "\n  do "); n != 8 {
			t.Errorf("%d paragraphs, want one for each kind:\n%s", n, text.String())
		}
	})
}

// TestNoTableOfTheCluster: what is found of the cluster alone has no table of nodes, whose rows would be missing.
func TestNoTableOfTheCluster(t *testing.T) {
	d := diagnosis{nodes: 2, Findings: []doctor.Finding{{Rule: "accelerated", Severity: doctor.Note, What: "Agents accelerate nodes."}}}
	var text strings.Builder
	if err := writeDiagnosis(&text, d, 0); err != nil {
		t.Fatal(err)
	}
	if got := text.String(); strings.Contains(got, "of 2") || !strings.HasPrefix(strings.TrimSpace(got), "NOTE: Agents accelerate nodes.") {
		t.Errorf("it prints\n%s", got)
	}
}
