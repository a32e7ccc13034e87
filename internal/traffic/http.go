package traffic

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strconv"
	"syscall"
	"time"

	"slipstream.dev/internal/record"
)

// This file has what both ends of HTTP share: as much of HTTP/1.1 (RFC 9112) as a load generator and its server need, the
// objects, and how requests fail. docs/adr/0006-http-on-plain-sockets.md says why it uses no library.

// headLimit limits the size of a message's head, in bytes.
const headLimit = 4 << 10

// Errors for messages that are malformed or not supported.
var (
	errHeadTooLong = errors.New("the head is longer than 4 KiB")
	errHTTP        = errors.New("not understood as HTTP/1")
)

// head is the parsed head of a message.
type head struct {
	// size is the size of the head, including the empty line.
	size int
	// target is that of a request.
	target []byte
	// status and length are the status of a response and the length of its body.
	status, length int
	// last means that the connection ends with this message.
	last bool
	// closes means that the message has the option close.
	closes bool
	// old means that a request uses HTTP/1.0: the response has to say that the connection is kept.
	old bool
	// gzip means that a request accepts it, or that a response uses it.
	gzip bool
}

// parseRequest parses the head of a request without a body at the beginning of b. While the head is incomplete, its size is 0.
func parseRequest(b []byte) (head, error) {
	line, fields, h, err := cutHead(b)
	if h.size == 0 {
		return h, err
	}
	method, rest, _ := bytes.Cut(line, []byte(" "))
	target, version, ok := bytes.Cut(rest, []byte(" "))
	if !ok || string(method) != "GET" || len(target) == 0 {
		return head{}, fmt.Errorf("%w: request %.80q", errHTTP, line)
	}
	switch string(version) {
	case "HTTP/1.0":
		h.old, h.last = true, true
	case "HTTP/1.1":
	default:
		return head{}, fmt.Errorf("%w: version %.80q", errHTTP, version)
	}
	h.target = target
	for name, value := range headFields(fields) {
		switch {
		case same(name, "connection"):
			h.connection(value)
		case same(name, "accept-encoding"):
			h.gzip = hasToken(value, "gzip")
		case same(name, "content-length") && string(value) != "0", same(name, "transfer-encoding"):
			return head{}, fmt.Errorf("%w: a request with a body", errHTTP)
		}
	}
	return h, nil
}

// parseResponse does the same for a response, which must have a length.
func parseResponse(b []byte) (head, error) {
	line, fields, h, err := cutHead(b)
	if h.size == 0 {
		return h, err
	}
	version, rest, _ := bytes.Cut(line, []byte(" "))
	switch string(version) {
	case "HTTP/1.0":
		h.last = true
	case "HTTP/1.1":
	default:
		return head{}, fmt.Errorf("%w: status %.80q", errHTTP, line)
	}
	code, _, _ := bytes.Cut(rest, []byte(" "))
	if h.status = number(code); h.status < 100 || h.status > 999 || len(code) != 3 {
		return head{}, fmt.Errorf("%w: status %.80q", errHTTP, line)
	}
	h.length = -1
	for name, value := range headFields(fields) {
		switch {
		case same(name, "connection"):
			h.connection(value)
		case same(name, "content-encoding"):
			h.gzip = same(value, "gzip")
		case same(name, "content-length"):
			n := number(value)
			if n < 0 || h.length >= 0 && h.length != n {
				return head{}, fmt.Errorf("%w: length %.80q", errHTTP, value)
			}
			h.length = n
		case same(name, "transfer-encoding"):
			return head{}, fmt.Errorf("%w: a response in %.80q", errHTTP, value)
		}
	}
	if h.length < 0 {
		return head{}, fmt.Errorf("%w: a response without a length", errHTTP)
	}
	return h, nil
}

// cutHead splits a head into its first line and its fields.
func cutHead(b []byte) (line, fields []byte, h head, err error) {
	end := bytes.Index(b, []byte("\r\n\r\n"))
	switch {
	case end < 0 && len(b) < headLimit:
		return nil, nil, h, nil
	case end < 0 || end+4 > headLimit:
		return nil, nil, h, errHeadTooLong
	}
	line, fields, _ = bytes.Cut(b[:end], []byte("\r\n"))
	// Implementations disagree about a lone CR or LF, folded lines and empty names (RFC 9112, sections 2.2, 5.1 and 5.2).
	if bytes.ContainsAny(line, "\r\n\x00") {
		return nil, nil, h, fmt.Errorf("%w: %.80q", errHTTP, line)
	}
	for name, value := range headFields(fields) {
		if len(name) == 0 || bytes.ContainsAny(name, " \t\r\n\x00") || bytes.ContainsAny(value, "\r\n\x00") {
			return nil, nil, h, fmt.Errorf("%w: field %.80q", errHTTP, name)
		}
	}
	h.size = end + 4
	return line, fields, h, nil
}

// headFields iterates over the fields of a head.
func headFields(b []byte) func(yield func(name, value []byte) bool) {
	return func(yield func(name, value []byte) bool) {
		for len(b) > 0 {
			var line []byte
			line, b, _ = bytes.Cut(b, []byte("\r\n"))
			name, value, _ := bytes.Cut(line, []byte(":"))
			if !yield(name, bytes.TrimSpace(value)) {
				return
			}
		}
	}
}

func (h *head) connection(value []byte) {
	switch {
	case hasToken(value, "close"):
		h.last, h.closes = true, true
	case hasToken(value, "keep-alive"):
		h.last = h.closes
	}
}

// hasToken reports whether a list contains a token. A token with a parameter does not count, because it may mean the opposite
// ("gzip;q=0").
func hasToken(list []byte, token string) bool {
	for len(list) > 0 {
		var one []byte
		one, list, _ = bytes.Cut(list, []byte(","))
		if same(bytes.TrimSpace(one), token) {
			return true
		}
	}
	return false
}

// same reports whether b is a lower-case word, ignoring the case of b.
func same(b []byte, lower string) bool {
	if len(b) != len(lower) {
		return false
	}
	for i, c := range b {
		if 'A' <= c && c <= 'Z' {
			c += 'a' - 'A'
		}
		if c != lower[i] {
			return false
		}
	}
	return true
}

// number parses a decimal number of up to nine digits. It returns -1 for anything else.
func number(b []byte) int {
	if len(b) == 0 || len(b) > 9 {
		return -1
	}
	n := 0
	for _, c := range b {
		if c < '0' || c > '9' {
			return -1
		}
		n = 10*n + int(c-'0')
	}
	return n
}

// Names of a page's objects.
const (
	pageIndex  = "/"
	pageScript = "/script.js"
	pageStyles = "/styles.css"
	pageImage  = "/image.jpg"
)

const (
	indexSize  = 12_000
	stylesSize = 30_000
)

type pageObject struct {
	target, kind string
	size         int // in bytes, uncompressed
	text         bool
}

// pageObjects returns the objects of a page, in the order in which a user requests them.
func (s Spec) pageObjects() []pageObject {
	all := []pageObject{
		{pageIndex, "text/html", indexSize, true},
		{pageScript, "text/javascript", s.Size, true},
		{pageStyles, "text/css", stylesSize, true},
	}
	if s.Image > 0 {
		all = append(all, pageObject{pageImage, "image/jpeg", s.Image, false})
	}
	return all
}

// object holds the complete responses of a server for one target.
type object struct {
	// responses are indexed by whether they are compressed, and by what they say about the connection: nothing, because it is
	// kept by default, that it is kept, or that it is closed.
	responses [2][3][]byte
	// body is the length of the uncompressed body in bytes.
	body int
}

const (
	keptSilently = iota
	kept
	closed
)

// site returns the objects of a server, by target.
func (s Spec) site() map[string]*object {
	if !s.Page {
		return map[string]*object{s.Secret.Path() + pageIndex: newObject("text/plain", bytes.Repeat([]byte("x"), s.Size), false)}
	}
	site := make(map[string]*object)
	for i, o := range s.pageObjects() {
		body := prose
		if !o.text {
			body = noise
		}
		site[s.Secret.Path()+o.target] = newObject(o.kind, body(o.size, uint64(i+1)), o.text)
	}
	return site
}

func newObject(kind string, body []byte, compress bool) *object {
	o := &object{body: len(body)}
	o.responses[0] = responses(kind, "", body)
	if compress {
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		_, _ = z.Write(body) // into memory
		_ = z.Close()
		o.responses[1] = responses(kind, "Content-Encoding: gzip\r\nVary: Accept-Encoding\r\n", b.Bytes())
	} else {
		o.responses[1] = o.responses[0]
	}
	return o
}

func responses(kind, more string, body []byte) (r [3][]byte) {
	for i, connection := range [3]string{keptSilently: "", kept: "Connection: keep-alive\r\n", closed: "Connection: close\r\n"} {
		r[i] = fmt.Appendf(nil, "HTTP/1.1 200 OK\r\nServer: slipstream\r\nContent-Type: %s\r\nContent-Length: %d\r\n%s%s\r\n%s",
			kind, len(body), more, connection, body)
	}
	return r
}

// prose returns n bytes that gzip compresses to a quarter, like scripts and styles.
func prose(n int, seed uint64) []byte {
	words := []string{"function", "return", "const", "this", "value", "index", "length", "render", "state", "event", "=>", "{", "}", "(", ")", ";", "=", "===", "node", "children", "props", "null"}
	r := rand.New(rand.NewPCG(seed, 0))
	b := make([]byte, 0, n+32)
	for len(b) < n {
		if r.IntN(6) == 0 { // a name that is not a common one
			b = strconv.AppendUint(append(b, 'v'), r.Uint64N(1<<20), 36)
		} else {
			b = append(b, words[r.IntN(len(words))]...)
		}
		b = append(b, " \n"[r.IntN(12)/11])
	}
	return b[:n]
}

// noise returns n incompressible bytes, like those of an image.
func noise(n int, seed uint64) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{byte(seed)}).Read(b) // which never fails
	return b
}

var (
	responseNotFound = []byte("HTTP/1.1 404 Not Found\r\nServer: slipstream\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
	responseBad      = []byte("HTTP/1.1 400 Bad Request\r\nServer: slipstream\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
)

// respond returns the response to a request, and whether the connection ends with it. found reports whether the request belongs
// to the trial.
func respond(site map[string]*object, h head) (out []byte, last, found bool) {
	o, ok := site[string(h.target)]
	if !ok {
		return responseNotFound, true, false
	}
	connection := keptSilently
	switch {
	case h.last:
		connection = closed
	case h.old:
		connection = kept
	}
	compressed := 0
	if h.gzip {
		compressed = 1
	}
	return o.responses[compressed][connection], h.last, true
}

// errStatus means that a response has a status other than 2xx.
var errStatus = errors.New("the response status is not a success")

// errNoAnswer means that a request was given up.
var errNoAnswer = errors.New("no answer in time")

// failures counts failed requests by record's kinds of error.
type failures map[string]uint64

// kindOfError returns the kind of error under which a failed request counts.
func kindOfError(err error) string {
	var timeout interface{ Timeout() bool }
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return record.ErrRefused
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return record.ErrReset
	case errors.Is(err, errStatus):
		return record.ErrStatus
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		return record.ErrShort
	case errors.Is(err, errNoAnswer), errors.Is(err, syscall.ETIMEDOUT), errors.As(err, &timeout) && timeout.Timeout():
		return record.ErrTimeout
	}
	return record.ErrOther
}

// webResult holds the counts of an HTTP end's connections, except for bytes and messages.
type webResult struct {
	failed    failures
	due, late uint64
	last      int64 // when the last request was done
	from      int64
}

func (w *webResult) add(c *conn) {
	for kind, n := range c.failed {
		if w.failed == nil {
			w.failed = make(failures)
		}
		w.failed[kind] += n
	}
	w.due += c.due
	w.late += c.late
	w.last = max(w.last, c.to.at)
	if w.from == 0 || c.from.at < w.from {
		w.from = c.from.at
	}
}

// lateBy is the delay up to which a user counts as on time.
const lateBy = time.Millisecond

// lateShare is the share of users that may begin late. If more do, the trial has measured the generator.
const lateShare = 0.01

func (w *webResult) fill(e *End, out *record.Endpoint) error {
	out.Errors = w.failed
	if n := e.spec.Requests; n > 0 && e.listening < 0 {
		done := out.Messages
		for _, failed := range w.failed {
			done += failed
		}
		if done < uint64(n) {
			return fmt.Errorf("run %s: %d of %d requests finished in the available time: give the workload a longer duration", HTTP, done, n)
		}
		out.Seconds = float64(w.last-w.from) / 1e9
		out.Completion = out.Seconds
	}
	if share := float64(w.late) / float64(max(1, w.due)); share > lateShare {
		out.Warnings = append(out.Warnings, record.Warnf(record.WarnGeneratorBound,
			"%.1f%% of the users began more than %s late: this machine cannot start that many on time", 100*share, lateBy))
	}
	return nil
}
