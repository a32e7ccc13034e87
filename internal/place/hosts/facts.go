package hosts

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"slipstream.dev/internal/place/build"
)

// facts is what a host reports about itself.
type facts struct {
	name string
	// system is the output of uname -sm, or the equivalent for Windows. user is the user ID.
	system, user string
	// address is the host's own address, at which SSH reaches it.
	address netip.Addr
	// sudo means that sudo works without a password. Otherwise noSudo means that it is not installed, and refused is its error
	// message.
	sudo, noSudo bool
	refused      string
	// machine identifies the running kernel and the network namespace; "" if unknown. It consists of the boot ID, because
	// clones of a virtual machine share the machine ID, and of the MAC addresses, because a clone that was never restarted
	// shares the boot ID too. Windows has no boot ID: there it is the computer's name and all its addresses.
	machine string
	// computer is the name of a host that runs Windows.
	computer string
	// lacks are missing programs that the scripts need.
	lacks []string
	// limits are hard limits, the lowest of each that applies to the user: those of ulimit, by its option and in its units, and
	// those of control groups, by the name of their file.
	limits map[string]int64
	// journal means that there is a journal: others change settings there, or have done so.
	journal bool
	// folders are those in which programs run; others are those in which they do not, with the reason. room holds the free
	// space of folders in bytes, where it is known.
	folders, others []string
	room            map[string]int64
}

// maxFacts limits how much a host may report.
const maxFacts = 1000

func (h *host) askFacts(ctx context.Context) (facts, error) {
	f := facts{name: h.name}
	s, err := h.openFacts(ctx)
	if err != nil {
		return f, err
	}
	defer s.end()
	for range maxFacts {
		word, rest, err := s.report(ctx)
		if err != nil {
			return f, err
		}
		if word == "end" {
			if f.computer != "" {
				f.machine = fmt.Sprintf("%s %q", f.computer, s.between.String())
			}
			return f, nil
		}
		if err := f.add(word, rest); err != nil {
			return f, refusedError{err}
		}
	}
	return f, refusedError{fmt.Errorf("host %s reports more than %d facts", h.name, maxFacts)}
}

// openFacts runs the command for a host's facts. If the one for Linux does not run, it tries the one for Windows.
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

// reasons maps words that the script reports to the reason why no program runs in a folder.
var reasons = map[string]string{
	"absent": "does not exist", "readonly": "cannot be written to", "full": "is full",
	"noexec": "runs no programs (it is mounted noexec, or a security policy forbids it)",
}

func (f *facts) add(word, rest string) error {
	switch word {
	case "system":
		f.system = rest
	case "user":
		f.user = rest
	case "connection": // the client's address and port, then the server's
		parts := append(strings.Fields(rest), "", "", "")
		return f.add("address", parts[2])
	case "home": // on Windows, where commands start in this folder and do not name it
		f.folders = append(f.folders, rest)
	case "address":
		a, err := netip.ParseAddr(rest)
		if err != nil {
			return fmt.Errorf("host %s: its SSH server, or a start-up file of the user's shell, hides the address of the connection: SSH_CONNECTION has %q as the server's", f.name, clip(rest))
		}
		f.address = a.Unmap().WithZone("")
	case "journal":
		f.journal = true
	case "sudo":
		f.sudo = true
	case "nosudo":
		f.noSudo = true
	case "refused":
		f.refused = clip(rest)
	case "machine":
		if ids := strings.Fields(rest); len(ids) > 1 && strings.HasPrefix(ids[1], "net:") {
			f.machine = rest
		}
	case "computer":
		f.computer = clip(rest)
	case "lacks":
		f.lacks = append(f.lacks, rest)
	case "limit":
		name, most, _ := strings.Cut(rest, " ")
		if n, err := strconv.ParseInt(most, 10, 64); err == nil { // otherwise it is unlimited
			if f.limits == nil {
				f.limits = make(map[string]int64)
			}
			if other, limited := f.limits[name]; !limited || n < other {
				f.limits[name] = n
			}
		}
	case "room":
		blocks, folder, _ := strings.Cut(rest, " ")
		if n, err := strconv.ParseInt(blocks, 10, 64); err == nil && n < math.MaxInt64>>10 {
			if f.room == nil {
				f.room = make(map[string]int64)
			}
			f.room[folder] = n << 10
		}
	case "folder":
		// The script puts the folder's name in double quotes.
		if strings.ContainsAny(rest, "\"$`\\'\n") {
			f.others = append(f.others, rest+" has a name with quotes or the like")
			break
		}
		f.folders = append(f.folders, rest)
	case "absent", "readonly", "full", "noexec":
		f.others = append(f.others, rest+" "+reasons[word])
	default:
		return unexpected(f.name, word)
	}
	return nil
}

// limits says what a run cannot do on a Windows host.
func (h *host) limits() string {
	return fmt.Sprintf("host %s runs Windows: the load of its CPUs, its interrupts and its devices are not sampled, TCP retransmissions not counted, and senders under load do not sleep in the last millisecond before a message is due", h.name)
}

// Finding is what a run would find on a host.
type Finding struct {
	Host, Login, System string
	// Folder is the folder to which the program would be copied.
	Folder string
	// Root means that accelerators would be applied there, Sudo that sudo -n would start the worker for that.
	Root, Sudo bool
	// Limits says what the run could not do there, or is "".
	Limits string
	// Missing is the reason why the run would fail, or nil.
	Missing error
}

// Survey examines the hosts of a run. It changes nothing.
func Survey(ctx context.Context, config Config) ([]Finding, error) {
	h, err := New(config)
	if err != nil {
		return nil, err
	}
	found, err := h.Survey(ctx)
	return found, errors.Join(err, h.Close(context.WithoutCancel(ctx)))
}

// Survey examines the hosts. It changes nothing.
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
	byRoot, bySudo := h.facts.user == "0", h.sudo() && h.facts.sudo
	found.System, found.Root, found.Sudo = h.facts.system, h.root() != "" && byRoot, bySudo
	if h.windows {
		found.Limits = h.limits()
	}
	defer func() {
		if len(h.facts.folders) > 0 { // folders that have room
			found.Folder = h.facts.folders[0]
		}
	}()
	_, err = h.suit()
	return cmp.Or(h.twin(), err)
}

// architectures maps the names that uname -m and Windows print to Go's.
var architectures = map[string]string{"x86_64": "amd64", "aarch64": "arm64", "AMD64": "amd64"}

// fitting returns the build for a machine. uname is the output of uname -sm, such as "Linux x86_64", or of factsWindows, such
// as "Windows AMD64".
func fitting(all []build.Build, name, uname string) (build.Build, error) {
	system, machine, _ := strings.Cut(uname, " ")
	system = strings.ToLower(system)
	if !slices.Contains(build.Systems, system) {
		return build.Build{}, fmt.Errorf("host %s runs %s, and a worker needs Linux or Windows: name another host", name, uname)
	}
	arch := architectures[machine]
	if arch == "" {
		builds := map[string]string{"linux": "Linux on x86_64 and aarch64", "windows": "Windows on AMD64"}[system]
		return build.Build{}, fmt.Errorf("host %s is of the architecture %s; there are builds of this program for %s", name, machine, builds)
	}
	return build.Fit(all, "host "+name, system, arch)
}
