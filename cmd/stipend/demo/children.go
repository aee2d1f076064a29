package demo

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// stopWithin is how long a child may take to drain before it is killed.
const stopWithin = 15 * time.Second

// children starts processes and ends them all.
type children struct {
	dir string // of their logs

	calls chan func()
	quit  chan struct{}

	mu  sync.Mutex
	all []*child
}

// child is one process.
type child struct {
	name string
	args []string
	cmd  *exec.Cmd
	log  string
	done chan struct{} // closed when it has ended
	err  error         // of its end
	// expected says that its end is no fault.
	expected bool
	mu       sync.Mutex
}

// newChildren begins the one thread that starts processes: the kernel kills a
// child (PDEATHSIG) when the thread that started it ends, so that one must stay.
func newChildren(dir string) *children {
	c := &children{dir: dir, calls: make(chan func()), quit: make(chan struct{})}
	go func() {
		runtime.LockOSThread()
		for {
			select {
			case f := <-c.calls:
				f()
			case <-c.quit:
				return // with the thread
			}
		}
	}()
	return c
}

// start runs a program with its output in a file of its own. When it ends
// without having been told to, fail is called with the reason.
func (c *children) start(name, program string, args []string, fail func(error)) (*child, error) {
	path := filepath.Join(c.dir, name+".log")
	out, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	k := &child{name: name, log: path, args: append([]string{program}, args...), done: make(chan struct{})}
	k.cmd = exec.Command(program, args...)
	k.cmd.Stdout, k.cmd.Stderr = out, out
	// A group of its own: an interrupt at the terminal is for the demo, which
	// stops its children in order.
	k.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started := make(chan error, 1)
	c.calls <- func() { started <- k.cmd.Start() }
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	c.mu.Lock()
	c.all = append(c.all, k)
	c.mu.Unlock()
	go func() {
		err := k.cmd.Wait()
		k.mu.Lock()
		expected := k.expected
		k.err = err
		k.mu.Unlock()
		close(k.done)
		if !expected {
			fail(fmt.Errorf("%s ended by itself (%v); the end of its log:\n%s", name, endOf(err), tail(path, 2000)))
		}
	}()
	return k, nil
}

func endOf(err error) string {
	if err == nil {
		return "exit code 0"
	}
	return err.Error()
}

func (k *child) expect() {
	k.mu.Lock()
	k.expected = true
	k.mu.Unlock()
}

// kill ends the process the hard way and waits for it.
func (k *child) kill() {
	k.expect()
	k.cmd.Process.Signal(syscall.SIGKILL)
	<-k.done
}

// stop asks the process to drain, and kills it when that takes too long.
func (k *child) stop() error {
	k.expect()
	k.cmd.Process.Signal(syscall.SIGTERM)
	t := time.NewTimer(stopWithin)
	defer t.Stop()
	select {
	case <-k.done:
	case <-t.C:
		k.kill()
		return fmt.Errorf("%s did not stop within %v and was killed; see %s", k.name, stopWithin, k.log)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.err != nil {
		return fmt.Errorf("%s ended with %v; the end of its log:\n%s", k.name, k.err, tail(k.log, 2000))
	}
	return nil
}

// stopAll stops the named children that still run, all at once.
func (c *children) stopAll(which func(name string) bool) error {
	c.mu.Lock()
	all := c.all
	c.mu.Unlock()
	errs := make([]error, len(all))
	var wg sync.WaitGroup
	for i, k := range all {
		select {
		case <-k.done:
		default:
			if which(k.name) {
				wg.Go(func() { errs[i] = k.stop() })
			}
		}
	}
	wg.Wait()
	return errors.Join(errs...)
}

// close kills whatever still runs and ends the thread.
func (c *children) close() {
	c.mu.Lock()
	all := c.all
	c.mu.Unlock()
	for _, k := range all {
		select {
		case <-k.done:
		default:
			k.kill()
		}
	}
	close(c.quit)
}

// ready waits until the URL answers 200.
func ready(ctx context.Context, what, url string, within time.Duration) error {
	ctx, cancel := context.WithTimeoutCause(ctx, within, fmt.Errorf("%s was not ready within %v (%s)", what, within, url))
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		if resp, err := http.DefaultClient.Do(req); err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}
