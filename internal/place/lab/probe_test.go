//go:build linux

package lab

import (
	"path/filepath"
	"strings"
	"testing"

	"slipstream.dev/internal/place/lab/overlay"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
)

// TestLacksOnNode checks that a machine whose kernel has no br_netfilter is told which module it lacks, but only for pods on a
// bridge.
func TestLacksOnNode(t *testing.T) {
	sysctls := t.TempDir()
	for _, shape := range []string{spec.ShapeFlannel, overlay.ShapeRouted, overlay.ShapeBridge} {
		if err := lacksOnNode(sysctls, shape); err == nil || !strings.Contains(err.Error(), "modprobe -a br_netfilter") {
			t.Errorf("shape %s: %v", shape, err)
		}
	}
	if err := lacksOnNode(sysctls, spec.ShapeCalico); err != nil {
		t.Errorf("pods that are on no bridge: %v", err)
	}
	testenv.WriteFile(t, filepath.Join(sysctls, "net/bridge/bridge-nf-call-iptables"), "0\n")
	if err := lacksOnNode(sysctls, spec.ShapeFlannel); err != nil {
		t.Errorf("with br_netfilter: %v", err)
	}
}
