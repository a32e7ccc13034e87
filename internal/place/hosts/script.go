package hosts

import (
	"fmt"
	"strings"
	"time"
)

// Before a host has a worker, its shell runs a few lines. The login shell may be any: it only has to start sh,
// which reads the script. So Windows' cmd.exe and PowerShell, which cannot, run no part of the script. A script reports in
// lines that begin with a mark, a word that is new each time. So nothing that a shell's start-up files print is taken for a
// report.

// script returns the request for a script.
func script(mark, text string) request {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	return request{`exec sh -c 'read -r script; eval "$script"'`, `echo "` + mark + ` begin"; ` + strings.Join(lines, " ") + "\n"}
}

// journal is the folder in which accelerators record what they change. A user who may not change anything has
// none.
const journal = "/run/slipstream"

// sudo gives root without a password or not at all, and keeps no record that it did.
const sudo = "sudo -n -k"

// factsScript returns the script that reports what a host is, and in which folders programs run. It tests that with a
// file, whose name it removes at once. The folders are usually on different file systems.
func factsScript(mark string, root bool) string {
	ask := ""
	if root { // sudo keeps a file of those who ask
		ask = `if SUDO true </dev/null >/dev/null 2>&1; then echo "MARK sudo"; fi;`
	}
	script := strings.Replace(`umask 077;
		echo "MARK system $(uname -sm)";
		echo "MARK user $(id -u)";
		set -- $SSH_CONNECTION; echo "MARK address $3";
		if [ -d JOURNAL ]; then echo "MARK journal"; fi;
		ASK
		for d in "$XDG_RUNTIME_DIR" "/run/user/$(id -u)" /tmp /var/tmp "$HOME" /dev/shm; do
			if [ -z "$d" ]; then continue; fi;
			if [ ! -d "$d" ]; then echo "MARK absent $d"; continue; fi;
			if f=$(mktemp "$d/slipstream.XXXXXXXX" 2>/dev/null); then :; else echo "MARK readonly $d"; continue; fi;
			printf "#\041/bin/sh\nexit 0\n" >"$f"; chmod 700 "$f"; exec 9<"$f"; rm -f "$f";
			if /proc/self/fd/9 >/dev/null 2>&1; then echo "MARK folder $d"; else echo "MARK noexec $d"; fi;
			exec 9<&-;
		done;
		echo "MARK end"`, "ASK", ask, 1)
	return strings.NewReplacer("MARK", mark, "JOURNAL", journal, "SUDO", sudo).Replace(script)
}

// copyTime bounds how long a copy may take. Only a connection that broke silently lasts longer.
const copyTime = 30 * time.Minute

// launch returns the script that reads a program from the standard input and becomes it. The program's file
// loses its name before it has its first byte, so that nothing is left of it, however the script ends.
func launch(mark, folder string, b binary, arguments string) string {
	return strings.NewReplacer("MARK", mark, "FOLDER", folder, "SIZE", fmt.Sprint(b.size), "SUM", b.sum, "TIME", fmt.Sprint(int(copyTime.Seconds())), "ARGUMENTS", arguments).
		Replace(`umask 077; f=$(mktemp "FOLDER/slipstream.XXXXXXXX") || exit 1;
		chmod 700 "$f"; exec 8>"$f" 9<"$f"; rm -f "$f";
		echo "MARK send";
		if command -v timeout >/dev/null; then timeout TIME head -c SIZE >&8; else head -c SIZE >&8; fi;
		exec 8>&-; s=$(sha256sum <&9);
		if [ "${s%% *}" != SUM ]; then echo "MARK broken"; exit 1; fi;
		echo "MARK program $$ $f"; exec /proc/self/fd/9 worker ARGUMENTS`)
}

// again returns the script that starts a worker of the program that a process runs. If the journal is the
// run's own, the script removes it once the worker has ended: if the controller is dead, nobody else does.
func again(mark string, p program, root, own bool, arguments string) string {
	work := `AS /proc/PROCESS/exe worker ` + arguments
	if !own {
		return p.script(mark, root, `exec `+work)
	}
	return p.script(mark, root, work+`; s=$?; TIDY exit $s`)
}

// revert returns the script that restores what dead workers have left, and removes a journal that is the run's
// own.
func revert(mark string, p program, root, own bool) string {
	tidy := ""
	if own {
		tidy = "TIDY"
	}
	return p.script(mark, root, `if AS /proc/PROCESS/exe accel revert --killed >/dev/null; then `+tidy+` echo "MARK end"; else echo "MARK failed"; fi`)
}

// script returns a script that runs commands if the process still runs the program, and reports whether it
// does. The program's file has been deleted. The name that it had shows that no other process has taken the
// PID. TIDY removes an empty journal.
func (p program) script(mark string, root bool, commands string) string {
	as := ""
	if root {
		as = sudo + " "
	}
	commands = strings.ReplaceAll(commands, "TIDY", `AS sh -c "if [ \"\$(ls -A JOURNAL/journal)\" = lock ]; then rm -f JOURNAL/journal/lock; rmdir JOURNAL/journal JOURNAL; fi" 2>/dev/null;`)
	return strings.NewReplacer("MARK", mark, "PROCESS", p.process, "FILE", p.file, "AS ", as, "JOURNAL", journal).
		Replace(`if [ "$(readlink /proc/PROCESS/exe)" = "FILE (deleted)" ]; then echo "MARK program"; else echo "MARK gone"; exit 1; fi;
			` + commands)
}
