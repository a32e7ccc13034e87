package importer

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"unicode/utf16"
)

// Byte order marks.
var (
	utf8Mark    = []byte{0xef, 0xbb, 0xbf}
	utf16Little = []byte{0xff, 0xfe} // as PowerShell 5 writes with >
	utf16Big    = []byte{0xfe, 0xff}
)

// decodeText returns a file's text as UTF-8 whose lines end in a line feed: Windows has other line ends, and often UTF-16.
func decodeText(data []byte) ([]byte, error) {
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
	data = bytes.ReplaceAll(data, []byte("\r\n"), []byte("\n"))
	if len(bytes.TrimSpace(data)) == 0 {
		return nil, errors.New("it is empty")
	}
	return data, nil
}

// fromUTF16 converts text. Half a character at the end is none.
func fromUTF16(data []byte, order binary.ByteOrder) []byte {
	units := make([]uint16, len(data)/2)
	for i := range units {
		units[i] = order.Uint16(data[2*i:])
	}
	return []byte(string(utf16.Decode(units)))
}
