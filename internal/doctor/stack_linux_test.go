package doctor

import (
	"io/fs"
	"testing"
	"testing/fstest"
)

// TestManagers checks which devices doctor takes for managed, by the files of NetworkManager and systemd-networkd. Only a
// program in the same network namespace counts: indexes mean nothing in another.
func TestManagers(t *testing.T) {
	link := func(to string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(to), Mode: fs.ModeSymlink} }
	text := func(s string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(s)} }
	l := looker{proc: fstest.MapFS{
		"thread-self/ns/net": link("net:[1]"),
		"7/comm":             text("NetworkManager\n"), "7/ns/net": link("net:[1]"),
		"7/root/run/NetworkManager/devices/3": text("[device]\nmanaged=true\nconnection-uuid=1\n"),
		"7/root/run/NetworkManager/devices/4": text("[device]\nmanaged=false\n"),
		"8/comm":                              text("systemd-network\n"), "8/ns/net": link("net:[1]"),
		"8/root/run/systemd/netif/links/5": text("# This is private data.\nADMIN_STATE=configured\nNETWORK_FILE=/etc/systemd/network/all.network\n"),
		"8/root/run/systemd/netif/links/6": text("ADMIN_STATE=unmanaged\n"),
		"9/comm":                           text("NetworkManager\n"), "9/ns/net": link("net:[2]"),
		"9/root/run/NetworkManager/devices/9": text("[device]\nmanaged=true\n"),
	}}
	all := l.managers()
	if len(all) != 2 {
		t.Fatalf("found %+v", all)
	}
	got := make(map[int]string)
	for _, m := range all {
		for index := range 10 {
			if file := l.manages(m, index); file != "" {
				got[index] = m.name + " " + file
			}
		}
	}
	if len(got) != 2 || got[3] != "NetworkManager /run/NetworkManager/devices/3" || got[5] != "systemd-networkd /run/systemd/netif/links/5" {
		t.Errorf("managed: %v", got)
	}
}
