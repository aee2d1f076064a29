package gate_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/stipend/stipend/agent"
	"github.com/stipend/stipend/agent/gate"
	"github.com/stipend/stipend/agent/link/linktest"
	"github.com/stipend/stipend/proto/grant"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func policy() *grant.Policy {
	return &grant.Policy{
		Plan: "gold", Rate: grant.Rate{Units: 1000, Per: time.Second}, Burst: 1000,
		Classes: map[grant.RouteClass]grant.Class{"read": {Cost: 1}, "dear": {Cost: 60}, "huge": {Cost: 1000}},
		Grant:   grant.GrantSettings{Quantum: 100, Owners: 4, TTL: 10 * time.Second},
	}
}

// world is one gate and one fake authority in a bubble.
type world struct {
	*testing.T
	a    *linktest.Authority
	g    *gate.Gate
	step atomic.Int64 // of the wall clock
	nap  atomic.Int64 // of the boot clock: what a suspended machine adds
	late atomic.Int64 // of all clocks: time that passes without any timer
	stop func()
}

func config(a *linktest.Authority) gate.Config {
	cfg := gate.Defaults()
	cfg.Owner = "gw-1"
	cfg.Log = slog.New(slog.DiscardHandler)
	cfg.Authority.Target, cfg.Authority.Dial, cfg.Authority.Keepalive = "authority", a.Dial, 0
	return cfg
}

func bubble(t *testing.T, change func(*gate.Config), body func(*world)) {
	synctest.Test(t, func(t *testing.T) {
		a := linktest.New()
		w := &world{T: t, a: a}
		cfg := config(a)
		base := time.Now()
		mono := func() grant.Instant { return grant.Instant(time.Since(base)+time.Hour) + grant.Instant(w.late.Load()) }
		cfg.Clock = gate.Clock{
			Now: func() agent.Reading {
				return agent.Reading{Mono: mono(), Wall: grant.Instant(time.Now().UnixNano() + w.step.Load() + w.late.Load())}
			},
			Kernel: func() (boot, raw grant.Instant, err error) {
				return mono() + grant.Instant(w.nap.Load()), mono(), nil
			},
		}
		if change != nil {
			change(&cfg)
		}
		g, err := gate.New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		w.g = g
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- g.Run(ctx) }()
		var once sync.Once
		w.stop = func() {
			once.Do(func() {
				cancel()
				if err := <-done; err != nil {
					t.Error(err)
				}
			})
		}
		advance(10 * time.Millisecond)
		body(w)
		w.stop()
		a.Close()
	})
}

func advance(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

func (w *world) decide(tenant grant.TenantID, class grant.RouteClass) agent.Decision {
	return w.g.Decide(w.Context(), gate.Request{Tenant: tenant, Class: class, Count: 1})
}

// warm makes the tenant hot and its wallet filled.
func (w *world) warm(tenant grant.TenantID) {
	w.Helper()
	for i := range 200 {
		if d := w.decide(tenant, "read"); d.Outcome != agent.Admitted {
			w.Fatalf("request %d: %+v", i, d)
		}
		advance(5 * time.Millisecond)
	}
}

func held(g *gate.Gate) grant.Units { return g.Stats().Wallets.Held }

// A first request is admitted by the authority; a hot tenant's come from the
// wallet, and what is admitted was deducted.
func TestDecides(t *testing.T) {
	bubble(t, nil, func(w *world) {
		w.a.Put("acme", policy())
		if d := w.decide("acme", "read"); d.Outcome != agent.Admitted || d.Path != agent.Central || d.Cost != 1 {
			w.Errorf("first: %+v", d)
		}
		w.warm("acme")
		d := w.decide("acme", "read")
		if d.Outcome != agent.Admitted || d.Path != agent.Local || !w.g.Recheck(d) {
			w.Errorf("hot: %+v", d)
		}
		granted, checked := w.a.Deducted("acme")
		s := w.g.Stats()
		if got := s.Wallets.Spent + checked; got != 202 {
			w.Errorf("202 admitted, %d paid for", got)
		}
		if granted != s.Wallets.Spent+s.Wallets.Held {
			w.Errorf("granted %d, spent %d and held %d", granted, s.Wallets.Spent, s.Wallets.Held)
		}
		if d := w.decide("nobody", "read"); d.Outcome == agent.Admitted || d.Reason != grant.UnknownTenant {
			w.Errorf("unknown tenant: %+v", d)
		}
		if d := w.decide("acme", "nope"); d.Outcome == agent.Admitted || d.Reason != grant.UnknownRoute {
			w.Errorf("unknown class: %+v", d)
		}
	})
}

// A wallet that runs low is filled before it is empty: in steady load nobody
// waits.
func TestAsksAhead(t *testing.T) {
	bubble(t, nil, func(w *world) {
		w.a.Put("acme", policy())
		w.warm("acme")
		waited := func() (n uint64) {
			for _, l := range w.g.Stats().Latencies {
				if l.Waited {
					for _, b := range l.Buckets {
						n += b
					}
				}
			}
			return n
		}
		before := waited()
		for range 2000 {
			w.decide("acme", "read")
			advance(2 * time.Millisecond)
		}
		if n := waited() - before; n > 0 {
			w.Errorf("%d of 2000 waited", n)
		}
	})
}

// The bucket bounds what concurrent callers get, and those over it are denied
// and not undecided.
func TestSaturated(t *testing.T) {
	bubble(t, nil, func(w *world) {
		w.a.Put("acme", policy())
		counts := map[agent.Outcome]int{}
		var mu sync.Mutex
		var wg sync.WaitGroup
		start := time.Now()
		for range 30 {
			wg.Go(func() {
				for time.Since(start) < 10*time.Second {
					d := w.decide("acme", "read")
					mu.Lock()
					counts[d.Outcome]++
					mu.Unlock()
					<-time.After(10 * time.Millisecond)
				}
			})
		}
		wg.Wait()
		n := counts[agent.Admitted]
		if n > 1000+10*1000+100 {
			w.Errorf("admitted %d in 10 s at 1000/s with a burst of 1000", n)
		}
		if n < 9700 {
			w.Errorf("admitted only %d of 11000", n)
		}
		if counts[agent.Undecided] > 0 {
			w.Errorf("a saturated tenant saw %d undecided", counts[agent.Undecided])
		}
	})
}

// Case 26: the authority accepts and never answers. Every request is answered
// within its deadline, and within a second of the return all is well again.
func TestSilentAuthority(t *testing.T) {
	bubble(t, nil, func(w *world) {
		w.a.Put("acme", policy())
		w.a.SetMood(linktest.Silent)
		var late atomic.Int64
		var wg sync.WaitGroup
		for i := range 400 {
			wg.Go(func() {
				<-time.After(time.Duration(i) * 25 * time.Millisecond) // for 10 s
				start := time.Now()
				d := w.decide("acme", "read")
				if took := time.Since(start); took > 50*time.Millisecond {
					late.Add(1)
				}
				if d.Outcome != agent.Undecided {
					w.Errorf("silence was taken for %v", d.Outcome)
				}
			})
		}
		wg.Wait()
		if late.Load() > 0 {
			w.Errorf("%d of 400 answered after their deadline", late.Load())
		}
		if n := w.a.Opened(); n > 12 {
			w.Errorf("%d dials in 10 s", n)
		}
		w.a.SetMood(linktest.Well)
		advance(time.Second)
		if d := w.decide("acme", "read"); d.Outcome != agent.Admitted {
			w.Errorf("a second after the return: %+v", d)
		}
	})
}

// The agent tolerates naps of 1 s, the authority allows for 0.1 s: as the
// welcome says so, what is held lives 0.9 s shorter than its ttl.
func TestLargerToleranceThanTheAuthoritys(t *testing.T) {
	bubble(t, func(c *gate.Config) { c.Tolerance = time.Second }, func(w *world) {
		p := policy()
		p.Grant.TTL = 2 * time.Second
		w.a.Put("acme", p)
		w.warm("acme")
		if held(w.g) == 0 {
			w.Fatal("nothing is held")
		}
		w.a.SetMood(linktest.Silent) // no renewal from here on
		advance(p.Grant.TTL - 900*time.Millisecond + time.Millisecond)
		if n := held(w.g); n > 0 {
			w.Errorf("%d units live on", n)
		}
	})
}

// Case 32: the authority is gone. What is held is spent, after that requests
// are undecided, never denied; readiness says so.
func TestCase32AuthorityGone(t *testing.T) {
	bubble(t, nil, func(w *world) {
		w.a.Put("acme", policy())
		w.warm("acme")
		if err := w.g.Ready(); err != nil {
			w.Errorf("ready: %v", err)
		}
		w.a.SetMood(linktest.Silent)
		w.a.HangUp()
		advance(50 * time.Millisecond)
		have := held(w.g)
		if have == 0 {
			w.Fatal("nothing held before the loss")
		}
		outcomes := map[agent.Outcome]grant.Units{}
		for range have + 20 {
			outcomes[w.decide("acme", "read").Outcome]++
		}
		if outcomes[agent.Admitted] != have || outcomes[agent.Undecided] != 20 {
			w.Errorf("held %d: %v", have, outcomes)
		}
		if w.g.Ready() == nil {
			w.Error("ready without a link")
		}
	})
}

// Case 25: an overloaded authority is not a lost one; the caller's context is
// heard.
func TestOverloadedAndContext(t *testing.T) {
	bubble(t, nil, func(w *world) {
		w.a.Put("acme", policy())
		w.a.SetMood(linktest.Overloaded)
		if d := w.decide("acme", "read"); d.Outcome != agent.Undecided || d.Reason != grant.Overloaded {
			w.Errorf("overloaded: %+v", d)
		}
		w.a.SetMood(linktest.Silent)
		ctx, cancel := context.WithCancel(w.Context())
		got := make(chan agent.Decision, 1)
		go func() { got <- w.g.Decide(ctx, gate.Request{Tenant: "acme", Class: "read", Count: 1}) }()
		advance(5 * time.Millisecond)
		cancel()
		synctest.Wait()
		select {
		case d := <-got:
			if d.Outcome != agent.Undecided {
				w.Errorf("cancelled: %+v", d)
			}
		default:
			w.Error("a cancelled request waits on")
		}
		ctx, cancel = context.WithTimeout(w.Context(), 20*time.Millisecond)
		defer cancel()
		start := time.Now()
		w.g.Decide(ctx, gate.Request{Tenant: "acme", Class: "read", Count: 1})
		if took := time.Since(start); took > 20*time.Millisecond {
			w.Errorf("a context of 20 ms took %v", took)
		}
	})
}

// The guard drops what is held when the machine slept or the wall stepped, on
// its ticks and before the next request alike; an admission from before does
// not pass Recheck, one that was held up does not either.
func TestClocks(t *testing.T) {
	bubble(t, nil, func(w *world) {
		w.a.Put("acme", policy())
		w.warm("acme")
		d := w.decide("acme", "read")
		if !w.g.Recheck(d) {
			w.Fatal("a fresh admission does not pass")
		}
		w.step.Add(int64(time.Minute))
		if w.g.Recheck(d) {
			w.Error("an admission from before a step passes at once")
		}
		advance(150 * time.Millisecond)
		if w.g.Recheck(d) {
			w.Error("an admission from before a step passes after the guard took the new offset")
		}
		if s := w.g.Stats(); s.Wallets.Dropped[agent.DropClock] == 0 || s.Moves != 1 {
			w.Errorf("after a step of the wall: %+v", s.Wallets)
		}
		w.warm("acme")
		before := held(w.g)
		w.nap.Add(int64(time.Second)) // asleep, and the wall was not corrected
		advance(150 * time.Millisecond)
		if s := w.g.Stats(); s.Moves != 2 || s.Wallets.Dropped[agent.DropClock] < before {
			w.Errorf("after a nap: held %d, %+v", before, s.Wallets)
		}
		for range 10 { // naps below the tolerance add up
			w.nap.Add(int64(30 * time.Millisecond))
			advance(100 * time.Millisecond)
		}
		if s := w.g.Stats(); s.Moves < 4 {
			w.Errorf("ten naps of 30 ms: %d moves seen", s.Moves)
		}
		w.warm("acme")
		moves := w.g.Stats().Moves
		w.nap.Add(int64(time.Second))
		w.late.Add(int64(400 * time.Millisecond)) // the guard's ticker did not run
		w.decide("acme", "read")
		if s := w.g.Stats(); s.Moves != moves+1 {
			w.Error("with a late guard a request did not look at the clocks itself")
		}
		advance(time.Millisecond)
		d = w.decide("acme", "read")
		w.late.Add(int64(150 * time.Millisecond))
		if !w.g.Recheck(d) {
			w.Error("an admission does not pass within MaxForwardDelay")
		}
		w.late.Add(int64(51 * time.Millisecond))
		if w.g.Recheck(d) {
			w.Error("an admission passes after more than MaxForwardDelay")
		}
		// Wallets and denials are whole again.
		w.warm("acme")
	})
}

// Case 27 and 28: ids are told apart or refused, and tenants beyond the bound
// of the table cost nothing.
func TestCase27And28Tenants(t *testing.T) {
	bubble(t, func(c *gate.Config) { c.MaxTenants = 50 }, func(w *world) {
		w.a.Put("a:b", policy())
		w.a.Put("a", policy())
		w.decide("a:b", "read")
		if _, n := w.a.Deducted("a"); n != 0 {
			w.Error("a pays for a:b")
		}
		for _, id := range []grant.TenantID{"", "x\x00y", grant.TenantID(make([]byte, 1<<20))} {
			if d := w.decide(id, "read"); d.Outcome != agent.Rejected || d.Reason != grant.Invalid {
				w.Errorf("id of %d bytes: %+v", len(id), d)
			}
		}
		for i := range 1000 {
			w.decide(grant.TenantID(fmt.Sprintf("made-up-%d", i)), "read")
		}
		s := w.g.Stats()
		if s.Tenants > 50 || s.Refused == 0 {
			w.Errorf("1000 tenants in a table of 50: %d kept, %d refused", s.Tenants, s.Refused)
		}
		advance(time.Minute) // they cool down and are forgotten, counters stay
		if s := w.g.Stats(); s.Tenants != 0 || s.Evicted == 0 || s.Wallets.Checks == 0 {
			w.Errorf("after a minute: %d kept, %d forgotten, %d checks", s.Tenants, s.Evicted, s.Wallets.Checks)
		}
		if d := w.decide("a", "read"); d.Outcome != agent.Admitted {
			w.Errorf("after the flood: %+v", d)
		}
	})
}

// One tenant's Checks cannot take the whole ceiling, and those refused by it
// are undecided, not denied.
func TestCeiling(t *testing.T) {
	bubble(t, func(c *gate.Config) { c.MaxChecks, c.MaxChecksPerTenant = 8, 4 }, func(w *world) {
		p := policy()
		p.Grant = grant.GrantSettings{}
		w.a.Put("abuser", p)
		w.a.Put("good", p)
		w.a.SetMood(linktest.Silent)
		var wg sync.WaitGroup
		for range 100 {
			wg.Go(func() { w.decide("abuser", "read") })
		}
		wg.Go(func() { w.decide("good", "read") })
		synctest.Wait()
		if s := w.g.Stats(); s.Checks != 5 || s.Ceiling != 96 {
			w.Errorf("%d in flight, %d refused; want 4 and 1 in flight, 96 refused", s.Checks, s.Ceiling)
		}
		wg.Wait()
		w.a.HangUp()
		advance(time.Millisecond)
		if s := w.g.Stats(); s.Checks != 0 {
			w.Errorf("%d in flight without a stream", s.Checks)
		}
		w.a.SetMood(linktest.Well)
		advance(3 * time.Second)
		if d := w.decide("abuser", "read"); d.Outcome != agent.Admitted {
			w.Errorf("after the flood: %+v", d)
		}
	})
}

// Draining asks for nothing more, goes on deciding, discards at the end, and
// ends Run; nothing is admitted afterwards.
func TestDrain(t *testing.T) {
	bubble(t, nil, func(w *world) {
		w.a.Put("acme", policy())
		w.warm("acme")
		ctx, cancel := context.WithTimeout(w.Context(), 5*time.Second)
		defer cancel()
		drained := make(chan error, 1)
		start := time.Now()
		go func() { drained <- w.g.Drain(ctx) }()
		advance(10 * time.Millisecond)
		if err := w.g.Ready(); err == nil || err.Error() != "draining" {
			w.Errorf("ready: %v", err)
		}
		asked := w.g.Stats().Wallets.Requests
		for range 300 {
			if d := w.decide("acme", "read"); d.Outcome != agent.Admitted {
				w.Fatalf("while draining: %+v", d)
			}
			advance(5 * time.Millisecond)
		}
		if s := w.g.Stats(); s.Wallets.Requests != asked || s.Wallets.Held != 0 {
			w.Errorf("while draining: %d new grant requests, %d held", s.Wallets.Requests-asked, s.Wallets.Held)
		}
		if err := <-drained; err != nil {
			w.Error(err)
		}
		if took := time.Since(start); took > 3*time.Second {
			w.Errorf("drained after %v", took)
		}
		if !w.a.Discarded(w.g.Incarnation()) {
			w.Error("not discarded")
		}
		if err := w.g.Ready(); err == nil || err.Error() != "drained" {
			w.Errorf("ready after the drain: %v", err)
		}
		if d := w.decide("acme", "read"); d.Outcome != agent.Undecided {
			w.Errorf("after the drain: %+v", d)
		}
	})
}

// Case 31: those refused at one moment are spread over the refill.
func TestRetryAfterSpreads(t *testing.T) {
	bubble(t, nil, func(w *world) {
		p := policy()
		p.Rate, p.Burst, p.Classes, p.Grant = grant.Rate{Units: 10, Per: time.Second}, 10,
			map[grant.RouteClass]grant.Class{"read": {Cost: 1}}, grant.GrantSettings{}
		w.a.Put("acme", p)
		var mu sync.Mutex
		spread := map[time.Duration]int{}
		var wg sync.WaitGroup
		for range 110 {
			wg.Go(func() {
				if d := w.decide("acme", "read"); d.Outcome == agent.Denied {
					mu.Lock()
					spread[d.RetryAfter.Truncate(time.Second)]++
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		// Some are spread by the authority and some here, each over what it
		// refused itself: the fullest second has less than all of one side.
		fullest := 0
		for _, n := range spread {
			fullest = max(fullest, n)
		}
		if len(spread) < 5 || fullest > 50 {
			w.Errorf("100 refused at 10 a second are told %v", spread)
		}
	})
}

// A record is written for every admission and for nothing else.
func TestRecord(t *testing.T) {
	var mu sync.Mutex
	var got []gate.Admission
	bubble(t, func(c *gate.Config) {
		c.Record = func(a gate.Admission) { mu.Lock(); got = append(got, a); mu.Unlock() }
	}, func(w *world) {
		w.a.Put("acme", policy())
		w.warm("acme")
		w.decide("nobody", "read")
		if len(got) != 200 || got[0].Tenant != "acme" || got[0].Decision.Cost != 1 {
			w.Errorf("%d records of 200 admissions", len(got))
		}
		if d := time.Duration(got[199].Wall) - time.Duration(time.Now().UnixNano()); d > 0 || d < -time.Second {
			w.Errorf("the last record is %v off", d)
		}
	})
}
