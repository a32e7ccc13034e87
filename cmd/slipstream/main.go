// Command slipstream measures what a container network costs, and proves what
// makes it faster.
package main

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"syscall"

	"slipstream.dev/internal/cli"
)

// version is set by the build, and image by that of a release: the repository of the image of agents and workers.
var (
	version = "devel"
	image   string
)

var errInterrupted = errors.New("interrupted")

func main() {
	ctx, cancel := context.WithCancelCause(context.Background())
	hurry := make(chan struct{})
	signals := make(chan os.Signal, 2)
	stop := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) { // nohup ignores it
		stop = append(stop, syscall.SIGHUP) // the terminal is gone
	}
	signal.Notify(signals, stop...)
	// Whoever reads the output may stop reading, like head. Then writing fails, but the program does not end, because a run
	// has to restore the machine. The signal is caught rather than ignored: the programs that a run starts would ignore it too.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	go func() {
		<-signals // stop, restore, and render what there is
		cancel(errInterrupted)
		for s := range signals {
			if s != syscall.SIGHUP { // a terminal that goes may send several
				close(hurry) // restore and leave
				return
			}
		}
	}()
	os.Exit(cli.Main(ctx, cli.Process{
		Args: os.Args, Version: version, Image: image, Hurry: hurry,
		Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
	}))
}
