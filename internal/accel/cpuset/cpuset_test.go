package cpuset

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/testenv"
)

// first returns CPUs 0 to n-1.
func first(n int) Set {
	var s Set
	for cpu := range n {
		s.add(cpu)
	}
	return s
}

func TestMask(t *testing.T) {
	for _, tt := range []struct {
		cpus       Set
		mask, list string
		kernel     string // the mask as the kernel prints it on such a machine
		like       string
	}{
		{first(1), "1", "0", "0", "1"},
		{first(2), "3", "0-1", "0", "3"},
		{first(7), "7f", "0-6", "00", "7f"},
		{New(0), "1", "0", "00", "01"},
		{first(32), "ffffffff", "0-31", "00000000", "ffffffff"},
		{first(33), "1,ffffffff", "0-32", "0,00000000", "1,ffffffff"},
		{New(1), "2", "1", "0,00000000", "0,00000002"},
		{first(64), "ffffffff,ffffffff", "0-63", "00000000,00000000", "ffffffff,ffffffff"},
		{New(0, 1, 2, 3, 8, 63), "80000000,0000010f", "0-3,8,63", "00000000,00000000", "80000000,0000010f"},
		{first(130), "3,ffffffff,ffffffff,ffffffff,ffffffff", "0-129", "0,00000000,00000000,00000000,00000000",
			"3,ffffffff,ffffffff,ffffffff,ffffffff"},
		{New(129), "2,00000000,00000000,00000000,00000000", "129", "0,00000000,00000000,00000000,00000000",
			"2,00000000,00000000,00000000,00000000"},
		{New(33), "2,00000000", "33", "000,00000000,00000000", "000,00000002,00000000"},
		{New(), "0", "", "0,00000000", "0,00000000"},
	} {
		if got := tt.cpus.Mask(); got != tt.mask {
			t.Errorf("mask of %s: %s, want %s", tt.list, got, tt.mask)
		}
		if got := tt.cpus.String(); got != tt.list {
			t.Errorf("list of %s: %s, want %s", tt.mask, got, tt.list)
		}
		if got := tt.cpus.MaskLike(tt.kernel); got != tt.like {
			t.Errorf("mask of %s like %s: %s, want %s", tt.list, tt.kernel, got, tt.like)
		}
		for _, mask := range []string{tt.mask, tt.like + "\n", strings.ToUpper(tt.like)} {
			if got, err := ParseMask(mask); err != nil || !got.Equal(tt.cpus) {
				t.Errorf("parse mask %q: %s, %v, want %s", mask, got, err, tt.list)
			}
		}
		if got, err := ParseList(tt.list + "\n"); err != nil || !got.Equal(tt.cpus) {
			t.Errorf("parse list %q: %s, %v", tt.list, got, err)
		}
	}
}

func TestParseErrors(t *testing.T) {
	for _, list := range []string{"a", "1,", ",", "3-1", "-1", "1-", "0-8192", "99999999999999", "0-3:1/2", "0x1", "+1"} {
		if s, err := ParseList(list); err == nil {
			t.Errorf("list %q: %s, want an error", list, s)
		}
	}
	for _, mask := range []string{"", "g", "1,", ",1", "123456789", "0x1", "+1", "-1", strings.Repeat("0,", 256) + "1"} {
		if s, err := ParseMask(mask); err == nil {
			t.Errorf("mask %q: %s, want an error", mask, s)
		}
	}
}

func TestResolve(t *testing.T) {
	eight := MachineCPUs{Online: first(8), Isolated: New(2, 7)}
	for _, tt := range []struct {
		name      string
		spec      string
		machine   MachineCPUs
		node, irq Set
		want      string
		err       string
	}{
		{"all", "all", MachineCPUs{Online: first(4)}, Set{}, Set{}, "0-3", ""},
		{"all but isolated", "all", eight, Set{}, Set{}, "0-1,3-6", ""},
		{"all of the node", "all", eight, New(1, 2, 3), Set{}, "1,3", ""},
		{"node with an offline CPU", "all", MachineCPUs{Online: New(0, 2)}, first(4), Set{}, "0,2", ""},
		{"all isolated", "all", MachineCPUs{Online: first(2), Isolated: first(2)}, Set{}, Set{}, "", "none of 0-1"},
		{"all but the given irq", "all-but-irq", MachineCPUs{Online: first(4)}, Set{}, New(0), "1-3", ""},
		{"all but the last", "all-but-irq", MachineCPUs{Online: first(4)}, Set{}, Set{}, "0-2", ""},
		{"all but the node's last", "all-but-irq", MachineCPUs{Online: first(8)}, New(4, 5), Set{}, "4", ""},
		{"all but the last that is not isolated", "all-but-irq", eight, Set{}, Set{}, "0-1,3-5", ""},
		{"one CPU takes the irq", "all-but-irq", MachineCPUs{Online: first(1)}, Set{}, Set{}, "", "no CPU of \"0\" is left beside 0"},
		{"130 CPUs", "all-but-irq", MachineCPUs{Online: first(130)}, Set{}, Set{}, "0-128", ""},
		{"list", "0-1,3", eight, Set{}, Set{}, "0-1,3", ""},
		{"list outside the node", "5", eight, New(0, 1), Set{}, "5", ""},
		{"list offline", "0-9", eight, Set{}, Set{}, "", "8-9 not online; online are 0-7"},
		{"list isolated", "1-2", eight, Set{}, Set{}, "", "2 isolated"},
		{"empty", "", eight, Set{}, Set{}, "", "it is empty"},
		{"no such name", "most", eight, Set{}, Set{}, "", "want all, all-but-irq or a list"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := Resolve(tt.spec, tt.machine, tt.node, tt.irq)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Fatalf("got %q, error %v, want one with %q", got, err, tt.err)
				}
				return
			}
			if err != nil || got.String() != tt.want {
				t.Errorf("got %q, %v, want %q", got, err, tt.want)
			}
		})
	}
}

func TestMachineCPUs(t *testing.T) {
	for _, tt := range []struct {
		name  string
		files map[string]string
		want  MachineCPUs
	}{
		{"plain", map[string]string{"online": "0-3\n", "isolated": "\n", "nohz_full": "(null)\n"}, MachineCPUs{Online: first(4)}},
		{"isolated", map[string]string{"online": "0-32\n", "isolated": "2-3\n", "nohz_full": "3-4\n"},
			MachineCPUs{Online: first(33), Isolated: New(2, 3, 4)}},
		{"kernel without isolation", map[string]string{"online": "0\n"}, MachineCPUs{Online: first(1)}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			root := t.TempDir()
			for name, text := range tt.files {
				testenv.WriteFile(t, filepath.Join(root, "devices/system/cpu", name), text)
			}
			got, err := Machine(openRoot(t, root))
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Error(d)
			}
		})
	}
	if _, err := Machine(openRoot(t, t.TempDir())); err == nil {
		t.Error("a sysfs without CPUs is no error")
	}
}

func FuzzParseList(f *testing.F) {
	for _, s := range []string{"", "0", "0-3,8\n", "8191", "3-1", "0-3:1/2", "1,1,0"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, list string) {
		s, err := ParseList(list)
		if err != nil {
			return
		}
		if again, err := ParseList(s.String()); err != nil || !again.Equal(s) {
			t.Errorf("%q is %q, which parses to %q, %v", list, s, again, err)
		}
	})
}

func FuzzParseMask(f *testing.F) {
	for _, s := range []string{"0", "3\n", "ff,ffffffff", "0,00000000,00000001", ",", "123456789"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, mask string) {
		s, err := ParseMask(mask)
		if err != nil {
			return
		}
		for _, text := range []string{s.Mask(), s.MaskLike(strings.TrimSpace(mask))} {
			if again, err := ParseMask(text); err != nil || !again.Equal(s) {
				t.Errorf("%q is %q, formatted %q, which parses to %q, %v", mask, s, text, again, err)
			}
		}
		if fromList, err := ParseList(s.String()); err != nil || !fromList.Equal(s) {
			t.Errorf("%q is %q as a list, which parses to %q, %v", mask, s, fromList, err)
		}
	})
}

func openRoot(t *testing.T, dir string) *os.Root {
	t.Helper()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { root.Close() })
	return root
}
