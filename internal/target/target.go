// Package target says what a place is: a node or a pod that a worker can be
// started in. Its sub-packages make places, one a kind of target; whoever runs
// an experiment needs only these words.
package target

import "net/netip"

// Kind of a place.
type Kind string

// A place is a node or a pod on one.
const (
	Node Kind = "node"
	Pod  Kind = "pod"
)

// Place is somewhere that a worker can run.
type Place struct {
	// Name is unique in the target: "node0", "node0/pod3".
	Name string
	Kind Kind
	// Node is the name of the node that the place is, or is on.
	Node string
	// IPv4 and IPv6 are the addresses that its traffic uses.
	IPv4, IPv6 netip.Addr
	// CPUs belong to the node, as a list ("0-3"); empty means all of the machine.
	CPUs string
	// Affinity are the CPUs that processes of the place run on, as a list; empty
	// means those of the node.
	Affinity string
	// IRQCPUs take the node's NIC's interrupts; empty means that the worker finds out.
	IRQCPUs string
}
