//go:build race

package testenv

// Race reports that the race detector is on. It multiplies the memory that a program takes, so tests that bound memory skip
// their checks and only run the measured code.
const Race = true
