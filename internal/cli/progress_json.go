package cli

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"syscall"
	"time"

	"slipstream.dev/internal/experiment"
	"slipstream.dev/internal/record"
)

// progressLine is a line of --progress json. docs/how-to/history.md documents its fields.
type progressLine struct {
	Time   time.Time `json:"time"`
	Event  string    `json:"event"`
	Text   string    `json:"text,omitempty"`
	Folder string    `json:"folder,omitempty"`
	*trialLine
}

// Events of progressLine.
const (
	eventNote    = "note"
	eventResults = "results"
	eventBegins  = "begins"
	eventMoves   = "moves"
	eventEnds    = "ends"
	eventError   = "error"
)

// trialLine has the fields of lines about trials. They have the same names as in trials.jsonl.
type trialLine struct {
	Done     int                `json:"done"`
	Total    int                `json:"total"`
	Left     float64            `json:"left_seconds"`
	Block    int                `json:"block"`
	Period   int                `json:"period,omitempty"`
	Round    int                `json:"round,omitempty"`
	Order    int                `json:"order"`
	Variant  string             `json:"variant"`
	Workload string             `json:"workload"`
	Pairs    int                `json:"pairs"`
	Attempt  int                `json:"attempt"`
	Bytes    uint64             `json:"bytes,omitempty"`
	Messages uint64             `json:"messages,omitempty"`
	Took     float64            `json:"took,omitempty"`
	Status   record.Status      `json:"status,omitempty"`
	Error    string             `json:"error,omitempty"`
	Metrics  map[string]float64 `json:"metrics,omitempty"`
}

// jsonProgress writes a line of JSON for each event, for programs.
type jsonProgress struct {
	w   io.Writer
	now func() time.Time
}

func (p jsonProgress) show(e experiment.Event) {
	if e.Kind == experiment.Note {
		p.note(e.Text)
		return
	}
	t := e.Trial
	line := trialLine{
		Done: e.Done, Total: e.Total, Left: e.Left.Round(time.Second).Seconds(),
		Block: t.Block, Period: t.Period, Round: t.Round, Order: t.Order, Variant: t.Variant, Workload: t.Workload, Pairs: t.Pairs, Attempt: t.Attempt,
	}
	switch e.Kind {
	case experiment.Begins:
		p.write(progressLine{Event: eventBegins, trialLine: &line})
	case experiment.Moves:
		line.Bytes, line.Messages = e.Bytes, e.Messages
		p.write(progressLine{Event: eventMoves, trialLine: &line})
	case experiment.Ends:
		line.Took, line.Status, line.Error, line.Metrics = t.Took, t.Status, t.Error, t.Metrics
		p.write(progressLine{Event: eventEnds, trialLine: &line})
	}
}

func (p jsonProgress) note(text string) { p.write(progressLine{Event: eventNote, Text: text}) }

func (p jsonProgress) results(path string) { p.write(progressLine{Event: eventResults, Folder: path}) }

func (p jsonProgress) end() {}

// Write turns a text for people into a note.
func (p jsonProgress) Write(text []byte) (int, error) {
	p.note(strings.TrimSuffix(string(text), "\n"))
	return len(text), nil
}

// write writes a line at once, so that lines of several goroutines do not mix.
func (p jsonProgress) write(l progressLine) {
	l.Time = p.now().UTC()
	text, err := json.Marshal(l)
	if err != nil {
		panic(err) // a trial that is no JSON would not be on record
	}
	_, _ = p.w.Write(append(text, '\n')) // the run goes on if nobody reads
}

// runForProgram runs an experiment so that each line of stderr is JSON, errors included.
func runForProgram(ctx context.Context, p Process, o runOptions, args []string) error {
	progress := jsonProgress{p.Err, time.Now}
	p.Err = progress
	err := run(ctx, p, o, args)
	if err == nil || errors.Is(err, syscall.EPIPE) {
		return err
	}
	exit := exitError{code: exitFailed}
	if as, ok := errors.AsType[exitError](err); ok {
		if exit.code = as.code; as.err == nil {
			return exit
		}
	}
	for _, line := range errorLines(err) {
		progress.write(progressLine{Event: eventError, Text: line})
	}
	return exit
}
