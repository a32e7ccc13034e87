// Command pause does nothing until it is told to end. It is the first process
// of a node, of the control plane's namespace, and of every pod's sandbox.
// Processes whose parent dies become its children, and it leaves no zombies.
package main

import (
	"os"
	"os/signal"

	"golang.org/x/sys/unix"
)

func main() {
	// If a process ignores the deaths of its children, the kernel reaps them
	// (sigaction(2), SIGCHLD).
	signal.Ignore(unix.SIGCHLD)
	end := make(chan os.Signal, 1)
	signal.Notify(end, unix.SIGINT, unix.SIGTERM)
	<-end
}
