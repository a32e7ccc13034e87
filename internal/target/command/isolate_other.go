//go:build !linux

package command

import "os/exec"

func isolate(*exec.Cmd) {}
