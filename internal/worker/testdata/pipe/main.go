// Command pipe is the silent end of a named pipe: "hold NAME" makes it, and "ask NAME" connects to it. It prints a
// line once that is done, and exits when its input ends.
package main

import (
	"fmt"
	"io"
	"log"
	"os"

	"golang.org/x/sys/windows"
)

func main() {
	name := windows.StringToUTF16Ptr(os.Args[2])
	var err error
	if os.Args[1] == "hold" {
		_, err = windows.CreateNamedPipe(name, windows.PIPE_ACCESS_DUPLEX, windows.PIPE_TYPE_BYTE, 1, 256, 256, 0, nil)
	} else {
		_, err = windows.CreateFile(name, windows.GENERIC_READ|windows.GENERIC_WRITE, 0, nil, windows.OPEN_EXISTING, 0, 0)
	}
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("ready")
	_, _ = io.Copy(io.Discard, os.Stdin)
}
