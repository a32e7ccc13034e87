package traffic

import (
	"errors"
	"testing"

	"slipstream.dev/internal/record"
)

// A connection that moved nothing at the end of the window is an error that a controller can tell from others.
func TestStalledAtEnd(t *testing.T) {
	e := &End{conns: []*conn{new(conn)}}
	if _, err := e.result(); !errors.Is(err, record.StalledAtEnd) {
		t.Errorf("got %v", err)
	}
}
