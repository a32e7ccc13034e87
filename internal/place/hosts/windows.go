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
)

// A host that runs Windows has its own SSH server, whose login shell is cmd.exe or PowerShell. Both can run
// the commands here: cmd with one quoted argument. The program comes by SFTP into the user's folder, in which
// both SFTP and commands begin, so that no path needs quotes. Windows does not remove the file of a running
// program: the command removes it once the first worker has ended. If the connection breaks, the server ends
// the command too (its job is killed), and the file stays until the run connects again, or a later one removes
// it.

// factsWindows returns the command that reports what a host is. ipconfig prints its addresses, in the language of the host.
func factsWindows(mark string) request {
	return request{command: strings.ReplaceAll(`cmd /d /c "echo MARK begin& echo MARK system Windows %PROCESSOR_ARCHITECTURE%& echo MARK connection %SSH_CONNECTION%& echo MARK home %USERPROFILE%& echo MARK computer %COMPUTERNAME%& ipconfig& echo MARK end"`, "MARK", mark)}
}

// launchWindows returns the command that starts the first worker, and removes the program once it has ended. Before that it removes
// the run's former program, if there is one.
func launchWindows(mark, file, former, arguments string) request {
	if former != "" {
		former = "del /q " + former + "& "
	}
	return request{command: strings.NewReplacer("MARK", mark, "FORMER", former, "FILE", file, "ARGUMENTS", arguments).
		Replace(`cmd /d /v:on /c "FORMERecho MARK begin& .\FILE worker ARGUMENTS& set e=!errorlevel!& del /q FILE& exit !e!"`)}
}

// againWindows returns the command that starts another worker of a running program.
func againWindows(mark, file string) request {
	return request{command: strings.NewReplacer("MARK", mark, "FILE", file).Replace(`cmd /d /c "echo MARK begin& echo MARK program& .\FILE worker --remote"`)}
}

// programs matches the names that the program has on a host.
var programs = regexp.MustCompile(`^slipstream-[a-z2-7]{16}\.exe$`)

// files runs a command of the user's sftp in the user's folder on the host, for a limited time.
func (h *host) files(ctx context.Context, limit time.Duration, command string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("host %s has not answered within %s", h.name, limit))
	defer cancel()
	h.share(ctx)
	_, err := h.local(ctx, command+"\n", "sftp", "-b", "-")
	return err
}

// put copies the program to a host that runs Windows. If that fails, or ctx ends meanwhile, what has been copied is removed.
func (h *host) put(ctx context.Context, b binary) (file string, err error) {
	file = "slipstream-" + strings.ToLower(rand.Text())[:16] + ".exe"
	quoted := `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(filepath.ToSlash(b.file)) + `"`
	if err = h.files(ctx, copyTime, "put "+quoted+" "+file); err == nil {
		return file, nil
	}
	err = fmt.Errorf("copy the program to host %s by SFTP (sshd_config must enable it, and the user's folder needs space): %w", h.name, err)
	return "", errors.Join(err, h.remove(context.WithoutCancel(ctx), file))
}

// staleTime is the age from which no run is about to start a program any more.
const staleTime = 10 * time.Minute

// Sweep removes, from the folder of this program, those of runs whose connection broke: they are older than this one by staleTime.
// A program that is running stays, as Windows keeps its file.
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
func (h *host) startWindows(ctx context.Context, b binary) error {
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
		h.program.file = former // for the next attempt to remove
	}
	return err
}

// remove removes a program, if its command has not done so.
func (h *host) remove(ctx context.Context, file string) error {
	err := h.files(ctx, scriptTime, "rm "+file)
	if err != nil && !strings.Contains(err.Error(), "No such file") {
		return fmt.Errorf("remove %s from the user's folder on host %s: %w", file, h.name, err)
	}
	return nil
}
