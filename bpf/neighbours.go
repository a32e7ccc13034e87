//go:build linux

package bpf

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"
)

// Neighbours filters the neighbour notifications of a netlink socket: those about bridges' FDB entries
// pass only for the addresses that Hear was called with.
type Neighbours struct{ objects neighboursObjects }

// LoadNeighbours loads the filter, which drops all notifications about bridges' FDB entries at first.
func LoadNeighbours() (*Neighbours, error) {
	limitErr := rlimit.RemoveMemlock() // as with OpenSoftirq
	n := new(Neighbours)
	if err := loadNeighboursObjects(&n.objects, nil); err != nil {
		return nil, fmt.Errorf("load filter of neighbours: %w", errors.Join(err, limitErr))
	}
	return n, nil
}

// Filter attaches the filter to a netlink socket.
func (n *Neighbours) Filter(fd int) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ATTACH_BPF, n.objects.Hear.FD()); err != nil {
		return fmt.Errorf("attach filter of neighbours: %w", err)
	}
	return nil
}

// Room returns how many addresses the filter has room for.
func (n *Neighbours) Room() int { return int(n.objects.Matter.MaxEntries()) }

// Hear lets notifications about a MAC address pass from now on.
func (n *Neighbours) Hear(mac [6]byte) error {
	if err := n.objects.Matter.Put(neighboursAddress{Mac: mac}, uint8(1)); err != nil {
		return fmt.Errorf("add %x to the filter of neighbours: %w", mac, err)
	}
	return nil
}

// Ignore drops notifications about a MAC address again.
func (n *Neighbours) Ignore(mac [6]byte) error {
	if err := n.objects.Matter.Delete(neighboursAddress{Mac: mac}); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("remove %x from the filter of neighbours: %w", mac, err)
	}
	return nil
}

// Close closes the program and the map; a socket that has the filter keeps it.
func (n *Neighbours) Close() error { return n.objects.Close() }
