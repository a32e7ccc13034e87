package experiment

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// Limits beyond which a trial carries a warning.
const (
	retransmitShare = 0.001 // of the segments sent
	stealShare      = 0.01  // of the CPUs' time
	skewShare       = 0.01  // of the window
	idleShare       = 0.1   // of the packets of all NICs, for a virtual function to count as idle
	strays          = 10    // packets that a device may drop: multicast that an overlay has no place for
)

// warnings returns what somebody who reads the figures of a trial must know.
func warnings(c Cell, t *record.Trial) []record.Warning {
	var out []record.Warning
	warn := func(code, format string, args ...any) {
		out = append(out, record.Warnf(code, format, args...))
	}
	var retransmits, bytes uint64
	var skew float64
	for _, p := range t.PerPair {
		bytes += max(p.Client.Bytes, p.Server.Bytes) // for some tools only one end counts them
		for i, e := range []record.Endpoint{p.Client, p.Server} {
			retransmits += e.Retransmits
			// Only the client's window matters for round trips: its server notices the edge of the
			// window at the next message, or never.
			if e.Seconds > 0 && (i == 0 || c.Workload.Stream != nil) {
				skew = max(skew, math.Abs(e.Seconds-t.Window)/t.Window)
			}
			out = append(out, e.Warnings...)
		}
	}
	if share := record.RetransmitShare(retransmits, bytes); share > retransmitShare && retransmits > 10 {
		warn(record.WarnRetransmits, "TCP retransmitted %d segments, about %.2g%% of all it sent", retransmits, 100*share)
	}
	// A fixed number of requests or round trips has no planned end.
	if t := c.Workload.Traffic(); skew > skewShare && t.Tool == spec.ToolNative && !t.Counted() {
		warn(record.WarnSkew, "a client or server measured over a window that is %.1f%% longer or shorter than the planned one", 100*skew)
	}
	if len(t.Hosts) == 0 {
		warn(record.WarnNoCPUs, "the CPUs of the nodes were not sampled: that takes a privileged pod on each node, and there was none")
	}
	for _, h := range t.Hosts {
		var steal, dropped float64
		for _, cpu := range h.CPUs {
			steal += cpu.Steal
			dropped += float64(cpu.Dropped)
		}
		if share := steal / h.Seconds / float64(len(h.CPUs)); share > stealShare {
			warn(record.WarnSteal, "the hypervisor took %.1f%% of the CPUs' time", 100*share)
		}
		if dropped > 0 {
			warn(record.WarnDrops, "the backlog of CPUs dropped %.0f packets (net.core.netdev_max_backlog limits it)", dropped)
		}
		out = append(out, h.Warnings...)
	}
	for _, d := range t.Devices {
		if lost := d.RxDropped + d.TxDropped + d.RxErrors + d.TxErrors; lost > strays {
			warn(record.WarnDrops, "%s of %s dropped %d packets", d.Name, d.Place, lost)
		}
	}
	for _, s := range t.Settings {
		if s.Got != s.Want {
			warn(record.WarnReadback, "%s of %s reads %q and was set to %q", s.Path, s.Place, s.Got, s.Want)
		}
	}
	out = append(out, vfWarnings(t.VFs)...)
	for _, d := range t.DaemonSets {
		if d.Error != "" {
			warn(record.WarnNotObserved, "DaemonSet %s was not measured on %s: %s", d.Name, d.Node, d.Error)
		}
	}
	return append(out, slowPathWarnings(c, t.Fastpath)...)
}

// slowPathWarnings warns of connections that were not accelerated. Those of connect are too short for it, whatever is wrong.
func slowPathWarnings(c Cell, nodes []record.Fastpath) (out []record.Warning) {
	if c.Workload.Connect != nil {
		return nil
	}
	warn := func(format string, args ...any) {
		out = append(out, record.Warnf(record.WarnSlowPath, format, args...))
	}
	met := uint64(0)
	for _, f := range nodes {
		fast, all, most := fastpathShare(f)
		met += all
		if all > strays && fast < all/2 {
			warn("the fast path of %s forwarded %.0f%% of %d packets; most others took the slow path: %s (docs/explanation/fastpath.md)",
				f.Place, 100*float64(fast)/float64(all), all, most)
		}
	}
	if len(nodes) > 0 && met == 0 {
		warn("the fast path saw no packet: no connection was eligible (docs/explanation/fastpath.md)")
	}
	return out
}

// vfWarnings warns of virtual functions that did not carry packets all the time.
func vfWarnings(nics []record.VFUse) (out []record.Warning) {
	var all uint64
	for _, u := range nics {
		n, _ := u.Packets()
		all += n
	}
	for _, u := range nics {
		way, share := record.Took([]record.VFUse{u})
		took := fmt.Sprintf("%.3g%% of the packets took it", 100*share)
		if u.Unknown != "" {
			took = "how many packets took it is not known, as " + u.Unknown
		}
		// Broadcasts never take the VF, and a NIC without the trial's traffic may get nothing else.
		n, _ := u.Packets()
		busy := n > strays && float64(n) > idleShare*float64(all)
		switch {
		case u.Change != "":
			out = append(out, record.Warnf(record.WarnVFWithdrawn, "the virtual function %s of %s on %s was %s: %s", u.VF, u.NIC, u.Place, u.Change, took))
		case u.Up && busy && way == record.TookParavirtual:
			out = append(out, record.Warnf(record.WarnVFIdle, "the virtual function %s of %s on %s was up, but idle: %s", u.VF, u.NIC, u.Place, took))
		}
	}
	return out
}

// fastpathShare counts the packets that took the fast path, and all packets, and returns the reason
// why most others did not.
func fastpathShare(f record.Fastpath) (fast, all uint64, most string) {
	for why, n := range f.Packets {
		all += n
		switch _, _, took := record.SplitReason(why); {
		case took:
			fast += n
		case n > f.Packets[most] || n == f.Packets[most] && why < most:
			most = why
		}
	}
	return fast, all, most
}

// congestionWarnings warns of tools that ran with another congestion control than want. If want is empty, that
// is the machine's default.
func congestionWarnings(want string, pairs []record.Pair) (out []record.Warning) {
	for _, p := range pairs {
		for _, e := range []record.Endpoint{p.Client, p.Server} {
			if got := e.CongestionControl; want != "" && got != "" && got != want {
				out = append(out, record.Warnf(record.WarnCongestion,
					"the sockets of %s had the congestion control %s, the experiment has %s", e.Place, got, want))
			}
		}
	}
	return out
}

// changeWarnings warns if far fewer endpoints were replaced than the variant asks for. Some changes always wait for the
// next batch when the traffic ends: those that came while rules were loaded, or within kube-proxy's second after that.
func changeWarnings(perSecond, made int, seconds float64) []record.Warning {
	if float64(made) >= 0.5*seconds*float64(perSecond)-1 {
		return nil
	}
	return []record.Warning{record.Warnf(record.WarnChanges,
		"%.1f endpoints a second were replaced, in place of %d: this machine takes longer to load the rules", float64(made)/seconds, perSecond)}
}

// heldWarnings warns of accelerators that others keep applied.
func (n *network) heldWarnings() (all []record.Warning) {
	for _, f := range n.facts {
		for _, what := range f.Held {
			all = append(all, record.Warnf(record.WarnHeld,
				"%s is accelerated already (%s): every variant is measured with that, the baseline too (delete the policy, or run slipstream accel revert)", f.Name, what))
		}
	}
	return all
}

// noteChangedSettings warns of settings that somebody else changed during a trial: all further trials are measured with their values.
func (r *Run) noteChangedSettings(failed error) {
	changed, ok := errors.AsType[place.ChangedError](failed)
	if !ok {
		return
	}
	w := record.Warnf(record.WarnSettingChanged, "%v", changed)
	if !slices.Contains(r.lasting, w) {
		r.note(w.Message)
		r.lasting = append(r.lasting, w)
	}
}

// slowInterrupt is about the time of a packet's whole way through a kernel. An interrupt to another CPU that takes as long
// counts as slow.
const slowInterrupt = 5 * time.Microsecond

// interruptWarnings warns of the cost of steering on machines where it is high.
func (n *network) interruptWarnings() []record.Warning {
	var worst float64
	for _, f := range n.facts {
		worst = max(worst, f.InterruptSeconds)
	}
	if worst < slowInterrupt.Seconds() {
		return nil
	}
	return []record.Warning{record.Warnf(record.WarnInterrupts,
		"an interrupt to another CPU takes %.0f µs, round trip, and steering needs one for each batch of packets that it moves (bare metal: 1 to 3 µs)", worst*1e6)}
}

// movedWarnings warns of machines of a network that run on another physical host than in an earlier trial. Nodes of several clusters may
// have the same names.
func (r *Run) movedWarnings(fabric int, hosts []record.Host) (all []record.Warning) {
	cluster := r.plan.topology.Fabrics()[fabric].Cluster
	for _, h := range hosts {
		for _, t := range slices.Backward(r.done) {
			if v, err := r.plan.exp.VariantOf(t.Variant); err != nil || v.Cluster != cluster {
				continue
			}
			// The boot id changes if a switch restarts the machine.
			i := slices.IndexFunc(t.Hosts, func(was record.Host) bool {
				return slices.Equal(was.Nodes, h.Nodes) && was.PhysicalHost != ""
			})
			if i < 0 {
				continue
			}
			// The daemon that reports the name starts some time after the machine.
			if was := t.Hosts[i].PhysicalHost; h.PhysicalHost != "" && was != h.PhysicalHost {
				all = append(all, record.Warnf(record.WarnMoved, "%s moved from the physical host %q to %q",
					strings.Join(h.Nodes, " and "), was, h.PhysicalHost))
			}
			break
		}
	}
	return all
}
