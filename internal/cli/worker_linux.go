package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"slipstream.dev/internal/accel"
	"slipstream.dev/internal/process"
	"slipstream.dev/internal/worker"
)

// journalDir keeps what accelerators changed. It is on a file system that a
// restart of the machine clears, as it clears the settings.
const journalDir = "/run/slipstream/journal"

// reachTime is how long a service may take to lead somewhere.
const reachTime = 30 * time.Second

func workerCommand(p Process) *cobra.Command {
	var hold, node bool
	var listen, reach, pod string
	c := &cobra.Command{
		Use:    "worker",
		Short:  "Act in this place for a controller (what targets start; not for people)",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			switch {
			case hold:
				h := worker.Hold{Listen: listen, Log: newLog(p)}
				if node {
					h.JournalDir = journalDir
				}
				return h.Run(c.Context())
			case reach != "":
				ctx, cancel := context.WithTimeout(c.Context(), reachTime)
				defer cancel()
				return worker.Reach(ctx, reach)
			case pod != "":
				if err := enterPod(pod); err != nil {
					return err
				}
			}
			if err := process.Quiet(); err != nil {
				return err
			}
			process.CollectAtRest()
			// A worker whose controller died must not die of telling it: it has
			// things to put right. Go ends a process that writes to a closed
			// standard output unless told otherwise.
			signal.Ignore(syscall.SIGPIPE)
			// Ctrl-C in a terminal reaches the controller's whole process group;
			// a worker ends when its stream does, after it has put things right.
			return worker.Serve(context.WithoutCancel(c.Context()), p.In, p.Out, worker.Options{JournalDir: journalDir, Log: newLog(p)})
		},
	}
	f := c.Flags()
	f.BoolVar(&hold, "hold", false, "only keep the container there, until SIGTERM")
	f.BoolVar(&node, "node", false, "with --hold: restore what workers that died have left on this node")
	f.StringVar(&listen, "listen", "", "with --hold: take connections here, and close them")
	f.StringVar(&reach, "reach", "", "wait until this address takes connections, and exit")
	f.StringVar(&pod, "pod", "", "act in the network namespace of the pod with this IP, from its node's side")
	return c
}

// enterPod starts this program again in a pod's network namespace, and returns nil
// once it is there.
func enterPod(address string) error {
	ip, err := netip.ParseAddr(address)
	if err != nil {
		return fmt.Errorf("enter pod: %w", err)
	}
	here, err := net.InterfaceAddrs()
	if err != nil {
		return fmt.Errorf("enter pod: list addresses: %w", err)
	}
	if slices.ContainsFunc(here, func(a net.Addr) bool {
		prefix, err := netip.ParsePrefix(a.String())
		return err == nil && prefix.Addr().Unmap() == ip
	}) {
		return nil
	}
	namespace, err := accel.FindAddress("/proc", []string{accel.NetnsDir}, ip)
	if err != nil {
		return err
	}
	defer namespace.Close()
	// Of a whole process, which has threads, only a new program changes the
	// namespace; this one is to be replaced in any case.
	if err := namespace.Do(process.Quiet); err != nil {
		return err
	}
	return errors.New("enter pod: the environment is a worker's already, before it has begun")
}
