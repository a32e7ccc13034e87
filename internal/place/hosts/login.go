package hosts

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/kevinburke/ssh_config"

	"slipstream.dev/internal/spec"
)

// login says how to reach a machine and log in, according to the experiment and the SSH configuration.
type login struct {
	// alias is what the user calls it.
	alias string
	// address is the host and port to connect to; keyName is what known_hosts call it.
	address, keyName string
	user             string
	// identities are files of private keys. If named is set, the user asks for these, so that
	// it is an error if one is missing.
	identities []string
	named      bool
	// only means that no keys but the identities are offered, not even those of the agent.
	only bool
	// agent is the socket of the SSH agent; "" if there is none.
	agent      string
	knownHosts []string
	// jump are machines to go through, in order.
	jump []login
}

// configuration is the SSH configuration of the user and, after it, of the machine.
type configuration struct {
	home  string
	files []*ssh_config.Config
	// leftOut is the reason why the machine's file is ignored; nil if it is used.
	leftOut error
}

// maxJumps bounds how many machines a connection may go through; a configuration can name a machine as
// its own jump host.
const maxJumps = 8

// machineFile is the SSH configuration of the machine.
func machineFile() string {
	if runtime.GOOS == "windows" {
		return filepath.Join(os.Getenv("PROGRAMDATA"), "ssh", "ssh_config")
	}
	return "/etc/ssh/ssh_config"
}

// readConfiguration reads the SSH configuration; home is the user's home directory, machine the machine's
// file. The machine's file of Fedora and similar distributions has a Match that is not supported, so that
// is no error there.
func readConfiguration(home, machine string) (configuration, error) {
	c := configuration{home: home}
	for _, name := range []string{filepath.Join(home, ".ssh", "config"), machine} {
		data, err := os.ReadFile(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return c, fmt.Errorf("read the SSH configuration: %w", err)
		}
		parsed, err := ssh_config.DecodeBytes(data)
		if err != nil {
			err = fmt.Errorf("read the SSH configuration %s: %w", name, err)
			if name != machine {
				return c, err
			}
			c.leftOut = err
			break
		}
		c.files = append(c.files, parsed)
	}
	return c, nil
}

// get returns the first value of a keyword for an alias, as ssh does; "" if there is none.
func (c configuration) get(alias, key string) string {
	for _, f := range c.files {
		if value, err := f.Get(alias, key); err == nil && value != "" {
			return unquote(value)
		}
	}
	return ""
}

// all returns every value of a keyword.
func (c configuration) all(alias, key string) (values []string) {
	for _, f := range c.files {
		found, err := f.GetAll(alias, key)
		if err != nil {
			continue
		}
		for _, value := range found {
			values = append(values, unquote(value))
		}
	}
	return values
}

func unquote(s string) string {
	if len(s) > 1 && s[0] == '"' && s[len(s)-1] == '"' {
		return s[1 : len(s)-1]
	}
	return s
}

// login works out how to reach a host.
func (c configuration) login(h spec.Host) (login, error) {
	l, err := c.resolve(h, maxJumps)
	if err != nil {
		return l, fmt.Errorf("host %s: %w", h.Name, err)
	}
	return l, nil
}

func (c configuration) resolve(h spec.Host, jumps int) (login, error) {
	name := h.Name
	host := cmp.Or(h.Address, strings.ReplaceAll(c.get(name, "HostName"), "%h", name), name)
	port := c.get(name, "Port")
	if h.Port != 0 {
		port = strconv.Itoa(h.Port)
	}
	port = cmp.Or(port, "22")
	l := login{alias: name, address: net.JoinHostPort(strings.Trim(host, "[]"), port), user: cmp.Or(h.User, c.get(name, "User"), me())}
	l.keyName = l.address
	if alias := c.get(name, "HostKeyAlias"); alias != "" {
		l.keyName = net.JoinHostPort(alias, "22")
	}
	expand := func(file string) string { return c.expand(file, l.user, host, port) }
	l.only = strings.EqualFold(c.get(name, "IdentitiesOnly"), "yes")
	switch {
	case h.IdentityFile != "":
		l.identities, l.named = []string{expand(h.IdentityFile)}, true
	default:
		for _, file := range c.all(name, "IdentityFile") {
			l.identities = append(l.identities, expand(file))
		}
		if len(l.identities) == 0 {
			for _, kind := range []string{"id_ed25519", "id_ecdsa", "id_rsa"} {
				l.identities = append(l.identities, filepath.Join(c.home, ".ssh", kind))
			}
		}
	}
	l.agent = os.Getenv("SSH_AUTH_SOCK")
	if agent := c.get(name, "IdentityAgent"); agent != "" && agent != "SSH_AUTH_SOCK" {
		l.agent = expand(agent)
		if agent == "none" {
			l.agent = ""
		}
	}
	users := cmp.Or(c.get(name, "UserKnownHostsFile"), "~/.ssh/known_hosts ~/.ssh/known_hosts2")
	machines := cmp.Or(c.get(name, "GlobalKnownHostsFile"), "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2")
	for _, file := range strings.Fields(users + " " + machines) {
		l.knownHosts = append(l.knownHosts, expand(file))
	}
	if command := c.get(name, "ProxyCommand"); command != "" && command != "none" && c.get(name, "ProxyJump") == "" {
		return l, errors.New("the SSH configuration reaches it by ProxyCommand, which is not supported: use ProxyJump")
	}
	return l, c.addJumps(&l, jumps)
}

// addJumps adds the machines of ProxyJump: [user@]host[:port], separated by commas.
func (c configuration) addJumps(l *login, jumps int) error {
	via := c.get(l.alias, "ProxyJump")
	if via == "" || via == "none" {
		return nil
	}
	for _, text := range strings.Split(via, ",") {
		if jumps == 0 {
			return fmt.Errorf("ProxyJump of the SSH configuration leads through more than %d machines, or in a circle", maxJumps)
		}
		h, err := parseJump(strings.TrimPrefix(strings.TrimSpace(text), "ssh://"))
		if err != nil {
			return err
		}
		next, err := c.resolve(h, jumps-1)
		if err != nil {
			return fmt.Errorf("jump host %s: %w", h.Name, err)
		}
		// Only the first is reached from here; the others through those before them.
		if len(l.jump) > 0 {
			next.jump = nil
		}
		l.jump = append(l.jump, next)
	}
	return nil
}

func parseJump(text string) (spec.Host, error) {
	var h spec.Host
	rest := text
	if i := strings.LastIndex(text, "@"); i >= 0 {
		h.User, rest = text[:i], text[i+1:]
	}
	h.Name = rest
	if host, port, err := net.SplitHostPort(rest); err == nil {
		n, err := strconv.Atoi(port)
		if err != nil || n < 1 || n > 65535 {
			return h, fmt.Errorf("ProxyJump %q of the SSH configuration: port %q must be a number from 1 to 65535", text, port)
		}
		h.Name, h.Port = host, n
	}
	if h.Name == "" {
		return h, fmt.Errorf("ProxyJump %q of the SSH configuration names no machine", text)
	}
	return h, nil
}

// expand replaces ~ and the tokens of ssh_config(5) for the user and the host in the name of a file.
func (c configuration) expand(file, user, host, port string) string {
	if rest, ok := strings.CutPrefix(file, "~/"); ok {
		file = filepath.Join(c.home, rest)
	}
	return strings.NewReplacer("%%", "%", "%d", c.home, "%u", me(), "%r", user, "%h", host, "%p", port).Replace(file)
}

// me returns the name of the user of this process.
func me() string {
	u, err := user.Current()
	if err != nil {
		return cmp.Or(os.Getenv("USER"), "root")
	}
	return u.Username[strings.LastIndex(u.Username, `\`)+1:]
}

// route returns the machines of a login, from the first one to go through to the host itself.
func (l login) route() []login {
	var all []login
	if len(l.jump) > 0 {
		all = l.jump[0].route()
		all = append(all, l.jump[1:]...)
	}
	own := l
	own.jump = nil
	return append(slices.Clone(all), own)
}

// String returns the user's name for the machine, and what it stands for.
func (l login) String() string {
	text := l.user + "@" + l.address
	for _, j := range l.jump {
		text += " through " + j.alias
	}
	return text
}
