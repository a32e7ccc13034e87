package hosts

import (
	"fmt"
	"strings"
	"time"

	"slipstream.dev/internal/place/build"
)

// Before a host has a worker, sh there runs a short script. The login shell only starts sh, which reads the script from
// standard input. So almost any login shell works, and the cmd.exe or PowerShell of Windows, which cannot start sh, runs no
// part of it. A script reports in lines that begin with a mark, a random word, so that nothing that a shell's start-up files
// print is mistaken for a report.

// prelude makes scripts independent of the user's start-up files. It adds the usual folders to PATH, and raises the soft limits
// of file size and memory to the hard limits.
const prelude = `PATH="${PATH:+$PATH:}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"; export PATH; ` +
	`for l in f v; do ulimit -S -$l "$(ulimit -H -$l)" 2>/dev/null; done; `

// script returns the request for a script. The command names sh by its path, because PATH may be anything.
func script(mark, text string) request {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	return request{`exec /bin/sh -c 'read -r script; eval "$script"'`, `echo "` + mark + ` begin"; ` + prelude + strings.Join(lines, " ") + "\n"}
}

// journal is the folder in which accelerators record what they change. It exists only if somebody has changed settings.
const journal = "/run/slipstream"

// sudo runs a command as root without a password, or fails. It leaves no cached credentials.
const sudo = "sudo -n -k"

// factsScript returns the script that reports what a host is, what it lacks, and in which folders programs run. It tests a
// folder with a file that it unlinks immediately. The folders are usually on different file systems. Only root may use the
// reserved space of a file system.
func factsScript(mark string, root bool) string {
	ask := ""
	if root { // only if needed, because sudo leaves a file for each user who runs it
		ask = `if ! command -v sudo >/dev/null 2>&1; then echo "MARK nosudo";
			elif said=$(SUDO /bin/sh -c "/bin/sh -c :; exit \$?" </dev/null 2>&1 >/dev/null); then echo "MARK sudo";
			else echo "MARK refused $(echo "$said" | tail -n 1)"; fi;`
	}
	script := strings.Replace(`umask 077; LC_ALL=C; export LC_ALL;
		echo "MARK system $(uname -sm)";
		echo "MARK user $(id -u)";
		set -- $SSH_CONNECTION; echo "MARK address $3";
		if [ -d JOURNAL ]; then echo "MARK journal"; fi;
		echo "MARK machine $(cat /proc/sys/kernel/random/boot_id 2>/dev/null) $(readlink /proc/self/ns/net 2>/dev/null) $(for n in /sys/class/net/*/device; do cat "${n%/device}/address" 2>/dev/null; done | tr "\n" ,)";
		for t in mktemp chmod rm head readlink; do command -v $t >/dev/null 2>&1 || echo "MARK lacks $t"; done;
		if [ "$(FIRSTSUM </dev/null)" = none ]; then echo "MARK lacks sha256sum"; fi;
		for l in f v n; do echo "MARK limit $l $(ulimit -H -$l)"; done;
		while IFS=: read -r n c g; do
			case "$c" in
			"") m=; w="memory.max pids.max";;
			memory) m=/memory; w=memory.limit_in_bytes;;
			pids) m=/pids; w=pids.max;;
			*) continue;;
			esac;
			while :; do
				for k in $w; do
					if [ -r "/sys/fs/cgroup$m$g/$k" ]; then echo "MARK limit $k $(cat "/sys/fs/cgroup$m$g/$k")"; fi;
				done;
				case "$g" in ""|/) break;; esac;
				g=${g%/*};
			done;
		done 2>/dev/null </proc/self/cgroup;
		ASK
		for d in "$XDG_RUNTIME_DIR" "/run/user/$(id -u)" /tmp /var/tmp "$HOME" /dev/shm; do
			if [ -z "$d" ]; then continue; fi;
			if [ ! -d "$d" ]; then echo "MARK absent $d"; continue; fi;
			if f=$(mktemp "$d/slipstream.XXXXXXXX" 2>/dev/null); then :;
			elif [ -w "$d" ]; then echo "MARK full $d"; continue;
			else echo "MARK readonly $d"; continue; fi;
			if ! printf "#\041/bin/sh\nexit 0\n" 2>/dev/null >"$f"; then rm -f "$f"; echo "MARK full $d"; continue; fi;
			chmod 700 "$f"; exec 9<"$f"; rm -f "$f";
			if /proc/self/fd/9 >/dev/null 2>&1; then
				echo "MARK folder $d";
				set -- $(df -Pk "$d" 2>/dev/null | tail -n 1);
				if [ $# -lt 6 ] || ! [ "$2" -ge "$3" ] 2>/dev/null; then :;
				elif [ "$(id -u)" = 0 ]; then echo "MARK room $(($2 - $3)) $d";
				else echo "MARK room $4 $d"; fi;
			else echo "MARK noexec $d"; fi;
			exec 9<&-;
		done;
		echo "MARK end"`, "ASK", ask, 1)
	return strings.NewReplacer("MARK", mark, "JOURNAL", journal, "SUDO", sudo, "FIRSTSUM", build.SumCommand).Replace(script)
}

// copyTime limits how long a copy may take. Only a silently broken connection reaches it.
const copyTime = 30 * time.Minute

// launch returns the script that reads a program from standard input and becomes it. The program's file is unlinked before its
// first byte is written, so that nothing is left of it, however the script ends. timeout does not inherit the open file:
// busybox's leaves a process behind for a second, and a file that is open for writing cannot be executed. The script reports the
// file as the kernel names it now, which is how other scripts recognise the process: the folder may be a link, and NFS renames an
// unlinked file. Only $$ has the file for certain, because some shells close it in the programs that they start.
func launch(mark, folder string, b build.Build, arguments string) string {
	return strings.NewReplacer("MARK", mark, "FOLDER", folder, "SIZE", fmt.Sprint(b.Size), "SUM", b.Sum, "TIME", fmt.Sprint(int(copyTime.Seconds())), "ARGUMENTS", arguments, "FIRSTSUM", build.SumCommand).
		Replace(`umask 077; f=$(mktemp "FOLDER/slipstream.XXXXXXXX") || exit 1;
		chmod 700 "$f"; exec 8>"$f" 9<"$f"; rm -f "$f";
		echo "MARK send";
		if command -v timeout >/dev/null; then timeout TIME head -c SIZE 8>&- | cat >&8; else head -c SIZE >&8; fi;
		exec 8>&-; s=$(FIRSTSUM <&9);
		if [ "${s%% *}" != SUM ]; then echo "MARK broken"; exit 1; fi;
		echo "MARK program $$ $(readlink /proc/$$/fd/9)"; exec /proc/self/fd/9 worker ARGUMENTS`)
}

// again returns the script that starts another worker from the program that a process runs. With own, the script removes the
// run's journal after the worker has ended: if the controller is dead, nobody else does.
func again(mark string, p program, root, own bool, arguments string) string {
	const work = "AS /proc/PROCESS/exe worker ARGUMENTS"
	if !own {
		return p.script(mark, root, "exec "+work, arguments)
	}
	return p.script(mark, root, work+"; s=$?; TIDY exit $s", arguments)
}

// revert returns the script that restores the settings of dead workers. With own, it also removes the run's journal.
func revert(mark string, p program, root, own bool) string {
	tidy := ""
	if own {
		tidy = "TIDY"
	}
	return p.script(mark, root, `if AS /proc/PROCESS/exe accel revert --killed >/dev/null; then `+tidy+` echo "MARK end"; else echo "MARK failed"; fi`, "")
}

// script returns a script that runs commands if the process still runs the program, and reports whether it does. The program's
// file is deleted, but its name shows that no other process has reused the PID. TIDY removes an empty journal.
// ARGUMENTS are those of a worker, which name a user and a machine: no word in them stands for anything.
func (p program) script(mark string, root bool, commands, arguments string) string {
	as := ""
	if root {
		as = sudo + " "
	}
	commands = strings.ReplaceAll(commands, "TIDY", `AS /bin/sh -c "PATH=/usr/bin:/bin; if [ \"\$(ls -A JOURNAL/journal)\" = lock ]; then rm -f JOURNAL/journal/lock; rmdir JOURNAL/journal JOURNAL; fi" 2>/dev/null;`)
	return strings.NewReplacer("MARK", mark, "PROCESS", p.process, "FILE", p.file, "AS ", as, "JOURNAL", journal, "ARGUMENTS", arguments).
		Replace(`if [ "$(readlink /proc/PROCESS/exe)" = "FILE" ]; then echo "MARK program"; else echo "MARK gone"; exit 1; fi;
			` + commands)
}
