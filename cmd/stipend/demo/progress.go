package demo

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// progress writes what happens: events on lines of their own, and the state as
// one line that is refreshed on a terminal, or as a line every few seconds
// elsewhere.
type progress struct {
	w        io.Writer
	terminal bool
	width    int

	mu    sync.Mutex
	shown bool      // the last line is a state, without an end
	last  time.Time // of the last state written elsewhere
}

// Intervals of the state line.
const (
	refreshEvery = 250 * time.Millisecond
	logEvery     = 3 * time.Second
)

func newProgress(w io.Writer) *progress {
	p := &progress{w: w}
	if f, ok := w.(*os.File); ok {
		if size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ); err == nil {
			p.terminal, p.width = true, int(size.Col)
		}
	}
	if p.width < 40 {
		p.width = 80
	}
	return p
}

// say writes an event.
func (p *progress) say(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.clear()
	fmt.Fprintf(p.w, format+"\n", args...)
}

// state shows the state of the moment.
func (p *progress) state(s string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.terminal {
		if now := time.Now(); now.Sub(p.last) >= logEvery {
			p.last = now
			fmt.Fprintln(p.w, s)
		}
		return
	}
	if r := []rune(s); len(r) >= p.width {
		s = string(r[:p.width-1])
	}
	p.clear()
	fmt.Fprint(p.w, s)
	p.shown = true
}

// end leaves the terminal with an empty line to write on.
func (p *progress) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.clear()
}

func (p *progress) clear() {
	if p.shown {
		fmt.Fprint(p.w, "\r\x1b[K")
		p.shown = false
	}
}

func plural[T ~int | ~int64 | ~uint64](n T, word string) string {
	if n == 1 {
		return "1 " + word
	}
	if strings.HasSuffix(word, "y") {
		return fmt.Sprintf("%d %sies", n, strings.TrimSuffix(word, "y"))
	}
	return fmt.Sprintf("%d %ss", n, word)
}
