package cli

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/testenv"
)

// TestOddPlaces: where a user cannot run a command, the command says so at once, and what to do.
func TestOddPlaces(t *testing.T) {
	testenv.NeedRoot(t)
	policy := filepath.Join(t.TempDir(), "policy.yaml")
	testenv.WriteFile(t, policy, "apiVersion: slipstream.dev/v1alpha1\nkind: AccelerationPolicy\nmetadata: {name: p}\nspec: {accelerate: [{rps: {devices: [nic], cpus: all}}]}\n")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	const nobody = 65534
	for _, c := range []struct {
		args  string
		user  uint32
		where string // the working folder: "removed", or "readonly"
		want  string
	}{
		{args: "run demo", user: nobody, want: "a run in a lab creates network namespaces, which only root may: use sudo"},
		{args: "lab up x", user: nobody, want: "lab up creates network namespaces, which only root may: use sudo"},
		{args: "lab exec x node0 -- true", user: nobody, want: "lab exec enters the network namespaces of a lab, which only root may: use sudo"},
		{args: "lab down x", user: nobody, want: "lab down removes network namespaces, which only root may: use sudo"},
		{args: "accel status", user: nobody, want: "accel status reads the settings of every network namespace, which only root may: use sudo"},
		{args: "accel plan demo rps", user: nobody, want: "accel reads and changes settings of the kernel, which only root may: use sudo"},
		{args: "accel apply demo rps", user: nobody, want: "accel reads and changes settings of the kernel, which only root may: use sudo"},
		{args: "accel revert", user: nobody, want: "accel revert changes settings of the kernel, which only root may: use sudo"},
		{args: "agent --policy " + policy, user: nobody, want: "an agent changes settings of the kernel, which only root may: use sudo"},
		{args: "run demo", where: "removed", want: "create results folder: mkdir results: no such file or directory\nslipstream: the folder in which slipstream was started has been removed: change to another one"},
		{args: "validate my.yaml", where: "removed", want: "slipstream: the folder in which slipstream was started has been removed: change to another one"},
		{args: "run demo", where: "readonly", want: "create results folder: mkdir results: read-only file system (--out names another folder)"},
	} {
		cmd := exec.Command("/proc/self/exe", strings.Fields(c.args)...)
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: c.user, Gid: c.user}}
		if c.where != "" {
			dir := t.TempDir()
			spoil := map[string]string{"removed": "rmdir " + dir, "readonly": "mount -t tmpfs -o ro tmpfs " + dir + " && cd " + dir}[c.where]
			cmd = exec.Command("unshare", "--mount", "--net", "sh", "-c", "mount -t tmpfs tmpfs /run && "+spoil+" && exec "+self+" "+c.args)
			cmd.Dir = dir
		}
		out, err := cmd.CombinedOutput()
		if err == nil || !strings.Contains(string(out), c.want) || strings.Contains(string(out), "namespace 3") {
			t.Errorf("%s by user %d, %s: %v\n%s\nwant %s", c.args, c.user, c.where, err, out, c.want)
		}
	}
}

// TestErrorLines: an error has each of its lines once, and says what to do where the system's words do not.
func TestErrorLines(t *testing.T) {
	for _, c := range []struct {
		err  error
		want []string
	}{
		{errors.Join(errors.New("a"), errors.New("b"), errors.New("a")), []string{"a", "b"}},
		{fmt.Errorf("start worker in node0: %w", syscall.EMFILE), []string{"start worker in node0: too many open files", "raise the limit on open files (ulimit -n 65536, or LimitNOFILE= of a service)"}},
		{errors.New("every trial of block 1 failed; the last one: node0: socket: too many open files"), []string{
			"every trial of block 1 failed; the last one: node0: socket: too many open files", "raise the limit on open files (ulimit -n 65536, or LimitNOFILE= of a service)",
		}},
		{fmt.Errorf("write trials.jsonl: %w", syscall.EFBIG), []string{"write trials.jsonl: file too large", "raise the limit on the size of files (ulimit -f unlimited, or LimitFSIZE= of a service)"}},
		{syscall.ENFILE, []string{"too many open files in system", "raise the machine's limit on open files (sysctl fs.file-max)"}},
		{os.ErrNotExist, []string{"file does not exist"}},
	} {
		if diff := cmp.Diff(c.want, errorLines(c.err)); diff != "" {
			t.Errorf("%v (-want +got):\n%s", c.err, diff)
		}
	}
}
