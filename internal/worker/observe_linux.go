package worker

import (
	"cmp"
	"errors"
	"io/fs"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/collect"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/worker/pb"
)

// pod is an observed pod. err says why it cannot be observed.
type pod struct {
	collect.PodGroup
	containers []string // their IDs
	err        error
}

// findPods finds the observed pods, and returns them in the same order.
func findPods(cgroups string, observed []*pb.ObservedPod) (pods []pod) {
	var uids []string
	for _, o := range observed {
		uids = append(uids, o.GetUid())
	}
	found := collect.FindPods(cmp.Or(cgroups, collect.HostCgroups), uids...)
	for _, o := range observed {
		group, ok := found[o.GetUid()]
		p := pod{PodGroup: group, containers: o.GetContainers()}
		if !ok {
			p.err = errors.New("the node has no control group of its pod " + o.GetUid())
		}
		pods = append(pods, p)
	}
	return pods
}

type podUsage struct {
	collect.PodUsage
	err error
}

func (p pod) usage() (u podUsage) {
	if u.err = p.err; u.err == nil {
		u.PodUsage, u.err = p.Usage(p.containers...)
	}
	if errors.Is(u.err, fs.ErrNotExist) || errors.Is(u.err, unix.ENODEV) {
		u.err = errors.New("its pod ended within the window or before it")
	}
	return u
}

// used returns what each pod used between two readings. The controller fills in the names.
func used(before, after []podUsage) []record.DaemonSet {
	all := make([]record.DaemonSet, len(before))
	for i, b := range before {
		err := cmp.Or(b.err, after[i].err)
		if err == nil {
			all[i].CPUs, all[i].Memory, err = b.Use(after[i].PodUsage)
		}
		if err != nil {
			all[i].Error = err.Error()
		}
	}
	return all
}
