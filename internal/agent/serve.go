package agent

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
)

// Limits of a server. An idle connection takes some 20 KiB of memory, and some 60 with TLS.
const (
	metricsConnections = 32
	healthConnections  = 8
	// headerBytes has room for several bearer tokens; net/http adds 4 KiB.
	headerBytes = 8 << 10
)

// timeouts limits how long a server waits for its clients.
type timeouts struct{ header, write, idle time.Duration }

// The idle timeout lets a client that scrapes once a minute keep its connection.
var serveTimeouts = timeouts{header: 5 * time.Second, write: 15 * time.Second, idle: 2 * time.Minute}

// ServeOptions are the addresses of an agent's servers, and who may read them.
type ServeOptions struct {
	// Metrics is the address of /metrics, Health that of /healthz; empty for no server.
	Metrics, Health string
	// CertFile and KeyFile are the certificate and key for /metrics. They are read for every
	// connection, so that they can be replaced.
	CertFile, KeyFile string
	// Authorize reports whether a bearer token may read /metrics. If it is set and there is no
	// certificate, the agent uses a self-signed one: a token is never sent in the clear.
	Authorize func(ctx context.Context, token string) (bool, error)
	Log       *slog.Logger
}

// Servers are the running servers of an agent.
type Servers struct {
	all     []*http.Server
	running sync.WaitGroup
}

// Serve serves /metrics and /healthz, each at its own address. It calls failed if a server ends by itself.
func (a *Agent) Serve(o ServeOptions, failed func(error)) (s *Servers, err error) {
	s = new(Servers)
	defer func() {
		if err != nil {
			s.Close()
			s = nil
		}
	}()
	if o.Health != "" {
		if err := s.start(o.Health, nil, a.Health(), healthConnections, failed); err != nil {
			return s, fmt.Errorf("serve health: %w (choose another address with --health)", err)
		}
	}
	if o.Metrics == "" {
		return s, nil
	}
	secure, err := o.tls()
	if err != nil {
		return s, fmt.Errorf("serve metrics: %w", err)
	}
	handler := a.Metrics()
	if o.Authorize != nil {
		handler = authorized(handler, o.Authorize, o.Log)
	}
	if err := s.start(o.Metrics, secure, handler, metricsConnections, failed); err != nil {
		return s, fmt.Errorf("serve metrics: %w (choose another address with --listen)", err)
	}
	return s, nil
}

// Close stops the servers at once.
func (s *Servers) Close() {
	for _, server := range s.all {
		_ = server.Close()
	}
	s.running.Wait()
}

func (s *Servers) start(address string, secure *tls.Config, handler http.Handler, room int, failed func(error)) error {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	server := newServer(handler, serveTimeouts)
	s.all = append(s.all, server)
	bounded := net.Listener(&boundedListener{Listener: listener, room: room})
	if secure != nil {
		bounded = tls.NewListener(bounded, secure)
	}
	s.running.Go(func() {
		if err := server.Serve(bounded); !errors.Is(err, http.ErrServerClosed) {
			failed(fmt.Errorf("serve at %s: %w", address, err))
		}
	})
	return nil
}

// newServer returns a server for the connections of a boundedListener. It speaks only HTTP/1, so that a connection has one
// request at a time.
func newServer(handler http.Handler, t timeouts) *http.Server {
	var one http.Protocols
	one.SetHTTP1(true)
	return &http.Server{
		Handler: serving(handler), Protocols: &one,
		ReadHeaderTimeout: t.header, ReadTimeout: t.header, WriteTimeout: t.write, IdleTimeout: t.idle, MaxHeaderBytes: headerBytes,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			if s, ok := c.(*tls.Conn); ok {
				c = s.NetConn()
			}
			return context.WithValue(ctx, connKey{}, c)
		},
		// Failed handshakes and disconnected clients do not matter to the agent.
		ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug),
	}
}

type connKey struct{}

// serving marks a connection as busy while its request is served.
func serving(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if c, ok := r.Context().Value(connKey{}).(*boundedConn); ok {
			c.wait(false)
			defer c.wait(true)
		}
		h.ServeHTTP(w, r)
	})
}

// boundedListener limits the number of connections. Beyond the limit, a new connection replaces the one that has waited longest
// for a complete request, so that idle connections and slow clients cannot lock others out. If all are being served, the new
// one is closed.
type boundedListener struct {
	net.Listener
	room int

	mu   sync.Mutex
	open int
	// waiting holds the connections without a complete request, the longest waiting first.
	waiting []*boundedConn
}

type boundedConn struct {
	net.Conn
	of *boundedListener
	// closed is guarded by of.
	closed bool
}

// Accept implements net.Listener.
func (l *boundedListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if b := l.admit(c); b != nil {
			return b, nil
		}
		_ = c.Close()
	}
}

// admit returns nil if there is no room.
func (l *boundedListener) admit(c net.Conn) *boundedConn {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open >= l.room && len(l.waiting) > 0 {
		_ = l.drop(l.waiting[0])
	}
	if l.open >= l.room {
		return nil
	}
	b := &boundedConn{Conn: c, of: l}
	l.open++
	l.waiting = append(l.waiting, b)
	return b
}

// drop closes a connection. The caller holds mu.
func (l *boundedListener) drop(c *boundedConn) error {
	if c.closed {
		return net.ErrClosed
	}
	c.closed = true
	l.open--
	l.forget(c)
	return c.Conn.Close()
}

func (l *boundedListener) forget(c *boundedConn) {
	l.waiting = slices.DeleteFunc(l.waiting, func(w *boundedConn) bool { return w == c })
}

// wait records whether a connection waits for a request or is being served.
func (c *boundedConn) wait(waits bool) {
	c.of.mu.Lock()
	defer c.of.mu.Unlock()
	c.of.forget(c)
	if waits && !c.closed {
		c.of.waiting = append(c.of.waiting, c)
	}
}

// Close implements net.Conn.
func (c *boundedConn) Close() error {
	c.of.mu.Lock()
	defer c.of.mu.Unlock()
	return c.of.drop(c)
}

// tls returns the TLS configuration, nil for a server without TLS.
func (o ServeOptions) tls() (*tls.Config, error) {
	load := func() (*tls.Certificate, error) {
		pair, err := tls.LoadX509KeyPair(o.CertFile, o.KeyFile)
		return &pair, err
	}
	switch {
	case (o.CertFile == "") != (o.KeyFile == ""):
		return nil, errors.New("--tls-cert and --tls-key must be given together")
	case o.CertFile != "":
		if _, err := load(); err != nil {
			return nil, fmt.Errorf("read the certificate: %w", err)
		}
	case o.Authorize == nil:
		return nil, nil
	default:
		pair, err := selfSigned()
		if err != nil {
			return nil, fmt.Errorf("make a certificate: %w", err)
		}
		load = func() (*tls.Certificate, error) { return pair, nil }
	}
	return &tls.Config{
		MinVersion:     tls.VersionTLS12,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return load() },
	}, nil
}

// selfSigned returns a self-signed certificate. It protects a token from eavesdroppers, but not from a man in the middle,
// because clients cannot verify it.
func selfSigned() (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	name, err := os.Hostname()
	if err != nil {
		return nil, err
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(now.UnixNano()), Subject: pkix.Name{CommonName: "slipstream-agent"}, DNSNames: []string{name},
		NotBefore: now.Add(-time.Hour), NotAfter: now.AddDate(10, 0, 0),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

// ErrBusy is the error that Authorize returns if too many tokens are under review.
var ErrBusy = errors.New("too many tokens are under review; try again")

// authorized serves only requests with an authorized bearer token.
func authorized(h http.Handler, may func(context.Context, string) (bool, error), log *slog.Logger) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
		if !strings.EqualFold(scheme, "Bearer") || token == "" {
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, "a bearer token is needed", http.StatusUnauthorized)
			return
		}
		ok, err := may(r.Context(), token)
		switch {
		case errors.Is(err, ErrBusy): // a flood of tokens must not fill the log
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		case err != nil:
			log.Warn("review a token for /metrics", "error", err)
			http.Error(w, "the API server did not say whether this token may get /metrics; see the agent's log", http.StatusServiceUnavailable)
		case !ok:
			http.Error(w, "this token may not get the non-resource URL /metrics", http.StatusForbidden)
		default:
			h.ServeHTTP(w, r)
		}
	})
}
