package record

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
)

// wantedFile exists while somebody wants the run under way to pause or to stop. Who can write it could end the run anyway,
// by removing trials.jsonl.
const wantedFile = "wanted.json"

// Wanted is what somebody wants a run under way to do.
type Wanted string

// A run goes on unless somebody wants something else.
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

// wantNothing removes what was wanted of the folder's run.
func (d *Dir) wantNothing() error {
	if err := d.root.Remove(wantedFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return d.in(err)
	}
	return nil
}

// Wanted returns what somebody wants the run to do.
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
