package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc"

	"slipstream.dev/internal/doctor"
	"slipstream.dev/internal/process"
	"slipstream.dev/internal/worker/pb"
)

// doctorServer answers the requests of doctor.
type doctorServer struct {
	pb.UnimplementedDoctorServer
}

func registerDoctor(g *grpc.Server) { pb.RegisterDoctorServer(g, doctorServer{}) }

func (doctorServer) ReadFacts(ctx context.Context, q *pb.ReadFactsRequest) (*pb.ReadFactsResponse, error) {
	defer process.Collecting()()
	facts, err := doctor.ReadFacts(ctx, time.Duration(q.GetWindowNs()), q.GetProbe())
	if err != nil {
		return nil, err
	}
	facts.Node.KubeProxy = kubeProxy(ctx)
	b, err := encode("facts", facts)
	return &pb.ReadFactsResponse{Facts: b}, err
}

func (doctorServer) ReceiveDatagrams(stream pb.Doctor_ReceiveDatagramsServer) error {
	command, err := stream.Recv()
	if err != nil {
		return err
	}
	at, err := addrPort(command.GetListen())
	if err != nil {
		return err
	}
	port, err := doctor.Listen(at, command.GetListen().GetKey())
	if err != nil {
		return err
	}
	defer port.Close()
	if err := stream.Send(&pb.ReceiveDatagramsEvent{Event: &pb.ReceiveDatagramsEvent_Listening{Listening: &pb.Ready{Port: uint32(port.Number())}}}); err != nil {
		return err
	}
	for {
		if command, err = stream.Recv(); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		received := port.Receive(int(command.GetRound()))
		answer := &pb.Received{Complete: received.Complete, Sizes: convert[uint32](received.Sizes)}
		if err := stream.Send(&pb.ReceiveDatagramsEvent{Event: &pb.ReceiveDatagramsEvent_Received{Received: answer}}); err != nil {
			return err
		}
	}
}

func (doctorServer) SendDatagrams(_ context.Context, q *pb.SendDatagramsRequest) (*pb.SendDatagramsResponse, error) {
	to, err := addrPort(q.GetDatagrams())
	if err != nil {
		return nil, err
	}
	sent, err := doctor.SendDatagrams(to, q.GetDatagrams().GetKey(), int(q.GetRound()), convert[int](q.GetSizes()))
	if err != nil {
		return nil, err
	}
	b, err := encode("what was sent", sent)
	return &pb.SendDatagramsResponse{Sent: b}, err
}

func (doctorServer) OpenTunnel(q *pb.OpenTunnelRequest, stream pb.Doctor_OpenTunnelServer) error {
	var t doctor.Tunnel
	if err := json.Unmarshal(q.GetTunnel(), &t); err != nil {
		return fmt.Errorf("decode tunnel: %w", err)
	}
	return doctor.OpenTunnel(stream.Context(), t, func() error { return stream.Send(&pb.Ready{}) })
}

func (doctorServer) SendThroughTunnel(ctx context.Context, q *pb.SendThroughTunnelRequest) (*pb.SendThroughTunnelResponse, error) {
	var t doctor.Tunnel
	if err := json.Unmarshal(q.GetTunnel(), &t); err != nil {
		return nil, fmt.Errorf("decode tunnel: %w", err)
	}
	transfer, err := doctor.SendThroughTunnel(ctx, t, doctor.Offload(q.GetOffload()))
	if err != nil {
		return nil, err
	}
	b, err := encode("the transfer", transfer)
	return &pb.SendThroughTunnelResponse{Transfer: b}, err
}
