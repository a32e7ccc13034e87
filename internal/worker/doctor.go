package worker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/netip"
	"time"

	"google.golang.org/grpc"

	"slipstream.dev/internal/doctor"
	"slipstream.dev/internal/worker/pb"
)

// ReadFacts returns the facts about the place that doctor judges. It reads counters twice, a window apart. With probe it also
// tries the fast path.
func (c *Client) ReadFacts(ctx context.Context, window time.Duration, probe bool) (f doctor.Facts, err error) {
	answer, err := c.doctor.ReadFacts(ctx, &pb.ReadFactsRequest{WindowNs: int64(window), Probe: probe})
	if err != nil {
		return f, c.plain(err)
	}
	return f, unmarshal(answer.GetFacts(), &f)
}

func pbDatagrams(at netip.AddrPort, key []byte) *pb.Datagrams {
	return &pb.Datagrams{Address: at.Addr().String(), Port: uint32(at.Port()), Key: key}
}

// convert converts sizes to and from the type that they have in messages.
func convert[To, From int | uint32](from []From) (to []To) {
	for _, n := range from {
		to = append(to, To(n))
	}
	return to
}

// SendDatagrams sends datagrams from the place, as doctor.Sender describes.
func (c *Client) SendDatagrams(ctx context.Context, to netip.AddrPort, key []byte, round int, sizes []int) (t doctor.Sent, err error) {
	answer, err := c.doctor.SendDatagrams(ctx, &pb.SendDatagramsRequest{Datagrams: pbDatagrams(to, key), Round: uint32(round), Sizes: convert[uint32](sizes)})
	if err != nil {
		return t, c.plain(err)
	}
	return t, unmarshal(answer.GetSent(), &t)
}

// OpenReceiver receives datagrams at an address of the place, as doctor.OpenReceiver describes.
func (c *Client) OpenReceiver(ctx context.Context, at netip.AddrPort, key []byte) (doctor.Receiver, error) {
	ctx, cancel := context.WithCancel(ctx)
	r := &receiver{client: c, cancel: cancel}
	if err := r.open(ctx, &pb.ReceiveDatagramsCommand{Step: &pb.ReceiveDatagramsCommand_Listen{Listen: pbDatagrams(at, key)}}); err != nil {
		cancel()
		return nil, err
	}
	return r, nil
}

// receiver is a call of ReceiveDatagrams.
type receiver struct {
	client *Client
	cancel context.CancelFunc
	stream grpc.BidiStreamingClient[pb.ReceiveDatagramsCommand, pb.ReceiveDatagramsEvent]
	port   uint16
}

func (r *receiver) open(ctx context.Context, listen *pb.ReceiveDatagramsCommand) (err error) {
	if r.stream, err = r.client.doctor.ReceiveDatagrams(ctx); err != nil {
		return r.client.plain(err)
	}
	event, err := r.ask(listen)
	if port := event.GetListening().GetPort(); port > math.MaxUint16 {
		return fmt.Errorf("the worker says that it listens at port %d", port)
	}
	r.port = uint16(event.GetListening().GetPort())
	return err
}

func (r *receiver) ask(command *pb.ReceiveDatagramsCommand) (*pb.ReceiveDatagramsEvent, error) {
	if err := r.stream.Send(command); err != nil && !errors.Is(err, io.EOF) { // after io.EOF, Recv has the reason
		return nil, r.client.plain(err)
	}
	event, err := r.stream.Recv()
	if err != nil {
		return nil, r.client.plain(err)
	}
	return event, nil
}

func (r *receiver) Port() uint16 { return r.port }

func (r *receiver) Receive(round int) (doctor.Received, error) {
	event, err := r.ask(&pb.ReceiveDatagramsCommand{Step: &pb.ReceiveDatagramsCommand_Round{Round: uint32(round)}})
	received := event.GetReceived()
	return doctor.Received{Complete: received.GetComplete(), Sizes: convert[int](received.GetSizes())}, err
}

// Close ends the call, upon which the worker closes its port.
func (r *receiver) Close() { r.cancel() }

// OpenTunnel opens the place's end of a tunnel, as doctor.TunnelOpener describes.
func (c *Client) OpenTunnel(ctx context.Context, t doctor.Tunnel) (release func(), err error) {
	tunnel, err := encode("tunnel", t)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	stream, err := c.doctor.OpenTunnel(ctx, &pb.OpenTunnelRequest{Tunnel: tunnel})
	if err == nil {
		_, err = stream.Recv()
	}
	if err != nil {
		cancel()
		return nil, c.plain(err)
	}
	return cancel, nil
}

// SendThroughTunnel sends through a tunnel to the end that another place has opened, as doctor.TunnelSender describes.
func (c *Client) SendThroughTunnel(ctx context.Context, t doctor.Tunnel, o doctor.Offload) (transfer doctor.Transfer, err error) {
	tunnel, err := encode("tunnel", t)
	if err != nil {
		return transfer, err
	}
	answer, err := c.doctor.SendThroughTunnel(ctx, &pb.SendThroughTunnelRequest{Tunnel: tunnel, Offload: uint32(o)})
	if err != nil {
		return transfer, c.plain(err)
	}
	return transfer, unmarshal(answer.GetTransfer(), &transfer)
}
