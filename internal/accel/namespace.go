package accel

import (
	"context"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel/cpuset"
	"slipstream.dev/internal/accel/journal"
	"slipstream.dev/internal/accel/kernel"
	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/place"
)

// namespace is the network namespace in which accelerators are applied. Applier and Keeper share it.
type namespace struct {
	options Options
	holder  journal.Holder
	journal *journal.Journal
	id      netns.ID
	ns      netns.Handle
	netlink *netlink.Handle
	links   kernel.Links
	sys     kernel.Sysfs
	// runners has one entry for each kind that runs in the process. changes receives a value when
	// the state of one changes.
	runners []running
	changes chan struct{}
}

// openNamespace prepares the calling thread's network namespace and changes nothing.
func openNamespace(o Options) (p *namespace, err error) {
	o = o.withDefaults()
	p = &namespace{options: o, ns: netns.None, links: -1}
	defer func() {
		if err != nil {
			err = errors.Join(Forbidden(fmt.Errorf("open accelerators of %s: %w", o.Place.Name, err)), p.close())
			p = nil
		}
	}()
	if o.JournalDir == "" || o.Owner == "" {
		return p, errors.New("a journal folder and an owner are needed")
	}
	p.holder = journal.Holder{Owner: o.Owner}
	if !o.Persistent {
		if p.holder, err = journal.Process(o.Proc, o.Owner); err != nil {
			return p, err
		}
	}
	if p.journal, err = journal.Open(o.JournalDir, o.Proc); err != nil {
		return p, err
	}
	if p.id, err = netns.CurrentID(); err != nil {
		return p, err
	}
	if p.ns, err = netns.Current(); err != nil {
		return p, err
	}
	if p.netlink, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return p, fmt.Errorf("open netlink: %w", err)
	}
	if p.links, err = kernel.OpenLinks(); err != nil {
		return p, err
	}
	if p.sys, err = kernel.OpenSysfs(o.Sys); err == nil {
		p.openRunners()
	}
	return p, err
}

// close stops the runners and releases the resources of openNamespace.
func (p *namespace) close() error {
	errs := []error{p.stopRunners()}
	if p.netlink != nil {
		p.netlink.Close()
	}
	if p.sys.Root != nil {
		errs = append(errs, p.sys.Close())
	}
	if p.links >= 0 {
		errs = append(errs, p.links.Close())
	}
	if p.ns.IsOpen() {
		errs = append(errs, p.ns.Close())
	}
	return errors.Join(errs...)
}

func (p *namespace) pod() bool { return p.options.Place.Kind == place.Pod }

// devices lists the present devices of this place.
func (p *namespace) devices() ([]Device, error) { return listDevices(p.netlink, p.sys, p.pod()) }

// resolver returns a function that resolves an accelerator's CPUs for this place, and the CPUs that
// take the NIC's interrupts.
func (p *namespace) resolver(devices []Device) (resolve func(spec string) (cpuset.Set, error), irq cpuset.Set, err error) {
	cpus, err := cpuset.Machine(p.sys.Root)
	if err != nil {
		return nil, irq, err
	}
	node, err := cpuset.ParseList(p.options.Place.CPUs)
	if err != nil {
		return nil, irq, err
	}
	if irq, err = cpuset.ParseList(p.options.Place.IRQCPUs); err != nil {
		return nil, irq, err
	}
	if irq.Empty() {
		for _, d := range devices {
			if d.Class != v1alpha1.DeviceNIC {
				continue
			}
			cpus, err := IRQCPUs(p.sys.Root, p.options.Proc, d.Name)
			if err != nil {
				return nil, irq, err
			}
			irq = irq.Union(cpus)
		}
	}
	return func(spec string) (cpuset.Set, error) { return cpuset.Resolve(spec, cpus, node, irq) }, irq, nil
}

// plan resolves accelerators for the devices of this place.
func (p *namespace) plan(accelerators []v1alpha1.PolicyAccelerator, devices []Device) (*Plan, error) {
	resolve, _, err := p.resolver(devices)
	if err != nil {
		return nil, err
	}
	return makePlan(p.options.Kinds, accelerators, resolve)
}

// transact runs fn on the books of the machine and of this place, alone on the machine, after
// releasing what dead processes held. The machine's book is nil unless withMachine is set.
func (p *namespace) transact(ctx context.Context, withMachine bool, fn func(machine, place *journal.Book) error) error {
	unlock, err := p.journal.Lock()
	if err != nil {
		return err
	}
	defer unlock()
	place, err := p.journal.Namespace(p.id, p.options.Place.Name, p.sys, p.links)
	if err != nil {
		return err
	}
	books := []*journal.Book{place}
	var machine *journal.Book
	if withMachine {
		if machine, err = p.journal.Machine(); err != nil {
			return err
		}
		books = append(books, machine)
	}
	for _, b := range books {
		_, err := b.ReleaseDead()
		if journal.OnlyChanged(err) {
			p.options.Log.WarnContext(ctx, "recover settings of a run that died", "error", err)
		} else if err != nil {
			return err
		}
	}
	return fn(machine, place)
}
