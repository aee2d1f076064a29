package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stipend/stipend/bounds"
	"github.com/stipend/stipend/proto/grant"
)

// Limits on the length of the load.
const (
	MinLength = 3 * time.Second
	MaxLength = 24 * time.Hour
)

// Config says what to run.
type Config struct {
	// Length of the load. A trace without a speed is replayed in that time.
	Length time.Duration
	// Trace is replayed instead of the synthetic load; nil: none.
	Trace *Trace
	// Dir is where configuration, keys, records and logs are written; empty: a
	// new folder among the temporary ones.
	Dir string
	// Progress is where people see what happens.
	Progress io.Writer
}

// Validate names the first field that cannot be used.
func (c Config) Validate() error {
	if c.Length < MinLength || c.Length > MaxLength {
		return fmt.Errorf("length: %v; allowed: %v to %v", c.Length, MinLength, MaxLength)
	}
	if c.Progress == nil {
		return errors.New("progress: is nil; it must be set")
	}
	if c.Trace != nil && (c.Trace.Speed < 0 || c.Trace.Speed > 1e9) {
		return fmt.Errorf("speed: %g; allowed: 0 (fits the length) to 1e9", c.Trace.Speed)
	}
	return nil
}

const authorityName = "authority"

// Run runs everything and judges it. The error says why there is no result; a
// broken bound is a result. When it returns, no process and no goroutine of it
// is left, and the folder is gone if ctx ended it.
func Run(ctx context.Context, cfg Config) (res *Result, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	var p *plan
	if cfg.Trace == nil {
		p = synthetic(cfg.Length)
	} else if p, err = replay(*cfg.Trace, cfg.Length); err != nil {
		return nil, err
	}
	out := newProgress(cfg.Progress)
	dir, err := makeDir(cfg.Dir)
	if err != nil {
		return nil, err
	}
	programs, err := findBinaries(ctx, dir, func(s string) { out.say("%s", s) })
	if err != nil {
		if cfg.Dir == "" {
			os.RemoveAll(dir)
		}
		return nil, err
	}
	defer func() {
		out.end()
		switch {
		case err == nil:
		case ctx.Err() != nil && cfg.Dir == "":
			err = errors.Join(context.Cause(ctx), os.RemoveAll(dir))
		default:
			err = fmt.Errorf("%w\nlogs and everything else are in %s", err, dir)
		}
	}()
	run, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	w := &world{plan: p, dir: dir, out: out, programs: programs, fail: cancel, children: newChildren(dir)}
	defer w.children.close()
	return w.run(run)
}

func makeDir(dir string) (string, error) {
	if dir == "" {
		return os.MkdirTemp("", "stipend-demo-")
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	if list, err := os.ReadDir(dir); err == nil && len(list) > 0 {
		return "", fmt.Errorf("%s is not empty; choose another folder", dir)
	}
	return dir, os.MkdirAll(dir, 0o755)
}

// world is everything that runs.
type world struct {
	plan     *plan
	dir      string
	out      *progress
	programs binaries
	children *children
	fail     context.CancelCauseFunc // ends the run for a reason

	files   *files
	backend *backend
	load    *load
	watch   *watch
	agents  [gateways]*child
	alive   [gateways]atomic.Bool // by what the demo itself did
}

func (w *world) run(ctx context.Context) (res *Result, err error) {
	var live *bounds.Checker
	if live, err = bounds.NewChecker(bounds.Config{RhoPPB: rhoPPB}); err != nil {
		return nil, err
	}
	if err := live.Change(0, w.plan.tenants[0].policy); err != nil {
		return nil, err
	}
	if w.backend, err = startBackend(w.plan, "127.0.0.1:0", live); err != nil {
		return nil, err
	}
	serving, stopServing := context.WithCancel(context.Background())
	var served errgroup.Group
	served.Go(func() error { return w.backend.run(serving) })
	defer func() {
		stopServing()
		err = errors.Join(err, served.Wait())
		if err != nil {
			res = nil
		}
	}()
	if err := w.begin(ctx); err != nil {
		return nil, w.cause(ctx, err)
	}
	if err := w.drive(ctx); err != nil {
		return nil, w.cause(ctx, err)
	}
	if res, err = w.finish(ctx); err != nil {
		return nil, w.cause(ctx, err)
	}
	return res, nil
}

// cause is why the run ended: what cancelled it, rather than what failed in
// consequence.
func (w *world) cause(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// begin starts the authority, sets the policies and starts the agents.
func (w *world) begin(ctx context.Context) error {
	for _, s := range w.plan.summary {
		w.out.say("%s", s)
	}
	var err error
	if w.files, err = writeFiles(w.dir, w.plan, w.backend.addr(), w.programs); err != nil {
		return err
	}
	w.out.say("\nstarting one authority (Pebble and embedded etcd) and %d agents, in %s", gateways, w.dir)
	began := time.Now()
	if _, err := w.children.start(authorityName, w.programs.authority, w.files.authorityArgs(), w.fail); err != nil {
		return err
	}
	if err := ready(ctx, "the authority", "http://"+w.files.authorityHTTP+"/readyz", 2*time.Minute); err != nil {
		return err
	}
	if w.watch, err = newWatch(w.plan, w.files); err != nil {
		return err
	}
	if err := w.watch.apply(ctx); err != nil {
		return err
	}
	for i := range gateways {
		if err := w.startAgent(i); err != nil {
			return err
		}
	}
	for i := range gateways {
		if err := w.agentReady(ctx, i); err != nil {
			return err
		}
	}
	w.out.say("all ready after %.1fs, %s set\n", time.Since(began).Seconds(), plural(len(w.plan.tenants), "policy"))
	return nil
}

func (w *world) startAgent(i int) (err error) {
	w.agents[i], err = w.children.start(w.files.agents[i].name, w.programs.agent, w.files.agentArgs(i), w.fail)
	w.alive[i].Store(err == nil)
	return err
}

func (w *world) isAlive(i int) bool { return w.alive[i].Load() }

func (w *world) agentReady(ctx context.Context, i int) error {
	return ready(ctx, w.files.agents[i].name, "http://"+w.files.agents[i].admin+"/readyz", 30*time.Second)
}

// drive runs the load and what happens meanwhile.
func (w *world) drive(ctx context.Context) error {
	targets := make([]string, gateways)
	for i := range targets {
		targets[i] = w.files.agents[i].proxy
	}
	w.load = newLoad(w.plan, targets, w.backend.now)
	start := time.Now()
	g, ctx := errgroup.WithContext(ctx)
	loading, loaded := context.WithCancel(ctx)
	g.Go(func() error {
		defer loaded()
		w.load.run(ctx, start)
		return ctx.Err()
	})
	g.Go(func() error { return w.crash(ctx, start) })
	g.Go(func() error { return w.watch.run(loading) })
	g.Go(func() error {
		tick := time.NewTicker(refreshEvery)
		defer tick.Stop()
		l := &line{world: w}
		for {
			select {
			case <-loading.Done():
				return nil
			case <-tick.C:
				w.out.state(l.next(time.Since(start)))
			}
		}
	})
	return g.Wait()
}

// crash kills the agent that carries most of the load, and starts it again.
func (w *world) crash(ctx context.Context, start time.Time) error {
	if w.plan.kill == 0 {
		return nil
	}
	if !until(ctx, start.Add(w.plan.kill)) {
		return ctx.Err()
	}
	i := w.plan.favourite(w.plan.kill)
	w.watch.look(ctx)
	w.alive[i].Store(false)
	w.agents[i].kill()
	w.watch.died(ctx, i)
	w.out.say("%5.1fs  kill -9 %s, which carried most of the load", time.Since(start).Seconds(), w.files.agents[i].name)
	if !until(ctx, start.Add(w.plan.restart)) {
		return ctx.Err()
	}
	if err := w.startAgent(i); err != nil {
		return err
	}
	if err := w.agentReady(ctx, i); err != nil {
		return err
	}
	w.out.say("%5.1fs  %s is back, as a new incarnation", time.Since(start).Seconds(), w.files.agents[i].name)
	return nil
}

func until(ctx context.Context, at time.Time) bool {
	t := time.NewTimer(time.Until(at))
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// finish stops everything in order and judges the records.
func (w *world) finish(ctx context.Context) (*Result, error) {
	w.out.state("load ended; stopping the agents and the authority")
	end := w.load.start.Add(w.plan.length)
	w.watch.look(ctx)
	// Agents first: they tell the authority what they discard.
	agent := func(name string) bool { return name != authorityName }
	authority := func(name string) bool { return name == authorityName }
	if err := errors.Join(w.children.stopAll(agent), w.watch.close(), w.children.stopAll(authority)); err != nil {
		return nil, err
	}
	w.out.state("judging the records")
	records, strange, first := w.backend.taken()
	res := &Result{Length: w.plan.length, Forward: w.files.forward, Dir: w.dir, ByHand: w.files.byHand(w.plan), Notes: []string{}}
	atBackend, err := w.plan.atBackend(records)
	if err != nil {
		return nil, err
	}
	files, err := w.files.records()
	if err != nil {
		return nil, err
	}
	agents, err := w.plan.byAgents(files, w.files.forward)
	if err != nil {
		return nil, err
	}
	res.Backend, res.Agents = atBackend.tenants, agents.tenants
	res.Held = atBackend.held && agents.held
	for _, e := range res.Backend {
		res.Slowest = max(res.Slowest, e.Within)
	}
	if most := w.files.forward + patience; res.Slowest > most {
		res.Notes = append(res.Notes, fmt.Sprintf("the slowest admitted request took %v from the load to the backend, where d is %v: this machine is busy", res.Slowest.Round(time.Millisecond), w.files.forward))
	}
	res.Missing, res.Torn, res.Admitted = agents.lost, agents.torn, atBackend.n
	if strange > 0 {
		res.Strange = fmt.Sprintf("%s (%d of them)", first, strange)
	}
	offset := grant.Instant(w.load.start.Sub(w.backend.start))
	from := grant.Instant(w.load.saturated.Load())
	if from > 0 {
		from += offset
	}
	if res.Use, err = w.plan.utilisation(records, from, grant.Instant(end.Sub(w.backend.start))); err != nil {
		return nil, err
	}
	res.Kept = !res.Use.Judged || res.Use.Kept
	w.watch.into(res)
	res.explainMessages()
	w.load.into(res)
	if agents.torn > 0 {
		res.Notes = append(res.Notes, fmt.Sprintf("the records of the killed agent end with its death; what it had buffered is missing from them (%d of the backend's %d)", int64(atBackend.n)-int64(agents.n), atBackend.n))
	}
	return res, w.files.tidy()
}
