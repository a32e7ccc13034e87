package accel

import (
	"context"
	"errors"
	"fmt"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel/kernel"
)

// rpsKind is Receive Packet Steering: a mask of CPUs for each receive queue.
type rpsKind struct{}

// Plan implements Kind.
func (rpsKind) Plan(p *Plan, a v1alpha1.PolicyAccelerator) error {
	return masks(p, a.RPS.Devices, a.RPS.CPUs)
}

// masks plans the RPS masks for classes of devices.
func masks(p *Plan, classes []string, spec string) error {
	cpus, err := p.CPUs(spec)
	if err != nil {
		return err
	}
	for _, class := range classes {
		other := p.Queues(class, "rps_cpus", cpus.String(), func(_ Device, was string) (string, error) { return cpus.MaskLike(was), nil })
		if other != "" {
			return Conflict(fmt.Sprintf("wants the RPS mask of class %s on CPUs %s, another accelerator on %s", class, cpus, other))
		}
	}
	return nil
}

// Probe implements Kind.
func (rpsKind) Probe(context.Context) error { return inSysfs(probeRPS) }

// Open implements Kind.
func (rpsKind) Open(Host) Runner { return nil }

// Metrics implements Kind.
func (rpsKind) Metrics() []*Metric { return nil }

// probeRPS looks for the setting on the loopback device, which every machine has.
func probeRPS(queues kernel.Store) error {
	if _, err := queues.Read(kernel.Queue("lo", 0, "rps_cpus")); kernel.Gone(err) {
		return errors.New("this kernel lacks RPS (CONFIG_RPS)")
	}
	return nil
}

func inSysfs(probe func(queues kernel.Store) error) error {
	sysfs, err := kernel.OpenSysfs("")
	if err != nil {
		return err
	}
	defer sysfs.Close()
	return probe(sysfs)
}
