//go:build linux

package lab

import (
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/testenv"
)

func TestDivide(t *testing.T) {
	for cpus := 1; cpus <= 128; cpus++ {
		for nodes := 2; nodes <= 16; nodes++ {
			t.Run(fmt.Sprintf("%d CPUs, %d nodes", cpus, nodes), func(t *testing.T) {
				var all []int
				for i := range cpus {
					all = append(all, 3*i) // ids need not follow one another
				}
				parts := divide(all, nodes)
				if len(parts) != nodes {
					t.Fatalf("%d parts", len(parts))
				}
				if cpus < 2*nodes {
					for _, p := range parts {
						if diff := cmp.Diff(nodeCPUs{CPUs: all, IRQ: -1}, p); diff != "" {
							t.Errorf("nodes do not share (-want +got):\n%s", diff)
						}
					}
					return
				}
				var together []int
				least, most := cpus, 0
				for _, p := range parts {
					together = append(together, p.CPUs...)
					least, most = min(least, len(p.CPUs)), max(most, len(p.CPUs))
					if p.IRQ != p.CPUs[len(p.CPUs)-1] {
						t.Errorf("interrupts of a node with %v go to %d", p.CPUs, p.IRQ)
					}
				}
				if diff := cmp.Diff(all, together); diff != "" {
					t.Errorf("not every CPU is one node's (-want +got):\n%s", diff)
				}
				if least < 2 || most > least+1 {
					t.Errorf("nodes have %d to %d CPUs", least, most)
				}
			})
		}
	}
}

// A machine with one socket and two threads per core, numbered as on servers, and with one isolated core.
func TestAvailableCPUs(t *testing.T) {
	testenv.NeedCPUs(t, 2)
	sys := t.TempDir()
	write := func(path, text string) {
		t.Helper()
		testenv.WriteFile(t, filepath.Join(sys, "devices/system/cpu", path), text+"\n")
	}
	mine, err := availableCPUs(sys) // without topology: by number
	if err != nil {
		t.Fatal(err)
	}
	if !slices.IsSorted(mine) {
		t.Errorf("CPUs %v are not in order", mine)
	}
	first, last := mine[0], mine[len(mine)-1]
	write("isolated", fmt.Sprint(first))
	got, err := availableCPUs(sys)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(mine[1:], got); diff != "" {
		t.Errorf("with CPU %d isolated (-want +got):\n%s", first, diff)
	}
	write("isolated", "")
	// The first CPU is in another socket: it comes last.
	write(fmt.Sprintf("cpu%d/topology/physical_package_id", first), "1")
	write(fmt.Sprintf("cpu%d/topology/thread_siblings_list", last), fmt.Sprint(last))
	got, err = availableCPUs(sys)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(append(slices.Clone(mine[1:]), first), got); diff != "" {
		t.Errorf("with CPU %d in the second socket (-want +got):\n%s", first, diff)
	}
}
