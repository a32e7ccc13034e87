//go:build linux

package cluster

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// Usage is the CPU time that a process has used so far, and its resident memory.
type Usage struct {
	CPU time.Duration
	MiB float64
}

// UsageOf reads the usage of a process. It fails if the process has ended.
func UsageOf(pid int) (u Usage, err error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return u, fmt.Errorf("read usage: %w", err)
	}
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+2:]))
	if len(fields) < 22 {
		return u, fmt.Errorf("/proc/%d/stat has %d fields", pid, len(fields))
	}
	var values [3]int64
	for i, at := range []int{11, 12, 21} { // utime, stime and rss, proc_pid_stat(5)
		if values[i], err = strconv.ParseInt(fields[at], 10, 64); err != nil {
			return u, fmt.Errorf("read /proc/%d/stat: %w", pid, err)
		}
	}
	if values[2] == 0 {
		return u, fmt.Errorf("process %d has no memory: it has ended", pid)
	}
	return Usage{time.Duration(values[0]+values[1]) * 10 * time.Millisecond, float64(values[2]) * float64(os.Getpagesize()) / (1 << 20)}, nil
}
