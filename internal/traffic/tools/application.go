package tools

import (
	"net/netip"

	"slipstream.dev/api/v1alpha1"
)

// Application is a Tool whose server is a program that people run. Its client has no warm-up of its
// own: another run of it goes before.
type Application interface {
	Tool
	// Files are what the server finds in the folder that it is started in, by name: its
	// configuration, and what it serves. The folder is its own, and goes with it.
	Files(w v1alpha1.Workload, addr netip.Addr, port uint16) map[string][]byte
	// WarmupArgv makes traffic until it is killed, and leaves the server as the measured run needs it.
	WarmupArgv(w v1alpha1.Workload, addr netip.Addr, port uint16) []string
	// MeasuredArgv makes the measured traffic. A client that takes a number of requests, and no time,
	// computes that from what the warm-up printed.
	MeasuredArgv(w v1alpha1.Workload, addr netip.Addr, port uint16, warmup []byte) ([]string, error)
}

// Package is Debian's package of a tool's program; others have similar names.
func Package(program string) string {
	switch program {
	case "ab":
		return "apache2-utils"
	case "redis-benchmark":
		return "redis-tools"
	}
	return program
}
