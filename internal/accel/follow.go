package accel

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/vishvananda/netlink"

	"slipstream.dev/internal/accel/journal"
	"slipstream.dev/internal/accel/kernel"
	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/record"
)

// subscription receives the link notifications of a network namespace. Its channel is closed when the socket's receive buffer
// overflows.
type subscription struct {
	changes chan netlink.LinkUpdate
	done    chan struct{}
}

func subscribe(ns netns.Handle) (*subscription, error) {
	u := &subscription{changes: make(chan netlink.LinkUpdate, 64), done: make(chan struct{})}
	err := netns.Do(ns, func() error { // the library's own switch of namespaces would hide errors
		return netlink.LinkSubscribeWithOptions(u.changes, u.done, netlink.LinkSubscribeOptions{})
	})
	if err != nil {
		return nil, fmt.Errorf("subscribe to link changes: %w", err)
	}
	return u, nil
}

func (u *subscription) close() {
	close(u.done)
	for range u.changes { // drain it, or the sender would block for ever
	}
}

// follower applies the plan to devices that appear later.
type follower struct{ quit, ended chan struct{} }

func (a *Applier) follow(updates *subscription) *follower {
	f := &follower{quit: make(chan struct{}), ended: make(chan struct{})}
	go func() {
		defer close(f.ended)
		a.followUntil(f.quit, updates)
	}()
	return f
}

func (a *Applier) followUntil(quit <-chan struct{}, updates *subscription) {
	defer func() { updates.close() }()
	for {
		select {
		case <-quit:
			return
		case _, ok := <-updates.changes:
			if !ok {
				// Notifications were lost. Subscribe again before listing the devices.
				again, err := subscribe(a.ns)
				if err != nil {
					a.options.Log.Error("devices that appear from now on are not accelerated", "place", a.options.Place.Name, "error", err)
					return
				}
				updates.close()
				updates = again
			}
			// The content of a notification does not matter: the list of devices is authoritative, and one listing handles a
			// burst.
			for len(updates.changes) > 0 {
				<-updates.changes
			}
			if err := a.reconcile(); err != nil {
				a.options.Log.Warn("update accelerators after a change of devices", "place", a.options.Place.Name, "error", err)
			}
		}
	}
}

// stopFollowing stops the follower. Once it returns, no more settings are applied.
func (a *Applier) stopFollowing() {
	a.mu.Lock()
	f := a.follower
	a.follower = nil
	a.mu.Unlock()
	if f != nil {
		close(f.quit)
		<-f.ended
	}
}

// reconcile applies the plan to new devices, and forgets those that are gone.
func (a *Applier) reconcile() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	devices, err := a.devices()
	if err != nil {
		return err
	}
	names := a.applied.names(devices)
	if maps.Equal(names, a.followed) {
		return nil
	}
	ctx := context.Background()
	return a.transact(ctx, true, func(machine, place *journal.Book) error {
		a.rename(ctx, names)
		for _, d := range devices {
			if _, known := a.followed[d.Index]; known || names[d.Index] == "" {
				continue
			}
			if !a.applyTo(ctx, d, machine, place) {
				delete(names, d.Index)
			}
		}
		a.followed = names
		return place.Save()
	})
}

// rename updates the paths of the settings after devices were renamed or removed. names maps indexes to current names.
func (a *Applier) rename(ctx context.Context, names map[int]string) {
	for index, name := range a.followed {
		switch names[index] {
		case name:
		case "":
			a.settings = slices.DeleteFunc(a.settings, func(set record.Setting) bool { return kernel.IsOf(set.Path, name) })
			a.options.Log.InfoContext(ctx, "device is gone", "place", a.options.Place.Name, "device", name)
		default:
			for i, set := range a.settings {
				if kernel.IsOf(set.Path, name) {
					a.settings[i].Path = kernel.Renamed(set.Path, names[index])
				}
			}
		}
	}
}

// applyTo applies the plan to a new device, and reports whether the device is done with. It is not if it was just renamed or
// removed: then another notification follows.
func (a *Applier) applyTo(ctx context.Context, d Device, machine, place *journal.Book) bool {
	_, queues, err := a.applied.changes(machine.Store, place.Store, []Device{d}, nil)
	var settings []record.Setting
	if err == nil {
		settings, err = a.set(journal.Changes{Book: place, Changes: queues})
	}
	if err != nil {
		a.options.Log.WarnContext(ctx, "accelerate a device that appeared", "place", a.options.Place.Name, "device", d.Name, "error", err)
		return true
	}
	if len(settings) == 0 {
		return false
	}
	a.settings = append(a.settings, settings...)
	a.options.Log.InfoContext(ctx, "accelerated a device that appeared", "place", a.options.Place.Name, "device", d.Name)
	return true
}

// names maps the indexes of the devices on which p sets anything to their names.
func (p *Plan) names(devices []Device) map[int]string {
	names := make(map[int]string)
	for _, d := range devices {
		if p.matches(d) {
			names[d.Index] = d.Name
		}
	}
	return names
}

func hasDevice(settings []record.Setting, name string) bool {
	return slices.ContainsFunc(settings, func(set record.Setting) bool { return kernel.IsOf(set.Path, name) })
}
