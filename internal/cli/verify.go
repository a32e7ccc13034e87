package cli

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"slipstream.dev/internal/bundle"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/words"
)

func verifyCommand(p Process) *cobra.Command {
	return &cobra.Command{
		Use:   "verify BUNDLE|RESULT",
		Short: "Recompute every number and figure of a result from its trials",
		Long: `Compute the metrics of every trial again from what its pairs and hosts measured,
and the summary, the report and the figures from the trials. The first that
differs is named, with exit code 1.

A bundle (slipstream report --bundle) must also have the hashes of its manifest.
They show that it was changed, not who made it: compare its SHA-256 with the one
that slipstream report printed. A results folder has no hashes.`,
		Example: `  slipstream verify demo.zip
  slipstream verify results/demo-20260102T150405Z`,
		Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			v, err := verify(args[0], bundle.This(p.Version))
			if d, differs := errors.AsType[bundle.Difference](err); differs {
				return fmt.Errorf("%s: not verified: %w", args[0], d)
			}
			if err != nil {
				return fmt.Errorf("verify %s: %w", args[0], err)
			}
			printVerified(p.Out, v)
			return nil
		},
	}
}

// verify verifies a bundle, or the folder that a user named.
func verify(path string, this bundle.Program) (bundle.Verified, error) {
	info, err := os.Stat(path)
	if err != nil || info.IsDir() || slices.Contains(resultFiles, filepath.Base(path)) {
		dir, err := openResult(path)
		if err != nil {
			return bundle.Verified{}, err
		}
		defer dir.Close()
		return bundle.Folder(dir, this)
	}
	if !info.Mode().IsRegular() {
		return bundle.Verified{}, usage(errors.New("it is neither a file nor a folder"))
	}
	f, err := os.Open(path)
	if err != nil {
		return bundle.Verified{}, err
	}
	defer f.Close()
	b, err := bundle.Open(f)
	if err != nil {
		return bundle.Verified{}, err
	}
	return b.Verify(this)
}

func printVerified(w io.Writer, v bundle.Verified) {
	if v.Result != "" {
		fmt.Fprintf(w, "%s: every file is as slipstream %s sealed it\nSHA-256 %s\n", v.Result, v.By.Version, v.Hash)
	}
	fmt.Fprintf(w, "%s: the metrics follow from what was measured", words.Count(v.Trials, "trial"))
	if v.Unmeasured > 0 {
		fmt.Fprintf(w, "; %d more failed, or have no counters", v.Unmeasured)
	}
	fmt.Fprintf(w, "\n%s follow from the trials\n", describeFiles(v.Files))
	if len(v.Otherwise) > 0 {
		fmt.Fprintf(w, "not verified: %s; slipstream %s (%s) wrote the result, and this version writes them otherwise\n", describeFiles(v.Otherwise), v.By.Version, v.By.Arch)
	}
}

// describeFiles lists files, and counts the figures.
func describeFiles(names []string) string {
	var all []string
	figures := 0
	for _, name := range names {
		if strings.HasPrefix(name, "figures/") {
			figures++
		} else {
			all = append(all, name)
		}
	}
	if figures > 0 {
		all = append(all, words.Count(figures, "figure"))
	}
	if len(all) == 0 {
		return "no files"
	}
	return words.And(all)
}

// seal writes a bundle atomically.
func seal(dir *record.Dir, file string, p Process) (err error) {
	f, err := os.CreateTemp(filepath.Dir(file), "."+filepath.Base(file)+"-*")
	if err != nil {
		return fmt.Errorf("write bundle: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("write bundle %s: %w", file, err), os.Remove(f.Name()))
		}
	}()
	defer f.Close()
	sum := sha256.New()
	if err := bundle.Seal(io.MultiWriter(f, sum), dir, bundle.This(p.Version)); err != nil {
		return err
	}
	if err := f.Chmod(0o644); err != nil {
		return err
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), file); err != nil {
		return err
	}
	fmt.Fprintf(p.Err, "bundle: %s\nSHA-256 %x\n", file, sum.Sum(nil))
	return nil
}
