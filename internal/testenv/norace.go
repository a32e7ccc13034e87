//go:build !race

package testenv

// Race reports that the race detector is off.
const Race = false
