//go:build linux

package collect

import (
	"bytes"
	"fmt"
	"strconv"

	"slipstream.dev/internal/record"
)

// conntrack counts what connection tracking of this network namespace has refused: packets that got no entry and were dropped, and
// entries that were deleted early because the table was full. Both have 32 bits in the kernel, and may wrap.
type conntrack struct{ dropped, early uint32 }

// parseConntrack parses /proc/net/stat/nf_conntrack: a heading with the names of the columns, and a line of hexadecimal counts for
// each possible CPU (ct_cpu_seq_show in net/netfilter/nf_conntrack_standalone.c).
func (s *Snapshot) parseConntrack(b []byte) error {
	s.conntrack = conntrack{}
	heading, rows, _ := bytes.Cut(b, []byte("\n"))
	names := bytes.Fields(heading)
	for row := range bytes.Lines(rows) {
		for i, f := range bytes.Fields(row) {
			var sum *uint32
			switch {
			case i >= len(names):
			case string(names[i]) == "drop":
				sum = &s.conntrack.dropped
			case string(names[i]) == "early_drop":
				sum = &s.conntrack.early
			}
			if sum == nil {
				continue
			}
			n, err := strconv.ParseUint(string(f), 16, 32)
			if err != nil {
				return fmt.Errorf("%s: %w", names[i], err)
			}
			*sum += uint32(n)
		}
	}
	return nil
}

// warnings returns a warning if connection tracking has refused anything since b. A client sends the first packet of a connection
// again only after a second, so a few of these show in the latencies.
func (c conntrack) warnings(b conntrack) []record.Warning {
	dropped, early := c.dropped-b.dropped, c.early-b.early
	if dropped+early == 0 {
		return nil
	}
	return []record.Warning{record.Warnf(record.WarnDrops,
		"connection tracking dropped %d packets and deleted %d entries early, as it does when its table is full: closed connections, also of earlier trials, stay in it for two minutes (net.netfilter.nf_conntrack_max limits it)",
		dropped, early)}
}
