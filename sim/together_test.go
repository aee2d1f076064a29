package sim

import (
	"fmt"
	"testing"
	"time"

	"github.com/stipend/stipend/agent"
	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

// Scenarios and cases of authority and agents together.

// wake makes a gateway hot for acme and lets it hold units.
func wake(t testing.TB, w *World, i int) *entry {
	t.Helper()
	for range 4 {
		w.Gateways()[i].Request(acme, "c", 1, time.Second, nil)
		run(t, w, 20*time.Millisecond)
	}
	return w.Gateways()[i].tenants[acme]
}

// A gateway's machine sleeps between the sending of a grant request and its
// answer: the units are not trusted, however little MONOTONIC moved.
func TestSuspendDuringGrant(t *testing.T) {
	for _, nap := range []time.Duration{150 * time.Millisecond, 30 * time.Second} {
		w := newWorld(t, paranoid(1), 1)
		put(t, w, acme, policy(1000, 1000, 50, 2, 20*time.Second))
		g := w.Gateways()[0]
		e := wake(t, w, 0)
		before := e.Stats()
		for !e.accounts[0].open { // spend until it asks
			g.Request(acme, "c", 1, time.Second, nil)
		}
		g.Pause(true)
		run(t, w, nap)
		if s := w.Judge.Tenant(acme).of(g.inc, false); !hasGrant(s, e.accounts[0].sent) {
			t.Fatal("the authority did not grant meanwhile")
		}
		kept := e.Stats().Held
		g.Resume() // its answer is the first thing it sees
		s := e.Stats()
		if s.Granted == before.Granted || s.Dropped[agent.DropClock] == 0 {
			t.Errorf("asleep for %v: %+v, the answer was not dropped", nap, s)
		}
		if s.Held > kept {
			t.Errorf("asleep for %v: %d units held before, %d after", nap, kept, s.Held)
		}
		run(t, w, time.Second)
		held(t, w)
	}
}

func hasGrant(l *ledgerOf, id grant.GrantID) bool { _, ok := l.granted[id]; return ok }

func paranoid(seed uint64) Config {
	cfg := DefaultConfig(seed)
	cfg.Paranoid = true
	return cfg
}

// The guard, which compares more clocks, distrusts them while a request is open:
// its answer is dropped though wall and monotonic time agree.
func TestGuardDistrustsOpenRequest(t *testing.T) {
	w := newWorld(t, paranoid(11), 1)
	put(t, w, acme, policy(1000, 1000, 50, 2, 20*time.Second))
	g, e := w.Gateways()[0], wake(t, w, 0)
	for !e.accounts[0].open {
		g.Request(acme, "c", 1, time.Second, nil)
	}
	id := e.accounts[0].sent
	now := g.now()
	e.Distrust(now)
	g.settle(e, now)
	run(t, w, time.Millisecond)
	for d := time.Duration(0); !w.Judge.Tenant(acme).of(g.inc, false).granted[id].credited; d += time.Millisecond {
		if d > time.Second {
			t.Fatalf("request %d was never answered", id)
		}
		run(t, w, time.Millisecond)
	}
	units := w.Judge.Tenant(acme).of(g.inc, false).granted[id].units
	if got := e.Stats().Dropped[agent.DropClock]; got < units {
		t.Errorf("%d units dropped, the answer had %d", got, units)
	}
	held(t, w)
}

// The same for the ALLOW of a Check: it is not forwarded.
func TestSuspendDuringCheck(t *testing.T) {
	cfg := paranoid(2)
	cfg.Agent.Deadline = time.Second
	w := newWorld(t, cfg, 1)
	put(t, w, acme, policy(10, 10, 0, 0, 0))
	g := w.Gateways()[0]
	var got agent.Decision
	g.Request(acme, "c", 1, time.Second, func(d agent.Decision) { got = d })
	g.Pause(true)
	run(t, w, 500*time.Millisecond)
	g.Resume()
	if got.Outcome != agent.Undecided || got.Reason != grant.ClockDistrust {
		t.Errorf("an ALLOW that slept was answered %v %v", got.Outcome, got.Reason)
	}
	held(t, w)
}

// Naps below the tolerance go unnoticed, and cost nothing: the authority waits
// that much longer. More of them in one grant's life than the tolerance do not.
func TestNapBelowTolerance(t *testing.T) {
	ttl := 2 * time.Second
	w := newWorld(t, paranoid(3), 2)
	put(t, w, acme, policy(0, 1000, 50, 1, ttl))
	g, e := w.Gateways()[0], wake(t, w, 0)
	account := &e.accounts[0]
	first := w.Now().Add(-g.now().Mono.Sub(account.first.Mono))
	g.Nap(90*time.Millisecond, true)
	run(t, w, 100*time.Millisecond)
	if s := e.Stats(); s.Held == 0 || s.Dropped[agent.DropClock] > 0 {
		t.Fatalf("a nap of 90 ms cost units: %+v", s)
	}
	// Near the end of the grant, more than its ttl of real time after it was sent.
	g.up = false // no renewal: the link is silent
	if err := w.RunUntil(first.Add(ttl + 80*time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if d, ok := e.Take(g.now(), "c", 1); !ok {
		t.Fatalf("the units died early: %+v", e.Stats())
	} else {
		g.decided(e, d, nil, nil)
	}
	var out grant.Units
	w.Center.Inspect(acme, func(s *authority.TenantState) { out = s.Ordinary.Outstanding })
	run(t, w, time.Millisecond)
	if out < e.Stats().Held+1 {
		t.Errorf("the authority takes %d units for unspent, the gateway held %d", out, e.Stats().Held+1)
	}
	g.up = true
	for range 3 { // together more than the tolerance
		g.Nap(90*time.Millisecond, true)
		run(t, w, 100*time.Millisecond)
	}
	held(t, w)
}

// An answer for a closed id, an old one again, one of another incarnation: ignored
// and counted.
func TestAnswerForClosedID(t *testing.T) {
	w := newWorld(t, paranoid(4), 2)
	put(t, w, acme, policy(1000, 1000, 10, 4, 10*time.Second))
	g, e := w.Gateways()[0], wake(t, w, 0)
	for range 40 { // several grants
		g.Request(acme, "c", 1, time.Second, nil)
		run(t, w, 20*time.Millisecond)
	}
	before := e.Stats()
	n := uint64(0)
	for id := range grant.GrantID(e.accounts[0].sent + 1) {
		for _, owner := range []grant.Incarnation{g.inc, w.Gateways()[1].inc} {
			if id == e.accounts[0].sent && e.accounts[0].open {
				continue
			}
			g.granted(nil, grant.GrantAnswer{Tenant: acme, Incarnation: owner, ID: id, Result: grant.Granted, Units: 10, TTL: 10 * time.Second})
			n++
		}
	}
	s := e.Stats()
	if s.Granted != before.Granted || s.Ignored-before.Ignored != n {
		t.Errorf("%d units credited, %d of %d answers ignored", s.Granted-before.Granted, s.Ignored-before.Ignored, n)
	}
	held(t, w)
}

// held_ is held for worlds whose fault may already be known.

// saturate runs a world with one load and returns the utilisation after a warm-up.
func utilisation(t testing.TB, w *World, warmUp, d time.Duration) float64 {
	t.Helper()
	run(t, w, warmUp)
	from := w.Now()
	before := w.Judge.Tenant(acme).Counts
	run(t, w, d)
	held(t, w)
	v, c := verdict(t, w, acme, from), w.Judge.Tenant(acme).Counts
	t.Logf("%d units, %.2f %% of the rate; %d denied, %d undecided, longest wait %v, %d events",
		c.Units-before.Units, float64(v.UtilisationPPM)/10_000, c.Denied-before.Denied, c.Undecided-before.Undecided, c.LongestWait, w.Events())
	if n := c.Undecided - before.Undecided; n > 0 {
		t.Errorf("%d requests of a saturated tenant were answered 503 (%v), not 429", n, c.UndecidedBy)
	}
	return float64(v.UtilisationPPM) / 1_000_000
}

// Price 5 at r = 2/s with 32 owners: at least 97 % used.
func TestDearPriceSlowRate(t *testing.T) {
	w := newWorld(t, DefaultConfig(5), 32)
	put(t, w, acme, policy(2, 10, 5, 32, time.Hour))
	w.Offer(Load{Tenant: acme, Class: "five", Every: Poisson(96), At: Evenly(32)})
	if u := utilisation(t, w, time.Minute, 10*time.Minute); u < 0.97 {
		t.Errorf("%.3f of the rate is used", u)
	}
}

// r = 10/s, q = 100, N = 32, ttl 10 s: far from what is promised 97 %, yet no
// grant is dead on arrival, and no owner is starved over an hour.
func TestNoOwnerStarves(t *testing.T) {
	w := newWorld(t, DefaultConfig(6), 32)
	put(t, w, acme, policy(10, 100, 100, 32, 10*time.Second))
	got := make(map[grant.Owner]grant.Units)
	w.Offer(Load{Tenant: acme, Class: "c", Every: Poisson(128), At: Evenly(32), Done: func(g *Gateway, d agent.Decision) {
		if d.Outcome == agent.Admitted {
			got[g.Owner] += d.Cost
		}
	}})
	d := time.Hour
	if testing.Short() {
		d = 10 * time.Minute
	}
	run(t, w, d)
	held(t, w)
	var late, all grant.Units
	for _, g := range w.Gateways() {
		s := g.tenants[acme].Stats()
		late += s.Dropped[agent.DropReplaced]
		all += got[g.Owner]
	}
	fair := all / 32
	for _, g := range w.Gateways() {
		if got[g.Owner] < fair/2 {
			t.Errorf("%s got %d units, an even share is %d", g.Owner, got[g.Owner], fair)
		}
	}
	if late > 0 {
		t.Errorf("%d units were dead on arrival", late)
	}
	t.Logf("%d of %d units used", all, 10*grant.Units(d/time.Second))
}

// Checks offered at 2r beside parked grants: neither path gets less than 40 %.
func TestChecksBesideParkedGrants(t *testing.T) {
	w := newWorld(t, DefaultConfig(7), 4)
	p := policy(100, 100, 20, 4, 30*time.Second)
	p.Classes["two"] = grant.Class{Cost: 2, Central: true}
	put(t, w, acme, p)
	w.Offer(Load{Tenant: acme, Class: "c", Every: Poisson(200), At: Evenly(4)})
	w.Offer(Load{Tenant: acme, Class: "two", Every: Poisson(100), At: Evenly(4)})
	run(t, w, 10*time.Second)
	before := w.Judge.Tenant(acme).Counts.ByPath
	run(t, w, 60*time.Second)
	held(t, w)
	after := w.Judge.Tenant(acme).Counts.ByPath
	local, central := after[agent.Local]-before[agent.Local], after[agent.Central]-before[agent.Central]
	t.Logf("%d from grants, %d from Checks of 6000", local, central)
	if local < 2400 || central < 2400 || local+central < 5820 {
		t.Errorf("%d from grants and %d from Checks, of 6000 each must have 2400 and both 5820", local, central)
	}
}

// Load that hops over the gateways every second, with a policy that is promised
// 97 %.
func TestHoppingLoad(t *testing.T) {
	w := newWorld(t, DefaultConfig(8), 8)
	put(t, w, acme, policy(100, 100, 22, 8, time.Minute))
	w.Offer(Load{Tenant: acme, Class: "c", Every: Poisson(200), At: Hopping(8, time.Second)})
	if u := utilisation(t, w, 10*time.Second, 10*time.Minute); u < 0.97 {
		t.Errorf("%.3f of the rate is used", u)
	}
}

// r = 1/hour, B = 1, a restart every 30 minutes: 24 of 25 in a day.
func TestSlowestRateManyRestarts(t *testing.T) {
	w := newWorld(t, DefaultConfig(9), 2)
	p := policy(0, 1, 0, 0, 0)
	p.Rate = grant.Rate{Units: 1, Per: time.Hour}
	put(t, w, acme, p)
	w.Offer(Load{Tenant: acme, Class: "c", Every: Steady(1.0 / 60), At: Evenly(2)})
	for i := range 48 {
		run(t, w, 30*time.Minute)
		if i%2 == 0 {
			w.Center.Crash()
		} else {
			w.Center.StepDown()
		}
		run(t, w, time.Second)
		w.Center.Start()
	}
	held(t, w)
	if n := w.Judge.Tenant(acme).Counts.Admitted; n < 24 || n > 25 {
		t.Errorf("%d admitted in a day, want 24 or 25", n)
	}
}

// Cheap requests beside dear ones in one agent, twice what the rate brings:
// the dear get their share, given a deadline within which one of them accrues.
func TestCheapBesideDear(t *testing.T) {
	cfg := DefaultConfig(10)
	cfg.Agent.Deadline = 200 * time.Millisecond
	w := newWorld(t, cfg, 1)
	put(t, w, acme, policy(200, 100, 50, 1, 30*time.Second))
	var admitted, asked [2]float64
	count := func(i int) func(*Gateway, agent.Decision) {
		return func(_ *Gateway, d agent.Decision) {
			asked[i]++
			if d.Outcome == agent.Admitted {
				admitted[i]++
			}
		}
	}
	w.Offer(Load{Tenant: acme, Class: "c", Every: Poisson(300), At: On(0), Done: count(0)})
	w.Offer(Load{Tenant: acme, Class: "ten", Every: Poisson(10), At: On(0), Done: count(1)})
	run(t, w, time.Minute)
	held(t, w)
	cheap, dear := admitted[0]/asked[0], admitted[1]/asked[1]
	t.Logf("%.1f %% of the cheap, %.1f %% of the dear", 100*cheap, 100*dear)
	if dear < cheap/2 {
		t.Errorf("%.3f of the cheap requests are admitted, %.3f of the dear ones", cheap, dear)
	}
}

// A saturated tenant hears 429, never 503, with Retry-After, under any policy that
// covers the round trip and any load, hot or cold, near or far, while the center
// is healthy.
func TestSaturatedHears429(t *testing.T) {
	seed := uint64(100)
	for _, p := range []*grant.Policy{
		policy(100, 50, 20, 4, 30*time.Second), policy(100, 50, 1, 4, 30*time.Second), policy(1, 1, 1, 4, 30*time.Second),
		policy(100, 50, 0, 0, 0), policy(0, 10, 5, 4, 10*time.Second), policy(10, 100, 100, 2, time.Second),
	} {
		for _, rate := range []float64{1.3, 40, 300} {
			for _, latency := range []time.Duration{200 * time.Microsecond, 10 * time.Millisecond} {
				seed++
				cfg := DefaultConfig(seed)
				cfg.Net.Latency, cfg.Net.Jitter = latency, latency/2
				offered := 4 * rate
				if p.Grant.Enabled() && float64(p.Grant.Quantum) < 2*p.Rate.PerSecond()*(3*latency+time.Millisecond).Seconds() || offered < 1.1*p.Rate.PerSecond() {
					continue // q does not cover the round trip, or nothing is saturated
				}
				w := newWorld(t, cfg, 4)
				w.Center.Put(acme, p, nil)
				run(t, w, time.Second)
				noRetry := 0
				w.Offer(Load{Tenant: acme, Class: "c", Every: Poisson(offered), At: Evenly(4), Done: func(_ *Gateway, d agent.Decision) {
					if d.Outcome == agent.Denied && d.RetryAfter <= 0 && !p.Rate.Zero() {
						noRetry++
					}
				}})
				run(t, w, 20*time.Second)
				held(t, w)
				if c := w.Judge.Tenant(acme).Counts; c.Undecided > 0 || c.Denied == 0 || noRetry > 0 {
					t.Errorf("%v, B %d, q %d, %v/s, latency %v: %d denied (%d without Retry-After), %d undecided for %v", p.Rate, p.Burst, p.Grant.Quantum, offered, latency,
						c.Denied, noRetry, c.Undecided, reasons(c))
				}
			}
		}
	}
}

func reasons(c Counts) string {
	out := ""
	for r, n := range c.UndecidedBy {
		if n > 0 {
			out += fmt.Sprintf("%v: %d ", grant.Reason(r), n)
		}
	}
	return out
}

// Waiters resume within a second of refill: r = 0 and requests waiting, then the
// rate is set. (Case 22.)
func TestCase22RateComesBack(t *testing.T) {
	w := newWorld(t, paranoid(22), 3)
	put(t, w, acme, policy(0, 20, 5, 3, 10*time.Second))
	w.Offer(Load{Tenant: acme, Class: "c", Every: Poisson(60), At: Evenly(3)})
	run(t, w, 10*time.Second)
	drained := w.Judge.Tenant(acme).Counts.Units
	if drained != 20 {
		t.Fatalf("%d units admitted of a bucket of 20 that never refills", drained)
	}
	put(t, w, acme, policy(1000, 20, 5, 3, 10*time.Second))
	run(t, w, 990*time.Millisecond)
	if got := w.Judge.Tenant(acme).Counts.Units - drained; got < 30 {
		t.Errorf("%d units admitted in the second after the rate came back, 60 were asked for", got)
	}
	held(t, w)
}

// Case 16: both the first and the retried answer arrive, twice, ten times:
// credited once. The Judge compares every credit.
func TestCase16AnswersManyTimes(t *testing.T) {
	cfg := paranoid(16)
	cfg.Net.DupPPM, cfg.Net.Late = 900_000, 5*time.Second
	w := newWorld(t, cfg, 2)
	put(t, w, acme, policy(100, 100, 5, 2, 10*time.Second))
	w.Offer(Load{Tenant: acme, Class: "c", Every: Steady(100), At: Evenly(2)})
	run(t, w, 20*time.Second)
	held(t, w)
	c := w.Judge.Tenant(acme).Counts
	if c.GrantsCredited < 20 {
		t.Errorf("only %d grants were credited", c.GrantsCredited)
	}
}

// Case 17: answers after their grant's own expiry, or after a newer grant was
// asked for: ignored and counted.
func TestCase17LateAnswers(t *testing.T) {
	cfg := paranoid(17)
	cfg.Net.LatePPM, cfg.Net.Late = 400_000, 4*time.Second
	w := newWorld(t, cfg, 2)
	put(t, w, acme, policy(100, 100, 5, 2, time.Second))
	w.Offer(Load{Tenant: acme, Class: "c", Every: Steady(100), At: Evenly(2)})
	run(t, w, 20*time.Second)
	held(t, w)
	var ignored uint64
	for _, g := range w.Gateways() {
		ignored += g.tenants[acme].Stats().Ignored
	}
	if ignored == 0 {
		t.Error("no late answer was counted")
	}
}

// Case 18: two agents with one name, and one that comes back 100 times in a
// minute: distinct incarnations, the bound holds, at most q is lost per death.
func TestCase18SameNameManyLives(t *testing.T) {
	w := newWorld(t, DefaultConfig(18), 2)
	twin := w.AddGateway("gw0", 0) // the name of the first
	ttl := 10 * time.Second
	put(t, w, acme, policy(100, 50, 5, 30, ttl))
	w.Offer(Load{Tenant: acme, Class: "c", Every: Poisson(200), At: Evenly(3)})
	run(t, w, time.Second)
	if w.Gateways()[0].inc == twin.inc {
		t.Fatal("two processes are one incarnation")
	}
	before := w.Judge.Tenant(acme).Counts.Units
	for range 100 {
		twin.Kill()
		run(t, w, 10*time.Millisecond)
		twin.Start()
		run(t, w, 590*time.Millisecond)
	}
	held(t, w)
	got := w.Judge.Tenant(acme).Counts.Units - before
	if least := grant.Units(100*60 - 100*5); got < least {
		t.Errorf("%d units admitted in a minute of 100 deaths, want %d at least: q lost per death", got, least)
	}
	if err := grant.Owner("").Validate(); err == nil {
		t.Error("an empty name is accepted")
	}
}

// Case 19: kill -9 of one of 3 agents of a saturated tenant: the others reach the
// full rate one ttl later at the latest, without overshoot meanwhile.
func TestCase19KillOneOfThree(t *testing.T) {
	w := newWorld(t, paranoid(19), 3)
	ttl := 5 * time.Second
	put(t, w, acme, policy(100, 50, 20, 3, ttl))
	for i := range 3 {
		w.Offer(Load{Tenant: acme, Class: "c", Every: Poisson(150), At: On(i)})
	}
	run(t, w, 10*time.Second)
	w.Gateways()[0].Kill()
	run(t, w, ttl)
	from := w.Now()
	run(t, w, 20*time.Second)
	held(t, w)
	if v := verdict(t, w, acme, from); v.UtilisationPPM < 970_000 {
		t.Errorf("one ttl after the death %d ppm of the rate are used", v.UtilisationPPM)
	}
}

// Case 20: restart every agent, then offer 5 times the rate: the bound holds from
// the first request on.
func TestCase20RestartAll(t *testing.T) {
	w := newWorld(t, paranoid(20), 4)
	put(t, w, acme, policy(50, 40, 10, 4, 5*time.Second))
	w.Offer(Load{Tenant: acme, Class: "c", Every: Poisson(250), At: Evenly(4)})
	for range 4 {
		run(t, w, 3*time.Second)
		for _, g := range w.Gateways() {
			g.Kill()
			g.Start()
		}
	}
	run(t, w, 5*time.Second)
	held(t, w)
}

// Case 24: the limit goes 30, 0, 150 under load: grants follow at once, 0 really
// stops once what is held has expired, spent stays spent.
func TestCase24LimitUpAndDown(t *testing.T) {
	ttl := 3 * time.Second
	w := newWorld(t, paranoid(24), 2)
	put(t, w, acme, policy(30, 30, 10, 2, ttl))
	w.Offer(Load{Tenant: acme, Class: "c", Every: Poisson(300), At: Evenly(2)})
	run(t, w, 10*time.Second)
	stop := policy(0, 0, 10, 2, ttl)
	stop.Classes["c"] = grant.Class{Cost: 1}
	put(t, w, acme, stop)
	run(t, w, ttl+200*time.Millisecond)
	before := w.Judge.Tenant(acme).Counts.Units
	run(t, w, 5*time.Second)
	if got := w.Judge.Tenant(acme).Counts.Units - before; got != 0 {
		t.Errorf("%d units admitted under a limit of 0", got)
	}
	put(t, w, acme, policy(150, 30, 10, 2, ttl))
	before = w.Judge.Tenant(acme).Counts.Units
	run(t, w, 2*time.Second)
	if got := w.Judge.Tenant(acme).Counts.Units - before; got < 270 {
		t.Errorf("%d units admitted in 2 s at 150/s", got)
	}
	held(t, w)

	for _, c := range []struct{ burst, left grant.Units }{{20, 0}, {5, 0}} {
		l := newLab(t, policy(0, 10, 0, 0, 0), 0)
		l.allowed(10)
		l.mustPut(policy(0, c.burst, 0, 0, 0))
		if got := l.level(); got != c.left {
			t.Errorf("10 of 10 spent, burst %d: %d left, want %d", c.burst, got, c.left)
		}
	}
	// 10 spent of a window's 20: with the burst at 20 from the start 10 are left.
	l := newLab(t, policy(0, 20, 0, 0, 0), 0)
	l.allowed(10)
	if got := l.level(); got != 10 {
		t.Errorf("10 of 20 spent: %d left", got)
	}
}

// Case 25: the authority answers "overloaded" to everyone: no agent takes that
// for loss of the centre, no emergency budget opens.
func TestCase25OverloadIsNotLoss(t *testing.T) {
	w := newWorld(t, paranoid(25), 3)
	p := policy(50, 50, 10, 3, 5*time.Second)
	p.Emergency = &grant.Emergency{Rate: grant.Rate{Units: 10, Per: time.Second}, Burst: 30, Grant: grant.GrantSettings{Quantum: 10, Owners: 3, TTL: time.Minute}}
	p.Classes["c"] = grant.Class{Cost: 1, Emergency: true}
	put(t, w, acme, p)
	w.Offer(Load{Tenant: acme, Class: "c", Every: Poisson(100), At: Evenly(3)})
	run(t, w, 10*time.Second)
	var reserve grant.Units
	for _, g := range w.Gateways() {
		reserve += g.tenants[acme].Stats().Reserve.Held
	}
	if reserve == 0 {
		t.Fatal("no emergency grants are held: the test tests nothing")
	}
	w.Center.Overload = true
	run(t, w, 20*time.Second)
	c := w.Judge.Tenant(acme).Counts
	if c.ByPath[agent.FromReserve] != 0 {
		t.Errorf("%d emergency units were spent while the centre answered", c.ByPath[agent.FromReserve])
	}
	if c.UndecidedBy[grant.Overloaded] == 0 {
		t.Errorf("nobody heard that the centre is overloaded: %v", reasons(c))
	}
	w.Center.Overload = false
	w.Center.Crash()
	run(t, w, 10*time.Second)
	if got := w.Judge.Tenant(acme).Counts.ByPath[agent.FromReserve]; got == 0 || got > reserve {
		t.Errorf("%d emergency units were spent after loss of the centre, %d were held", got, reserve)
	}
	held(t, w)
}

// Case 26: the authority accepts the connection and never answers: every request
// is answered within its deadline; a second after its return all is well.
func TestCase26SilentAuthority(t *testing.T) {
	w := newWorld(t, paranoid(26), 3)
	put(t, w, acme, policy(200, 100, 20, 3, 2*time.Second))
	w.Offer(Load{Tenant: acme, Class: "c", Every: Poisson(150), At: Evenly(3)})
	run(t, w, 5*time.Second)
	w.Center.Pause(false)
	run(t, w, 20*time.Second) // the Judge fails the run if anybody waits too long
	before := w.Judge.Tenant(acme).Counts
	if before.Undecided == 0 {
		t.Error("nobody heard 503")
	}
	w.Center.Resume()
	run(t, w, time.Second)
	back := w.Judge.Tenant(acme).Counts
	run(t, w, 5*time.Second)
	after := w.Judge.Tenant(acme).Counts
	if n := after.Undecided - back.Undecided; n > 0 {
		t.Errorf("%d requests were undecided (%v) a second and more after the authority's return", n, reasons(after))
	}
	if got := after.Units - back.Units; got < 700 {
		t.Errorf("%d of about 750 units admitted after the return", got)
	}
	held(t, w)
}
