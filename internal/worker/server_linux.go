package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"sync"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel"
	"slipstream.dev/internal/accel/journal"
	"slipstream.dev/internal/collect"
	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/process"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/traffic"
	"slipstream.dev/internal/worker/pb"
)

// system holds the state of what a worker does on Linux in addition to traffic.
type system struct {
	// applied is nil unless accelerators are applied. The controller calls Apply and Revert in turn.
	applied *accel.Applier
	// sampler is opened by the first Sample, and stays open with its eBPF programs attached.
	sampler *collect.Collector
	// nics are the names of this place's NICs, for series.
	nics []string
	// limits returns the CPU limits of this process, which the first trial opens.
	limits func() (collect.Limits, error)
	// probe returns an error that says why the runners of accelerators do not work on this kernel.
	probe func([]v1alpha1.Accelerator) error
}

func newSystem(ctx context.Context) system {
	return system{
		limits: sync.OnceValues(func() (collect.Limits, error) { return collect.OpenLimits(collect.Options{}) }),
		probe:  accel.ProbeRunners(ctx),
	}
}

func (s *server) Describe(ctx context.Context, q *pb.DescribeRequest) (*pb.DescribeResponse, error) {
	defer process.Collecting()()
	at := placeOf(q.GetPlace())
	sys, err := netns.Sysfs()
	if err != nil {
		return nil, err
	}
	defer sys.Close()
	node, err := collect.Describe(ctx, os.DirFS("/proc"), sys.FS())
	if err != nil {
		return nil, err
	}
	node.Name, node.NodeCPUs, node.IRQCPUs = at.Name, at.CPUs, at.IRQCPUs
	node.Tools = toolVersions(ctx)
	interrupt, err := collect.InterruptTime()
	if err != nil {
		s.options.Log.WarnContext(ctx, "cannot measure the time of an interrupt", "place", at.Name, "error", err)
	}
	node.InterruptSeconds = interrupt.Seconds()
	if err := accel.Classify(node.Links, at.Kind == place.Pod); err != nil {
		return nil, err
	}
	if at.Kind == place.Node {
		node.Held, node.Busy, err = accel.InForce(accel.Options{JournalDir: s.options.JournalDir})
		if err != nil && !errors.Is(err, fs.ErrPermission) { // only root can read the journal, and only root can have changed anything
			return nil, err
		}
		node.KubeProxy = kubeProxy(ctx)
	}
	b, err := encode(at.Name, node)
	return &pb.DescribeResponse{Node: b}, err
}

func placeOf(p *pb.Place) place.Place {
	at := place.Place{Name: p.GetName(), Kind: place.Node, CPUs: p.GetCpus(), IRQCPUs: p.GetIrqCpus()}
	if p.GetPod() {
		at.Kind = place.Pod
	}
	return at
}

// throttling calls watchLimits with the CPU limits of this process.
func (s *system) throttling(ctx context.Context, window traffic.Window) (warnings func() []record.Warning, err error) {
	limits, err := s.limits()
	if err != nil {
		return nil, err
	}
	return watchLimits(ctx, limits, window), nil
}

// watchLimits reads how often CPU limits have throttled at both edges of the window. The returned function warns if they did in
// between. If it is called before the end of the window, because a fixed number of requests is done, it ends the window.
func watchLimits(ctx context.Context, limits collect.Limits, window traffic.Window) (warnings func() []record.Warning) {
	if len(limits) == 0 {
		return func() []record.Warning { return nil }
	}
	var edges [2]collect.Snapshot
	done := make(chan error, 1)
	until, end := context.WithCancel(ctx)
	go func() {
		for i, at := range []int64{window.From, window.To} {
			err := traffic.SleepUntil(until, at)
			if err == nil || ctx.Err() == nil {
				edges[i], err = limits.Snapshot()
			}
			if err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	return func() []record.Warning {
		end()
		if err := <-done; err != nil {
			return nil // the run has failed for the same reason, or the cgroup is gone
		}
		return limits.Warnings(edges[0], edges[1])
	}
}

// openSampler opens the counters of this place, unless they are open. They stay open until the process ends.
func (s *server) openSampler(cpus bool) error {
	if s.sampler != nil {
		return nil
	}
	defer process.Collecting()()
	devices, err := accel.Devices(false)
	if err != nil {
		return err
	}
	s.nics = nil
	for _, d := range devices {
		if d.Class == v1alpha1.DeviceNIC {
			s.nics = append(s.nics, d.Name)
		}
	}
	sys, err := netns.Sysfs()
	if err != nil {
		return err
	}
	if s.sampler, err = collect.New(collect.Options{Sys: sys.FS(), CPUs: cpus}); err != nil {
		return errors.Join(err, sys.Close())
	}
	return nil
}

func (s *server) Sample(stream pb.Worker_SampleServer) error {
	ctx := stream.Context()
	command, err := stream.Recv()
	if err != nil {
		return err
	}
	request := command.GetRequest()
	if err := s.openSampler(request.GetCpus()); err != nil {
		return err
	}
	pods := findPods(s.options.cgroups, request.GetPods())
	if err := awaitRoom(ctx, os.DirFS("/proc/sys/net/netfilter"), uint64(request.GetConnections())); err != nil {
		return err
	}
	if err := stream.Send(&pb.SampleEvent{Event: &pb.SampleEvent_Ready{Ready: &pb.Ready{}}}); err != nil {
		return err
	}
	if command, err = stream.Recv(); err != nil {
		return err
	}
	window := windowOf(command.GetWindow())
	// A second message ends the window early.
	until, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		if _, err := stream.Recv(); err == nil {
			cancel(errEarly)
		}
	}()
	edges, series, err := s.watch(until, window, pods)
	if err != nil {
		return err
	}
	return s.sendCounters(stream, request, edges, series)
}

// errEarly means that a window ends before its time.
var errEarly = errors.New("the window ends early")

// edge holds the counters at an edge of a window.
type edge struct {
	collect.Snapshot
	// accelerators holds the counters of accelerators, by kind.
	accelerators map[string]map[string]uint64
	// pods holds what each observed pod has used so far.
	pods []podUsage
}

// watch reads the counters at both edges of a window, and a series of some in between.
func (s *server) watch(ctx context.Context, window traffic.Window, pods []pod) (edges [2]edge, series record.Series, err error) {
	if edges[0], err = s.edgeAt(ctx, window.From, pods); err != nil {
		return edges, series, err
	}
	readings := s.sampler.Series(s.nics, window.From, window.To, edges[0].Snapshot)
	for due := readings.Due(); due < window.To && traffic.SleepUntil(ctx, due) == nil; due = readings.Due() {
		if err := readings.Read(); err != nil {
			return edges, series, err
		}
	}
	if edges[1], err = s.edgeAt(ctx, window.To, pods); err != nil {
		return edges, series, err
	}
	return edges, readings.End(edges[1].Snapshot), nil
}

// edgeAt reads the counters at a given time, or immediately if the window ends early.
func (s *server) edgeAt(ctx context.Context, at int64, pods []pod) (e edge, err error) {
	if err := traffic.SleepUntil(ctx, at); err != nil && !errors.Is(err, errEarly) {
		return e, err
	}
	if e.Snapshot, err = s.sampler.Snapshot(); err != nil {
		return e, err
	}
	for _, p := range pods {
		e.pods = append(e.pods, p.usage())
	}
	if s.applied != nil {
		e.accelerators, err = s.applied.Counts()
	}
	return e, err
}

// sendCounters answers a request with the differences of the counters between two edges.
func (s *server) sendCounters(stream pb.Worker_SampleServer, request *pb.SampleRequest, edges [2]edge, series record.Series) (err error) {
	before, after := edges[0].Snapshot, edges[1].Snapshot
	counters := pb.Counters{Series: record.EncodeSeries(series)}
	devices := s.sampler.Devices(before, after)
	for i := range devices {
		devices[i].Place = request.GetPlace()
	}
	if counters.Devices, err = encode("devices", devices); err != nil {
		return err
	}
	vfs := s.sampler.VFs(before, after)
	for i := range vfs {
		vfs[i].Place = request.GetPlace()
	}
	if counters.Vfs, err = encode("virtual functions", vfs); err != nil {
		return err
	}
	if counters.Daemonsets, err = encode("the use of pods", used(edges[0].pods, edges[1].pods)); err != nil {
		return err
	}
	if request.GetCpus() {
		if counters.Host, err = encode("CPU counters", s.sampler.Host(before, after)); err != nil {
			return err
		}
	}
	if packets := edges[1].accelerators["fastpath"]; packets != nil {
		for why, n := range edges[0].accelerators["fastpath"] {
			if packets[why] -= n; packets[why] == 0 {
				delete(packets, why)
			}
		}
		if counters.Fastpath, err = encode("packets of the fast path", record.Fastpath{Place: request.GetPlace(), Packets: packets}); err != nil {
			return err
		}
	}
	return stream.Send(&pb.SampleEvent{Event: &pb.SampleEvent_Counters{Counters: &counters}})
}

func (s *server) Apply(ctx context.Context, q *pb.ApplyRequest) (*pb.ApplyResponse, error) {
	defer process.Collecting()()
	if s.applied != nil {
		return nil, errors.New("apply accelerators: others are still applied here")
	}
	var accelerators []v1alpha1.Accelerator
	if err := json.Unmarshal(q.GetAccelerators(), &accelerators); err != nil {
		return nil, fmt.Errorf("decode accelerators: %w", err)
	}
	if err := s.probe(accelerators); err != nil {
		return nil, err
	}
	place := placeOf(q.GetPlace())
	applier, err := accel.OpenApplier(accel.Options{
		Place: place, JournalDir: s.options.JournalDir, Owner: q.GetOwner(), Log: s.options.Log,
	})
	if err != nil {
		return nil, err
	}
	settings, err := applier.Apply(ctx, accelerators)
	if err != nil {
		return nil, errors.Join(err, applier.Close())
	}
	s.applied = applier
	b, err := encode("settings", settings)
	return &pb.ApplyResponse{Settings: b}, err
}

func (s *server) Revert(ctx context.Context, _ *pb.RevertRequest) (*pb.RevertResponse, error) {
	var settings []record.Setting
	var err error
	if s.applied != nil {
		settings = s.applied.Settings()
		err = s.revert(ctx)
	} else {
		err = restoreDead(ctx, s.options.JournalDir, s.options.Log)
	}
	answer := new(pb.RevertResponse)
	if journal.OnlyChanged(err) {
		first, more, _ := strings.Cut(err.Error(), "\n")
		if more != "" {
			first += fmt.Sprintf(" (and %d more)", strings.Count(more, "\n")+1)
		}
		answer.Changed = first
	} else if err != nil {
		return nil, err
	}
	answer.Settings, err = encode("settings", settings)
	return answer, err
}

func (s *server) revert(ctx context.Context) error {
	if s.applied == nil {
		return nil
	}
	applier := s.applied
	s.applied = nil
	_, err := applier.Revert(ctx)
	return errors.Join(err, applier.Close())
}
