//go:build linux

// Package ethtool reads and sets offloads of network devices, and reads their drivers, counters and rings.
package ethtool

import (
	"fmt"
	"runtime"

	"github.com/safchain/ethtool"
)

// Tool is a socket of the network namespace that it was opened in.
type Tool struct{ lib *ethtool.Ethtool }

// Open opens a socket in the thread's network namespace.
func Open() (*Tool, error) {
	lib, err := ethtool.NewEthtool()
	if err != nil {
		return nil, fmt.Errorf("open ethtool socket: %w", err)
	}
	return &Tool{lib}, nil
}

// Close closes the socket.
func (t *Tool) Close() { t.lib.Close() }

// Driver returns the names of a device's driver and firmware.
func (t *Tool) Driver(device string) (driver, firmware string, err error) {
	var info ethtool.DrvInfo
	onSteadyStack(func() { info, err = t.lib.DriverInfo(device) })
	if err != nil {
		return "", "", fmt.Errorf("driver of %s: %w", device, err)
	}
	return info.Driver, info.FwVersion, nil
}

// Counters returns the driver's own counters of a device.
func (t *Tool) Counters(device string) (all map[string]uint64, err error) {
	onSteadyStack(func() { all, err = t.lib.Stats(device) })
	if err != nil {
		return nil, fmt.Errorf("counters of %s: %w", device, err)
	}
	return all, nil
}

// FeatureState says whether an offload is on, and what can be done with it.
type FeatureState = ethtool.FeatureState

// Features returns the offloads of a device, by the kernel's names for them.
func (t *Tool) Features(device string) (all map[string]FeatureState, err error) {
	onSteadyStack(func() { all, err = t.lib.FeaturesWithState(device) })
	if err != nil {
		return nil, fmt.Errorf("offloads of %s: %w", device, err)
	}
	return all, nil
}

// Change switches offloads of a device on or off.
func (t *Tool) Change(device string, offloads map[string]bool) (err error) {
	onSteadyStack(func() { err = t.lib.Change(device, offloads) })
	if err != nil {
		return fmt.Errorf("set offloads of %s: %w", device, err)
	}
	return nil
}

// Ring returns how many packets the receive ring of a device holds, and the most that it can be set to hold.
func (t *Tool) Ring(device string) (size, most uint32, err error) {
	var ring ethtool.Ring
	onSteadyStack(func() { ring, err = t.lib.GetRing(device) })
	if err != nil {
		return 0, 0, fmt.Errorf("ring of %s: %w", device, err)
	}
	return ring.RxPending, ring.RxMaxPending, nil
}

// onSteadyStack calls f on a stack that neither grows nor shrinks. The library (v0.7.0) converts addresses of variables on
// the stack to integers, and passes these through a function to the kernel. If Go moves the stack in between, the kernel
// writes to memory that something else may use by now, and f finds nothing.
// https://github.com/safchain/ethtool/pull/139 is the fix, which no release has.
//
// On the stack of a new goroutine, grow leaves more room than the library needs: at most 36 KiB of frames. The garbage
// collector would halve it if less than a quarter were in use, which the array prevents.
func onSteadyStack(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		var held [large]byte
		grow()
		f()
		runtime.KeepAlive(&held)
	}()
	<-done
}

// large is more than a quarter of the 256 KiB that the stack has with two such frames, and less than the 128 KiB above which
// Go keeps a variable on the heap.
const large = 100 << 10

// grow makes the stack large enough for its own frame, and leaves that room to what runs after it.
//
//go:noinline
func grow() {
	var room [large]byte
	runtime.KeepAlive(&room)
}
