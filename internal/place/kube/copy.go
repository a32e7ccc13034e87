package kube

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilexec "k8s.io/client-go/util/exec"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/build"
)

// A pod whose image lacks this program gets a copy of it by exec, and its first process then becomes that copy.

// DefaultBase is the base image if none is named and no image with this program is on the nodes. Its name is fully qualified,
// because some container runtimes refuse a short one.
const DefaultBase = "docker.io/library/busybox:1.37"

// ChooseBase returns the base image of a run's pods on some nodes: the one that the experiment names, or the default if there is no
// image with this program. "" means that the image has the program. It reads and changes nothing.
func (c *Cluster) ChooseBase(ctx context.Context, config Config, nodes []string) (string, error) {
	image, pull := imageOf(config)
	if config.Spec.BaseImage != "" || pull != corev1.PullNever {
		return config.Spec.BaseImage, nil
	}
	base := ""
	for _, name := range nodes {
		node, err := c.api.Nodes().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return "", fmt.Errorf("get node %s: %w", name, explain(err))
		}
		if runsWindows(*node) { // there is no base image for it
			return "", nil
		}
		if !hasImage(node, image) {
			base = DefaultBase
		}
	}
	return base, nil
}

// lacksPrograms returns an error if workloads need programs besides this one, and the pods' image is known to have none.
func lacksPrograms(config Config) error {
	image, _ := imageOf(config)
	if config.Programs == "" || config.Spec.Image != "" || config.Spec.BaseImage != "" && config.Spec.BaseImage != DefaultBase {
		return nil
	}
	return fmt.Errorf("%s needs programs that the image %s does not have: build an image with those of this machine (make image-tools), push it to your registry "+
		"(slipstream image push --archive bin/slipstream-tools-image.tar REGISTRY/NAME) and name it with --image, or name another image that has them with --base-image", config.Programs, image)
}

// fitNode finds the build that is copied into the pods of a node, if their image lacks the program. A mesh goes on without
// a node for which there is none.
func (p *Pods) fitNode(node *corev1.Node) error {
	if p.spec.BaseImage == "" {
		return nil
	}
	if p.config.builds == nil {
		all, err := build.Find(p.config.Binaries)
		if err != nil {
			return err
		}
		p.config.builds = all
	}
	b, err := build.Fit(p.config.builds, "node "+node.Name, "linux", node.Status.NodeInfo.Architecture)
	if err != nil {
		err = fmt.Errorf("%w, or name an image that has the program with --image", err)
		if !p.config.Mesh {
			return err
		}
		p.unfit[node.Name] = err
		return nil
	}
	p.fitting[node.Name] = b
	return nil
}

// enough returns an error if too few nodes of a mesh have a build.
func (p *Pods) enough(nodes []string) error {
	for _, node := range nodes {
		if why := p.unfit[node]; why != nil && len(nodes)-len(p.unfit) < p.leastNodes() {
			return why
		}
	}
	return nil
}

// copyTime limits how long all copies may take; it is 0 if there are none. Only a slow connection to the API server reaches it.
func (p *Pods) copyTime() time.Duration {
	if p.spec.BaseImage == "" {
		return 0
	}
	return 30*time.Minute + time.Duration(len(p.fitting))*time.Minute
}

// copiesAtOnce limits the number of pods that get their copy at the same time.
const copiesAtOnce = 8

// copyPrograms copies the program into pods whose image lacks it. A pod that cannot get it does not start.
func (p *Pods) copyPrograms(ctx context.Context, pods []*corev1.Pod) error {
	if p.spec.BaseImage == "" {
		return nil
	}
	if err := p.pack(); err != nil {
		return err
	}
	errs := make([]error, len(pods))
	var g errgroup.Group
	g.SetLimit(copiesAtOnce)
	for i, pod := range pods {
		if p.isLost(pod) != nil {
			continue
		}
		g.Go(func() error {
			if errs[i] = p.unfit[nodeOf(pod)]; errs[i] == nil {
				errs[i] = p.copyProgram(ctx, pod)
			}
			return nil // the other pods get theirs all the same
		})
	}
	_ = g.Wait()
	if ctx.Err() != nil {
		return cmp.Or(cmp.Or(errs...), context.Cause(ctx))
	}
	for i, pod := range pods {
		if errs[i] == nil {
			continue
		}
		if err := p.giveUp(pod, errs[i]); err != nil {
			return err
		}
	}
	return nil
}

// pack compresses the builds for the nodes, which makes them a third of their size.
func (p *Pods) pack() error {
	if p.packed != nil {
		return nil
	}
	p.packed = make(map[string][]byte)
	for _, b := range p.fitting {
		if p.packed[b.Sum] != nil {
			continue
		}
		f, err := os.Open(b.File)
		if err != nil {
			return fmt.Errorf("read the program to copy: %w", err)
		}
		var data bytes.Buffer
		w, sum := gzip.NewWriter(&data), sha256.New()
		_, err = io.Copy(io.MultiWriter(w, sum), f)
		if err = errors.Join(err, w.Close(), f.Close()); err != nil {
			return fmt.Errorf("read the program to copy: %w", err)
		}
		if hex.EncodeToString(sum.Sum(nil)) != b.Sum {
			return fmt.Errorf("%s, the program to copy, changed since the run began: start the run again, and do not build meanwhile", b.File)
		}
		p.packed[b.Sum] = data.Bytes()
	}
	return nil
}

// copyAttempts limits how often a copy may break off after it began.
const copyAttempts = 3

// differs is the exit code of a copy that is not the program that was sent, and stallTime how long nothing may arrive in a pod.
const (
	differs   = 75 // EX_TEMPFAIL of sysexits.h
	stallTime = time.Minute
)

// copyProgram copies the program into a pod. It tries again if the connection broke, the container was restarted, or the API server
// does not answer for a while.
func (p *Pods) copyProgram(ctx context.Context, pod *corev1.Pod) error {
	broke, away := 0, time.Time{}
	for {
		began, err := p.sendProgram(ctx, pod)
		if err == nil {
			return nil
		}
		switch {
		case began:
			broke, away = broke+1, time.Time{}
		case away.IsZero():
			away = time.Now()
		}
		if isFinal(err) || broke == copyAttempts || !away.IsZero() && time.Since(away) > patience || pause(ctx) != nil {
			return fmt.Errorf("copy the program into pod %s/%s on node %s: %w", pod.Namespace, pod.Name, nodeOf(pod), err)
		}
	}
}

// isFinal reports whether another attempt to copy would fail with the same error. A code of 128 or more is that of a command that was
// killed, for example because its container was restarted.
func isFinal(err error) bool {
	exit := new(utilexec.CodeExitError)
	return execForbidden(err) || errors.As(err, exit) && exit.Code != differs && exit.Code < 128
}

// sendProgram makes one attempt. began means that the script ran in the pod.
func (p *Pods) sendProgram(ctx context.Context, pod *corev1.Pod) (began bool, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	b := p.fitting[nodeOf(pod)]
	data := p.packed[b.Sum]
	in := &watched{bytes.NewReader(data), time.AfterFunc(stallTime, func() { cancel(fmt.Errorf("no progress for %s", stallTime)) })}
	defer in.stall.Stop()
	var stdout, stderr place.Tail
	err = p.cluster.stream(ctx, pod, []string{"/bin/sh", "-c", receive(len(data), b.Sum)}, in, &stdout, &stderr)
	began = stdout.Last() != ""
	switch {
	case ctx.Err() != nil:
		return began, context.Cause(ctx)
	case err == nil && strings.HasSuffix(stdout.Last(), complete):
		return began, nil
	case err == nil: // which is how client-go reports some broken connections
		return began, errors.New("the connection to the API server broke")
	}
	if why := notStarted(pod, err); why != "" {
		err = fmt.Errorf("%s: %w", why, err)
	}
	return began, fmt.Errorf("%w%s", err, stderr.Last())
}

// watched is the input of a command. Each read restarts the timer that ends a stalled copy.
type watched struct {
	io.Reader
	stall *time.Timer
}

func (w *watched) Read(b []byte) (int, error) {
	w.stall.Reset(stallTime)
	return w.Reader.Read(b)
}

// complete is what the script prints at its end.
const complete = "complete"

// receive returns the script that reads a compressed program of some bytes from its standard input. The file is renamed into place once it
// is complete, has the right sum and can be executed. A file that is there by then stays: the first process may run it, and finds workers by
// their file.
func receive(size int, sum string) string {
	return strings.NewReplacer("PROGRAM", copied, "SIZE", fmt.Sprint(size), "FIRSTSUM", build.SumCommand, "SUM", sum, "COMPLETE", complete, "DIFFERS", fmt.Sprint(differs)).
		Replace(`echo begin
[ -x PROGRAM ] && { echo COMPLETE; exit; }
for t in head gzip chmod mv rm; do command -v $t >/dev/null || { echo "the image lacks $t: name another one with --base-image" >&2; exit 1; }; done
umask 077; f=PROGRAM.$$; trap 'rm -f "$f"' EXIT
: >"$f" || exit 1
head -c SIZE | gzip -dc >"$f"
s=$(FIRSTSUM <"$f")
[ "$s" != none ] || { echo "the image lacks sha256sum: name another one with --base-image" >&2; exit 1; }
[ "${s%% *}" = SUM ] || { echo "the copy differs from the program that was sent" >&2; exit DIFFERS; }
chmod 700 "$f" && "$f" version >/dev/null || { echo "the copied program does not run there: does the node mount volumes of pods noexec?" >&2; exit 1; }
{ [ -x PROGRAM ] || mv "$f" PROGRAM; } && echo COMPLETE`)
}

// copyNote says that the program is copied into pods, and how much that is.
func (p *Pods) copyNote(pods int) string {
	if p.spec.BaseImage == "" {
		return ""
	}
	return fmt.Sprintf("pods start from the image %s, and slipstream copies itself into each of the %d: to avoid that, push its image to your registry "+
		"(slipstream image push REGISTRY/NAME) and name it with --image", p.spec.BaseImage, pods)
}
