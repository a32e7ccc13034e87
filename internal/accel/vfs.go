package accel

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/nic"
	"slipstream.dev/internal/record"
)

// vfBusy is the minimum rate of packets, per second, at which a window shows whether they take the virtual function (VF) of a
// NIC. Broadcasts never take it, and a quiet NIC may receive little else.
const vfBusy = 100

// vfReasons lists the reasons of a NIC's state, from best to worst.
var vfReasons = []string{v1alpha1.ReasonVFUsed, v1alpha1.ReasonVFPresent, v1alpha1.ReasonVFIdle, v1alpha1.ReasonVFAbsent, v1alpha1.ReasonVFWithdrawn}

// vfs is the known state of the VFs of the node's NICs. The window of a snapshot begins at the previous one.
type vfs struct {
	at   time.Time
	nics nic.Snapshot
	of   map[string]vf // by NIC
}

// vf is the known state of the VF of one NIC.
type vf struct {
	reason, message string
	// device is the last VF that was up, or empty.
	device string
	// way is the path that packets took in the last window with enough of them since the VF came up: one of the values of
	// package record. It is empty if there was no such window.
	way string
}

// after returns the state after a snapshot, and which devices packets have used since the previous one.
func (w vfs) after(s nic.Snapshot, at time.Time) (vfs, []record.VFUse) {
	now := vfs{at, s, make(map[string]vf)}
	uses := nic.CountUse(w.nics, s)
	for name, n := range nic.Facts(s) {
		if n.VF == nil {
			continue
		}
		var use record.VFUse
		if i := slices.IndexFunc(uses, func(u record.VFUse) bool { return u.NIC == name }); i >= 0 {
			use = uses[i]
		}
		now.of[name] = w.of[name].next(name, *n.VF, use, at.Sub(w.at))
	}
	return now, uses
}

// next returns the new state of a NIC's VF, given its current condition and the packets in a window.
func (v vf) next(name string, is record.VF, use record.VFUse, window time.Duration) vf {
	switch {
	case is.Present():
		return v.used(name, is, use, window)
	case v.device != "":
		v.reason, v.message = v1alpha1.ReasonVFWithdrawn, fmt.Sprintf("%s has lost its virtual function %s: %s", name, v.device, is)
	default:
		v.reason, v.message = v1alpha1.ReasonVFAbsent, fmt.Sprintf("%s has no virtual function that packets can take: %s", name, is)
	}
	v.way = ""
	return v
}

// used is next for a VF that is present.
func (v vf) used(name string, is record.VF, use record.VFUse, window time.Duration) vf {
	v.device = is.Device
	packets, _ := use.Packets()
	if use.Up && use.Change == "" && float64(packets) >= vfBusy*window.Seconds() {
		v.way, _ = record.Took([]record.VFUse{use})
	}
	function := fmt.Sprintf("the virtual function %s of %s", is.Device, name)
	switch {
	case v.way == record.TookParavirtual:
		v.reason, v.message = v1alpha1.ReasonVFIdle, function+" is up, and packets do not take it"
	case v.way != "":
		v.reason, v.message = v1alpha1.ReasonVFUsed, fmt.Sprintf("packets of %s take %s (%s)", name, v.way, is.Device)
	case use.Unknown != "":
		v.reason, v.message = v1alpha1.ReasonVFPresent, function+" is up; whether packets take it is not known, as "+use.Unknown
	default:
		v.reason, v.message = v1alpha1.ReasonVFPresent, function+" is up; too few packets have come to tell whether they take it"
	}
	return v
}

// state returns the worst state of any NIC, or NoDevice if no NIC can have a VF.
func (w vfs) state() *State {
	s := &State{Condition: v1alpha1.ConditionVF, Status: StatusUnknown, Reason: v1alpha1.ReasonNoDevice}
	messages := []string{"no NIC of the node can have a virtual function"}
	for _, name := range slices.Sorted(maps.Keys(w.of)) {
		v := w.of[name]
		worse := slices.Index(vfReasons, v.reason) - slices.Index(vfReasons, s.Reason)
		if worse > 0 {
			s.Reason, messages = v.reason, nil
		}
		if worse >= 0 {
			messages = append(messages, v.message)
		}
	}
	s.Message = strings.Join(messages, "; ")
	s.Detail = s.Message
	switch s.Reason {
	case v1alpha1.ReasonVFUsed:
		s.Status = StatusTrue
	case v1alpha1.ReasonVFIdle, v1alpha1.ReasonVFAbsent, v1alpha1.ReasonVFWithdrawn:
		s.Status, s.Failed = StatusFalse, true
	}
	return s
}
