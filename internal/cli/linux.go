//go:build linux

package cli

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"slipstream.dev/internal/process"
)

// begin prepares the process, before anything else.
func begin() error { return process.Begin() }

// asRoot returns an error if the user is not root, before a command does what only root may.
func asRoot(what string) error {
	if os.Geteuid() == 0 {
		return nil
	}
	return fmt.Errorf("%s, which only root may: use sudo", what)
}

// linuxCommands returns the commands that need namespaces, sysfs or netlink.
func linuxCommands(p Process) []*cobra.Command {
	return []*cobra.Command{labCommand(p), accelCommand(p), workerCommand(p), agentCommand(p), captureCommand(p), forwardCommand(), balanceCommand()}
}
