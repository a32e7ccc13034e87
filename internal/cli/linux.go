//go:build linux

package cli

import (
	"github.com/spf13/cobra"

	"slipstream.dev/internal/process"
)

// begin is the first thing that the program does.
func begin() error { return process.Begin() }

// linuxCommands are those that need namespaces, sysfs or netlink.
func linuxCommands(p Process) []*cobra.Command {
	return []*cobra.Command{labCommand(p), accelCommand(p), workerCommand(p), agentCommand(p), forwardCommand(), balanceCommand()}
}
