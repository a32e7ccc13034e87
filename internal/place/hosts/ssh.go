package hosts

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/shell"
	"slipstream.dev/internal/words"
)

// connectTime limits how long ssh may take to connect to one machine, askTime how long a person may take to answer its
// questions.
const (
	connectTime = 15 * time.Second
	askTime     = 5 * time.Minute
)

// rules are options that override the user's ssh configuration. A host's key must be known, because nobody would answer a
// question about it in the middle of a run. ssh notices a silent host within 45 s.
var rules = []string{
	"StrictHostKeyChecking=yes", "RequestTTY=no", "RemoteCommand=none", "PermitLocalCommand=no", "ForwardAgent=no", "ForwardX11=no",
	"ClearAllForwardings=yes", "LogLevel=ERROR", "ServerAliveInterval=15", "ServerAliveCountMax=3", "ConnectTimeout=" + strconv.Itoa(int(connectTime.Seconds())),
}

// blocking maps options to their defaults. With another value, ssh would run no command, or give it no input. An older ssh does
// not know them, so they are set only if necessary.
var blocking = map[string]string{"stdinnull": "no", "forkafterauthentication": "no", "sessiontype": "default"}

// unblocked returns the options that reset blocking ones of the user's configuration.
func (h *host) unblocked() (all []string) {
	for key, usual := range blocking {
		if is := h.configured[key]; is != "" && is != usual {
			all = append(all, "-o", key+"="+usual)
		}
	}
	return all
}

// link is a connection to a host that several commands share by ssh's control socket. It ends with hold, even if this process
// is killed.
type link struct {
	made   bool
	socket string // "" if there is none, or if the user's own is shared
	hold   net.Conn
	asked  bool // a person may have been asked, and is not asked again
}

// arguments returns the options and the destination of ssh or sftp for a host.
func (h *host) arguments(ask bool) []string {
	var all []string
	set := func(key, value string) { all = append(all, "-o", key+"="+value) }
	if h.verbose { // the first value counts
		set("LogLevel", "INFO")
	}
	for _, rule := range rules {
		all = append(all, "-o", rule)
	}
	if !ask {
		set("BatchMode", "yes")
	}
	switch {
	case h.link.socket != "":
		set("ControlMaster", "auto")
		set("ControlPersist", "1")
		set("ControlPath", `"`+strings.ReplaceAll(h.link.socket, "%", "%%")+`"`)
	default: // a connection that the user has opened, or none
		set("ControlMaster", "no")
	}
	if h.spec.Address != "" {
		set("HostName", strings.Trim(h.spec.Address, "[]"))
	}
	if h.spec.User != "" {
		set("User", h.spec.User)
	}
	if h.spec.Port != 0 {
		set("Port", strconv.Itoa(h.spec.Port))
	}
	if h.spec.IdentityFile != "" {
		all = append(all, "-i", h.spec.IdentityFile)
	}
	return append(all, "--", h.name)
}

// byHand returns the command by which a person connects to the host. It uses the host's name, under which the ssh configuration
// has its jump host and the like.
func (h *host) byHand() string {
	argv := []string{"ssh"}
	if address := strings.Trim(h.spec.Address, "[]"); address != "" && address != h.name {
		argv = append(argv, "-o", "HostName="+address)
	}
	if h.spec.Port != 0 {
		argv = append(argv, "-p", strconv.Itoa(h.spec.Port))
	}
	if h.spec.IdentityFile != "" {
		argv = append(argv, "-i", h.spec.IdentityFile)
	}
	name := h.name
	if h.spec.User != "" {
		name = h.spec.User + "@" + name
	}
	return shell.Join(append(argv, name))
}

// ask reports whether the next connection may ask a person something, which happens once per host.
func (h *host) ask() bool { return h.all.config.Ask && h.link.socket != "" && !h.link.asked }

// share makes the commands for a host share one connection, where ssh supports that, so that nobody is asked twice. If the user
// has already opened one, they share that.
func (h *host) share(ctx context.Context) {
	if h.link.made {
		return
	}
	h.link.made = true
	configured := h.configuration(ctx)
	if !canShare || h.all.config.alone {
		return
	}
	if _, err := os.Stat(configured["controlpath"]); err == nil {
		if _, err := h.local(ctx, "", "ssh", "-O", "check"); err == nil {
			return
		}
	}
	h.link.socket = filepath.Join(h.all.folder, rand.Text()[:8])
}

// keep holds the connection that the first command has made.
func (h *host) keep() error {
	if h.link.socket == "" || h.link.hold != nil {
		return nil
	}
	hold, err := net.Dial("unix", h.link.socket)
	if err != nil {
		return fmt.Errorf("share a connection to host %s: %w", h.name, err)
	}
	h.link.hold = hold
	return nil
}

// terminate asks the ssh process that holds a connection to end it, even with open sessions (PROTOCOL.mux of OpenSSH:
// MUX_MSG_HELLO of version 4, and MUX_C_TERMINATE).
const terminate = "\x00\x00\x00\x08\x00\x00\x00\x01\x00\x00\x00\x04" + "\x00\x00\x00\x08\x10\x00\x00\x05\x00\x00\x00\x00"

// unlink ends the connection that the commands for a host share.
func (h *host) unlink() {
	switch {
	case h.link.hold != nil:
		_, _ = io.WriteString(h.link.hold, terminate) // it may have ended
		h.link.hold.Close()
	case h.link.socket != "": // no command has begun yet
		ctx, cancel := context.WithTimeout(context.Background(), connectTime)
		defer cancel()
		_, _ = h.local(ctx, "", "ssh", "-O", "exit") // there may be none
	}
	h.link = link{asked: h.link.asked}
}

// local runs ssh or sftp without asking anybody, and returns its output.
func (h *host) local(ctx context.Context, input, program string, options ...string) (string, error) {
	options = append(options, h.arguments(false)...)
	if program == "ssh" {
		options = append(options, ":") // a command that does nothing: with ForkAfterAuthentication, ssh insists on one
	}
	cmd := exec.Command(program, options...)
	var out strings.Builder
	var said place.Tail
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &out, &said
	cmd.WaitDelay = time.Second // a proxy command may have inherited the pipes
	detach(cmd)
	if err := h.all.config.begin(cmd); err != nil {
		return "", notStarted(err)
	}
	defer context.AfterFunc(ctx, func() { end(cmd, true) })()
	if err := cmd.Wait(); err != nil {
		return "", cmp.Or(context.Cause(ctx), fmt.Errorf("%w%s", err, said.Last()))
	}
	return out.String(), nil
}

// configuration returns the user's ssh configuration for the host.
func (h *host) configuration(ctx context.Context) map[string]string {
	if h.configured != nil {
		return h.configured
	}
	text, err := h.local(ctx, "", "ssh", "-G")
	if err != nil {
		return nil // the first command returns the reason
	}
	h.configured = make(map[string]string)
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		h.configured[key] = value
	}
	return h.configured
}

// login describes how ssh reaches the host.
func (h *host) login(ctx context.Context) string {
	is := h.configuration(ctx)
	if is == nil {
		return h.byHand()
	}
	text := is["user"] + "@" + net.JoinHostPort(is["hostname"], is["port"])
	if h.way() != "" {
		text += " through " + h.way()
	} else if by := is["proxycommand"]; by != "" && by != "none" {
		text += " by " + by
	}
	return text
}

// way returns the machines that ssh goes through, "" if it goes through none or that is not known.
func (h *host) way() string {
	if via := h.configured["proxyjump"]; via != "none" {
		return via
	}
	return ""
}

// refusedError means that another attempt would fail too, for example because the machine has another key or architecture than
// before.
type refusedError struct{ error }

func (e refusedError) Unwrap() error { return e.error }

var (
	denied      = regexp.MustCompile(`(\S+)@\S+: Permission denied \(([^)]*)\)`)
	noKeyFile   = regexp.MustCompile(`Identity file (.*) not accessible: (.*)\.`)
	unknownKey  = regexp.MustCompile(`No \S+ host key is known for (\S+) and`)
	changedKey  = regexp.MustCompile(`Host key for (\S+) has changed`)
	offending   = regexp.MustCompile(`Offending \S+ key in (.+):(\d+)`)
	openFile    = regexp.MustCompile(`Permissions \d+ for '(.*)' are too open`)
	invalid     = regexp.MustCompile(`Certificate invalid: (.*)`)
	closed      = regexp.MustCompile(`Connection (closed|reset) by|Connection to \S+ (closed by|port \d+: (Broken pipe|Connection reset))|client_loop: send disconnect|kex_exchange_identification`)
	noSessions  = regexp.MustCompile(`Session open refused by peer|session open refused|open failed: administratively prohibited`)
	noAnswer    = regexp.MustCompile(`kex_exchange_identification|UNKNOWN port|muxclient: |mux_client_\w+: (read|write|master alive)`)
	hungUp      = regexp.MustCompile(`kex_exchange_identification: (read: )?Connection (closed|reset)`)
	fingerprint = regexp.MustCompile(`SHA256:[A-Za-z0-9+/]+`)
)

// unreachable returns why ssh has not connected to a host, given its error output.
func (h *host) unreachable(said string) error {
	said = strings.ReplaceAll(said, "\r", "")
	if m := invalid.FindStringSubmatch(said); m != nil {
		return refusedError{fmt.Errorf("host %s: the certificate of its key is not valid (%s): renew it, or correct the clock of this machine, where it is %s",
			h.name, m[1], time.Now().Format(time.DateTime+" MST"))}
	}
	if m := unknownKey.FindStringSubmatch(said); m != nil {
		return refusedError{fmt.Errorf("host %s: the key of %s is not known, so it may be another machine: connect once with %s and compare its fingerprint",
			h.name, m[1], h.byHand())}
	}
	if strings.Contains(said, "HOST IDENTIFICATION HAS CHANGED") {
		return refusedError{h.changed(said)}
	}
	if strings.Contains(said, "Host key verification failed") {
		which := "its key"
		if h.way() != "" { // whose ssh does not say which key it means
			which += ", or that of a machine on the way (" + h.way() + ")"
		}
		return refusedError{fmt.Errorf("host %s: ssh does not accept %s%s. Connect once with %s and compare fingerprints", h.name, which, oneLine(said), h.byHand())}
	}
	if m := denied.FindStringSubmatch(said); m != nil {
		hint, methods := "", strings.Split(m[2], ",")
		file := noKeyFile.FindStringSubmatch(said)
		switch {
		case openFile.MatchString(said):
			name := openFile.FindStringSubmatch(said)[1]
			return refusedError{fmt.Errorf("host %s does not let %s in, because ssh does not use the key %s, which others can read: %s",
				h.name, m[1], name, shell.Join([]string{"chmod", "600", name}))}
		case file != nil:
			return refusedError{fmt.Errorf("host %s does not let %s in, and the key %s cannot be read (%s): correct identityFile, or leave it out to log in with other keys",
				h.name, m[1], file[1], file[2])}
		case !slices.Contains(methods, "publickey") && !slices.Contains(methods, "hostbased"):
			return fmt.Errorf("host %s wants more than a key from %s (%s), such as a password or a second factor: %s",
				h.name, m[1], words.And(methods), h.interactively())
		case strings.Contains(said, refusedSession):
			hint = ". Its server allows no more sessions in the connection that is open (MaxSessions of sshd_config)"
		case !h.all.config.Ask:
			hint = ". Nobody can be asked for a password or passphrase here: a key that has one must be in the SSH agent"
		}
		return fmt.Errorf("host %s does not let %s in: add a public key of yours to ~/.ssh/authorized_keys there, or name another key with identityFile or ssh-add%s%s",
			h.name, m[1], strings.TrimSuffix(oneLine(said), "."), hint)
	}
	hint, forwards, way := "", strings.Contains(said, notForwarded), ""
	if h.way() != "" { // and not a proxy command
		way = " (" + h.way() + ")"
	}
	switch {
	case forwards && strings.Contains(said, "administratively prohibited"):
		hint = fmt.Sprintf(". The machine on the way%s forwards no connections, or not this one: permit it there (AllowTcpForwarding and PermitOpen of sshd_config)", way)
	case forwards:
		hint = fmt.Sprintf(". The machine on the way%s does not reach it: correct its name or port, or let the connection through", way)
	case noSessions.MatchString(said):
		hint = ". Its server lets the user log in and run nothing (MaxSessions 0 of sshd_config)"
	case said == "" || closed.MatchString(said):
		hint = ". Its server's log says why (journalctl -u ssh there): for example LoginGraceTime, MaxStartups, ChrootDirectory, or a ban, for example by fail2ban"
	}
	err := fmt.Errorf("connect to host %s%s%s", h.name, cmp.Or(oneLine(said), ": the server closed the connection before ssh was logged in"), hint)
	switch {
	case h.verbose && !forwards && hungUp.MatchString(said):
		return hungUpError{err}
	case !h.verbose && (said == "" || noAnswer.MatchString(said)):
		return unexplainedError{err}
	}
	return err
}

// changed returns the error for a host whose key has changed, and says how to remove the old key. It must not advise to remove
// a line that is about other hosts too.
func (h *host) changed(said string) error {
	text := fmt.Sprintf("host %s: its key has changed, so it may be another machine: it is %s", h.name, fingerprint.FindString(said))
	at, of := offending.FindStringSubmatch(said), changedKey.FindStringSubmatch(said)
	if at == nil || of == nil {
		return fmt.Errorf("%s. If it was reinstalled, remove the old key from known_hosts and connect once with %s", text, h.byHand())
	}
	remove := "remove the old key (" + shell.Join([]string{"ssh-keygen", "-f", at[1], "-R", of[1]}) + ")"
	if others := namesOf(at[1], at[2]); strings.ContainsAny(others, "*?@") {
		remove = fmt.Sprintf("correct that line by hand, as it is for %s", others)
	}
	return fmt.Errorf("%s, and line %s of %s has another. If it was reinstalled, %s and connect once with %s", text, at[2], at[1], remove, h.byHand())
}

// namesOf returns the host patterns in a line of a known_hosts file, or "".
func namesOf(file, line string) string {
	data, _ := os.ReadFile(file) // ssh has just read it
	n, err := strconv.Atoi(line)
	lines := strings.Split(string(data), "\n")
	if err != nil || n < 1 || n > len(lines) {
		return ""
	}
	fields := strings.Fields(lines[n-1])
	switch {
	case len(fields) > 1 && strings.HasPrefix(fields[0], "@"):
		return fields[0] + " " + fields[1]
	case len(fields) > 0:
		return fields[0]
	}
	return ""
}

// interactively says how a run can reach a host that asks for something.
func (h *host) interactively() string {
	if h.all.config.Ask {
		return "the answer was refused, or none was given"
	}
	text := "start the run at a terminal, where ssh asks you once"
	if canShare {
		text += fmt.Sprintf(", or first open a connection that it can share (ControlPath in ~/.ssh/config, then %s)", strings.Replace(h.byHand(), "ssh ", "ssh -MNf ", 1))
	}
	return text
}

// unexplainedError means that ssh gave no reason why the server, or a proxy command, did not answer or hung up.
type unexplainedError struct{ error }

// hungUpError means that the server, or one on the way, has hung up before it said who it is.
type hungUpError struct{ error }

// notForwarded is part of what ssh prints if it cannot connect through the machine on the way.
const notForwarded = "stdio forwarding failed"

// refusedSession is part of what ssh prints if a server allows no more sessions in a connection. ssh then makes another
// connection.
const refusedSession = "mux_client_request_session: session request failed: "

// notStarted returns the error for an ssh or sftp that could not be started.
func notStarted(err error) error {
	if errors.Is(err, exec.ErrNotFound) {
		return refusedError{fmt.Errorf("%w: install OpenSSH's client", err)}
	}
	return fmt.Errorf("start ssh: %w", err)
}

// newFolder makes a folder for control sockets, in the first of the usual places where their names are not too long.
func newFolder() (dir string, err error) {
	for _, parent := range []string{os.Getenv("XDG_RUNTIME_DIR"), "", "/tmp"} {
		dir, err = os.MkdirTemp(parent, "slipstream-")
		if err == nil && (len(dir) <= longestFolder || !canShare) {
			return dir, nil
		}
		if err == nil {
			err = errors.Join(fmt.Errorf("the name %s is too long for ssh's sockets", dir), os.Remove(dir))
		}
	}
	return "", err
}

// longestFolder is the maximum length of the path of a folder for control sockets. BSD and macOS permit 103 bytes for the path
// of a socket: nine are for the socket's name, and 17 for the suffix that ssh adds while it makes the socket.
const longestFolder = 103 - 9 - 17
