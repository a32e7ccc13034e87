package v1alpha1

import (
	"fmt"
	"slices"
	"strings"
)

// String is the accelerator in words.
func (a Accelerator) String() string {
	switch {
	case a.RPS != nil:
		return fmt.Sprintf("RPS on %s over CPUs %s", strings.Join(a.RPS.Devices, ", "), a.RPS.CPUs)
	case a.RFS != nil && a.RFS.CPUs != "":
		return fmt.Sprintf("RFS on %s, with an RPS mask over CPUs %s", strings.Join(a.RFS.Devices, ", "), a.RFS.CPUs)
	case a.RFS != nil:
		return "RFS on " + strings.Join(a.RFS.Devices, ", ")
	}
	if a.Fastpath != nil && len(a.Fastpath.UnseenBy) > 0 {
		return "the eBPF fast path of VXLAN, unseen by " + strings.Join(a.Fastpath.UnseenBy, ", ")
	}
	if a.Fastpath != nil {
		return "the eBPF fast path of VXLAN"
	}
	return "no accelerator"
}

// AcceleratorsFor is the part of accelerators that acts in a pod, or that on a
// node: the class of their devices decides, and what is left with none is left
// out.
func AcceleratorsFor(all []Accelerator, pod bool) []Accelerator {
	here := func(devices []string) []string {
		return slices.DeleteFunc(slices.Clone(devices), func(class string) bool { return (class == DevicePod) != pod })
	}
	var out []Accelerator
	for _, a := range all {
		if a.RPS != nil {
			rps := *a.RPS
			if rps.Devices = here(rps.Devices); len(rps.Devices) > 0 {
				out = append(out, Accelerator{RPS: &rps})
			}
		}
		if a.RFS != nil {
			rfs := *a.RFS
			if rfs.Devices = here(rfs.Devices); len(rfs.Devices) > 0 {
				out = append(out, Accelerator{RFS: &rfs})
			}
		}
		if a.Fastpath != nil && !pod {
			out = append(out, a)
		}
	}
	return out
}
