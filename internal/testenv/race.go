//go:build race

package testenv

// Race says that the race detector is on. It multiplies the memory that a program takes, so tests that bound memory then only
// run what they measure.
const Race = true
