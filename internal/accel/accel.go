// Package accel applies accelerators to the place it runs in, and takes them
// back: rps, rfs and fastpath. It finds the devices, works out what each receive
// queue should read, writes that to a journal and then to the kernel, reads it
// back, and follows devices that appear later. Whatever ends the process, the
// journal says what stood there before, and Recover puts it back.
//
// It measures nothing and judges nothing; whether an accelerator helps is for
// internal/experiment to find out. internal/worker runs it where an experiment's
// places are, internal/cli on the machine itself.
//
// A session belongs to the network namespace of the thread that opens it, and
// can be used from any thread afterwards.
package accel

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel/fastpath"
	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/target"
)

// Options of a session, of Recover and of Status.
type Options struct {
	// Place is where the session runs. Its kind tells which classes the devices
	// are of; its CPUs and IRQCPUs, where set, are the node's.
	Place target.Place
	// Sys and Proc are roots. Sys is mounted privately if empty, so that it shows
	// this network namespace; Proc is /proc if empty.
	Sys, Proc string
	// JournalDir keeps what was changed; one for the whole machine.
	JournalDir string
	// Owner says in the journal who holds the settings.
	Owner string
	// Persistent settings are held by the owner until a session of the same owner
	// reverts them; others end, for Recover, with the process.
	Persistent bool
	// Log gets what happens to devices that appear later; nothing if nil.
	Log *slog.Logger
}

func (o Options) withDefaults() Options {
	if o.Proc == "" {
		o.Proc = "/proc"
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o
}

// Session applies accelerators in one place. Apply, Revert and Close are called
// in turn, Settings at any time.
type Session struct {
	options Options
	holder  Holder
	journal *journal
	id      netns.ID
	ns      netns.Handle
	links   *netlink.Handle
	names   nameSocket
	sys     heldSysfs

	// mu guards what the follower shares.
	mu       sync.Mutex
	plan     *plan
	irq      Set
	settings []record.Setting
	// followed are the devices that the plan is applied to, by index.
	followed map[int]string
	follower *follower
	fast     fast
}

// Open prepares a session in the calling thread's network namespace and changes
// nothing. Close it after use.
func Open(o Options) (s *Session, err error) {
	o = o.withDefaults()
	s = &Session{options: o, ns: netns.None, names: -1}
	defer func() {
		if err != nil {
			err = errors.Join(Forbidden(fmt.Errorf("open accelerators of %s: %w", o.Place.Name, err)), s.Close())
			s = nil
		}
	}()
	if o.JournalDir == "" || o.Owner == "" {
		return s, errors.New("a journal folder and an owner are needed")
	}
	if s.holder, err = newHolder(o); err != nil {
		return s, err
	}
	if s.journal, err = openJournal(o.JournalDir, o.Proc); err != nil {
		return s, err
	}
	if s.id, err = netns.CurrentID(); err != nil {
		return s, err
	}
	if s.ns, err = netns.Current(); err != nil {
		return s, err
	}
	if s.links, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return s, fmt.Errorf("open netlink: %w", err)
	}
	if s.names, err = openNames(); err != nil {
		return s, err
	}
	var root *os.Root
	if o.Sys == "" {
		root, err = netns.Sysfs()
	} else {
		root, err = os.OpenRoot(o.Sys)
	}
	if err != nil {
		return s, err
	}
	s.sys, err = holdSysfs(root)
	return s, err
}

func newHolder(o Options) (Holder, error) {
	if o.Persistent {
		return Holder{Owner: o.Owner}, nil
	}
	pid := os.Getpid()
	stat, err := readStat(o.Proc, pid)
	if err == nil && stat.start == 0 {
		err = errors.New("it does not show this process")
	}
	if err != nil {
		return Holder{}, fmt.Errorf("read this process's start time from %s: %w", o.Proc, err)
	}
	return Holder{Owner: o.Owner, PID: pid, Start: stat.start}, nil
}

// Close stops following devices and lets go of what Open opened. It reverts
// nothing: that is Revert's, or Recover's once the process has ended.
func (s *Session) Close() error {
	s.stopFollowing()
	errs := []error{s.stopFastpath()}
	if s.links != nil {
		s.links.Close()
	}
	if s.sys.Root != nil {
		errs = append(errs, s.sys.Close())
	}
	if s.names >= 0 {
		errs = append(errs, s.names.close())
	}
	if s.ns.IsOpen() {
		errs = append(errs, s.ns.Close())
	}
	return errors.Join(errs...)
}

// Plan returns what Apply would set now, and touches nothing: Was and Got are
// both what stands there.
func (s *Session) Plan(_ context.Context, accelerators []v1alpha1.Accelerator) ([]record.Setting, error) {
	devices, err := listDevices(s.links, s.sys, s.pod())
	if err != nil {
		return nil, err
	}
	p, err := s.newPlan(accelerators, devices)
	if err != nil {
		return nil, err
	}
	machine, queues, err := p.changes(sysctls{s.options.Proc}, s.sys, devices)
	if err != nil {
		return nil, err
	}
	var settings []record.Setting
	for _, c := range slices.Concat(machine, queues) {
		settings = append(settings, record.Setting{Place: s.options.Place.Name, Path: c.path, Want: c.want, Got: c.was, Was: c.was})
	}
	if p.fastpath != nil {
		hooks, err := fastpath.Plan(s.ns, p.fastpath.UnseenBy...)
		if err != nil {
			return nil, err
		}
		for _, h := range hooks {
			settings = append(settings, s.hookSetting(h, ""))
		}
	}
	return settings, nil
}

// Apply sets the accelerators on every device of their classes, returns what
// read back, and keeps devices that appear later in step until Revert or Close.
// A setting whose Got is not its Want did not read back: the kernel took the
// write and made something else of it, which is not an error.
//
// Either all is applied or nothing is. A value that somebody else holds
// otherwise is ErrHeld. What dead processes left here is recovered first.
func (s *Session) Apply(ctx context.Context, accelerators []v1alpha1.Accelerator) ([]record.Setting, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if s.plan != nil {
		return nil, fmt.Errorf("apply accelerators to %s: some are applied; revert them first", s.options.Place.Name)
	}
	var settings []record.Setting
	err := s.checkLifetime(accelerators)
	if err == nil {
		settings, err = s.apply(ctx, accelerators)
	}
	if err != nil {
		return nil, Forbidden(fmt.Errorf("apply accelerators to %s: %w", s.options.Place.Name, err))
	}
	return settings, nil
}

func (s *Session) apply(ctx context.Context, accelerators []v1alpha1.Accelerator) ([]record.Setting, error) {
	// Subscribed before the devices are listed, so that none is missed between.
	updates, err := subscribe(s.ns)
	if err != nil {
		return nil, err
	}
	var p *plan
	var devices []Device
	var settings []record.Setting
	err = s.transact(ctx, func(machine, place *book) error {
		// Within, as what dead processes had set is restored by now.
		if devices, err = listDevices(s.links, s.sys, s.pod()); err != nil {
			return err
		}
		if p, err = s.newPlan(accelerators, devices); err != nil {
			return err
		}
		table, queues, err := p.changes(machine.store, place.store, devices)
		if err != nil {
			return err
		}
		settings, err = s.set(machine, place, table, queues)
		return err
	})
	if err != nil {
		updates.close()
		return nil, err
	}
	if p.fastpath != nil {
		if err := s.startFastpath(p.fastpath); err != nil {
			updates.close()
			_, undone := s.release(context.WithoutCancel(ctx))
			return nil, errors.Join(err, undone)
		}
	}
	s.plan, s.settings, s.followed = p, settings, p.names(devices)
	maps.DeleteFunc(s.followed, func(_ int, name string) bool { return !hasDevice(settings, name) })
	s.follower = s.follow(updates)
	return s.all(), nil
}

// transact runs fn on the ledgers of the machine and of this place, alone on
// the machine, after releasing what dead processes held.
func (s *Session) transact(ctx context.Context, fn func(machine, place *book) error) error {
	unlock, err := s.journal.lock()
	if err != nil {
		return err
	}
	defer unlock()
	machine, err := s.journal.machine()
	if err != nil {
		return err
	}
	place, err := s.journal.namespace(s.id, s.options.Place.Name, s.sys, s.names)
	if err != nil {
		return err
	}
	for _, b := range []*book{place, machine} {
		if err := s.recoverDead(ctx, b); err != nil {
			return err
		}
	}
	return fn(machine, place)
}

// recoverDead releases what dead processes held of a ledger.
func (s *Session) recoverDead(ctx context.Context, b *book) error {
	_, err := b.releaseDead()
	if errors.Is(err, ErrChanged) {
		s.options.Log.WarnContext(ctx, "recover settings of a run that died", "error", err)
		return nil
	}
	return err
}

// set holds the changes, journals that, and makes them: the machine's table
// before the queues that index it. If any fails, those of this call are undone.
func (s *Session) set(machine, place *book, table, queues []change) (settings []record.Setting, err error) {
	type step struct {
		*book
		changes []change
		added   map[string]bool
	}
	steps := []*step{{book: machine, changes: table}, {book: place, changes: queues}}
	for _, st := range steps {
		if st.added, err = st.hold(s.holder, st.changes); err != nil {
			return nil, err
		}
	}
	undo := func(err error) error {
		for _, st := range slices.Backward(steps) {
			_, undone := st.release(func(e entry, h Holder) bool { return h == s.holder && st.added[e.Path] })
			err = errors.Join(err, undone)
		}
		return err
	}
	for _, st := range steps {
		if err := st.save(); err != nil {
			return nil, undo(err)
		}
	}
	for _, st := range steps {
		done, err := st.put(st.changes)
		if err == nil {
			err = st.save()
		}
		if err != nil {
			return nil, undo(err)
		}
		settings = append(settings, done...)
	}
	for i := range settings {
		settings[i].Place = s.options.Place.Name
	}
	return settings, nil
}

// Settings returns what is applied now, on devices that came later too.
func (s *Session) Settings() []record.Setting {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.all()
}

// all that is applied now.
func (s *Session) all() []record.Setting {
	settings := slices.Clone(s.settings)
	if s.fast.path != nil {
		for _, h := range s.fast.path.Hooks() {
			settings = append(settings, s.hookSetting(h, attached))
		}
	}
	return settings
}

// Revert lets go of everything that this session's holder has here, by this
// session or an earlier one, and restores, the newest first, what nobody else
// holds. It returns how many settings it wrote back. Those that somebody else
// changed meanwhile stay as they are and make the error an ErrChanged; what
// could not be restored stays in the journal.
//
// It runs to its end whether or not ctx is cancelled: a machine that is half
// reverted is nobody's wish.
func (s *Session) Revert(ctx context.Context) (restored int, err error) {
	s.stopFollowing()
	s.mu.Lock()
	defer s.mu.Unlock()
	stopped := s.stopFastpath()
	restored, err = s.release(ctx)
	s.plan, s.settings, s.followed = nil, nil, nil
	if err := errors.Join(stopped, err); err != nil {
		return restored, fmt.Errorf("revert accelerators of %s: %w", s.options.Place.Name, err)
	}
	return restored, nil
}

// release lets go of all that the holder has here.
func (s *Session) release(ctx context.Context) (restored int, err error) {
	err = s.transact(ctx, func(machine, place *book) error {
		var errs []error
		for _, b := range []*book{place, machine} {
			settings, err := b.release(func(_ entry, h Holder) bool { return h == s.holder })
			restored += len(settings)
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	})
	return restored, err
}

func (s *Session) pod() bool { return s.options.Place.Kind == target.Pod }

// newPlan resolves accelerators for the devices of this place.
func (s *Session) newPlan(accelerators []v1alpha1.Accelerator, devices []Device) (*plan, error) {
	resolve, err := s.resolver(devices)
	if err != nil {
		return nil, err
	}
	return makePlan(accelerators, resolve)
}

// resolver tells which CPUs of this place an accelerator means.
func (s *Session) resolver(devices []Device) (func(spec string) (Set, error), error) {
	cpus, err := machineCPUs(s.sys.Root)
	if err != nil {
		return nil, err
	}
	node, err := ParseList(s.options.Place.CPUs)
	if err != nil {
		return nil, err
	}
	irq, err := ParseList(s.options.Place.IRQCPUs)
	if err != nil {
		return nil, err
	}
	if irq.Empty() {
		for _, d := range devices {
			if d.Class != v1alpha1.DeviceNIC {
				continue
			}
			cpus, err := irqCPUs(s.sys.Root, s.options.Proc, d.Name)
			if err != nil {
				return nil, err
			}
			irq = irq.Union(cpus)
		}
	}
	s.irq = irq
	return func(spec string) (Set, error) { return Resolve(spec, cpus, node, irq) }, nil
}
