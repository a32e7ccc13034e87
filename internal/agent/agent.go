// Package agent applies policies on one node and keeps them applied. It configures accelerators on the node's devices and, for
// the class pod, on the pods' own interfaces; follows devices and pods as they come and go; verifies settings periodically; and
// restores settings that no policy wants any more.
//
// An Agent knows policies, devices and network namespaces. It does not know where policies come from or who reads its status:
// file.go reads policies from a file, internal/agent/kube from a cluster. internal/accel journals, writes and reads back
// settings.
//
// Settings outlive an Agent: the journal records them for the owner "agent", and the next Agent adopts them. The fast path ends
// with the process, because it is safe only while a process invalidates flows; the next Agent starts it again.
package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel"
	"slipstream.dev/internal/ethtool"
	"slipstream.dev/internal/flock"
	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/nic"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/process"
)

// owner is the owner of settings in the journal, the same for all agent processes.
const owner = "agent"

// Options configures an agent.
type Options struct {
	// Node is the node's name.
	Node string
	// JournalDir is the folder of the journal, one for the whole machine.
	JournalDir string
	// Proc is the root of the host's procfs, /proc if empty. NetnsDirs are the folders with pinned network namespaces;
	// accel.NetnsDir if empty.
	Proc      string
	NetnsDirs []string
	// Kinds maps the fields of the API to kinds of accelerators; accel.Kinds() if nil.
	Kinds map[string]accel.Kind
	// NICs reads the NICs of the node; if nil, those of the network namespace in which New is called.
	NICs func() nic.Snapshot
	// Verify is the minimum interval between verifications; 30 s if 0.
	Verify time.Duration
	// Log may be nil.
	Log *slog.Logger
	// Publish is called for every changed status, Notify for every event. The agent's goroutine calls them, so they must not
	// block.
	Publish func(Status)
	Notify  func(Event)
}

func (o Options) withDefaults() Options {
	if o.Proc == "" {
		o.Proc = "/proc"
	}
	if o.NetnsDirs == nil {
		o.NetnsDirs = []string{accel.NetnsDir}
	}
	if o.Kinds == nil {
		o.Kinds = accel.Kinds()
	}
	if o.Verify == 0 {
		o.Verify = 30 * time.Second
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Publish == nil {
		o.Publish = func(Status) {}
	}
	if o.Notify == nil {
		o.Notify = func(Event) {}
	}
	return o
}

// accel returns the options with which settings of a place on this node are changed.
func (o Options) accel(place place.Place) accel.Options {
	return accel.Options{Place: place, Proc: o.Proc, JournalDir: o.JournalDir, Owner: owner, Persistent: true, Kinds: o.Kinds, Log: o.Log}
}

// Desired is the state that an agent establishes.
type Desired struct {
	// Policies are those that select this node, in the order of precedence.
	Policies []Policy
	// Pods are the pods of this node with addresses of their own. Only policies that select pods need them; others act on all
	// pods.
	Pods []Pod
}

// Policy is a policy that selects this node.
type Policy struct {
	Name string
	// UID differs between two policies of one name, of which the first was deleted. It is empty for a policy from a file.
	UID        string
	Generation int64
	Accelerate []v1alpha1.PolicyAccelerator
	// Pods reports which pods the class pod includes; nil for all. Two policies with the same Selector
	// select the same pods.
	Pods     func(labels map[string]string) bool
	Selector string
	// Invalid says why the policy is invalid; nil if it is valid. LaterInvalid says why a later version of it is invalid, so that
	// this one stays; empty if that is not so.
	Invalid      error
	LaterInvalid string
	// Withheld says why the policy is not applied here, although it selects this node. It is zero if the
	// policy is applied.
	Withheld Withheld
	// Halted means that the policy's rollout halted. Kernels are the kernels on which its proof was measured, as in
	// v1alpha1.AnnotationKernel; empty without a proof. Both are for metrics only.
	Halted  bool
	Kernels string
}

// Withheld says why a policy is not applied to a node that it selects: its rollout has not reached the node, or was rolled back
// there. Reason is one of v1alpha1's.
type Withheld struct{ Reason, Message string }

// Pod is a pod with its own network namespace.
type Pod struct {
	// Name is NAMESPACE/NAME.
	Name      string
	Labels    map[string]string
	Addresses []netip.Addr
}

// Event is something that a user should know.
type Event = accel.Event

// Agent keeps accelerators applied on the node in whose network namespace it was created.
type Agent struct {
	options  Options
	lock     *os.File
	host     *accel.Keeper
	shrinker process.Shrinker
	finder   *accel.Finder
	watch    *watch
	ethtool  *ethtool.Tool
	metrics  *metrics
	kernel   string // the release of the running kernel; empty if it cannot be read

	// mu guards the fields that other goroutines use.
	mu      sync.Mutex
	desired *Desired
	status  Status
	beat    time.Time
	pause   time.Duration // to the next verification
	// silentPasses counts the passes since the last notification that found devices without one.
	silentPasses int
	changed      chan struct{}

	// Only Run uses the embedded node.
	node
}

// New prepares an agent in the calling thread's network namespace, which is the
// node's, and changes nothing. Close it after use.
func New(o Options) (a *Agent, err error) {
	o = o.withDefaults()
	a = &Agent{options: o, changed: make(chan struct{}, 1), beat: time.Now(), pause: o.Verify, metrics: newMetrics(o.Kinds)}
	defer func() {
		if err != nil {
			a.Close()
			a = nil
		}
	}()
	release, _ := os.ReadFile(filepath.Join(o.Proc, "sys/kernel/osrelease")) // without it, a metric is missing
	a.kernel = strings.TrimSpace(string(release))
	if a.lock, err = lockMachine(o.JournalDir); err != nil {
		return a, err
	}
	node := o.accel(place.Place{Name: o.Node, Kind: place.Node})
	node.NICs, node.Verify, node.Notify = func() nic.Snapshot { return a.options.NICs() }, o.Verify, a.notify
	if a.host, err = accel.OpenKeeper(node); err != nil {
		return a, err
	}
	if a.finder, err = accel.NewFinder(o.Proc, o.NetnsDirs...); err != nil {
		return a, err
	}
	if a.options.NICs == nil {
		if a.ethtool, err = ethtool.Open(); err != nil {
			return a, err
		}
		a.options.NICs = nic.Source{Sys: a.host.Sysfs(), Tool: a.ethtool}.Read
	}
	a.watch, err = newWatch()
	return a, err
}

// Close releases the resources of New. Run must have returned. Settings stay; the fast path ends.
func (a *Agent) Close() {
	if a.watch != nil {
		a.watch.close()
	}
	if a.ethtool != nil {
		a.ethtool.Close()
	}
	if a.finder != nil {
		a.finder.Close()
	}
	if a.host != nil {
		_ = a.host.Close()
	}
	if a.lock != nil {
		_ = flock.Release(a.lock)
	}
}

// lockMachine makes this the machine's only agent until the lock is released or the process ends. Two agents would undo each
// other's changes.
func lockMachine(journal string) (*os.File, error) {
	if err := os.MkdirAll(journal, 0o700); err != nil {
		return nil, fmt.Errorf("make journal: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(journal, "agent.lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the agent's lock: %w", err)
	}
	err = flock.TryLock(f)
	if errors.Is(err, flock.ErrLocked) {
		err = errors.New("another agent is running on this machine: stop it first (it may belong to a DaemonSet or a systemd service)")
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", f.Name(), err), f.Close())
	}
	return f, nil
}

// Set passes the desired state. Before the first call, the agent changes nothing.
func (a *Agent) Set(d Desired) {
	a.mu.Lock()
	a.desired = &d
	a.mu.Unlock()
	select {
	case a.changed <- struct{}{}:
	default: // Run has not handled the previous Set yet, and will read this state instead
	}
}

// sweepDelay is how long the agent waits after a pod has gone, so that one sweep releases the settings of all pods of a burst.
const sweepDelay = time.Second

// firstVerify limits the time to the first verification, because an earlier agent may have left other settings.
const firstVerify = 10 * time.Second

// shrinkEvery is the interval at which an agent returns unused memory. After a burst of pods or of requests to the API server,
// it has three times as much memory as it needs.
const shrinkEvery = 10 * time.Second

// Run establishes the desired state until ctx is done, and then leaves the settings in place. It returns only errors that a
// restart may solve.
func (a *Agent) Run(ctx context.Context) error {
	shrink := time.NewTicker(shrinkEvery)
	defer shrink.Stop()
	verify := time.NewTimer(min(a.rest(0), firstVerify))
	defer verify.Stop()
	var left time.Duration // remaining CPU time of the current part of a verification; 0 between parts
	sweep := time.NewTimer(sweepDelay)
	sweep.Stop()
	defer sweep.Stop()
	always := make(chan struct{})
	close(always)
	for {
		a.heartbeat()
		var full, sweeping, verifying bool
		var next chan struct{}
		if left > 0 && len(a.unverified) > 0 {
			next = always
		}
		select {
		case <-ctx.Done():
			return nil
		case <-shrink.C:
			go a.shrink() // in the background, because it may take a while and a new pod must not wait for it
			continue
		case <-next:
			verifying = true
		case <-a.changed:
			full = a.take()
		case <-a.host.Changes():
			a.publish()
			continue
		case <-verify.C:
			verify.Reset(a.rest(0))
			left = partAtMost
			full = len(a.unverified) == 0
			verifying = !full
		case <-sweep.C:
			sweeping = true
		case u, ok := <-a.watch.changes:
			var err error
			if full, err = a.drain(u, ok); err != nil {
				return err
			}
		}
		if !a.configured() {
			continue
		}
		before := cpuTime()
		failed := false
		if verifying {
			a.verifyPart(ctx, left)
		} else if err := a.pass(ctx, full); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			failed = true
			a.metrics.errors.Inc()
			a.fail(err)
		}
		if a.silentPasses > 0 {
			if err := a.watch.resubscribe(); err != nil {
				return fmt.Errorf("follow the node's devices: %w", err)
			}
			a.relist = true
		}
		switch {
		case failed || !a.adopted: // the settings of pods that the agent has not entered yet would count as unwanted
		case full || sweeping:
			a.sweep(ctx)
		case a.departed:
			sweep.Reset(sweepDelay)
		}
		during := left > 0
		if during && (full || verifying) {
			left -= cpuTime() - before
		}
		a.publish()
		if during && (len(a.unverified) == 0 || left <= 0) {
			verify.Reset(a.rest(partAtMost - left))
			left = 0
		}
	}
}

// drain records a notification and all that are queued behind it, so that a burst needs only one pass. ok is false if
// notifications were lost. It reports whether a full pass is needed.
func (a *Agent) drain(u netlink.LinkUpdate, ok bool) (full bool, err error) {
	if !ok {
		a.metrics.overruns.Inc()
		a.options.Log.Warn("netlink notifications were lost; all devices are listed again")
		if err := a.watch.resubscribe(); err != nil {
			return false, fmt.Errorf("follow the node's devices: %w", err)
		}
		a.relist = true
		return true, nil
	}
	full = a.note(u)
	for {
		select {
		case u, ok := <-a.watch.changes:
			if !ok { // the next call handles the loss
				return full, nil
			}
			full = a.note(u) || full
		default:
			return full, nil
		}
	}
}

func (a *Agent) shrink() {
	if err := a.shrinker.Shrink(); err != nil {
		a.options.Log.Warn("release memory", "error", err)
	}
}

// Verifications may use 1/restFor of a CPU, so that an idle agent is cheap even on a node with thousands of devices. A
// verification that needs more CPU time than partAtMost is split into parts, so that no minute costs much more than another.
// restAtMost limits the interval between two verifications, as a multiple of Options.Verify.
const (
	restFor    = 1000
	partAtMost = 30 * time.Millisecond
	restAtMost = 10
)

// rest returns the time to the next part of a verification, given the CPU time of the last one. It adds jitter, so that nodes
// do not verify in step.
func (a *Agent) rest(spent time.Duration) time.Duration {
	most := restAtMost * a.options.Verify
	a.mu.Lock()
	defer a.mu.Unlock()
	a.pause = min(max(a.options.Verify, restFor*spent), most)
	return time.Duration(float64(a.pause) * (0.8 + 0.4*rand.Float64()))
}

// cpuTime returns the CPU time that this process has used.
func cpuTime() time.Duration {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &u) // it fails only for an invalid address
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func (a *Agent) heartbeat() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.beat = time.Now()
}

// Healthy returns an error if a restart may help: the agent has not checked the node for a long time, or receives no netlink
// notifications. Neither a policy that cannot be applied nor an unreachable API server makes it unhealthy.
func (a *Agent) Healthy() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	limit := 3*a.pause + 30*time.Second
	if since := time.Since(a.beat); since > limit {
		return fmt.Errorf("the agent's last check was %s ago; it should check every %s", since.Round(time.Second), a.pause.Round(time.Second))
	}
	if a.silentPasses > 1 {
		return errors.New("devices keep appearing without a netlink notification")
	}
	return nil
}

// Revert restores all settings that agents have changed on this machine, and returns how many it wrote. No agent may be
// running.
func (a *Agent) Revert(ctx context.Context) (restored int, err error) {
	restored, err = a.finder.Sweep(ctx, a.options.accel(place.Place{Name: a.options.Node}), func(id netns.Cookie) bool { return id == a.host.Cookie() })
	view, viewErr := a.host.View()
	if viewErr != nil {
		return restored, errors.Join(err, viewErr)
	}
	kept, keepErr := a.host.Keep(ctx, view, nil)
	for _, r := range kept.Refused {
		err = errors.Join(err, r.Err)
	}
	if err = errors.Join(err, keepErr); err != nil {
		return restored + kept.Reverted, fmt.Errorf("restore settings: %w", err)
	}
	return restored + kept.Reverted, nil
}
