//go:build linux

package programs

import (
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// Policies holds the programs that apply network policies to a node's pods, and their maps: see policy.c. Attached programs
// outlive Close, until their device is removed.
type Policies struct {
	objects policyObjects
}

// LoadPolicies loads the programs. Their maps have room for this many prefixes with an identity, and for this many allowed
// pairs of a pod and an identity.
func LoadPolicies(addresses, allowed int) (*Policies, error) {
	p := new(Policies)
	if err := loadSized(loadPolicy, map[string]int{policyMapIdentities: addresses, policyMapAllowed: allowed}, &p.objects); err != nil {
		return nil, fmt.Errorf("load programs of network policies: %w", err)
	}
	return p, nil
}

// AddPod adds a prefix of a pod on the node. pod is its number for Allow. From then on, packets to it are dropped unless they
// are allowed.
func (p *Policies) AddPod(pod uint32, addresses netip.Prefix) error {
	if err := p.objects.Pods.Put(prefixOf(addresses), pod); err != nil {
		return fmt.Errorf("add pod %s: %w", addresses, err)
	}
	return nil
}

// Identify gives a prefix an identity.
func (p *Policies) Identify(addresses netip.Prefix, identity uint32) error {
	if err := p.objects.Identities.Put(prefixOf(addresses), identity); err != nil {
		return fmt.Errorf("add identity %d of %s: %w", identity, addresses, err)
	}
	return nil
}

// Allow lets packets from addresses with an identity reach a pod.
func (p *Policies) Allow(pod, identity uint32) error {
	if err := p.objects.Allowed.Put(policyEntry{Pod: pod, Identity: identity}, uint8(1)); err != nil {
		return fmt.Errorf("allow identity %d at pod %d: %w", identity, pod, err)
	}
	return nil
}

// AttachFromPod attaches the program for packets from a pod to the ingress of its veth on the node, given by its index in the
// thread's network namespace. It runs before tc filters.
func (p *Policies) AttachFromPod(veth int) error {
	return attachTCX(veth, p.objects.PolicyFromPod, ebpf.AttachTCXIngress)
}

// AttachToPod attaches the program for packets to pods to the egress of a pod's veth, or to the ingress of a NIC.
func (p *Policies) AttachToPod(device int, at ebpf.AttachType) error {
	return attachTCX(device, p.objects.PolicyToPod, at)
}

// attachTCX attaches a program until the device is removed.
func attachTCX(device int, program *ebpf.Program, at ebpf.AttachType) error {
	if err := link.RawAttachProgram(link.RawAttachProgramOptions{Target: device, Program: program, Attach: at}); err != nil {
		return fmt.Errorf("attach eBPF program to device %d (tcx, Linux 6.6 or later): %w", device, err)
	}
	return nil
}

// Close closes programs and maps.
func (p *Policies) Close() error { return p.objects.Close() }
