package record

import (
	"fmt"
	"io/fs"
	"os"
)

// A folder cannot be locked or synced on Windows. So two processes can resume the same run there, and a crash of
// the machine may lose the newest files (docs/how-to/hosts.md).

const nonblock = 0

func lock(*os.Root) (func() error, error) { return func() error { return nil }, nil }

func locked(*os.Root) bool { return false }

func syncDir(*os.Root, string) error { return nil }

func oneName(fs.FileInfo) error { return nil }

// Foreign always returns an error, because it cannot check whether this user wrote the folder.
func (d *Dir) Foreign() error {
	return fmt.Errorf("on Windows slipstream cannot tell who owns %s", d.Path)
}
