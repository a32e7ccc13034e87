package cli

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/testenv"
)

// TestBrowser shows the pages to a real browser, wide, narrow and dark: nothing is wider than the screen, the policy
// forbids nothing that the pages need, and a keyboard is enough. SCREENSHOTS=FOLDER keeps what it saw.
func TestBrowser(t *testing.T) {
	parent := madeOn(t, 3, 4, 5)
	script := filepath.Join(parent, `"><script>alert(1)<-20260107T150405Z`)
	if err := os.CopyFS(script, os.DirFS(filepath.Join(parent, "made-20260103T150405Z"))); err != nil {
		t.Fatal(err)
	}
	succeed(t, "report", "--index", parent)
	at, _ := served(t, parent, "")
	b := testenv.NewBrowser(t)
	pages := map[string]string{
		"list": at + "/", "found": at + "/?q=slower", "trend": at + "/trend?experiment=made", "result": at + "/result/made-20260104T150405Z",
		"beside":  at + "/beside?before=made-20260103T150405Z&after=made-20260105T150405Z",
		"nothing": at + "/nothing", "files": "file://" + parent + "/index.html", "files-trend": "file://" + parent + "/trend-made.html",
	}
	for _, screen := range []struct {
		name  string
		width int
		dark  bool
	}{{"wide", 1400, false}, {"narrow", 390, false}, {"dark", 1000, true}} {
		b.Screen(screen.width, 900, screen.dark)
		for name, address := range pages {
			b.Open(address)
			if wide := b.Eval("document.documentElement.scrollWidth - document.documentElement.clientWidth").(float64); wide > 0 {
				t.Errorf("%s, %s: %g pixels are beside the screen", name, screen.name, wide)
			}
			if name == "list" && b.Eval("[...document.querySelectorAll('.scroll')].some((e) => e.scrollWidth > e.clientWidth)") == true {
				t.Errorf("%s, %s: a column is beside the table", name, screen.name)
			}
			paper := b.Eval("getComputedStyle(document.body).backgroundColor")
			if want := map[bool]string{false: "rgb(255, 255, 255)", true: "rgb(21, 24, 27)"}[screen.dark]; paper != want {
				t.Errorf("%s, %s: the background is %v, want %s", name, screen.name, paper, want)
			}
			b.Screenshot(name + "-" + screen.name)
		}
	}
	t.Run("keyboard", func(t *testing.T) { keyboard(b, at) })
	t.Run("files", func(t *testing.T) {
		b.Open(pages["files"])
		b.Eval("document.querySelector('input[type=search]').focus()")
		for _, key := range strings.Split("20260104", "") {
			b.Key(key)
		}
		b.Await("document.getElementById('count').textContent === '1 of 4 results on this page'")
		b.Await("[...document.querySelectorAll('tbody tr')].filter((r) => r.offsetHeight > 0).length === 1")
	})
	if problems := b.Problems(); problems != "" {
		t.Error(problems)
	}
}

// keyboard searches, chooses two results and compares them without a mouse.
func keyboard(b *testenv.Browser, at string) {
	b.Screen(1400, 900, false)
	b.Open(at + "/")
	focus := func(selector string) {
		for range 40 {
			if b.Eval("document.activeElement.matches('"+selector+"')") == true {
				return
			}
			b.Key("Tab")
		}
		b.Await("document.activeElement.matches('" + selector + "')") // which fails
	}
	focus(".skip")
	b.Await("document.activeElement.getBoundingClientRect().left >= 0")
	focus("input[type=search]")
	for _, key := range strings.Split("made", "") {
		b.Key(key)
	}
	b.Key("Enter")
	b.Await("location.search.includes('q=made') && document.readyState === 'complete'")
	focus("input[name=before]")
	b.Key("Space")
	focus("input[name=after]")
	b.Key("Space")
	focus(".act button")
	b.Key("Enter")
	b.Await("location.pathname === '/beside' && document.querySelector('h1')")
}

// TestBrowserWatches follows a run in a browser, from before its first block to its death.
func TestBrowserWatches(t *testing.T) {
	parent := madeOn(t, 3)
	dir, block := underWay(t, parent)
	at, s := served(t, parent, "0123456789abcdef")
	b := testenv.NewBrowser(t)
	b.Screen(1200, 900, false)
	b.Open(at + s.LinkPath())
	b.Eval("document.querySelector('a[href^=\"/live/\"]').click()")
	b.Await("document.getElementById('text')?.textContent.startsWith('0 of 60 trials')")
	block(1)
	block(2)
	b.Await("document.getElementById('bar').value === 20 && document.querySelectorAll('#sofar .comparison').length > 1")
	before := b.Eval("document.querySelectorAll('#sofar svg.bar').length").(float64)
	if before == 0 {
		t.Error("there are no bars")
	}
	b.Screenshot("live")
	block(3)
	b.Await("document.getElementById('bar').value === 30 && document.title.startsWith('50%')")
	for _, press := range []struct{ button, text string }{{"pause", "it pauses"}, {"on", "left"}, {"stop", "it stops"}} {
		b.Eval("document.querySelector('#wanted button[value=" + press.button + "]').focus()")
		b.Key("Enter")
		b.Await("document.getElementById('text')?.textContent.includes('" + press.text + "')")
		b.Await("document.querySelector('#wanted button[value=" + press.button + "]').hidden")
		b.Screenshot("live-" + press.button)
	}
	if wanted, err := dir.Wanted(); wanted != record.WantedStop || err != nil {
		t.Errorf("%q is wanted, %v", wanted, err)
	}
	if err := dir.Close(); err != nil {
		t.Fatal(err)
	}
	b.Await("document.getElementById('end').textContent.includes('has stopped after 30 of 60 trials')")
	b.Screenshot("died")
	if hidden := b.Eval("document.getElementById('end').hidden"); hidden != false {
		t.Error("the page does not show the end")
	}
	if problems := b.Problems(); problems != "" {
		t.Error(problems)
	}
}

// TestBrowserLogin: a person with the token gets in, and no address has a secret afterwards.
func TestBrowserLogin(t *testing.T) {
	const token = "0123456789abcdef"
	parent := madeOn(t, 3)
	at, s := served(t, parent, token)
	for name, enter := range map[string]func(*testenv.Browser){
		"by the form": func(b *testenv.Browser) {
			b.Open(at + "/")
			b.Await("document.activeElement?.name === 'token'") // the browser gives it the focus after the page has loaded
			b.Screenshot("login")
			for _, key := range strings.Split(token, "") {
				b.Key(key)
			}
			b.Key("Enter")
		},
		"by the link": func(b *testenv.Browser) { b.Open(at + s.LinkPath()) },
	} {
		b := testenv.NewBrowser(t)
		enter(b)
		b.Await("document.querySelector('.results') !== null")
		seen := fmt.Sprint(b.Eval("location.href + document.cookie + document.referrer + document.documentElement.outerHTML"))
		if strings.Contains(seen, token) || strings.Contains(seen, "login") {
			t.Errorf("%s: the page has a secret: %.300s", name, seen)
		}
	}
}
