package accel

import (
	"context"
	"errors"
	"strings"
	"sync"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel/fastpath"
)

// Probe returns a function that says why this machine cannot apply an accelerator; nil if it can. It
// changes no setting; to probe the fast path takes temporary network namespaces.
func Probe(ctx context.Context) func(v1alpha1.Accelerator) error {
	fast := sync.OnceValue(func() error { return brief(Forbidden(fastpath.Probe(ctx))) })
	return func(a v1alpha1.Accelerator) error {
		if a.Fastpath != nil {
			return fast()
		}
		root, err := MountSys()
		if err != nil {
			return Forbidden(err)
		}
		defer root.Close()
		return probeRPS(sysfs{root}, sysctls{"/proc"}, a)
	}
}

// probeRPS looks for the settings of RPS and RFS; of devices, every machine has the loopback device.
func probeRPS(queues, machine store, a v1alpha1.Accelerator) error {
	const queue = "class/net/lo/queues/rx-0/"
	if _, err := queues.read(queue + "rps_cpus"); gone(err) {
		return errors.New("this kernel lacks RPS (CONFIG_RPS)")
	}
	if a.RFS == nil {
		return nil
	}
	if _, err := machine.read(flowTable); err != nil {
		return Forbidden(err)
	}
	return nil
}

// brief reduces an error of the probe to what the kernel lacks, if that is what went wrong.
func brief(err error) error {
	if err == nil {
		return nil
	}
	const lacks = "this kernel lacks "
	if _, what, ok := strings.Cut(err.Error(), lacks); ok {
		return errors.New(lacks + what)
	}
	return err
}
