//go:build linux

package lab

import (
	"os/exec"
	"sync"
	"sync/atomic"
)

// processes implements network.Processes for the overlay and the balancer.
type processes struct {
	lab *Lab
	// running counts the watched processes. ending is set before the lab kills them.
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
