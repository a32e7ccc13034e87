package accel

import (
	"context"
	"errors"
	"strings"
	"sync"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel/fastpath"
	"slipstream.dev/internal/accel/kernel"
)

// Probe returns a function that says why this machine cannot apply an accelerator; nil if it can. It
// changes no setting; to probe the fast path takes temporary network namespaces.
func Probe(ctx context.Context) func(v1alpha1.Accelerator) error {
	fast := sync.OnceValue(func() error { return brief(Forbidden(fastpath.Probe(ctx))) })
	return func(a v1alpha1.Accelerator) error {
		if a.Fastpath != nil {
			return fast()
		}
		sysfs, err := kernel.OpenSysfs("")
		if err != nil {
			return Forbidden(err)
		}
		defer sysfs.Close()
		return probeRPS(sysfs, kernel.Sysctls{Proc: "/proc"}, a)
	}
}

// probeRPS looks for the settings of RPS and RFS; of devices, every machine has the loopback device.
func probeRPS(queues, machine kernel.Store, a v1alpha1.Accelerator) error {
	if _, err := queues.Read(kernel.Queue("lo", 0, "rps_cpus")); kernel.Gone(err) {
		return errors.New("this kernel lacks RPS (CONFIG_RPS)")
	}
	if a.RFS == nil {
		return nil
	}
	if _, err := machine.Read(kernel.FlowTable); err != nil {
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
