package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// child is a server under test in a process of its own.
type child struct {
	name string
	cmd  *exec.Cmd
	log  *logTail
	done chan struct{}
	err  error // after done
}

// start runs a program; it is killed when ctx ends.
func start(ctx context.Context, name string, args ...string) (*child, error) {
	c := &child{name: filepath.Base(name), cmd: exec.CommandContext(ctx, name, args...), log: &logTail{}, done: make(chan struct{})}
	c.cmd.Stdout, c.cmd.Stderr = c.log, c.log
	c.cmd.WaitDelay = time.Second
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		c.err = c.cmd.Wait()
		close(c.done)
	}()
	return c, nil
}

// thisProcess stands for a server that runs in this process.
func thisProcess() (*child, error) {
	p, err := os.FindProcess(os.Getpid())
	return &child{name: "self", cmd: &exec.Cmd{Process: p}}, err
}

// stop ends the child gracefully and waits for it.
func (c *child) stop() error {
	if err := c.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-c.done:
	case <-time.After(20 * time.Second):
		_ = c.cmd.Process.Kill()
		<-c.done
		return fmt.Errorf("%s did not end within 20 s", c.name)
	}
	return nil
}

// until asks ready every few milliseconds until it says nil.
func (c *child) until(ctx context.Context, patience time.Duration, ready func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		err := ready(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-c.done:
			return fmt.Errorf("%s ended: %w\n%s", c.name, c.err, c.log)
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready: %w\n%s", c.name, err, c.log)
		case <-tick.C:
		}
	}
}

// usage is what a process has used since its start.
type usage struct {
	CPU     time.Duration // user and system
	Written int64         // bytes handed to the disk
	RSS     int64         // bytes resident now
}

// usage reads what /proc says of the child.
func (c *child) usage() (usage, error) { return processUsage(c.cmd.Process.Pid) }

func processUsage(pid int) (u usage, err error) {
	dir := fmt.Sprintf("/proc/%d/", pid)
	raw, err := os.ReadFile(dir + "stat")
	if err != nil {
		return u, err
	}
	// The name, in parentheses, may hold anything: count from its end.
	_, rest, _ := strings.Cut(string(raw[bytes.LastIndexByte(raw, ')'):]), " ")
	f := strings.Fields(rest)
	if len(f) < 22 {
		return u, fmt.Errorf("%sstat: %d fields", dir, len(f))
	}
	const user, system, resident = 11, 12, 21 // fields 14, 15 and 24 of proc(5)
	var n [3]int64
	for i, at := range []int{user, system, resident} {
		if n[i], err = strconv.ParseInt(f[at], 10, 64); err != nil {
			return u, fmt.Errorf("%sstat: %w", dir, err)
		}
	}
	u.CPU = time.Duration(n[0]+n[1]) * (time.Second / 100) // USER_HZ is 100 on Linux
	u.RSS = n[2] * int64(os.Getpagesize())
	if raw, err = os.ReadFile(dir + "io"); err != nil {
		return u, err
	}
	for line := range strings.Lines(string(raw)) {
		if v, ok := strings.CutPrefix(line, "write_bytes: "); ok {
			if u.Written, err = strconv.ParseInt(strings.TrimSpace(v), 10, 64); err != nil {
				return u, fmt.Errorf("%sio: %w", dir, err)
			}
		}
	}
	return u, nil
}

// ownCPU is the CPU time of this process.
func ownCPU() time.Duration {
	var ru syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &ru); err != nil {
		panic(fmt.Sprintf("versus: getrusage: %v", err))
	}
	return time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
}

// folderBytes is the size of all files in a folder.
func folderBytes(dir string) (sum int64, err error) {
	err = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if errors.Is(err, os.ErrNotExist) { // compacted away meanwhile
			return nil
		}
		if err == nil {
			sum += info.Size()
		}
		return err
	})
	return sum, err
}

// logTail keeps the end of what a child says.
type logTail struct {
	mu  sync.Mutex
	buf []byte
}

const tailBytes = 8 << 10

func (l *logTail) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.buf = append(l.buf, p...)
	if n := len(l.buf) - tailBytes; n > 0 {
		l.buf = append(l.buf[:0], l.buf[n:]...)
	}
	return len(p), nil
}

func (l *logTail) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.buf)
}

// build compiles packages of this module into the folder of programs, stripped.
func (r *run) build(ctx context.Context, commands ...string) error {
	if r.Bin != "" {
		return nil
	}
	args := []string{"build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", r.bin + "/"}
	for _, c := range commands {
		args = append(args, "./cmd/"+c)
	}
	return goTool(ctx, args...)
}

func goTool(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, "go", args...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}
