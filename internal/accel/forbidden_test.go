package accel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestForbidden(t *testing.T) {
	const every = "Name:\tslipstream\nCapEff:\t000001ffffffffff\n"
	for name, tt := range map[string]struct {
		err              error
		status, lockdown string
		want             []string // in the text; if empty, the error stays as it is
	}{
		"something else":   {unix.EINVAL, "CapEff:\t0000000000000000\n", "", nil},
		"no capabilities":  {unix.EPERM, "CapEff:\t0000000000000000\n", "", []string{"lacks CAP_SYS_ADMIN and CAP_NET_ADMIN and CAP_NET_RAW and CAP_SYS_PTRACE and CAP_DAC_OVERRIDE:", "securityContext.capabilities.add"}},
		"one is missing":   {unix.EACCES, "CapEff:\t000001fffffffffd\n", "", []string{"lacks CAP_DAC_OVERRIDE:"}},
		"a seccomp filter": {unix.EPERM, every + "Seccomp:\t2\n", "", []string{"a seccomp filter is on it, which has to permit bpf"}},
		"lockdown":         {unix.EPERM, every + "Seccomp:\t0\n", "none integrity [confidentiality]\n", []string{"boot with lockdown=integrity"}},
		"both":             {unix.EPERM, every + "Seccomp:\t2\n", "none integrity [confidentiality]\n", []string{"seccomp", "lockdown"}},
		"integrity":        {unix.EPERM, every, "none [integrity] confidentiality\n", []string{"AppArmor or SELinux"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			status, lockdown := filepath.Join(dir, "status"), filepath.Join(dir, "lockdown")
			for file, text := range map[string]string{status: tt.status, lockdown: tt.lockdown} {
				if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			err := fmt.Errorf("do: %w", tt.err)
			got := explain(err, status, lockdown)
			if !errors.Is(got, tt.err) || !strings.HasPrefix(got.Error(), err.Error()) || (len(tt.want) == 0) != (got.Error() == err.Error()) {
				t.Errorf("%v of %v", got, err)
			}
			for _, want := range tt.want {
				if !strings.Contains(got.Error(), want) {
					t.Errorf("%v, want %q", got, want)
				}
			}
			if again := explain(fmt.Errorf("again: %w", got), status, lockdown); again.Error() != "again: "+got.Error() {
				t.Errorf("explained twice: %v", again)
			}
		})
	}
}
