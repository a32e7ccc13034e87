package record

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"slipstream.dev/internal/testenv"
)

func TestAppendDiskFull(t *testing.T) {
	disk := testenv.Disk(t, "64k")
	d := create(t, disk)
	appendTrials(t, d, 1, 2)

	big := trial(3)
	big.Latency = strings.Repeat("x", 100<<10)
	if err := d.Append(big); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("Append to a full disk: %v, want no space left", err)
	}
	wantTrials(t, d, 1, 2)
	if text, err := os.ReadFile(filepath.Join(d.Path, trialsFile)); err != nil || text[len(text)-1] != '\n' {
		t.Errorf("trials.jsonl ends in a torn line, %v", err)
	}
	appendTrials(t, d, 3) // there is space again
	wantTrials(t, d, 1, 2, 3)
}

// TestCreateDiskFull: at whatever point the disk fills up, there is a whole folder or none.
func TestCreateDiskFull(t *testing.T) {
	disk := testenv.Disk(t, "64k")
	failed := map[string]bool{}
	for space := int64(0); ; space += 4096 {
		free := testenv.Fill(t, disk, space)
		d, err := Create(disk, "demo", started, make([]byte, 8<<10), Environment{Placement: strings.Repeat("x", 8<<10)})
		if err == nil {
			if err := errors.Join(d.Close(), os.RemoveAll(d.Path)); err != nil {
				t.Fatal(err)
			}
			break
		}
		if !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("Create with %d bytes: %v, want no space left", space, err)
		}
		for _, name := range []string{environmentFile, experimentFile} {
			failed[name] = failed[name] || strings.Contains(err.Error(), filepath.Join(disk, "demo-20260301T123005Z", name))
		}
		free()
		if left, err := os.ReadDir(disk); err != nil || len(left) > 0 {
			t.Fatalf("Create with %d bytes leaves %v, %v", space, left, err)
		}
	}
	if !failed[environmentFile] || !failed[experimentFile] {
		t.Errorf("the errors named %v", failed)
	}
}

// TestWriteFileDiskFull: on a full disk a file stays as it was, nothing else is left behind, and the folder can
// still record that a switch is undone.
func TestWriteFileDiskFull(t *testing.T) {
	disk := testenv.Disk(t, "256k")
	d := create(t, disk)
	write := func(size int) error {
		return d.WriteFile("figures/cpu.svg", func(w io.Writer) error {
			_, err := w.Write(make([]byte, size))
			return err
		})
	}
	if err := errors.Join(write(10), d.Switched("large")); err != nil {
		t.Fatal(err)
	}
	free := testenv.Fill(t, disk, 8<<10)
	if err := write(20 << 10); !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), filepath.Join(d.Path, "figures/cpu.svg")) {
		t.Errorf("WriteFile: %v, want no space left, and the file", err)
	}
	if info, err := os.Stat(filepath.Join(d.Path, "figures/cpu.svg")); err != nil || info.Size() != 10 {
		t.Errorf("the old file: %+v, %v", info, err)
	}
	if files, err := os.ReadDir(filepath.Join(d.Path, "figures")); err != nil || len(files) != 1 {
		t.Errorf("figures has %v, %v", files, err)
	}
	free()
	free = testenv.Fill(t, disk, 0)
	if err := d.Switched("huge"); !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), filepath.Join(d.Path, switchedFile)) {
		t.Errorf("Switched: %v, want no space left, and the file", err)
	}
	if variant, err := d.SwitchedVariant(); variant != "large" || err != nil {
		t.Errorf("%q is switched, %v", variant, err)
	}
	if err := d.Switched(""); err != nil {
		t.Errorf("that nothing is switched needs no space: %v", err)
	}
	free()
	if err := write(20 << 10); err != nil {
		t.Error(err)
	}
}
