package worker

import (
	"context"
	"encoding/json"
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

// Look returns the facts about the place that doctor judges. The counters are read twice, a window apart;
// probe tries the fast path as well.
func (c *Client) Look(ctx context.Context, window time.Duration, probe bool) (f doctor.Facts, err error) {
	answer, err := c.rpc.Look(ctx, &pb.LookRequest{WindowNs: int64(window), Probe: probe})
	if err != nil {
		return f, c.plain(err)
	}
	return f, unmarshal(answer.GetFacts(), &f)
}

func pbDatagrams(at netip.AddrPort, key []byte) *pb.Datagrams {
	return &pb.Datagrams{Address: at.Addr().String(), Port: uint32(at.Port()), Key: key}
}

func wireSizes(sizes []int) []uint32 { return convert[uint32](sizes) }
func sizesOf(sizes []uint32) []int   { return convert[int](sizes) }

func convert[To, From int | uint32](from []From) (to []To) {
	for _, n := range from {
		to = append(to, To(n))
	}
	return to
}

// Throw sends datagrams from the place, as doctor.Thrower describes.
func (c *Client) Throw(ctx context.Context, to netip.AddrPort, key []byte, round int, sizes []int) (t doctor.Thrown, err error) {
	answer, err := c.rpc.Throw(ctx, &pb.ThrowRequest{Datagrams: pbDatagrams(to, key), Round: uint32(round), Sizes: wireSizes(sizes)})
	if err != nil {
		return t, c.plain(err)
	}
	return t, unmarshal(answer.GetThrown(), &t)
}

// Catch receives datagrams at an address of the place, as doctor.Catch describes.
func (c *Client) Catch(ctx context.Context, at netip.AddrPort, key []byte) (doctor.Catcher, error) {
	ctx, cancel := context.WithCancel(ctx)
	caught := &catcher{client: c, cancel: cancel}
	if err := caught.open(ctx, &pb.CatchCommand{Step: &pb.CatchCommand_Listen{Listen: pbDatagrams(at, key)}}); err != nil {
		cancel()
		return nil, err
	}
	return caught, nil
}

// catcher is a call of Catch.
type catcher struct {
	client *Client
	cancel context.CancelFunc
	stream grpc.BidiStreamingClient[pb.CatchCommand, pb.CatchEvent]
	port   uint16
}

func (c *catcher) open(ctx context.Context, listen *pb.CatchCommand) (err error) {
	if c.stream, err = c.client.rpc.Catch(ctx); err != nil {
		return c.client.plain(err)
	}
	event, err := c.ask(listen)
	if port := event.GetListening().GetPort(); port > math.MaxUint16 {
		return fmt.Errorf("the worker says that it listens at port %d", port)
	}
	c.port = uint16(event.GetListening().GetPort())
	return err
}

func (c *catcher) ask(command *pb.CatchCommand) (*pb.CatchEvent, error) {
	if err := c.stream.Send(command); err != nil && !errors.Is(err, io.EOF) { // after io.EOF, Recv has the reason
		return nil, c.client.plain(err)
	}
	event, err := c.stream.Recv()
	if err != nil {
		return nil, c.client.plain(err)
	}
	return event, nil
}

func (c *catcher) Port() uint16 { return c.port }

func (c *catcher) Take(round int) (doctor.Taken, error) {
	event, err := c.ask(&pb.CatchCommand{Step: &pb.CatchCommand_Take{Take: uint32(round)}})
	taken := event.GetTaken()
	return doctor.Taken{Complete: taken.GetComplete(), Sizes: sizesOf(taken.GetSizes())}, err
}

// Close ends the call. The worker closes its port once it hears of that.
func (c *catcher) Close() { c.cancel() }

// Hold holds the place's end of a tunnel, as doctor.Hold describes.
func (c *Client) Hold(ctx context.Context, t doctor.Tunnel) (release func(), err error) {
	tunnel, err := json.Marshal(t)
	if err != nil {
		return nil, fmt.Errorf("encode tunnel: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	stream, err := c.rpc.Hold(ctx, &pb.HoldRequest{Tunnel: tunnel})
	if err == nil {
		_, err = stream.Recv()
	}
	if err != nil {
		cancel()
		return nil, c.plain(err)
	}
	return cancel, nil
}

// Carry sends through a tunnel that another place holds, as doctor.Carrier describes.
func (c *Client) Carry(ctx context.Context, t doctor.Tunnel, o doctor.Offload) (carried doctor.Carried, err error) {
	tunnel, err := json.Marshal(t)
	if err != nil {
		return carried, fmt.Errorf("encode tunnel: %w", err)
	}
	answer, err := c.rpc.Carry(ctx, &pb.CarryRequest{Tunnel: tunnel, Offload: uint32(o)})
	if err != nil {
		return carried, c.plain(err)
	}
	return carried, unmarshal(answer.GetCarried(), &carried)
}
