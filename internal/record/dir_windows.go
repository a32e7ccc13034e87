package record

import (
	"fmt"
	"io/fs"
	"os"
)

// A folder cannot be locked or synced on Windows. So nothing keeps two processes from resuming one run there, and
// a crash of the machine may take the newest names (docs/how-to/hosts.md).

const nonblock = 0

func lock(*os.Root) (func() error, error) { return func() error { return nil }, nil }

func syncDir(*os.Root, string) error { return nil }

func oneName(fs.FileInfo) error { return nil }

// Foreign is an error that says why the folder's commands may not be those of a run of this user.
func (d *Dir) Foreign() error {
	return fmt.Errorf("on Windows slipstream cannot tell who owns %s", d.Path)
}
