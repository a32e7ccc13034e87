package v1alpha1

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
)

// accelerator describes one kind of accelerator to the API. Every field of Accelerator and of PolicyAccelerator
// implements it. internal/accel implements what a kind does on a machine.
type accelerator interface {
	// label names it in a sentence.
	label() string
	// words describes it with its parameters.
	words() string
	// classes returns the classes of devices that it acts on; none if it changes nothing. on returns a copy that
	// acts on other classes.
	classes() []string
	on(classes []string) accelerator
	// ofMachine reports whether it also changes a setting of the whole machine, whatever its classes.
	ofMachine() bool
	// steers reports whether it moves packets to other CPUs.
	steers() bool
	// complete fills in defaults.
	complete(r *reader, path string)
	// check checks it for a path. taken has the settings of the accelerators before it in the same list.
	check(r *reader, path string, on Path, taken *settings)
}

// member is a field of an accelerator.
type member struct {
	name  string
	index []int
	accelerator
}

// members caches the fields of both accelerator types. Listing them is slow, and an agent looks them up often.
var members = map[reflect.Type][]member{
	reflect.TypeFor[Accelerator]():       membersOf(reflect.TypeFor[Accelerator]()),
	reflect.TypeFor[PolicyAccelerator](): membersOf(reflect.TypeFor[PolicyAccelerator]()),
}

func membersOf(t reflect.Type) (all []member) {
	for _, f := range reflect.VisibleFields(t) {
		if f.Anonymous { // its fields are among them
			continue
		}
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		all = append(all, member{name: name, index: f.Index})
	}
	return all
}

// fieldsOf returns the fields that are set. A valid accelerator has exactly one.
func fieldsOf[A Accelerator | PolicyAccelerator](a A) (set []member) {
	v := reflect.ValueOf(a)
	for _, f := range members[v.Type()] {
		if field := v.FieldByIndex(f.index); !field.IsNil() {
			f.accelerator = field.Interface().(accelerator)
			set = append(set, f)
		}
	}
	return set
}

// only returns the field of an accelerator that is set, or zero if none or several are set.
func only[A Accelerator | PolicyAccelerator](a A) member {
	if set := fieldsOf(a); len(set) == 1 {
		return set[0]
	}
	return member{}
}

// Kind returns the name of the only field that is set, such as "rps". It is empty if none or several are set.
func (a PolicyAccelerator) Kind() string { return only(a).name }

// Kind does the same as PolicyAccelerator.Kind.
func (a Accelerator) Kind() string { return only(a).name }

// AcceleratorKinds returns the names of the kinds that a variant can have.
func AcceleratorKinds() (names []string) {
	for _, f := range members[reflect.TypeFor[Accelerator]()] {
		names = append(names, f.name)
	}
	return names
}

// Devices returns the classes of devices that it acts on; none if it changes nothing. The fast path also attaches
// programs to devices of other classes, but only if there is an overlay.
func (a PolicyAccelerator) Devices() []string {
	if is := only(a).accelerator; is != nil {
		return is.classes()
	}
	return nil
}

// Label returns its kind for use in a sentence, such as "the fast path".
func (a Accelerator) Label() string {
	if is := only(a).accelerator; is != nil {
		return is.label()
	}
	return "no accelerator"
}

// Steers reports whether it moves packets to other CPUs, which costs an interrupt for each batch.
func (a Accelerator) Steers() bool {
	is := only(a).accelerator
	return is != nil && is.steers()
}

// String describes the accelerator in words.
func (a Accelerator) String() string {
	if is := only(a).accelerator; is != nil {
		return is.words()
	}
	return "no accelerator"
}

// ForPolicy converts accelerators of a variant to accelerators of a policy.
func ForPolicy(all ...Accelerator) []PolicyAccelerator {
	out := make([]PolicyAccelerator, len(all))
	for i, a := range all {
		out[i].Accelerator = a
	}
	return out
}

// AcceleratorsFor returns the accelerators that act in a pod, or else those that act on a node. Each keeps only its
// classes of devices in that place. An accelerator without any is left out.
func AcceleratorsFor(all []Accelerator, pod bool) []Accelerator { return partOf(all, pod) }

// PartOf does the same for a policy. If an accelerator of pods also changes a setting of the whole machine, the list of
// the node has it too, at the end.
func PartOf(all []PolicyAccelerator, pod bool) []PolicyAccelerator {
	out := partOf(all, pod)
	for _, a := range all {
		if f := only(a); !pod && f.accelerator != nil && f.ofMachine() && slices.Contains(f.classes(), DevicePod) {
			out = append(out, of[PolicyAccelerator](f, f.on(nil)))
		}
	}
	return out
}

func partOf[A Accelerator | PolicyAccelerator](all []A, pod bool) (out []A) {
	for _, a := range all {
		for _, f := range fieldsOf(a) {
			here := slices.DeleteFunc(slices.Clone(f.classes()), func(class string) bool { return (class == DevicePod) != pod })
			if len(here) > 0 {
				out = append(out, of[A](f, f.on(here)))
			}
		}
	}
	return out
}

// of returns an accelerator whose field is set to a kind.
func of[A Accelerator | PolicyAccelerator](f member, is accelerator) (a A) {
	reflect.ValueOf(&a).Elem().FieldByIndex(f.index).Set(reflect.ValueOf(is))
	return a
}

// oneKind checks that an accelerator of a list is of one kind, and fills in its defaults.
func oneKind[A Accelerator | PolicyAccelerator](r *reader, path string, a A) {
	set := fieldsOf(a)
	var all []choice
	for _, f := range members[reflect.TypeFor[A]()] {
		given := slices.ContainsFunc(set, func(s member) bool { return s.name == f.name })
		all = append(all, choice{f.name, given})
	}
	r.exactlyOne(path, all...)
	for _, f := range set {
		f.complete(r, path+"."+f.name)
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
func accelerators[A Accelerator | PolicyAccelerator](r *reader, path string, on Path, list []A) {
	taken := settings{masks: map[string]string{}, flows: map[string]string{}, once: map[string]bool{}}
	for i, a := range list {
		for _, f := range fieldsOf(a) {
			f.check(r, fmt.Sprintf("%s.accelerate[%d].%s", path, i, f.name), on, &taken)
		}
	}
}

// listedOnce checks that a kind is listed once.
func (r *reader) listedOnce(path, label string, taken *settings) {
	if taken.once[label] {
		r.fail(path, "is listed twice")
	}
	taken.once[label] = true
}

func (a *RPS) label() string     { return "RPS" }
func (a *RPS) classes() []string { return a.Devices }
func (a *RPS) ofMachine() bool   { return false }
func (a *RPS) steers() bool      { return true }

func (a *RPS) words() string {
	return fmt.Sprintf("RPS on %s over CPUs %s", strings.Join(a.Devices, ", "), a.CPUs)
}

func (a *RPS) on(classes []string) accelerator {
	out := *a
	out.Devices = classes
	return &out
}

func (a *RPS) complete(*reader, string) {}

func (a *RPS) check(r *reader, path string, on Path, taken *settings) {
	r.devices(path+".devices", on, a.Devices, taken.masks)
	if r.given(path + ".cpus") {
		r.cpus(path+".cpus", a.CPUs)
	}
}

func (a *RFS) label() string     { return "RFS" }
func (a *RFS) classes() []string { return a.Devices }
func (a *RFS) ofMachine() bool   { return true }
func (a *RFS) steers() bool      { return true }

func (a *RFS) words() string {
	if a.CPUs != "" {
		return fmt.Sprintf("RFS on %s, with an RPS mask over CPUs %s", strings.Join(a.Devices, ", "), a.CPUs)
	}
	return "RFS on " + strings.Join(a.Devices, ", ")
}

func (a *RFS) on(classes []string) accelerator {
	out := *a
	out.Devices = classes
	return &out
}

func (a *RFS) complete(r *reader, path string) { fill(r, path+".entries", &a.Entries, 32768) }

func (a *RFS) check(r *reader, path string, on Path, taken *settings) {
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

func (a *Fastpath) label() string            { return "the fast path" }
func (a *Fastpath) classes() []string        { return []string{DeviceOverlay} }
func (a *Fastpath) on([]string) accelerator  { return a }
func (a *Fastpath) ofMachine() bool          { return false }
func (a *Fastpath) steers() bool             { return false }
func (a *Fastpath) complete(*reader, string) {}

func (a *Fastpath) words() string {
	if len(a.UnseenBy) > 0 {
		return "the eBPF fast path of VXLAN, unseen by " + strings.Join(a.UnseenBy, ", ")
	}
	return "the eBPF fast path of VXLAN"
}

// check checks that the path has an overlay, that the fast path is listed once, and that unseenBy has known kinds.
func (a *Fastpath) check(r *reader, path string, on Path, taken *settings) {
	if on != (Path{}) && on.VXLAN == nil && on.Pod == nil && on.Service == nil {
		r.fail(path, "is for pods over VXLAN (the paths vxlan, pod and service), the path is %s", on)
	}
	r.listedOnce(path, a.label(), taken)
	seen := make(map[string]string)
	for i, kind := range a.UnseenBy {
		at := fmt.Sprintf("%s.unseenBy[%d]", path, i)
		r.oneOf(at, kind, UnseenByTCX, UnseenByTC, UnseenByQueue, UnseenByNetdev, UnseenByAccounting)
		r.unique(at, kind, seen)
	}
}

func (a *VF) label() string            { return "virtual functions" }
func (a *VF) words() string            { return "verification of virtual functions" }
func (a *VF) classes() []string        { return nil }
func (a *VF) on([]string) accelerator  { return a }
func (a *VF) ofMachine() bool          { return false }
func (a *VF) steers() bool             { return false }
func (a *VF) complete(*reader, string) {}

func (a *VF) check(r *reader, path string, _ Path, taken *settings) {
	r.listedOnce(path, a.label(), taken)
}
