//go:build linux

package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/process"
)

// NeighbourFilter filters the neighbour notifications of a netlink socket. It drops those about FDB entries of bridges, unless
// Subscribe was called for the MAC address.
type NeighbourFilter struct{ objects neighboursObjects }

// LoadNeighbourFilter loads the filter. At first it drops all notifications about FDB entries of bridges.
func LoadNeighbourFilter() (*NeighbourFilter, error) {
	explain := process.Loading()
	f := new(NeighbourFilter)
	if err := loadNeighboursObjects(&f.objects, nil); err != nil {
		return nil, fmt.Errorf("load the neighbour filter: %w", explain(err))
	}
	return f, nil
}

// Attach attaches the filter to a netlink socket.
func (f *NeighbourFilter) Attach(fd int) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ATTACH_BPF, f.objects.FilterNeighbours.FD()); err != nil {
		return fmt.Errorf("attach the neighbour filter: %w", err)
	}
	return nil
}

// Capacity returns the number of addresses that the filter can hold.
func (f *NeighbourFilter) Capacity() int { return int(f.objects.Subscribed.MaxEntries()) }

// Subscribe lets notifications about a MAC address pass from now on.
func (f *NeighbourFilter) Subscribe(mac [6]byte) error {
	if err := f.objects.Subscribed.Put(neighboursAddress{Mac: mac}, uint8(1)); err != nil {
		return fmt.Errorf("add %x to the neighbour filter: %w", mac, err)
	}
	return nil
}

// Unsubscribe drops notifications about a MAC address again.
func (f *NeighbourFilter) Unsubscribe(mac [6]byte) error {
	if err := f.objects.Subscribed.Delete(neighboursAddress{Mac: mac}); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("remove %x from the neighbour filter: %w", mac, err)
	}
	return nil
}

// Close closes the program and the map. A socket to which the filter is attached keeps it.
func (f *NeighbourFilter) Close() error { return f.objects.Close() }
