package record

// A folder cannot be locked or synced on Windows. So nothing keeps two processes from resuming one run there, and
// a crash of the machine may take the newest names (docs/how-to/hosts.md).

func lock(string) (func() error, error) { return func() error { return nil }, nil }

func syncDir(string) error { return nil }
