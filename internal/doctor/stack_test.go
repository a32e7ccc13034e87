package doctor

import (
	"maps"
	"testing"
)

// TestParseStack checks the parsers of /proc/net against excerpts of the kernel's files.
func TestParseStack(t *testing.T) {
	got := make(map[string]uint64)
	parseGroups("Tcp: MaxConn InSegs\nTcp: -1 7\nUdp: InDatagrams InCsumErrors\nUdp: 5 2\nUdpLite: InDatagrams\n", got)
	parseGroups("TcpExt: SyncookiesSent IPReversePathFilter\nTcpExt: 1 42\nIpExt: InNoRoutes\nIpExt: 3\n", got)
	parseNamed("Udp6InErrors                    \t9\nIp6InReceives\nXfrmInNoStates 4\n", got)
	parsePerCPU("entries  insert_failed drop\n000000ff  0000000a 00000001\n000000ff  00000001 00000000\n", "nf_conntrack", got)
	want := map[string]uint64{
		"Tcp.InSegs": 7, "Udp.InDatagrams": 5, "Udp.InCsumErrors": 2, "TcpExt.SyncookiesSent": 1, "TcpExt.IPReversePathFilter": 42, "IpExt.InNoRoutes": 3,
		"Udp6InErrors": 9, "XfrmInNoStates": 4, "nf_conntrack.entries": 510, "nf_conntrack.insert_failed": 11, "nf_conntrack.drop": 1,
	}
	if !maps.Equal(got, want) {
		t.Errorf("read %v, want %v", got, want)
	}
}

// TestGrown checks that a counter that began anew, or is new, is not taken for losses.
func TestGrown(t *testing.T) {
	got := grown(map[string]uint64{"a": 5, "b": 5, "c": 5}, map[string]uint64{"a": 7, "b": 5, "c": 1, "d": 9})
	if !maps.Equal(got, map[string]uint64{"a": 2}) {
		t.Errorf("grew %v", got)
	}
}

func TestSourceOf(t *testing.T) {
	for counter, want := range map[string][2]string{
		"Udp.InCsumErrors": {"/proc/net/snmp", "Udp InCsumErrors"}, "TcpExt.ListenDrops": {"/proc/net/netstat", "TcpExt ListenDrops"}, "IpExt.InNoRoutes": {"/proc/net/netstat", "IpExt InNoRoutes"},
		"Udp6InErrors": {"/proc/net/snmp6", "Udp6InErrors"}, "XfrmInError": {"/proc/net/xfrm_stat", "XfrmInError"}, "nf_conntrack.drop": {"conntrack -S", "drop"},
	} {
		if source, name := sourceOf(counter); [2]string{source, name} != want {
			t.Errorf("%s is %s in %s, want %q", counter, name, source, want)
		}
	}
}

// FuzzParse checks that the parsers return, whatever the kernel writes.
func FuzzParse(f *testing.F) {
	f.Add("TcpExt: A B\nTcpExt: 1\n")
	f.Add("entries drop\n0 1\n")
	f.Add("Udp6InErrors 1\n")
	f.Fuzz(func(_ *testing.T, text string) {
		into := make(map[string]uint64)
		parseGroups(text, into)
		parseNamed(text, into)
		parsePerCPU(text, "group", into)
	})
}
