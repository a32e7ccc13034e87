// Package tools drives other traffic generators, such as iperf3, for the workloads of the native engine: it builds their
// argument lists and parses their output. Read also reads the output of tools that somebody else ran, for import. The package
// runs nothing; internal/worker does. internal/traffic is the engine with which the tools are compared.
//
// Figures are as internal/record defines them: they cover the measured window, count what was received, and give latencies as
// round trips in seconds. If a tool does not report that, its driver says what it returns instead, or Check refuses the
// workload.
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

// Tool is the driver of one tool. The workload that its methods get has all defaults filled in, and has passed Check.
type Tool interface {
	// Check returns an error that says why the tool cannot generate this traffic, or nil.
	Check(w spec.Workload) error
	// ServerArgv returns the command of a server that listens on addr and port until it is killed or ends by itself. It returns
	// nil for a tool that is only a client, which the native engine answers.
	ServerArgv(w spec.Workload, addr netip.Addr, port uint16) []string
	// ServerReady reports whether a line of the server's output shows that it listens.
	ServerReady(line []byte) bool
	// ClientArgv returns the command of a client that generates the traffic and ends by itself. Tools take whole seconds, so
	// the window may be a little longer than configured. cc is the TCP congestion control, empty for the default; a tool that
	// cannot set it uses that of the namespace. path is the prefix of all paths of the engine's own server, for a tool that it
	// answers.
	ClientArgv(w spec.Workload, addr netip.Addr, port uint16, cc, path string) []string
	// Lead returns how long before the window the client's process must start: the time from its start to its measured window,
	// except for the time to connect.
	Lead(w spec.Workload) time.Duration
	// Parse parses the whole output of the client. The endpoint includes what the tool knows about the receiver, because the
	// server's output is not read. The exit status does not matter: tools exit with 0 after errors.
	Parse(w spec.Workload, output []byte) (record.Endpoint, error)
}

// parsed returns the result of a Parse, with the name of the program in its error.
func parsed(program string, e record.Endpoint, err error) (record.Endpoint, error) {
	if err != nil {
		return record.Endpoint{}, fmt.Errorf("%s: %w", program, err)
	}
	return e, nil
}

// Lookup returns a tool by its name in experiments.
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

// VersionArg returns the argument with which a tool's first program prints its version.
func VersionArg(tool string) string {
	switch tool {
	case spec.ToolAB, spec.ToolMemcached:
		return "-V"
	case spec.ToolNginx:
		return "-v"
	}
	return "--version"
}

// ParseVersion returns a tool's version, such as "3.12", from the output of its first program with VersionArg, or "".
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

// wholeSeconds rounds up, because a window may be longer than configured, but not shorter.
func wholeSeconds(d time.Duration) int64 {
	return int64((d + time.Second - 1) / time.Second)
}

// plausible refuses figures that no run can have, so that hostile or garbled output never reaches a result.
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
