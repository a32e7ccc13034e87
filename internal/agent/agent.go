// Package agent keeps accelerations on, on one node: what policies want is set on
// the node's devices and, for the class pod, on the pods' own interfaces, follows
// devices and pods that come and go, is verified now and then, and is put back
// when no policy wants it any more.
//
// The Agent itself knows policies, devices and network namespaces, and neither
// where policies come from nor who reads its status: file.go has them from a
// file, kubernetes.go from a cluster. What is written, journalled and read back is
// internal/accel's; whether an acceleration helps is for an experiment to say.
//
// An Agent that ends leaves settings as they are: the journal holds them for the owner
// "agent", and the next one adopts them. The fast path ends with the process, because it
// is safe only while a process invalidates flows; the next agent starts it again.
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
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel"
	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/process"
	"slipstream.dev/internal/target"
)

// owner holds the settings in the journal, whatever process it is.
const owner = "agent"

// Options of an agent.
type Options struct {
	// Node is what the node is called.
	Node string
	// JournalDir keeps what was changed; one for the whole machine.
	JournalDir string
	// Proc is the host's /proc if empty, NetnsDirs accel.NetnsDir.
	Proc      string
	NetnsDirs []string
	// Verify is how often everything is read back, where that is cheap; 30 s if 0.
	Verify time.Duration
	// Log gets what is done; nothing if nil.
	Log *slog.Logger
	// Publish is called with every status that differs from the last, Notify with
	// what a person should hear of, both from the agent's own goroutine: they do
	// not wait.
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

// accel returns the options of a session in a place of this node.
func (o Options) accel(place target.Place) accel.Options {
	return accel.Options{Place: place, Proc: o.Proc, JournalDir: o.JournalDir, Owner: owner, Persistent: true, Log: o.Log}
}

// Desired is what an agent is to make true.
type Desired struct {
	// Policies that select this node, the one that goes first where two want
	// different things first.
	Policies []Policy
	// Pods of this node that have addresses of their own. They matter to policies that
	// select pods; the others act on all, known or not.
	Pods []Pod
}

// Policy is one policy as its node sees it.
type Policy struct {
	Name       string
	Generation int64
	Accelerate []v1alpha1.Accelerator
	// Pods tells which pods get the class pod; nil is all. Two policies with the
	// same Selector select the same pods.
	Pods     func(labels map[string]string) bool
	Selector string
	// Invalid is what is wrong with the policy itself.
	Invalid error
	// Withheld says why it is not on here, though it selects this node; the zero value
	// is that it is.
	Withheld Withheld
}

// Withheld is why a node does not have a policy that selects it: its rollout has not
// come there, or the node gave it up. Reason is one of v1alpha1's.
type Withheld struct{ Reason, Message string }

// Pod is a pod with a network namespace of its own.
type Pod struct {
	// Name is NAMESPACE/NAME.
	Name      string
	Labels    map[string]string
	Addresses []netip.Addr
}

// Event is something that a person should hear of.
type Event struct {
	Warning bool
	// Reason is one of v1alpha1's, or "Repaired".
	Reason, Message string
}

// Agent keeps the accelerations of the node whose network namespace it is made in.
type Agent struct {
	options Options
	lock    *os.File
	host    *accel.Keeper
	finder  *accel.Finder
	watch   *watch
	metrics *metrics

	// mu guards what other goroutines see.
	mu      sync.Mutex
	desired *Desired
	status  Status
	beat    time.Time
	pause   time.Duration // to the next verification
	deaf    int           // times that devices were found no message had told of, since the last message
	changed chan struct{}

	// The rest is Run's alone.
	node
}

// New prepares an agent in the calling thread's network namespace, which is the
// node's, and changes nothing. Close it after use.
func New(o Options) (a *Agent, err error) {
	o = o.withDefaults()
	a = &Agent{options: o, changed: make(chan struct{}, 1), beat: time.Now(), pause: o.Verify, metrics: newMetrics()}
	defer func() {
		if err != nil {
			a.Close()
			a = nil
		}
	}()
	if a.lock, err = lockMachine(o.JournalDir); err != nil {
		return a, err
	}
	if a.host, err = accel.OpenKeeper(o.accel(target.Place{Name: o.Node, Kind: target.Node})); err != nil {
		return a, err
	}
	if a.finder, err = accel.NewFinder(o.Proc, o.NetnsDirs...); err != nil {
		return a, err
	}
	a.watch, err = newWatch()
	return a, err
}

// Close closes what New opened. Run must have returned. Settings stay; the fast path ends.
func (a *Agent) Close() {
	if a.watch != nil {
		a.watch.close()
	}
	if a.finder != nil {
		a.finder.Close()
	}
	if a.host != nil {
		_ = a.host.Close()
	}
	if a.lock != nil {
		_ = a.lock.Close()
	}
}

// lockMachine makes this the machine's only agent, until the file is closed or the
// process ends: two would take each other's settings for drift.
func lockMachine(journal string) (*os.File, error) {
	if err := os.MkdirAll(journal, 0o700); err != nil {
		return nil, fmt.Errorf("make journal: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(journal, "agent.lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the agent's lock: %w", err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = errors.New("another agent runs on this machine; stop it first (it may be a DaemonSet's, or a service of systemd)")
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", f.Name(), err), f.Close())
	}
	return f, nil
}

// Set tells the agent what is wanted. Before the first call it changes nothing.
func (a *Agent) Set(d Desired) {
	a.mu.Lock()
	a.desired = &d
	a.mu.Unlock()
	select {
	case a.changed <- struct{}{}:
	default: // it has not looked yet, and will find this one
	}
}

// sweepDelay gathers pods that have gone before their ledgers are dropped.
const sweepDelay = time.Second

// settled is how long after its start an agent has done all that is done once.
const settled = 5 * time.Second

// Run keeps what Set said until ctx is done, and leaves it as it is then. An error
// is one that a restart may mend.
func (a *Agent) Run(ctx context.Context) error {
	// What follows is small beside what the start of the program has touched.
	if err := process.ReleaseProgram(); err != nil {
		a.options.Log.Warn("give back memory", "error", err)
	}
	verify := time.NewTimer(min(a.rest(0), 2*settled))
	defer verify.Stop()
	var spent time.Duration // on the verification that is under way
	sweep := time.NewTimer(sweepDelay)
	sweep.Stop()
	defer sweep.Stop()
	began := time.Now()
	always := make(chan struct{})
	close(always)
	for {
		a.live()
		var full, sweeping, verifying bool
		var next chan struct{}
		if len(a.unverified) > 0 {
			next = always
		}
		select {
		case <-ctx.Done():
			return nil
		case <-next:
			verifying = true
		case <-a.changed:
			full = a.take()
		case <-a.host.FastpathChanges():
			a.publish()
			continue
		case <-verify.C:
			verify.Reset(a.rest(0))
			full, spent = true, 0
		case <-sweep.C:
			sweeping = true
		case u, ok := <-a.watch.changes:
			if !ok {
				a.metrics.overruns.Inc()
				a.options.Log.Warn("messages about devices were lost; everything is listed anew")
				if err := a.watch.again(); err != nil {
					return fmt.Errorf("follow the node's devices: %w", err)
				}
				full, a.relist = true, true
				break
			}
			full = a.note(u)
			for more := true; more; { // a burst is one batch
				select {
				case u, ok := <-a.watch.changes:
					more = ok
					full = ok && a.note(u) || full
				default:
					more = false
				}
			}
		}
		if !a.told() {
			continue
		}
		before := cpuTime()
		if verifying {
			a.verifyPods(ctx)
		} else if err := a.pass(ctx, full); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			a.metrics.errors.Inc()
			a.fail(err)
		}
		if a.deaf > 0 {
			if err := a.watch.again(); err != nil {
				return fmt.Errorf("follow the node's devices: %w", err)
			}
			a.relist = true
		}
		if full || sweeping {
			a.sweep(ctx)
		} else if a.departed {
			sweep.Reset(sweepDelay)
		}
		if full || verifying {
			spent += cpuTime() - before
		}
		a.publish()
		if (full || verifying) && len(a.unverified) == 0 && time.Since(began) > settled {
			verify.Reset(a.rest(spent))
			go func() { // it takes a while, and a pod may come
				if err := process.Shrink(); err != nil {
					a.options.Log.Warn("give back memory", "error", err)
				}
			}()
		}
	}
}

// A verification may take one part in restFor of a CPU: what is asked of an idle agent
// is to cost nothing that anybody would notice, on a node with thousands of devices
// too. restAtMost bounds what that stretches the time to the next one by.
const (
	restFor    = 400
	restAtMost = 10
)

// rest sets the time to the next verification after one that took so much CPU time,
// jittered: that many nodes should not all look at the same moment.
func (a *Agent) rest(spent time.Duration) time.Duration {
	most := restAtMost * a.options.Verify
	a.mu.Lock()
	defer a.mu.Unlock()
	a.pause = min(max(a.options.Verify, restFor*spent), most)
	return time.Duration(float64(a.pause) * (0.8 + 0.4*rand.Float64()))
}

// cpuTime is what this process has used.
func cpuTime() time.Duration {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &u) // it fails on a wrong address alone
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func (a *Agent) live() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.beat = time.Now()
}

// Healthy is nil while the agent does its work: an error says that it has not come
// round for long, or that the kernel's messages do not reach it. A policy that
// cannot be had, or a cluster that does not answer, is no reason to be restarted.
func (a *Agent) Healthy() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	limit := 3*a.pause + 30*time.Second
	if since := time.Since(a.beat); since > limit {
		return fmt.Errorf("the agent has not come round for %s; it should every %s", since.Round(time.Second), a.pause.Round(time.Second))
	}
	if a.deaf > 1 {
		return errors.New("devices have appeared that no message told of, again and again")
	}
	return nil
}

// Revert puts back everything that agents hold on this machine; no agent runs. It
// returns how many settings it wrote.
func (a *Agent) Revert(ctx context.Context) (restored int, err error) {
	restored, err = a.finder.Sweep(ctx, a.options.accel(target.Place{Name: a.options.Node}), func(id netns.Cookie) bool { return id == a.host.Cookie() })
	view, lookErr := a.host.Look()
	if lookErr != nil {
		return restored, errors.Join(err, lookErr)
	}
	kept, keepErr := a.host.Keep(ctx, view, nil)
	for _, r := range kept.Refused {
		err = errors.Join(err, r.Err)
	}
	if err = errors.Join(err, keepErr); err != nil {
		return restored + kept.Reverted, fmt.Errorf("put back what the agent has set: %w", err)
	}
	return restored + kept.Reverted, nil
}
