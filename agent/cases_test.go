package agent

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// hot is a stage with a hot tenant that holds units units and has nothing open.
func hot(tb testing.TB, p *grant.Policy, units Units, edit func(*Config)) *stage {
	tb.Helper()
	s := newStage(tb, edit)
	s.push(p)
	s.heat()
	req := s.open()
	s.t.ord.req.Want = p.Grant.Quantum // hold more than a newcomer asks for
	s.t.ord.req.Sum = s.t.ord.req.Fingerprint()
	s.answer(grant.GrantAnswer{ID: req.ID, Result: grant.Granted, Units: units, TTL: p.Grant.TTL})
	s.fx = Effects{}
	s.t.checks = nil
	if s.t.ord.open {
		tb.Fatalf("asks again at %d units: %s", units, s.t.State())
	}
	return s
}

func want(tb testing.TB, d Decision, o Outcome, why grant.Reason) {
	tb.Helper()
	if d.Outcome != o || d.Reason != why {
		tb.Fatalf("decided %q, want %v %v", show(d), o, why)
	}
}

// Case 8: the clock of the machine steps 60 s back, later 60 s forward, while
// units are held and asks go on. No unit is minted, nobody is blocked for a
// minute, dropped units are counted.
func TestCase8ClockSteps(t *testing.T) {
	s := hot(t, testPolicy(), 15, nil)
	for _, step := range []time.Duration{-time.Minute, time.Minute} {
		before := s.t.Stats()
		s.wall += step
		d, ticket := s.try("read", 1, time.Second)
		want(t, d, Waiting, grant.None)
		st := s.t.Stats()
		if st.Held != 0 || st.Dropped[DropClock]-before.Dropped[DropClock] != before.Held {
			t.Fatalf("after a step of %v: held %d, dropped %v, before %+v", step, st.Held, st.Dropped, before)
		}
		s.pass(2 * time.Millisecond) // the answer to a request sent after the step is good
		s.grant(min(s.open().Want, 3))
		if d := s.one(ticket); d.Outcome != Admitted {
			t.Fatalf("2 ms after a step of %v: %s", step, show(d))
		}
	}
}

// Case 9: a cost above the burst is refused for ever with its own reason, no
// Retry-After, nothing counted, no message sent; also when units are held.
func TestCase9CostExceedsBurst(t *testing.T) {
	p := testPolicy()
	p.Burst = 30
	s := hot(t, p, 20, nil)
	before := s.t.State()
	for _, count := range []Units{31, 1 << 40, grant.MaxUnits} {
		d, _ := s.try("read", count, time.Second)
		want(t, d, Denied, grant.CostExceedsBurst)
		if d.RetryAfter != 0 {
			t.Errorf("count %d: Retry-After %v", count, d.RetryAfter)
		}
	}
	d, _ := s.try("write", grant.MaxUnits, time.Second) // the product overflows
	want(t, d, Denied, grant.CostExceedsBurst)
	if after := s.t.State(); after != before || len(s.fx.Grants)+len(s.fx.Checks) > 0 {
		t.Errorf("state %s, before %s, effects %+v", after, before, s.fx)
	}
}

// Case 10: cost 0 looks without spending on every path, a negative count is an
// error on every path, the largest cost is refused.
func TestCase10ZeroAndNegative(t *testing.T) {
	p := testPolicy()
	p.Classes["free"] = grant.Class{}
	s := hot(t, p, 15, nil)
	for range 100 {
		for _, c := range []struct {
			class grant.RouteClass
			count Units
		}{{"read", 0}, {"free", 1}, {"free", 1000}} {
			d, _ := s.try(c.class, c.count, time.Second)
			want(t, d, Admitted, grant.None)
			if d.Cost != 0 || d.Remaining != 15 {
				t.Fatalf("%+v: %s", c, show(d))
			}
		}
	}
	cold := newStage(t, nil)
	for _, s := range []*stage{s, cold} {
		d, _ := s.try("read", -1, time.Second)
		want(t, d, Rejected, grant.Invalid)
	}
	if d, _ := cold.try("read", 0, time.Second); d.Outcome != Waiting || cold.fx.Checks[0].Count != 0 {
		t.Fatalf("a cold look: %s %+v", show(d), cold.fx.Checks)
	}
}

// Case 16: both the first and the retried answer arrive (twice, ten times).
// Credited once.
func TestCase16AnswersTwice(t *testing.T) {
	s := newStage(t, nil)
	s.push(testPolicy())
	s.heat()
	req := s.open()
	s.pass(300 * time.Millisecond) // the same bytes went out again meanwhile
	if n := len(s.fx.Grants); n < 2 {
		t.Fatalf("sent %d times", n)
	}
	for _, g := range s.fx.Grants {
		if g.ID != req.ID || g.Sum != req.Sum || g.Sum != g.Fingerprint() {
			t.Fatalf("sent %+v and %+v under one id", req, g)
		}
	}
	for range 12 {
		s.answer(grant.GrantAnswer{ID: req.ID, Result: grant.Granted, Units: 2, TTL: 10 * time.Second})
	}
	if st := s.t.Stats(); st.Granted != 2 || st.Held != 2 || st.Ignored != 11 {
		t.Fatalf("%+v", st)
	}
}

// Case 17: an answer that arrives after its grant's own expiry, or after a
// newer grant was asked, is ignored and counted.
func TestCase17LateAnswers(t *testing.T) {
	t.Run("after its own expiry", func(t *testing.T) {
		s := newStage(t, nil)
		s.push(testPolicy())
		s.heat()
		req := s.open()
		s.mono += 10 * time.Second // and nobody ticked
		s.answer(grant.GrantAnswer{ID: req.ID, Result: grant.Granted, Units: 2, TTL: 10 * time.Second})
		if st := s.t.Stats(); st.Held != 0 || st.Spent != 0 || st.Dropped[DropReplaced] != 2 {
			t.Fatalf("%+v", st)
		}
	})
	t.Run("by the shorter ttl of the answer", func(t *testing.T) {
		s := newStage(t, nil)
		s.push(testPolicy())
		s.heat()
		s.mono += time.Second
		s.answer(grant.GrantAnswer{ID: s.open().ID, Result: grant.Granted, Units: 2, TTL: time.Second})
		if st := s.t.Stats(); st.Held != 0 || st.Dropped[DropReplaced] != 2 {
			t.Fatalf("%+v", st)
		}
	})
	t.Run("after a newer grant was asked", func(t *testing.T) {
		s := newStage(t, nil)
		s.push(testPolicy())
		s.heat()
		old := s.open()
		s.answer(grant.GrantAnswer{ID: old.ID, Result: grant.Empty, Reason: grant.Over})
		s.pass(100 * time.Millisecond)
		s.try("read", 1, time.Second)
		if fresh := s.open(); fresh.ID <= old.ID {
			t.Fatalf("asked %d after %d", fresh.ID, old.ID)
		}
		s.answer(grant.GrantAnswer{ID: old.ID, Result: grant.Granted, Units: 2, TTL: 10 * time.Second})
		if st := s.t.Stats(); st.Granted != 0 || st.Ignored != 1 {
			t.Fatalf("%+v", st)
		}
	})
}

// Case 21: round trip 100 ms, then 600 ms, rate 1,000,000, load 200/s. No
// denial while units exist and the deadline allows; once the round trip is
// known nobody waits at all; a waiter is served on arrival.
func TestCase21SlowLink(t *testing.T) {
	p := testPolicy()
	p.Rate.Units, p.Burst, p.Grant.Quantum = 1_000_000, 1_000_000, 10_000
	s := newStage(t, func(c *Config) { c.Deadline = 3 * time.Second })
	s.push(p)
	type flight struct {
		at  time.Duration
		req grant.GrantRequest
	}
	var line []flight
	var waited int
	answered := map[grant.GrantID]bool{}
	checks := map[uint64]time.Duration{}
	for i := range 3000 {
		trip := 100 * time.Millisecond
		if i >= 1000 {
			trip = 600 * time.Millisecond
		}
		s.pass(5 * time.Millisecond)
		d, _ := s.try("read", 1, 3*time.Second)
		if d.Outcome == Waiting && (i > 400 && i < 1000 || i > 2000) {
			waited++
		} else if d.Outcome != Admitted && d.Outcome != Waiting {
			t.Fatalf("request %d: %s", i, show(d))
		}
		for _, g := range s.fx.Grants {
			line = append(line, flight{s.mono + trip, g})
		}
		for _, c := range s.fx.Checks {
			checks[c.Attempt.Seq] = s.mono + trip
		}
		s.fx.Grants, s.fx.Checks = nil, nil
		for seq, due := range checks {
			if due <= s.mono {
				delete(checks, seq)
				s.checked(grant.CheckAnswer{Attempt: grant.Attempt{Seq: seq}, Verdict: grant.Allow, Cost: 1, Policy: s.copy(0)})
			}
		}
		for len(line) > 0 && line[0].at <= s.mono {
			g := line[0].req
			line = line[1:]
			if !answered[g.ID] {
				answered[g.ID] = true
				s.answer(grant.GrantAnswer{ID: g.ID, Result: grant.Granted, Units: g.Want, TTL: p.Grant.TTL, Policy: s.copy(g.KnownVersion)})
			}
		}
		for _, d := range s.resolved() {
			if d.Outcome != Admitted {
				t.Fatalf("request %d: %s", i, show(d))
			}
		}
	}
	if waited > 0 {
		t.Errorf("%d requests waited after the round trip was known: %s", waited, s.t.State())
	}
	if n := s.t.Stats().Requests; n > 100 {
		t.Errorf("%d grant requests for 15 s of 200/s", n)
	}
}

// Case 22: r = 0, the bucket drained, requests waiting; then the rate is set to
// 1,000. The waiters move without a restart: the push forgets the estimate, and
// the answer to the request that is still parked serves them.
func TestCase22RateFromZero(t *testing.T) {
	p := testPolicy()
	p.Rate = grant.Rate{}
	s := newStage(t, func(c *Config) { c.Deadline = 10 * time.Second })
	s.push(p)
	s.heat()
	_, first := s.try("read", 1, time.Minute)
	req := s.open()
	s.answer(grant.GrantAnswer{ID: req.ID, Result: grant.Parked, Wait: time.Hour})
	d := s.one(first)
	want(t, d, Denied, grant.Over)
	if d.RetryAfter != 0 {
		t.Fatalf("Retry-After %v at rate zero", d.RetryAfter)
	}
	s.answer(grant.GrantAnswer{ID: req.ID, Result: grant.Parked}) // no estimate: wait
	_, ticket := s.try("read", 1, time.Minute)
	s.pass(time.Second)
	fast := testPolicy()
	fast.Rate.Units = 1000
	s.push(fast)
	s.pass(20 * time.Millisecond)
	s.grant(1)
	want(t, s.one(ticket), Admitted, grant.None)
}

// Case 24, the agent's side: the limit goes 30 -> 0 -> 150. A burst of 0 stops
// at once even what is held; raised again, held units that have not expired are
// spent and new grants follow at once, past any estimate or quiet time.
func TestCase24LimitChanges(t *testing.T) {
	p := testPolicy()
	p.Rate.Units, p.Burst = 30, 30
	s := hot(t, p, 5, nil)
	zero := testPolicy()
	zero.Rate, zero.Burst = grant.Rate{}, 0
	s.push(zero)
	d, _ := s.try("read", 1, time.Second)
	want(t, d, Denied, grant.CostExceedsBurst)
	s.pass(100 * time.Millisecond)
	more := testPolicy()
	more.Rate.Units, more.Burst = 150, 150
	s.push(more)
	for range 5 {
		d, _ := s.try("read", 1, time.Second)
		want(t, d, Admitted, grant.None)
	}
	_, ticket := s.try("read", 1, time.Second)
	s.grant(1)
	want(t, s.one(ticket), Admitted, grant.None)
}

// Case 25: the authority answers "overloaded" to everyone. No agent takes that
// for loss of the centre, whatever the link does short of being lost, and no
// emergency budget opens.
func TestCase25OverloadIsNotLoss(t *testing.T) {
	p := testPolicy()
	p.Classes["pay"] = grant.Class{Cost: 1, Emergency: true}
	p.Emergency = &grant.Emergency{Rate: grant.Rate{Units: 1, Per: time.Second}, Burst: 20,
		Grant: grant.GrantSettings{Quantum: 16, Owners: 2, TTL: time.Hour}}
	s := hot(t, p, 3, nil)
	s.answer(grant.GrantAnswer{ID: s.t.reserve.req.ID, Emergency: true, Result: grant.Granted, Units: 10, TTL: time.Hour})
	overload := func() {
		for _, g := range s.fx.Grants {
			s.answer(grant.GrantAnswer{ID: g.ID, Emergency: g.Emergency, Result: grant.Busy, Reason: grant.Overloaded})
		}
		for _, c := range s.fx.Checks {
			s.checked(grant.CheckAnswer{Attempt: c.Attempt, Verdict: grant.Undecided, Reason: grant.Overloaded})
		}
		s.fx.Grants, s.fx.Checks = nil, nil
	}
	for i := range 200 { // 20 s
		for range 3 {
			d, _ := s.try("pay", 1, time.Second)
			if d.Path == FromReserve {
				t.Fatalf("after %v: %s", s.mono, show(d))
			}
		}
		overload()
		s.pass(100 * time.Millisecond)
		overload()
		if i == 100 { // a reconnect is not loss either
			s.t.Link(s.now(), false, &s.fx)
			s.pass(2 * time.Second)
			d, _ := s.try("pay", 1, time.Second)
			want(t, d, Waiting, grant.None)
			s.t.Link(s.now(), true, &s.fx)
		}
	}
	for ticket, d := range s.resolved() {
		if d.Outcome == Admitted && d.Path == FromReserve {
			t.Fatalf("ticket %d: %s", ticket, show(d))
		}
	}
	s.t.Link(s.now(), false, &s.fx) // this is
	s.pass(3 * time.Second)
	d, _ := s.try("pay", 1, time.Second)
	if d.Path != FromReserve {
		t.Fatalf("after loss: %s, %s", show(d), s.t.State())
	}
}

// Case 26: the authority accepts the connection and never answers. Every
// request is answered within its deadline; when the authority is back the same
// bytes reach it within a second, not all at one moment.
func TestCase26SilentAuthority(t *testing.T) {
	var at []time.Duration
	for agent := range int64(20) {
		draws := uint64(agent)
		s := newStage(t, func(c *Config) {
			c.Rand = func(n int64) int64 {
				draws = draws*6364136223846793005 + 1442695040888963407
				return int64(draws>>33) % n
			}
		})
		s.push(testPolicy())
		for s.mono < 5*time.Second {
			d, ticket := s.try("read", 1, time.Second)
			if d.Outcome == Waiting {
				s.pass(50 * time.Millisecond)
				d = s.one(ticket)
			}
			want(t, d, Undecided, grant.Deadline)
			s.pass(200 * time.Millisecond)
		}
		s.fx.Grants = nil
		for len(s.fx.Grants) == 0 && s.mono < 10*time.Second {
			s.pass(time.Millisecond)
		}
		at = append(at, s.mono-5*time.Second)
	}
	slices.Sort(at)
	if last := at[len(at)-1]; last > 1300*time.Millisecond {
		t.Errorf("the last agent asked again after %v", last)
	}
	if spread := at[len(at)-1] - at[0]; spread < 300*time.Millisecond {
		t.Errorf("20 agents asked again within %v: a herd", spread)
	}
}

// Case 31: 100 clients are refused at the same moment at 10 units/s. Retry-After
// spreads them over the refill of what waits before them, instead of one second
// for all; the spread is capped and drains.
func TestCase31RetryAfterSpreads(t *testing.T) {
	p := testPolicy()
	p.Rate.Units = 10
	s := newStage(t, nil)
	s.push(p)
	s.heat()
	for range 100 {
		s.try("read", 1, time.Second)
	}
	s.answer(grant.GrantAnswer{ID: s.open().ID, Result: grant.Parked, Wait: 200 * time.Millisecond})
	perSecond := map[time.Duration]int{}
	for _, d := range s.resolved() {
		want(t, d, Denied, grant.Over)
		up := (d.RetryAfter + time.Second - 1) / time.Second
		perSecond[up]++
	}
	if perSecond[1]+perSecond[2] > 21 || perSecond[10] < 9 || perSecond[11] > 0 || perSecond[0] > 0 {
		t.Errorf("clients per second of Retry-After: %v", perSecond)
	}
	for range 1000 {
		d, _ := s.try("read", 1, time.Second)
		if d.Outcome != Denied || d.RetryAfter > longestSpread {
			t.Fatal(show(d))
		}
	}
	s.pass(35 * time.Second)
	if d, ok := s.t.backlog.join(s.now().Mono, 1, p.Rate); !ok || d > time.Second {
		t.Errorf("the backlog did not drain: %v", d)
	}
}

// While a request waits, later ones queue behind it, on the fast path too:
// cheap requests cannot starve a dear one.
func TestCheapBesideDear(t *testing.T) {
	s := hot(t, testPolicy(), 10, func(c *Config) { c.Deadline = time.Second })
	d, dear := s.try("dear", 1, time.Second)
	want(t, d, Waiting, grant.None)
	for i := 0; ; i++ {
		for range 5 {
			if d, _ := s.try("read", 1, time.Second); d.Outcome != Waiting {
				t.Fatalf("a cheap request overtook: %s", show(d))
			}
		}
		s.pass(time.Millisecond)
		s.grant(1)
		if m := s.resolved(); len(m) > 0 {
			if m[dear].Outcome != Admitted {
				t.Fatalf("resolved %v before the dear one", m)
			}
			if i != 1 {
				t.Fatalf("the dear one got its 12 units after %d grants of 1", i+1)
			}
			return
		}
	}
}

// A saturated tenant sees 429, never 503: whatever its deadline, in every phase
// of a parked request's life, through parking's end and beyond the estimate.
func TestSaturatedSees429(t *testing.T) {
	s := newStage(t, nil)
	s.push(testPolicy())
	s.heat()
	tried := 0
	for s.mono < 20*time.Second {
		if s.t.ord.open && !s.t.ord.parked {
			s.answer(grant.GrantAnswer{ID: s.open().ID, Result: grant.Parked, Wait: time.Duration(s.mono % 97)})
		} else if s.t.ord.open && s.now().Mono.Sub(s.t.ord.parkedAt) > 3*time.Second {
			s.answer(grant.GrantAnswer{ID: s.open().ID, Result: grant.Empty, Reason: grant.Over})
		}
		d, ticket := s.try("read", 1, time.Second)
		tried++
		if d.Outcome == Waiting {
			s.pass(time.Duration(1+tried%50) * time.Millisecond)
			if tried%3 == 0 {
				s.t.GiveUp(s.now(), ticket, &s.fx)
			}
		} else {
			want(t, d, Denied, grant.Over)
			s.pass(7 * time.Millisecond)
		}
		for _, d := range s.resolved() {
			if d.Outcome == Undecided {
				t.Fatalf("after %v: %s; %s", s.mono, show(d), s.t.State())
			}
			if d.RetryAfter < time.Second {
				t.Fatalf("Retry-After %v", d.RetryAfter)
			}
		}
		// Keep the policy copy alive, as answers do.
		s.t.learn(s.now(), grant.PolicyCopy{Version: s.version}, &s.fx)
	}
	if tried < 300 {
		t.Fatalf("only %d requests", tried)
	}
}

// Without a policy copy that is at most 10 s old the agent Checks, although it
// holds units.
func TestOldPolicyCopyChecks(t *testing.T) {
	p := testPolicy()
	p.Grant.TTL = time.Minute
	s := hot(t, p, 15, nil)
	s.pass(grant.PolicyCopyLife - time.Nanosecond)
	if d, ok := s.t.Take(s.now(), "read", 1); !ok {
		t.Fatalf("at the last moment: %s", show(d))
	}
	s.pass(time.Nanosecond)
	d, _ := s.try("read", 1, time.Second)
	want(t, d, Waiting, grant.None)
	if len(s.fx.Checks) != 1 || s.fx.Checks[0].KnownVersion != 1 {
		t.Fatalf("%+v", s.fx)
	}
	seq := s.fx.Checks[0].Attempt.Seq // the answer names the version: the copy lives on
	s.checked(grant.CheckAnswer{Attempt: grant.Attempt{Seq: seq}, Verdict: grant.Allow, Cost: 1, Policy: grant.PolicyCopy{Version: 1}})
	if d, ok := s.t.Take(s.now(), "read", 1); !ok || d.Remaining != 13 {
		t.Fatalf("after the answer: %v %s", ok, show(d))
	}
}

// Loss of the centre for longer than a policy copy lives: what is held is spent,
// at the last prices known, until it is gone or expired; then 503.
func TestHeldUnitsOutliveThePolicyCopy(t *testing.T) {
	p := testPolicy()
	p.Grant.TTL = time.Minute
	s := hot(t, p, 15, nil)
	s.t.Link(s.now(), false, &s.fx)
	s.pass(grant.PolicyCopyLife + time.Second)
	for range 14 {
		d, _ := s.try("read", 1, time.Second)
		want(t, d, Admitted, grant.None)
	}
	d, _ := s.try("central", 1, time.Second)
	want(t, d, Undecided, grant.Unavailable)
	d, _ = s.try("write", 1, time.Second) // costs 5
	want(t, d, Undecided, grant.Unavailable)
	s.pass(48 * time.Second)
	d, _ = s.try("read", 1, time.Second)
	want(t, d, Admitted, grant.None)
	s = hot(t, p, 15, nil)
	s.t.Link(s.now(), false, &s.fx)
	s.pass(time.Minute)
	d, _ = s.try("read", 1, time.Second)
	want(t, d, Undecided, grant.Unavailable)
}

// The agent tolerates larger naps than the authority allows for: what it holds
// lives so much shorter that it stops before the authority gives its room away,
// after ttl + the authority's tolerance of real time.
func TestLargerToleranceThanTheAuthoritys(t *testing.T) {
	const nap, authoritys = 900 * time.Millisecond, 100 * time.Millisecond
	s := newStage(t, func(c *Config) { c.Tolerance = time.Second })
	s.t.Shorten(s.t.cfg.Tolerance - authoritys)
	s.push(testPolicy())
	s.heat()
	req := s.open()
	s.t.ord.req.Want = 5
	s.t.ord.req.Sum = s.t.ord.req.Fingerprint()
	s.answer(grant.GrantAnswer{ID: req.ID, Result: grant.Granted, Units: 5, TTL: 10 * time.Second})
	if _, ok := s.t.Take(s.now(), "read", 1); !ok {
		t.Fatal("nothing was credited")
	}
	s.wall += nap // the machine slept: its monotonic clock did not see it
	s.mono += 10*time.Second + authoritys - nap
	if d, ok := s.t.Take(s.now(), "read", 1); ok {
		t.Errorf("spent when the authority takes the units for gone: %s", show(d))
	}
}

// A suspend that a guard noticed, and no reading shows: what was on its way is
// not credited, and an ALLOW of an attempt begun before does not admit.
func TestDistrustCoversWhatIsOnItsWay(t *testing.T) {
	s := hot(t, testPolicy(), 5, nil)
	_, central := s.try("central", 1, time.Second)
	_, dear := s.try("dear", 1, time.Second)
	before := s.open()
	s.t.Distrust(s.now())
	s.pass(time.Millisecond)
	s.checked(grant.CheckAnswer{Attempt: s.t.checks[0].req.Attempt, Verdict: grant.Allow, Cost: 1})
	want(t, s.one(central), Undecided, grant.ClockDistrust)
	s.answer(grant.GrantAnswer{ID: before.ID, Result: grant.Granted, Units: 12, TTL: 10 * time.Second})
	if st := s.t.Stats(); st.Held != 0 || st.Dropped[DropClock] != 17 {
		t.Fatalf("%+v", st)
	}
	s.grant(12) // sent after the suspend
	want(t, s.one(dear), Admitted, grant.None)
}

// A Tenant that was forgotten and made again never repeats an id: the authority
// would answer with the old grant, whose units are spent.
func TestForgottenTenantNeverRepeatsAnID(t *testing.T) {
	s := hot(t, testPolicy(), 1, nil)
	used := s.t.ord.req.ID
	s.try("read", 1, time.Second)
	s.grant(1)
	s.pass(30 * time.Second)
	if !s.t.Idle(s.now()) {
		t.Fatal(s.t.State())
	}
	s.t = NewTenant(s.t.cfg, testTenant, testInc)
	s.t.Pushed(s.now(), s.version, s.policy, false, &s.fx)
	s.heat()
	if again := s.open().ID; again <= used+1 {
		t.Fatalf("asked under id %d after %d", again, used+1)
	}
}

// Coming up, the link gets what is open: the same bytes, a greater age, Checks
// only while they have time.
func TestLinkUpRepeats(t *testing.T) {
	s := hot(t, testPolicy(), 1, nil)
	_, short := s.try("central", 1, 10*time.Millisecond)
	_, long := s.try("central", 1, time.Second)
	s.try("write", 1, time.Second)
	sent := s.fx
	s.fx = Effects{}
	s.t.Link(s.now(), false, &s.fx)
	s.pass(20 * time.Millisecond)
	if len(s.fx.Grants)+len(s.fx.Checks) != 0 {
		t.Fatalf("sent while down: %+v", s.fx)
	}
	want(t, s.one(short), Undecided, grant.Unavailable)
	s.t.Link(s.now(), true, &s.fx)
	if len(s.fx.Grants) != 1 || len(s.fx.Checks) != 1 {
		t.Fatalf("sent again: %+v", s.fx)
	}
	g, c := s.fx.Grants[0], s.fx.Checks[0]
	if g.Age != 20*time.Millisecond || g.Sum != sent.Grants[0].Sum || g.Sum != g.Fingerprint() {
		t.Errorf("grant %+v, first %+v", g, sent.Grants[0])
	}
	if c.Budget != 30*time.Millisecond || c.Attempt != sent.Checks[1].Attempt || c.Sum != c.Fingerprint() {
		t.Errorf("check %+v, first %+v", c, sent.Checks[1])
	}
	s.checked(grant.CheckAnswer{Attempt: c.Attempt, Verdict: grant.Allow, Cost: 1})
	want(t, s.one(long), Admitted, grant.None)
}

// Mode shadow decides as enforce does and lets everything pass; mode off lets
// everything pass without a message, while the copy is valid.
func TestModes(t *testing.T) {
	p := testPolicy()
	p.Mode = grant.Shadow
	s := hot(t, p, 1, nil)
	if d, _ := s.try("read", 1, time.Second); d.Outcome != Admitted || d.Shadow {
		t.Fatal(show(d))
	}
	d, ticket := s.try("read", 1, time.Second)
	want(t, d, Waiting, grant.None)
	s.answer(grant.GrantAnswer{ID: s.open().ID, Result: grant.Parked, Wait: time.Minute})
	for _, d := range s.resolved() {
		if want(t, d, Admitted, grant.Over); !d.Shadow || d.RetryAfter != 0 {
			t.Fatalf("ticket %d: %s", ticket, show(d))
		}
	}
	if d, _ := s.try("huge", 100, time.Second); d.Outcome != Admitted || !d.Shadow || d.Reason != grant.CostExceedsBurst {
		t.Fatal(show(d))
	}
	if d, _ := s.try("nosuch", 1, time.Second); d.Outcome != Rejected {
		t.Fatal(show(d))
	}

	p = testPolicy()
	p.Mode = grant.Off
	s = newStage(t, nil)
	s.push(p)
	for range 10 {
		for _, class := range []grant.RouteClass{"read", "huge", "central"} {
			d, _ := s.try(class, 100, time.Second)
			if want(t, d, Admitted, grant.None); d.Path != Unrestricted || !d.Shadow {
				t.Fatal(show(d))
			}
		}
	}
	if len(s.fx.Grants)+len(s.fx.Checks) > 0 {
		t.Fatalf("%+v", s.fx)
	}
	s.pass(grant.PolicyCopyLife)
	if d, _ := s.try("read", 1, time.Second); d.Outcome != Waiting || len(s.fx.Checks) != 1 {
		t.Fatalf("with an old copy: %s", show(d))
	}
}

// What is not for the wallet is checked: cold, a class marked central, a price
// above q, grants disabled, a fate met; a fenced agent does not even Check.
func TestCheckPath(t *testing.T) {
	check := func(name string, s *stage, class grant.RouteClass) {
		t.Helper()
		s.fx = Effects{}
		d, _ := s.try(class, 1, time.Second)
		if d.Outcome != Waiting || len(s.fx.Checks) != 1 {
			t.Errorf("%s: %s, %+v", name, show(d), s.fx)
		}
	}
	s := newStage(t, nil)
	s.push(testPolicy())
	check("cold", s, "read")
	check("central", hot(t, testPolicy(), 15, nil), "central")
	check("price above q", hot(t, testPolicy(), 15, nil), "huge")
	none := testPolicy()
	none.Grant = grant.GrantSettings{}
	s = newStage(t, nil)
	s.push(none)
	s.heat()
	check("grants disabled", s, "read")
	for _, fate := range []grant.Reason{grant.Superseded, grant.Discarded} {
		s = hot(t, testPolicy(), 1, nil)
		s.t.Fate(s.now(), fate, &s.fx)
		s.try("read", 1, time.Second) // what is held is spent
		check(fate.String(), s, "read")
	}
	s = hot(t, testPolicy(), 1, nil)
	d, ticket := s.try("write", 1, time.Second)
	want(t, d, Waiting, grant.None)
	s.answer(grant.GrantAnswer{ID: s.open().ID, Result: grant.Refused, Reason: grant.Fenced})
	want(t, s.one(ticket), Undecided, grant.Fenced)
	if d, _ := s.try("write", 1, time.Second); d.Outcome != Undecided || d.Reason != grant.Fenced {
		t.Errorf("fenced: %s", show(d))
	}
}

// Waiting is bounded, for units and Checks together: above it 503 "overloaded",
// and 429 when the tenant is known to be over its limit.
func TestWaitingIsBounded(t *testing.T) {
	s := hot(t, testPolicy(), 1, func(c *Config) { c.MaxWaiters = 4 })
	for i := range 8 {
		class := grant.RouteClass("write")
		if i%2 == 1 {
			class = "central"
		}
		d, _ := s.try(class, 1, time.Second)
		if i < 4 {
			want(t, d, Waiting, grant.None)
		} else {
			want(t, d, Undecided, grant.Overloaded)
		}
	}
	s.answer(grant.GrantAnswer{ID: s.open().ID, Result: grant.Parked})
	d, _ := s.try("write", 1, time.Second)
	want(t, d, Denied, grant.Over)
}

// An idle gateway hoards nothing: a tenant that stops asking stops being asked
// for, also when it holds units that run out; and a newcomer asks for little.
func TestIdleHoardsNothing(t *testing.T) {
	p := testPolicy()
	p.Grant.Quantum = 1000
	s := newStage(t, nil)
	s.push(p)
	s.heat()
	if w := s.open().Want; w > 5 {
		t.Errorf("a newcomer asks for %d", w)
	}
	s.grant(2)
	s.try("read", 1, time.Second)
	s.fx = Effects{}
	n := s.t.Stats().Requests
	s.pass(time.Minute)
	if got := s.t.Stats().Requests; got != n {
		t.Errorf("%d requests while idle: %+v", got-n, s.fx.Grants)
	}
}

// Every field out of range is named, with what was given and what is allowed.
func TestConfigValidate(t *testing.T) {
	err := Config{Tolerance: -1, Deadline: time.Hour, HotPerSecond: -2, LostAfter: -3, RetryFirst: 2 * time.Second, RetryMost: time.Second}.Validate()
	for _, part := range []string{
		"tolerance: -1ns; allowed: 0s to 1s", "deadline: 1h0m0s; allowed: 1ms to 1m0s", "hot_per_second: -2; allowed: 0 to",
		"max_waiters: 0; allowed: 1 to", "lost_after: -3ns", "retry_most: 1s; allowed: 2s to 1m0s", "next_seq: is nil", "rand: is nil",
	} {
		if !strings.Contains(fmt.Sprint(err), part) {
			t.Errorf("%v\nlacks %q", err, part)
		}
	}
}
