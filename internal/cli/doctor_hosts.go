package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"slipstream.dev/internal/doctor"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/hosts"
	"slipstream.dev/internal/plain"
	"slipstream.dev/internal/spec"
)

// examineHosts checks hosts, and the paths between them.
func (o doctorOptions) examineHosts(ctx context.Context, p Process, d *diagnosis, names string) (err error) {
	config := hosts.Config{
		Hosts: parseHosts(names), Binaries: o.hosts.binaries, Ask: p.interactive(), ReadOnly: true,
		Note: func(text string) { fmt.Fprintln(p.Err, plain.Line(text)) },
	}
	for i, h := range config.Hosts {
		if h.Name == "" || slices.ContainsFunc(config.Hosts[:i], func(other spec.Host) bool { return other.Name == h.Name }) {
			return usage(fmt.Errorf("hosts:%s: must be names of hosts with commas between them, each once", names))
		}
	}
	all, err := hosts.New(config)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, all.Close(context.WithoutCancel(ctx))) }()
	found, err := all.Survey(ctx)
	if err != nil {
		return err
	}
	fit := len(found)
	for _, f := range found {
		if f.Missing != nil {
			d.Findings = append(d.Findings, doctor.HostUnfit(f.Host, f.Missing))
			all.LeaveOut(f.Host)
			fit--
		}
	}
	if fit == 0 {
		return nil
	}
	if err := all.Up(ctx); err != nil {
		return err
	}
	return o.examineUp(ctx, d, all)
}

// examineUp examines hosts on which workers can be started.
func (o doctorOptions) examineUp(ctx context.Context, d *diagnosis, up *hosts.Hosts) error {
	var all []*machine
	for _, p := range up.Places() {
		c, err := up.Worker(ctx, p, place.ForControl)
		if err != nil {
			return err
		}
		defer c.Close()
		all = append(all, newMachine(p, c))
	}
	return o.examineMachines(ctx, d, all, func(ctx context.Context, client, server *machine, by place.Transport) error {
		return up.Reach(ctx, hosts.Path{Client: client.name, Server: server.name, Address: spec.AddressNative, Transport: by})
	})
}
