package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/accel"
	"slipstream.dev/internal/process"
	"slipstream.dev/internal/worker"
)

// journalDir holds the original values of the settings that accelerators changed. A reboot clears its file system, as
// it clears the settings.
const journalDir = "/run/slipstream/journal"

func workerCommand(p Process) *cobra.Command {
	var hold, node, remote, control bool
	var listen, reach, pod, claim string
	var within time.Duration
	c := &cobra.Command{
		Use:    "worker",
		Short:  "Measure and apply accelerators for a controller (started by targets)",
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
				ctx, cancel := context.WithTimeout(c.Context(), within)
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
			in := p.Stdin
			if remote {
				// A worker may have to end while its input is still open. Close interrupts a pending read
				// only if the file is in non-blocking mode.
				fd := p.Stdin.Fd()
				if err := unix.SetNonblock(int(fd), true); err != nil {
					return fmt.Errorf("prepare the input: %w", err)
				}
				in = os.NewFile(fd, "standard input")
			}
			ctx, cancel := context.WithCancel(context.WithoutCancel(c.Context()))
			defer cancel()
			if claim != "" {
				run, who, _ := strings.Cut(claim, "/")
				release, err := worker.Claim(control, run, who, cancel)
				if err != nil {
					return err
				}
				defer release()
			}
			// If its controller dies, a worker must live on to revert what it applied. By
			// default, Go ends a process that writes to a closed standard output.
			signal.Ignore(syscall.SIGPIPE)
			// Ctrl-C in a terminal reaches the controller's whole process group. A worker
			// ends when its stream does, after it has reverted what it applied.
			return worker.Serve(ctx, in, p.Stdout, worker.Options{JournalDir: journalDir, Log: newLog(p), Remote: remote})
		},
	}
	f := c.Flags()
	f.BoolVar(&hold, "hold", false, "keep the container running until SIGTERM")
	f.BoolVar(&node, "node", false, "with --hold: restore what dead workers have left on this node")
	f.StringVar(&listen, "listen", "", "with --hold: accept connections here and close them")
	f.StringVar(&reach, "reach", "", "wait until this address accepts connections, and exit")
	f.DurationVar(&within, "within", 30*time.Second, "with --reach: the longest time to wait")
	f.BoolVar(&remote, "remote", false, "end if the controller, on another machine, is silent")
	f.StringVar(&claim, "claim", "", "be the only run on this host: RUN/WHO")
	f.BoolVar(&control, "control", false, "with --claim: be the only worker of the run that changes settings")
	f.StringVar(&pod, "pod", "", "act in the network namespace of the pod with this IP, from a pod on its node")
	return c
}

// enterPod restarts this program in a pod's network namespace. It returns nil if the program is there already.
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
	// A process with threads can change its network namespace only by executing a program again, and process.Quiet
	// does that.
	if err := namespace.Do(process.Quiet); err != nil {
		return err
	}
	return errors.New("enter pod: this program was started with a worker's environment, so it cannot start itself again")
}
