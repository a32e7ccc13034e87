package hosts

import "os/exec"

// Begin makes a configuration start ssh by a test's function.
func (c Config) Begin(by func(*exec.Cmd) error) Config {
	c.begin = by
	return c
}

// Alone makes a configuration share no connection, as on Windows.
func (c Config) Alone() Config {
	c.alone = true
	return c
}
