package hosts

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"slipstream.dev/internal/place/build"
)

// The login shell of Windows' SSH server is cmd.exe or PowerShell. Both can run the commands here: cmd with one quoted
// argument. SFTP copies the program to the user's folder, in which both SFTP and commands start, so that no path needs quotes.
// Windows cannot remove the file of a running program, so the command removes it after the first worker has ended. If the
// connection breaks, the server kills the command too (it kills the job object), and the file stays until the run reconnects,
// or a later run removes it.

// factsWindows returns the command that reports what a host is. ipconfig prints the addresses, in the host's language.
func factsWindows(mark string) request {
	return request{command: strings.ReplaceAll(`cmd /d /c "echo MARK begin& echo MARK system Windows %PROCESSOR_ARCHITECTURE%& echo MARK connection %SSH_CONNECTION%& echo MARK home %USERPROFILE%& echo MARK computer %COMPUTERNAME%& ipconfig& echo MARK end"`, "MARK", mark)}
}

// launchWindows returns the command that starts the first worker, and removes the program after the worker has ended. It first
// removes the run's former program, if there is one.
func launchWindows(mark, file, former, arguments string) request {
	if former != "" {
		former = "del /q " + former + "& "
	}
	return request{command: strings.NewReplacer("MARK", mark, "FORMER", former, "FILE", file, "ARGUMENTS", arguments).
		Replace(`cmd /d /v:on /c "FORMERecho MARK begin& .\FILE worker ARGUMENTS& set e=!errorlevel!& del /q FILE& exit !e!"`)}
}

// againWindows returns the command that starts another worker from a running program.
func againWindows(mark, file string) request {
	return request{command: strings.NewReplacer("MARK", mark, "FILE", file).Replace(`cmd /d /c "echo MARK begin& echo MARK program& .\FILE worker --remote"`)}
}

// programs matches the names of copies of the program.
var programs = regexp.MustCompile(`^slipstream-[a-z2-7]{16}\.exe$`)

// files runs an sftp command in the user's folder on the host, with a time limit.
func (h *host) files(ctx context.Context, limit time.Duration, command string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("host %s has not answered within %s", h.name, limit))
	defer cancel()
	h.share(ctx)
	_, err := h.local(ctx, command+"\n", "sftp", "-b", "-")
	return err
}

// put copies the program to a Windows host. If it fails or ctx ends, it removes what it has copied.
func (h *host) put(ctx context.Context, b build.Build) (file string, err error) {
	file = "slipstream-" + strings.ToLower(rand.Text())[:16] + ".exe"
	quoted := `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(filepath.ToSlash(b.File)) + `"`
	if err = h.files(ctx, copyTime, "put "+quoted+" "+file); err == nil {
		return file, nil
	}
	err = fmt.Errorf("copy the program to host %s by SFTP (sshd_config must enable it, and the user's folder needs space): %w", h.name, err)
	return "", errors.Join(err, h.remove(context.WithoutCancel(ctx), file))
}

// staleTime is the age from which a copy is stale: no run would start it any more.
const staleTime = 10 * time.Minute

// Sweep removes stale copies, which runs whose connection broke have left in the folder of this program. They are older than
// this program by staleTime. Windows does not remove the file of a running program.
func Sweep() error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	own, err := os.Stat(self)
	if err != nil {
		return err
	}
	all, err := os.ReadDir(filepath.Dir(self))
	for _, f := range all {
		info, err := f.Info()
		if err == nil && programs.MatchString(f.Name()) && own.ModTime().Sub(info.ModTime()) > staleTime {
			_ = os.Remove(filepath.Join(filepath.Dir(self), f.Name()))
		}
	}
	return err
}

// startWindows copies the program, and starts the first worker, which claims the host.
func (h *host) startWindows(ctx context.Context, b build.Build) error {
	file, err := h.put(ctx, b)
	if err != nil {
		return err
	}
	former := h.program.file
	h.program = program{file: file}
	s, err := h.open(ctx, func(mark string) request { return launchWindows(mark, file, former, h.claim()) })
	if err == nil {
		h.first, err = h.attach(ctx, s)
	}
	if err != nil {
		err = errors.Join(err, h.remove(context.WithoutCancel(ctx), file))
		h.program.file = former // the next attempt removes it
	}
	return err
}

// remove removes a copy of the program, unless its command has done so.
func (h *host) remove(ctx context.Context, file string) error {
	err := h.files(ctx, scriptTime, "rm "+file)
	if err != nil && !strings.Contains(err.Error(), "No such file") {
		return fmt.Errorf("remove %s from the user's folder on host %s: %w", file, h.name, err)
	}
	return nil
}
