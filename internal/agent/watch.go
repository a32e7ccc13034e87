package agent

import (
	"fmt"

	"github.com/vishvananda/netlink"

	"slipstream.dev/internal/accel"
)

// watch receives netlink notifications about the node's links. Its channel is closed when the socket's receive buffer
// overflows.
type watch struct {
	changes chan netlink.LinkUpdate
	done    chan struct{}
}

// receiveBuffer is the size of the socket's receive buffer in bytes. A notification about a veth takes up to 4 KiB, and a burst
// of 500 pods causes about ten for each.
const receiveBuffer = 16 << 20

func newWatch() (*watch, error) {
	w := &watch{changes: make(chan netlink.LinkUpdate, 256), done: make(chan struct{})}
	err := netlink.LinkSubscribeWithOptions(w.changes, w.done, netlink.LinkSubscribeOptions{
		ReceiveBufferSize: receiveBuffer, ReceiveBufferForceSize: true,
	})
	if err != nil {
		return nil, accel.Forbidden(fmt.Errorf("subscribe to link changes: %w", err))
	}
	return w, nil
}

func (w *watch) close() {
	close(w.done)
	for range w.changes { // otherwise the sender would block forever
	}
}

// resubscribe starts over after a loss. The caller must then list all devices.
func (w *watch) resubscribe() error {
	w.close()
	next, err := newWatch()
	if err != nil {
		w.done = make(chan struct{}) // for close
		return err
	}
	*w = *next
	return nil
}
