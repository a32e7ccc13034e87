package spec

import (
	"fmt"
	"slices"

	"slipstream.dev/api/v1alpha1"
)

// accelerator fills in and checks what a file says of one kind of accelerator.
type accelerator interface {
	// complete fills in defaults.
	complete(r *reader, path string)
	// check checks it for a path. taken has the settings of the accelerators before it in the same list.
	check(r *reader, path string, on Path, taken *settings)
}

// The kinds of accelerators.
type (
	rps      v1alpha1.RPS
	rfs      v1alpha1.RFS
	fastpath v1alpha1.Fastpath
	vf       v1alpha1.VF
)

// acceleratorOf returns the checks of a field of an accelerator.
func acceleratorOf(field any) accelerator {
	switch field := field.(type) {
	case *v1alpha1.RPS:
		return (*rps)(field)
	case *v1alpha1.RFS:
		return (*rfs)(field)
	case *v1alpha1.Fastpath:
		return (*fastpath)(field)
	case *v1alpha1.VF:
		return (*vf)(field)
	}
	panic(fmt.Sprintf("accelerator %T has no checks", field))
}

// oneKind checks that an accelerator of a list is of one kind, and fills in its defaults.
func oneKind[A v1alpha1.Accelerator | v1alpha1.PolicyAccelerator](r *reader, path string, a A) {
	set := v1alpha1.Kinds(a)
	var all []choice
	for _, name := range v1alpha1.KindNames[A]() {
		all = append(all, choice{name, slices.ContainsFunc(set, func(k v1alpha1.Kind) bool { return k.Name == name })})
	}
	r.exactlyOne(path, all...)
	for _, k := range set {
		acceleratorOf(k.Field).complete(r, path+"."+k.Name)
	}
}

// settings records what the accelerators of a list have written so far: the masks and flow counts of classes of
// devices, with the field that writes them, and the size of the flow table. once has the kinds that may be listed only
// once, and are listed.
type settings struct {
	masks, flows map[string]string
	entries      int
	once         map[string]bool
}

// accelerators checks the accelerators of one variant, alone and together: no two of them may write the same setting.
func accelerators[A v1alpha1.Accelerator | v1alpha1.PolicyAccelerator](r *reader, path string, on Path, list []A) {
	taken := settings{masks: map[string]string{}, flows: map[string]string{}, once: map[string]bool{}}
	for i, a := range list {
		for _, k := range v1alpha1.Kinds(a) {
			acceleratorOf(k.Field).check(r, fmt.Sprintf("%s.accelerate[%d].%s", path, i, k.Name), on, &taken)
		}
	}
}

// listedOnce checks that a kind is listed once.
func (r *reader) listedOnce(path, kind string, taken *settings) {
	if taken.once[kind] {
		r.fail(path, "is listed twice")
	}
	taken.once[kind] = true
}

func (a *rps) complete(*reader, string) {}

func (a *rps) check(r *reader, path string, on Path, taken *settings) {
	r.devices(path+".devices", on, a.Devices, taken.masks)
	if r.given(path + ".cpus") {
		r.cpus(path+".cpus", a.CPUs)
	}
}

func (a *rfs) complete(r *reader, path string) { fill(r, path+".entries", &a.Entries, 32768) }

func (a *rfs) check(r *reader, path string, on Path, taken *settings) {
	r.devices(path+".devices", on, a.Devices, taken.flows)
	if r.set(path + ".cpus") {
		r.cpus(path+".cpus", a.CPUs)
		for i, d := range a.Devices {
			if first, ok := taken.masks[d]; ok {
				r.fail(fmt.Sprintf("%s.devices[%d]", path, i), "%s already has a mask from %s", d, first)
			}
			taken.masks[d] = path
		}
	}
	r.entries(path+".entries", a.Entries)
	if taken.entries != 0 && a.Entries != taken.entries {
		r.fail(path+".entries", "must be %d, as set before in this variant: the machine has only one table", taken.entries)
	}
	taken.entries = a.Entries
}

func (a *fastpath) complete(*reader, string) {}

// check checks that the path is one between pods that the node's own stack forwards, that the fast path is listed once, and that unseenBy has known kinds.
func (a *fastpath) check(r *reader, path string, on Path, taken *settings) {
	if on != (Path{}) && on.VXLAN == nil && on.Routed == nil && on.Bridge == nil && on.Pod == nil && on.Service == nil {
		r.fail(path, "is for the paths vxlan, routed, bridge, pod and service, the path is %s", on)
	}
	r.listedOnce(path, "fastpath", taken)
	seen := make(map[string]string)
	for i, kind := range a.UnseenBy {
		at := fmt.Sprintf("%s.unseenBy[%d]", path, i)
		r.oneOf(at, kind, v1alpha1.UnseenByTCX, v1alpha1.UnseenByTC, v1alpha1.UnseenByQueue, v1alpha1.UnseenByNetdev, v1alpha1.UnseenByAccounting)
		r.unique(at, kind, seen)
	}
}

func (a *vf) complete(*reader, string) {}

func (a *vf) check(r *reader, path string, _ Path, taken *settings) { r.listedOnce(path, "vf", taken) }
