package cli

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"golang.org/x/term"

	"slipstream.dev/internal/experiment"
	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/plain"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/report"
	"slipstream.dev/internal/stats"
)

// progress reports the progress of a run.
type progress interface {
	show(experiment.Event)
	// note reports a text that stays on the screen.
	note(text string)
	// results reports the folder of the results.
	results(path string)
	// end reports that the measurement is over.
	end()
}

// newProgress returns the progress for a program if runForProgram has replaced stderr, else the one for people.
func newProgress(p Process) progress {
	if forProgram, ok := p.Err.(jsonProgress); ok {
		return forProgram
	}
	return newTextProgress(p)
}

// textProgress is for people: one changing line on a terminal, a line per trial elsewhere.
type textProgress struct {
	mu       sync.Mutex
	w        io.Writer
	terminal bool
	columns  func() int // of the terminal now; 0 if it does not say
	line     string     // the last line on the terminal
	previous uint64     // total of bytes or messages a second ago
}

func newTextProgress(p Process) *textProgress {
	return &textProgress{w: p.Stderr, terminal: term.IsTerminal(int(p.Stderr.Fd())), columns: func() int { return columnsOf(p.Stderr) }}
}

// columnsOf returns the width of a terminal in columns; 0 if the file is no terminal, or its width is unknown.
func columnsOf(f *os.File) int {
	width, _, _ := term.GetSize(int(f.Fd()))
	return width
}

func (p *textProgress) show(e experiment.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := e.Trial
	when := fmt.Sprintf("block %d", t.Block)
	if t.Period > 0 {
		when = fmt.Sprintf("period %d", t.Period)
	}
	what := fmt.Sprintf("%d/%d  %s  %s  %s", e.Done, e.Total, when, t.Variant, stats.At(t.Workload, t.Pairs))
	left := ""
	if e.Left > 0 {
		left = "  " + e.Left.Round(time.Second).String() + " left"
	}
	switch e.Kind {
	case experiment.Note:
		p.print(e.Text)
	case experiment.Begins:
		p.previous = 0
		p.status(what + left)
	case experiment.Moves:
		moved, metric := e.Bytes*8, metrics.Throughput
		if e.Bytes < e.Messages*1000 { // for small messages, their number counts
			moved, metric = e.Messages, metrics.Rate
		}
		p.status(what + "  " + report.Quantity(float64(moved-p.previous), metric) + left)
		p.previous = moved
	case experiment.Ends:
		if t.Status == record.StatusFailed {
			p.print(p.wrap(what + "  failed: " + t.Error))
			return
		}
		metric := report.ShownMetric(t.Metrics)
		result := what + "  " + report.Quantity(t.Metrics[metric], metric)
		if p.terminal {
			p.status(result + left)
		} else {
			p.print(result + left)
		}
	}
}

func (p *textProgress) note(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.print(text)
}

func (p *textProgress) results(path string) { p.note("results go to " + path) }

// end leaves the terminal's last line empty.
func (p *textProgress) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.status("")
}

// wrap breaks a long line between words. The terminal would break it anywhere.
func (p *textProgress) wrap(text string) string {
	if columns := p.columns(); p.terminal && columns > 0 && utf8.RuneCountInString(text) > columns {
		return strings.Join(plain.Wrap(text, columns, 2), "\n")
	}
	return text
}

func (p *textProgress) print(text string) {
	status := p.line
	p.status("")
	fmt.Fprintln(p.w, plain.Text(text))
	p.status(status)
}

func (p *textProgress) status(text string) {
	if !p.terminal || text == p.line {
		return
	}
	// A line that the terminal wraps would stay on the screen.
	fmt.Fprint(p.w, "\r\x1b[K"+plain.Cut(plain.Line(text), p.columns()))
	p.line = text
}
