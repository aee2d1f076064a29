package sim

import (
	"container/heap"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"time"

	"github.com/stipend/stipend/agent"
	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

// Config is everything that a World is made of.
type Config struct {
	Seed      uint64
	Authority authority.Config
	// Agent is every gateway's; NextSeq and Rand are the World's to set.
	Agent agent.Config
	Net   NetConfig
	Disk  DiskConfig
	// LeaseTTL is how long the registry keeps an incarnation without a stream
	// before it is lost. 1 s to 1 h.
	LeaseTTL time.Duration
	// CommitEndsProcess makes a failed commit end the authority's process, as a
	// daemon on a local store does; otherwise only its partition is loaded anew.
	CommitEndsProcess bool
	// PolicyLag is how long a stale policy copy may let requests pass; see
	// bounds.Config. The default covers PolicyCopyLife and one retry.
	PolicyLag time.Duration
	// Paranoid tests the invariants of all machines after every event.
	Paranoid bool
	// Trace gets one line per event of note. Nil: none.
	Trace io.Writer
}

// DefaultConfig is a healthy world.
func DefaultConfig(seed uint64) Config {
	c := Config{
		Seed:      seed,
		Authority: authority.DefaultConfig(),
		Agent:     agent.DefaultConfig(),
		Net:       NetConfig{Latency: 300 * time.Microsecond, Jitter: 200 * time.Microsecond},
		Disk:      DiskConfig{Latency: 500 * time.Microsecond, Jitter: 500 * time.Microsecond},
		LeaseTTL:  10 * time.Second,
		PolicyLag: grant.PolicyCopyLife + time.Second,
	}
	return c
}

// Validate names the first field out of range.
func (c Config) Validate() error {
	agents := c.Agent
	agents.NextSeq, agents.Rand = func() uint64 { return 1 }, func(int64) int64 { return 0 }
	if err := errors.Join(c.Authority.Validate(), agents.Validate(), c.Net.validate()); err != nil {
		return fmt.Errorf("sim: %w", err)
	}
	for _, f := range [...]struct {
		field     string
		given     time.Duration
		low, high time.Duration
	}{
		{"disk.latency", c.Disk.Latency, 0, time.Minute},
		{"disk.jitter", c.Disk.Jitter, 0, time.Minute},
		{"lease_ttl", c.LeaseTTL, time.Second, time.Hour},
		{"policy_lag", c.PolicyLag, 0, time.Hour},
	} {
		if f.given < f.low || f.given > f.high {
			return fmt.Errorf("sim: %s: %v; allowed: %v to %v", f.field, f.given, f.low, f.high)
		}
	}
	if c.Disk.UnknownPPM < 0 || c.Disk.UnknownPPM > 1_000_000 {
		return fmt.Errorf("sim: disk.unknown_ppm: %d; allowed: 0 to 1000000", c.Disk.UnknownPPM)
	}
	return nil
}

// World is the simulated world. Not safe for concurrent use.
type World struct {
	cfg    Config
	now    grant.Instant
	events eventHeap
	count  uint64
	ran    uint64
	digest interface {
		io.Writer
		Sum64() uint64
	}

	Disk     *Disk
	Registry *Registry
	Center   *Center
	Judge    *Judge
	Traffic  Traffic
	gateways []*Gateway
	loads    int
}

// New makes a world with a running authority and no gateways.
func New(cfg Config) (*World, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	// Real instants start above zero: zero means "none" in some places.
	w := &World{cfg: cfg, now: grant.Instant(time.Second), digest: fnv.New64a()}
	var err error
	if w.Judge, err = newJudge(w); err != nil {
		return nil, err
	}
	w.Disk = newDisk(w, cfg.Disk)
	w.Registry = newRegistry(w)
	w.Center = newCenter(w)
	return w, nil
}

// source is the random source of one component.
func (w *World) source(component string) *rand.Rand {
	h := fnv.New64a()
	io.WriteString(h, component) // never fails
	return rand.New(rand.NewPCG(w.cfg.Seed, h.Sum64()))
}

// Source is a random source of the caller's own, by name.
func (w *World) Source(name string) *rand.Rand { return w.source("caller " + name) }

// Now is real time since the world began, plus one second.
func (w *World) Now() grant.Instant { return w.now }

// Events is how many ran.
func (w *World) Events() uint64 { return w.ran }

// Digest is a hash over everything of note that has happened.
func (w *World) Digest() uint64 { return w.digest.Sum64() }

// note adds a line to the trace.
func (w *World) note(format string, args ...any) {
	fmt.Fprintf(w.digest, format, args...)
	if w.cfg.Trace != nil {
		fmt.Fprintf(w.cfg.Trace, "%12.6f "+format+"\n", append([]any{time.Duration(w.now).Seconds() - 1}, args...)...)
	}
}

// event is something that happens at an instant; events of one instant happen
// in the order in which they were made.
type event struct {
	at  grant.Instant
	seq uint64
	run func()
}

type eventHeap []event

func (h eventHeap) Len() int { return len(h) }
func (h eventHeap) Less(i, j int) bool {
	if h[i].at != h[j].at {
		return h[i].at < h[j].at
	}
	return h[i].seq < h[j].seq
}
func (h eventHeap) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *eventHeap) Push(x any)   { *h = append(*h, x.(event)) }
func (h *eventHeap) Pop() any {
	old := *h
	e := old[len(old)-1]
	old[len(old)-1] = event{}
	*h = old[:len(old)-1]
	return e
}

// At runs f at a real instant, or now if that has passed.
func (w *World) At(at grant.Instant, f func()) {
	if at == grant.Never {
		return
	}
	w.count++
	heap.Push(&w.events, event{max(at, w.now), w.count, f})
}

// After runs f after d of real time.
func (w *World) After(d time.Duration, f func()) { w.At(w.now.Add(d), f) }

// Run lets the world go on for d. The error is what a judge found.
func (w *World) Run(d time.Duration) error { return w.RunUntil(w.now.Add(d)) }

// RunUntil lets the world go on to an instant.
func (w *World) RunUntil(until grant.Instant) error {
	for len(w.events) > 0 && w.events[0].at <= until {
		e := heap.Pop(&w.events).(event)
		w.now = e.at
		e.run()
		w.ran++
		if w.cfg.Paranoid {
			w.Judge.inspect()
		}
		if err := w.Judge.fault; err != nil {
			return fmt.Errorf("at %v, event %d: %w", time.Duration(w.now), w.ran, err)
		}
	}
	w.now = max(w.now, until)
	return nil
}

// Gateways are all gateways that were ever added, dead ones included.
func (w *World) Gateways() []*Gateway { return w.gateways }
