package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/spec"
)

// PolicyFile supplies the policy of a host without a cluster.
type PolicyFile struct {
	agent      *Agent
	file       string
	inotify    *os.File
	text       []byte
	generation int64
}

// OpenPolicy reads a policy file and passes it to the agent. A missing or invalid file is an error only here, at the start: see
// Follow.
func (a *Agent) OpenPolicy(file string) (*PolicyFile, error) {
	p := &PolicyFile{agent: a, file: file}
	// The watch begins before the file is read, so that no change is missed.
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("watch %s: %w", file, err)
	}
	p.inotify = os.NewFile(uintptr(fd), "inotify")
	// Watch the folder: editors, and Kubernetes with ConfigMaps, replace the file.
	const changes = unix.IN_CLOSE_WRITE | unix.IN_CREATE | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO
	if _, err := unix.InotifyAddWatch(fd, filepath.Dir(file), changes); err != nil {
		return nil, errors.Join(fmt.Errorf("watch the folder of %s: %w", file, err), p.inotify.Close())
	}
	if p.text, err = spec.ReadFile(file); err != nil {
		err = fmt.Errorf("read policy: %w (to restore what agents have set, use --revert)", err)
	} else {
		err = p.set()
	}
	if err != nil {
		return nil, errors.Join(err, p.inotify.Close())
	}
	return p, nil
}

func (p *PolicyFile) set() error {
	policy, err := spec.ParsePolicy(p.file, p.text)
	if err != nil {
		return err
	}
	p.generation++
	p.agent.Set(Desired{Policies: []Policy{{Name: policy.Name, Generation: p.generation, Accelerate: policy.Spec.Accelerators(), Kernels: policy.Annotations[v1alpha1.AnnotationKernel]}}})
	return nil
}

// settle is the delay between a change and reading the file: programs often remove a file before they write the new one.
const settle = 200 * time.Millisecond

// Follow reads the file whenever it changes or reload receives a signal, until ctx is done. Removing the file deletes the
// policy. An invalid file changes nothing.
func (p *PolicyFile) Follow(ctx context.Context, reload <-chan os.Signal) {
	events := make(chan struct{}, 1)
	go func() {
		buf := make([]byte, 4096)
		for {
			if _, err := p.inotify.Read(buf); err != nil {
				return
			}
			select {
			case events <- struct{}{}:
			default:
			}
		}
	}()
	defer p.inotify.Close()
	for {
		select {
		case <-ctx.Done():
			return
		case <-reload:
			p.read()
		case <-events:
			quiet := time.NewTimer(settle)
			for waiting := true; waiting; {
				select {
				case <-ctx.Done():
					return
				case <-events:
					quiet.Reset(settle)
				case <-quiet.C:
					waiting = false
				}
			}
			p.read()
		}
	}
}

func (p *PolicyFile) read() {
	text, err := spec.ReadFile(p.file)
	if errors.Is(err, fs.ErrNotExist) {
		if p.text != nil {
			p.agent.options.Log.Warn("the policy file is gone: its settings are restored", "file", p.file)
			p.agent.Set(Desired{})
		}
		p.text = nil
		return
	}
	if err == nil {
		if p.text != nil && bytes.Equal(text, p.text) {
			return
		}
		p.text = text
		err = p.set()
	}
	if err != nil {
		p.agent.notify(Event{Warning: true, Reason: v1alpha1.ReasonInvalid, Message: fmt.Sprintf("the changed policy file is invalid, so the previous policy stays in force: %s", err)})
	}
}
