// Package nictest has test machines, whose NICs are fixtures as `slipstream capture` writes
// them. testdata/README.md says where each fixture comes from.
package nictest

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/goccy/go-yaml"

	"slipstream.dev/internal/nic"
)

//go:embed testdata/*.yaml
var fixtures embed.FS

// Machine has the NICs of a fixture. A test changes the fixture between two snapshots.
type Machine struct{ nic.Fixture }

// Load reads a fixture of testdata by its name.
func Load(t testing.TB, name string) *Machine {
	t.Helper()
	text, err := fixtures.ReadFile("testdata/" + name + ".yaml")
	if err != nil {
		t.Fatal(err)
	}
	m, err := Parse(text)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return m
}

// Names returns the names of all fixtures.
func Names(t testing.TB) (names []string) {
	t.Helper()
	entries, err := fixtures.ReadDir("testdata")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name()[:len(e.Name())-len(".yaml")])
	}
	return names
}

// Parse reads a fixture.
func Parse(text []byte) (*Machine, error) {
	m := new(Machine)
	if err := yaml.UnmarshalWithOptions(text, &m.Fixture, yaml.DisallowUnknownField()); err != nil {
		return nil, fmt.Errorf("read fixture: %w", err)
	}
	for path := range m.Files {
		if !fs.ValidPath(path) {
			return nil, fmt.Errorf("read fixture: file %q is not a path in sysfs", path)
		}
	}
	for dir, names := range m.Dirs {
		for name := range strings.FieldsSeq(names) {
			if !fs.ValidPath(dir + "/" + name) {
				return nil, fmt.Errorf("read fixture: %q in %q is not a path in sysfs", name, dir)
			}
		}
	}
	return m, nil
}

// Source returns the NICs of the machine as they are now.
func (m *Machine) Source() nic.Source {
	sys := fstest.MapFS{}
	for dir, names := range m.Dirs {
		sys[dir] = &fstest.MapFile{Mode: fs.ModeDir}
		for name := range strings.FieldsSeq(names) {
			sys[dir+"/"+name] = &fstest.MapFile{Mode: fs.ModeDir}
		}
	}
	for path, text := range m.Files {
		sys[path] = &fstest.MapFile{Data: []byte(text + "\n")}
	}
	return nic.Source{Sys: sys, Tool: m}
}

// Add adds to a number in a file of sysfs.
func (m *Machine) Add(t testing.TB, file string, n int) {
	t.Helper()
	was, err := strconv.Atoi(m.Files[file])
	if err != nil {
		t.Fatal(err)
	}
	m.Files[file] = strconv.Itoa(was + n)
}

// Packets counts packets of the synthetic device eth0, some of which took its VF.
func (m *Machine) Packets(t testing.TB, rx, tx, vfRx, vfTx int) {
	t.Helper()
	m.Add(t, "class/net/eth0/statistics/rx_packets", rx)
	m.Add(t, "class/net/eth0/statistics/tx_packets", tx)
	m.Ethtool["eth0"].Counters["vf_rx_packets"] += uint64(vfRx)
	m.Ethtool["eth0"].Counters["vf_tx_packets"] += uint64(vfTx)
}

// Withdraw removes the VF of eth0, as a guest sees it when the host takes the VF back.
func (m *Machine) Withdraw(vf string) {
	m.Dirs["class/net"] = "eth0"
	m.Dirs["class/net/eth0"] = "device"
	delete(m.Dirs, "class/net/"+vf)
	delete(m.Files, "class/net/"+vf+"/ifindex")
	delete(m.Ethtool, vf)
}

// Driver implements nic.Ethtool.
func (m *Machine) Driver(device string) (driver, firmware string, err error) {
	a, ok := m.Ethtool[device]
	if !ok {
		return "", "", errUnsupported
	}
	return a.Driver, a.Firmware, nil
}

// Counters implements nic.Ethtool.
func (m *Machine) Counters(device string) (map[string]uint64, error) {
	if a := m.Ethtool[device]; a.Counters != nil {
		return a.Counters, nil
	}
	return nil, errUnsupported
}

var errUnsupported = errors.New("operation not supported")
