//go:build linux

package cli

import (
	"github.com/spf13/cobra"

	"slipstream.dev/internal/process"
)

// begin prepares the process, before anything else.
func begin() error { return process.Begin() }

// linuxCommands returns the commands that need namespaces, sysfs or netlink.
func linuxCommands(p Process) []*cobra.Command {
	return []*cobra.Command{labCommand(p), accelCommand(p), workerCommand(p), agentCommand(p), captureCommand(p), forwardCommand(), balanceCommand()}
}
