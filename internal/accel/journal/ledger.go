package journal

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"

	"slipstream.dev/internal/accel/cpuset"
	"slipstream.dev/internal/accel/kernel"
	"slipstream.dev/internal/netns"
)

// Holder identifies who wants a setting.
type Holder struct {
	Owner string `json:"owner"`
	// PID and Start (clock ticks after boot) identify the process whose end releases the setting. If PID is 0, only reverting
	// releases it.
	PID   int    `json:"pid,omitempty"`
	Start uint64 `json:"start,omitempty"`
}

// Process returns this process as a holder.
func Process(proc, owner string) (Holder, error) {
	pid := os.Getpid()
	stat, err := kernel.ReadStat(proc, pid)
	if err == nil && stat.Start == 0 {
		err = errors.New("it does not show this process")
	}
	if err != nil {
		return Holder{}, fmt.Errorf("read this process's start time from %s: %w", proc, err)
	}
	return Holder{Owner: owner, PID: pid, Start: stat.Start}, nil
}

// String returns the holder's name for messages.
func (h Holder) String() string {
	if h.PID == 0 {
		return h.Owner
	}
	return fmt.Sprintf("%s (process %d)", h.Owner, h.PID)
}

// alive reports whether h still holds its settings.
func (h Holder) alive(proc string) (bool, error) {
	if h.PID == 0 {
		return true, nil
	}
	s, err := kernel.ReadStat(proc, h.PID)
	return s.Start == h.Start, err
}

// Entry is one setting that is held.
type Entry struct {
	Path string `json:"path"`
	// Link is the index of the device, whose name may change.
	Link int    `json:"link,omitempty"`
	Was  string `json:"was"`
	Want string `json:"want"`
	// Got is the value that read back, if it is not Want.
	Got     string   `json:"got,omitempty"`
	Holders []Holder `json:"holders"`
}

// ledger is the content of a journal file: the settings of one network
// namespace or of the machine, oldest first.
type ledger struct {
	Version int `json:"version"`
	// Boot is the boot ID. Settings do not survive a reboot, but the file does
	// if /run is on a disk.
	Boot string `json:"boot"`
	// Place is the name that the first holder gave the namespace.
	Place string `json:"place"`
	netns.ID
	Entries []Entry `json:"entries"`
}

const ledgerVersion = 1

// decodeLedger accepts only what this package could have written. Nothing may be restored from any other file.
func decodeLedger(b []byte) (ledger, error) {
	var l ledger
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&l); err != nil {
		return ledger{}, err
	}
	if _, err := d.Token(); err != io.EOF {
		return ledger{}, errors.New("trailing data")
	}
	if l.Version != ledgerVersion {
		return ledger{}, fmt.Errorf("version %d, want %d", l.Version, ledgerVersion)
	}
	if l.Boot == "" {
		return ledger{}, errors.New("boot is empty")
	}
	seen := make(map[string]bool)
	for _, e := range l.Entries {
		if err := e.check(l.Cookie == 0); err != nil {
			return ledger{}, fmt.Errorf("entry %q: %w", e.Path, err)
		}
		if seen[e.Path] {
			return ledger{}, fmt.Errorf("entry %q: twice", e.Path)
		}
		seen[e.Path] = true
	}
	return l, nil
}

func (e Entry) check(machine bool) error {
	valid := func(value string) error {
		_, err := strconv.ParseUint(value, 10, 32)
		return err
	}
	if machine {
		if e.Path != kernel.FlowTable || e.Link != 0 {
			return errors.New("not a setting of the machine")
		}
	} else {
		name, setting, ok := kernel.SplitQueue(e.Path)
		if !ok || name == "" || name == "." || name == ".." || e.Link <= 0 {
			return errors.New("not a setting of a device's queue")
		}
		switch setting {
		case "rps_cpus":
			valid = func(value string) error {
				_, err := cpuset.ParseMask(value)
				return err
			}
		case "rps_flow_cnt":
		default:
			return errors.New("unknown setting")
		}
	}
	for _, value := range []string{e.Was, e.Want} {
		if err := valid(value); err != nil {
			return err
		}
	}
	if len(e.Holders) == 0 {
		return errors.New("no holders")
	}
	for _, h := range e.Holders {
		if h.Owner == "" || h.PID < 0 || (h.PID == 0) != (h.Start == 0) {
			return fmt.Errorf("holder %+v: the owner is empty, or pid and start are invalid", h)
		}
	}
	return nil
}
