//go:build linux

package fastpath

import (
	"io"
	"sync"

	"slipstream.dev/internal/fastpath/datapath"
)

// forgedFilter attaches drop_forged (datapath.Programs.DropForged). Without it, a forged FIN or RST would make conntrack delete a
// liberal entry.
type forgedFilter struct {
	mu           sync.Mutex
	attached     io.Closer
	used, closed bool
}

// start attaches the program in the calling thread's network namespace, unless it is attached.
func (g *forgedFilter) start(programs *datapath.Programs) (err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.used = true
	if g.attached == nil && !g.closed {
		g.attached, err = programs.DropForged()
	}
	return err
}

// detachUnused detaches the program if start was not called since the last call.
func (g *forgedFilter) detachUnused() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	used := g.used
	g.used = false
	if used {
		return nil
	}
	return g.detach()
}

// detach detaches the program. The caller holds mu.
func (g *forgedFilter) detach() (err error) {
	if g.attached != nil {
		err = g.attached.Close()
		g.attached = nil
	}
	return err
}

// close detaches the program for good.
func (g *forgedFilter) close() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
	return g.detach()
}
