package importer

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"regexp"
	"unicode/utf16"
)

// Byte order marks.
var (
	utf8Mark    = []byte{0xef, 0xbb, 0xbf}
	utf16Little = []byte{0xff, 0xfe} // as PowerShell 5 writes with >
	utf16Big    = []byte{0xfe, 0xff}
)

// compressed has the first bytes of compressed files, by format.
var compressed = []struct{ name, begin string }{
	{"gzip", "\x1f\x8b"}, {"zip", "PK\x03\x04"}, {"bzip2", "BZh"}, {"xz", "\xfd7zXZ\x00"}, {"zstd", "\x28\xb5\x2f\xfd"},
}

// decodeText returns a file's text as UTF-8 with lines that end in a line feed. Programs on Windows write other line
// ends, and often UTF-16.
func decodeText(data []byte) ([]byte, error) {
	for _, c := range compressed {
		if bytes.HasPrefix(data, []byte(c.begin)) {
			return nil, fmt.Errorf("it is compressed (%s): decompress it first", c.name)
		}
	}
	switch {
	case bytes.HasPrefix(data, utf16Little):
		data = fromUTF16(data[2:], binary.LittleEndian)
	case bytes.HasPrefix(data, utf16Big):
		data = fromUTF16(data[2:], binary.BigEndian)
	default:
		data = bytes.TrimPrefix(data, utf8Mark)
	}
	if i := bytes.IndexByte(data, 0); i >= 0 {
		return nil, fmt.Errorf("line %d has a byte 0, so it is not text, or UTF-16 without a byte order mark: save it as UTF-8", 1+bytes.Count(data[:i], []byte("\n")))
	}
	data = lineEnd.ReplaceAll(data, []byte("\n"))
	data = colour.ReplaceAll(data, nil)
	if len(bytes.TrimSpace(data)) == 0 {
		return nil, errors.New("it is empty")
	}
	return fromLog(data)
}

var (
	// lineEnd is the end of a line on Windows, or on a terminal, which adds a carriage return.
	lineEnd = regexp.MustCompile(`\r+\n`)
	// colour matches the escape sequences that change a terminal's colour.
	colour = regexp.MustCompile(`\x1b\[[0-9;]*[mK]`)
	// logTime begins each line of a container's log, as in "2024-01-01T00:00:00.1Z stdout F ", and of docker logs --timestamps.
	// P means that the next line continues this one.
	logTime = regexp.MustCompile(`^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[-+]\d\d:\d\d) ?(?:(?:stdout|stderr) ([FP]) ?)?`)
)

// logs are kinds of logs that cannot be read, by the prefix that they give each line.
var logs = []struct {
	prefix *regexp.Regexp
	what   string // the kind, and what to do instead
}{
	{regexp.MustCompile(`^\[pod/[^\]]+\] `), "kubectl logs --prefix: print it without --prefix"},
	{regexp.MustCompile(`^\{"log":"`), "Docker (json-file): print it with docker logs"},
	{regexp.MustCompile(`^[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ \S+: `), "syslog: print it with journalctl -o cat"},
}

// fromLog removes the time with which a log begins each line. The error names a kind of log that cannot be read.
func fromLog(data []byte) ([]byte, error) {
	first, _, _ := bytes.Cut(data, []byte("\n"))
	for _, log := range logs {
		if log.prefix.Match(first) {
			return nil, fmt.Errorf("its lines have the prefixes of %s", log.what)
		}
	}
	if !logTime.Match(first) {
		return data, nil
	}
	var text []byte
	number := 0
	for line := range bytes.Lines(data) {
		number++
		m := logTime.FindSubmatch(line)
		switch {
		case m == nil && len(bytes.TrimSpace(line)) > 0:
			return nil, fmt.Errorf("line %d does not begin with a time, and those before do, as in a container's log: %.100q", number, bytes.TrimSpace(line))
		case m == nil:
			continue
		}
		line = line[len(m[0]):]
		if string(m[1]) == "P" {
			line = bytes.TrimSuffix(line, []byte("\n"))
		}
		text = append(text, line...)
	}
	return text, nil
}

// fromUTF16 converts text to UTF-8. It ignores half a character at the end.
func fromUTF16(data []byte, order binary.ByteOrder) []byte {
	units := make([]uint16, len(data)/2)
	for i := range units {
		units[i] = order.Uint16(data[2*i:])
	}
	return []byte(string(utf16.Decode(units)))
}
