//go:build linux

package cli

import (
	"github.com/spf13/cobra"

	"slipstream.dev/internal/process"
)

// begin is the first thing that the program does.
func begin() error { return process.Begin() }

func linuxCommands(p Process) []*cobra.Command {
	return []*cobra.Command{runCommand(p), cleanupCommand(p), labCommand(p), accelCommand(p), workerCommand(p), agentCommand(p), forwardCommand(), balanceCommand()}
}
