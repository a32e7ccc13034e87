// Package serve shows a folder of results in a browser: a list, each result, two side by side, trends, and the run under
// way. It only reads, except that it can ask a run to pause or stop. It writes no page itself (see internal/report) and
// computes nothing (see Results); it decides who may read, checks what a request names, and follows runs.
package serve

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"slipstream.dev/internal/history"
	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/report"
	"slipstream.dev/internal/spec"
)

// Results computes what the pages of results show.
type Results interface {
	Experiment(*record.Dir) (*spec.Experiment, error)
	Report(*record.Dir) (*report.Model, error)
	Beside(before, after *record.Dir) (report.Beside, error)
}

// Fleet reads the fleet of a cluster.
type Fleet func(context.Context) (*report.Fleet, error)

// Server is the handler of all pages.
type Server struct {
	folder  *history.Folder
	results Results
	fleet   Fleet // nil without a cluster
	access  *access
	// program is what people type, for the commands that pages suggest.
	program string
	mux     *http.ServeMux
	// one is held while a result is computed. Results can be large, and a run under way needs the CPUs.
	one    chan struct{}
	follow *follower
}

// New makes a server of a folder, and of a cluster if fleet is not nil. If token is not empty, everyone needs it; without
// one, only requests to loopback addresses are served.
func New(folder *history.Folder, results Results, fleet Fleet, program, token string) *Server {
	s := &Server{folder: folder, results: results, fleet: fleet, access: newAccess(token), program: program, mux: http.NewServeMux(), one: make(chan struct{}, 1)}
	s.follow = newFollower(s)
	for pattern, page := range map[string]page{
		"GET /{$}":                s.list,
		"GET /result/{name}":      s.result,
		"GET /beside":             s.beside,
		"GET /trend":              s.trend,
		"GET /fleet":              s.showFleet,
		"GET /live/{name}":        s.live,
		"GET /live/{name}/events": s.events,
		"POST /live/{name}":       s.want,
	} {
		s.mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			if err := page(w, r); err != nil {
				refuse(w, err)
			}
		})
	}
	s.mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) { refuse(w, fs.ErrNotExist) })
	return s
}

// page answers a request, unless it returns an error.
type page func(http.ResponseWriter, *http.Request) error

// ServeHTTP answers a request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Content-Security-Policy", report.Policy()+"; frame-ancestors 'none'")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cache-Control", "no-store")
	h.Set("Content-Type", "text/html; charset=utf-8")
	if s.access.permits(w, r) {
		s.mux.ServeHTTP(w, r)
	}
}

// refuse writes a page that says why there is no other.
func refuse(w http.ResponseWriter, err error) {
	m := report.Message{Index: "/", Title: "This cannot be shown", Text: err.Error()}
	code := http.StatusUnprocessableEntity
	if errors.Is(err, fs.ErrNotExist) {
		m.Title, m.Text, code = "There is no such page", "The result may have been moved or removed.", http.StatusNotFound
	}
	w.WriteHeader(code)
	_ = m.HTML(w) // the browser may have gone
}

// pageSize is the number of results on a page of the list.
const pageSize = 25

func (s *Server) list(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	skip, _ := strconv.Atoi(q.Get("skip"))
	l := report.List{Folder: s.folder.Path(), Query: q.Get("q"), Experiment: q.Get("experiment"), Skip: max(0, skip)}
	if s.fleet != nil {
		l.Fleet = "/fleet"
	}
	var err error
	if l.Experiments, err = s.folder.Experiments(); err != nil {
		return err
	}
	by := history.Filter{Experiment: l.Experiment, Words: strings.Fields(l.Query)}
	if l.Results, l.Total, err = s.folder.List(by, l.Skip, pageSize); err != nil {
		return err
	}
	at := func(skip int) string {
		return "/?" + url.Values{"q": {l.Query}, "experiment": {l.Experiment}, "skip": {strconv.Itoa(max(0, skip))}}.Encode()
	}
	if l.Skip > 0 {
		l.Previous = at(l.Skip - pageSize)
	}
	if l.Skip+len(l.Results) < l.Total {
		l.Next = at(l.Skip + pageSize)
	}
	return l.HTML(w)
}

// compute runs one computation at a time, and answers with the page that it wrote. It leaves out a computation whose browser
// has gone before its turn. A browser that does not read its answer holds up nobody else.
func (s *Server) compute(w http.ResponseWriter, r *http.Request, write func(io.Writer) error) error {
	select {
	case s.one <- struct{}{}:
	case <-r.Context().Done():
		return context.Cause(r.Context())
	}
	var page bytes.Buffer
	err := func() error {
		defer func() { <-s.one }() // also if write panics: net/http goes on
		return write(&page)
	}()
	if err == nil {
		_, _ = page.WriteTo(w) // the browser may have gone
	}
	return err
}

// maxShown bounds the trials of a result that is shown, in bytes. slipstream report reads more.
const maxShown = 256 << 20

// open opens a result that is not too large to show.
func (s *Server) open(name string) (*record.Dir, error) {
	dir, err := s.folder.Open(name)
	if err != nil {
		return nil, err
	}
	size, err := dir.TrialBytes()
	if err == nil && size > maxShown {
		err = fmt.Errorf("the trials of %s have %d MiB, and at most %d are shown here: %s report writes its report.html", name, size>>20, maxShown>>20, s.program)
	}
	if err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	return dir, nil
}

func (s *Server) result(w http.ResponseWriter, r *http.Request) error {
	dir, err := s.open(r.PathValue("name"))
	if err != nil {
		return err
	}
	defer dir.Close()
	return s.compute(w, r, func(page io.Writer) error {
		m, err := s.results.Report(dir)
		if err != nil {
			return err
		}
		m.Index = "/"
		return report.HTML(page, m)
	})
}

func (s *Server) beside(w http.ResponseWriter, r *http.Request) error {
	var dirs [2]*record.Dir
	for i, field := range []string{"before", "after"} {
		name := r.FormValue(field)
		if name == "" {
			return errors.New("choose one result under Before and one under After in the list")
		}
		dir, err := s.open(name)
		if err != nil {
			return err
		}
		defer dir.Close()
		dirs[i] = dir
	}
	return s.compute(w, r, func(page io.Writer) error {
		b, err := s.results.Beside(dirs[0], dirs[1])
		if err != nil {
			return err
		}
		b.Index = "/"
		return b.HTML(page)
	})
}

const (
	// lastRuns is how many runs a trend shows unless the request sets the number.
	lastRuns = 200
	// mostRuns bounds what a request can say: many runs take long to search for changes.
	mostRuns = 2000
)

func (s *Server) trend(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	by := history.Selection{Experiment: q.Get("experiment"), Metric: q.Get("metric"), Ratio: q.Get("ratio") != "", Last: lastRuns}
	if n, err := strconv.Atoi(q.Get("last")); err == nil {
		by.Last = min(max(n, 1), mostRuns)
	}
	t := report.TrendPage{Last: by.Last, Metrics: metrics.Comparable()}
	return s.compute(w, r, func(page io.Writer) (err error) {
		if t.Experiments, err = s.folder.Experiments(); err != nil {
			return err
		}
		if t.Trend, err = s.folder.Trend(by); err != nil {
			return err
		}
		return t.HTML(page)
	})
}

func (s *Server) showFleet(w http.ResponseWriter, r *http.Request) error {
	if s.fleet == nil {
		return errors.New("no cluster: start " + s.program + " serve with --fleet")
	}
	return s.compute(w, r, func(page io.Writer) error {
		f, err := s.fleet(r.Context())
		if err != nil {
			return err
		}
		return f.HTML(page)
	})
}

// Run serves connections until the context ends.
func (s *Server) Run(ctx context.Context, listen func(*http.Server) error) error {
	server := &http.Server{Handler: s, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() }) // nothing is lost: no request takes long to change something
	defer stop()
	if err := listen(server); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// longestName bounds the names of files, in bytes, with room for a temporary one.
const longestName = 200

// WriteIndex writes the list and the trends of a folder as files, without what needs a server. create makes a file by its
// name.
func WriteIndex(folder *history.Folder, create func(name string, write func(io.Writer) error) error) error {
	links := report.Links{Files: true}
	results, total, err := folder.List(history.Filter{}, 0, 1<<20)
	if err != nil {
		return err
	}
	var trends []report.TrendPage
	all, err := folder.Experiments()
	if err != nil {
		return err
	}
	l := report.List{Links: links, Folder: "Results", Results: results, Total: total}
	for _, experiment := range all {
		if len(report.TrendFile(experiment)) > longestName {
			continue
		}
		// An experiment without a finished run has no trend.
		if trend, err := folder.Trend(history.Selection{Experiment: experiment, Last: lastRuns}); err == nil {
			l.Experiments = append(l.Experiments, experiment)
			trends = append(trends, report.TrendPage{Links: links, Trend: trend, Last: lastRuns})
		}
	}
	for _, t := range trends {
		t.Experiments = l.Experiments
		if err := create(report.TrendFile(t.Experiment), t.HTML); err != nil {
			return err
		}
	}
	return create("index.html", l.HTML)
}
