package process

import (
	"errors"

	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"
)

// Loading prepares this process to load eBPF programs: kernels before 5.11 charge maps to RLIMIT_MEMLOCK. Pass errors of loading to
// the function that it returns. The ebpf package blames that limit whenever the kernel refuses, even if there is none.
func Loading() (explain func(error) error) {
	limit := rlimit.RemoveMemlock() // if it may not be raised, it may still be large enough
	return func(err error) error {
		if errors.Is(err, unix.EPERM) {
			err = unix.EPERM
		}
		if err == nil {
			return nil
		}
		return errors.Join(err, limit)
	}
}
