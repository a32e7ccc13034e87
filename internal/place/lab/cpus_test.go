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
				parts := divide(coresOf(1, all...), nodes)
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

// coresOf returns the cores of CPUs that have this many threads each.
func coresOf(perCore int, cpus ...int) [][]int { return slices.Collect(slices.Chunk(cpus, perCore)) }

// TestDivideCores checks that nodes share no core, if each can have two CPUs without that.
func TestDivideCores(t *testing.T) {
	for name, c := range map[string]struct {
		cores [][]int
		nodes int
		want  []nodeCPUs
	}{
		"three cores of two threads": {
			coresOf(2, 0, 3, 1, 4, 2, 5), 2,
			[]nodeCPUs{{CPUs: []int{0, 3}, IRQ: 3}, {CPUs: []int{1, 4}, IRQ: 4}},
		},
		"five cores of two threads": {
			coresOf(2, 0, 5, 1, 6, 2, 7, 3, 8, 4, 9), 2,
			[]nodeCPUs{{CPUs: []int{0, 5, 1, 6}, IRQ: 6}, {CPUs: []int{2, 7, 3, 8}, IRQ: 8}},
		},
		"a core of one thread": {
			[][]int{{4}, {1, 5}, {2, 6}, {3, 7}}, 2,
			[]nodeCPUs{{CPUs: []int{4, 1, 5}, IRQ: 5}, {CPUs: []int{2, 6}, IRQ: 6}},
		},
		"cores of two kinds": {
			[][]int{{0, 1}, {2, 3}, {4}, {5}, {6}, {7}}, 2,
			[]nodeCPUs{{CPUs: []int{0, 1, 2, 3}, IRQ: 3}, {CPUs: []int{4, 5, 6, 7}, IRQ: 7}},
		},
		"one core": {
			coresOf(4, 0, 1, 2, 3), 2,
			[]nodeCPUs{{CPUs: []int{0, 1}, IRQ: 1, SharesCore: true}, {CPUs: []int{2, 3}, IRQ: 3, SharesCore: true}},
		},
	} {
		if diff := cmp.Diff(c.want, divide(c.cores, c.nodes)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
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
	available := func() (cores [][]int, cpus []int) {
		t.Helper()
		cores, err := availableCPUs(sys)
		if err != nil {
			t.Fatal(err)
		}
		return cores, slices.Concat(cores...)
	}
	cores, mine := available() // without topology: by number
	if !slices.IsSorted(mine) || len(cores) != len(mine) {
		t.Errorf("CPUs %v are not in order, each a core", cores)
	}
	first, last := mine[0], mine[len(mine)-1]
	write("isolated", fmt.Sprint(first))
	if _, got := available(); !slices.Equal(mine[1:], got) {
		t.Errorf("with CPU %d isolated: %v, want %v", first, got, mine[1:])
	}
	write("isolated", "")
	// The first and the last CPU are threads of a core.
	for _, cpu := range []int{first, last} {
		write(fmt.Sprintf("cpu%d/topology/thread_siblings_list", cpu), fmt.Sprintf("%d,%d", first, last))
	}
	if cores, _ := available(); !slices.Equal([]int{first, last}, cores[0]) || len(cores) != len(mine)-1 {
		t.Errorf("with CPUs %d and %d on one core: %v", first, last, cores)
	}
	// The first CPU is in another socket: it comes last.
	write(fmt.Sprintf("cpu%d/topology/physical_package_id", first), "1")
	for _, cpu := range []int{first, last} {
		write(fmt.Sprintf("cpu%d/topology/thread_siblings_list", cpu), fmt.Sprint(cpu))
	}
	if _, got := available(); !slices.Equal(append(slices.Clone(mine[1:]), first), got) {
		t.Errorf("with CPU %d in the second socket: %v", first, got)
	}
}
