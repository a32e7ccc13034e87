package serve

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"sync"
	"time"

	"slipstream.dev/internal/experiment"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/report"
	"slipstream.dev/internal/shell"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
)

// pollEvery is how often the size of a run's trials is read. A trial takes seconds.
const pollEvery = time.Second

func (s *Server) live(w http.ResponseWriter, r *http.Request) error {
	name := r.PathValue("name")
	dir, err := s.open(name)
	if err != nil {
		return err
	}
	defer dir.Close()
	return report.Live{Folder: name, Token: s.access.token != "", Running: dir.Running()}.HTML(w)
}

// want tells a run under way to pause, to continue or to stop. It requires a token: without one, every user of the machine could.
func (s *Server) want(w http.ResponseWriter, r *http.Request) error {
	if s.access.token == "" {
		return errors.New("without a token, everybody on this machine could do this: start " + s.program + " serve with --token-file")
	}
	// The cookie is for pages of this site alone, and so is this.
	if err := http.NewCrossOriginProtection().Check(r); err != nil {
		return err
	}
	r.Body = http.MaxBytesReader(w, r.Body, 4<<10)
	wanted, ok := map[string]record.Wanted{"pause": record.WantedPause, "on": record.WantedOn, "stop": record.WantedStop}[r.PostFormValue("run")]
	if !ok {
		return errors.New("run must be pause, on or stop")
	}
	dir, err := s.open(r.PathValue("name"))
	if err != nil {
		return err
	}
	defer dir.Close()
	if !dir.Running() {
		return errors.New("this run has ended")
	}
	if err := dir.Want(wanted); err != nil {
		return err
	}
	http.Redirect(w, r, report.Links{}.Live(r.PathValue("name")), http.StatusSeeOther)
	return nil
}

// events sends the progress of a run after each trial, what it has proved after each block, and its end.
func (s *Server) events(w http.ResponseWriter, r *http.Request) error {
	dir, err := s.open(r.PathValue("name"))
	if err != nil {
		return err
	}
	defer dir.Close()
	w.Header().Set("Content-Type", "text/event-stream")
	out := http.NewResponseController(w)
	send := func(event string, value any) error {
		data, err := json.Marshal(value) // which has no newlines
		if err == nil {
			_, err = fmt.Fprintf(w, "event: %s\ndata: %s\n\n", event, data)
		}
		if err == nil {
			err = out.Flush()
		}
		return err
	}
	tick := time.NewTicker(s.follow.every)
	defer tick.Stop()
	var seen view
	var before record.Wanted
	for {
		running := dir.Running() // before the trials are read, so that none is missed
		now, err := s.follow.look(r.PathValue("name"), dir)
		if err != nil {
			_ = send("end", report.End{Text: err.Error()})
			return nil
		}
		wanted, _ := dir.Wanted() // the run ends if it cannot read it
		if !running {
			now.left, wanted = 0, record.WantedOn
		}
		if now.bytes != seen.bytes || seen.exp == nil || wanted != before || !running {
			err = send("progress", report.ProgressOf(now.progress, now.left, now.trials, wanted))
		}
		before = wanted
		if err == nil && now.sofar != seen.sofar {
			err = send("sofar", now.sofar)
		}
		if err == nil && !running {
			path := filepath.Join(s.folder.Path(), r.PathValue("name"))
			if abs, err := filepath.Abs(path); err == nil {
				path = abs
			}
			resume := s.program + " run --resume " + shell.Quote(path)
			_ = send("end", report.EndOf(now.progress, resume))
			return nil
		}
		if err != nil {
			return nil // the browser has gone
		}
		seen = now
		select {
		case <-tick.C:
		case <-r.Context().Done():
			return nil
		}
	}
}

// follower reads the trials of runs under way, once for all browsers.
type follower struct {
	server *Server
	every  time.Duration

	mu   sync.Mutex
	runs map[string]*view
}

func newFollower(s *Server) *follower {
	return &follower{server: s, every: pollEvery, runs: make(map[string]*view)}
}

// view is what is known of a run.
type view struct {
	exp      *spec.Experiment
	bytes    int64 // of the trials that were read
	trials   []record.Trial
	progress stats.Progress
	left     time.Duration
	// blocks are those that were complete when sofar, a part of the page, was computed; -1 before anything was read.
	blocks int
	sofar  string
}

// mostFollowed bounds the runs that are remembered.
const mostFollowed = 8

// look returns what is known of a run, after reading its new trials.
func (f *follower) look(name string, dir *record.Dir) (view, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	v := f.runs[name]
	size, err := dir.TrialBytes()
	if err != nil {
		return view{}, err
	}
	if v == nil || size < v.bytes { // a torn line was cut off, or the folder is another one
		if len(f.runs) >= mostFollowed {
			clear(f.runs)
		}
		v = &view{blocks: -1}
		if v.exp, err = f.server.results.Experiment(dir); err != nil {
			return view{}, err
		}
		f.runs[name] = v
	}
	if size == v.bytes && v.blocks >= 0 {
		return *v, nil
	}
	if err := v.read(dir); err != nil {
		delete(f.runs, name)
		return view{}, err
	}
	return *v, nil
}

// read adds the trials that are new. What they prove is computed only when a block is complete: an incomplete block proves
// nothing, and the run may need the CPUs.
func (v *view) read(dir *record.Dir) error {
	trials, next, err := dir.TrialsFrom(v.bytes)
	if err != nil {
		return err
	}
	for _, t := range trials {
		t.Series = nil // the largest part, which no table needs
		v.trials = append(v.trials, t)
	}
	v.bytes = next
	if v.progress, err = stats.ProgressOf(v.exp, v.trials); err != nil {
		return err
	}
	v.left = remaining(v.exp, v.progress, v.trials)
	if v.progress.WholeBlocks == v.blocks {
		return nil
	}
	v.blocks = v.progress.WholeBlocks
	if v.blocks == 0 {
		return nil
	}
	summary, err := stats.Analyze(v.exp, v.trials)
	if err != nil {
		return err
	}
	env, err := dir.Environment()
	if err != nil {
		return err
	}
	var b bytes.Buffer
	err = report.New(v.exp, summary, v.trials, env).SoFar(&b)
	v.sofar = b.String()
	return err
}

// remaining estimates how long a run still takes: by the trials of the last block, or by the plan if there is none.
func remaining(exp *spec.Experiment, p stats.Progress, trials []record.Trial) time.Duration {
	missing := float64(p.Trials - p.Done)
	block := p.Trials / max(1, p.Blocks)
	if missing <= 0 || block == 0 {
		return 0
	}
	if len(trials) < block {
		plan := experiment.New(exp)
		return time.Duration(missing / float64(p.Trials) * float64(plan.Time()))
	}
	took := 0.0
	for _, t := range trials[len(trials)-block:] {
		took += t.Took
	}
	return time.Duration(missing * took / float64(block) * float64(time.Second))
}
