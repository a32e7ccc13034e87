//go:build linux

package lab

import (
	"os/exec"
	"sync/atomic"
)

// processes are those that a lab starts on its nodes and that are part of it. They implement
// network.Processes for the overlay and the balancer.
type processes struct {
	lab *Lab
	// ended, one per node, are closed as the processes end. ending says that they are meant to.
	ended  []chan struct{}
	ending atomic.Bool
}

func (p *processes) Start(node int, cmd *exec.Cmd) error {
	return p.lab.In(p.lab.Places()[node])(cmd)
}

func (p *processes) Watch(node int, wait func() error, tell func(error)) {
	ended := make(chan struct{})
	p.ended[node] = ended
	go func() {
		err := wait()
		close(ended)
		if !p.ending.Load() {
			tell(err)
		}
	}()
}

// await returns when all have ended.
func (p *processes) await() {
	for _, ended := range p.ended {
		if ended != nil {
			<-ended
		}
	}
}
