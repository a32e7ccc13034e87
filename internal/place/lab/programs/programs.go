//go:build linux

// Package programs loads the eBPF programs of the lab: one that resets flow hashes on a veth that stands for a wire, and those
// for host routing as in Cilium, socket-level Services, and network policies. place/lab attaches them, and fills their maps
// through this package. The C sources are in bpf/lab.
package programs

import (
	"fmt"

	"github.com/cilium/ebpf"

	"slipstream.dev/internal/process"
)

//go:generate bpf2go -tags linux -target bpfel wire ../../../../bpf/lab/wire.c -- -O2 -fno-strict-aliasing -Wall -Wextra -Werror -I../../../../bpf -I../../../../bpf/headers
//go:generate bpf2go -tags linux -target bpfel hostrouting ../../../../bpf/lab/hostrouting.c -- -O2 -fno-strict-aliasing -Wall -Wextra -Werror -I../../../../bpf -I../../../../bpf/headers
//go:generate bpf2go -tags linux -target bpfel policy ../../../../bpf/lab/policy.c -- -O2 -fno-strict-aliasing -Wall -Wextra -Werror -I../../../../bpf -I../../../../bpf/headers
//go:generate bpf2go -tags linux -target bpfel service ../../../../bpf/lab/service.c -- -O2 -fno-strict-aliasing -Wall -Wextra -Werror -I../../../../bpf -I../../../../bpf/headers

// LoadRehash loads the program that replaces the sender's flow hash with the one that a NIC would compute. The caller attaches
// it to the egress of a veth that stands for a wire, and closes it.
func LoadRehash() (*ebpf.Program, error) {
	var objects wireObjects
	if err := loadWireObjects(&objects, nil); err != nil {
		return nil, fmt.Errorf("load program of the wire: %w", err)
	}
	return objects.Rehash, nil
}

// loadSized loads programs into objects, which bpf2go has generated. entries holds the sizes of maps, by name.
func loadSized(read func() (*ebpf.CollectionSpec, error), entries map[string]int, objects any) error {
	explain := process.Loading()
	spec, err := read()
	if err != nil {
		return err
	}
	for name, n := range entries {
		spec.Maps[name].MaxEntries = uint32(n)
	}
	return explain(spec.LoadAndAssign(objects, nil))
}
