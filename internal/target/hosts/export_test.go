package hosts

// Dial has a configuration connect by a test's own means.
func (c Config) Dial(by dialer) Config {
	c.dial = by
	return c
}
