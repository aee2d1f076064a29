// Command versus measures Stipend beside what its users would take instead, in
// one run on one machine, and prints every result as a ratio.
//
// The parts of a comparison take turns, A B A B, so that a machine that grows
// slower meanwhile slows both; a ratio is taken within each pair of turns, and
// the median of the ratios is told with the smallest and the largest. Nothing
// here is a test: nothing fails because of a time. Run it as "make bench".
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"time"
)

// config is what the flags say.
type config struct {
	Only    string        // sections by name, with commas between; empty: all
	Pairs   int           // turns of each side, 1 to 100
	Turn    time.Duration // length of a turn against a server, 100 ms to 1 min
	Callers int           // closed loops at once, 1 to 1024
	Tenants int           // of the "many tenants" load, 1 to 10,000,000
	Dir     string        // where both systems keep their files
	Profile string        // folder for CPU profiles of this process; empty: none
	Bin     string        // folder of the programs; empty: they are built
}

func (c config) Validate() error {
	var errs []error
	bad := func(ok bool, field string, given any, allowed string) {
		if !ok {
			errs = append(errs, fmt.Errorf("%s: %v; allowed: %s", field, given, allowed))
		}
	}
	for name := range strings.SplitSeq(c.Only, ",") {
		bad(c.Only == "" || slices.ContainsFunc(sections, func(s section) bool { return s.name == name }), "only", name, sectionNames())
	}
	bad(c.Pairs >= 1 && c.Pairs <= 100, "pairs", c.Pairs, "1 to 100")
	bad(c.Turn >= 100*time.Millisecond && c.Turn <= time.Minute, "turn", c.Turn, "100ms to 1m")
	bad(c.Callers >= 1 && c.Callers <= 1024, "callers", c.Callers, "1 to 1024")
	bad(c.Tenants >= 1 && c.Tenants <= 10_000_000, "tenants", c.Tenants, "1 to 10000000")
	return errors.Join(errs...)
}

// run is one invocation: its settings, its folder and where it prints.
type run struct {
	config
	out io.Writer
	dir string // of this run, removed at its end
	bin string // of the programs under test
}

// section is one comparison.
type section struct {
	name, about string
	measure     func(context.Context, *run) error
}

var sections = []section{
	{"take", "a decision from the wallet against golang.org/x/time/rate", measureTake},
	{"checks", "durable central decisions against Redis", measureChecks},
	{"grants", "durable grants against synced batches of Pebble alone", measureGrants},
	{"space", "bytes of memory per cold tenant", measureMemory},
	{"agent", "the agent's program: size, what it carries, time to readiness", measureAgent},
}

func sectionNames() string {
	var names []string
	for _, s := range sections {
		names = append(names, s.name)
	}
	return strings.Join(names, ", ")
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := command(ctx, os.Args[1:])
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "versus:", err)
		os.Exit(1)
	}
}

func command(ctx context.Context, args []string) (err error) {
	var cfg config
	flags := flag.NewFlagSet("versus", flag.ContinueOnError)
	flags.StringVar(&cfg.Only, "only", "", "sections to run, with commas between: "+sectionNames()+" (all)")
	flags.IntVar(&cfg.Pairs, "pairs", 5, "turns of each side")
	flags.DurationVar(&cfg.Turn, "turn", 3*time.Second, "length of a turn against a server")
	flags.IntVar(&cfg.Callers, "callers", 64, "closed loops at once")
	flags.IntVar(&cfg.Tenants, "tenants", 200_000, "tenants of the load with many")
	flags.StringVar(&cfg.Dir, "dir", os.TempDir(), "folder on the disk that both systems are to use")
	flags.StringVar(&cfg.Profile, "profile", "", "folder for CPU profiles of this process's side of each load")
	flags.StringVar(&cfg.Bin, "bin", "", "folder with stipend-authority and stipend-agent (they are built)")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if err := cfg.Validate(); err != nil {
		return err
	}
	r := &run{config: cfg, out: os.Stdout, bin: cfg.Bin}
	if r.dir, err = os.MkdirTemp(cfg.Dir, "versus-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(r.dir)) }()
	if r.bin == "" {
		r.bin = filepath.Join(r.dir, "bin")
	}
	// As in the processes that are measured; the same for both sides' clients.
	debug.SetGCPercent(400)

	r.machine()
	for _, s := range sections {
		if cfg.Only != "" && !slices.Contains(strings.Split(cfg.Only, ","), s.name) {
			continue
		}
		fmt.Fprintf(r.out, "\n== %s: %s\n\n", s.name, s.about)
		err := s.measure(ctx, r)
		var missing missingError
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.As(err, &missing):
			fmt.Fprintf(r.out, "skipped: %v\n", missing)
		case err != nil:
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return nil
}

// missingError is a comparison that cannot be made here, and why.
type missingError string

func (m missingError) Error() string { return string(m) }

// machine prints what the numbers were measured on.
func (r *run) machine() {
	model := "unknown processor"
	if raw, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(raw)) {
			if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
				model = strings.TrimSpace(value)
				break
			}
		}
	}
	load := "unknown"
	if raw, err := os.ReadFile("/proc/loadavg"); err == nil {
		load = strings.Join(strings.Fields(string(raw))[:1], " ")
	}
	fmt.Fprintf(r.out, "%d x %s, %s, %s; load average before the run %s\n", runtime.NumCPU(), model, runtime.GOOS+"/"+runtime.GOARCH, runtime.Version(), load)
	var fs syscall.Statfs_t
	if err := syscall.Statfs(r.dir, &fs); err == nil && fs.Type == 0x01021994 {
		fmt.Fprintf(r.out, "WARNING: %s is in memory (tmpfs): syncs cost nothing there, name a folder on a disk with -dir\n", r.dir)
	}
	fmt.Fprintf(r.out, "a write of 4 KiB and its fdatasync here: %s\n", syncTime(r.dir))
}

// syncTime measures the disk: the unit in which durable systems are slow.
func syncTime(dir string) string {
	f, err := os.CreateTemp(dir, "sync")
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	block := make([]byte, 4096)
	var s series
	for range 200 {
		start := time.Now()
		if _, err := f.Write(block); err != nil {
			return err.Error()
		}
		if err := syscall.Fdatasync(int(f.Fd())); err != nil {
			return err.Error()
		}
		s = append(s, float64(time.Since(start).Microseconds()))
	}
	return s.text("%.0f") + " us"
}
