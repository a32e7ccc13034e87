package worker

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/windows"

	"slipstream.dev/internal/spec"
)

// runs returns an error that says why this operating system cannot run a tool, or nil.
func runs(tool string) error {
	if tool != spec.ToolLatte {
		return fmt.Errorf("this place runs Windows, where the tools are native and latte, not %s", tool)
	}
	return nil
}

// congestionControls returns an error: Windows does not tell.
func congestionControls(uint16, bool) ([]string, error) { return nil, errors.ErrUnsupported }

// job is the job object of the processes of tools. They end when its last handle is closed, and so with this process.
var job = sync.OnceValues(func() (windows.Handle, error) {
	h, err := windows.CreateJobObject(nil, nil)
	if err != nil {
		return 0, err
	}
	limits := windows.JOBOBJECT_EXTENDED_LIMIT_INFORMATION{
		BasicLimitInformation: windows.JOBOBJECT_BASIC_LIMIT_INFORMATION{LimitFlags: windows.JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE},
	}
	_, err = windows.SetInformationJobObject(h, windows.JobObjectExtendedLimitInformation, uintptr(unsafe.Pointer(&limits)), uint32(unsafe.Sizeof(limits)))
	return h, err
})

// spawn starts the process in the job.
func (t *toolEnd) spawn(ctx context.Context) (*exec.Cmd, error) {
	all, err := job()
	if err != nil {
		return nil, fmt.Errorf("make a job: %w", err)
	}
	cmd := exec.CommandContext(ctx, t.argv[0], t.argv[1:]...)
	cmd.Stdout, cmd.Stderr = t.output, t.output
	cmd.WaitDelay = time.Second
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	process, err := windows.OpenProcess(windows.PROCESS_SET_QUOTA|windows.PROCESS_TERMINATE, false, uint32(cmd.Process.Pid))
	if err == nil {
		err = windows.AssignProcessToJobObject(all, process)
		_ = windows.CloseHandle(process)
	}
	if err != nil {
		_ = cmd.Process.Kill()
		return nil, errors.Join(fmt.Errorf("put it into a job: %w", err), cmd.Wait())
	}
	return cmd, nil
}

// home is the folder of an application's server or client. On Windows there is none.
type home struct{}

func newHome(string, map[string][]byte) (*home, error) { return nil, errors.ErrUnsupported }
func (*home) path() string                             { return "" }
func (*home) remove()                                  {}
