package tools

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"slipstream.dev/internal/spec"
)

// Application is a Tool whose server is an application that people run, such as a database. Its client has no warm-up of its
// own, so another run of it comes first. Each end has a temporary folder, in which its processes start. Parse gets what the
// client has printed, followed by the files in its folder whose names begin with LogPrefix.
type Application interface {
	Tool
	// Files returns the files in the folder of each end, by name: the configuration, and what is served.
	Files(w spec.Workload, addr netip.Addr, port uint16) map[string][]byte
	// Prepare returns what the server needs besides its process.
	Prepare(w spec.Workload, addr netip.Addr, port uint16) Preparation
	// WarmupArgv returns a command that generates traffic until it is killed, and leaves the server in the state that the
	// measured run needs.
	WarmupArgv(w spec.Workload, addr netip.Addr, port uint16) []string
}

// Counted is an Application whose client takes a number of requests instead of a duration.
type Counted interface {
	Application
	// CountedArgv is ClientArgv for as many requests as fit into the window, according to the output of the warm-up.
	CountedArgv(w spec.Workload, addr netip.Addr, port uint16, warmup []byte) ([]string, error)
}

// untilKilled is a duration in seconds that is longer than any warm-up.
const untilKilled = 3600

// Preparation is what an application's server needs besides its process.
type Preparation struct {
	// Before are commands that run before the server starts, After those that run once it listens.
	Before, After [][]string
	// Silent means that the server does not print when it listens, so that only a connection shows it.
	Silent bool
}

// LogPrefix is the prefix of the names of the files to which a client logs its requests.
const LogPrefix = "log"

// Programs returns the programs of each tool: the server's and the client's. ParseVersion parses the version that the first one
// prints.
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

// Package returns the Debian package of a tool's program. Other distributions have similar names.
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

// Find returns the path of a program in Debian's folder of the newest PostgreSQL or in a folder of PATH, or "". On Debian, PATH
// lacks the server programs of PostgreSQL, and has only a wrapper for the clients.
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
