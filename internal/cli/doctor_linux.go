package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"slipstream.dev/internal/doctor"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/lab"
	"slipstream.dev/internal/place/lab/balancer"
	"slipstream.dev/internal/place/lab/overlay"
	"slipstream.dev/internal/place/lab/policies"
	"slipstream.dev/internal/place/lab/services"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/worker"
)

// readFactsHere examines this machine.
func readFactsHere(ctx context.Context, window time.Duration, probe bool) (doctor.Facts, error) {
	f, err := doctor.ReadFacts(ctx, window, probe)
	if err != nil {
		return f, fmt.Errorf("look at this machine: %w", err)
	}
	return f, nil
}

// labParts returns the features that an experiment may ask of a lab, each as a
// configuration to try.
func labParts() map[string]lab.Config {
	parts := make(map[string]lab.Config)
	for _, shape := range []string{overlay.ShapeVXLANFlow, overlay.ShapeEBPF, overlay.ShapeUDP, overlay.ShapeWeave} {
		parts["an overlay of the shape "+shape] = lab.Config{Shape: shape}
	}
	for _, mode := range []string{spec.ServiceIPTables, spec.ServiceNFTables, spec.ServiceEBPF} {
		parts["services in mode "+mode] = lab.Config{Services: &services.Config{Mode: mode, Transports: []place.Transport{{IP: 4, Protocol: "tcp"}}}}
	}
	for _, mode := range []string{spec.PolicyIPTables, spec.PolicyIPSet, spec.PolicyNFTables, spec.PolicyEBPF} {
		parts["network policies in mode "+mode] = lab.Config{Shape: spec.ShapeFlannel, Policies: &policies.Config{Mode: mode}}
	}
	return parts
}

// examineLab tries what a lab needs, and with --probe examines one.
func (o doctorOptions) examineLab(ctx context.Context, p Process, d *diagnosis) error {
	if err := labWorks(lab.Config{Shape: spec.ShapeFlannel}); err != nil {
		d.Findings = append(d.Findings, doctor.LabLacks("a lab", false, err))
		return nil
	}
	for what, config := range labParts() {
		if err := labWorks(config); err != nil {
			d.Findings = append(d.Findings, doctor.LabLacks(what, true, err))
		}
	}
	if err := (&balancer.Config{Proxy: spec.ProxyHAProxy}).Choose(balancerArgv); err != nil {
		d.Findings = append(d.Findings, doctor.LabLacks("a balancer with the proxy haproxy", true, err))
	}
	d.Facts = append(d.Facts, fact{"", doctor.Evidence{From: "a lab", Value: "network namespaces, veth, bridge, VXLAN, traffic control and nftables work"}})
	if !o.probe {
		return nil
	}
	release, err := claimMachine(ctx, p)
	if err != nil {
		return err
	}
	defer release()
	l, err := lab.Up(ctx, lab.Config{
		Name: "doctor", Nodes: 2, NIC: spec.NIC{Offload: spec.OffloadFull, MTU: 1500}, Shape: spec.ShapeFlannel,
	}, lab.Options{Log: newLog(p)})
	if err != nil {
		d.Findings = append(d.Findings, doctor.LabLacks("a lab", false, err))
		return ctx.Err()
	}
	return errors.Join(o.probeLab(ctx, d, l), l.Down(context.WithoutCancel(ctx)))
}

// labWorks returns an error that says why a lab does not work here.
func labWorks(c lab.Config) error {
	if err := asRoot("a lab creates network namespaces"); err != nil {
		return err
	}
	return lab.Lacks(c)
}

// probeLab checks the nodes of a lab, and the paths between them.
func (o doctorOptions) probeLab(ctx context.Context, d *diagnosis, l *lab.Lab) error {
	var all []*machine
	for _, p := range l.Places() {
		if p.Kind != place.Node {
			continue
		}
		c, err := worker.Spawn(ctx, l.In(p), os.Stderr)
		if err != nil {
			return err
		}
		defer c.Close()
		all = append(all, newMachine(p, c))
	}
	return o.examineMachines(ctx, d, all, exchangeWithin(labLead))
}
