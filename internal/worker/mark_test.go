package worker

import (
	"errors"
	"fmt"
	"testing"

	"google.golang.org/grpc"

	"slipstream.dev/internal/record"
)

// TestStalledOverTheWire checks that the controller recognises a call that failed because connections stalled, and keeps the
// worker's message.
func TestStalledOverTheWire(t *testing.T) {
	for cause, want := range map[error]bool{record.StalledAtEnd: true, errors.New(string(record.StalledAtEnd)): false} {
		err := plain(markStream(nil, nil, nil, func(any, grpc.ServerStream) error { return fmt.Errorf("run stream: %w", cause) }))
		if _, stalled := errors.AsType[record.StalledError](err); stalled != want || err.Error() != "run stream: "+cause.Error() {
			t.Errorf("%T: %#v", cause, err)
		}
	}
}
