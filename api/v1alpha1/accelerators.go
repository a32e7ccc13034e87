package v1alpha1

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
)

// Accelerator is one change to nodes or pods: exactly one field is set.
//
// +kubebuilder:object:generate=true
type Accelerator struct {
	// RPS spreads received packets over CPUs.
	RPS *RPS `json:"rps,omitempty"`
	// RFS moves received packets to the CPU of the application.
	RFS *RFS `json:"rfs,omitempty"`
	// Fastpath is the eBPF fast path. It acts on nodes.
	Fastpath *Fastpath `json:"fastpath,omitempty"`
}

// Classes of devices that an accelerator acts on.
const (
	// DeviceNIC is the device through which the overlay's packets leave a node.
	DeviceNIC = "nic"
	// DeviceOverlay is the VXLAN device.
	DeviceOverlay = "overlay"
	// DeviceHostVeth is the node's end of a pod's veth.
	DeviceHostVeth = "host-veth"
	// DevicePod is the pod's own end: the "+" of rps+ and rfs+.
	DevicePod = "pod"
)

// CPU sets by name; a list as in "0-3,8" is the alternative.
const (
	// CPUsAll is every CPU of the node that is online and not isolated.
	CPUsAll = "all"
	// CPUsAllButIRQ leaves out the CPUs that handle the NIC's interrupts. It is RPS-7 of the paper, whose machines had four
	// CPUs.
	CPUsAllButIRQ = "all-but-irq"
)

// RPS is Receive Packet Steering: the kernel spreads received packets over
// CPUs by flow hash (Documentation/networking/scaling.rst).
//
// +kubebuilder:object:generate=true
type RPS struct {
	// Devices are the classes of devices whose receive queues are steered. The class of the NIC has the links that
	// receive for it too: the members of a bond, the parent of a VLAN, a virtual function.
	//
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=4
	// +kubebuilder:validation:items:Enum=nic;overlay;host-veth;pod
	Devices []string `json:"devices"`
	// CPUs that packets are spread over: all, all-but-irq (those that do not handle the NIC's
	// interrupts) or a list such as 0-3,8.
	//
	// +kubebuilder:validation:MaxLength=4096
	// +kubebuilder:validation:Pattern=`^(all|all-but-irq|[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*)$`
	CPUs string `json:"cpus"`
}

// RFS is Receive Flow Steering: the kernel moves a flow's packets to the CPU
// that last read from its socket.
//
// +kubebuilder:object:generate=true
type RFS struct {
	// Devices are the classes of devices whose receive queues are steered.
	//
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=4
	// +kubebuilder:validation:items:Enum=nic;overlay;host-veth;pod
	Devices []string `json:"devices"`
	// CPUs of an additional RPS mask, for flows that RFS does not know yet. By default there is
	// no mask, and such flows stay on the CPU of the interrupt.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=4096
	// +kubebuilder:validation:Pattern=`^(all|all-but-irq|[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*)$`
	CPUs string `json:"cpus,omitempty"`
	// Entries of the machine's socket flow table, a power of two up to 1048576. Each device has as many again, divided
	// among its receive queues. The tables are kernel memory: 4 bytes an entry for the machine and 12 for each device, at most
	// 2% of the machine's memory for all of them.
	//
	// +optional
	// +kubebuilder:validation:Enum=1;2;4;8;16;32;64;128;256;512;1024;2048;4096;8192;16384;32768;65536;131072;262144;524288;1048576
	Entries int `json:"entries,omitempty"`
}

// Fastpath forwards packets of established connections between pods by eBPF, past the node's bridge, routing and netfilter.
//
// +kubebuilder:object:generate=true
type Fastpath struct {
	// UnseenBy are kinds of observers, shapers and filters that packets may bypass.
	// By default the fast path skips devices that have one.
	//
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=5
	// +kubebuilder:validation:items:Enum=tcx;tc;queue;nftables-netdev;conntrack-accounting
	UnseenBy []string `json:"unseenBy,omitempty"`
}

// Kinds of observers that packets of the fast path may bypass.
const (
	// UnseenByTCX are eBPF programs of tcx, at a VXLAN device, a bridge or the egress of a
	// node's end of a veth.
	UnseenByTCX = "tcx"
	// UnseenByTC are filters of tc (clsact, ingress), eBPF programs among them.
	UnseenByTC = "tc"
	// UnseenByQueue are queueing disciplines, such as those that limit a rate.
	UnseenByQueue = "queue"
	// UnseenByNetdev are chains of nftables at the ingress or egress of a device.
	UnseenByNetdev = "nftables-netdev"
	// UnseenByAccounting are conntrack's counters of each connection
	// (net.netfilter.nf_conntrack_acct).
	UnseenByAccounting = "conntrack-accounting"
)

// accelerator describes one kind of accelerator. Every field of Accelerator and of PolicyAccelerator implements it.
// internal/spec checks what a file says of it, internal/accel implements what it does on a machine.
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
}

// Kind is a field of an accelerator that is set.
type Kind struct {
	Name  string // of the field, such as "rps"
	Field any    // a pointer to RPS, RFS, Fastpath or VF
	index []int
}

func (k Kind) is() accelerator { return k.Field.(accelerator) }

// kinds caches the fields of both accelerator types. Listing them is slow, and an agent looks them up often.
var kinds = map[reflect.Type][]Kind{
	reflect.TypeFor[Accelerator]():       kindsOf(reflect.TypeFor[Accelerator]()),
	reflect.TypeFor[PolicyAccelerator](): kindsOf(reflect.TypeFor[PolicyAccelerator]()),
}

func kindsOf(t reflect.Type) (all []Kind) {
	for _, f := range reflect.VisibleFields(t) {
		if f.Anonymous { // its fields are among them
			continue
		}
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		all = append(all, Kind{Name: name, index: f.Index})
	}
	return all
}

// KindNames returns the names of the kinds that an accelerator can have.
func KindNames[A Accelerator | PolicyAccelerator]() (names []string) {
	for _, k := range kinds[reflect.TypeFor[A]()] {
		names = append(names, k.Name)
	}
	return names
}

// Kinds returns the fields that are set. A valid accelerator has exactly one.
func Kinds[A Accelerator | PolicyAccelerator](a A) (set []Kind) {
	v := reflect.ValueOf(a)
	for _, k := range kinds[v.Type()] {
		if field := v.FieldByIndex(k.index); !field.IsNil() {
			k.Field = field.Interface()
			set = append(set, k)
		}
	}
	return set
}

// only returns the field of an accelerator that is set, and false if none or several are set.
func only[A Accelerator | PolicyAccelerator](a A) (Kind, bool) {
	if set := Kinds(a); len(set) == 1 {
		return set[0], true
	}
	return Kind{}, false
}

// Kind returns the name of the only field that is set, such as "rps". It is empty if none or several are set.
func (a PolicyAccelerator) Kind() string {
	k, _ := only(a)
	return k.Name
}

// Kind does the same as PolicyAccelerator.Kind.
func (a Accelerator) Kind() string {
	k, _ := only(a)
	return k.Name
}

// Devices returns the classes of devices that it acts on; none if it changes nothing. The fast path also attaches
// programs to devices of other classes, but only if there is an overlay.
func (a PolicyAccelerator) Devices() []string {
	if k, ok := only(a); ok {
		return k.is().classes()
	}
	return nil
}

// Label returns its kind for use in a sentence, such as "the fast path".
func (a Accelerator) Label() string {
	if k, ok := only(a); ok {
		return k.is().label()
	}
	return "no accelerator"
}

// Steers reports whether it moves packets to other CPUs, which costs an interrupt for each batch.
func (a Accelerator) Steers() bool {
	k, ok := only(a)
	return ok && k.is().steers()
}

// String describes the accelerator in words.
func (a Accelerator) String() string {
	if k, ok := only(a); ok {
		return k.is().words()
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
		if k, ok := only(a); !pod && ok && k.is().ofMachine() && slices.Contains(k.is().classes(), DevicePod) {
			out = append(out, of[PolicyAccelerator](k, k.is().on(nil)))
		}
	}
	return out
}

func partOf[A Accelerator | PolicyAccelerator](all []A, pod bool) (out []A) {
	for _, a := range all {
		for _, k := range Kinds(a) {
			here := slices.DeleteFunc(slices.Clone(k.is().classes()), func(class string) bool { return (class == DevicePod) != pod })
			if len(here) > 0 {
				out = append(out, of[A](k, k.is().on(here)))
			}
		}
	}
	return out
}

// of returns an accelerator whose field is set to a kind.
func of[A Accelerator | PolicyAccelerator](k Kind, is accelerator) (a A) {
	reflect.ValueOf(&a).Elem().FieldByIndex(k.index).Set(reflect.ValueOf(is))
	return a
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

func (a *Fastpath) label() string           { return "the fast path" }
func (a *Fastpath) classes() []string       { return []string{DeviceNIC, DeviceOverlay} }
func (a *Fastpath) on([]string) accelerator { return a }
func (a *Fastpath) ofMachine() bool         { return false }
func (a *Fastpath) steers() bool            { return false }

func (a *Fastpath) words() string {
	if len(a.UnseenBy) > 0 {
		return "the eBPF fast path, unseen by " + strings.Join(a.UnseenBy, ", ")
	}
	return "the eBPF fast path"
}

func (a *VF) label() string           { return "virtual functions" }
func (a *VF) words() string           { return "verification of virtual functions" }
func (a *VF) classes() []string       { return nil }
func (a *VF) on([]string) accelerator { return a }
func (a *VF) ofMachine() bool         { return false }
func (a *VF) steers() bool            { return false }
