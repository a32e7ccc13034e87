package accel

import (
	"context"
	"errors"
	"maps"
	"strings"
	"sync"

	"slipstream.dev/api/v1alpha1"
)

// Probe returns a function that returns nil, or why this machine cannot apply an accelerator. The function changes no settings;
// for the fast path it makes temporary network namespaces.
func Probe(ctx context.Context) func(v1alpha1.Accelerator) error {
	probe := probeOnce(ctx, Kinds())
	return func(a v1alpha1.Accelerator) error { return brief(Forbidden(probe(a))) }
}

// ProbeRunners returns a function that returns nil, or why this machine cannot start the runners of accelerators. It does not
// probe settings.
func ProbeRunners(ctx context.Context) func([]v1alpha1.Accelerator) error {
	kinds := Kinds()
	maps.DeleteFunc(kinds, func(_ string, k Kind) bool { return k.Open(Host{}) == nil })
	probe := probeOnce(ctx, kinds)
	return func(all []v1alpha1.Accelerator) error {
		for _, a := range all {
			if kinds[a.Kind()] == nil {
				continue
			}
			if err := probe(a); err != nil {
				return err
			}
		}
		return nil
	}
}

// probeOnce probes each kind at most once.
func probeOnce(ctx context.Context, kinds map[string]Kind) func(v1alpha1.Accelerator) error {
	probes := make(map[string]func() error)
	for name, k := range kinds {
		probes[name] = sync.OnceValue(func() error { return k.Probe(ctx) })
	}
	return func(a v1alpha1.Accelerator) error {
		if probe := probes[a.Kind()]; probe != nil {
			return probe()
		}
		_, err := kindOf(kinds, v1alpha1.ForPolicy(a)[0])
		return err
	}
}

// brief reduces an error to the kernel feature that is missing, if that is the cause.
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
