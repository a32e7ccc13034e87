package cli

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"slipstream.dev/internal/image"
)

func imageCommand(p Process) *cobra.Command {
	c := &cobra.Command{
		Use:   "image",
		Short: "Push the image of agents and workers to a registry",
	}
	var archive string
	var plain bool
	push := &cobra.Command{
		Use:   "push REGISTRY/NAME[:TAG]",
		Short: "Push the image of agents and workers to a registry of yours",
		Long: `Push the image of agents and workers from its archive to a registry of yours,
for all its platforms, and print how to use it from there. It needs neither
Docker nor any other registry, and authenticates as docker login and its
credential helpers have recorded it.`,
		Example: `  slipstream image push registry.example/slipstream
  slipstream image push --archive slipstream_0.1.0_image.tar localhost:5000/slipstream:test`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if err := image.Check(args[0]); err != nil {
				return usage(err)
			}
			if archive == "" {
				var err error
				if archive, err = findArchive(p.Version); err != nil {
					return usage(err)
				}
			}
			pushed, err := image.Push(c.Context(), archive, args[0], plain)
			if err != nil {
				return err
			}
			fmt.Fprintf(p.Out, `%[1]s:%[2]s
%[1]s@%[3]s

slipstream run kubernetes --image %[1]s@%[3]s
helm install … --set image.repository=%[1]s,image.digest=%[3]s
`, pushed.Repository, pushed.Tag, pushed.Digest)
			return nil
		},
	}
	push.Flags().StringVar(&archive, "archive", "", "archive of the image (default: slipstream-image.tar or slipstream_VERSION_image.tar, beside slipstream or here)")
	push.Flags().BoolVar(&plain, "plain-http", false, "speak HTTP to the registry, not HTTPS (default for this machine's loopback interface)")
	c.AddCommand(push)
	return c
}

// findArchive finds the archive of the image, from make image or a release, beside the program or in the working
// directory.
func findArchive(version string) (string, error) {
	dirs := []string{"."}
	if program, err := os.Executable(); err == nil {
		dirs = []string{filepath.Dir(program), "."}
	}
	for _, dir := range dirs {
		for _, name := range []string{"slipstream-image.tar", "slipstream_" + version + "_image.tar"} {
			if _, err := os.Stat(filepath.Join(dir, name)); err == nil {
				return filepath.Join(dir, name), nil
			}
		}
	}
	return "", errors.New("there is no slipstream-image.tar or slipstream_" + version + "_image.tar beside slipstream or here: name it with --archive FILE, or build it with make image")
}
