package testenv

import (
	"os"
	"os/exec"
	"runtime"
	"testing"
)

// A test that lacks something is skipped. If CI is set, .ci/gotest makes that a failure. make check sets -short, which leaves
// out every test that needs root or an installed program: it takes as long on a machine that has them.
//
//	NeedRoot      root; EnterNamespace, PrivateMounts and Disk need it too
//	NeedProgram   a program on PATH
//	NeedWine      Wine
//	NeedMachine   something else that is installed or set up; the test finds out whether it is there
//	NeedCPUs      a number of CPUs; with -short too
//	NeedTime      seconds, and nothing of the machine

// NeedMachine skips a test with -short, because it needs something of the machine.
func NeedMachine(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("needs root or an installed program, and -short leaves such tests out")
	}
}

// NeedRoot skips a test that needs root.
func NeedRoot(t testing.TB) {
	t.Helper()
	NeedMachine(t)
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
}

// NeedProgram skips a test if a program is not on PATH, and returns its path. from says where it comes from.
func NeedProgram(t testing.TB, name, from string) string {
	t.Helper()
	NeedMachine(t)
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("needs %s: %s", name, from)
	}
	return path
}

// NeedCPUs skips a test on a machine with fewer CPUs.
func NeedCPUs(t testing.TB, n int) {
	t.Helper()
	if runtime.NumCPU() < n {
		t.Skipf("needs %d CPUs", n)
	}
}

// NeedTime skips a test with -short, because it takes seconds.
func NeedTime(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("takes seconds, and -short leaves such tests out")
	}
}
