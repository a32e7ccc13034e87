//go:build linux

package bpf

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"
)

// Neighbours filters what the kernel announces of neighbours: of what bridges learn, a socket
// hears what is about addresses that Hear was called with.
type Neighbours struct{ objects neighboursObjects }

// LoadNeighbours loads the filter, which lets nothing through as yet that a bridge learns.
func LoadNeighbours() (*Neighbours, error) {
	limitErr := rlimit.RemoveMemlock() // as with OpenSoftirq
	n := new(Neighbours)
	if err := loadNeighboursObjects(&n.objects, nil); err != nil {
		return nil, fmt.Errorf("load filter of neighbours: %w", errors.Join(err, limitErr))
	}
	return n, nil
}

// Filter has a netlink socket be filtered.
func (n *Neighbours) Filter(fd int) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ATTACH_BPF, n.objects.Hear.FD()); err != nil {
		return fmt.Errorf("attach filter of neighbours: %w", err)
	}
	return nil
}

// Room is how many addresses can be heard of.
func (n *Neighbours) Room() int { return int(n.objects.Matter.MaxEntries()) }

// Hear lets through from now on what is about an Ethernet address.
func (n *Neighbours) Hear(mac [6]byte) error {
	if err := n.objects.Matter.Put(neighboursAddress{Mac: mac}, uint8(1)); err != nil {
		return fmt.Errorf("hear of neighbours at %x: %w", mac, err)
	}
	return nil
}

// Ignore takes Hear back.
func (n *Neighbours) Ignore(mac [6]byte) error {
	if err := n.objects.Matter.Delete(neighboursAddress{Mac: mac}); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("ignore neighbours at %x: %w", mac, err)
	}
	return nil
}

// Close lets go of the program and the map; a socket that has the filter keeps it.
func (n *Neighbours) Close() error { return n.objects.Close() }
