package record

import (
	"os"

	"golang.org/x/sys/unix"
)

// datasync syncs the data and the size of a file, but not its times, which nobody
// reads.
func datasync(f *os.File) error {
	for {
		if err := unix.Fdatasync(int(f.Fd())); err != unix.EINTR {
			return err
		}
	}
}
