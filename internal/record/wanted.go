package record

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
)

// wantedFile exists while the run in progress is asked to pause or to stop. Whoever can write it can end the run
// anyway, by removing trials.jsonl.
const wantedFile = "wanted.json"

// Wanted is what a run in progress is asked to do.
type Wanted string

// A run continues unless it is asked to pause or to stop.
const (
	WantedOn    Wanted = ""
	WantedPause Wanted = "pause"
	WantedStop  Wanted = "stop"
)

type wanted struct {
	Run Wanted `json:"run"`
}

// Want tells the run that appends to the folder what to do.
func (d *Dir) Want(w Wanted) error {
	if w == WantedOn {
		return d.wantNothing()
	}
	return d.WriteFile(wantedFile, func(to io.Writer) error { return json.NewEncoder(to).Encode(wanted{w}) })
}

// wantNothing withdraws what the folder's run was asked to do.
func (d *Dir) wantNothing() error {
	if err := d.root.Remove(wantedFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return d.in(err)
	}
	return nil
}

// Wanted returns what the run is asked to do.
func (d *Dir) Wanted() (Wanted, error) {
	data, err := d.ReadFile(wantedFile, 1<<10)
	if errors.Is(err, fs.ErrNotExist) {
		return WantedOn, nil
	}
	var w wanted
	if err == nil {
		err = json.Unmarshal(data, &w)
	}
	if err == nil && w.Run != WantedPause && w.Run != WantedStop {
		err = errors.New("it says neither pause nor stop")
	}
	if err != nil {
		return WantedOn, fmt.Errorf("read %s: %w", d.file(wantedFile), err)
	}
	return w.Run, nil
}
