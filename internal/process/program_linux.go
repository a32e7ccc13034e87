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
	return releaseProgram()
}

// releaseProgram gives back the pages of the program itself. The start of a program
// runs through the types of all its packages, those of Kubernetes among them, and
// around every page that is ever touched the kernel maps 64 KiB: some 20 MiB. They
// are the file's pages: what is used again comes back from the page cache, in a
// millisecond or two.
func releaseProgram() error {
	ranges, err := program()
	if err != nil {
		return fmt.Errorf("release program: %w", err)
	}
	for _, r := range ranges {
		if r.written {
			continue
		}
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
	file, err := os.Open("/proc/self/exe")
	if err != nil {
		return fmt.Errorf("keep program: %w", err)
	}
	defer file.Close()
	for _, r := range ranges {
		if r.written {
			// To lock these would copy them, and keep the copies. What another process has not
			// written yet is still to come from the file.
			data, err := unix.Mmap(int(file.Fd()), r.offset, int(r.to-r.from), unix.PROT_READ, unix.MAP_SHARED)
			if err == nil {
				err = unix.Mlock(data)
			}
			if err != nil {
				return fmt.Errorf("keep program: lock its data: %w", err)
			}
			continue
		}
		// As madvise.
		if _, _, errno := unix.Syscall(unix.SYS_MLOCK, r.from, r.to-r.from, 0); errno != 0 {
			return fmt.Errorf("keep program: mlock: %w", errno)
		}
	}
	return nil
}

// program is where the program itself is in memory.
func program() ([]mapping, error) {
	maps, err := os.Open("/proc/self/maps")
	if err != nil {
		return nil, err
	}
	defer maps.Close()
	program, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return nil, err
	}
	return mappings(maps, program)
}

// mapping is a range of addresses that a file is mapped at, privately.
type mapping struct {
	from, to uintptr
	offset   int64
	// written is one that may hold what the file does not.
	written bool
}

// mappings lists those of a file, of proc_pid_maps(5).
func mappings(maps io.Reader, file string) ([]mapping, error) {
	var out []mapping
	for s := bufio.NewScanner(maps); ; {
		if !s.Scan() {
			return out, s.Err()
		}
		f := bytes.Fields(s.Bytes())
		if len(f) != 6 || string(f[5]) != file || len(f[1]) != 4 || f[1][0] != 'r' || f[1][3] != 'p' {
			continue
		}
		m := mapping{written: f[1][1] == 'w'}
		if n, err := fmt.Sscanf(string(f[0])+" "+string(f[2]), "%x-%x %x", &m.from, &m.to, &m.offset); n != 3 || err != nil || m.to <= m.from {
			return nil, fmt.Errorf("invalid addresses %q in %s", f[0], file)
		}
		out = append(out, m)
	}
}
