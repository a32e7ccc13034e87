package hosts

import (
	"strings"
	"testing"
)

// TestHungUp: whatever ssh says if the server ends the connection before the login, the error says where to look for the reason. Which
// sentence it is depends on what ssh was doing just then.
func TestHungUp(t *testing.T) {
	for said, hungUp := range map[string]bool{
		"":                                      true,
		"Connection closed by 10.9.0.1 port 22": true,
		"Connection reset by 10.9.0.1 port 22":  true,
		"kex_exchange_identification: read: Connection reset by peer":                 true,
		"ssh_dispatch_run_fatal: Connection to 10.9.0.1 port 22: Broken pipe":         true,
		"ssh_dispatch_run_fatal: Connection to 10.9.0.1 port 22: incorrect signature": false,
		"ssh: connect to host 10.9.0.1 port 22: Connection refused":                   false,
	} {
		err := (&host{name: "a"}).unreachable(said)
		if got := strings.Contains(err.Error(), "LoginGraceTime"); got != hungUp {
			t.Errorf("%q: %v", said, err)
		}
	}
}
