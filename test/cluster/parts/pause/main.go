// Command pause does nothing until it is told to end. It is the first process
// of a node and of the control plane's namespace, and of every pod's sandbox:
// what dies there is its child in the end, and it leaves no zombies.
package main

import (
	"os"
	"os/signal"

	"golang.org/x/sys/unix"
)

func main() {
	// A process that ignores the deaths of its children has the kernel reap
	// them (sigaction(2), SIGCHLD).
	signal.Ignore(unix.SIGCHLD)
	end := make(chan os.Signal, 1)
	signal.Notify(end, unix.SIGINT, unix.SIGTERM)
	<-end
}
