//go:build linux

package fastpath

import (
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"

	"slipstream.dev/api/v1alpha1"
)

// skip is a device that the fast path skips, for one of skipReasons. Several devices may have the same sentence, which says why.
type skip struct{ device, reason, sentence string }

// Reasons to skip a device, beside the kinds of observers that a policy can name.
const (
	byFlowtable = "flowtable"
	byXDP       = "xdp"
	byCilium    = "cilium"
	byIPsec     = "ipsec"
	byRoute     = "route-program"
	// The configuration of the device or node, MAC addresses that change too often, and a program that could not be attached.
	byConfiguration, byMoves, byFailure = "unsupported", "addresses-move", "failed"
)

var skipReasons = []string{
	v1alpha1.UnseenByTCX, v1alpha1.UnseenByTC, v1alpha1.UnseenByQueue, v1alpha1.UnseenByNetdev, v1alpha1.UnseenByAccounting,
	byFlowtable, byXDP, byCilium, byIPsec, byRoute, byConfiguration, byMoves, byFailure,
}

func (n *node) skip(device, reason, format string, args ...any) {
	n.skipped = append(n.skipped, skip{device, reason, device + ": " + fmt.Sprintf(format, args...)})
}

// skipAll records that all devices are skipped.
func (n *node) skipAll(reason, why string) {
	n.skipped = append(n.skipped, skip{"all devices", reason, "all devices: " + why})
}

// skipLink records a pod's link with an observer. A flowtable is at the links of many pods, which come and go, so these have one
// sentence.
func (n *node) skipLink(l netlink.Link, other *observer) {
	if other.kind != byFlowtable {
		n.skip(l.Attrs().Name, other.kind, bypassed, other.name)
		return
	}
	n.skipped = append(n.skipped, skip{l.Attrs().Name, other.kind, fmt.Sprintf("links of pods: they have %s, which the fast path would bypass", other.name)})
}

func sentences(skipped []skip) (all []string) {
	for _, s := range skipped {
		if !slices.Contains(all, s.sentence) {
			all = append(all, s.sentence)
		}
	}
	return all
}

// Skipped returns the sentences that say which devices are skipped, and why.
func (f *Fastpath) Skipped() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return sentences(f.skipped)
}

// SkippedBy counts the skipped devices by reason. What concerns all devices counts once.
func (f *Fastpath) SkippedBy() map[string]int {
	f.mu.Lock()
	defer f.mu.Unlock()
	counts := make(map[string]int)
	for _, reason := range skipReasons {
		counts[reason] = 0
	}
	for _, s := range f.skipped {
		counts[s.reason]++
	}
	return counts
}
