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

// version is set by the build.
var version = "devel"

var errInterrupted = errors.New("interrupted")

func main() {
	ctx, cancel := context.WithCancelCause(context.Background())
	hurry := make(chan struct{})
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-signals // stop, restore, and render what there is
		cancel(errInterrupted)
		<-signals // restore and leave
		close(hurry)
	}()
	os.Exit(cli.Main(ctx, cli.Process{
		Args: os.Args, Version: version, Hurry: hurry,
		In: os.Stdin, Out: os.Stdout, Err: os.Stderr,
	}))
}
