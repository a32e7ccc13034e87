//go:build linux

package process

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"runtime/debug"

	"golang.org/x/sys/unix"
)

// Shrink gives back what a process that has begun does not need: garbage, and the
// pages of the program itself.
func Shrink() error {
	debug.FreeOSMemory()
	return ReleaseProgram()
}

// ReleaseProgram gives back the pages of the program itself. The start of a program
// runs through the types of all its packages, those of Kubernetes among them, and
// around every page that is ever touched the kernel maps 64 KiB: some 20 MiB. They
// are the file's pages: what is used again comes back from the page cache, in a
// millisecond or two.
func ReleaseProgram() error {
	ranges, err := program()
	if err != nil {
		return fmt.Errorf("release program: %w", err)
	}
	for _, r := range ranges {
		// madvise(2) takes an address; there is no Go object behind it.
		_, _, errno := unix.Syscall(unix.SYS_MADVISE, r.from, r.to-r.from, unix.MADV_DONTNEED)
		if errno != 0 && errno != unix.EINVAL { // EINVAL: this process keeps it
			return fmt.Errorf("release program: madvise: %w", errno)
		}
	}
	return nil
}

// KeepProgram has the pages of the program itself stay in memory for as long as this process
// is there, for every process that runs it. A kernel may take back pages that nobody has
// used for a while, however much memory is free (DAMON_RECLAIM). A worker that comes back to
// one in the midst of traffic waits for the disk, and its runtime's other threads turn about
// for it, ahead of what the kernel has to do to end the wait: that took a minute and more.
//
// Who may not lock as much memory as that (setrlimit(2)) has the error, and is as before.
func KeepProgram() error {
	ranges, err := program()
	if err != nil {
		return fmt.Errorf("keep program: %w", err)
	}
	for _, r := range ranges {
		// As madvise.
		if _, _, errno := unix.Syscall(unix.SYS_MLOCK, r.from, r.to-r.from, 0); errno != 0 {
			return fmt.Errorf("keep program: mlock: %w", errno)
		}
	}
	return nil
}

// program is where the program itself is in memory, but for what can be written.
func program() ([]addresses, error) {
	maps, err := os.Open("/proc/self/maps")
	if err != nil {
		return nil, err
	}
	defer maps.Close()
	program, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return nil, err
	}
	return readOnly(maps, program)
}

type addresses struct{ from, to uintptr }

// readOnly lists the mappings of a file that nothing was ever written to, of
// proc_pid_maps(5): a private mapping that can be written may hold what the file
// does not.
func readOnly(maps io.Reader, file string) ([]addresses, error) {
	var out []addresses
	for s := bufio.NewScanner(maps); ; {
		if !s.Scan() {
			return out, s.Err()
		}
		f := bytes.Fields(s.Bytes())
		if len(f) != 6 || string(f[5]) != file || (string(f[1]) != "r-xp" && string(f[1]) != "r--p") {
			continue
		}
		var a addresses
		if n, err := fmt.Sscanf(string(f[0]), "%x-%x", &a.from, &a.to); n != 2 || err != nil || a.to <= a.from {
			return nil, fmt.Errorf("addresses %q of %s make no sense", f[0], file)
		}
		out = append(out, a)
	}
}
