// Package kerneltest has fakes for tests: settings in memory, a store that crashes at any operation, and a procfs with a few
// processes.
package kerneltest

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"slipstream.dev/internal/accel/kernel"
)

// Memory is a store of settings that fails on demand.
type Memory struct {
	Values map[string]string
	Fail   map[string]error
	// Mangle maps paths to the values that read back after a write, in place of those written.
	Mangle map[string]string
	Writes []string
}

// Read reads a value.
func (m *Memory) Read(path string) (string, error) {
	v, ok := m.Values[path]
	if !ok {
		return "", &fs.PathError{Op: "open", Path: path, Err: fs.ErrNotExist}
	}
	return v, nil
}

// Write writes a value.
func (m *Memory) Write(path, value string) error {
	if err := m.Fail[path]; err != nil {
		return err
	}
	if _, ok := m.Values[path]; !ok {
		return os.ErrNotExist
	}
	if v, ok := m.Mangle[path]; ok && value != "0" {
		value = v
	}
	m.Values[path] = value
	m.Writes = append(m.Writes, path+"="+value)
	return nil
}

// Crash panics at the nth operation on a store. Like a SIGKILL, that leaves no chance to clean up.
type Crash struct {
	kernel.Store
	// Left is the number of remaining operations.
	Left *int
}

func (c Crash) tick() {
	if *c.Left--; *c.Left < 0 {
		panic(c)
	}
}

// Read reads a value.
func (c Crash) Read(path string) (string, error) {
	c.tick()
	return c.Store.Read(path)
}

// Write writes a value. It counts as one operation before the write and one after it.
func (c Crash) Write(path, value string) error {
	c.tick()
	err := c.Store.Write(path, value)
	c.tick()
	return err
}

// Proc makes a procfs with a boot ID and the given processes and their start times.
func Proc(t *testing.T, processes map[string]string) string {
	t.Helper()
	proc := t.TempDir()
	write(t, filepath.Join(proc, "sys/kernel/random/boot_id"), "boot\n")
	for pid, stat := range processes {
		write(t, filepath.Join(proc, pid, "stat"), stat)
	}
	return proc
}

// Stat returns a line of /proc/PID/stat.
func Stat(state, start string) string {
	return "7 (a) b) " + state + strings.Repeat(" 1", 18) + " " + start + " 1 1\n"
}

func write(t testing.TB, file, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}
