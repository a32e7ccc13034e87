//go:build linux

package main

import (
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// manual writes what packages have beside the programs: a manual page of every command, and completions of shells. The date
// of the pages is that of SOURCE_DATE_EPOCH.
func manual(dir string) error {
	root := commands()
	man, completions := filepath.Join(dir, "man"), filepath.Join(dir, "completions")
	for _, folder := range []string{man, completions} {
		if err := os.MkdirAll(folder, 0o755); err != nil {
			return err
		}
	}
	eachCommand(root, func(c *cobra.Command) { c.DisableAutoGenTag = true })
	if err := doc.GenManTree(root, &doc.GenManHeader{Source: "slipstream", Manual: "slipstream"}, man); err != nil {
		return err
	}
	for file, write := range map[string]func(string) error{
		"slipstream.bash": func(file string) error { return root.GenBashCompletionFileV2(file, true) },
		"slipstream.zsh":  root.GenZshCompletionFile,
		"slipstream.fish": func(file string) error { return root.GenFishCompletionFile(file, true) },
		"slipstream.ps1":  root.GenPowerShellCompletionFileWithDesc,
	} {
		if err := write(filepath.Join(completions, file)); err != nil {
			return err
		}
	}
	return nil
}

func eachCommand(c *cobra.Command, do func(*cobra.Command)) {
	do(c)
	for _, sub := range c.Commands() {
		eachCommand(sub, do)
	}
}
