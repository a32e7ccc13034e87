package tools

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"slipstream.dev/internal/spec"
)

// Application is a Tool whose server is a program that people run. Its client has no warm-up of its
// own: another run of it goes before. Each end has a temporary folder of its own, which its processes
// are started in. What the client leaves there in files whose names begin with LogPrefix is given to
// Parse, after what it printed.
type Application interface {
	Tool
	// Files returns what either end finds in its folder, by name: the configuration, and what is
	// served.
	Files(w spec.Workload, addr netip.Addr, port uint16) map[string][]byte
	// Prepare returns what the server needs in addition to its process.
	Prepare(w spec.Workload, addr netip.Addr, port uint16) Preparation
	// WarmupArgv returns the command that makes traffic until it is killed, and leaves the server
	// as the measured run needs it.
	WarmupArgv(w spec.Workload, addr netip.Addr, port uint16) []string
}

// Counted is an Application whose client takes a number of requests, not a time.
type Counted interface {
	Application
	// CountedArgv is ClientArgv for as many requests as fit into the window, according to what
	// the warm-up printed.
	CountedArgv(w spec.Workload, addr netip.Addr, port uint16, warmup []byte) ([]string, error)
}

// untilKilled is a number of seconds, longer than any warm-up, for a client that takes a time.
const untilKilled = 3600

// Preparation has what an application's server needs in addition to its process.
type Preparation struct {
	// Before are commands that run before the server, After those once it listens.
	Before, After [][]string
	// Silent means that the server does not print when it listens: it listens once it accepts a
	// connection.
	Silent bool
}

// LogPrefix begins the names of the files to which a client logs its requests.
const LogPrefix = "log"

// Programs returns the programs of each tool, by name: the server's, and the client's. ParseVersion
// reads what the first prints when asked for its version.
func Programs() map[string][]string {
	return map[string][]string{
		spec.ToolIperf3:    {"iperf3"},
		spec.ToolIperf2:    {"iperf"},
		spec.ToolSockperf:  {"sockperf"},
		spec.ToolQperf:     {"qperf"},
		spec.ToolAB:        {"ab"},
		spec.ToolRedis:     {"redis-server", "redis-benchmark"},
		spec.ToolNginx:     {"nginx", "wrk"},
		spec.ToolPostgres:  {"postgres", "initdb", "pgbench"},
		spec.ToolMemcached: {"memcached", "memcaslap"},
	}
}

// Package returns Debian's package of a tool's program; others have similar names.
func Package(program string) string {
	switch program {
	case "ab":
		return "apache2-utils"
	case "redis-benchmark":
		return "redis-tools"
	case "postgres", "initdb", "pgbench":
		return "postgresql"
	case "memcaslap":
		return "libmemcached-tools"
	}
	return program
}

// Find returns the path of a program in Debian's folder of the newest PostgreSQL, or in a folder of PATH; "" if it is
// in neither. On Debian, PATH lacks PostgreSQL's server programs, and has only a wrapper of the clients.
func Find(path, program string) string {
	folders, _ := filepath.Glob(postgresFolders)
	slices.SortFunc(folders, func(a, b string) int { return postgresVersion(b) - postgresVersion(a) })
	if Package(program) != "postgresql" {
		folders = nil
	}
	for _, dir := range append(folders, filepath.SplitList(path)...) {
		file := filepath.Join(dir, program)
		if info, err := os.Stat(file); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return file
		}
	}
	return ""
}

// postgresFolders matches Debian's folders of PostgreSQL's programs, by version.
const postgresFolders = "/usr/lib/postgresql/*/bin"

func postgresVersion(folder string) int {
	n, _ := strconv.Atoi(filepath.Base(filepath.Dir(folder)))
	return n
}
