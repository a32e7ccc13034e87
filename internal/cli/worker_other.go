//go:build !linux && !windows

package cli

import "github.com/spf13/cobra"

func workerCommands(Process) []*cobra.Command { return nil }
