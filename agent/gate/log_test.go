package gate_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stipend/stipend/agent/gate"
	"github.com/stipend/stipend/proto/grant"
)

// lines is what a gate logs.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// logged counts the lines that contain all the words.
func logged(b *lines, words ...string) (n int) {
next:
	for line := range strings.Lines(b.String()) {
		for _, w := range words {
			if !strings.Contains(line, w) {
				continue next
			}
		}
		n++
	}
	return n
}

// An authority that cannot be reached is told at the first failed dial, then
// every 30 s at most, with the reason; its return is told once.
func TestLogsUnreachable(t *testing.T) {
	var b lines
	var refuse atomic.Bool
	refuse.Store(true)
	bubble(t, func(c *gate.Config) {
		c.Log = slog.New(slog.NewTextHandler(&b, nil))
		dial := c.Authority.Dial
		c.Authority.Dial = func(ctx context.Context, addr string) (net.Conn, error) {
			if refuse.Load() {
				return nil, errors.New("nobody listens")
			}
			return dial(ctx, addr)
		}
	}, func(w *world) {
		warned := func(want int) {
			w.Helper()
			if n := logged(&b, "level=WARN", "cannot reach the authority", "authority=authority", "nobody listens"); n != want {
				w.Errorf("%d warnings, want %d:\n%s", n, want, &b)
			}
		}
		warned(1)
		advance(29 * time.Second)
		warned(1)
		advance(35 * time.Second)
		warned(3)
		refuse.Store(false)
		advance(2 * time.Second)
		if n := logged(&b, "level=INFO", "link up"); n != 1 {
			w.Errorf("%d lines of its return:\n%s", n, &b)
		}
		refuse.Store(true)
		w.a.HangUp()
		advance(5 * time.Second)
		warned(4)
	})
}

// A superseded gate says what to do, once, however often it is told.
func TestLogsSuperseded(t *testing.T) {
	const advice = "another process runs with owner gw-1; give each its own --owner, or restart this one"
	var b lines
	bubble(t, func(c *gate.Config) { c.Log = slog.New(slog.NewTextHandler(&b, nil)) }, func(w *world) {
		for range 3 {
			w.a.Fate(grant.Superseded)
			advance(time.Second)
		}
		if n := logged(&b, "level=ERROR", advice); n != 1 {
			w.Errorf("%d lines:\n%s", n, &b)
		}
		if err := w.g.Ready(); err == nil || !strings.Contains(err.Error(), advice) {
			w.Errorf("ready: %v", err)
		}
	})
}
