package hosts

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"
	"golang.org/x/crypto/ssh/knownhosts"
)

// connectTime bounds how long it may take to connect to one machine.
const connectTime = 15 * time.Second

// agentTime bounds how long the SSH agent may take to list its keys. It does not bound signing, for which the
// agent may ask a person.
var agentTime = 5 * time.Second

// refusedError means that another attempt would fail too: for example, because the machine shows another key,
// or has another architecture than before.
type refusedError struct{ error }

func (e refusedError) Unwrap() error { return e.error }

// dialer connects to an address; net.Dialer's method.
type dialer func(ctx context.Context, network, address string) (net.Conn, error)

// connect opens an SSH connection, through the machines before it.
func (l login) connect(ctx context.Context, dial dialer) (*ssh.Client, error) {
	var before *ssh.Client
	for _, hop := range l.route() {
		through := dial
		if jump := before; jump != nil {
			through = func(ctx context.Context, network, address string) (net.Conn, error) {
				conn, err := jump.DialContext(ctx, network, address)
				if err != nil {
					return nil, err
				}
				return throughJump{conn, jump}, nil
			}
		}
		client, err := hop.enter(ctx, through)
		if err != nil {
			if before != nil {
				before.Close()
			}
			return nil, err
		}
		before = client
	}
	return before, nil
}

// throughJump is a connection through another machine. Closing it also closes the connection to that machine:
// closing only this one would wait for an answer from there, which may never come.
type throughJump struct {
	net.Conn
	jump *ssh.Client
}

func (c throughJump) Close() error {
	return c.jump.Close()
}

// enter connects to one machine, checks its key and logs in.
func (l login) enter(ctx context.Context, dial dialer) (*ssh.Client, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, connectTime, fmt.Errorf("no answer within %s", connectTime))
	defer cancel()
	known, err := l.known()
	if err != nil {
		return nil, refusedError{err}
	}
	keys, err := l.keys()
	if err != nil {
		return nil, refusedError{err}
	}
	defer keys.close()
	conn, err := dial(ctx, "tcp", l.address)
	if err != nil {
		return nil, fmt.Errorf("connect to host %s (%s): %w", l.alias, l.address, cmp.Or(context.Cause(ctx), err))
	}
	defer context.AfterFunc(ctx, func() {
		conn.Close()
		keys.close()
	})()
	var keyErr error
	c, channels, requests, err := ssh.NewClientConn(conn, l.keyName, &ssh.ClientConfig{
		User: l.user,
		Auth: []ssh.AuthMethod{ssh.PublicKeys(keys.signers...)},
		HostKeyCallback: func(name string, remote net.Addr, key ssh.PublicKey) error {
			keyErr = l.judge(known(name, remote, key), key)
			return keyErr
		},
		HostKeyAlgorithms: l.algorithms(known),
	})
	switch {
	case keyErr != nil:
		return nil, refusedError{keyErr}
	case err != nil && strings.Contains(err.Error(), "unable to authenticate"):
		return nil, fmt.Errorf("host %s does not let %s in: it accepts none of the keys that were offered (%s): add one's public key to ~/.ssh/authorized_keys there, or name another with identityFile or ssh-add",
			l.alias, l.user, keys)
	case err != nil:
		return nil, fmt.Errorf("log in to host %s (%s): %w", l.alias, l.address, cmp.Or(context.Cause(ctx), err))
	}
	return ssh.NewClient(c, channels, requests), nil
}

// known returns a callback that checks host keys against those known_hosts files that exist.
func (l login) known() (ssh.HostKeyCallback, error) {
	files := slices.DeleteFunc(slices.Clone(l.knownHosts), func(name string) bool {
		_, err := os.Stat(name)
		return errors.Is(err, fs.ErrNotExist)
	})
	check, err := knownhosts.New(files...)
	if err != nil {
		return nil, fmt.Errorf("read the known host keys: %w", err)
	}
	return check, nil
}

// noKey is a key that no host has. Checking it returns the keys that are known.
type noKey struct{}

func (noKey) Type() string                        { return "none" }
func (noKey) Marshal() []byte                     { return nil }
func (noKey) Verify([]byte, *ssh.Signature) error { return errors.New("no key") }

// algorithms returns the algorithms of host keys, first those of the host's known keys: otherwise a host with
// several keys could show one that is unknown. A host that has none of the known keys shows another one,
// which is refused as a changed key.
func (l login) algorithms(known ssh.HostKeyCallback) (all []string) {
	var problem *knownhosts.KeyError
	if !errors.As(known(l.keyName, &net.TCPAddr{IP: net.IPv4zero}, noKey{}), &problem) {
		return nil
	}
	for _, k := range problem.Want {
		if isAuthority(k) { // a host certificate is of the host's own type
			all = append(all, certificates...)
			continue
		}
		if k.Key.Type() == ssh.KeyAlgoRSA {
			all = append(all, ssh.KeyAlgoRSASHA512, ssh.KeyAlgoRSASHA256)
			continue
		}
		all = append(all, k.Key.Type())
	}
	for _, other := range ssh.SupportedAlgorithms().HostKeys {
		if !slices.Contains(all, other) {
			all = append(all, other)
		}
	}
	return all
}

// certificates has the algorithms of host certificates.
var certificates = []string{
	ssh.CertAlgoED25519v01, ssh.CertAlgoECDSA256v01, ssh.CertAlgoECDSA384v01, ssh.CertAlgoECDSA521v01,
	ssh.CertAlgoRSASHA512v01, ssh.CertAlgoRSASHA256v01,
}

// isAuthority reports whether a known key belongs to an authority that signs host keys. Only its line in the
// file says so.
func isAuthority(k knownhosts.KnownKey) bool {
	data, err := os.ReadFile(k.Filename)
	lines := bytes.Split(data, []byte("\n"))
	return err == nil && k.Line <= len(lines) && bytes.HasPrefix(bytes.TrimSpace(lines[k.Line-1]), []byte("@cert-authority"))
}

// judge says what to do about a host key that is not accepted.
func (l login) judge(err error, key ssh.PublicKey) error {
	if err == nil {
		return nil
	}
	host, port, _ := net.SplitHostPort(l.keyName)
	name, scan := host, "ssh-keyscan "+host
	if port != "22" {
		name, scan = "["+host+"]:"+port, "ssh-keyscan -p "+port+" "+host
	}
	fingerprint := ssh.FingerprintSHA256(key)
	var problem *knownhosts.KeyError
	if !errors.As(err, &problem) {
		return fmt.Errorf("host %s: its key %s is not accepted: %w", l.alias, fingerprint, err)
	}
	if len(problem.Want) == 0 {
		return fmt.Errorf("host %s: the key of %s is not known, so it may be another machine: connect once with ssh %s and compare its fingerprint, %s, or add what %s prints to %s",
			l.alias, l.address, l.alias, fingerprint, scan, l.knownHosts[0])
	}
	return fmt.Errorf("host %s: the key of %s has changed, so it may be another machine: it is %s, and %s:%d has another. If it was installed anew, remove the old key (ssh-keygen -f %s -R %s) and connect once with ssh %s",
		l.alias, l.address, fingerprint, problem.Want[0].Filename, problem.Want[0].Line, problem.Want[0].Filename, "'"+name+"'", l.alias)
}

// keyring has the keys that are offered to a machine.
type keyring struct {
	signers []ssh.Signer
	// sources says where the keys come from, skipped which ones cannot be used.
	sources, skipped []string
	agent            io.Closer
}

func (k *keyring) close() {
	if k.agent != nil {
		k.agent.Close()
	}
}

func (k *keyring) String() string {
	text := strings.Join(k.sources, ", ")
	if text == "" {
		text = "there is none"
	}
	if len(k.skipped) > 0 {
		text += "; not usable: " + strings.Join(k.skipped, ", ")
	}
	return text
}

// keys returns the identities and then, unless only those are wanted, the other keys of the agent.
func (l login) keys() (*keyring, error) {
	k := new(keyring)
	held, err := k.open(l.agent)
	if err != nil {
		k.skipped = append(k.skipped, err.Error())
	}
	var wanted []ssh.PublicKey
	for _, file := range l.identities {
		data, err := os.ReadFile(file)
		switch {
		case errors.Is(err, fs.ErrNotExist) && !l.named:
			continue
		case err != nil:
			k.close()
			return nil, fmt.Errorf("host %s: read the key to log in with: %w", l.alias, err)
		}
		signer, err := ssh.ParsePrivateKey(data)
		locked := new(ssh.PassphraseMissingError)
		switch {
		case errors.As(err, &locked):
			if locked.PublicKey != nil {
				wanted = append(wanted, locked.PublicKey)
			}
			k.skipped = append(k.skipped, file+" (it has a passphrase: run ssh-add "+file+")")
		case err != nil:
			k.skipped = append(k.skipped, fmt.Sprintf("%s (%v)", file, err))
		default:
			wanted = append(wanted, signer.PublicKey())
			k.signers, k.sources = append(k.signers, signer), append(k.sources, file)
		}
	}
	n := 0
	for _, s := range held {
		is := func(p ssh.PublicKey) bool { return bytes.Equal(p.Marshal(), s.PublicKey().Marshal()) }
		if slices.ContainsFunc(k.signers, func(have ssh.Signer) bool { return is(have.PublicKey()) }) || l.only && !slices.ContainsFunc(wanted, is) {
			continue
		}
		k.signers, n = append(k.signers, s), n+1
	}
	if n > 0 {
		k.sources = append(k.sources, fmt.Sprintf("%d of the SSH agent", n))
	}
	return k, nil
}

// open returns the keys of an agent.
func (k *keyring) open(socket string) ([]ssh.Signer, error) {
	if socket == "" {
		return nil, nil
	}
	conn, err := net.DialTimeout("unix", socket, connectTime)
	if err != nil {
		return nil, fmt.Errorf("SSH agent: %w", err)
	}
	k.agent = conn
	err = conn.SetDeadline(time.Now().Add(agentTime))
	held, listErr := agent.NewClient(conn).Signers()
	if err = errors.Join(err, listErr, conn.SetDeadline(time.Time{})); err != nil {
		return nil, fmt.Errorf("SSH agent: %w", err)
	}
	return held, nil
}
