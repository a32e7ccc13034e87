package hosts

// Dial makes a configuration connect through a test's dialer.
func (c Config) Dial(by dialer) Config {
	c.dial = by
	return c
}
