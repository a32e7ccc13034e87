// Package tools drives other makers of traffic, such as iperf3, behind the
// workloads of the native engine: it builds their argument lists and reads what
// they print. Read does so without knowing who ran them, for results that are imported.
// It runs nothing; internal/worker does, and internal/traffic is
// the engine that these are compared with.
//
// The figures are brought into the terms of internal/record: of the measured
// window, as received, round trips in seconds. Where a tool cannot be asked for
// that, its driver says what it gives in its place, or Check turns the workload
// down.
package tools

import (
	"bytes"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"time"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// Tool is the driver of one tool. A workload that it is given has all defaults
// filled in and has passed Check.
type Tool interface {
	// Check says why the tool cannot make this traffic, nil if it can.
	Check(w spec.Workload) error
	// ServerArgv returns the command of a server that listens at addr and port
	// until it is killed, or ends by itself before. A tool that is only a client
	// has none, and the native engine answers it.
	ServerArgv(w spec.Workload, addr netip.Addr, port uint16) []string
	// ServerReady reports whether a line of the server's output means that it
	// listens.
	ServerReady(line []byte) bool
	// ClientArgv returns the command of a client that makes the traffic and ends by itself. Tools take whole seconds
	// only, so the window is as long as was asked for or a little longer. cc is the congestion control of TCP, empty
	// for the kernel's own choice; a tool that cannot set it runs with the namespace's. path is the prefix of all paths
	// of the engine's own server, for a tool that it answers.
	ClientArgv(w spec.Workload, addr netip.Addr, port uint16, cc, path string) []string
	// Lead is the time from the start of the client's process to its measured
	// window, connection set-up left out: a client that starts so long before a
	// window measures that window.
	Lead(w spec.Workload) time.Duration
	// Parse reads all that the client printed. What the tool knows of the
	// receiver is in the endpoint too, as the server's own output is not read.
	// Exit statuses mean nothing: tools exit with 0 after errors.
	Parse(w spec.Workload, output []byte) (record.Endpoint, error)
}

// parsed returns the result of a Parse: the endpoint, or the error with the name of the program.
func parsed(program string, e record.Endpoint, err error) (record.Endpoint, error) {
	if err != nil {
		return record.Endpoint{}, fmt.Errorf("%s: %w", program, err)
	}
	return e, nil
}

// Lookup finds a tool by its name in an experiment.
func Lookup(name string) (Tool, bool) {
	t, ok := map[string]Tool{
		spec.ToolIperf3:    iperf3{},
		spec.ToolIperf2:    iperf2{},
		spec.ToolSockperf:  sockperf{},
		spec.ToolQperf:     qperf{},
		spec.ToolAB:        ab{},
		spec.ToolLatte:     latte{},
		spec.ToolRedis:     redis{},
		spec.ToolNginx:     nginx{},
		spec.ToolPostgres:  postgres{},
		spec.ToolMemcached: memcached{},
	}[name]
	return t, ok
}

// VersionArg makes a tool's first program print its version.
func VersionArg(tool string) string {
	switch tool {
	case spec.ToolAB, spec.ToolMemcached:
		return "-V"
	case spec.ToolNginx:
		return "-v"
	}
	return "--version"
}

// ParseVersion finds a tool's version ("3.12") in what its first program printed after
// VersionArg. It is empty if there is none.
func ParseVersion(name string, output []byte) string {
	before, ok := map[string]string{
		spec.ToolIperf3:    "iperf ",
		spec.ToolIperf2:    "iperf version ",
		spec.ToolSockperf:  "sockperf, version ",
		spec.ToolQperf:     "qperf ",
		spec.ToolAB:        "This is ApacheBench, Version ",
		spec.ToolRedis:     "Redis server v=",
		spec.ToolNginx:     "nginx version: nginx/",
		spec.ToolPostgres:  "postgres (PostgreSQL) ",
		spec.ToolMemcached: "memcached ",
	}[name]
	if !ok {
		return ""
	}
	line, _, _ := bytes.Cut(output, []byte("\n"))
	version, ok := bytes.CutPrefix(line, []byte(before))
	if !ok {
		return ""
	}
	version, _, _ = bytes.Cut(bytes.TrimSpace(version), []byte(" "))
	return string(version)
}

// wholeSeconds rounds up, as a window may be longer than asked for, not shorter.
func wholeSeconds(d time.Duration) int64 {
	return int64((d + time.Second - 1) / time.Second)
}

// plausible turns down figures that no run can have, so that hostile or garbled
// output never reaches a result.
func plausible(e record.Endpoint) error {
	if !(e.Seconds > 0) || math.IsInf(e.Seconds, 0) {
		return fmt.Errorf("a window of %g s", e.Seconds)
	}
	if e.Bytes == 0 && e.Messages == 0 {
		return fmt.Errorf("nothing arrived within the window")
	}
	figures := map[string]float64{"bits per second": e.BitsPerSecond, "CPU seconds": e.CPUSeconds, "jitter": e.Jitter}
	maps.Copy(figures, e.Percentiles)
	for name, v := range figures {
		if !(v >= 0) || math.IsInf(v, 0) {
			return fmt.Errorf("%s of %g", name, v)
		}
	}
	return nil
}
