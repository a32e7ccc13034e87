package accel

import (
	"bufio"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strconv"

	"slipstream.dev/internal/accel/journal"
	"slipstream.dev/internal/accel/kernel"
)

// The tables of RFS are kernel memory. An entry of the machine's table takes 4 bytes (struct rps_sock_flow_table, allocated by
// rps_sock_flow_sysctl in net/core/sysctl_net_core.c), and an entry of a receive queue's table 12 bytes (struct rps_dev_flow,
// allocated by store_rps_dev_flow_table_cnt in net/core/net-sysfs.c; 8 bytes before Linux 6.17). The kernel would use up all
// memory for them, and a node has hundreds of devices.
const (
	machineEntry = 4
	queueEntry   = 12
	// All tables together may take 1/flowShare of the machine's memory, 2 %. With 4 GiB, that is enough for the default number
	// of entries on both ends of the veths of 110 pods.
	flowShare = 50
)

// flowBytes returns the size in bytes of the RFS table that a setting allocates, or 0 if it allocates none.
func flowBytes(setting, value string) int64 {
	n, err := strconv.ParseInt(value, 10, 64)
	switch {
	case err != nil:
		return 0
	case setting == kernel.FlowTable:
		return n * machineEntry
	case path.Base(setting) == flowCount:
		return n * queueEntry
	}
	return 0
}

// flowMemory is the memory that the RFS tables of a machine use, and its limit, in bytes.
type flowMemory struct{ used, limit int64 }

// flowsHeld sums the sizes of the tables in the journal.
func (n *namespace) flowsHeld() (m flowMemory, err error) {
	total, err := memTotal(n.options.Proc)
	if err != nil {
		return m, err
	}
	m.limit = total / flowShare
	err = n.journal.Held(func(e journal.Entry) { m.used += flowBytes(e.Path, e.Want) })
	return m, err
}

// memTotal returns the size of a machine's memory in bytes.
func memTotal(proc string) (int64, error) {
	f, err := os.Open(filepath.Join(proc, "meminfo"))
	if err != nil {
		return 0, fmt.Errorf("read the size of the memory: %w", err)
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		var kib int64
		if _, err := fmt.Sscanf(s.Text(), "MemTotal: %d kB", &kib); err == nil {
			return kib << 10, nil
		}
	}
	return 0, fmt.Errorf("read the size of the memory: %s has no MemTotal", f.Name())
}

// newTables returns, by link, the size in bytes of the tables that the changes add.
func newTables(c journal.Changes) map[int]int64 {
	need := make(map[int]int64)
	for _, change := range c.Changes {
		if n := flowBytes(change.Path, change.Want); n > 0 && c.Find(change.Path) == nil {
			need[change.Link] += n
		}
	}
	return need
}

// checkMemory returns an error if the tables of all changes do not fit into the limit.
func (n *namespace) checkMemory(steps ...journal.Changes) error {
	var sum int64
	for _, s := range steps {
		for _, n := range newTables(s) {
			sum += n
		}
	}
	if sum == 0 {
		return nil
	}
	m, err := n.flowsHeld()
	if err == nil && m.used+sum > m.limit {
		err = m.exceeded("RFS", sum)
	}
	return err
}

// tooLarge goes through the devices in order, and refuses those whose tables no longer fit. It returns an error for each
// refused table, by path.
func (n *namespace) tooLarge(b *journal.Book, changes []journal.Change) (map[string]error, error) {
	need := newTables(journal.Changes{Book: b, Changes: changes})
	if len(need) == 0 {
		return nil, nil
	}
	m, err := n.flowsHeld()
	if err != nil {
		return nil, err
	}
	refused, over := make(map[int]error), make(map[string]error)
	for _, c := range changes {
		if flowBytes(c.Path, c.Want) == 0 {
			continue
		}
		n := need[c.Link]
		delete(need, c.Link)
		if m.used+n <= m.limit {
			m.used += n
		} else if n > 0 {
			refused[c.Link] = m.exceeded("RFS of "+ownerOf(c.Path), n)
		}
		if err := refused[c.Link]; err != nil {
			over[c.Path] = err
		}
	}
	return over, nil
}

// ownerOf returns the name of the device that a setting belongs to, or "the machine".
func ownerOf(setting string) string {
	if device, _, ok := kernel.SplitQueue(setting); ok {
		return device
	}
	return "the machine"
}

// exceeded returns the error for tables of what, with a size of need bytes, that do not fit.
func (m flowMemory) exceeded(what string, need int64) error {
	const mib = 1 << 20
	return fmt.Errorf("%s needs %.1f MiB of kernel memory; with it, the tables of RFS on this machine take %.1f MiB, and may take %.1f MiB (%d%% of its memory): "+
		"lower rfs.entries, or choose fewer classes of devices", what, float64(need)/mib, float64(m.used+need)/mib, float64(m.limit)/mib, 100/flowShare)
}
