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
	// runners holds the Runner of each kind that has one. changes receives a value when the state of one changes.
	runners []running
	changes chan struct{}
}

// openNamespace prepares the calling thread's network namespace and changes nothing.
func openNamespace(o Options) (n *namespace, err error) {
	o = o.withDefaults()
	n = &namespace{options: o, ns: netns.None, links: -1}
	defer func() {
		if err != nil {
			err = errors.Join(Forbidden(fmt.Errorf("open accelerators of %s: %w", o.Place.Name, err)), n.close())
			n = nil
		}
	}()
	if o.JournalDir == "" || o.Owner == "" {
		return n, errors.New("a journal folder and an owner are needed")
	}
	n.holder = journal.Holder{Owner: o.Owner}
	if !o.Persistent {
		if n.holder, err = journal.Process(o.Proc, o.Owner); err != nil {
			return n, err
		}
	}
	if n.journal, err = journal.Open(o.JournalDir, o.Proc); err != nil {
		return n, err
	}
	if n.id, err = netns.CurrentID(); err != nil {
		return n, err
	}
	if n.ns, err = netns.Current(); err != nil {
		return n, err
	}
	if n.netlink, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return n, fmt.Errorf("open netlink: %w", err)
	}
	if n.links, err = kernel.OpenLinks(); err != nil {
		return n, err
	}
	if n.sys, err = kernel.OpenSysfs(o.Sys); err == nil {
		n.openRunners()
	}
	return n, err
}

// close stops the runners and releases the resources of openNamespace.
func (n *namespace) close() error {
	errs := []error{n.stopRunners()}
	if n.netlink != nil {
		n.netlink.Close()
	}
	if n.sys.Root != nil {
		errs = append(errs, n.sys.Close())
	}
	if n.links >= 0 {
		errs = append(errs, n.links.Close())
	}
	if n.ns.IsOpen() {
		errs = append(errs, n.ns.Close())
	}
	return errors.Join(errs...)
}

func (n *namespace) pod() bool { return n.options.Place.Kind == place.Pod }

func (n *namespace) devices() ([]Device, error) { return listDevices(n.netlink, n.sys, n.pod()) }

// resolver returns a function that resolves an accelerator's CPUs in this place, and the CPUs that take the NIC's interrupts.
func (n *namespace) resolver(devices []Device) (resolve func(spec string) (cpuset.Set, error), irq cpuset.Set, err error) {
	cpus, err := cpuset.Machine(n.sys.Root)
	if err != nil {
		return nil, irq, err
	}
	node, err := cpuset.ParseList(n.options.Place.CPUs)
	if err != nil {
		return nil, irq, err
	}
	if irq, err = cpuset.ParseList(n.options.Place.IRQCPUs); err != nil {
		return nil, irq, err
	}
	if irq.Empty() {
		for _, d := range devices {
			if d.Class != v1alpha1.DeviceNIC {
				continue
			}
			cpus, err := IRQCPUs(n.sys.Root, n.options.Proc, d.Name)
			if err != nil {
				return nil, irq, err
			}
			irq = irq.Union(cpus)
		}
	}
	return func(spec string) (cpuset.Set, error) { return cpuset.Resolve(spec, cpus, node, irq) }, irq, nil
}

// plan resolves accelerators for the devices of this place.
func (n *namespace) plan(accelerators []v1alpha1.PolicyAccelerator, devices []Device) (*Plan, error) {
	resolve, _, err := n.resolver(devices)
	if err != nil {
		return nil, err
	}
	return makePlan(n.options.Kinds, accelerators, resolve)
}

// transact runs fn with the books of the machine and of this place, after it has released what dead processes held. It holds
// the machine-wide lock meanwhile. The machine's book is nil unless withMachine is set.
func (n *namespace) transact(ctx context.Context, withMachine bool, fn func(machine, place *journal.Book) error) error {
	unlock, err := n.journal.Lock()
	if err != nil {
		return err
	}
	defer unlock()
	place, err := n.journal.Namespace(n.id, n.options.Place.Name, n.sys, n.links)
	if err != nil {
		return err
	}
	books := []*journal.Book{place}
	var machine *journal.Book
	if withMachine {
		if machine, err = n.journal.Machine(); err != nil {
			return err
		}
		books = append(books, machine)
	}
	for _, b := range books {
		_, err := b.ReleaseDead()
		if journal.OnlyChanged(err) {
			n.options.Log.WarnContext(ctx, "recover settings of a run that died", "error", err)
		} else if err != nil {
			return err
		}
	}
	return fn(machine, place)
}
