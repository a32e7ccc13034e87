package record

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// Limits of what is read from a file that may be somebody else's, far above any result.
const (
	// maxFile bounds a file that is read whole.
	maxFile = 64 << 20
	// maxLine bounds a trial: one of a mesh of 100 nodes has about 8 MiB.
	maxLine = 32 << 20
	// maxTrials bounds all trials, which are held in memory.
	maxTrials = 1 << 30
	// maxObjects bounds the objects of one JSON text. An object of three bytes decodes into hundreds.
	maxObjects = 1 << 20
)

// CheckJSON is an error if a text from elsewhere has more objects and nulls than any result: one of three bytes can
// decode into hundreds.
func CheckJSON(text []byte) error {
	if n := bytes.Count(text, []byte("{")) + bytes.Count(text, []byte("null")); n > maxObjects {
		return fmt.Errorf("it has %d JSON objects, and at most %d are read", n, maxObjects)
	}
	return nil
}

// Decode is json.Unmarshal with CheckJSON before it.
func Decode(text []byte, into any) error {
	if err := CheckJSON(text); err != nil {
		return err
	}
	return json.Unmarshal(text, into)
}

// ReadAtMost reads a file that has at most limit bytes.
func ReadAtMost(r io.Reader, limit int64) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err == nil && int64(len(data)) > limit {
		return nil, fmt.Errorf("it has more than %d MiB", limit>>20)
	}
	return data, err
}

// readLine reads the next line, with its end.
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
