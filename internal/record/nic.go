package record

import "fmt"

// NIC describes a network card as a guest sees it: its type, its driver and, if it can have one, its
// virtual function.
type NIC struct {
	// Type of the card: synthetic (of Hyper-V), failover (virtio with a virtual function), paravirtual,
	// vf or device.
	Type     string `json:"type"`
	Driver   string `json:"driver"`             // driver of the device
	Firmware string `json:"firmware,omitempty"` // version of the firmware, if the driver reports it
	PCI      string `json:"pci,omitempty"`      // vendor and device of the PCI function
	RxQueues int    `json:"rx_queues"`          // receive queues in use
	TxQueues int    `json:"tx_queues"`          // transmit queues in use
	// VF is the virtual function that a synthetic or failover device has or could have.
	VF *VF `json:"vf,omitempty"`
}

// Types of NICs.
const (
	NICSynthetic   = "synthetic"   // Hyper-V's own, beside which it may give the guest a VF
	NICFailover    = "failover"    // a virtio device and, if the host gives one, a VF
	NICParavirtual = "paravirtual" // a device of the hypervisor, and no other way
	NICVF          = "vf"          // a virtual function, and no other way unless it is bonded
	NICDevice      = "device"      // any other
)

// VF is the virtual function that belongs to a synthetic or failover device.
type VF struct {
	// Function is the vendor and device of the PCI function that the host gave the guest;
	// empty if it gave none.
	Function string `json:"function,omitempty"`
	// Driver of the function; empty if it is missing.
	Driver string `json:"driver,omitempty"`
	Needs  string `json:"needs,omitempty"`  // driver that the function needs, if it is known
	Device string `json:"device,omitempty"` // network device of the function
	Bonded bool   `json:"bonded"`           // whether the device is bonded to the NIC
	Up     bool   `json:"up"`               // whether the device is up and has a carrier
}

// Present reports whether packets can use the virtual function.
func (v VF) Present() bool { return v.Bonded && v.Up }

func (v VF) String() string {
	switch {
	case v.Function == "" && v.Device == "":
		return "no VF"
	case v.Driver == "" && v.Needs != "":
		return fmt.Sprintf("VF %s without its driver %s", v.Function, v.Needs)
	case v.Driver == "":
		return fmt.Sprintf("VF %s without a driver", v.Function)
	case v.Device == "":
		return fmt.Sprintf("VF %s, which driver %s gives no network device", v.Function, v.Driver)
	case !v.Bonded:
		return fmt.Sprintf("VF %s (%s) not bonded", v.Device, v.Driver)
	case !v.Up:
		return fmt.Sprintf("VF %s (%s) down", v.Device, v.Driver)
	}
	return fmt.Sprintf("VF %s (%s) up", v.Device, v.Driver)
}

// VFUse counts the packets of a synthetic or failover device over the measured window, and those that
// used its virtual function.
type VFUse struct {
	Place string `json:"place"`        // namespace of the device
	NIC   string `json:"nic"`          // name of the device
	VF    string `json:"vf,omitempty"` // device of the virtual function, if there was one at an edge of the window
	// RxPackets is the number of all received packets. This and the next three are
	// 0 if unknown is set.
	RxPackets   uint64 `json:"rx_packets"`
	TxPackets   uint64 `json:"tx_packets"`    // all sent packets
	VFRxPackets uint64 `json:"vf_rx_packets"` // packets received through the virtual function
	VFTxPackets uint64 `json:"vf_tx_packets"` // packets sent through the virtual function
	// Unknown is the reason if the packets could not be counted; otherwise empty.
	Unknown string `json:"unknown,omitempty"`
	// Change of the virtual function in the window: withdrawn, interrupted (withdrawn and back
	// again) or added; empty if there was none.
	Change string `json:"change,omitempty"`
	Up     bool   `json:"up"` // whether the virtual function was up at both edges of the window
}

// Changes of a virtual function in a window.
const (
	VFWithdrawn   = "withdrawn"
	VFInterrupted = "interrupted"
	VFAdded       = "added"
)

// Packets returns the packets in both directions, and how many of them used the virtual function.
func (u VFUse) Packets() (all, vf uint64) {
	return u.RxPackets + u.TxPackets, u.VFRxPackets + u.VFTxPackets
}

// Ways that packets took.
const (
	TookVF          = "the VF"                 // at least 95% of them
	TookParavirtual = "the paravirtual device" // at most 5% took the VF
	TookBoth        = "both ways"              // anything between
)

// Took returns which way the packets of NICs took, and the share of them that used a virtual
// function; "" if there were none, or they could not be counted.
func Took(nics []VFUse) (way string, share float64) {
	var all, vf uint64
	for _, u := range nics {
		a, v := u.Packets()
		all, vf = all+a, vf+v
	}
	if all == 0 {
		return "", 0
	}
	share = float64(vf) / float64(all)
	switch {
	case share >= 0.95:
		return TookVF, share
	case share <= 0.05:
		return TookParavirtual, share
	}
	return TookBoth, share
}

func (n NIC) String() string {
	text := fmt.Sprintf("%s (%s), %d receive and %d transmit queues", n.Driver, n.Type, n.RxQueues, n.TxQueues)
	if n.Firmware != "" {
		text += ", firmware " + n.Firmware
	}
	if n.VF != nil {
		text += "; " + n.VF.String()
	}
	return text
}
