package serve

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"net"
	"net/http"
	"strings"
	"sync"

	"slipstream.dev/internal/report"
)

// access decides which requests are served. Without a token these are requests to this machine's loopback addresses. With
// one, a request must have it as a bearer token, or have the cookie that a browser gets for the token or for the one-time
// link. The cookie is a different secret from the token, and lasts as long as the server.
type access struct {
	token string
	// Browsers send a cookie to all ports of a host, so each server's cookie has a name of its own.
	name, cookie string

	mu   sync.Mutex
	once string // code of the one-time link; empty once it was used
}

func newAccess(token string) *access {
	return &access{token: token, name: "slipstream-" + rand.Text()[:8], cookie: rand.Text(), once: rand.Text()}
}

// LinkPath returns the path of a link that opens the pages in one browser, once. It is empty if there is no token.
func (s *Server) LinkPath() string {
	if s.access.token == "" {
		return ""
	}
	return "/login/" + s.access.once
}

// permits reports whether a request may be served. If not, it has answered the request.
func (a *access) permits(w http.ResponseWriter, r *http.Request) bool {
	if a.token == "" {
		// A page elsewhere can make a browser resolve its own name to 127.0.0.1, and would then read what is here
		// (DNS rebinding).
		if !Loopback(r.Host) {
			a.deny(w, report.Message{Title: "Wrong address", Text: "Without a token, slipstream serves only localhost and loopback addresses."})
			return false
		}
		return true
	}
	code, link := strings.CutPrefix(r.URL.Path, "/login/")
	switch {
	case r.URL.Path == "/login" && r.Method == http.MethodPost:
		if r.Body = http.MaxBytesReader(w, r.Body, 4<<10); equal(r.PostFormValue("token"), a.token) {
			a.welcome(w, r)
			return false
		}
		a.deny(w, report.Message{Title: "That is not the token", Text: "It is in the file that slipstream serve was started with.", Login: true})
		return false
	case link && r.Method == http.MethodGet && a.use(code):
		a.welcome(w, r)
		return false
	case link:
		a.deny(w, report.Message{Title: "This link was used", Text: "It opens the pages in one browser. Give the token instead:", Login: true})
		return false
	case a.known(r):
		return true
	}
	a.deny(w, report.Message{Title: "Results of slipstream", Text: "Reading them needs the token.", Login: true})
	return false
}

// known reports whether a request has the token or the cookie.
func (a *access) known(r *http.Request) bool {
	if bearer, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer "); ok && equal(bearer, a.token) {
		return true
	}
	c, err := r.Cookie(a.name)
	return err == nil && equal(c.Value, a.cookie)
}

// use reports whether a code is that of the one-time link, which then is void.
func (a *access) use(code string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.once == "" || !equal(code, a.once) {
		return false
	}
	a.once = ""
	return true
}

// welcome gives the browser its cookie, and leads it away from the address that it came by.
func (a *access) welcome(w http.ResponseWriter, r *http.Request) {
	http.SetCookie(w, &http.Cookie{Name: a.name, Value: a.cookie, Path: "/", HttpOnly: true, SameSite: http.SameSiteStrictMode, Secure: r.TLS != nil})
	http.Redirect(w, r, "/", http.StatusSeeOther)
}

func (a *access) deny(w http.ResponseWriter, m report.Message) {
	w.WriteHeader(http.StatusForbidden)
	_ = m.HTML(w) // the browser may have gone
}

// equal compares secrets in a time that reveals nothing about them, not even their length.
func equal(a, b string) bool {
	x, y := sha256.Sum256([]byte(a)), sha256.Sum256([]byte(b))
	return subtle.ConstantTimeCompare(x[:], y[:]) == 1
}

// Loopback reports whether an address of a host, with or without a port, is of this machine alone.
func Loopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		host = strings.Trim(address, "[]")
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
