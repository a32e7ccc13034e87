//go:build linux

package worker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/accel"
	"slipstream.dev/internal/accel/journal"
)

// Hold keeps a container running, so that workers can be started in it by exec.
type Hold struct {
	// Listen is an address at which Hold accepts and closes connections, so that others can test whether they reach this place;
	// "" for none.
	Listen string
	// JournalDir is the directory of the journal of the workers in the container, if they apply accelerators. Hold restores the
	// settings of dead workers when it starts and, after it has killed leftover workers, when it ends.
	JournalDir string
	Log        *slog.Logger
}

// Run holds until ctx ends.
func (h Hold) Run(ctx context.Context) error {
	if h.JournalDir != "" {
		if err := h.restoreDead(ctx); err != nil {
			return err
		}
	}
	if h.Listen != "" {
		l, err := net.Listen("tcp", h.Listen)
		if err != nil {
			return fmt.Errorf("listen for probes: %w", err)
		}
		defer l.Close()
		go func() {
			for {
				c, err := l.Accept()
				if errors.Is(err, net.ErrClosed) {
					return
				}
				if err == nil {
					c.Close()
				}
			}
		}()
	}
	<-ctx.Done()
	if h.JournalDir == "" {
		return nil
	}
	if err := endNeighbours("/proc", h.Log); err != nil {
		return err
	}
	return h.restoreDead(context.WithoutCancel(ctx))
}

// restoreDead restores the settings of dead workers, except those that somebody else has changed.
func (h Hold) restoreDead(ctx context.Context) error {
	err := restoreDead(ctx, h.JournalDir, h.Log)
	if journal.OnlyChanged(err) {
		h.Log.WarnContext(ctx, "restore the settings of a dead worker", "error", err)
		return nil
	}
	return err
}

// restoreDead restores the settings of dead workers. If somebody else has changed some, the error is a journal.ErrChanged.
func restoreDead(ctx context.Context, journalDir string, log *slog.Logger) error {
	restored, err := accel.Recover(ctx, accel.Options{JournalDir: journalDir})
	for _, s := range restored {
		log.WarnContext(ctx, "restored a setting of a dead worker", "place", s.Place, "setting", s.Path, "value", s.Was)
	}
	return err
}

// endTime limits how long to wait for a killed process to exit.
const endTime = 5 * time.Second

// endNeighbours kills the workers of this container: processes that run this program in the same cgroup.
// If the container shares the node's PID namespace, nothing else kills them.
func endNeighbours(proc string, log *slog.Logger) error {
	own, err := os.ReadFile(filepath.Join(proc, "self/cgroup"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil // without cgroups there are no containers
	}
	if err != nil {
		return fmt.Errorf("find workers: %w", err)
	}
	program, err := os.Stat(filepath.Join(proc, "self/exe"))
	if err != nil {
		return fmt.Errorf("find workers: %w", err)
	}
	entries, err := os.ReadDir(proc)
	if err != nil {
		return fmt.Errorf("find workers: %w", err)
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		// A pidfd stays bound to this process, even if its PID is reused.
		handle, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			continue
		}
		dir := filepath.Join(proc, e.Name())
		cgroup, err := os.ReadFile(filepath.Join(dir, "cgroup"))
		exe, statErr := os.Stat(filepath.Join(dir, "exe"))
		if err == nil && statErr == nil && bytes.Equal(cgroup, own) && os.SameFile(exe, program) {
			log.Warn("killed a leftover worker", "process", pid)
			if err := unix.PidfdSendSignal(handle, unix.SIGKILL, nil, 0); err == nil {
				// The pidfd is readable once the process has ended (pidfd_open(2)).
				_, _ = unix.Poll([]unix.PollFd{{Fd: int32(handle), Events: unix.POLLIN}}, int(endTime.Milliseconds()))
			}
		}
		_ = unix.Close(handle)
	}
	return nil
}

// Reach returns once it has connected to a Hold that listens at an address.
func Reach(ctx context.Context, address string) error {
	const each = time.Second
	for {
		c, err := (&net.Dialer{Timeout: each}).DialContext(ctx, "tcp", address)
		if err == nil {
			return c.Close()
		}
		// A connection attempt from before the service works may never succeed, so make new ones.
		select {
		case <-time.After(each / 5):
		case <-ctx.Done():
			return fmt.Errorf("reach %s: %w", address, err)
		}
	}
}
