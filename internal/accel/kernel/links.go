package kernel

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Links is a socket that returns the names of links in the network namespace in which it was opened. It uses the ioctl
// SIOCGIFNAME, which, unlike netlink, does not take the RTNL lock (netdev_get_name in net/core/dev.c): names are needed most
// when many pods start at once, and that lock is busy then.
type Links int

// OpenLinks opens the socket in the calling thread's network namespace.
func OpenLinks() (Links, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open a socket: %w", err)
	}
	return Links(fd), nil
}

// Close closes the socket.
func (s Links) Close() error { return unix.Close(int(s)) }

// Names maps the indexes of links to their names, without those that are gone.
func (s Links) Names(indexes []int) (map[int]string, error) {
	names := make(map[int]string, len(indexes))
	for _, index := range indexes {
		// struct ifreq: the name, and a union that holds the index.
		var request struct {
			name  [unix.IFNAMSIZ]byte
			index int32
			_     [20]byte
		}
		request.index = int32(index)
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(s), unix.SIOCGIFNAME, uintptr(unsafe.Pointer(&request)))
		switch errno {
		case 0:
			names[index] = unix.ByteSliceToString(request.name[:])
		case unix.ENODEV, unix.ENXIO:
		default:
			return nil, fmt.Errorf("ask for the name of link %d: %w", index, errno)
		}
	}
	return names, nil
}
