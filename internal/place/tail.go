package place

import (
	"strings"
	"sync"
)

// Tail keeps the end of what a program prints.
type Tail struct {
	mu  sync.Mutex
	buf []byte
}

const tailBytes = 2000

func (t *Tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, p...)
	t.buf = t.buf[max(0, len(t.buf)-tailBytes):]
	return len(p), nil
}

// Last returns what was printed, to append to a sentence.
func (t *Tail) Last() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	text := strings.TrimSpace(strings.ToValidUTF8(string(t.buf), ""))
	if text == "" {
		return ""
	}
	return ": " + text
}

// Clip shortens a text from a place, such as an error, to what a person would read.
func Clip(text string) string {
	if len(text) <= 2*tailBytes {
		return text
	}
	return strings.ToValidUTF8(text[:2*tailBytes], "") + "…"
}
