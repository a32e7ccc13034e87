package nic

import (
	"cmp"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"

	"github.com/goccy/go-yaml"
)

// Fixture holds what was read about a machine's NICs, so that it can be read again elsewhere.
type Fixture struct {
	// Facts says what slipstream concludes from the rest, in a line for each device.
	Facts map[string]string `yaml:"facts"`
	// Files of sysfs with their content.
	Files map[string]string `yaml:"files"`
	// Dirs maps directories of sysfs to the names in them that Read uses, separated by
	// spaces.
	Dirs map[string]string `yaml:"dirs"`
	// Ethtool has the answers for each device.
	Ethtool map[string]Answers `yaml:"ethtool"`
}

// Answers has ethtool's answers for one device.
type Answers struct {
	Driver   string            `yaml:"driver"`
	Firmware string            `yaml:"firmware,omitempty"`
	Counters map[string]uint64 `yaml:"counters,omitempty"`
}

// Capture reads the NICs of a source. The fixture does not identify the machine: devices and PCI
// functions have other names, and nothing holds an address or a serial number.
func Capture(s Source) Fixture {
	r := &recorder{FS: s.Sys, Ethtool: s.Tool, fixture: newFixture()}
	return r.fixture.anonymous(Source{Sys: r, Tool: r}.Read())
}

func newFixture() Fixture {
	return Fixture{map[string]string{}, map[string]string{}, map[string]string{}, map[string]Answers{}}
}

// YAML returns the fixture as the content of a file.
func (f Fixture) YAML() ([]byte, error) {
	text, err := yaml.MarshalWithOptions(f, yaml.UseLiteralStyleIfMultiline(true))
	if err != nil {
		return nil, fmt.Errorf("encode fixture: %w", err)
	}
	return text, nil
}

// recorder keeps what is read through it.
type recorder struct {
	fs.FS
	Ethtool
	fixture Fixture
}

func (r *recorder) ReadFile(name string) ([]byte, error) {
	b, err := fs.ReadFile(r.FS, name)
	if err == nil {
		r.fixture.Files[name] = strings.TrimSpace(string(b))
	}
	return b, err
}

func (r *recorder) ReadDir(name string) ([]fs.DirEntry, error) {
	entries, err := fs.ReadDir(r.FS, name)
	if err == nil {
		names := make([]string, len(entries))
		for i, e := range entries {
			names[i] = e.Name()
		}
		r.fixture.Dirs[name] = strings.Join(names, " ")
	}
	return entries, err
}

func (r *recorder) Driver(device string) (driver, firmware string, err error) {
	driver, firmware, err = r.Ethtool.Driver(device)
	if err == nil {
		a := r.fixture.Ethtool[device]
		a.Driver, a.Firmware = driver, firmware
		r.fixture.Ethtool[device] = a
	}
	return driver, firmware, err
}

func (r *recorder) Counters(device string) (map[string]uint64, error) {
	all, err := r.Ethtool.Counters(device)
	if err == nil {
		a := r.fixture.Ethtool[device]
		a.Counters = all
		r.fixture.Ethtool[device] = a
	}
	return all, err
}

// anonymous returns the fixture with new names, and drops whatever got none. The name of a device
// may hold its MAC address, or a PCI domain, which on Hyper-V is part of a serial number.
func (f Fixture) anonymous(s Snapshot) Fixture {
	slices.SortFunc(s.devices, func(a, b device) int { return cmp.Compare(a.index, b.index) })
	devices, functions := map[string]string{}, map[string]string{}
	for i, d := range s.devices {
		devices[d.name] = fmt.Sprintf("eth%d", i)
	}
	for i, u := range s.functions {
		functions[u.address] = fmt.Sprintf("function%d", i)
	}
	rename := func(path string) (string, bool) {
		for dir, names := range map[string]map[string]string{netDir: devices, pciDir: functions} {
			if below, ok := strings.CutPrefix(path, dir+"/"); ok {
				name, rest, _ := strings.Cut(below, "/")
				to, known := names[name]
				return strings.TrimSuffix(dir+"/"+to+"/"+rest, "/"), known
			}
		}
		return path, path == netDir || path == pciDir
	}
	out := newFixture()
	for name, n := range Facts(s) {
		if n.VF != nil {
			n.VF.Device = devices[n.VF.Device]
		}
		out.Facts[devices[name]] = n.String()
	}
	for path, text := range f.Files {
		if to, ok := rename(path); ok {
			out.Files[to] = publicLines(text)
		}
	}
	for path, names := range f.Dirs {
		if to, ok := rename(path); ok {
			out.Dirs[to] = publicNames(strings.Fields(names), devices, functions)
		}
	}
	for name, a := range f.Ethtool {
		if to, ok := devices[name]; ok {
			// Leave out the counters of single CPUs and queues, which are many: their names
			// contain digits.
			a.Counters = maps.Clone(a.Counters)
			maps.DeleteFunc(a.Counters, func(name string, _ uint64) bool { return strings.ContainsAny(name, "0123456789") })
			out.Ethtool[to] = a
		}
	}
	return out
}

// publicLines leaves out the lines KEY=VALUE of an uevent that Read does not use: addresses and
// aliases.
func publicLines(text string) string {
	var lines []string
	for l := range strings.Lines(text) {
		key, _, keyed := strings.Cut(l, "=")
		if !keyed || key == "DRIVER" || key == "PCI_ID" {
			lines = append(lines, strings.TrimSpace(l))
		}
	}
	return strings.Join(lines, "\n")
}

// publicNames renames what is in a directory, and leaves out what Read does not use.
func publicNames(names []string, devices, functions map[string]string) string {
	var out []string
	for _, name := range names {
		below, isLower := strings.CutPrefix(name, "lower_")
		switch {
		case isLower && devices[below] != "":
			out = append(out, "lower_"+devices[below])
		case devices[name] != "":
			out = append(out, devices[name])
		case functions[name] != "":
			out = append(out, functions[name])
		case name == "device" || strings.HasPrefix(name, "rx-") || strings.HasPrefix(name, "tx-"):
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}
