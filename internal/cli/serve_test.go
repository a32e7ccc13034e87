package cli

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/history"
	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/report"
	"slipstream.dev/internal/serve"
	"slipstream.dev/internal/spec"
)

// served serves a folder of results, and returns the address.
func served(t *testing.T, parent, token string) (at string, s *serve.Server) {
	t.Helper()
	folder, err := history.Open(parent)
	if err != nil {
		t.Fatal(err)
	}
	s = serve.New(folder, results{}, nil, "slipstream", token)
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	return server.URL, s
}

// fetch requests a page. It follows no redirect.
func fetch(t *testing.T, address string, change ...func(*http.Request)) (*http.Response, string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, address, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range change {
		c(r)
	}
	client := http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	answer, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	var b strings.Builder
	if _, err := bufio.NewReader(answer.Body).WriteTo(&b); err != nil {
		t.Fatal(err)
	}
	return answer, b.String()
}

func TestServePages(t *testing.T) {
	parent := madeOn(t, 3, 4, 5)
	at, _ := served(t, parent, "")
	for path, want := range map[string]struct {
		code int
		text []string
	}{
		"/":                                {200, []string{"3 results", "/result/made-20260105T150405Z", "fastpath: stream throughput", "6.12.1"}},
		"/?q=SLOWER+6.12&experiment=made":  {200, []string{"3 results found"}},
		"/?q=nowhere":                      {200, []string{"No result has all of these words"}},
		"/?skip=2":                         {200, []string{"3 results, here 3 to 3", "Newer"}},
		"/?skip=-9":                        {200, []string{"made-20260105T150405Z"}},
		"/result/made-20260104T150405Z":    {200, []string{"← All results", "<h1>", "Comparison"}},
		"/trend":                           {200, []string{"made: primary metrics over 3 runs", "<svg", "Nothing: the environment is the same"}},
		"/trend?metric=throughput&ratio=1": {200, []string{"throughput, relative to the baseline, over 3 runs"}},
		"/trend?experiment=nothing":        {422, []string{"no result of nothing"}},
		"/trend?metric=%3Cscript%3E":       {422, []string{"This cannot be shown"}},
		"/beside?before=made-20260103T150405Z&after=made-20260105T150405Z": {200, []string{"← All results", "two results side by side"}},
		"/beside?before=made-20260103T150405Z":                             {422, []string{"choose one result under Before and one under After"}},
		"/result/made-20260106T150405Z":                                    {404, []string{"There is no such page"}},
		"/live/made-20260105T150405Z":                                      {200, []string{"run under way", "/live/made-20260105T150405Z/events"}},
		"/report.html":                                                     {404, nil},
	} {
		answer, page := fetch(t, at+path)
		if answer.StatusCode != want.code {
			t.Errorf("%s: %s, want %d", path, answer.Status, want.code)
		}
		has(t, path, page, want.text...)
		policy := answer.Header.Get("Content-Security-Policy")
		if !strings.HasPrefix(policy, "default-src 'none'; script-src 'sha256-") || strings.Contains(strings.Split(policy, ";")[1], "unsafe") {
			t.Errorf("%s: Content-Security-Policy %s", path, policy)
		}
	}
}

// TestServeAccess: without a token only this machine reads; with one, only who has it, and it does not leak.
func TestServeAccess(t *testing.T) {
	const token = "0123456789abcdef"
	parent := madeOn(t, 3)
	open, _ := served(t, parent, "")
	closed, s := served(t, parent, token)
	host := func(name string) func(*http.Request) { return func(r *http.Request) { r.Host = name } }
	bearer := func(text string) func(*http.Request) {
		return func(r *http.Request) { r.Header.Set("Authorization", text) }
	}
	entered, err := http.DefaultTransport.RoundTrip(post(t, closed+"/login", url.Values{"token": {token}}))
	if err != nil {
		t.Fatal(err)
	}
	entered.Body.Close()
	cookie := func(value string) func(*http.Request) {
		return func(r *http.Request) { r.AddCookie(&http.Cookie{Name: entered.Cookies()[0].Name, Value: value}) }
	}
	for name, c := range map[string]struct {
		at     string
		change func(*http.Request)
		code   int
	}{
		"loopback":               {open, host("127.0.0.1:80"), 200},
		"localhost":              {open, host("localhost"), 200},
		"IPv6":                   {open, host("[::1]:80"), 200},
		"rebound name":           {open, host("evil.example"), 403},
		"name like an address":   {open, host("127.0.0.1.evil.example:80"), 403},
		"no token":               {closed, host("127.0.0.1"), 403},
		"token":                  {closed, bearer("Bearer " + token), 200},
		"token and its name":     {closed, func(r *http.Request) { bearer("Bearer " + token)(r); host("host.example")(r) }, 200},
		"wrong token":            {closed, bearer("Bearer " + token + "0"), 403},
		"empty token":            {closed, bearer("Bearer "), 403},
		"another scheme":         {closed, bearer("Basic " + token), 403},
		"token as a cookie":      {closed, cookie(token), 403},
		"empty cookie":           {closed, cookie(""), 403},
		"token in the address":   {closed + "/?token=" + token, host("127.0.0.1"), 403},
		"token in another":       {closed + "/login/" + token, host("127.0.0.1"), 403},
		"result without a token": {closed + "/result/made-20260103T150405Z", host("127.0.0.1"), 403},
		"events without a token": {closed + "/live/made-20260103T150405Z/events", host("127.0.0.1"), 403},
	} {
		answer, page := fetch(t, c.at, c.change)
		if answer.StatusCode != c.code || c.code == 403 && strings.Contains(page, "made") {
			t.Errorf("%s: %s\n%.500s", name, answer.Status, page)
		}
	}

	// The link works once, and leads to an address without a secret.
	answer, _ := fetch(t, closed+s.LinkPath())
	if answer.StatusCode != http.StatusSeeOther || answer.Header.Get("Location") != "/" || answer.Header.Get("Referrer-Policy") != "no-referrer" || len(answer.Cookies()) != 1 {
		t.Fatalf("the link: %s, %v", answer.Status, answer.Header)
	}
	given := answer.Cookies()[0]
	if !given.HttpOnly || given.SameSite != http.SameSiteStrictMode || strings.Contains(given.Value, token) {
		t.Errorf("the cookie: %s", given)
	}
	if answer, _ := fetch(t, closed, cookie(given.Value)); answer.StatusCode != 200 {
		t.Errorf("with the cookie: %s", answer.Status)
	}
	if answer, _ := fetch(t, closed+s.LinkPath()); answer.StatusCode != 403 {
		t.Errorf("the link again: %s", answer.Status)
	}
	for text, code := range map[string]int{token: 303, "wrong": 403, "": 403, strings.Repeat("x", 8<<10): 403} {
		answer, err := http.DefaultTransport.RoundTrip(post(t, closed+"/login", url.Values{"token": {text}}))
		if err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		if answer.StatusCode != code {
			t.Errorf("token %.20q in the form: %s, want %d", text, answer.Status, code)
		}
	}
}

func post(t *testing.T, address string, form url.Values) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, address, strings.NewReader(form.Encode()))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	return r
}

// TestServeHostileFolder: nothing outside the folder is read, nothing in it is executed, and each answer is a page.
func TestServeHostileFolder(t *testing.T) {
	parent, outside := madeOn(t, 3), madeOn(t, 9)
	at, _ := served(t, parent, "")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	named := func(name string) string { return filepath.Join(parent, name+"-20260107T150405Z") }
	copyOf := func(name string) string {
		must(os.CopyFS(named(name), os.DirFS(filepath.Join(parent, "made-20260103T150405Z"))))
		return named(name)
	}
	must(os.Symlink(filepath.Join(outside, "made-20260109T150405Z"), named("link")))
	must(os.Truncate(filepath.Join(copyOf("huge"), "trials.jsonl"), 2<<30)) // a hole: it takes no space
	linked := filepath.Join(copyOf("linked"), "trials.jsonl")
	must(errors.Join(os.Remove(linked), os.Symlink(filepath.Join(outside, "made-20260109T150405Z", "trials.jsonl"), linked)))
	must(os.WriteFile(filepath.Join(copyOf("torn"), "trials.jsonl"), []byte("{}\n"), 0o600))
	script := `"><script>alert(1)<`
	environment := filepath.Join(copyOf(script), "environment.json")
	must(os.WriteFile(environment, []byte(`{"slipstream":"<script>alert(2)</script>","nodes":[{"name":"<script>alert(3)</script>","kernel":"<script>alert(4)</script>"}]}`), 0o600))
	must(os.WriteFile(filepath.Join(named(script), "report.html"), []byte("<script>alert(5)</script>"), 0o600))

	for path, code := range map[string]int{
		"/": 200, "/?q=%3Cscript%3Ealert(6)%3C%2Fscript%3E&experiment=%3Cscript%3Ealert(6)": 200,
		"/result/" + url.PathEscape(filepath.Base(named(script))):             200,
		"/live/" + url.PathEscape(filepath.Base(named(script))):               200,
		"/trend?experiment=" + url.QueryEscape(script):                        200,
		"/result/link-20260107T150405Z":                                       422,
		"/result/huge-20260107T150405Z":                                       422,
		"/live/huge-20260107T150405Z/events":                                  422,
		"/result/torn-20260107T150405Z":                                       422,
		"/result/linked-20260107T150405Z":                                     422,
		"/live/linked-20260107T150405Z/events":                                422,
		"/beside?before=made-20260103T150405Z&after=linked-20260107T150405Z":  422,
		"/beside?before=huge-20260107T150405Z&after=made-20260103T150405Z":    422,
		"/result/..%2F" + filepath.Base(outside) + "%2Fmade-20260109T150405Z": 404,
		"/result/%2e%2e%2fmade-20260109T150405Z":                              404,
		"/result/..%5C..%5Cmade-20260109T150405Z":                             404,
		"/live/..%2F" + filepath.Base(outside) + "%2Fmade-20260109T150405Z":   404,
		"/beside?before=../x-20260109T150405Z&after=made-20260103T150405Z":    404,
		"/result/made-20260103T150405Z%00":                                    404,
		"/result/made-20260103T150405Z/trials.jsonl":                          404,
		"/../../etc/passwd":                                                   307,
		"//etc/passwd":                                                        307,
		"/result/" + strings.Repeat("a", 9000) + "-20260103T150405Z":          422,
	} {
		answer, page := fetch(t, at+path)
		if answer.StatusCode != code {
			t.Errorf("%s: %s, want %d\n%.300s", path, answer.Status, code, page[min(len(page), 14000):])
		}
		if strings.Contains(page, "<script>alert") || code != 200 && strings.Contains(page, "fastpath") || strings.Contains(page, "root:") {
			t.Errorf("%s: the page has what it must not", path)
		}
	}
	_, page := fetch(t, at+"/result/huge-20260107T150405Z")
	has(t, "the page of a result that is too large", page, "the trials of huge-20260107T150405Z have 2048 MiB", "slipstream report")
}

// stalled is a browser that does not read.
type stalled struct {
	http.ResponseWriter
	writes chan struct{} // closed by the first write
	once   sync.Once
	until  <-chan struct{}
}

func (s *stalled) Write(p []byte) (int, error) {
	s.once.Do(func() { close(s.writes) })
	<-s.until
	return len(p), nil
}

// TestServeStalled: a browser that does not read its page does not keep others from theirs.
func TestServeStalled(t *testing.T) {
	folder, err := history.Open(madeOn(t, 3, 4))
	if err != nil {
		t.Fatal(err)
	}
	s := serve.New(folder, results{}, nil, "slipstream", "")
	for _, path := range []string{"/result/made-20260103T150405Z", "/trend", "/beside?before=made-20260103T150405Z&after=made-20260104T150405Z"} {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		get := func(w http.ResponseWriter) {
			s.ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodGet, "http://localhost"+path, nil))
		}
		slow := &stalled{ResponseWriter: httptest.NewRecorder(), writes: make(chan struct{}), until: ctx.Done()}
		var wg sync.WaitGroup
		wg.Go(func() { get(slow) })
		<-slow.writes
		other := httptest.NewRecorder()
		if get(other); other.Code != http.StatusOK {
			t.Errorf("%s: %d beside a browser that does not read", path, other.Code)
		}
		cancel()
		wg.Wait()
	}
}

// panics is Results whose report panics.
type panics struct{ results }

func (panics) Report(*record.Dir) (*report.Model, error) { panic("a result that nobody foresaw") }

// TestServePanic: a page that panics keeps nobody from the others.
func TestServePanic(t *testing.T) {
	folder, err := history.Open(madeOn(t, 3))
	if err != nil {
		t.Fatal(err)
	}
	s := serve.New(folder, panics{}, nil, "slipstream", "")
	get := func(path string) (code int, panicked any) {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		answer := httptest.NewRecorder()
		defer func() { code, panicked = answer.Code, recover() }()
		s.ServeHTTP(answer, httptest.NewRequestWithContext(ctx, http.MethodGet, "http://localhost"+path, nil))
		return
	}
	if _, panicked := get("/result/made-20260103T150405Z"); panicked == nil {
		t.Fatal("the page did not panic")
	}
	if code, _ := get("/trend"); code != http.StatusOK {
		t.Errorf("another page: %d", code)
	}
}

// event is one event of a stream.
type event struct{ name, data string }

// watch reads the events of a run, which its channel has until the stream ends.
func watch(t *testing.T, at, name string, change ...func(*http.Request)) <-chan event {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, at+"/live/"+name+"/events", nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range change {
		c(r)
	}
	answer, err := http.DefaultTransport.RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	if answer.Header.Get("Content-Type") != "text/event-stream" {
		t.Fatalf("%s, %v", answer.Status, answer.Header)
	}
	events := make(chan event, 100)
	go func() {
		defer close(events)
		defer answer.Body.Close()
		var e event
		lines := bufio.NewScanner(answer.Body)
		for lines.Buffer(nil, 8<<20); lines.Scan(); {
			switch name, value, _ := strings.Cut(lines.Text(), ": "); name {
			case "event":
				e.name = value
			case "data":
				e.data = value
			case "":
				events <- e
			}
		}
	}()
	return events
}

// await returns the data of the next event of a name.
func await(t *testing.T, events <-chan event, name string) string {
	t.Helper()
	for {
		select {
		case e, ok := <-events:
			if !ok {
				t.Fatalf("the stream ended without %q", name)
			}
			if e.name == name {
				return e.data
			}
		case <-time.After(30 * time.Second):
			t.Fatalf("no event %q", name)
		}
	}
}

// underWay makes a results folder of a run, and returns a function that appends the trials of a block.
func underWay(t *testing.T, parent string) (dir *record.Dir, block func(int)) {
	t.Helper()
	exp, err := spec.Parse("made.yaml", []byte(resultYAML), nil)
	if err != nil {
		t.Fatal(err)
	}
	text, err := spec.Marshal(exp)
	if err != nil {
		t.Fatal(err)
	}
	dir, err = record.Create(parent, "made", time.Date(2026, 2, 1, 0, 0, 0, 0, time.UTC), text, record.Environment{Version: "test"})
	if err != nil {
		t.Fatal(err)
	}
	order := 0
	return dir, func(b int) {
		t.Helper()
		for _, w := range exp.Spec.Workloads {
			for i, v := range exp.Spec.Variants {
				order++
				x := effects[v.Name][0] * (1 + 0.001*float64((b*7+i)%5))
				measured := map[string]float64{metrics.Throughput: 1e9 * x}
				if w.PingPong != nil {
					measured = map[string]float64{metrics.LatencyP50: 1e-4 / x, metrics.LatencyP99: 2e-4 / x}
				}
				if err := dir.Append(record.Trial{
					Block: b, Order: order, Variant: v.Name, Workload: w.Name, Pairs: 1, Attempt: 1, Status: record.StatusOK, Took: 2, Metrics: measured,
				}); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

// TestServeLive: two servers of one folder follow a run that neither started. One that dies is shown as such, and one that
// is resumed is followed to its end.
func TestServeLive(t *testing.T) {
	parent := madeOn(t, 3)
	dir, block := underWay(t, parent)
	name := filepath.Base(dir.Path)
	block(1)
	var streams []<-chan event
	for range 2 {
		at, _ := served(t, parent, "")
		_, list := fetch(t, at+"/")
		has(t, "the list", list, "/live/"+name, "running")
		streams = append(streams, watch(t, at, name))
	}
	progressOf := func(data string) (p report.Progress) {
		t.Helper()
		if err := json.Unmarshal([]byte(data), &p); err != nil {
			t.Fatal(err)
		}
		return p
	}
	for _, events := range streams {
		if p := progressOf(await(t, events, "progress")); p.Done != 10 || p.Trials != 60 || !strings.HasPrefix(p.Text, "10 of 60 trials, 1 of 6 blocks, about 1m40s left") {
			t.Errorf("%+v", p)
		}
		has(t, "what is proved", await(t, events, "sofar"), "Comparison so far")
	}
	block(2)
	for _, events := range streams {
		for progressOf(await(t, events, "progress")).Done != 20 { // the block may come in parts
		}
		has(t, "what is proved", await(t, events, "sofar"), "n 2")
	}
	if err := dir.Close(); err != nil { // as the kernel does for a process that dies
		t.Fatal(err)
	}
	for _, events := range streams {
		if last := await(t, events, "progress"); strings.Contains(last, "left") {
			t.Errorf("a run that has ended has time left: %s", last)
		}
		has(t, "the end", await(t, events, "end"), `"complete":false`, "has stopped after 20 of 60 trials", "run --resume "+parent)
	}

	at, _ := served(t, parent, "")
	resumed, err := record.Resume(dir.Path)
	if err != nil {
		t.Fatal(err)
	}
	*dir = *resumed
	events := watch(t, at, name)
	await(t, events, "progress")
	for b := 3; b <= 6; b++ {
		block(b)
	}
	if err := dir.Close(); err != nil {
		t.Fatal(err)
	}
	has(t, "the end", await(t, events, "end"), `"complete":true`, "60 trials")
}

// TestServeWants: who has the token can pause a run under way and stop it, from a page of the server alone.
func TestServeWants(t *testing.T) {
	const token = "0123456789abcdef"
	parent := madeOn(t, 3)
	dir, block := underWay(t, parent)
	defer dir.Close()
	block(1)
	name := filepath.Base(dir.Path)
	open, _ := served(t, parent, "")
	closed, s := served(t, parent, token)
	entered, _ := fetch(t, closed+s.LinkPath())
	want := func(address, run string, change ...func(*http.Request)) (int, string) {
		t.Helper()
		r := post(t, address, url.Values{"run": {run}})
		for _, c := range change {
			c(r)
		}
		answer, err := http.DefaultTransport.RoundTrip(r)
		if err != nil {
			t.Fatal(err)
		}
		defer answer.Body.Close()
		page, err := io.ReadAll(answer.Body)
		if err != nil {
			t.Fatal(err)
		}
		return answer.StatusCode, string(page)
	}
	cookie := func(r *http.Request) { r.AddCookie(entered.Cookies()[0]) }
	header := func(name, value string) func(*http.Request) {
		return func(r *http.Request) { cookie(r); r.Header.Set(name, value) }
	}
	form := func(fields url.Values) func(*http.Request) {
		return func(r *http.Request) {
			cookie(r)
			text := fields.Encode()
			r.Body, r.ContentLength = io.NopCloser(strings.NewReader(text)), int64(len(text))
		}
	}
	for what, c := range map[string]struct {
		address, run string
		change       func(*http.Request)
		code         int
		text         string
	}{
		"no token asked":     {open + "/live/" + name, "stop", cookie, 422, "everybody on this machine could do this"},
		"no token given":     {closed + "/live/" + name, "stop", func(*http.Request) {}, 403, "needs the token"},
		"another site":       {closed + "/live/" + name, "stop", header("Sec-Fetch-Site", "cross-site"), 422, "cross-origin"},
		"another port":       {closed + "/live/" + name, "stop", header("Sec-Fetch-Site", "same-site"), 422, "cross-origin"},
		"an old browser":     {closed + "/live/" + name, "stop", header("Origin", "http://127.0.0.1:1"), 422, "cross-origin"},
		"another wish":       {closed + "/live/" + name, "delete", cookie, 422, "run must be pause, on or stop"},
		"no wish":            {closed + "/live/" + name, "", cookie, 422, "run must be pause, on or stop"},
		"a result":           {closed + "/live/made-20260103T150405Z", "stop", cookie, 422, "this run has ended"},
		"nothing":            {closed + "/live/made-20260109T150405Z", "stop", cookie, 404, ""},
		"outside":            {closed + "/live/..%2F" + filepath.Base(parent) + "%2F" + name, "stop", cookie, 404, ""},
		"by an address":      {closed + "/live/" + name + "?run=stop", "", form(nil), 422, "run must be"},
		"too long an answer": {closed + "/live/" + name, "", form(url.Values{"run": {"stop"}, "and": {strings.Repeat("x", 8<<10)}}), 422, "run must be"},
	} {
		if code, page := want(c.address, c.run, c.change); code != c.code || !strings.Contains(page, c.text) {
			_, main, _ := strings.Cut(page, "<main")
			t.Errorf("%s: %d, want %d and %q in %.3000s", what, code, c.code, c.text, main)
		}
	}
	is := func(wanted record.Wanted) {
		t.Helper()
		if got, err := dir.Wanted(); got != wanted || err != nil {
			t.Errorf("%q is wanted, %v, want %q", got, err, wanted)
		}
	}
	is(record.WantedOn)
	if ended, err := record.Open(filepath.Join(parent, "made-20260103T150405Z")); err != nil {
		t.Error(err)
	} else if wanted, err := ended.Wanted(); wanted != record.WantedOn || err != nil {
		t.Errorf("%q is wanted of a run that has ended, %v", wanted, err)
	}
	events := watch(t, closed, name, cookie)
	await(t, events, "progress")
	for _, c := range []struct {
		run    string
		wanted record.Wanted
		text   string
	}{
		{"pause", record.WantedPause, "it pauses when the block is complete"},
		{"on", record.WantedOn, "about 1m40s left"},
		{"stop", record.WantedStop, "it stops after the trial under way"},
	} {
		if code, page := want(closed+"/live/"+name, c.run, header("Sec-Fetch-Site", "same-origin")); code != http.StatusSeeOther {
			t.Errorf("%s: %d, %s", c.run, code, page)
		}
		is(c.wanted)
		has(t, c.run, await(t, events, "progress"), c.text, fmt.Sprintf(`"wanted":%q`, c.wanted))
	}
	for at, buttons := range map[string]bool{open: false, closed: true} {
		if _, page := fetch(t, at+"/live/"+name, cookie); strings.Contains(page, `value="stop"`) != buttons {
			t.Errorf("buttons: want %v", buttons)
		}
	}
}

func TestReachable(t *testing.T) {
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	for listens, want := range map[string]string{"127.0.0.1:80": "127.0.0.1:80", "[::1]:80": "[::1]:80", "[::]:80": name + ":80", "0.0.0.0:80": name + ":80"} {
		if got := reachable(net.TCPAddrFromAddrPort(netip.MustParseAddrPort(listens))); got != want {
			t.Errorf("%s: %s, want %s", listens, got, want)
		}
	}
}

func TestServeCommand(t *testing.T) {
	parent := madeOn(t, 3)
	short := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(short, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for args, want := range map[string]string{
		"--listen 0.0.0.0:0":                         "other machines may read there only with a token: add --token-file",
		"--listen :0":                                "only with a token",
		"--listen [::]:0":                            "only with a token",
		"--listen 192.0.2.1:0":                       "only with a token",
		"--listen 127.0.0.1:0 --token-file " + short: "the token has 6 characters, and needs at least 16",
		"--listen 127.0.0.1:0 --token-file /none":    "--token-file: open /none",
	} {
		code, out, errs := slipstream(t, append([]string{"serve", parent}, strings.Fields(args)...)...)
		if code != exitUsage || out != "" {
			t.Errorf("%s: exit %d, %q", args, code, out)
		}
		has(t, args, errs, want)
		if strings.Contains(errs, "secret") {
			t.Errorf("%s: the token is in %q", args, errs)
		}
	}
	if code, _, errs := slipstream(t, "serve", filepath.Join(parent, "none")); code != exitUsage {
		t.Errorf("a folder that is not there: exit %d, %s", code, errs)
	}
}

// TestIndex: the pages of a folder as files need no server, and replace no file elsewhere.
func TestIndex(t *testing.T) {
	parent := madeOn(t, 3, 4, 5)
	elsewhere := filepath.Join(t.TempDir(), "index.html")
	if err := os.WriteFile(elsewhere, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(elsewhere, filepath.Join(parent, "index.html")); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time replaces files
		if code, out, errs := slipstream(t, "report", "--index", parent); code != exitGood || !strings.Contains(out, "index.html") {
			t.Fatalf("exit %d, %s%s", code, out, errs)
		}
	}
	if text, err := os.ReadFile(elsewhere); err != nil || string(text) != "mine" {
		t.Errorf("the link's file: %q, %v", text, err)
	}
	for name, want := range map[string][]string{
		"index.html":      {"3 results", `href="made-20260105T150405Z/report.html"`, `href="trend-made.html"`, "data-here"},
		"trend-made.html": {`href="index.html"`, "<svg"},
	} {
		text, err := os.ReadFile(filepath.Join(parent, name))
		if err != nil {
			t.Fatal(err)
		}
		has(t, name, string(text), want...)
		for _, server := range []string{`"/result`, `"/trend`, `"/live`, "data-events", `type="radio"`} {
			if strings.Contains(string(text), server) {
				t.Errorf("%s has %s, which needs a server", name, server)
			}
		}
	}
	entries, err := os.ReadDir(parent)
	if err != nil || len(entries) != 5 {
		t.Errorf("%d entries, %v, want three results and two files", len(entries), err)
	}
}

// TestServeKeepsNothing: all pages come from the results alone. A server that has read everything and one that has just
// started show the same, and an index that was deleted is written again as it was.
func TestServeKeepsNothing(t *testing.T) {
	parent := madeOn(t, 3, 4, 5)
	written := func() (all []string) {
		t.Helper()
		succeed(t, "report", "--index", parent)
		for _, name := range []string{"index.html", "trend-made.html"} {
			page, err := os.ReadFile(filepath.Join(parent, name))
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, string(page))
			if err := os.Remove(filepath.Join(parent, name)); err != nil {
				t.Fatal(err)
			}
		}
		return all
	}
	index := written()
	old, _ := served(t, parent, "")
	fetch(t, old+"/?q=6.12") // which reads all results
	for _, path := range []string{"/", "/?q=slower", "/?skip=2", "/trend", "/result/made-20260104T150405Z", "/beside?before=made-20260103T150405Z&after=made-20260105T150405Z"} {
		fresh, _ := served(t, parent, "")
		_, want := fetch(t, fresh+path)
		if _, got := fetch(t, old+path); got != want {
			t.Errorf("%s differs", path)
		}
	}
	if diff := cmp.Diff(index, written()); diff != "" {
		t.Error(diff)
	}
	entries, err := os.ReadDir(parent)
	if err != nil || len(entries) != 3 {
		t.Errorf("something is left in the folder: %v, %v", entries, err)
	}
}
