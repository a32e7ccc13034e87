package record

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// Limits for files that may be somebody else's, far above any result.
const (
	// maxFile bounds a file that is read whole, in bytes.
	maxFile = 64 << 20
	// maxLine bounds a trial, in bytes. A trial of a mesh of 100 nodes has about 8 MiB.
	maxLine = 32 << 20
	// maxTrials bounds all trials, in bytes, because they are held in memory.
	maxTrials = 1 << 30
	// maxObjects bounds the objects of one JSON text. An object of three bytes can decode into hundreds.
	maxObjects = 1 << 20
)

// CheckJSON returns an error if a text has more objects and nulls than any result. The text may come from somebody
// else, and an object of three bytes can decode into hundreds.
func CheckJSON(text []byte) error {
	if n := bytes.Count(text, []byte("{")) + bytes.Count(text, []byte("null")); n > maxObjects {
		return fmt.Errorf("it has %d JSON objects, and at most %d are read", n, maxObjects)
	}
	return nil
}

// Decode checks a text with CheckJSON, then decodes it like json.Unmarshal.
func Decode(text []byte, into any) error {
	if err := CheckJSON(text); err != nil {
		return err
	}
	return json.Unmarshal(text, into)
}

// ReadAtMost reads a file. It returns an error if the file has more than limit bytes.
func ReadAtMost(r io.Reader, limit int64) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err == nil && int64(len(data)) > limit {
		return nil, fmt.Errorf("it has more than %d MiB", limit>>20)
	}
	return data, err
}

// readLine reads the next line, with its newline.
func readLine(r *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		if len(line)+len(part) > maxLine {
			return nil, fmt.Errorf("the line has more than %d MiB", maxLine>>20)
		}
		line = append(line, part...)
		if !errors.Is(err, bufio.ErrBufferFull) {
			return line, err
		}
	}
}
