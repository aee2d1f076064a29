package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// measured is one line of "go test -bench": values by unit.
type measured map[string]float64

// parseBench reads the lines of benchmarks out of what a test binary printed,
// by name without the number of processors at its end.
func parseBench(out string) (map[string]measured, error) {
	all := map[string]measured{}
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		if len(f) < 4 || !strings.HasPrefix(f[0], "Benchmark") || len(f)%2 != 0 {
			continue
		}
		name := f[0]
		if base, procs, ok := cutLast(name, "-"); ok {
			if _, err := strconv.Atoi(procs); err == nil {
				name = base
			}
		}
		m := measured{}
		for i := 2; i < len(f); i += 2 {
			v, err := strconv.ParseFloat(f[i], 64)
			if err != nil {
				return nil, fmt.Errorf("benchmark line %q: %w", strings.TrimSpace(line), err)
			}
			m[f[i+1]] = v
		}
		all[name] = m
	}
	return all, nil
}

func cutLast(s, sep string) (before, after string, found bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}

// testBinary compiles the tests of a package, whose benchmarks are run from it.
func (r *run) testBinary(ctx context.Context, pkg string) (string, error) {
	path := filepath.Join(r.dir, strings.ReplaceAll(pkg, "/", "-")+".test")
	return path, goTool(ctx, "test", "-c", "-o", path, "./"+pkg)
}

// bench runs one benchmark of a test binary and returns what it measured.
func (r *run) bench(ctx context.Context, binary, name, length string) (measured, error) {
	anchored := "^" + strings.ReplaceAll(name, "/", "$/^") + "$"
	cmd := exec.CommandContext(ctx, binary, "-test.run", "^$", "-test.bench", anchored, "-test.benchtime", length, "-test.benchmem")
	cmd.Dir, cmd.Env = r.dir, append(os.Environ(), "TMPDIR="+r.dir)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("%s: %w\n%s", name, err, out)
	}
	all, err := parseBench(string(out))
	if err != nil {
		return nil, err
	}
	m := all[name]
	if m == nil {
		return nil, fmt.Errorf("%s printed no result:\n%s", name, out)
	}
	return m, nil
}

// duel is one comparison of two benchmarks of one test binary.
type duel struct {
	what, ours, theirs string
	most               float64 // the ratio that we hold ourselves to
}

// walletDuels are of package agent: both sides look the tenant up among 1,000,
// read the clock and spend one unit.
var walletDuels = []duel{
	{"admit, alone", "BenchmarkTake", "BenchmarkAllowN", 0.85},
	{"admit, contended", "BenchmarkTakeParallel", "BenchmarkAllowNParallel", 0.6},
	{"deny, alone, to admit", "BenchmarkTakeDenied", "BenchmarkTake", 1},
	{"deny, contended, to admit", "BenchmarkTakeDeniedParallel", "BenchmarkTakeParallel", 1},
}

// gateDuels are of package agent/gate: ours is the whole decision function of a
// Go program, with counters and paths; theirs a bare bucket without a table.
var gateDuels = []duel{
	{"Decide, alone, to bare AllowN", "BenchmarkDecide/admit/alone", "BenchmarkDecide/x-time-rate/alone", 0},
	{"Decide, contended, to bare AllowN", "BenchmarkDecide/admit/contended", "BenchmarkDecide/x-time-rate/contended", 0},
	{"Decide denies, alone, to admit", "BenchmarkDecide/deny/alone", "BenchmarkDecide/admit/alone", 1},
}

// A decision takes some tens of nanoseconds: many short turns, of which some
// meet nobody else on the processor, tell more than few long ones.
const (
	takeTurns = 3 // for each pair of the other sections
	takeTime  = "150ms"
	takeTries = 5 // of a turn whose benchmark fails: a gate on a busy machine may miss its deadline
)

func (r *run) takeTurn(ctx context.Context, binary, name string) (m measured, err error) {
	for range takeTries {
		if m, err = r.bench(ctx, binary, name, takeTime); err == nil || ctx.Err() != nil {
			return m, err
		}
	}
	return nil, err
}

func measureTake(ctx context.Context, r *run) error {
	t := newTable("decision", "ns", "the other's ns", "ratio by pairs", "of the fastest", "wanted", "allocs")
	var wallet string
	for _, group := range []struct {
		pkg   string
		duels []duel
	}{{"agent", walletDuels}, {"agent/gate", gateDuels}} {
		binary, err := r.testBinary(ctx, group.pkg)
		if err != nil {
			return err
		}
		if wallet == "" {
			wallet = binary
		}
		for _, d := range group.duels {
			var ours, theirs, allocs series
			for range takeTurns * r.Pairs {
				for _, side := range []struct {
					name string
					into *series
				}{{d.ours, &ours}, {d.theirs, &theirs}} {
					m, err := r.takeTurn(ctx, binary, side.name)
					if err != nil {
						return err
					}
					*side.into = append(*side.into, m["ns/op"])
					if side.into == &ours {
						allocs = append(allocs, m["allocs/op"])
					}
				}
			}
			wanted := "-"
			if d.most > 0 {
				wanted = fmt.Sprintf("<= %.2f", d.most)
			}
			t.row(d.what, ours.text("%.1f"), theirs.text("%.1f"), ours.over(theirs).text("%.2f"),
				fmt.Sprintf("%.2f", slices.Min(ours)/slices.Min(theirs)), wanted, fmt.Sprint(allocs.median()))
		}
	}
	t.print(r.out)
	return r.systemCalls(ctx, wallet)
}

// systemCalls counts the system calls of Take: those of a long run less those of
// a short one, so that the start of the process does not count.
func (r *run) systemCalls(ctx context.Context, binary string) error {
	strace, err := exec.LookPath("strace")
	if err != nil {
		fmt.Fprintln(r.out, "\nsystem calls not counted: strace is not installed")
		return nil
	}
	const short, long = 1_000_000, 11_000_000
	// GOGC and the scheduler's monitor wake by time, not by decisions: they are
	// what remains.
	count := func(n int) (map[string]int, error) {
		summary := filepath.Join(r.dir, "strace")
		cmd := exec.CommandContext(ctx, strace, "-f", "-c", "-o", summary, binary, "-test.run", "^$", "-test.bench", "^BenchmarkTake$", "-test.benchtime", fmt.Sprintf("%dx", n))
		if out, err := cmd.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("strace: %w\n%s", err, out)
		}
		raw, err := os.ReadFile(summary)
		if err != nil {
			return nil, err
		}
		return parseStrace(string(raw))
	}
	few, err1 := count(short)
	many, err2 := count(long)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	fmt.Fprintf(r.out, "\n%d decisions more make %d system calls more (runtime's timer and scheduler threads), of them clock_gettime %d, futex %d.\n",
		long-short, many["total"]-few["total"], many["clock_gettime"]-few["clock_gettime"], many["futex"]-few["futex"])
	return nil
}

// parseStrace reads the table of strace -c: calls by name, and "total".
func parseStrace(out string) (map[string]int, error) {
	calls := map[string]int{}
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		// % time, seconds, usecs/call, calls, [errors,] name
		if len(f) < 5 || strings.HasPrefix(f[0], "%") || strings.HasPrefix(f[0], "-") {
			continue
		}
		n, err := strconv.Atoi(f[3])
		if err != nil {
			return nil, fmt.Errorf("line %q of strace: %w", strings.TrimSpace(line), err)
		}
		calls[f[len(f)-1]] = n
	}
	if calls["total"] == 0 {
		return nil, fmt.Errorf("no total in the summary of strace:\n%s", out)
	}
	return calls, nil
}

// measureMemory runs the ledger's own benchmark.
func measureMemory(ctx context.Context, r *run) error {
	binary, err := r.testBinary(ctx, "authority")
	if err != nil {
		return err
	}
	m, err := r.bench(ctx, binary, "BenchmarkColdTenant", "1x")
	if err != nil {
		return err
	}
	t := newTable("what", "bytes", "wanted")
	t.row("a tenant that spent once and is idle, 200,000 of them in one ledger", fmt.Sprintf("%.0f", m["B/tenant"]), "< 300")
	t.print(r.out)
	return nil
}
