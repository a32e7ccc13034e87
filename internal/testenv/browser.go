package testenv

import (
	"bufio"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Browser is a page of a headless Chromium. It speaks the DevTools protocol over a pipe
// (https://chromedevtools.github.io/devtools-protocol), of which tests need so little that no library is worth its
// dependencies.
type Browser struct {
	t       testing.TB
	to      io.Writer
	session string

	mu       sync.Mutex
	next     int
	answers  map[int]chan answer
	problems []string
}

// answer is a message of the browser: the result of a call, or an event.
type answer struct {
	ID     int             `json:"id"`
	Method string          `json:"method"`
	Params json.RawMessage `json:"params"`
	Result json.RawMessage `json:"result"`
	Error  *struct{ Message string }
}

// NewBrowser starts a browser, which ends with the test.
func NewBrowser(t testing.TB) *Browser {
	t.Helper()
	program := NeedProgram(t, "chromium", "apt install chromium")
	commandsOut, commandsIn, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	answersOut, answersIn, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	profile, err := os.MkdirTemp("", "browser-")
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(program, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage", "--hide-scrollbars",
		"--remote-debugging-pipe", "--user-data-dir="+profile, "about:blank")
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.ExtraFiles = []*os.File{commandsOut, answersIn} // 3 and 4, as the flag has it
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	commandsOut.Close()
	answersIn.Close()
	b := &Browser{t: t, to: commandsIn, answers: make(map[int]chan answer)}
	read := make(chan struct{})
	go func() { defer close(read); b.read(answersOut) }()
	t.Cleanup(func() {
		_ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL)
		_ = c.Wait()
		// Its other processes may still write for a moment.
		Eventually(t, 10*time.Second, "remove the browser's profile", func() string {
			if err := os.RemoveAll(profile); err != nil {
				return err.Error()
			}
			return ""
		})
		<-read
		commandsIn.Close()
		answersOut.Close()
	})
	b.attach()
	return b
}

// attach opens a page.
func (b *Browser) attach() {
	b.t.Helper()
	var target struct{ TargetID string }
	b.call("Target.createTarget", map[string]any{"url": "about:blank"}, &target)
	var session struct{ SessionID string }
	b.call("Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}, &session)
	b.session = session.SessionID
	for _, domain := range []string{"Page", "Runtime", "Log"} {
		b.call(domain+".enable", nil, nil)
	}
}

// read takes messages, which end with a zero byte.
func (b *Browser) read(from io.Reader) {
	r := bufio.NewReader(from)
	for {
		line, err := r.ReadBytes(0)
		if err != nil {
			return
		}
		var a answer
		if json.Unmarshal(line[:len(line)-1], &a) != nil {
			continue
		}
		b.mu.Lock()
		switch a.Method {
		case "":
			if to := b.answers[a.ID]; to != nil {
				to <- a
			}
		case "Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening":
			if text := string(a.Params); !strings.Contains(text, `"source":"network"`) { // such as 404, which the page shows
				b.problems = append(b.problems, text)
			}
		}
		b.mu.Unlock()
	}
}

// call calls a method of the protocol, and decodes its result.
func (b *Browser) call(method string, params map[string]any, into any) {
	b.t.Helper()
	answered := make(chan answer, 1)
	b.mu.Lock()
	b.next++
	id := b.next
	b.answers[id] = answered
	b.mu.Unlock()
	message, err := json.Marshal(map[string]any{"id": id, "method": method, "params": params, "sessionId": b.session})
	if b.session == "" {
		message, err = json.Marshal(map[string]any{"id": id, "method": method, "params": params})
	}
	if err == nil {
		_, err = b.to.Write(append(message, 0))
	}
	if err != nil {
		b.t.Fatalf("browser: %s: %v", method, err)
	}
	select {
	case a := <-answered:
		if a.Error != nil {
			b.t.Fatalf("browser: %s: %s", method, a.Error.Message)
		}
		if into != nil {
			if err := json.Unmarshal(a.Result, into); err != nil {
				b.t.Fatalf("browser: %s: %v", method, err)
			}
		}
	case <-time.After(time.Minute):
		b.t.Fatalf("browser: %s: no answer", method)
	}
}

// Open opens an address, and waits until the page is complete.
func (b *Browser) Open(address string) {
	b.t.Helper()
	var opened struct{ ErrorText string }
	b.call("Page.navigate", map[string]any{"url": address}, &opened)
	if opened.ErrorText != "" {
		b.t.Fatalf("browser: %s: %s", address, opened.ErrorText)
	}
	b.Await("document.readyState === 'complete'")
}

// Await waits until a JavaScript expression is true.
func (b *Browser) Await(expression string) {
	b.t.Helper()
	Await(b.t, time.Minute, expression, func() bool { return b.Eval("Boolean("+expression+")") == true })
}

// Eval returns the value of a JavaScript expression.
func (b *Browser) Eval(expression string) any {
	b.t.Helper()
	var out struct {
		Result           struct{ Value any }
		ExceptionDetails json.RawMessage
	}
	b.call("Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true, "awaitPromise": true}, &out)
	if out.ExceptionDetails != nil {
		b.t.Fatalf("browser: %s: %s", expression, out.ExceptionDetails)
	}
	return out.Result.Value
}

// Screen sets the size of the page in CSS pixels, and the theme.
func (b *Browser) Screen(width, height int, dark bool) {
	b.t.Helper()
	b.call("Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}, nil)
	theme := map[bool]string{true: "dark", false: "light"}[dark]
	b.call("Emulation.setEmulatedMedia", map[string]any{"features": []map[string]any{{"name": "prefers-color-scheme", "value": theme}}}, nil)
}

// Key presses a key: Tab, Enter, Space, or a character.
func (b *Browser) Key(name string) {
	b.t.Helper()
	key := map[string]any{"key": name, "code": name, "text": name}
	switch name {
	case "Tab":
		key = map[string]any{"key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9}
	case "Enter":
		key = map[string]any{"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
	case "Space":
		key = map[string]any{"key": " ", "code": "Space", "windowsVirtualKeyCode": 32, "text": " "}
	}
	for _, kind := range []string{"keyDown", "keyUp"} {
		key["type"] = kind
		b.call("Input.dispatchKeyEvent", key, nil)
	}
}

// Screenshot writes the screen to a PNG file below the folder that SCREENSHOTS names. Without it, it does nothing.
func (b *Browser) Screenshot(name string) {
	b.t.Helper()
	folder := os.Getenv("SCREENSHOTS")
	if folder == "" {
		return
	}
	var out struct{ Data string }
	b.call("Page.captureScreenshot", map[string]any{"format": "png"}, &out)
	data, err := base64.StdEncoding.DecodeString(out.Data)
	if err == nil {
		err = os.WriteFile(fmt.Sprintf("%s/%s.png", folder, name), data, 0o644)
	}
	if err != nil {
		b.t.Fatal(err)
	}
}

// Problems returns what the browser complained about: exceptions, dialogues, and what a policy forbade.
func (b *Browser) Problems() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return strings.Join(b.problems, "\n")
}
