package cli

import (
	"fmt"

	"github.com/spf13/cobra"

	"slipstream.dev/internal/ethtool"
	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/nic"
)

func captureCommand(p Process) *cobra.Command {
	return &cobra.Command{
		Use:   "capture",
		Short: "Print what this machine sees of its NICs and virtual functions",
		Long: `Print what this machine can see of its NICs: first the type of each NIC, and
whether a virtual function (VF) is bonded to it, then the parts of sysfs and
ethtool from which that follows. slipstream's tests can use the output in place
of the machine. It has no addresses or serial numbers, and devices are renamed:
you can attach it to an issue.

capture changes nothing, and needs no root.`,
		Example: `  slipstream capture > machine.yaml`,
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			sys, err := netns.Sysfs()
			if err != nil {
				return err
			}
			defer sys.Close()
			tool, err := ethtool.Open()
			if err != nil {
				return err
			}
			defer tool.Close()
			fixture := nic.Capture(nic.Source{Sys: sys.FS(), Tool: tool})
			if len(fixture.Facts) == 0 {
				fmt.Fprintln(p.Err, "slipstream: this network namespace has no device with hardware (only veth, bridges and the like), so no VF can carry its packets")
			}
			text, err := fixture.YAML()
			if err != nil {
				return err
			}
			_, err = p.Out.Write(text)
			return err
		},
	}
}
