//go:build !linux

package cli

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/spf13/cobra"

	"slipstream.dev/internal/doctor"
	"slipstream.dev/internal/spec"
)

// linuxCommands returns stand-ins for the commands that need namespaces, sysfs or
// netlink. They only say what is missing on this system.
func linuxCommands(p Process) []*cobra.Command {
	all := workerCommands(p)
	for _, c := range []struct{ use, short, needs string }{
		{"lab", "Create a lab of network namespaces, and run commands in it", "network namespaces"},
		{"accel", "Plan, apply, show and revert accelerators on this machine", "settings of the Linux kernel"},
		{"agent", "Keep the accelerators of policies applied on this node", "settings of the Linux kernel"},
		{"capture", "Print what this machine can see of its NICs and their virtual functions", "sysfs and ethtool"},
	} {
		all = append(all, &cobra.Command{
			Use: c.use, Short: c.short + " (Linux)", DisableFlagParsing: true,
			RunE: func(*cobra.Command, []string) error {
				return usage(fmt.Errorf("slipstream %s needs Linux, because it uses %s; this is %s", c.use, c.needs, runtime.GOOS))
			},
		})
	}
	return all
}

func openLab(context.Context, Process, *spec.Experiment) (*site, error) {
	return nil, usage(errors.New("a lab needs Linux, because it consists of network namespaces; this is " + runtime.GOOS + ": run it on Linux, or run in a cluster from here (slipstream run kubernetes)"))
}

func readFactsHere(context.Context, time.Duration, bool) (f doctor.Facts, err error) {
	return f, usage(errors.New("doctor looks at Linux machines; this is " + runtime.GOOS + ": name others (slipstream doctor hosts:HOST,...)"))
}

func (o doctorOptions) examineLab(context.Context, Process, *diagnosis) error {
	return usage(errors.New("a lab needs Linux, because it consists of network namespaces; this is " + runtime.GOOS))
}

func begin() error { return nil }
