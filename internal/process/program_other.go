//go:build !linux

package process

// releaseProgram does nothing: other systems than Linux trim the pages of a program themselves.
func releaseProgram() error { return nil }
