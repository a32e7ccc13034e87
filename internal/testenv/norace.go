//go:build !race

package testenv

// Race says that the race detector is off.
const Race = false
