package record

import (
	"io"
	"strings"
	"testing"
)

// endless returns the same text for ever, and counts how many bytes were read.
type endless struct {
	text []byte
	read int64
}

func newEndless(of string) *endless {
	return &endless{text: []byte(strings.Repeat(of, 64<<10))}
}

// Read uses copy, because a loop over a hundred million bytes takes a minute with the race detector.
func (e *endless) Read(p []byte) (int, error) {
	n := copy(p, e.text)
	e.read += int64(n)
	return n, nil
}

// TestLimits: a text that is too long is read up to its limit, and a text that would decode into much more memory is
// not decoded.
func TestLimits(t *testing.T) {
	line := newEndless("{")
	if _, _, err := readTrials(line); err == nil || err.Error() != "1: the line has more than 32 MiB" || line.read > maxLine+1<<20 {
		t.Errorf("a line without an end: %v after %d bytes", err, line.read)
	}
	file := newEndless("x")
	if _, err := ReadAtMost(file, maxFile); err == nil || err.Error() != "it has more than 64 MiB" || file.read > maxFile+1<<20 {
		t.Errorf("a file without an end: %v after %d bytes", err, file.read)
	}
	for _, many := range []string{"{},", "null,"} {
		hosts := strings.Repeat(many, maxObjects+1)
		text := `{"block":1,"variant":"a","workload":"b","hosts":[` + strings.TrimSuffix(hosts, ",") + "]}\n"
		if _, _, err := readTrials(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), "1: it has ") || !strings.Contains(err.Error(), " at most 1048576 are read") {
			t.Errorf("a trial of %d hosts %s: %v", maxObjects+1, many, err)
		}
	}
	huge := trial(2)
	huge.Latency = strings.Repeat("x", maxLine)
	if err := create(t, t.TempDir()).Append(huge); err == nil || !strings.Contains(err.Error(), "append trial 2 to ") || !strings.HasSuffix(err.Error(), ": it has more than 32 MiB") {
		t.Errorf("a trial that cannot be read again: %v", err)
	}
	if data, err := ReadAtMost(io.LimitReader(newEndless("x"), 5), 5); err != nil || len(data) != 5 {
		t.Errorf("as much as the limit: %d bytes, %v", len(data), err)
	}
}
