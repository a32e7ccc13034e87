package traffic

import (
	"context"
	"errors"
	"testing"
	"time"
)

func TestSleepUntil(t *testing.T) {
	at := Now() + int64(70*time.Millisecond) // more than one check of the context
	if err := SleepUntil(t.Context(), at); err != nil {
		t.Fatal(err)
	}
	if late := time.Duration(Now() - at); late < 0 || late > 20*time.Millisecond {
		t.Errorf("woke %s late", late)
	}
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	defer context.AfterFunc(ctx, func() {})()
	go cancel(cause)
	if err := SleepUntil(ctx, Now()+int64(time.Hour)); !errors.Is(err, cause) {
		t.Errorf("got %v", err)
	}
}
