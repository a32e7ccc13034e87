//go:build linux

package bpf

import (
	"errors"
	"os"
	"testing"

	"github.com/cilium/ebpf"
)

func TestFastpathLoads(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	f, err := LoadFastpath()
	if err != nil {
		var ve *ebpf.VerifierError
		if errors.As(err, &ve) {
			t.Logf("%+v", ve)
		}
		t.Fatal(err)
	}
	defer f.Close()
	if n := f.objects.Whys.MaxEntries(); len(reasons) != int(n) {
		t.Fatalf("there are names for %d reasons, want %d", len(reasons), n)
	}
}
