package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/words"
)

// overlays calls fn with each device that encapsulates, and the device that sends its packets, if both are
// up.
func (f Facts) overlays(fn func(overlay, under Device)) {
	for _, d := range f.Devices {
		if under, ok := f.device(d.Under); ok && d.Up && under.Up {
			fn(d, under)
		}
	}
}

func mtuEvidence(overlay, under Device) []Evidence {
	return []Evidence{
		evidence("/sys/class/net/"+overlay.Name+"/mtu", "%d, and %s adds %d bytes", overlay.MTU, overlay.Kind, overlay.Overhead),
		evidence("/sys/class/net/"+under.Name+"/mtu", "%d", under.MTU),
	}
}

func mtuTooLarge(f Facts) (found []Finding) {
	f.overlays(func(overlay, under Device) {
		most := under.MTU - overlay.Overhead
		if overlay.MTU <= most {
			return
		}
		found = append(found, Finding{
			Severity: Serious,
			Fault:    overlay.Name,
			What:     fmt.Sprintf("The MTU of %s is %s too large for %s, which carries its packets.", overlay.Name, words.Count(overlay.MTU-most, "byte"), under.Name),
			Evidence: mtuEvidence(overlay, under),
			Cost:     tooLarge(most) + fmt.Sprintf(" To see it: ping -M do -s %d POD, on another node", overlay.MTU-28), // IPv4 and ICMP headers
			Do:       fmt.Sprintf("ip link set %s mtu %d   # also change it in the CNI configuration, or the CNI will revert it", overlay.Name, most),
		})
	})
	return found
}

// tooLarge returns what it costs that pods send packets of more than most bytes, which is all that the device below carries.
func tooLarge(most int) string {
	return fmt.Sprintf("Packets larger than %d bytes are dropped or fragmented. If dropped, large transfers hang; if fragmented, a stream had a quarter of its throughput in a lab (docs/results/doctor.md).", most)
}

// muchSmaller is the smallest difference at which an MTU is probably too small by mistake. A smaller difference may be
// deliberate, for example because hosts have different MTUs.
const muchSmaller = 1000

// ethernetMTU is the MTU of Ethernet without jumbo frames. From a write of 128 KiB, TCP makes three packets with it, and four with an
// overlay's 1450 (docs/results/fastpath.md).
const ethernetMTU = 1500

// mtuSmall finds overlays whose MTU could be larger: much larger, or that of Ethernet.
func mtuSmall(f Facts) (found []Finding) {
	f.overlays(func(overlay, under Device) {
		most := under.MTU - overlay.Overhead
		cost := "More packets for the same data, each with its own cost."
		switch {
		case overlay.MTU < ethernetMTU && most >= ethernetMTU:
			cost += " On the fast path, a stream had 0.77 of the host network's throughput in a lab with 1450, and 0.95 with 1500 (docs/results/fastpath.md)."
		case overlay.MTU+muchSmaller > most:
			return
		}
		found = append(found, Finding{
			Severity: Note,
			Fault:    overlay.Name,
			What:     fmt.Sprintf("The MTU of %s could be %d larger: %s sends packets of up to %d bytes.", overlay.Name, most-overlay.MTU, under.Name, under.MTU),
			Evidence: mtuEvidence(overlay, under),
			Cost:     cost + " Change it only if the NIC of every node, and every switch between them, has the larger MTU: slipstream doctor hosts:A,B tries packets of that size.",
			Do:       fmt.Sprintf("ip link set %s mtu %d   # and in the configuration of the CNI; then slipstream compare BEFORE AFTER", overlay.Name, most),
		})
	})
	return found
}

// udpTunnels is the offload of segmentation that only VXLAN and Geneve use.
const udpTunnels = "tx-udp_tnl-segmentation"

// offload is something that a device or the kernel can do for many packets at once.
type offload struct {
	name    string // ethtool -k's name
	set     string // ethtool -K's name
	overlay bool   // set on the overlay's own device, not on the NIC
	without string // what the kernel does without it
}

// offloads are those that matter to encapsulated traffic.
var offloads = []offload{
	{"rx-gro", "gro", false, "each packet crosses the whole receive path on its own, instead of merged with others (GRO)"},
	{"rx-gro", "gro", true, "each packet that the overlay delivers, and the GRO of the NIC has not merged, crosses the rest of the path on its own"},
	{udpTunnels, udpTunnels, false, "the CPU segments large packets of VXLAN and Geneve, which the NIC could do"},
	{"tx-checksum-ipv4", "tx", false, "the CPU computes checksums of sent packets, and the NIC cannot segment"},
	{"tx-checksum-ip-generic", "tx", false, "the CPU computes checksums of sent packets, and the NIC cannot segment"},
	{"tx-checksum-ip-generic", "tx-checksum-ip-generic", true, "the CPU computes the inner checksums and segments before it encapsulates"},
	{"rx-checksum", "rx", false, "the CPU computes checksums of received packets"},
}

// hardware returns the NICs that send the packets of a device: itself, or those below a bond, bridge, VLAN or macvlan.
func (f Facts) hardware(d Device) (nics []Device) {
	if d.NIC != nil {
		return []Device{d}
	}
	for _, lower := range f.Devices {
		if lower.Master == d.Name || lower.Name == d.Parent {
			nics = append(nics, f.hardware(lower)...)
		}
	}
	return nics
}

// offloadOff finds switched-off offloads that a hardware NIC supports, and those of the overlay's own
// device.
func offloadOff(f Facts) (found []Finding) {
	told := make(map[string]bool) // two overlays may share a NIC
	f.overlays(func(overlay, under Device) {
		for _, o := range offloads {
			devices := f.hardware(under) // GRO is off on a veth by default
			if o.overlay {
				devices = []Device{overlay}
			}
			if o.name == udpTunnels && !slices.Contains([]string{"vxlan", "geneve"}, overlay.Kind) {
				continue
			}
			for _, d := range devices {
				if !slices.Contains(d.Off, o.name) || d.checksums(o.name) || told[d.Name+o.name] {
					continue
				}
				told[d.Name+o.name] = true
				found = append(found, o.off(f, d, evidence("ip -d link show "+overlay.Name, "%s over %s", overlay.Kind, under.Name)))
			}
		}
	})
	return found
}

// off returns the finding about an offload that is off on a device.
func (o offload) off(f Facts, d Device, overlay Evidence) Finding {
	finding := Finding{
		Severity: Warning,
		Fault:    o.name,
		What:     fmt.Sprintf("The offload %s of %s is off: %s.", o.name, d.Name, o.without),
		Evidence: []Evidence{evidence("ethtool -k "+d.Name, "%s: off, not fixed", o.name), overlay},
		Cost:     "Not measured for this offload alone. In a lab without any NIC offload, a stream over VXLAN had about a quarter of its throughput with all of them (docs/results/paths.md); slipstream run overlay-cost measures that here.",
		Do: fmt.Sprintf("slipstream run overlay-cost, before and after ethtool -K %s %s on; then slipstream compare BEFORE AFTER   # on a node that carries no traffic: offloads are on unless somebody, or a program, switches them off",
			d.Name, o.set),
	}
	if o.overlay && o.name == "rx-gro" { // it cost nothing while the NIC's GRO was on: docs/results/doctor.md
		finding.Severity = Note
	}
	if why := f.workaround(o.name, d); why != "" {
		finding.Severity = Note
		finding.Cost += why
		if strings.HasPrefix(o.name, "tx-") {
			finding.Do = experiment
		}
	}
	return finding
}

// checksums reports whether the offload is one of two kinds of checksum offload, and the device uses the
// other. A device uses at most one of them (netdev_fix_features in net/core/dev.c).
func (d Device) checksums(name string) bool {
	kinds := []string{"tx-checksum-ipv4", "tx-checksum-ip-generic"}
	return slices.Contains(kinds, name) && slices.ContainsFunc(kinds, func(k string) bool { return slices.Contains(d.Offloads, k) })
}

// experiment shows whether an offload that somebody may have switched off on purpose works. It changes nothing on the node.
const experiment = "slipstream doctor hosts:THIS,OTHER --probe   # tries a transfer through VXLAN with the offload done by the NIC and by the kernel. Leave the offload as it is unless that finds no fault, " +
	"no one here knows a reason, and slipstream run overlay-cost on two nodes that carry no traffic shows a gain"

// workaround returns why somebody may have switched an offload of encapsulated traffic off on purpose; "" if there is no common
// reason. Sources: commit ea64d8d6c675 of Linux; projectcalico/calico#3145, #4727, #9433; flannel-io/flannel#1279;
// openshift/machine-config-operator#2734; siutsin/otaru#2637; article 432932 of knowledge.broadcom.com.
func (f Facts) workaround(name string, d Device) string {
	var why string
	switch {
	case strings.HasPrefix(name, "tx-checksum"):
		why = " It may be off on purpose. Linux before 5.7, unless it is a stable kernel with the fix, sends wrong UDP checksums for VXLAN packets that it masquerades twice (--random-fully): " +
			"requests to services from a node's own address then take 1 s, 3 s or 63 s. This node runs " + f.Node.Kernel + ", but the sender's kernel is the one that matters. Flannel and Calico switch the offload off for it."
	case strings.HasPrefix(name, "tx-udp_tnl"):
		why = " It may be off on purpose: some drivers, firmwares and hypervisors segment encapsulated packets wrongly, or only those of UDP port 4789."
	case d.NIC != nil && d.NIC.Driver == "e1000e":
		return " It may be off on purpose: some NICs with the driver e1000e hang under load, and users switch off GRO with the segmentation (dmesg: Detected Hardware Unit Hang)."
	default:
		return ""
	}
	if d.NIC != nil && d.NIC.Driver == "vmxnet3" {
		why += " VMware's vmxnet3 has such a fault: since ESXi 6.7 U2 with virtual hardware 14 it offers tunnel offloads, and damages or drops encapsulated packets of UDP ports that the host does not know " +
			"(with NSX only 4789, without it only 8472; custom ports before ESXi 8.0 U3), so that only small packets and ICMP get through."
	}
	return why
}

// rpFiltered is the counter of packets that rp_filter dropped.
const rpFiltered = "TcpExt.IPReversePathFilter"

// rpFilter finds devices with strict reverse path filtering, which drops a packet that arrives on another
// device than its reply would leave by. Devices of pods may be strict on purpose: Calico makes them so, those of a cloud's
// plugin too, to keep pods from sending with addresses of others. Cilium's must not be strict.
func rpFilter(f Facts) []Finding {
	var strict []string
	var received uint64
	onPurpose, cilium := false, false
	for _, d := range f.Devices {
		received += d.Window.Rx
		onPurpose = onPurpose || strings.HasPrefix(d.Name, "cali")
		switch {
		case !d.Up || d.RPFilter != 1 || d.Kind == "" || d.Name == "lo" || strings.HasPrefix(d.Name, "cali"):
		case d.Pod == nil:
			strict = append(strict, d.Name)
		case strings.HasPrefix(d.Name, "lxc"):
			cilium = true
		case d.Master == "":
			onPurpose = true
		}
	}
	do := "sysctl -w net.ipv4.conf.all.rp_filter=2   # loose; the kernel uses the greater of the values of all and of the device"
	if onPurpose || f.Settings["net.ipv4.conf.all.rp_filter"] == "0" {
		do = ""
		for _, name := range strict {
			do += "sysctl -w net/ipv4/conf/" + name + "/rp_filter=2; "
		}
		if cilium {
			do += "for f in /proc/sys/net/ipv4/conf/lxc*/rp_filter; do echo 2 > $f; done; "
		}
		do = strings.TrimSuffix(do, "; ") + "   # loose, for these devices alone: nothing else changes"
		if onPurpose {
			do += ". Do not set net.ipv4.conf.all.rp_filter=2: Calico's Felix before 3.12 exits with it at its next start (FELIX_IGNORELOOSERPF), and the devices of pods are strict on purpose"
		}
	}
	if cilium {
		strict = append(strict, "lxc*")
	}
	filtered := f.count(rpFiltered)
	severity, lost := loss(filtered, received+filtered)
	if !lost || len(strict) == 0 {
		return nil
	}
	return []Finding{{
		Severity: severity,
		What:     "Strict reverse path filtering drops packets.",
		Evidence: []Evidence{
			evidence("/proc/net/netstat, IPReversePathFilter, in "+f.window(), "%d", filtered),
			evidence("/proc/sys/net/ipv4/conf/{all,DEVICE}/rp_filter", "1 (strict) for %s", strings.Join(strict, ", ")),
		},
		Cost: "The kernel drops a packet if its route back to the source address leaves through a device other than the one that received it. Encapsulation can cause that. Connections with such addresses do not open (docs/results/doctor.md).",
		Do:   do,
	}}
}

// vf checks NICs that may have a virtual function: whether it exists, has a driver, and is used.
func vf(f Facts) (found []Finding) {
	for _, d := range f.Devices {
		if d.NIC == nil || d.NIC.VF == nil {
			continue
		}
		finding := Finding{
			Severity: Warning,
			Evidence: []Evidence{evidence("/sys/class/net/"+d.Name, "%s", d.NIC)},
			Cost:     "Packets use the paravirtual device. To measure what that costs here, run an experiment before and after the change: slipstream compare BEFORE AFTER.",
		}
		var took string
		if d.VF != nil {
			took, _ = record.Took([]record.VFUse{*d.VF})
		}
		v := d.NIC.VF
		switch {
		case v.Function == "" && v.Device == "":
			finding.Severity = Note
			finding.What = fmt.Sprintf("The host provides no virtual function (SR-IOV, Accelerated Networking) for %s.", d.Name)
			finding.Do = "Enable it in the configuration of the virtual machine, if its type supports it; on Azure: az network nic update --accelerated-networking true"
		case v.Driver == "":
			finding.Fault = "no driver"
			finding.What = fmt.Sprintf("%s has a virtual function without a driver.", d.Name)
			finding.Do = "modprobe " + cmp.Or(v.Needs, "DRIVER")
		case v.Device == "":
			finding.Fault = "no device"
			finding.What = fmt.Sprintf("%s has a virtual function, and its driver %s creates no network device for it.", d.Name, v.Driver)
			finding.Do = "dmesg | grep -i " + v.Driver
		case !v.Bonded:
			finding.Fault = "not bonded"
			finding.What = fmt.Sprintf("%s has a virtual function that is not bonded to it.", d.Name)
			finding.Do = "dmesg | grep -i -e vf -e " + v.Driver
		case !v.Up:
			finding.Fault = "down"
			finding.What = fmt.Sprintf("The virtual function of %s is down.", d.Name)
			finding.Do = "ip link set " + v.Device + " up"
		case took == record.TookParavirtual && d.Window.Rx+d.Window.Tx >= 100:
			finding.Fault = "idle"
			finding.What = fmt.Sprintf("The virtual function of %s is up, and packets do not use it.", d.Name)
			finding.Evidence = append(finding.Evidence, evidence("packets of the VF, in "+f.window(), "%d of %d received, %d of %d sent",
				d.VF.VFRxPackets, d.VF.RxPackets, d.VF.VFTxPackets, d.VF.TxPackets))
			finding.Do = "ethtool -S " + d.Name + "   # vf_rx_packets and vf_tx_packets; docs/reference/nics.md"
		default:
			continue
		}
		found = append(found, finding)
	}
	return found
}
