//go:build linux

package process

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
)

// childQuiet in the environment makes this binary act as a process with a quiet
// runtime.
const childQuiet = "SLIPSTREAM_TEST_QUIET"

func TestMain(m *testing.M) {
	if os.Getenv(childQuiet) == "" {
		os.Exit(m.Run())
	}
	if err := errors.Join(Begin(), Quiet()); err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
	fmt.Println("set", slices.Contains(os.Environ(), noPreemption))
	fmt.Println("set", os.Getenv("PATH") != "")
	fmt.Println("set", runtime.GOMAXPROCS(0) == processors)
	fmt.Println("set", debug.SetGCPercent(100) == collectAt)
	tasks, _ := filepath.Glob("/proc/self/task/*")
	for _, task := range tasks {
		slack, err := os.ReadFile("/proc/" + filepath.Base(task) + "/timerslack_ns")
		fmt.Println("slack", strings.TrimSpace(string(slack)), err)
	}
	child, err := exec.Command("cat", "/proc/self/timerslack_ns").Output()
	fmt.Println("child", strings.TrimSpace(string(child)), err)
}

// TestQuiet checks a process after Quiet: its environment, the timer slack of its
// threads, one of which watches the others, and that of a process that it starts.
func TestQuiet(t *testing.T) {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), childQuiet+"=1", "GODEBUG=madvdontneed=1", "GOGC=400")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	count := map[string]int{}
	for s := bufio.NewScanner(strings.NewReader(string(out))); s.Scan(); {
		count[s.Text()]++
	}
	if count["slack 100000000 <nil>"] != 1 || count["slack 50000 <nil>"] < 2 || count["set true"] != 4 ||
		count["child 50000 <nil>"] != 1 || len(count) != 4 {
		t.Errorf("got %s", out)
	}
}
