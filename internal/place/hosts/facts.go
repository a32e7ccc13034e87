package hosts

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// facts describe a host.
type facts struct {
	name string
	// system is the output of uname -sm, or the equivalent for Windows; user is
	// the user's number.
	system, user string
	// address is the host's own address, at which SSH reaches it.
	address netip.Addr
	// sudo means that sudo gives root without a password.
	sudo bool
	// journal means that others change settings there, or have changed some.
	journal bool
	// folders can run programs; others cannot, for the reason given.
	folders, others []string
}

// askFacts asks a host for its facts.
func (h *host) askFacts(ctx context.Context) (facts, error) {
	f := facts{name: h.name}
	s, err := h.openFacts(ctx)
	if err != nil {
		return f, err
	}
	defer s.end()
	for range maxPrinted {
		word, rest, err := s.report(ctx)
		if err != nil {
			return f, err
		}
		if word == "end" {
			return f, nil
		}
		if err := f.add(word, rest); err != nil {
			return f, refusedError{err}
		}
	}
	return f, refusedError{fmt.Errorf("host %s reports more than %d facts", h.name, maxPrinted)}
}

// openFacts runs the command for a host's facts. A host that does not run that for Linux may run Windows.
func (h *host) openFacts(ctx context.Context) (*session, error) {
	if !h.windows {
		s, err := h.open(ctx, func(mark string) request {
			return script(mark, factsScript(mark, h.root() != "" || h.all.config.ReadOnly))
		})
		if !errors.As(err, new(notRunError)) {
			return s, err
		}
		if s, failed := h.open(ctx, factsWindows); failed == nil {
			h.windows = true
			return s, nil
		}
		return nil, err
	}
	return h.open(ctx, factsWindows)
}

// reasons say why no program runs in a folder, by the word that the script reports.
var reasons = map[string]string{"absent": "does not exist", "readonly": "cannot be written to", "noexec": "runs no programs (noexec)"}

func (f *facts) add(word, rest string) error {
	switch word {
	case "system":
		f.system = rest
	case "user":
		f.user = rest
	case "connection": // the client's address and port, and the server's
		parts := append(strings.Fields(rest), "", "", "")
		return f.add("address", parts[2])
	case "home": // of Windows; commands begin in it, and do not name it
		f.folders = append(f.folders, rest)
	case "address":
		a, err := netip.ParseAddr(rest)
		if err != nil {
			return fmt.Errorf("host %s: its SSH server does not report the address of the connection (SSH_CONNECTION): %w", f.name, err)
		}
		f.address = a.Unmap().WithZone("")
	case "journal":
		f.journal = true
	case "sudo":
		f.sudo = true
	case "folder":
		// The script has the folder's name in double quotes.
		if strings.ContainsAny(rest, "\"$`\\'\n") {
			f.others = append(f.others, rest+" has a name with quotes or the like")
			break
		}
		f.folders = append(f.folders, rest)
	case "absent", "readonly", "noexec":
		f.others = append(f.others, rest+" "+reasons[word])
	default:
		return unexpected(f.name, word)
	}
	return nil
}

// suit says whether a host suits the run, and which binary suits the host.
func (h *host) suit() (binary, error) {
	f, root, config := h.facts, h.root(), h.all.config
	b, err := fitting(h.all.binaries, f.name, f.system)
	switch {
	case h.windows && config.ReadOnly:
		return b, fmt.Errorf("host %s runs Windows, and doctor looks at Linux machines: leave it out", f.name)
	case h.windows && root != "":
		return b, fmt.Errorf("host %s runs Windows, and %s needs Linux: leave that out, or select other hosts by their labels", f.name, root)
	case h.windows && config.Linux[f.name] != "":
		return b, fmt.Errorf("host %s runs Windows, and %s needs Linux: leave that out, or select other hosts by their labels", f.name, config.Linux[f.name])
	case !h.windows && config.Windows[f.name] != "":
		return b, fmt.Errorf("host %s does not run Windows, and %s needs it: leave that out, or select other hosts by their labels", f.name, config.Windows[f.name])
	case err != nil:
		return b, err
	case len(f.folders) == 0:
		return b, fmt.Errorf("host %s has no folder in which the program can run: %s. Give the user a home or /run/user folder without noexec", f.name, strings.Join(f.others, ", "))
	case root != "" && f.user != "0" && !f.sudo:
		return b, fmt.Errorf("host %s: %s needs root, and sudo -n gives it to the user there only with a password, or not at all: allow it without one (NOPASSWD), log in as root, or leave that out", f.name, root)
	}
	return b, nil
}

// limits says what a run cannot do on a host that runs Windows.
func (h *host) limits() string {
	return fmt.Sprintf("host %s runs Windows: the load of its CPUs, its interrupts and its devices are not sampled, TCP retransmissions not counted, and senders under load do not sleep in the last millisecond before a message is due", h.name)
}

// Finding describes what a run would find on a host.
type Finding struct {
	Host, Login, System string
	// Folder is the one that the program would be copied to.
	Folder string
	// Root: accelerators would be applied there. Sudo: by a worker that is started by sudo -n.
	Root, Sudo bool
	// Limits says what the run could not do there; "" if there is nothing.
	Limits string
	// Missing is the reason why the run would fail; nil if none is known.
	Missing error
}

// Survey looks at the hosts, and changes nothing.
func Survey(ctx context.Context, config Config) ([]Finding, error) {
	h, err := New(config)
	if err != nil {
		return nil, err
	}
	found, err := h.Survey(ctx)
	return found, errors.Join(err, h.Close(context.WithoutCancel(ctx)))
}

// Survey looks at the hosts, and changes nothing.
func (h *Hosts) Survey(ctx context.Context) ([]Finding, error) {
	all := make([]Finding, len(h.hosts))
	for i, at := range h.hosts {
		all[i] = Finding{Host: at.name, Login: at.login(ctx)}
		all[i].Missing = at.survey(ctx, &all[i])
	}
	return all, ctx.Err()
}

// LeaveOut removes a host.
func (h *Hosts) LeaveOut(name string) {
	at := h.find(name)
	at.unlink()
	h.hosts = slices.DeleteFunc(h.hosts, func(one *host) bool { return one == at })
}

func (h *host) survey(ctx context.Context, found *Finding) (err error) {
	if h.facts, err = h.askFacts(ctx); err != nil {
		return err
	}
	found.System, found.Root, found.Sudo = h.facts.system, h.root() != "", h.sudo()
	if len(h.facts.folders) > 0 {
		found.Folder = h.facts.folders[0]
	}
	if h.windows {
		found.Limits = h.limits()
	}
	_, err = h.suit()
	return err
}
