//go:build linux

package nic

import (
	"fmt"

	"github.com/safchain/ethtool"
)

// Live answers for the network namespace that the tool was opened in.
type Live struct{ Tool *ethtool.Ethtool }

// Driver returns the names of a device's driver and firmware.
func (l Live) Driver(device string) (driver, firmware string, err error) {
	info, err := l.Tool.DriverInfo(device)
	if err != nil {
		return "", "", fmt.Errorf("driver of %s: %w", device, err)
	}
	return info.Driver, info.FwVersion, nil
}

// Counters returns the driver's own counters of a device.
func (l Live) Counters(device string) (map[string]uint64, error) {
	all, err := l.Tool.Stats(device)
	if err != nil {
		return nil, fmt.Errorf("counters of %s: %w", device, err)
	}
	return all, nil
}
