// Package kernelfs reads small files of /proc and /sys. Its callers know what the files mean; package accel/kernel writes
// settings.
package kernelfs

import (
	"io/fs"
	"strconv"
	"strings"
)

// Text returns the content of a file without the space around it, "" if it cannot be read.
func Text(root fs.FS, name string) string {
	b, _ := fs.ReadFile(root, name)
	return strings.TrimSpace(string(b))
}

// Number returns the number in a file, 0 if there is none.
func Number(root fs.FS, name string) uint64 {
	n, _ := strconv.ParseUint(Text(root, name), 10, 64)
	return n
}
