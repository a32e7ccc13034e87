// Package nic describes the NICs of a guest, finds out whether a virtual function (VF) is bonded to
// one, and counts how many of a window's packets took it. It reads sysfs and ethtool through
// parameters and changes nothing: a machine and a fixture (see Capture and nic/nictest) are read by
// the same code. internal/collect, internal/doctor and internal/agent call it; internal/record
// defines what it returns.
//
// The names of attributes and counters are those of Linux 6.12.
package nic

import (
	"cmp"
	"io/fs"
	"slices"
	"strconv"
	"strings"

	"slipstream.dev/internal/kernelfs"
	"slipstream.dev/internal/record"
)

// Ethtool reads what sysfs does not show about a device.
type Ethtool interface {
	// Driver returns the names of a device's driver and firmware.
	Driver(device string) (driver, firmware string, err error)
	// Counters returns the driver's own counters of a device, by name.
	Counters(device string) (map[string]uint64, error)
}

// Source has the interfaces from which NICs are read.
type Source struct {
	// Sys is a sysfs that shows the network namespace.
	Sys  fs.FS
	Tool Ethtool
}

// Snapshot holds the NICs of a network namespace at one instant.
type Snapshot struct {
	devices   []device // by name
	functions []function
}

// device is a network device with hardware, or what passes for it in a guest.
type device struct {
	name             string
	index            int
	driver, firmware string
	pci              string // vendor:device
	up               bool
	// carrierDowns counts how often the carrier was lost.
	carrierDowns       uint64
	rxQueues, txQueues int
	lower              []string
	rx, tx             uint64
	// vfRx and vfTx are netvsc's counts of packets that took the VF; counted means that it has
	// these counts.
	vfRx, vfTx uint64
	counted    bool
}

// function is a PCI function of a network controller.
type function struct {
	address     string
	pci, driver string
	inUse       bool // it has a network device
}

// Where devices and PCI functions are in sysfs.
const (
	netDir = "class/net"
	pciDir = "bus/pci/devices"
)

// Drivers of the devices that have a VF below them.
const (
	driverNetvsc   = "hv_netvsc"
	driverFailover = "net_failover"
	driverVirtio   = "virtio_net"
)

// paravirtual has the drivers of devices that a hypervisor emulates. gve's device is a PCI function,
// but the guest cannot see what carries its packets on the host.
var paravirtual = []string{driverVirtio, "gve"}

// virtualFunctions maps the PCI IDs of VFs to their drivers, as the drivers' tables list them:
// mlx4_pci_table and mlx5_core_pci_table (..._PCI_DEV_IS_VF), MANA_VF_DEVICE_ID, PCI_DEV_ID_ENA_VF
// and _LLQ_VF.
var virtualFunctions = map[string]string{
	"15b3:1002": "mlx4_core", "15b3:1004": "mlx4_core",
	"15b3:1012": "mlx5_core", "15b3:1014": "mlx5_core", "15b3:1016": "mlx5_core", "15b3:1018": "mlx5_core",
	"15b3:101a": "mlx5_core", "15b3:101c": "mlx5_core", "15b3:101e": "mlx5_core", "15b3:a2d3": "mlx5_core",
	"1414:00ba": "mana",
	"1d0f:ec20": "ena", "1d0f:ec21": "ena",
}

// Read takes a snapshot of all NICs. It leaves out what it cannot read.
func (s Source) Read() Snapshot {
	var all Snapshot
	names, _ := fs.ReadDir(s.Sys, netDir)
	for _, n := range names {
		if d, ok := s.device(n.Name()); ok {
			all.devices = append(all.devices, d)
		}
	}
	functions, _ := fs.ReadDir(s.Sys, pciDir)
	for _, f := range functions {
		dir := pciDir + "/" + f.Name()
		if !strings.HasPrefix(kernelfs.Text(s.Sys, dir+"/class"), "0x02") { // PCI_BASE_CLASS_NETWORK
			continue
		}
		u := s.uevent(dir)
		nets, _ := fs.ReadDir(s.Sys, dir+"/net") // is missing without a network device
		all.functions = append(all.functions, function{f.Name(), strings.ToLower(u["PCI_ID"]), u["DRIVER"], len(nets) > 0})
	}
	return all
}

// ReadAgain takes a snapshot of the NICs of an earlier snapshot that may have a VF, and of the devices
// below them now. It costs nothing if there are no such NICs.
func (s Source) ReadAgain(of Snapshot) Snapshot {
	var again Snapshot
	for _, was := range of.devices {
		if !was.canHaveVF() {
			continue
		}
		d, ok := s.device(was.name)
		if !ok {
			continue
		}
		again.devices = append(again.devices, d)
		for _, name := range d.lower {
			if l, ok := s.device(name); ok {
				again.devices = append(again.devices, l)
			}
		}
	}
	return again
}

func (d device) canHaveVF() bool { return d.driver == driverNetvsc || d.driver == driverFailover }

// device reads a device. ok is false if it has no hardware, or was removed a moment ago.
func (s Source) device(name string) (d device, ok bool) {
	dir := netDir + "/" + name
	if _, err := fs.Stat(s.Sys, dir+"/device"); err != nil {
		return d, false // before the directory is read: a node may have hundreds of veths
	}
	entries, err := fs.ReadDir(s.Sys, dir)
	if err != nil {
		return d, false
	}
	d.name = name
	for _, e := range entries {
		// netdev_adjacent_sysfs_add links to each device below.
		if below, ok := strings.CutPrefix(e.Name(), "lower_"); ok {
			d.lower = append(d.lower, below)
		}
	}
	if d.index, err = strconv.Atoi(kernelfs.Text(s.Sys, dir+"/ifindex")); err != nil {
		return d, false
	}
	u := s.uevent(dir + "/device")
	d.driver, d.pci = u["DRIVER"], strings.ToLower(u["PCI_ID"])
	if driver, firmware, err := s.Tool.Driver(name); err == nil {
		// A failover device has the parent of its virtio device. ethtool calls mlx4_en what
		// sysfs calls mlx4_core, and only sysfs knows the drivers of functions without a
		// device.
		if driver == driverFailover || d.driver == "" {
			d.driver = driver
		}
		if firmware != "N/A" { // as netvsc answers
			d.firmware = firmware
		}
	}
	flags, _ := strconv.ParseUint(kernelfs.Text(s.Sys, dir+"/flags"), 0, 32)
	// A driver that never reports its carrier leaves the state unknown (rfc2863_policy).
	state := kernelfs.Text(s.Sys, dir+"/operstate")
	const iffUp = 1
	d.up = flags&iffUp != 0 && (state == "up" || state == "unknown")
	d.carrierDowns = kernelfs.Number(s.Sys, dir+"/carrier_down_count")
	d.rx, d.tx = kernelfs.Number(s.Sys, dir+"/statistics/rx_packets"), kernelfs.Number(s.Sys, dir+"/statistics/tx_packets")
	queues, _ := fs.ReadDir(s.Sys, dir+"/queues")
	for _, q := range queues {
		switch {
		case strings.HasPrefix(q.Name(), "rx-"):
			d.rxQueues++
		case strings.HasPrefix(q.Name(), "tx-"):
			d.txQueues++
		}
	}
	if d.driver == driverNetvsc {
		counters, _ := s.Tool.Counters(name)
		rx, hasRx := counters["vf_rx_packets"] // of vf_stats in netvsc_drv.c
		tx, hasTx := counters["vf_tx_packets"]
		d.vfRx, d.vfTx, d.counted = rx, tx, hasRx && hasTx
	}
	return d, true
}

// uevent returns what the kernel says about a device of a bus, by key.
func (s Source) uevent(dir string) map[string]string {
	b, _ := fs.ReadFile(s.Sys, dir+"/uevent")
	all := make(map[string]string)
	for l := range strings.Lines(string(b)) {
		if k, v, ok := strings.Cut(strings.TrimSpace(l), "="); ok {
			all[k] = v
		}
	}
	return all
}

// Facts returns the NICs of a snapshot by the names of their devices.
func Facts(s Snapshot) map[string]record.NIC {
	all := make(map[string]record.NIC, len(s.devices))
	var without []string // devices that may have a VF, and none is bonded to them
	for _, d := range s.devices {
		n := record.NIC{Type: d.kind(), Driver: d.driver, Firmware: d.firmware, PCI: d.pci, RxQueues: d.rxQueues, TxQueues: d.txQueues}
		if d.canHaveVF() {
			n.VF = new(record.VF)
			if vf, ok := s.bonded(d); ok {
				*n.VF = vf.facts(true)
			} else {
				without = append(without, d.name)
			}
		}
		all[d.name] = n
	}
	// Until a VF is bonded, only the host and the driver know which NIC it belongs to. Assign
	// it if a single NIC lacks a VF, or if there is a VF for each NIC that lacks one.
	loose := s.unbonded()
	if len(loose) > 0 && (len(without) == 1 || len(loose) >= len(without)) {
		for i, name := range without {
			*all[name].VF = loose[i]
		}
	}
	return all
}

// Speed returns the rate of a device's link in bit/s; 0 if the driver does not report it.
func Speed(sys fs.FS, device string) float64 {
	// The file cannot be read if the link is down, and says -1 if the speed is not known.
	return float64(kernelfs.Number(sys, "class/net/"+device+"/speed")) * 1e6
}

func (d device) kind() string {
	switch {
	case d.driver == driverNetvsc:
		return record.NICSynthetic
	case d.driver == driverFailover:
		return record.NICFailover
	case slices.Contains(paravirtual, d.driver):
		return record.NICParavirtual
	case virtualFunctions[d.pci] != "":
		return record.NICVF
	}
	return record.NICDevice
}

func (s Snapshot) find(name string) (device, bool) {
	i := slices.IndexFunc(s.devices, func(d device) bool { return d.name == name })
	if i < 0 {
		return device{}, false
	}
	return s.devices[i], true
}

// bonded returns the VF below a device. Below a failover device is its virtio device too.
func (s Snapshot) bonded(d device) (device, bool) {
	for _, name := range d.lower {
		if l, ok := s.find(name); ok && l.driver != driverVirtio {
			return l, true
		}
	}
	return device{}, false
}

// unbonded returns the VFs that are not bonded: first those without a network device of their own.
func (s Snapshot) unbonded() (all []record.VF) {
	for _, f := range s.functions {
		if needs := virtualFunctions[f.pci]; needs != "" && !f.inUse {
			all = append(all, record.VF{Function: f.pci, Driver: f.driver, Needs: needs})
		}
	}
	for _, d := range s.devices {
		above := func(u device) bool { return slices.Contains(u.lower, d.name) }
		if d.kind() == record.NICVF && !slices.ContainsFunc(s.devices, above) {
			all = append(all, d.facts(false))
		}
	}
	return all
}

func (d device) facts(bonded bool) record.VF {
	return record.VF{Function: d.pci, Driver: d.driver, Needs: virtualFunctions[d.pci], Device: d.name, Bonded: bonded, Up: d.up}
}

// CountUse counts the packets from one snapshot to a later one for each NIC that may have a VF: all of
// them, and those that took the VF. The caller fills in the place.
func CountUse(before, after Snapshot) []record.VFUse {
	var all []record.VFUse
	for _, b := range before.devices {
		if !b.canHaveVF() {
			continue
		}
		u := record.VFUse{NIC: b.name}
		if a, _ := after.find(b.name); a.index != b.index {
			u.Unknown = "the NIC itself was removed"
		} else {
			u.VF, u.Change, u.Up = change(before, b, after, a)
			count(&u, before, b, after, a)
		}
		all = append(all, u)
	}
	return all
}

// change returns the VF's device, what happened to the VF from one snapshot to the other, and
// whether it was up at both.
func change(before Snapshot, b device, after Snapshot, a device) (name, change string, up bool) {
	was, _ := before.bonded(b)
	is, _ := after.bonded(a)
	name = cmp.Or(is.name, was.name)
	switch {
	case was.up && !is.up:
		return name, record.VFWithdrawn, false
	case !was.up && is.up:
		return name, record.VFAdded, false
	case was.up && (was.index != is.index || was.carrierDowns != is.carrierDowns):
		// A VF that the host takes and gives back is another device.
		return name, record.VFInterrupted, true
	}
	return name, "", was.up
}

// counters counts a NIC's packets, and those that took one of its two paths: the VF of a synthetic
// device, or the virtio device of a failover device.
type counters struct{ rx, tx, partRx, partTx uint64 }

// counters returns a device's counters, and false if its driver has none.
func (s Snapshot) counters(d device) (counters, bool) {
	if d.driver == driverNetvsc {
		// netvsc_get_stats64 adds the packets of the VF to those of the VMBus.
		return counters{d.rx, d.tx, d.vfRx, d.vfTx}, d.counted
	}
	// net_failover_get_stats adds both devices up. The virtio device stays when a VF goes, and
	// with it the VF's own counters.
	for _, name := range d.lower {
		if l, ok := s.find(name); ok && l.driver == driverVirtio {
			return counters{d.rx, d.tx, l.rx, l.tx}, true
		}
	}
	return counters{}, false
}

// count fills in the packets.
func count(u *record.VFUse, before Snapshot, b device, after Snapshot, a device) {
	was, okWas := before.counters(b)
	is, okIs := after.counters(a)
	if !okWas || !okIs {
		u.Unknown = "its driver does not count the packets of the VF"
		return
	}
	if is.rx < was.rx || is.tx < was.tx || is.partRx < was.partRx || is.partTx < was.partTx {
		u.Unknown = "its counters were reset"
		return
	}
	u.RxPackets, u.TxPackets = is.rx-was.rx, is.tx-was.tx
	// The two kinds of counters are not read at the same instant.
	u.VFRxPackets = min(is.partRx-was.partRx, u.RxPackets)
	u.VFTxPackets = min(is.partTx-was.partTx, u.TxPackets)
	if b.driver == driverFailover {
		u.VFRxPackets, u.VFTxPackets = u.RxPackets-u.VFRxPackets, u.TxPackets-u.VFTxPackets
	}
}
