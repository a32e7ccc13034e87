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
	agent   *Agent
	file    string
	inotify *os.File
	// fd is that of inotify, and watched the watch on the file's folder; -1 if there is none.
	fd, watched int
	text        []byte
	generation  int64
	// complaint is the error with which the file was last read, or empty.
	complaint string
}

// OpenPolicy reads a policy file and passes it to the agent. A missing or invalid file is an error only here, at the start: see
// Follow.
func (a *Agent) OpenPolicy(file string) (*PolicyFile, error) {
	p := &PolicyFile{agent: a, file: file, watched: -1}
	// The watch begins before the file is read, so that no change is missed.
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("watch %s: %w", file, err)
	}
	p.inotify, p.fd = os.NewFile(uintptr(fd), "inotify"), fd
	if err := p.watch(); err != nil {
		return nil, errors.Join(err, p.inotify.Close())
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

// watch watches the folder of the file, because editors, and Kubernetes with ConfigMaps, replace the file. The kernel watches
// the folder that has this path now. If another one takes its place, watch must be called again; otherwise that changes nothing.
func (p *PolicyFile) watch() error {
	const changes = unix.IN_CLOSE_WRITE | unix.IN_CREATE | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_MOVE_SELF
	before := p.watched
	var err error
	if p.watched, err = unix.InotifyAddWatch(p.fd, filepath.Dir(p.file), changes); err != nil {
		p.watched = -1
		err = fmt.Errorf("watch the folder of %s: %w", p.file, err)
	}
	if before >= 0 && before != p.watched {
		_, _ = unix.InotifyRmWatch(p.fd, uint32(before)) // it has ended already if the folder was removed
	}
	return err
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
// policy. An invalid file changes nothing. Follow also looks at the file as often as the agent verifies settings, because a
// watch misses what happens elsewhere, such as another target of a symbolic link.
func (p *PolicyFile) Follow(ctx context.Context, reload <-chan os.Signal) {
	events := make(chan struct{}, 1)
	go func() {
		buf := make([]byte, 4096)
		for {
			if _, err := p.inotify.Read(buf); err != nil {
				if !errors.Is(err, os.ErrClosed) {
					p.late(err)
				}
				return
			}
			select {
			case events <- struct{}{}:
			default:
			}
		}
	}()
	defer p.inotify.Close()
	again := time.NewTicker(p.agent.options.Verify)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-reload:
			p.complaint = ""
			p.read()
			continue
		case <-again.C:
			p.rewatch()
			if text, err := spec.ReadFile(p.file); err == nil && p.text != nil && bytes.Equal(text, p.text) {
				continue
			}
		case <-events:
		}
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

// rewatch watches the folder that the file is in now.
func (p *PolicyFile) rewatch() {
	if err := p.watch(); err != nil && !errors.Is(err, fs.ErrNotExist) {
		p.late(err)
	}
}

func (p *PolicyFile) late(err error) {
	p.agent.options.Log.Warn("the policy file cannot be watched: changes are noticed only when settings are verified", "file", p.file, "error", err)
}

func (p *PolicyFile) read() {
	p.rewatch() // before reading, so that no later change is missed
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
		p.complaint = ""
		if p.text != nil && bytes.Equal(text, p.text) {
			return
		}
		p.text = text
		err = p.set()
	}
	if err != nil && err.Error() != p.complaint {
		p.complaint = err.Error()
		p.agent.notify(Event{Warning: true, Reason: v1alpha1.ReasonInvalid, Message: fmt.Sprintf("the changed policy file is invalid, so the previous policy stays in force: %s", err)})
	}
}
