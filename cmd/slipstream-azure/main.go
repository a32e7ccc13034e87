// Command slipstream-azure shows where Azure has Accelerated Networking and where it is
// wanted, and turns it on or off. It is run as slipstream azure.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"slipstream.dev/internal/azure/cli"
)

// version is set by the build.
var version = "devel"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	go func() {
		<-ctx.Done()
		stop() // a second Ctrl-C ends the process at once; what it did is in its journal
	}()
	os.Exit(cli.Main(ctx, cli.Process{Args: os.Args, Version: version, Out: os.Stdout, Err: os.Stderr}))
}
