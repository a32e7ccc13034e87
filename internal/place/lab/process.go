//go:build linux

package lab

import (
	"os/exec"
	"sync"
	"sync/atomic"
)

// processes watches the processes that belong to a lab on its nodes. It implements
// network.Processes for the overlay and the balancer.
type processes struct {
	lab *Lab
	// running counts those that are watched. ending is set before the lab kills them.
	running sync.WaitGroup
	ending  atomic.Bool
}

func (p *processes) Start(node int, cmd *exec.Cmd) error {
	return p.lab.In(p.lab.Places()[node])(cmd)
}

func (p *processes) Watch(wait func() error, tell func(error)) {
	p.running.Go(func() {
		if err := wait(); !p.ending.Load() {
			tell(err)
		}
	})
}
