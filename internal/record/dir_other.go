//go:build !linux

package record

import "os"

func datasync(f *os.File) error { return f.Sync() }
