package sim

import (
	"math"
	"testing"
	"time"

	"github.com/stipend/stipend/agent"
	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

// The cases are inputs that broke other limiters, each with the right answer.
// Those that concern names, doors and stores are tested where these live.

// Case 1: 10 units/s, burst 10; 10,000 asks of one unit while the given time
// alternates between t and t - 1 s: 10 are admitted.
func TestCase01AlternatingTime(t *testing.T) {
	l := newLab(t, policy(10, 10, 0, 0, 0), 0)
	l.now = grant.Instant(time.Minute)
	admitted := 0
	for i := range 10_000 {
		at := l.now
		if i%2 == 1 {
			l.now = l.now.Add(-time.Second)
		}
		admitted += l.allowed(1)
		l.now = at
	}
	if admitted != 10 {
		t.Errorf("%d admitted, want 10", admitted)
	}
}

// Case 2: 64 askers of one bucket, each with a time up to 1 ms old: no second is
// credited twice.
func TestCase02OldTimes(t *testing.T) {
	l := newLab(t, policy(1000, 100, 0, 0, 0), 0)
	rng := (&World{cfg: Config{Seed: 2}}).source("case 2")
	start := l.now
	admitted := 0
	for step := range 2000 {
		real := start.Add(time.Duration(step) * time.Millisecond)
		for range 4 {
			l.now = real.Add(-time.Duration(rng.Int64N(int64(time.Millisecond))))
			admitted += l.allowed(1)
		}
	}
	// 2 s at 1000/s and the burst; the last refill is at most 1 ms old.
	if admitted > 2100 || admitted < 2097 {
		t.Errorf("%d admitted in 2 s, want 2100 at most and nearly", admitted)
	}
}

// Case 3: refill at t+10 s, a change at t+9 s, a read at t+11 s: 11 s of refill in all.
func TestCase03ChangeInThePast(t *testing.T) {
	l := newLab(t, policy(1, 100, 0, 0, 0), 0)
	if n := l.allowed(100); n != 100 {
		t.Fatalf("%d admitted of a full bucket", n)
	}
	start := l.now
	l.now = start.Add(10 * time.Second)
	if got := l.level(); got != 10 {
		t.Fatalf("level %d after 10 s", got)
	}
	l.now = start.Add(9 * time.Second)
	l.mustPut(policy(1, 90, 0, 0, 0))
	l.now = start.Add(11 * time.Second)
	if got := l.level(); got != 11 {
		t.Errorf("level %d after 11 s, want 11", got)
	}
}

// Case 4: 10 units per 30 s, one ask a second: one every 3 s after the burst.
func TestCase04SlowRate(t *testing.T) {
	p := policy(0, 10, 0, 0, 0)
	p.Rate = grant.Rate{Units: 10, Per: 30 * time.Second}
	l := newLab(t, p, 0)
	l.allowed(10)
	admitted := 0
	for range 300 {
		l.advance(time.Second)
		admitted += l.allowed(1)
	}
	if admitted != 100 {
		t.Errorf("%d admitted in 300 s, want 100", admitted)
	}
}

// Case 5: odd rates are exact within one unit over any run, or refused at load.
func TestCase05OddRates(t *testing.T) {
	for _, c := range []struct {
		rate grant.Rate
		step time.Duration
		n    int
		want int // admitted after an empty bucket
	}{
		{grant.Rate{Units: 3, Per: time.Second}, 7 * time.Millisecond, 10_000, 210},
		{grant.Rate{Units: 600, Per: time.Second}, 1666 * time.Microsecond, 6000, 5997},
		{grant.Rate{Units: 1, Per: 2 * time.Second}, time.Second, 1000, 500},
		{grant.Rate{Units: 1, Per: 1_000_000_000 * time.Second}, 1_000_000 * time.Second, 2000, 2},
	} {
		p := policy(0, 10, 0, 0, 0)
		p.Rate = c.rate
		l := newLab(t, p, 0)
		l.allowed(10)
		admitted := 0
		for range c.n {
			l.now = l.now.Add(c.step)
			admitted += l.allowed(1)
		}
		if admitted < c.want-1 || admitted > c.want+1 {
			t.Errorf("%v: %d admitted in %d steps of %v, want %d", c.rate, admitted, c.n, c.step, c.want)
		}
	}
	p := policy(0, 10, 0, 0, 0)
	p.Rate = grant.Rate{Units: math.MaxInt64, Per: 1}
	l := newLab(t, p, 0)
	for range 100 {
		l.now++
		if n := l.allowed(11); n > 10 {
			t.Fatalf("2^63-1 per ns: %d admitted at once of a burst of 10", n)
		}
	}
}

// Case 6: deny, then ask at the same instant for what is there: admitted.
func TestCase06RefusalChangesNothing(t *testing.T) {
	l := newLab(t, policy(1, 10, 0, 0, 0), 0)
	l.allowed(7)
	if a := l.check("five", 1); a.Verdict != grant.Deny || a.Reason != grant.Over {
		t.Fatalf("5 of 3 units: %v %v", a.Verdict, a.Reason)
	}
	for range 3 {
		if a := l.check("c", 1); a.Verdict != grant.Allow {
			t.Fatalf("refused although a unit is there: %v", a.Reason)
		}
	}
	if got := l.level(); got != 0 {
		t.Errorf("level %d, want 0", got)
	}
}

// Case 7: idle for 30 s, then flat out: at most B at once.
func TestCase07IdleThenFlatOut(t *testing.T) {
	l := newLab(t, policy(100, 50, 0, 0, 0), 0)
	l.allowed(50)
	l.advance(30 * time.Second)
	if n := l.allowed(1000); n != 50 {
		t.Errorf("%d admitted at once, want 50", n)
	}
}

// Case 8: the wall clock of a gateway steps 60 s back and later 60 s forward
// while grants are held and asks go on: nothing is minted, nobody is blocked for
// long, dropped units are counted.
func TestCase08ClockSteps(t *testing.T) {
	cfg := DefaultConfig(8)
	cfg.Paranoid = true
	w := newWorld(t, cfg, 2)
	put(t, w, acme, policy(100, 100, 20, 2, 20*time.Second))
	w.Offer(Load{Tenant: acme, Class: "c", Every: Steady(50), At: Evenly(2)})
	run(t, w, 3*time.Second)
	for _, by := range []time.Duration{-time.Minute, time.Minute} {
		for _, g := range w.Gateways() {
			g.Clock.Step(w.Now(), by)
		}
		w.Center.Clock.Step(w.Now(), by)
		before := w.Judge.Tenant(acme).Counts.Admitted
		run(t, w, 2*time.Second)
		if n := w.Judge.Tenant(acme).Counts.Admitted - before; n < 90 {
			t.Errorf("only %d of 100 requests were admitted in the 2 s after a step of %v", n, by)
		}
	}
	var dropped grant.Units
	for _, g := range w.Gateways() {
		dropped += g.tenants[acme].Stats().Dropped[agent.DropClock]
	}
	if dropped == 0 {
		t.Error("no dropped units were counted")
	}
	held(t, w)
}

// Case 9: a cost greater than the burst is refused when the policy is loaded; if
// it still arrives it is refused for ever, without Retry-After.
func TestCase09CostGreaterThanBurst(t *testing.T) {
	l := newLab(t, policy(10, 10, 5, 2, 10*time.Second), 1)
	bad := policy(10, 10, 5, 2, 10*time.Second)
	bad.Classes["huge"] = grant.Class{Cost: 11}
	if res := l.put(bad); res.Reason != grant.Invalid || len(res.Problems) != 1 {
		t.Errorf("a class dearer than the burst: %v %v", res.Reason, res.Problems)
	}
	before := l.level()
	a := l.check("c", 11)
	if a.Verdict != grant.Deny || a.Reason != grant.CostExceedsBurst || a.RetryAfter != 0 {
		t.Errorf("11 units of a burst of 10: %v %v, retry after %v", a.Verdict, a.Reason, a.RetryAfter)
	}
	answered(t, l.ask(grantRequest(0, 1, 11, 11, 0)), grant.Empty, grant.CostExceedsBurst)
	if l.level() != before {
		t.Error("a refusal deducted")
	}
}

// Case 10: cost 0, negative, 2^63-1; rate 0, burst 0, rate 0 with burst 1. Zero
// means zero on every path, negative is an error.
func TestCase10ZeroNegativeHuge(t *testing.T) {
	l := newLab(t, policy(0, 1, 0, 0, 0), 0)
	verdicts := func(a grant.CheckAnswer, v grant.Verdict, why grant.Reason) {
		t.Helper()
		if a.Verdict != v || a.Reason != why {
			t.Errorf("%v %v, want %v %v", a.Verdict, a.Reason, v, why)
		}
	}
	verdicts(l.check("c", -1), grant.Reject, grant.Invalid)
	verdicts(l.check("c", math.MaxInt64), grant.Deny, grant.CostExceedsBurst)
	verdicts(l.check("c", 0), grant.Allow, grant.None)
	verdicts(l.check("free", 5), grant.Allow, grant.None)
	if got := l.level(); got != 1 {
		t.Fatalf("looking cost %d units", 1-got)
	}
	verdicts(l.check("c", 1), grant.Allow, grant.None)
	l.advance(time.Hour)
	denied := l.check("c", 1)
	verdicts(denied, grant.Deny, grant.Over)
	if denied.RetryAfter != 0 {
		t.Errorf("rate 0: retry after %v", denied.RetryAfter)
	}
	verdicts(l.check("free", 5), grant.Allow, grant.None)

	zero := policy(0, 0, 0, 0, 0)
	zero.Classes["c"] = grant.Class{Cost: 0}
	l.mustPut(zero)
	l.advance(time.Hour)
	verdicts(l.check("c", 3), grant.Allow, grant.None)

	for _, p := range []*grant.Policy{policy(-1, 1, 0, 0, 0), {Burst: -1}, {Classes: map[grant.RouteClass]grant.Class{"c": {Cost: -1}}}} {
		if res := l.put(p); res.Reason != grant.Invalid {
			t.Errorf("a negative number was accepted: %+v", p)
		}
	}
	for _, r := range []grant.GrantRequest{grantRequest(0, 1, -1, 1, 0), grantRequest(0, 1, 1, 1, -1), grantRequest(0, 1, 1, 0, 0), grantRequest(0, 0, 1, 1, 0)} {
		answered(t, l.ask(r), grant.Refused, grant.Invalid)
	}
}

// Case 11: 10 units per 10 s shared by 16 gateways, fewer units than owners: at
// least 9 of each 10 are usable, nothing is stranded.
func TestCase11FewerUnitsThanOwners(t *testing.T) {
	w := newWorld(t, DefaultConfig(11), 16)
	p := policy(0, 10, 0, 0, 0)
	p.Rate = grant.Rate{Units: 10, Per: 10 * time.Second}
	put(t, w, acme, p)
	w.Offer(Load{Tenant: acme, Class: "c", Every: Poisson(40), At: Evenly(16)})
	run(t, w, 10*time.Second)
	before := w.Judge.Tenant(acme).Counts.Units
	run(t, w, 100*time.Second)
	if got := w.Judge.Tenant(acme).Counts.Units - before; got < 90 {
		t.Errorf("%d of 100 units were used", got)
	}
	held(t, w)
}

// Case 12: one unit left, 8 asks of one unit merged in one batch: exactly one is
// admitted.
func TestCase12LastUnit(t *testing.T) {
	l := newLab(t, policy(1, 10, 0, 0, 0), 0)
	l.allowed(9)
	var asks [8]int
	for i := range asks {
		r := l.checkRequest("c", 1)
		asks[i] = l.offer(authority.Call{Check: &r})
	}
	l.step(nil)
	admitted := 0
	for _, n := range asks {
		if l.replies[n].Check.Verdict == grant.Allow {
			admitted++
		}
	}
	if admitted != 1 {
		t.Errorf("%d admitted, want 1", admitted)
	}
}

// Case 13: limit 100, q 20, bucket full, one grant: exactly 20 are deducted.
func TestCase13OneGrant(t *testing.T) {
	l := newLab(t, policy(0, 100, 20, 5, 10*time.Second), 1)
	isGrant(t, l.ask(grantRequest(0, 1, 100, 1, 0)), 20)
	if s := l.state().Ordinary; s.Level != 80 || s.Outstanding != 20 {
		t.Errorf("level %d, outstanding %d; want 80 and 20", s.Level, s.Outstanding)
	}
}

// Case 14: the answer to the grant that takes the last units is lost; the same id
// is asked again on the now empty bucket: the original grant, nothing twice.
func TestCase14LostAnswer(t *testing.T) {
	l := newLab(t, policy(0, 20, 20, 5, 10*time.Second), 1)
	r := grantRequest(0, 1, 20, 1, 0)
	isGrant(t, l.ask(r), 20)
	isGrant(t, l.ask(r), 20)
	l.crash(time.Second)
	isGrant(t, l.ask(r), 20)
	if s := l.state().Ordinary; s.Level != 0 || s.Outstanding != 20 {
		t.Errorf("level %d, outstanding %d; want 0 and 20", s.Level, s.Outstanding)
	}
}

// Case 15: the same grant id with other units, another tenant, another
// incarnation: refused.
func TestCase15SameIDOtherRequest(t *testing.T) {
	l := newLab(t, policy(10, 100, 20, 5, 10*time.Second), 2)
	r := grantRequest(0, 1, 20, 1, 0)
	isGrant(t, l.ask(r), 20)
	answered(t, l.ask(grantRequest(0, 1, 19, 1, 0)), grant.Refused, grant.Conflict)
	other := r
	other.Tenant = "beta" // under the hash of the first
	answered(t, l.ask(other), grant.Refused, grant.Conflict)
	other = r
	other.Incarnation = inc(1)
	answered(t, l.ask(other), grant.Refused, grant.Conflict)
	if got := l.level(); got != 80 {
		t.Errorf("level %d, want 80", got)
	}
}

// Case 30: one attempt: allowed, asked again: the same allowance. Denied, asked
// again a second later: judged anew. Another cost under the same id: refused.
func TestCase30AttemptsAskedAgain(t *testing.T) {
	l := newLab(t, policy(1, 2, 0, 0, 0), 0)
	r := l.checkRequest("two", 1)
	if a := l.send(r); a.Verdict != grant.Allow || a.Replayed {
		t.Fatalf("%+v", a)
	}
	for range 2 {
		if a := l.send(r); a.Verdict != grant.Allow || !a.Replayed || a.Cost != 2 {
			t.Errorf("asked again: %+v", a)
		}
		l.crash(time.Millisecond)
	}
	changed := r
	changed.Count = 0
	if a := l.send(changed); a.Verdict != grant.Reject || a.Reason != grant.Conflict {
		t.Errorf("another cost under the old hash: %v %v", a.Verdict, a.Reason)
	}
	changed.Sum = changed.Fingerprint()
	if a := l.send(changed); a.Verdict != grant.Reject || a.Reason != grant.Conflict {
		t.Errorf("another cost: %v %v", a.Verdict, a.Reason)
	}
	d := l.checkRequest("c", 1)
	if a := l.send(d); a.Verdict != grant.Deny {
		t.Fatalf("on an empty bucket: %+v", a)
	}
	l.advance(time.Second)
	if a := l.send(d); a.Verdict != grant.Allow || a.Replayed {
		t.Errorf("a denial was replayed: %+v", a)
	}
}
