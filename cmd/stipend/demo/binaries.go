package demo

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// module is where this command lives; go build knows the others by it.
const module = "github.com/stipend/stipend"

// binaries are the programs that the demo starts.
type binaries struct{ authority, agent string }

// findBinaries looks beside this executable, builds them when it was made by
// go run inside the module, and looks at the PATH last.
func findBinaries(ctx context.Context, dir string, say func(string)) (binaries, error) {
	self, err := os.Executable()
	if err != nil {
		return binaries{}, fmt.Errorf("find this program: %w", err)
	}
	b := binaries{authority: "stipend-authority", agent: "stipend-agent"}
	beside := filepath.Dir(self)
	if found, ok := b.in(beside); ok {
		return found, nil
	}
	// go run puts what it builds into a folder go-build*, to be deleted.
	if strings.Contains(self, "go-build") && insideModule(ctx) {
		return b.build(ctx, dir, say)
	}
	if path, err := exec.LookPath(b.authority); err == nil {
		if found, ok := b.in(filepath.Dir(path)); ok {
			return found, nil
		}
	}
	return binaries{}, fmt.Errorf("stipend-authority and stipend-agent are neither in %s nor in the PATH; "+
		"build all three with make build (go build -o bin/ ./cmd/...), and run bin/stipend demo", beside)
}

func (b binaries) in(dir string) (binaries, bool) {
	out := binaries{filepath.Join(dir, b.authority), filepath.Join(dir, b.agent)}
	for _, p := range []string{out.authority, out.agent} {
		if info, err := os.Stat(p); err != nil || info.IsDir() || info.Mode()&0o111 == 0 {
			return out, false
		}
	}
	return out, true
}

func insideModule(ctx context.Context) bool {
	out, err := exec.CommandContext(ctx, "go", "list", "-m").Output()
	return err == nil && strings.TrimSpace(string(out)) == module
}

// build compiles both, and says now and then how far it is: a first build
// takes minutes.
func (b binaries) build(ctx context.Context, dir string, say func(string)) (binaries, error) {
	bin := filepath.Join(dir, "bin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		return b, err
	}
	say("building stipend-authority and stipend-agent; the first time this takes minutes")
	cmd := exec.CommandContext(ctx, "go", "build", "-v", "-o", bin+string(filepath.Separator), module+"/cmd/"+b.authority, module+"/cmd/"+b.agent)
	r, w, err := os.Pipe()
	if err != nil {
		return b, err
	}
	defer r.Close()
	cmd.Stdout, cmd.Stderr = w, w
	err = cmd.Start()
	w.Close()
	if err != nil {
		return b, fmt.Errorf("go build: %w; is Go installed?", err)
	}
	packages, faults := 0, []string{}
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		// -v names each package on a line of its own; faults hold spaces.
		if s := lines.Text(); strings.ContainsAny(s, " #") {
			faults = append(faults, s)
			continue
		}
		if packages++; packages%50 == 0 {
			say(fmt.Sprintf("  %d packages compiled", packages))
		}
	}
	err = errors.Join(lines.Err(), cmd.Wait())
	if ctx.Err() != nil {
		return b, context.Cause(ctx)
	}
	if err != nil {
		return b, fmt.Errorf("go build: %w\n%s", err, strings.Join(faults[max(0, len(faults)-20):], "\n"))
	}
	found, _ := b.in(bin)
	return found, nil
}

// tail is the end of a file, for people.
func tail(path string, most int64) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > most {
		f.Seek(info.Size()-most, io.SeekStart)
	}
	raw, _ := io.ReadAll(io.LimitReader(f, most))
	return strings.TrimSpace(string(raw))
}
