//go:build linux

package cli

import "github.com/spf13/cobra"

func linuxCommands(p Process) []*cobra.Command {
	return []*cobra.Command{runCommand(p), labCommand(p), accelCommand(p), workerCommand(p)}
}
