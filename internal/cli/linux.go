//go:build linux

package cli

import "github.com/spf13/cobra"

func linuxCommands(p Process) []*cobra.Command {
	return []*cobra.Command{runCommand(p), cleanupCommand(p), labCommand(p), accelCommand(p), workerCommand(p), agentCommand(p), forwardCommand(), balanceCommand()}
}
