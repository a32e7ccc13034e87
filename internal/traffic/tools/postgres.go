package tools

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"strconv"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// postgres is a PostgreSQL server and the client pgbench. Checked against 15.
//
// pgbench takes whole seconds. It logs the latency of each transaction, or of a sample in long runs, from which the percentiles
// are computed. It does not report sizes, so there are no bytes.
type postgres struct{}

const (
	// postgresRole is the clients' user, who owns the tables and has no other rights. The superuser may run programs on the
	// server's machine.
	postgresRole = "pgbench"
	// postgresLogged limits the log to the number of transactions of this many seconds.
	postgresLogged   = 5
	postgresRoleFile = "role.sql"
	// postgresAccess says who may connect, and how.
	postgresAccess = "access.conf"
)

func (postgres) Check(w spec.Workload) error {
	if w.Application == nil {
		return fmt.Errorf("postgres makes application workloads only, not %s", w.Kind())
	}
	return nil
}

// Files lets the superuser log in only through a socket in the server's folder, to which only the server's user has access.
func (postgres) Files(spec.Workload, netip.Addr, uint16) map[string][]byte {
	return map[string][]byte{
		postgresAccess:   []byte("local all postgres trust\nhost postgres " + postgresRole + " all trust\n"),
		postgresRoleFile: []byte("CREATE ROLE " + postgresRole + " LOGIN;\nALTER DATABASE postgres OWNER TO " + postgresRole + ";\n"),
	}
}

// Prepare creates a database with a branch for each connection, as pgbench's manual recommends, so that TPC-B clients do not
// wait for each other's locks more than necessary. A branch has 100,000 accounts.
func (p postgres) Prepare(w spec.Workload, addr netip.Addr, port uint16) Preparation {
	scale := 1
	if w.Application.Operation == spec.OperationTPCB {
		scale = w.Application.Connections
	}
	// The client does not accept a relative path to the socket.
	local := []string{"pgbench", "-h", "/proc/self/cwd", "-p", strconv.Itoa(int(port)), "-U", "postgres", "-n", "-t", "1", "-f", postgresRoleFile, "postgres"}
	return Preparation{
		Before: [][]string{{"initdb", "-D", "data", "-U", "postgres", "--no-sync", "--no-locale", "-E", "UTF8", "-A", "reject"}},
		After:  [][]string{local, append(p.client(addr, port), "-i", "-q", "-s", strconv.Itoa(scale), "postgres")},
	}
}

// ServerArgv disables durability and background work, because the network is to be measured. Shared memory is in files of the
// folder, and is removed with it.
func (postgres) ServerArgv(w spec.Workload, addr netip.Addr, port uint16) []string {
	argv := []string{"postgres", "-D", "data"}
	for _, setting := range []string{
		"listen_addresses=" + addr.String(), "port=" + strconv.Itoa(int(port)), "hba_file=" + postgresAccess, "unix_socket_directories=..",
		// Connections of a warm-up may still exist.
		"max_connections=" + strconv.Itoa(2*w.Application.Connections+10),
		"fsync=off", "synchronous_commit=off", "full_page_writes=off", "autovacuum=off", "max_wal_size=16GB", "checkpoint_timeout=1h",
		"dynamic_shared_memory_type=mmap",
	} {
		argv = append(argv, "-c", setting)
	}
	return argv
}

func (postgres) ServerReady(line []byte) bool {
	return bytes.Contains(line, []byte("database system is ready to accept connections"))
}

func (p postgres) WarmupArgv(w spec.Workload, addr netip.Addr, port uint16) []string {
	return p.argv(w, addr, port, untilKilled)
}

func (p postgres) ClientArgv(w spec.Workload, addr netip.Addr, port uint16, _, _ string) []string {
	seconds := wholeSeconds(time.Duration(w.Application.Duration))
	extra := []string{"--log", "--log-prefix", LogPrefix}
	if seconds > postgresLogged {
		extra = append(extra, "--sampling-rate", strconv.FormatFloat(postgresLogged/float64(seconds), 'g', 3, 64))
	}
	return p.argv(w, addr, port, seconds, extra...)
}

func (postgres) client(addr netip.Addr, port uint16) []string {
	return []string{"pgbench", "-h", addr.String(), "-p", strconv.Itoa(int(port)), "-U", postgresRole}
}

func (p postgres) argv(w spec.Workload, addr netip.Addr, port uint16, seconds int64, extra ...string) []string {
	t := w.Application
	script := "tpcb-like"
	if t.Operation == spec.OperationSelect {
		script = "select-only"
	}
	argv := append(p.client(addr, port), "-n", "-b", script, "-c", strconv.Itoa(t.Connections), "-j", strconv.Itoa(min(2, t.Connections)),
		"-T", strconv.FormatInt(seconds, 10))
	return append(append(argv, extra...), "postgres")
}

func (postgres) Lead(spec.Workload) time.Duration { return 0 }

var (
	// pgbenchDone is "number of transactions actually processed: 221693".
	pgbenchDone = regexp.MustCompile(`(?m)^number of transactions actually processed: (\d+)$`)
	// pgbenchFailed is "number of failed transactions: 0 (0.000%)".
	pgbenchFailed = regexp.MustCompile(`(?m)^number of failed transactions: (\d+) \(`)
	// pgbenchRate is "tps = 110750.258026 (without initial connection time)".
	pgbenchRate  = regexp.MustCompile(`(?m)^tps = ([0-9.]+) \(without initial connection time\)$`)
	pgbenchError = regexp.MustCompile(`(?m)^pgbench: (?:fatal|error): [^\n]*`)
	// pgbenchLogged matches a line of the log: client, transaction, µs, script, and time stamp. Instead of µs there may be
	// "skipped" or "failed".
	pgbenchLogged = regexp.MustCompile(`(?m)^\d+ \d+ (\d+) \d+ \d+ \d+$`)
)

func (postgres) Parse(_ spec.Workload, output []byte) (record.Endpoint, error) {
	e, err := parsePgbench(output)
	return parsed("pgbench", e, err)
}

func parsePgbench(output []byte) (e record.Endpoint, err error) {
	if m := pgbenchError.Find(output); m != nil {
		return e, fmt.Errorf("%.200s", m)
	}
	done, failed, second := pgbenchDone.FindSubmatch(output), pgbenchFailed.FindSubmatch(output), pgbenchRate.FindSubmatch(output)
	if done == nil || failed == nil || second == nil {
		return e, errors.New("its output has no summary: it ended too early, or comes from a version other than 15")
	}
	if e.Messages, err = strconv.ParseUint(string(done[1]), 10, 62); err != nil {
		return e, fmt.Errorf("%q transactions", done[1])
	}
	n, err := strconv.ParseUint(string(failed[1]), 10, 62)
	if err != nil {
		return e, fmt.Errorf("%q failed transactions", failed[1])
	}
	if n > 0 {
		e.Errors = map[string]uint64{record.ErrOther: n}
	}
	rate, err := strconv.ParseFloat(string(second[1]), 64)
	if err != nil || rate <= 0 {
		return e, fmt.Errorf("%q transactions per second", second[1])
	}
	e.Seconds = float64(e.Messages) / rate
	hdr, err := pgbenchLatencies(output)
	if err != nil {
		return e, err
	}
	if e.Latency, err = record.EncodeHistogram(hdr); err != nil {
		return e, err
	}
	return e, plausible(e)
}

// pgbenchLatencies returns the latencies in the log, in ns.
func pgbenchLatencies(output []byte) (*hdrhistogram.Histogram, error) {
	hdr := record.NewHistogram()
	for _, m := range pgbenchLogged.FindAllSubmatch(output, -1) {
		us, err := strconv.ParseInt(string(m[1]), 10, 32)
		if err != nil {
			return nil, fmt.Errorf("a latency of %q", m[1])
		}
		_ = hdr.RecordValue(min(us*1000, hdr.HighestTrackableValue())) // it is in range
	}
	if hdr.TotalCount() == 0 {
		return nil, errors.New("its log has no transaction")
	}
	return hdr, nil
}
