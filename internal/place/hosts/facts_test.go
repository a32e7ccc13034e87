package hosts

import (
	"strings"
	"testing"

	"slipstream.dev/internal/place/build"
)

// FuzzFacts checks that a host may report anything.
func FuzzFacts(f *testing.F) {
	f.Add("folder", "/tmp")
	f.Add("folder", "/home/$(id)")
	f.Add("address", "fe80::1%eth0")
	f.Add("noexec", "/home/me")
	f.Add("room", "12 /home/me")
	f.Add("room", "99999999999999999999 /tmp")
	f.Add("machine", "b net:[1] 02:fc:00:00:00:01,")
	f.Add("refused", "sudo: a password is required")
	f.Fuzz(func(t *testing.T, word, rest string) {
		facts := facts{name: "h"}
		_ = facts.add(word, rest)
		facts.choose(1 << 20)
		for _, folder := range facts.folders {
			if strings.ContainsAny(folder, "'\"$`\\\n") {
				t.Errorf("a script would have %q", folder)
			}
		}
	})
}

// TestNoRoot checks that each known refusal of sudo has its own remedy, and that an unknown one is quoted.
func TestNoRoot(t *testing.T) {
	for said, want := range map[string]string{
		"sudo: a password is required":                                           "wants a password from the user, or lets the user do nothing: allow it without one",
		"sudo: interactive authentication is required":                           "wants a password from the user, or lets the user do nothing: allow it without one", // sudo-rs
		"sudo: sorry, you must have a tty to run sudo":                           "refuses commands without a terminal: exempt the user",
		"Sorry, user me is not allowed to execute '/usr/bin/true' as root on b.": "does not let the user run every command: allow them all",
		"me is not in the sudoers file.":                                         "does not let the user run every command: allow them all",
		"sudo: /usr/bin/sudo must be owned by uid 0 and have the setuid bit set": "sudo there fails (sudo: /usr/bin/sudo must be owned by uid 0 and have the setuid bit set): repair it",
		"/bin/sh: 1: /bin/sh: Permission denied":                                 "lets no command start another (NOEXEC): allow it",
		"":                                                                       "sudo there fails (it says nothing): repair it",
	} {
		f := facts{refused: said}
		if got := f.noRoot(); !strings.Contains(got, want) {
			t.Errorf("%q: %s, want %s", said, got, want)
		}
	}
}

func TestFitting(t *testing.T) {
	all := []build.Build{{File: "own", System: "linux", Arch: "amd64"}}
	for uname, want := range map[string]string{
		"Linux x86_64":  "",
		"Linux aarch64": "host h needs a build of this program for linux/arm64, and none was found: build one (make image leaves bin/image/arm64/slipstream) and name it with --host-binary",
		"Linux riscv64": "host h is of the architecture riscv64; there are builds of this program for Linux on x86_64 and aarch64",
		"Windows ARM64": "host h is of the architecture ARM64; there are builds of this program for Windows on AMD64",
		"Windows AMD64": "host h needs a build of this program for windows/amd64, and none was found: build one (make windows leaves bin/slipstream.exe) and name it with --host-binary",
		"Darwin arm64":  "host h runs Darwin arm64, and a worker needs Linux or Windows: name another host",
	} {
		b, err := fitting(all, "h", uname)
		switch {
		case want == "" && (err != nil || b.File != "own"):
			t.Errorf("%s: %v %v", uname, b, err)
		case want != "" && (err == nil || err.Error() != want):
			t.Errorf("%s: %v\nwant %s", uname, err, want)
		}
	}
}
