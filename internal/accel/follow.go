package accel

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"

	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/record"
)

// subscription is a stream of changes to the links of a network namespace. The
// kernel ends it where more came than the socket had room for.
type subscription struct {
	changes chan netlink.LinkUpdate
	done    chan struct{}
}

func subscribe(ns netns.Handle) (*subscription, error) {
	u := &subscription{changes: make(chan netlink.LinkUpdate, 64), done: make(chan struct{})}
	err := netlink.LinkSubscribeWithOptions(u.changes, u.done, netlink.LinkSubscribeOptions{Namespace: &ns})
	if err != nil {
		return nil, fmt.Errorf("subscribe to link changes: %w", err)
	}
	return u, nil
}

func (u *subscription) close() {
	close(u.done)
	for range u.changes { // the sender would wait for ever
	}
}

// follower keeps the devices of a place in step.
type follower struct{ quit, ended chan struct{} }

func (s *Session) follow(updates *subscription) *follower {
	f := &follower{quit: make(chan struct{}), ended: make(chan struct{})}
	go func() {
		defer close(f.ended)
		defer func() { updates.close() }()
		for {
			select {
			case <-f.quit:
				return
			case _, ok := <-updates.changes:
				if !ok {
					// Changes were lost. First subscribe, then list what there is.
					again, err := subscribe(s.ns)
					if err != nil {
						s.options.Log.Error("devices that appear from now on are not accelerated", "place", s.options.Place.Name, "error", err)
						return
					}
					updates.close()
					updates = again
				}
				// What a change says does not matter: the list is the truth, and
				// one listing answers a burst.
				for len(updates.changes) > 0 {
					<-updates.changes
				}
				if err := s.reconcile(); err != nil {
					s.options.Log.Warn("keep devices in step", "place", s.options.Place.Name, "error", err)
				}
			}
		}
	}()
	return f
}

// stopFollowing returns when nothing more is going to be applied.
func (s *Session) stopFollowing() {
	s.mu.Lock()
	f := s.follower
	s.follower = nil
	s.mu.Unlock()
	if f != nil {
		close(f.quit)
		<-f.ended
	}
}

// reconcile applies the plan to devices that have come, and forgets those that
// have gone.
func (s *Session) reconcile() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	devices, err := listDevices(s.links, s.sys, s.pod())
	if err != nil {
		return err
	}
	names := s.plan.names(devices)
	if maps.Equal(names, s.followed) {
		return nil
	}
	ctx := context.Background()
	return s.transact(ctx, func(machine, place *book) error {
		for index, name := range s.followed {
			switch names[index] {
			case name:
			case "":
				s.settings = slices.DeleteFunc(s.settings, func(set record.Setting) bool { return isOf(set.Path, name) })
				s.options.Log.InfoContext(ctx, "device is gone", "place", s.options.Place.Name, "device", name)
			default:
				for i, set := range s.settings {
					if isOf(set.Path, name) {
						s.settings[i].Path = renamed(set.Path, names[index])
					}
				}
			}
		}
		for _, d := range devices {
			if _, known := s.followed[d.Index]; known || names[d.Index] == "" {
				continue
			}
			_, queues, err := s.plan.changes(machine.store, place.store, []Device{d})
			var settings []record.Setting
			if err == nil {
				settings, err = s.set(machine, place, nil, queues)
			}
			if err != nil {
				s.options.Log.WarnContext(ctx, "accelerate a device that appeared", "place", s.options.Place.Name, "device", d.Name, "error", err)
				continue
			}
			if len(settings) == 0 { // it went again, or took another name: a change will tell
				delete(names, d.Index)
				continue
			}
			s.settings = append(s.settings, settings...)
			s.options.Log.InfoContext(ctx, "accelerated a device that appeared", "place", s.options.Place.Name, "device", d.Name)
		}
		s.followed = names
		return place.save()
	})
}

// names maps the devices that p sets anything on, by index.
func (p *plan) names(devices []Device) map[int]string {
	names := make(map[int]string)
	for _, d := range devices {
		if p.matches(d) {
			names[d.Index] = d.Name
		}
	}
	return names
}

func hasDevice(settings []record.Setting, name string) bool {
	return slices.ContainsFunc(settings, func(set record.Setting) bool { return isOf(set.Path, name) })
}

// isOf tells whether a setting is one of the device called name.
func isOf(path, name string) bool {
	return strings.HasPrefix(path, "class/net/"+name+"/")
}
