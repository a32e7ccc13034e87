package worker

import (
	"context"
	"fmt"
	"io/fs"
	"time"

	"slipstream.dev/internal/kernelfs"
	"slipstream.dev/internal/place"
)

// A closed TCP connection keeps its conntrack entry for two minutes (TIME_WAIT). So a few trials that each open tens of
// thousands of connections fill the conntrack table of a node, and the kernel then drops the first packet of each new
// connection.

// roomEvery is the interval at which awaitRoom reads the size of the table.
const roomEvery = 500 * time.Millisecond

// awaitRoom waits until the conntrack table has room for a number of connections. root is /proc/sys/net/netfilter.
// Without conntrack there is no limit.
func awaitRoom(ctx context.Context, root fs.FS, connections uint64) error {
	limit := kernelfs.Number(root, "nf_conntrack_max")
	if connections == 0 || limit == 0 {
		return nil
	}
	// The node's own connections need some entries too.
	need := connections + limit/20
	if need > limit {
		return fmt.Errorf("the trial opens %d connections, and conntrack has %d entries (net.netfilter.nf_conntrack_max): set fewer requests, or raise the limit on the nodes",
			connections, limit)
	}
	ctx, cancel := context.WithTimeout(ctx, place.RoomWait)
	defer cancel()
	var used uint64
	room := poll(ctx, roomEvery, func() bool {
		used = kernelfs.Number(root, "nf_conntrack_count")
		return used+need <= limit
	})
	if !room {
		return fmt.Errorf("conntrack has no room for the %d connections of the trial: %d of %d entries are in use, and did not end within %s (net.netfilter.nf_conntrack_max)",
			connections, used, limit, place.RoomWait)
	}
	return nil
}
