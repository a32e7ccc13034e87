package cli

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"slipstream.dev/internal/history"
	"slipstream.dev/internal/place/kube"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/report"
	"slipstream.dev/internal/serve"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
)

type serveOptions struct {
	listen, tokenFile string
	fleet             bool
	access            kube.Access
}

func serveCommand(p Process) *cobra.Command {
	var o serveOptions
	c := &cobra.Command{
		Use:   "serve [RESULTS]",
		Short: "Show a folder of results in a browser, and watch the run under way",
		Long: `Show a folder of results in a browser: a list to search, each report, two
results side by side, the trend of a metric, and the run under way, whoever
started it. RESULTS is results by default. Its pages need nothing from
elsewhere.

It serves this machine alone, without a password: all its users can read. Any
other address needs --token-file. With a token, its pages can also pause and
stop a run. The connection is not encrypted, so rather use ssh -L.

--fleet adds a page of a cluster's policies and nodes, read with your
kubeconfig.`,
		Example: `  slipstream serve
  ssh -L 7788:127.0.0.1:7788 HOST slipstream serve /var/lib/results     then open http://127.0.0.1:7788
  slipstream serve --listen 0.0.0.0:7788 --token-file token
  slipstream serve --fleet --context prod`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error { return o.run(c.Context(), p, args) },
	}
	f := c.Flags()
	f.StringVar(&o.listen, "listen", "127.0.0.1:7788", "address and port; port 0 is any free one")
	f.StringVar(&o.tokenFile, "token-file", "", "a file with the token that reading, pausing and stopping need, of 16 characters or more")
	f.BoolVar(&o.fleet, "fleet", false, "also show the policies and nodes of a cluster")
	addClusterFlags(f, &o.access)
	return c
}

// readFleet returns a function that reads the fleet of a cluster, or nil without --fleet.
func (o serveOptions) readFleet() (serve.Fleet, error) {
	if !o.fleet {
		if o.access != (kube.Access{}) {
			return nil, errors.New("--kubeconfig and --context are for --fleet")
		}
		return nil, nil
	}
	cluster, err := kube.Open(o.access)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) (*report.Fleet, error) {
		f, err := cluster.Fleet(ctx)
		if err != nil {
			return nil, err
		}
		var repairs []report.Repair
		for _, r := range f.Repairs {
			repairs = append(repairs, report.Repair(r))
		}
		return report.NewFleet(f.Policies, f.Nodes, repairs, f.Unread, time.Now()), nil
	}, nil
}

func (o serveOptions) run(ctx context.Context, p Process, args []string) error {
	folder, err := openHistory(args)
	if err != nil {
		return err
	}
	token, err := o.token()
	if err != nil {
		return usage(err)
	}
	fleet, err := o.readFleet()
	if err != nil {
		return usage(err)
	}
	listener, err := net.Listen("tcp", o.listen)
	if err != nil {
		return fmt.Errorf("%w; --listen 127.0.0.1:0 takes any free port", err)
	}
	defer listener.Close()
	server := serve.New(folder, results{}, fleet, cmp.Or(plugin(p.Args[0]), p.Args[0]), token)
	at := "http://" + reachable(listener.Addr())
	fmt.Fprintf(p.Out, "%s is at %s/   (Ctrl-C ends)\n", folder.Path(), at)
	if link := server.LinkPath(); link != "" {
		fmt.Fprintf(p.Out, "Without typing the token, once: %s%s\n", at, link)
	}
	return server.Run(ctx, func(s *http.Server) error { return s.Serve(listener) })
}

// reachable returns the address of a listener for people. If it listens at all addresses, that is the name of this
// machine.
func reachable(listens net.Addr) string {
	at, ok := listens.(*net.TCPAddr)
	name, err := os.Hostname()
	if !ok || !at.IP.IsUnspecified() || err != nil {
		return listens.String()
	}
	return net.JoinHostPort(name, strconv.Itoa(at.Port))
}

// token returns the token that reading needs, or "" if only this machine can read.
func (o serveOptions) token() (string, error) {
	if o.tokenFile == "" {
		if !serve.Loopback(o.listen) {
			return "", fmt.Errorf("--listen %s: other machines may read there only with a token: add --token-file", o.listen)
		}
		return "", nil
	}
	data, err := os.ReadFile(o.tokenFile)
	if err != nil {
		return "", fmt.Errorf("--token-file: %w", err)
	}
	token := strings.TrimSpace(string(data))
	if len(token) < 16 {
		return "", fmt.Errorf("--token-file %s: the token has %d characters, and needs at least 16; openssl rand -hex 16 makes one", o.tokenFile, len(token))
	}
	return token, nil
}

// results computes what the pages of results show.
type results struct{}

func (results) Experiment(dir *record.Dir) (*spec.Experiment, error) { return experimentOf(dir) }

func (results) Report(dir *record.Dir) (*report.Model, error) { return loadReport(dir) }

func (results) Beside(before, after *record.Dir) (report.Beside, error) {
	dirs := [2]*record.Dir{before, after}
	var both [2]stats.Result
	for i, dir := range dirs {
		var err error
		if both[i], err = readResult(dir); err != nil {
			return report.Beside{}, err
		}
	}
	return besideOf(dirs, both)
}

// writeIndex writes the list and the trends of a folder of results into it.
func writeIndex(p Process, path string) error {
	folder, err := history.Open(path)
	if err != nil {
		return usage(err)
	}
	root, err := os.OpenRoot(path)
	if err != nil {
		return err
	}
	defer root.Close()
	err = serve.WriteIndex(folder, func(name string, write func(io.Writer) error) error {
		return writeInRoot(root, name, write)
	})
	if err != nil {
		return fmt.Errorf("write the index of %s: %w", path, err)
	}
	fmt.Fprintln(p.Out, "Index:", filepath.Join(path, "index.html"))
	return nil
}

// writeInRoot replaces a file atomically. It replaces a symbolic link too, and does not follow it.
func writeInRoot(root *os.Root, name string, write func(io.Writer) error) error {
	temp := "." + name + "." + rand.Text()
	f, err := root.OpenFile(temp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer func() { _ = root.Remove(temp) }() // renamed by then, unless something failed
	if err := errors.Join(write(f), f.Close()); err != nil {
		return err
	}
	return root.Rename(temp, name)
}
