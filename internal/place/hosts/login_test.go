package hosts

import (
	"debug/buildinfo"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/spec"
)

// configured reads an SSH configuration from a new home directory.
func configured(t testing.TB, text string) configuration {
	t.Helper()
	home := t.TempDir()
	if err := os.Mkdir(filepath.Join(home, ".ssh"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(home, ".ssh", "config"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := readConfiguration(home, filepath.Join(home, "machine"))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestLogin(t *testing.T) {
	t.Setenv("SSH_AUTH_SOCK", "/run/agent")
	c := configured(t, `
Host web
  HostName %h.example
  User deploy
  Port 2222
  IdentityFile "~/.ssh/web key"
  IdentityFile ~/.ssh/%r
  IdentitiesOnly yes
  ProxyJump bastion,other@inner:2200
Host bastion
  HostName 192.0.2.1
  IdentityAgent none
  UserKnownHostsFile /etc/keys
Host six
  HostName 2001:db8::1
  HostKeyAlias cluster
Host *
  User everybody
`)
	get := func(h spec.Host) login {
		t.Helper()
		l, err := c.login(h)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	web := get(spec.Host{Name: "web"})
	var route []string
	for _, hop := range web.route() {
		route = append(route, hop.String())
	}
	if diff := cmp.Diff([]string{"everybody@192.0.2.1:22", "other@inner:2200", "deploy@web.example:2222"}, route); diff != "" {
		t.Errorf("route (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{filepath.Join(c.home, ".ssh/web key"), filepath.Join(c.home, ".ssh/deploy")}, web.identities); diff != "" || !web.only || web.named || web.agent != "/run/agent" {
		t.Errorf("keys of web: %+v\n%s", web, diff)
	}
	if bastion := web.jump[0]; bastion.agent != "" || bastion.knownHosts[0] != "/etc/keys" {
		t.Errorf("bastion: %+v", bastion)
	}
	if six := get(spec.Host{Name: "six"}); six.address != "[2001:db8::1]:22" || six.keyName != "cluster:22" {
		t.Errorf("six: %s, its key %s", six.address, six.keyName)
	}
	// The experiment takes precedence over the configuration.
	own := get(spec.Host{Name: "web", Address: "10.0.0.1", User: "me", Port: 22, IdentityFile: "/key"})
	if diff := cmp.Diff([]string{"/key"}, own.identities); diff != "" || own.address != "10.0.0.1:22" || own.user != "me" || !own.named {
		t.Errorf("own: %+v\n%s", own, diff)
	}
}

func TestLoginErrors(t *testing.T) {
	for text, want := range map[string]string{
		"Host h\n ProxyCommand nc %h %p":             "host h: the SSH configuration reaches it by ProxyCommand, which is not supported: use ProxyJump",
		"Host h\n ProxyJump h":                       "leads through more than 8 machines, or in a circle",
		"Host h\n ProxyJump j\nHost j\n ProxyJump h": "leads through more than 8 machines, or in a circle",
		"Host h\n ProxyJump j:99999":                 `port "99999" must be a number from 1 to 65535`,
		"Host h\n ProxyJump a,,b":                    `ProxyJump "" of the SSH configuration names no machine`,
	} {
		if _, err := configured(t, text).login(spec.Host{Name: "h"}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
}

// TestMachineFile: the user's file takes precedence over the machine's. A machine's
// file that cannot be read is ignored.
func TestMachineFile(t *testing.T) {
	for text, want := range map[string]string{
		"Host *\n User machine\n Port 2200": "mine@h:2200",
		"Match final all\n Port 2200":       "mine@h:22",
	} {
		c := configured(t, "Host *\n User mine\n")
		machine := filepath.Join(t.TempDir(), "ssh_config")
		if err := os.WriteFile(machine, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := readConfiguration(c.home, machine)
		if err != nil {
			t.Fatal(err)
		}
		if l, err := c.login(spec.Host{Name: "h"}); err != nil || l.String() != want || (c.leftOut != nil) != (want == "mine@h:22") {
			t.Errorf("%q: %s, %v, left out: %v", text, l, err, c.leftOut)
		}
	}
	// It is an error for the user's own file: without it, the name could mean
	// another host.
	home := configured(t, "").home
	if err := os.WriteFile(filepath.Join(home, ".ssh", "config"), []byte("Match user me\n Port 2200\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readConfiguration(home, filepath.Join(home, "machine")); err == nil || !strings.Contains(err.Error(), `unsupported Match criterion "user"`) {
		t.Errorf("the user's own: %v", err)
	}
}

func FuzzParseJump(f *testing.F) {
	for _, s := range []string{"a", "me@a:22", "[::1]:22", "@", ":", "a@b@c:1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		h, err := parseJump(s)
		if err == nil && (h.Name == "" || h.Port < 0 || h.Port > 65535) {
			t.Errorf("%q is %+v", s, h)
		}
	})
}

// FuzzFacts: a host may answer anything.
func FuzzFacts(f *testing.F) {
	f.Add("folder", "/tmp")
	f.Add("folder", "/home/$(id)")
	f.Add("address", "fe80::1%eth0")
	f.Add("noexec", "/home/me")
	f.Fuzz(func(t *testing.T, word, rest string) {
		facts := facts{name: "h"}
		_ = facts.add(word, rest)
		for _, folder := range facts.folders {
			if strings.ContainsAny(folder, "'\"$`\\\n") {
				t.Errorf("a script would have %q", folder)
			}
		}
	})
}

func TestFitting(t *testing.T) {
	all := []binary{{file: "own", system: "linux", arch: "amd64"}}
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
		case want == "" && (err != nil || b.file != "own"):
			t.Errorf("%s: %v %v", uname, b, err)
		case want != "" && (err == nil || err.Error() != want):
			t.Errorf("%s: %v\nwant %s", uname, err, want)
		}
	}
	// A file that is another Go program, and one that is no program.
	for _, file := range []string{os.Args[0], "login_test.go"} {
		if _, err := binaries([]string{file}); err == nil || !strings.Contains(err.Error(), "--host-binary "+file) {
			info, _ := buildinfo.ReadFile(file)
			t.Errorf("%s (%v): %v", file, info, err)
		}
	}
}
