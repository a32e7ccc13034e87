//go:build !linux

package process

// releaseProgram does nothing: systems other than Linux trim the pages of a program themselves.
func releaseProgram() error { return nil }
