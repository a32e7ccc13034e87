package journal

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/accel/kernel"
	"slipstream.dev/internal/accel/kernel/kerneltest"
	"slipstream.dev/internal/netns"
)

const (
	queue0 = "class/net/eth0/queues/rx-0/rps_cpus"
	queue1 = "class/net/eth0/queues/rx-1/rps_cpus"
)

func testBook(t *testing.T, proc string, s kernel.Store) *Book {
	t.Helper()
	j, err := Open(filepath.Join(t.TempDir(), "journal"), proc)
	if err != nil {
		t.Fatal(err)
	}
	unlock, err := j.Lock()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(unlock)
	return reopen(t, j, s)
}

func reopen(t *testing.T, j *Journal, s kernel.Store) *Book {
	t.Helper()
	b, err := j.Book(netns.ID{Cookie: 9, Inode: 1}, "node0", s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// again opens b again from its file, as the next process does.
func again(t *testing.T, b *Book) *Book {
	t.Helper()
	j, err := Open(filepath.Dir(b.file), b.proc)
	if err != nil {
		t.Fatal(err)
	}
	return reopen(t, j, b.Store)
}

func TestHolders(t *testing.T) {
	s := &kerneltest.Memory{Values: map[string]string{queue0: "0", queue1: "1"}}
	proc := kerneltest.Proc(t, map[string]string{"7": kerneltest.Stat("S", "42"), "8": kerneltest.Stat("Z", "43"), "9": kerneltest.Stat("S", "50")})
	b := testBook(t, proc, s)
	live, zombie, reused, ended := Holder{"live", 7, 42}, Holder{"zombie", 8, 43}, Holder{"reused", 9, 44}, Holder{"ended", 10, 45}
	keeper := Holder{Owner: "keeper"}
	changes := []Change{{queue0, 2, "0", "3"}, {queue1, 2, "1", "3"}}
	for _, h := range []Holder{zombie, live, reused, ended, keeper} {
		if _, err := b.AddHolder(h, changes); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.Save(); err != nil {
		t.Fatal(err)
	}
	b = again(t, b)
	if _, err := b.Put(changes); err != nil {
		t.Fatal(err)
	}

	if _, err := b.AddHolder(Holder{"other", 7, 42}, []Change{{queue0, 2, "3", "1"}}); !errors.Is(err, ErrHeld) || !strings.Contains(err.Error(), "zombie (process 8) holds it at 3") {
		t.Errorf("another value: %v, want ErrHeld and who holds it", err)
	}

	if restored, err := b.ReleaseDead(); err != nil || restored != nil {
		t.Fatalf("released the dead: %v, %v, want nothing restored", restored, err)
	}
	if d := cmp.Diff([]Holder{live, keeper}, again(t, b).Entries[0].Holders); d != "" {
		t.Errorf("holders left: %s", d)
	}

	for i, h := range []Holder{live, keeper} {
		b = again(t, b)
		restored, err := b.ReleaseHolder(h)
		if err != nil {
			t.Fatal(err)
		}
		if want := 2 * i; len(restored) != want {
			t.Errorf("release %s: %d restored, want %d", h, len(restored), want)
		}
	}
	if d := cmp.Diff(map[string]string{queue0: "0", queue1: "1"}, s.Values); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff([]string{queue0 + "=3", queue1 + "=3", queue1 + "=1", queue0 + "=0"}, s.Writes); d != "" {
		t.Errorf("order of Writes: %s", d)
	}
	if _, err := os.Stat(b.file); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("journal after the last release: %v, want none", err)
	}
}

func TestRestore(t *testing.T) {
	for _, tt := range []struct {
		name   string
		now    string
		got    string
		fail   error
		want   string // value afterwards
		wrote  bool
		err    error
		remain bool
	}{
		{name: "ours", now: "3", want: "0", wrote: true},
		{name: "never written", now: "0", want: "0"},
		{name: "changed by somebody", now: "2", want: "2", err: ErrChanged},
		{name: "read back otherwise", now: "1", got: "1", want: "0", wrote: true},
		{name: "read back otherwise, then changed", now: "2", got: "1", want: "2", err: ErrChanged},
		{name: "device gone", now: "gone"},
		{name: "device went just now", now: "3", fail: syscall.ENODEV, want: "3"},
		{name: "not allowed", now: "3", fail: os.ErrPermission, want: "3", err: os.ErrPermission, remain: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := &kerneltest.Memory{Values: map[string]string{queue0: tt.now}, Fail: map[string]error{queue0: tt.fail}}
			if tt.now == "gone" {
				delete(s.Values, queue0)
			}
			b := testBook(t, kerneltest.Proc(t, nil), s)
			h := Holder{"run", 7, 42}
			if _, err := b.AddHolder(h, []Change{{queue0, 2, "0", "3"}}); err != nil {
				t.Fatal(err)
			}
			b.Find(queue0).Got = tt.got
			if err := b.Save(); err != nil {
				t.Fatal(err)
			}
			b = again(t, b)
			restored, err := b.ReleaseDead()
			if !errors.Is(err, tt.err) || (err == nil) != (tt.err == nil) {
				t.Errorf("error %v, want %v", err, tt.err)
			}
			if (len(restored) == 1) != tt.wrote || s.Values[queue0] != tt.want {
				t.Errorf("restored %v to %q, want %v and %q", restored, s.Values[queue0], tt.wrote, tt.want)
			}
			if left := again(t, b).Entries; (len(left) == 1) != tt.remain {
				t.Errorf("journal still has %v, want it to: %v", left, tt.remain)
			}
		})
	}
}

// TestRestoreRenamed checks that a device that is renamed after the ledger was
// read is restored under its new name, and that one that is really gone is not.
func TestRestoreRenamed(t *testing.T) {
	const later = "class/net/ens5/queues/rx-0/rps_cpus"
	s := &kerneltest.Memory{Values: map[string]string{later: "3"}}
	b := testBook(t, kerneltest.Proc(t, nil), s)
	b.names = func([]int) (map[int]string, error) { return map[int]string{2: "ens5"}, nil }
	if _, err := b.AddHolder(Holder{"run", 7, 42}, []Change{{queue0, 2, "0", "3"}, {"class/net/veth1/queues/rx-0/rps_cpus", 3, "0", "3"}}); err != nil {
		t.Fatal(err)
	}
	restored, err := b.ReleaseDead()
	if err != nil || len(restored) != 1 || s.Values[later] != "0" {
		t.Errorf("restored %v to %v, %v, want one and 0", restored, s.Values, err)
	}
}

func TestPutMisread(t *testing.T) {
	s := &kerneltest.Memory{Values: map[string]string{queue0: "0"}, Mangle: map[string]string{queue0: "1"}}
	b := testBook(t, kerneltest.Proc(t, nil), s)
	changes := []Change{{queue0, 2, "0", "3"}}
	if _, err := b.AddHolder(Holder{"run", 7, 42}, changes); err != nil {
		t.Fatal(err)
	}
	settings, err := b.Put(changes)
	if err != nil || len(settings) != 1 || settings[0].Got != "1" || settings[0].Want != "3" {
		t.Fatalf("put: %v, %v, want 3 that reads 1", settings, err)
	}
	if err := b.Save(); err != nil {
		t.Fatal(err)
	}
	if _, err := again(t, b).ReleaseDead(); err != nil || s.Values[queue0] != "0" {
		t.Errorf("restored to %q, %v, want 0", s.Values[queue0], err)
	}
}

func TestOtherBoot(t *testing.T) {
	s := &kerneltest.Memory{Values: map[string]string{queue0: "3"}}
	b := testBook(t, kerneltest.Proc(t, nil), s)
	if _, err := b.AddHolder(Holder{"run", 7, 42}, []Change{{queue0, 2, "0", "3"}}); err != nil {
		t.Fatal(err)
	}
	b.Boot = "an earlier one"
	if err := b.Save(); err != nil {
		t.Fatal(err)
	}
	b = again(t, b)
	if _, err := b.ReleaseDead(); err != nil || s.Values[queue0] != "3" {
		t.Errorf("%q, %v, want the setting of another boot left alone", s.Values[queue0], err)
	}
	if _, err := os.Stat(b.file); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("journal of another boot: %v, want it gone", err)
	}
}

const goodLedger = `{"version":1,"boot":"boot","place":"node0","cookie":9,"inode":1,"entries":[
	{"path":"class/net/eth0/queues/rx-0/rps_cpus","link":2,"was":"0","want":"3","holders":[{"owner":"run","pid":7,"start":42}]}]}`

func TestDamagedJournal(t *testing.T) {
	if _, err := decodeLedger([]byte(goodLedger)); err != nil {
		t.Fatal(err)
	}
	for name, replace := range map[string][2]string{
		"empty":            {goodLedger, ""},
		"torn":             {`"holders":[{"owner":"run"`, "\x00\x00"},
		"two of them":      {goodLedger, goodLedger + goodLedger},
		"unknown field":    {`"link":2`, `"link":2,"more":1`},
		"newer":            {`"version":1`, `"version":2`},
		"no boot":          {`"boot":"boot"`, `"boot":""`},
		"no link":          {`"link":2`, `"link":0`},
		"other file":       {"eth0/queues/rx-0/rps_cpus", "eth0/queues/rx-0/rps_dev"},
		"other folder":     {"class/net/eth0/queues/rx-0/rps_cpus", "class/net/eth0/mtu"},
		"way out":          {"eth0", ".."},
		"no queue":         {"rx-0", "rx-"},
		"transmit queue":   {"rx-0", "tx-0"},
		"no mask":          {`"was":"0"`, `"was":"0x1"`},
		"no value":         {`"was":"0"`, `"was":""`},
		"no number":        {`rps_cpus","link":2,"was":"0"`, `rps_flow_cnt","link":2,"was":"f"`},
		"nobody":           {`{"owner":"run","pid":7,"start":42}`, ""},
		"no owner":         {`"run"`, `""`},
		"no start":         {`"start":42`, `"start":0`},
		"of the machine":   {`"cookie":9,`, ``},
		"other namespace":  {`"cookie":9`, `"cookie":8`},
		"the entry, twice": {`]}]}`, `]},` + goodLedger[strings.Index(goodLedger, `{"path"`):]},
	} {
		t.Run(name, func(t *testing.T) {
			text := strings.Replace(goodLedger, replace[0], replace[1], 1)
			if text == goodLedger {
				t.Fatal("nothing was damaged")
			}
			dir := t.TempDir()
			file := filepath.Join(dir, "netns-9.json")
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			j, err := Open(dir, kerneltest.Proc(t, nil))
			if err != nil {
				t.Fatal(err)
			}
			if _, err = j.Book(netns.ID{Cookie: 9}, "node0", &kerneltest.Memory{}); err == nil || !strings.Contains(err.Error(), file) {
				t.Errorf("error %v, want one that names the file", err)
			}
			if b, err := os.ReadFile(file); err != nil || string(b) != text {
				t.Errorf("the file was touched: %q, %v", b, err)
			}
		})
	}
}

func FuzzLedger(f *testing.F) {
	f.Add([]byte(goodLedger))
	f.Add([]byte(`{"version":1,"boot":"b","place":"machine","entries":[{"path":"` + kernel.FlowTable + `","was":"0","want":"32768","holders":[{"owner":"cli"}]}]}`))
	f.Add([]byte(`{}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		l, err := decodeLedger(b)
		if err != nil {
			return
		}
		for _, e := range l.Entries {
			if !filepath.IsLocal(e.Path) {
				t.Errorf("%q leads out", e.Path)
			}
		}
		text, err := json.Marshal(l)
		if err != nil {
			t.Fatal(err)
		}
		l2, err := decodeLedger(text)
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		if d := cmp.Diff(l, l2, cmp.AllowUnexported(ledger{})); d != "" {
			t.Error(d)
		}
	})
}

// TestCrashAtEveryStep crashes an apply and revert at each operation on a setting in turn, with and without a second, living
// holder of the machine's table.
func TestCrashAtEveryStep(t *testing.T) {
	for _, shared := range []bool{false, true} {
		for steps := 0; ; steps++ {
			if crashed := crashAfter(t, steps, shared); !crashed {
				if steps < 12 {
					t.Errorf("apply and revert took %d steps, want more", steps)
				}
				break
			}
		}
	}
}

func crashAfter(t *testing.T, steps int, shared bool) (crashed bool) {
	t.Helper()
	table := &kerneltest.Memory{Values: map[string]string{kernel.FlowTable: "0"}}
	queues := &kerneltest.Memory{Values: map[string]string{queue0: "0", queue1: "2"}}
	j, err := Open(t.TempDir(), kerneltest.Proc(t, map[string]string{"7": kerneltest.Stat("S", "42")}))
	if err != nil {
		t.Fatal(err)
	}
	books := func(left *int) (machine, place *Book) {
		machine, err1 := j.Book(netns.ID{}, "machine", kerneltest.Crash{Store: table, Left: left})
		place, err2 := j.Book(netns.ID{Cookie: 9}, "node0", kerneltest.Crash{Store: queues, Left: left})
		if err := errors.Join(err1, err2); err != nil {
			t.Fatalf("after %d steps: %v", steps, err)
		}
		return machine, place
	}
	never := 1000
	entries := []Change{{kernel.FlowTable, 0, "0", "1024"}}
	living := Holder{"living", 7, 42}
	if shared {
		machine, _ := books(&never)
		if _, err := Set(living, Changes{machine, entries}); err != nil {
			t.Fatal(err)
		}
		entries[0].Was = "1024"
	}

	dying := Holder{"dying", 8, 43}
	func() {
		defer func() {
			if r := recover(); r != nil {
				if _, ok := r.(kerneltest.Crash); !ok {
					panic(r)
				}
				crashed = true
			}
		}()
		machine, place := books(&steps)
		_, err := Set(dying, Changes{machine, entries}, Changes{place, []Change{{queue0, 2, "0", "3"}, {queue1, 2, "2", "3"}}})
		for _, b := range []*Book{place, machine} {
			_, released := b.ReleaseHolder(dying)
			err = errors.Join(err, released)
		}
		if err != nil {
			t.Error(err)
		}
	}()

	machine, place := books(&never)
	for _, b := range []*Book{place, machine} {
		if _, err := b.ReleaseDead(); err != nil {
			t.Errorf("recover: %v", err)
		}
	}
	if d := cmp.Diff(map[string]string{queue0: "0", queue1: "2"}, queues.Values); d != "" {
		t.Errorf("queues: %s", d)
	}
	if shared {
		if table.Values[kernel.FlowTable] != "1024" {
			t.Errorf("the table reads %s while it is held at 1024", table.Values[kernel.FlowTable])
		}
		if _, err := machine.ReleaseHolder(living); err != nil {
			t.Error(err)
		}
	}
	if table.Values[kernel.FlowTable] != "0" {
		t.Errorf("the table reads %s, want 0", table.Values[kernel.FlowTable])
	}
	if files, _ := filepath.Glob(filepath.Join(j.dir, "*.json")); files != nil {
		t.Errorf("left in the journal: %v", files)
	}
	return crashed
}

func TestSetIsUndone(t *testing.T) {
	table := &kerneltest.Memory{Values: map[string]string{kernel.FlowTable: "0"}}
	queues := &kerneltest.Memory{Values: map[string]string{queue0: "0", queue1: "0"}, Fail: map[string]error{queue1: syscall.EIO}}
	j, err := Open(t.TempDir(), kerneltest.Proc(t, map[string]string{"7": kerneltest.Stat("S", "42")}))
	if err != nil {
		t.Fatal(err)
	}
	machine, err := j.Book(netns.ID{}, "machine", table)
	if err != nil {
		t.Fatal(err)
	}
	place, err := j.Book(netns.ID{Cookie: 9}, "node0", queues)
	if err != nil {
		t.Fatal(err)
	}
	h := Holder{"run", 7, 42}
	_, err = Set(h, Changes{machine, []Change{{kernel.FlowTable, 0, "0", "1024"}}}, Changes{place, []Change{{queue0, 2, "0", "3"}, {queue1, 2, "0", "3"}}})
	if !errors.Is(err, syscall.EIO) || !strings.Contains(err.Error(), queue1) {
		t.Errorf("error %v, want EIO and what it was about", err)
	}
	if d := cmp.Diff([]string{"0", "0", "0"}, []string{table.Values[kernel.FlowTable], queues.Values[queue0], queues.Values[queue1]}); d != "" {
		t.Errorf("not undone: %s", d)
	}
	if files, _ := filepath.Glob(filepath.Join(j.dir, "*.json")); files != nil {
		t.Errorf("left in the journal: %v", files)
	}

	// Settings that an earlier call holds stay.
	if _, err := Set(h, Changes{place, []Change{{queue0, 2, "0", "3"}}}); err != nil {
		t.Fatal(err)
	}
	if _, err := Set(h, Changes{place, []Change{{queue0, 2, "3", "3"}, {queue1, 2, "0", "3"}}}); !errors.Is(err, syscall.EIO) {
		t.Errorf("error %v, want EIO", err)
	}
	if queues.Values[queue0] != "3" || reopen(t, j, queues).Find(queue0) == nil {
		t.Errorf("what was held before reads %s, want 3, in the journal", queues.Values[queue0])
	}
}

// TestUnfinished checks that the file of a process that was killed while it wrote a ledger is removed when the journal is next
// locked, even if there is nothing else to do.
func TestUnfinished(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, unfinished), []byte(`{"version"`), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := With(dir, kerneltest.Proc(t, nil), func(*Journal) error { return nil }); err != nil {
		t.Fatal(err)
	}
	if files, _ := filepath.Glob(filepath.Join(dir, "*.json*")); files != nil {
		t.Errorf("left: %v", files)
	}
}
