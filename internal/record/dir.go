package record

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Files of a results folder. Those that Create writes are all there or the
// folder is incomplete: experimentFile comes last.
const (
	environmentFile = "environment.json"
	trialsFile      = "trials.jsonl"
	experimentFile  = "experiment.yaml"
)

// switchedFile is there while something is switched, and names the variant.
const switchedFile = "switched.json"

type switched struct {
	Variant string `json:"variant"`
}

// ErrLocked is the error of Resume where another process appends to the folder.
var ErrLocked = errors.New("another run is writing to it")

// Dir is a results folder. Open gives one to read, Create and Resume one to
// append to, which no other process can do at the same time.
type Dir struct {
	// Path of the folder.
	Path string

	trials *os.File // nil for reading only
	unlock func() error
	whole  int64 // bytes of trials.jsonl that are whole lines
}

// Create makes the folder NAME-TIMESTAMP (UTC) below parent, which it makes too.
// experiment is the file as resolved. The caller closes the folder.
func Create(parent, name string, now time.Time, experiment []byte, env Environment) (*Dir, error) {
	d := &Dir{Path: filepath.Join(parent, name+"-"+now.UTC().Format("20060102T150405Z"))}
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return nil, fmt.Errorf("create results folder: %w", err)
	}
	if err := os.Mkdir(d.Path, 0o755); err != nil {
		return nil, fmt.Errorf("create results folder: %w", err)
	}
	if err := d.create(experiment, env); err != nil {
		// Nothing is measured yet, so half a folder would only be in the way.
		return nil, errors.Join(fmt.Errorf("create results folder %s: %w", d.Path, err), d.Close(), os.RemoveAll(d.Path))
	}
	return d, nil
}

func (d *Dir) create(experiment []byte, env Environment) error {
	env.SchemaVersion = SchemaVersion
	err := d.WriteFile(environmentFile, func(w io.Writer) error {
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		return enc.Encode(env)
	})
	if err != nil {
		return err
	}
	if err := d.openTrials(os.O_CREATE | os.O_EXCL); err != nil {
		return err
	}
	return d.WriteFile(experimentFile, func(w io.Writer) error {
		_, err := w.Write(experiment)
		return err
	})
}

// Open opens a folder to read. A folder that Create did not finish is an error
// that names what is missing, and one of a later format names the program to read it with.
func Open(path string) (*Dir, error) {
	for _, name := range []string{environmentFile, trialsFile, experimentFile} {
		_, err := os.Stat(filepath.Join(path, name))
		if errors.Is(err, fs.ErrNotExist) {
			if _, err := os.Stat(path); err != nil {
				return nil, fmt.Errorf("open results folder: %w", err)
			}
			return nil, fmt.Errorf("open results folder %s: %s is missing: this is not a results folder, or its run stopped before the first trial; start the run again", path, name)
		}
		if err != nil {
			return nil, fmt.Errorf("open results folder: %w", err)
		}
	}
	d := &Dir{Path: path}
	env, err := d.Environment()
	if err != nil {
		return nil, err
	}
	if env.SchemaVersion > SchemaVersion {
		return nil, fmt.Errorf("open results folder %s: it has schemaVersion %d and this program reads up to %d: read it with slipstream %s, which wrote it, or a later one", path, env.SchemaVersion, SchemaVersion, env.Version)
	}
	return d, nil
}

// Resume opens a folder to append to. It cuts off a last line that was torn,
// and fails with ErrLocked where another process appends.
func Resume(path string) (*Dir, error) {
	d, err := Open(path)
	if err != nil {
		return nil, err
	}
	if err := d.openTrials(0); err != nil {
		return nil, errors.Join(fmt.Errorf("resume results folder %s: %w", path, err), d.Close())
	}
	return d, nil
}

func (d *Dir) openTrials(flag int) (err error) {
	if d.unlock, err = lock(d.Path); err != nil {
		return err
	}
	if d.trials, err = os.OpenFile(filepath.Join(d.Path, trialsFile), flag|os.O_RDWR, 0o644); err != nil {
		return err
	}
	if _, d.whole, err = readTrials(d.trials); err != nil {
		return err
	}
	return d.cut()
}

// cut leaves whole lines only, with the next write after them.
func (d *Dir) cut() error {
	if err := d.trials.Truncate(d.whole); err != nil {
		return err
	}
	_, err := d.trials.Seek(d.whole, io.SeekStart)
	return err
}

// Close gives up the right to append.
func (d *Dir) Close() error {
	var errs []error
	if d.trials != nil {
		errs = append(errs, d.trials.Close())
		d.trials = nil
	}
	if d.unlock != nil {
		errs = append(errs, d.unlock())
		d.unlock = nil
	}
	return errors.Join(errs...)
}

// Append adds a trial, which is on disk when it returns. On an error, a full
// disk above all, the trials before it stand as they did.
func (d *Dir) Append(t Trial) error {
	if d.trials == nil {
		return fmt.Errorf("append to %s: the folder is open for reading only", d.Path)
	}
	line, err := json.Marshal(t)
	if err != nil {
		return fmt.Errorf("append trial %d to %s: %w", t.Order, d.Path, err)
	}
	line = append(line, '\n')
	_, err = d.trials.Write(line)
	if err == nil {
		err = datasync(d.trials) // may be the first to hear of a full disk
	}
	if err != nil {
		err = fmt.Errorf("append trial %d to %s: %w (the trials before it are safe)", t.Order, d.Path, err)
		if cut := d.cut(); cut != nil {
			// A later line would join the torn one; the next Resume cuts it.
			return errors.Join(err, cut, d.Close())
		}
		return err
	}
	d.whole += int64(len(line))
	return nil
}

// Switched keeps the name of the variant whose switch is made, and with "" that what was
// found is back. It is on disk when it returns.
func (d *Dir) Switched(variant string) error {
	if variant == "" {
		err := os.Remove(filepath.Join(d.Path, switchedFile))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("record that nothing is switched: %w", err)
		}
		return syncDir(d.Path)
	}
	return d.WriteFile(switchedFile, func(w io.Writer) error {
		return json.NewEncoder(w).Encode(switched{variant})
	})
}

// SwitchedFor is the name of the variant whose switch is made, "" if none is.
func (d *Dir) SwitchedFor() (string, error) {
	data, err := os.ReadFile(filepath.Join(d.Path, switchedFile))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	var s switched
	if err == nil {
		err = json.Unmarshal(data, &s)
	}
	if err == nil && s.Variant == "" {
		err = errors.New("it names no variant")
	}
	if err != nil {
		return "", fmt.Errorf("read %s: %w", filepath.Join(d.Path, switchedFile), err)
	}
	return s.Variant, nil
}

// LeftSwitched are the results folders below parent in which something is still switched.
func LeftSwitched(parent string) []string {
	folders, _ := os.ReadDir(parent) // without a parent there are none
	var left []string
	for _, f := range folders {
		path := filepath.Join(parent, f.Name())
		if _, err := os.Stat(filepath.Join(path, switchedFile)); err == nil {
			left = append(left, path)
		}
	}
	return left
}

// Trials reads all trials, in the order in which they were run. A torn last
// line, of a trial that Append did not finish, is left out; any other line that
// is no trial is an error.
func (d *Dir) Trials() ([]Trial, error) {
	path := filepath.Join(d.Path, trialsFile)
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read trials: %w", err)
	}
	defer f.Close()
	trials, _, err := readTrials(f)
	if err != nil {
		return nil, fmt.Errorf("read trials: %s:%w", path, err)
	}
	return trials, nil
}

// readTrials also tells how many bytes are whole lines. Only a line that ends
// is whole: Append writes its end last. Errors begin with the line number.
func readTrials(from io.Reader) (trials []Trial, whole int64, err error) {
	r := bufio.NewReader(from)
	for n := 1; ; n++ {
		line, err := r.ReadBytes('\n')
		if err == io.EOF {
			return trials, whole, nil
		}
		if err != nil {
			return nil, 0, fmt.Errorf("%d: %w", n, err)
		}
		var t Trial
		if err := json.Unmarshal(line, &t); err != nil {
			return nil, 0, fmt.Errorf("%d: %w", n, err)
		}
		if t.Block < 1 || t.Variant == "" || t.Workload == "" {
			return nil, 0, fmt.Errorf("%d: not a trial: block, variant or workload is missing", n)
		}
		trials = append(trials, t)
		whole += int64(len(line))
	}
}

// Experiment is the experiment file as resolved.
func (d *Dir) Experiment() ([]byte, error) {
	data, err := os.ReadFile(filepath.Join(d.Path, experimentFile))
	if err != nil {
		return nil, fmt.Errorf("read experiment: %w", err)
	}
	return data, nil
}

// Environment is what the run started on.
func (d *Dir) Environment() (Environment, error) {
	var env Environment
	path := filepath.Join(d.Path, environmentFile)
	data, err := os.ReadFile(path)
	if err != nil {
		return env, fmt.Errorf("read environment: %w", err)
	}
	if err := json.Unmarshal(data, &env); err != nil {
		return env, fmt.Errorf("read environment: %s: %w", path, err)
	}
	return env, nil
}

// WriteFile writes a file of the folder ("report.html", "figures/cpu.svg"),
// whole or not at all: a reader sees the old one until the new one is on disk.
func (d *Dir) WriteFile(name string, write func(io.Writer) error) (err error) {
	path := filepath.Join(d.Path, filepath.FromSlash(name))
	defer func() {
		if err != nil {
			err = fmt.Errorf("write %s: %w", path, err)
		}
	}()
	if strings.Contains(name, "/") {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // it has another name by then, unless something failed
	defer f.Close()
	w := bufio.NewWriter(f)
	if err := write(w); err != nil {
		return err
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if err := f.Chmod(0o644); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}
