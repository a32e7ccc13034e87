package worker

import (
	"context"
	"errors"

	"google.golang.org/grpc"

	"slipstream.dev/internal/collect"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/traffic"
	"slipstream.dev/internal/worker/pb"
)

// system is empty: besides traffic, a worker on Windows only describes its place.
type system struct{}

func newSystem(context.Context) system { return system{} }

func (s *server) Describe(ctx context.Context, q *pb.DescribeRequest) (*pb.DescribeResponse, error) {
	node, err := collect.Describe()
	if err != nil {
		return nil, err
	}
	node.Name = q.GetPlace().GetName()
	node.Tools = toolVersions(ctx)
	b, err := encode(node.Name, node)
	return &pb.DescribeResponse{Node: b}, err
}

// throttling returns no warnings: the CPU limits of job objects are not watched.
func (*system) throttling(context.Context, traffic.Window) (warnings func() []record.Warning, err error) {
	return func() []record.Warning { return nil }, nil
}

func (*server) Sample(pb.Worker_SampleServer) error {
	return errors.New("this place runs Windows, and counters are sampled on Linux only")
}

func (*server) Apply(context.Context, *pb.ApplyRequest) (*pb.ApplyResponse, error) {
	return nil, errors.New("this place runs Windows, and accelerators are applied on Linux only")
}

// Revert returns no settings: there is nothing to revert.
func (*server) Revert(context.Context, *pb.RevertRequest) (*pb.RevertResponse, error) {
	return &pb.RevertResponse{Settings: []byte("null")}, nil
}

func (*server) revert(context.Context) error { return nil }

// registerDoctor registers nothing: doctor examines Linux.
func registerDoctor(*grpc.Server) {}
