package agent

import (
	"fmt"

	"github.com/vishvananda/netlink"

	"slipstream.dev/internal/accel"
)

// watch is the kernel's stream of changes to the node's links: one socket for the
// node, whatever its pods. Its channel is closed where more came than the socket
// had room for.
type watch struct {
	changes chan netlink.LinkUpdate
	done    chan struct{}
}

// room for messages while the agent is busy, in bytes: a message about a veth
// takes up to 4 KiB of it, and a burst of 500 pods sends some 10 each.
const room = 16 << 20

func newWatch() (*watch, error) {
	w := &watch{changes: make(chan netlink.LinkUpdate, 256), done: make(chan struct{})}
	err := netlink.LinkSubscribeWithOptions(w.changes, w.done, netlink.LinkSubscribeOptions{
		ReceiveBufferSize: room, ReceiveBufferForceSize: true,
	})
	if err != nil {
		return nil, accel.Forbidden(fmt.Errorf("subscribe to link changes: %w", err))
	}
	return w, nil
}

func (w *watch) close() {
	close(w.done)
	for range w.changes { // the sender would wait for ever
	}
}

// again subscribes anew; who calls it lists what there is afterwards.
func (w *watch) again() error {
	w.close()
	next, err := newWatch()
	if err != nil {
		w.done = make(chan struct{}) // for close
		return err
	}
	*w = *next
	return nil
}
