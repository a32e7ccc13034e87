package netns

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
)

// dumpTries bounds how often Dump lists something that changes each time.
const dumpTries = 10

// Dump lists something by netlink, such as "links". If that changes meanwhile, Dump asks again: the kernel then marks
// the list as inconsistent (NLM_F_DUMP_INTR).
func Dump[T any](what string, list func() ([]T, error)) ([]T, error) {
	for tries := 1; ; tries++ {
		all, err := list()
		if err == nil {
			return all, nil
		}
		if !errors.Is(err, netlink.ErrDumpInterrupted) || tries == dumpTries {
			return nil, fmt.Errorf("list %s: %w", what, err)
		}
	}
}
