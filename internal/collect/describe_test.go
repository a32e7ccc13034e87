//go:build linux

package collect

import (
	"context"
	"errors"
	"os"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/record"
)

func TestDescribe(t *testing.T) {
	got, err := Describe(t.Context(), os.DirFS("testdata/place/proc"), os.DirFS("testdata/place/sys"))
	if err != nil {
		t.Fatal(err)
	}
	if got.Arch == "" || len(got.Links) == 0 {
		t.Errorf("architecture %q, links %v", got.Arch, got.Links)
	}
	got.Arch, got.Links = "", nil // this machine's own
	want := record.Node{
		Boot:         "9f6b1c52-3f7e-4b55-9d37-6e1f6f1a7b11",
		Kernel:       "6.6.31-arm64",
		Distribution: "Debian GNU/Linux 12 (bookworm)",
		CPUModel:     "implementer 0x41 part 0xd0c",
		CPUs:         "0-5,8",
		Isolated:     "4-5",
		Governor:     "performance",
		Clock:        "arch_sys_counter",
		MemoryByte:   8133312 << 10,
		Sysctls:      map[string]string{"net.ipv4.tcp_rmem": "4096 131072 6291456", "net.core.rps_sock_flow_entries": "32768"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestDescribeHypervisor(t *testing.T) {
	proc := fstest.MapFS{
		bootID:                  {Data: []byte("x\n")},
		"sys/kernel/osrelease":  {Data: []byte("6.1\n")},
		"cpuinfo":               {Data: []byte("model name\t: A\nflags\t\t: fpu hypervisor lahf_lm\n\nmodel name\t: B\nflags\t\t: fpu\n")},
		"sys/net/core/rmem_max": {Data: []byte("212992\n")},
	}
	n, err := Describe(t.Context(), proc, fstest.MapFS{})
	if err != nil {
		t.Fatal(err)
	}
	if !n.Hypervisor || n.CPUModel != "A" {
		t.Errorf("hypervisor %v, model %q", n.Hypervisor, n.CPUModel)
	}
}

func TestDescribeErrors(t *testing.T) {
	for _, only := range []string{bootID, "sys/kernel/osrelease"} {
		if _, err := Describe(t.Context(), fstest.MapFS{only: {Data: []byte("x\n")}}, fstest.MapFS{}); err == nil {
			t.Errorf("no error with nothing but %s", only)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := Describe(ctx, os.DirFS("testdata/place/proc"), fstest.MapFS{})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want %v", err, context.Canceled)
	}
}
