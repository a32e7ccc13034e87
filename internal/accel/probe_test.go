package accel

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"testing"

	"slipstream.dev/api/v1alpha1"
)

// fileStore is a store of these settings.
type fileStore map[string]string

func (s fileStore) read(path string) (string, error) {
	value, ok := s[path]
	if !ok {
		return "", &fs.PathError{Op: "open", Path: path, Err: fs.ErrNotExist}
	}
	return value, nil
}

func (fileStore) write(string, string) error { return errors.New("a probe writes nothing") }

func TestProbeRPS(t *testing.T) {
	rps, rfs := v1alpha1.Accelerator{RPS: &v1alpha1.RPS{}}, v1alpha1.Accelerator{RFS: &v1alpha1.RFS{}}
	queues, table := fileStore{"class/net/lo/queues/rx-0/rps_cpus": "0"}, fileStore{flowTable: "0"}
	for _, c := range []struct {
		what            string
		queues, machine fileStore
		a               v1alpha1.Accelerator
		want            string
	}{
		{"RPS", queues, fileStore{}, rps, ""},
		{"RFS", queues, table, rfs, ""},
		{"RPS, no CONFIG_RPS", fileStore{}, table, rps, "this kernel lacks RPS (CONFIG_RPS)"},
		{"RFS, no CONFIG_RPS", fileStore{}, table, rfs, "this kernel lacks RPS (CONFIG_RPS)"},
		{"RFS, no flow table", queues, fileStore{}, rfs, flowTable},
	} {
		err := probeRPS(c.queues, c.machine, c.a)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want %q", c.what, err, c.want)
		}
	}
}

func TestBrief(t *testing.T) {
	for text, want := range map[string]string{
		"try the fast path: start the fast path: this kernel lacks tcx (since Linux 6.6)": "this kernel lacks tcx (since Linux 6.6)",
		"try the fast path: make a node: no buffer space available":                       "try the fast path: make a node: no buffer space available",
	} {
		if got := brief(fmt.Errorf("%s", text)); got.Error() != want {
			t.Errorf("%s: %v, want %s", text, got, want)
		}
	}
}
