//go:build !linux

package process

// ReleaseProgram does nothing: other systems than Linux trim the pages of a program themselves.
func ReleaseProgram() error { return nil }
