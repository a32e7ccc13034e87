package kernel

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// ProcessStat holds the fields of proc_pid_stat(5) that are needed here. The zero value stands for a process that has ended.
type ProcessStat struct {
	Parent int
	Start  uint64 // clock ticks after boot
}

// ReadStat reads the stat file of a process.
func ReadStat(proc string, pid int) (ProcessStat, error) {
	b, err := os.ReadFile(filepath.Join(proc, strconv.Itoa(pid), "stat"))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return ProcessStat{}, nil
	}
	if err != nil {
		return ProcessStat{}, err
	}
	// The command's name, in parentheses, can hold anything; field 3 follows it.
	f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(f) < 20 {
		return ProcessStat{}, fmt.Errorf("%s/%d/stat: %d fields after the name, want 20 or more", proc, pid, len(f))
	}
	if state := f[0][0]; state == 'Z' || state == 'X' {
		return ProcessStat{}, nil
	}
	parent, err1 := strconv.Atoi(string(f[1]))
	start, err2 := strconv.ParseUint(string(f[19]), 10, 64)
	if err := errors.Join(err1, err2); err != nil {
		return ProcessStat{}, fmt.Errorf("%s/%d/stat: %w", proc, pid, err)
	}
	return ProcessStat{parent, start}, nil
}
