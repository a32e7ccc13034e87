package hosts

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"time"

	"github.com/pkg/sftp"
	"golang.org/x/crypto/ssh"
)

// A host that runs Windows has its own SSH server, whose login shell is cmd.exe or PowerShell. Both can run
// the commands here: cmd with one quoted argument. The program comes by SFTP into the user's folder, in which
// both SFTP and commands begin, so that no path needs quotes. Windows does not remove the file of a running
// program: the command removes it once the first worker has ended. If the connection breaks, the server ends
// the command too (its job is killed), and the file stays until the run connects again, or a later one removes
// it.

// isWindows reports whether a server is the one of Windows.
func isWindows(client *ssh.Client) bool {
	return strings.Contains(string(client.ServerVersion()), "OpenSSH_for_Windows")
}

// lookWindows returns the command that reports what a host is.
func lookWindows(mark string) string {
	return strings.ReplaceAll(`cmd /d /c "echo MARK system Windows %PROCESSOR_ARCHITECTURE%& echo MARK connection %SSH_CONNECTION%& echo MARK home %USERPROFILE%& echo MARK end"`, "MARK", mark)
}

// launchWindows returns the command that starts the first worker, and removes the program once it has ended.
func launchWindows(mark, file, arguments string) string {
	return strings.NewReplacer("MARK", mark, "FILE", file, "ARGUMENTS", arguments).
		Replace(`cmd /d /v:on /c "echo MARK program& .\FILE worker ARGUMENTS& set e=!errorlevel!& del /q FILE& exit !e!"`)
}

// againWindows returns the command that starts another worker of a running program.
func againWindows(mark, file string) string {
	return strings.NewReplacer("MARK", mark, "FILE", file).Replace(`cmd /d /c "echo MARK program& .\FILE worker --remote"`)
}

// programs matches the names that the program has on a host.
var programs = regexp.MustCompile(`^slipstream-[a-z2-7]{16}\.exe$`)

// files gives do access to the files of a host that runs Windows, for a limited time.
func (h *host) files(ctx context.Context, limit time.Duration, do func(*sftp.Client) error) error {
	client, err := h.connect(ctx)
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, stop := within(ctx, limit, h.name, client)
	defer stop()
	files, err := sftp.NewClient(client, sftp.UseConcurrentWrites(true)) // else each 32 KiB wait for an answer
	if err == nil {
		err = do(files)
	}
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// put copies the program to a host that runs Windows. If that fails, or ctx ends meanwhile, which closes the
// connection, what has been copied is removed.
func (h *host) put(ctx context.Context, b binary) (file string, err error) {
	file = "slipstream-" + strings.ToLower(rand.Text())[:16] + ".exe"
	created := false
	err = h.files(ctx, copyTime, func(files *sftp.Client) error {
		from, err := os.Open(b.file)
		if err != nil {
			return err
		}
		defer from.Close()
		to, err := files.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL)
		if err != nil {
			return err
		}
		created = true
		_, err = to.ReadFrom(from)
		return errors.Join(err, to.Close())
	})
	if created && err != nil {
		err = errors.Join(err, h.remove(context.WithoutCancel(ctx), file))
	}
	if err != nil {
		return "", fmt.Errorf("copy the program to host %s by SFTP (sshd_config must enable it, and the user's folder needs space): %w", h.name, err)
	}
	return file, nil
}

// staleTime is the age from which no run is about to start a program any more.
const staleTime = 10 * time.Minute

// sweep removes the programs of runs whose connection broke: this run's former one, and those that are older
// than its new one by staleTime, by the host's clock. A program that is running stays.
func (h *host) sweep(ctx context.Context, former string) error {
	err := h.files(ctx, scriptTime, func(files *sftp.Client) error {
		own, err := files.Stat(h.program.file)
		if err != nil {
			return err
		}
		all, err := files.ReadDir(".")
		for _, f := range all {
			if f.Name() == former || programs.MatchString(f.Name()) && own.ModTime().Sub(f.ModTime()) > staleTime {
				_ = files.Remove(f.Name())
			}
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("remove leftovers of earlier runs on host %s: %w", h.name, err)
	}
	return nil
}

// startWindows copies the program, and starts the first worker, which claims the host.
func (h *host) startWindows(ctx context.Context, b binary) error {
	file, err := h.put(ctx, b)
	if err != nil {
		return err
	}
	former := h.program.file
	h.program = program{file: file}
	s, err := h.open(ctx, func(mark string) string { return launchWindows(mark, file, h.claim()) })
	if err == nil {
		if err = s.expect(ctx, "program"); err != nil {
			s.client.Close()
		} else {
			h.first, err = h.attach(ctx, s)
		}
	}
	if err != nil {
		err = errors.Join(err, h.remove(context.WithoutCancel(ctx), file))
		h.program.file = former // for the next attempt to sweep
		return err
	}
	return h.sweep(ctx, former)
}

// remove removes a program, if its command has not done so.
func (h *host) remove(ctx context.Context, file string) error {
	err := h.files(ctx, scriptTime, func(files *sftp.Client) error { return files.Remove(file) })
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove %s from the user's folder on host %s: %w", file, h.name, err)
	}
	return nil
}
