package record

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"slipstream.dev/internal/shell"
)

// Measured names the files of a results folder from which all others are computed: the environment, the experiment, the trials.
func Measured() []string { return []string{environmentFile, experimentFile, trialsFile} }

// Files of a results folder. Create writes experimentFile last, so a folder that has it is complete.
const (
	environmentFile = "environment.json"
	trialsFile      = "trials.jsonl"
	experimentFile  = "experiment.yaml"
)

// ErrLocked means that another process appends to the folder. OpenLocked and Resume return it.
var ErrLocked = errors.New("another run is writing to it")

// Dir is a results folder. Open opens one for reading. Create and Resume open one for appending, which only one
// process can do at a time. The caller closes it.
type Dir struct {
	// Path of the folder.
	Path string

	root   *os.Root // the folder, wherever Path leads to by now
	trials *os.File // nil for reading only
	unlock func() error
	whole  int64 // bytes of trials.jsonl that are whole lines
	// environment is kept from complete, because a listing opens thousands of folders.
	environment *Environment
}

// FolderName returns the name of the folder of a result: NAME-TIMESTAMP (UTC).
func FolderName(name string, now time.Time) string {
	return name + "-" + now.UTC().Format("20060102T150405Z")
}

// Create makes the folder NAME-TIMESTAMP (UTC) below parent, and parent if it is missing. experiment is the file
// with all defaults. The caller closes the folder.
func Create(parent, name string, now time.Time, experiment []byte, env Environment) (*Dir, error) {
	d := &Dir{Path: filepath.Join(parent, FolderName(name, now))}
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return nil, fmt.Errorf("create results folder: %w", err)
	}
	err := os.Mkdir(d.Path, 0o755)
	if err == nil {
		d.root, err = openRoot(d.Path)
	}
	if err != nil {
		return nil, fmt.Errorf("create results folder: %w", err)
	}
	if err := d.create(experiment, env); err != nil {
		// Nothing has been measured yet, so an incomplete folder would only be in the way.
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
	if d.unlock, err = lock(d.root); err != nil {
		return err
	}
	if d.trials, err = d.root.OpenFile(trialsFile, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o644); err != nil {
		return err
	}
	return d.WriteFile(experimentFile, func(w io.Writer) error {
		_, err := w.Write(experiment)
		return err
	})
}

// Open opens a folder for reading. If Create did not finish the folder, the error names what is missing. If the
// folder has a later format, the error names the program that can read it.
func Open(path string) (*Dir, error) {
	d := &Dir{Path: path}
	var err error
	if d.root, err = openRoot(path); err != nil {
		return nil, fmt.Errorf("open results folder: %w", err)
	}
	if err := d.complete(); err != nil {
		return nil, errors.Join(fmt.Errorf("open results folder %s: %w", path, err), d.Close())
	}
	return d, nil
}

// complete returns an error if a file is missing, is not regular, or has a later format.
func (d *Dir) complete() error {
	for _, name := range []string{environmentFile, trialsFile, experimentFile} {
		err := d.check(name)
		if errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%s is missing: this is not a results folder, or its run stopped before the first trial; start the run again", name)
		}
		if err != nil {
			return err
		}
	}
	env, err := d.Environment()
	if err != nil {
		return err
	}
	d.environment = &env
	return env.check()
}

// OpenLocked opens a folder for reading, and keeps other processes from appending until Close. It changes nothing in the
// folder. If another process appends, the error is ErrLocked.
func OpenLocked(path string) (*Dir, error) {
	d, err := Open(path)
	if err != nil {
		return nil, err
	}
	if d.unlock, err = lock(d.root); err != nil {
		return nil, errors.Join(fmt.Errorf("open results folder %s: %w", path, err), d.Close())
	}
	return d, nil
}

// Resume opens a folder for appending. The first Append cuts off a torn last line.
func Resume(path string) (*Dir, error) {
	d, err := OpenLocked(path)
	if err != nil {
		return nil, err
	}
	if d.trials, err = d.open(trialsFile, os.O_RDWR); err == nil {
		err = d.wantNothing() // a run that was killed may have left a request
	}
	if err == nil {
		if _, d.whole, err = readTrials(d.trials); err != nil {
			err = d.unreadable(err)
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("resume results folder %s: %w", path, err), d.Close())
	}
	return d, nil
}

// cut removes everything after the whole lines, and sets the position of the next write.
func (d *Dir) cut() error {
	if err := d.trials.Truncate(d.whole); err != nil {
		return err
	}
	_, err := d.trials.Seek(d.whole, io.SeekStart)
	return err
}

// Close closes the folder.
func (d *Dir) Close() error { return errors.Join(d.release(), d.root.Close()) }

// release gives up the right to append.
func (d *Dir) release() error {
	var errs []error
	if d.trials != nil {
		errs = append(errs, d.wantNothing(), d.trials.Close())
		d.trials = nil
	}
	if d.unlock != nil {
		errs = append(errs, d.unlock())
		d.unlock = nil
	}
	return errors.Join(errs...)
}

// Append adds a trial, which is on disk when Append returns. On an error, such as a full disk, the earlier trials
// are intact.
func (d *Dir) Append(t Trial) error {
	if d.trials == nil {
		return fmt.Errorf("append to %s: the folder is open for reading only", d.Path)
	}
	line, err := json.Marshal(t)
	if err != nil {
		return fmt.Errorf("append trial %d to %s: %w", t.Order, d.Path, err)
	}
	line = append(line, '\n')
	if err := CheckJSON(line); err != nil || len(line) > maxLine { // nobody could read the folder
		return fmt.Errorf("append trial %d to %s: %w", t.Order, d.Path, cmp.Or(err, fmt.Errorf("it has more than %d MiB", maxLine>>20)))
	}
	if err := d.inPlace(); err != nil {
		return fmt.Errorf("append trial %d to %s: %w", t.Order, d.Path, err)
	}
	if err = d.cut(); err == nil {
		_, err = d.trials.Write(line)
	}
	if err == nil {
		err = datasync(d.trials) // may be the first to report a full disk
	}
	if err != nil {
		err = fmt.Errorf("append trial %d to %s: %w (the trials before it are safe)", t.Order, d.Path, err)
		if cut := d.cut(); cut != nil {
			// The next Append would cut it off. If cutting fails, this folder takes no more trials.
			return errors.Join(err, cut, d.release())
		}
		return err
	}
	d.whole += int64(len(line))
	return nil
}

// ErrRemoved means that somebody has removed or replaced trials.jsonl while the folder was open for appending. What is appended
// would be lost.
var ErrRemoved = errors.New(trialsFile + " was removed or replaced while the run wrote to it: the trials since then are lost, so start the run again")

// inPlace returns an error if the file that Append writes is no longer the one of the folder.
func (d *Dir) inPlace() error {
	named, err := d.root.Lstat(trialsFile)
	if errors.Is(err, fs.ErrNotExist) {
		return ErrRemoved
	}
	if err != nil {
		return d.in(err)
	}
	opened, err := d.trials.Stat()
	if err == nil && !os.SameFile(named, opened) {
		return ErrRemoved
	}
	return err
}

// Trials reads all trials, in the order in which they were run. It leaves out a torn last line, whose trial Append did
// not finish. Any other line that is not a trial is an error.
func (d *Dir) Trials() ([]Trial, error) {
	trials, _, err := d.TrialsFrom(0)
	return trials, err
}

// TrialsFrom reads the trials from a byte offset of the file on, and returns the offset at which to continue. Errors
// count lines from the offset.
func (d *Dir) TrialsFrom(offset int64) (trials []Trial, next int64, err error) {
	f, err := d.open(trialsFile, os.O_RDONLY)
	if err == nil {
		defer f.Close()
		_, err = f.Seek(offset, io.SeekStart)
	}
	if err != nil {
		return nil, offset, fmt.Errorf("read trials: %w", err)
	}
	trials, read, err := readTrials(f)
	if err != nil {
		return nil, offset, d.unreadable(err)
	}
	return trials, offset + read, nil
}

// TrialBytes returns the size of the trials in bytes, which grows with each trial.
func (d *Dir) TrialBytes() (int64, error) {
	info, err := d.root.Stat(trialsFile)
	if err != nil {
		return 0, d.in(err)
	}
	return info.Size(), nil
}

// unreadable adds the path to an error of readTrials. For a damaged line, it says how to continue without the line: a
// resumed run measures missing trials again.
func (d *Dir) unreadable(err error) error {
	err = fmt.Errorf("read trials: %s:%w", d.file(trialsFile), err)
	if line, ok := errors.AsType[damagedLine](err); ok {
		err = fmt.Errorf("%w. To go on without that trial, keep a copy of the file, remove line %d, and measure it again: slipstream run --resume %s", err, line.number, shell.Quote(d.Path))
	}
	return err
}

// damagedLine means that a line of trials.jsonl is no trial. Its text begins with the number of the line.
type damagedLine struct {
	number int
	error
}

func (l damagedLine) Error() string {
	return fmt.Sprintf("%d: this line is damaged (%v)", l.number, l.error)
}
func (l damagedLine) Unwrap() error { return l.error }

// ReadTrials reads the lines of trials.jsonl, like Dir.Trials. Errors begin with the line number.
func ReadTrials(from io.Reader) ([]Trial, error) {
	trials, _, err := readTrials(from)
	return trials, err
}

// readTrials also returns how many bytes are whole lines. Only a line with its newline is whole: Append writes
// that last. Errors begin with the line number.
func readTrials(from io.Reader) (trials []Trial, whole int64, err error) {
	r := bufio.NewReader(from)
	for n := 1; ; n++ {
		line, err := readLine(r)
		if err == io.EOF {
			return trials, whole, nil
		}
		if err != nil {
			return nil, 0, fmt.Errorf("%d: %w", n, err)
		}
		var t Trial
		if err := CheckJSON(line); err != nil {
			return nil, 0, fmt.Errorf("%d: %w", n, err)
		}
		if err := json.Unmarshal(line, &t); err != nil {
			return nil, 0, damagedLine{n, err}
		}
		if t.Block < 1 || t.Variant == "" || t.Workload == "" {
			return nil, 0, damagedLine{n, errors.New("not a trial: block, variant or workload is missing")}
		}
		trials = append(trials, t)
		if whole += int64(len(line)); whole > maxTrials {
			return nil, 0, fmt.Errorf("%d: the trials have more than %d MiB", n, maxTrials>>20)
		}
	}
}

// Experiment returns the experiment file with all defaults.
func (d *Dir) Experiment() ([]byte, error) {
	data, err := d.read(experimentFile)
	if err != nil {
		return nil, fmt.Errorf("read experiment: %w", err)
	}
	return data, nil
}

// Running reports whether a process appends to the folder. It is false on Windows, where a folder cannot be locked.
func (d *Dir) Running() bool { return locked(d.root) }

// Environment returns the environment at the start of the run.
func (d *Dir) Environment() (Environment, error) {
	if d.environment != nil {
		return *d.environment, nil
	}
	var env Environment
	data, err := d.read(environmentFile)
	if err != nil {
		return env, fmt.Errorf("read environment: %w", err)
	}
	if err := Decode(data, &env); err != nil {
		return env, fmt.Errorf("read environment: %s: %w", d.file(environmentFile), err)
	}
	return env, nil
}

// ReadEnvironment reads the content of environment.json, and returns an error if the result has a later format.
func ReadEnvironment(data []byte) (Environment, error) {
	var env Environment
	if err := Decode(data, &env); err != nil {
		return env, err
	}
	return env, env.check()
}

// check returns an error if the result has a later format.
func (e Environment) check() error {
	if e.SchemaVersion > SchemaVersion {
		return fmt.Errorf("it has schemaVersion %d and this program reads up to %d: read it with slipstream %s, which wrote it, or a later one", e.SchemaVersion, SchemaVersion, e.Version)
	}
	return nil
}
