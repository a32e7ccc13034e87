//go:build linux

package main

import (
	"bytes"
	"strings"
	"testing"
)

// TestSupport checks that every test that the page names exists, and that each row has one.
func TestSupport(t *testing.T) {
	t.Chdir("../..")
	var b bytes.Buffer
	if err := supportPage(&b); err != nil {
		t.Fatal(err)
	}
	rows, err := kernels()
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range append(rows, environments...) {
		cells := []answer{row.install, row.measure, row.steer, row.fast}
		tried := false
		for _, a := range cells {
			if (a.by == "") != (a.text == "") {
				t.Errorf("%s: %+v has only one of answer and test", row.name, a)
			}
			tried = tried || a.by != ""
		}
		if !tried {
			t.Errorf("nothing was tried with %s", row.name)
		}
	}
	for name, want := range map[string]string{
		"cluster.TestSharedCluster/Run": "go test ./test/cluster -run '^TestSharedCluster$/^Run$'",
		"cluster.TestPeers":             "go test -tags peers ./test/cluster -run '^TestPeers$'",
	} {
		if got, err := commandOf(name); err != nil || got != want {
			t.Errorf("%s: %s, %v, want %s", name, got, err, want)
		}
	}
	for _, name := range []string{"cluster.TestNothing", "cluster.TestSharedCluster/Nothing", "nothing.TestRun"} {
		if command, err := commandOf(name); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %s, %v, want an error", name, command, err)
		}
	}
}
