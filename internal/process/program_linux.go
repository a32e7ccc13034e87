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

// Shrink gives back memory that a process needs only at its start: garbage, and the pages of the program
// itself.
func Shrink() error {
	debug.FreeOSMemory()
	return releaseProgram()
}

// releaseProgram gives back the pages of the program itself. The start of a program touches the types of
// all its packages, those of Kubernetes among them, and around every touched page the kernel maps 64 KiB:
// some 20 MiB in total. The pages belong to the file, so those that are used again come back from the page
// cache, in a millisecond or two.
func releaseProgram() error {
	ranges, err := program()
	if err != nil {
		return fmt.Errorf("release program: %w", err)
	}
	for _, r := range ranges {
		if r.written {
			continue
		}
		// madvise(2) takes an address, with no Go object behind it.
		_, _, errno := unix.Syscall(unix.SYS_MADVISE, r.from, r.to-r.from, unix.MADV_DONTNEED)
		if errno != 0 && errno != unix.EINVAL { // EINVAL: the pages are locked
			return fmt.Errorf("release program: madvise: %w", errno)
		}
	}
	return nil
}

// KeepProgram locks the pages of the program in memory as long as this process runs, for every process
// that runs the program. A kernel may reclaim pages that have not been used for a while, however much
// memory is free (DAMON_RECLAIM). If a worker then needs such a page in the midst of traffic, it waits for
// the disk. Meanwhile its runtime's other threads take turns on the CPU, ahead of the kernel's work that
// would end the wait: that took more than a minute.
//
// A process that may not lock that much memory (setrlimit(2)) gets an error, and nothing changes for it.
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
			// Locking these pages would copy them and keep the copies. Other processes that
			// have not written to them still need the pages of the file.
			data, err := unix.Mmap(int(file.Fd()), r.offset, int(r.to-r.from), unix.PROT_READ, unix.MAP_SHARED)
			if err == nil {
				err = unix.Mlock(data)
			}
			if err != nil {
				return fmt.Errorf("keep program: lock its data: %w", err)
			}
			continue
		}
		// A raw call, like madvise.
		if _, _, errno := unix.Syscall(unix.SYS_MLOCK, r.from, r.to-r.from, 0); errno != 0 {
			return fmt.Errorf("keep program: mlock: %w", errno)
		}
	}
	return nil
}

// program returns where the program itself is mapped in memory.
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

// mapping is a range of addresses at which a file is mapped privately.
type mapping struct {
	from, to uintptr
	offset   int64
	// written means that the range is writable, so its content may differ from the file.
	written bool
}

// mappings returns the mappings of a file, from text in the format of proc_pid_maps(5).
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
