package sim

import (
	"testing"
	"time"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

// Scenarios that concern the authority alone, on one Node.

// A retry arrives while the first commit of its grant is in flight, and that
// commit then fails: both are told to try again, whether the records landed or
// not, and the third asking gets one grant, deducted once.
func TestRetryDuringCommitThatFails(t *testing.T) {
	for _, landed := range []bool{false, true} {
		l := newLab(t, policy(0, 100, 20, 5, 10*time.Second), 1)
		r := grantRequest(0, 1, 20, 1, 0)
		first := l.offer(authority.Call{Grant: &r})
		records := l.node.Step(l.reading())
		retry := l.offer(authority.Call{Grant: &r})
		if got := l.node.Replies(); len(got) > 0 {
			t.Fatalf("%d replies while the commit is in flight", len(got))
		}
		if landed {
			l.Commit(0, records)
		}
		l.node.Done(errLab)
		l.collect()
		for _, n := range []int{first, retry} {
			answered(t, *l.replies[n].Grant, grant.Busy, grant.Unavailable)
		}
		if l.node.Loaded() {
			t.Fatal("the Node kept its memory after a commit of unknown outcome")
		}
		l.load()
		isGrant(t, l.ask(r), 20)
		isGrant(t, l.ask(r), 20)
		if s := l.state().Ordinary; s.Level != 80 || s.Outstanding != 20 {
			t.Errorf("landed %v: level %d, outstanding %d; want 80 and 20", landed, s.Level, s.Outstanding)
		}
	}
}

// The same for a Check.
func TestCheckRetryDuringCommitThatFails(t *testing.T) {
	for _, landed := range []bool{false, true} {
		l := newLab(t, policy(0, 10, 0, 0, 0), 0)
		r := l.checkRequest("five", 1)
		n := l.offer(authority.Call{Check: &r})
		l.step(errLab, landed)
		if a := l.replies[n].Check; a.Verdict != grant.Undecided || a.Reason != grant.Unavailable {
			t.Fatalf("landed %v: %v %v after a failed commit", landed, a.Verdict, a.Reason)
		}
		l.load()
		if a := l.send(r); a.Verdict != grant.Allow || a.Replayed != landed {
			t.Errorf("landed %v: %v %v, replayed %v", landed, a.Verdict, a.Reason, a.Replayed)
		}
		if got := l.level(); got != 5 {
			t.Errorf("landed %v: level %d, want 5", landed, got)
		}
	}
}

// A failed commit is unknown to everybody: parked requests, replays, refusals and
// reads of that step included, hear "try again".
func TestFailedCommitAnswersNobody(t *testing.T) {
	l := newLab(t, policy(10, 10, 10, 2, 10*time.Second), 3)
	isGrant(t, l.ask(grantRequest(0, 1, 10, 1, 0)), 10)
	waits := grantRequest(1, 1, 10, 10, 0)
	parked := l.offer(authority.Call{Grant: &waits})
	l.step(nil)
	answered(t, *l.replies[parked].Grant, grant.Parked, grant.Over)

	l.now = l.now.Add(100 * time.Millisecond)
	check, again := l.checkRequest("c", 1), grantRequest(0, 1, 10, 1, 0)
	numbers := []int{
		l.offer(authority.Call{Check: &check}),
		l.offer(authority.Call{Grant: &again}),
		l.offer(authority.Call{Get: &authority.GetTenant{Tenant: acme}}),
		l.offer(authority.Call{Put: &authority.PutPolicy{Tenant: acme, Policy: policy(20, 20, 10, 2, 10*time.Second), AnyVersion: true}}),
	}
	l.step(errLab, false)
	answered(t, *l.replies[parked].Grant, grant.Busy, grant.Unavailable)
	if a := l.replies[numbers[0]].Check; a.Verdict != grant.Undecided {
		t.Errorf("the Check heard %v", a.Verdict)
	}
	answered(t, *l.replies[numbers[1]].Grant, grant.Busy, grant.Unavailable)
	if s := l.replies[numbers[2]].Tenant; s.Reason != grant.Unavailable {
		t.Errorf("the read heard %v", s.Reason)
	}
	if p := l.replies[numbers[3]].Put; p.Reason != grant.Unavailable {
		t.Errorf("the put heard %v", p.Reason)
	}
}

// N and q change while 3 owners hold: what is out counts until it is gone,
// however it was handed out.
func TestOwnersAndQuantumChangeBothWays(t *testing.T) {
	ttl := 10 * time.Second
	t.Run("3 x 10 to 1 x 30", func(t *testing.T) {
		l := newLab(t, policy(0, 1000, 10, 3, ttl), 5)
		for i := range 3 {
			isGrant(t, l.ask(grantRequest(i, 1, 30, 1, 0)), 10)
		}
		l.mustPut(policy(0, 1000, 30, 1, ttl))
		answered(t, l.ask(grantRequest(3, 1, 30, 1, 0)), grant.Empty, grant.NoRoom)
		answered(t, l.ask(grantRequest(0, 2, 20, 1, 10)), grant.Empty, grant.NoRoom)
		// What an owner reports as spent makes room for itself and others.
		isGrant(t, l.ask(grantRequest(0, 3, 30, 1, 0)), 10)
		l.advance(l.cfg.GrantLife(ttl) + time.Millisecond)
		isGrant(t, l.ask(grantRequest(3, 2, 100, 1, 0)), 30)
		answered(t, l.ask(grantRequest(1, 2, 1, 1, 0)), grant.Empty, grant.NoRoom)
	})
	t.Run("1 x 30 to 8 x 4", func(t *testing.T) {
		l := newLab(t, policy(0, 1000, 30, 1, ttl), 9)
		isGrant(t, l.ask(grantRequest(0, 1, 30, 1, 0)), 30)
		l.mustPut(policy(0, 1000, 4, 8, ttl))
		isGrant(t, l.ask(grantRequest(1, 1, 4, 1, 0)), 2) // 32 - 30
		answered(t, l.ask(grantRequest(2, 1, 4, 1, 0)), grant.Empty, grant.NoRoom)
		answered(t, l.ask(grantRequest(0, 2, 4, 1, 20)), grant.Empty, grant.NoRoom) // holds more than q
		isGrant(t, l.ask(grantRequest(2, 2, 4, 1, 0)), 4)                           // 32 - 20 - 2 leaves 10
		l.advance(l.cfg.GrantLife(ttl) + time.Millisecond)
		var sum grant.Units
		for i := range 9 {
			if a := l.ask(grantRequest(i, 10, 4, 1, 0)); a.Result == grant.Granted {
				sum += a.Units
			}
		}
		if sum != 32 {
			t.Errorf("%d units handed out to 9 owners, N*q is 32", sum)
		}
	})
}

// 8 requests wait when 3 owners fit: refill serves three, and the rest hear that
// there is no room, decided again at the moment they wake.
func TestMoreParkedThanOwnersFit(t *testing.T) {
	l := newLab(t, policy(100, 10, 10, 3, 10*time.Second), 8)
	if n := l.allowed(10); n != 10 {
		t.Fatal("the bucket was not full")
	}
	var numbers [8]int
	for i := range numbers {
		r := grantRequest(i, 1, 10, 10, 0)
		numbers[i] = l.offer(authority.Call{Grant: &r})
	}
	l.step(nil)
	for _, n := range numbers {
		answered(t, *l.replies[n].Grant, grant.Parked, grant.Over)
	}
	l.advance(2 * time.Second)
	got, none := 0, 0
	for _, n := range numbers {
		switch a := l.replies[n].Grant; {
		case a.Result == grant.Granted && a.Units == 10:
			got++
		case a.Result == grant.Empty && a.Reason == grant.NoRoom:
			none++
		}
	}
	if got != 3 || none != 5 {
		t.Errorf("%d granted and %d without room, want 3 and 5", got, none)
	}
	if s := l.state().Ordinary; s.Outstanding != 30 {
		t.Errorf("outstanding %d, want 30", s.Outstanding)
	}
}

// Parked requests get the deleted, switched-off or shrunk policy of the moment
// they wake in, not the one they came under.
func TestParkedAreDecidedAgain(t *testing.T) {
	for name, c := range map[string]struct {
		next   *grant.Policy
		result grant.GrantResult
		why    grant.Reason
	}{
		"deleted": {nil, grant.Refused, grant.UnknownTenant},
		"no q":    {policy(100, 10, 0, 3, 10*time.Second), grant.Empty, grant.NoRoom},
		"small B": {policy(100, 5, 10, 3, 10*time.Second), grant.Empty, grant.CostExceedsBurst},
	} {
		l := newLab(t, policy(1, 10, 10, 3, 10*time.Second), 1)
		l.allowed(10)
		r := grantRequest(0, 1, 10, 9, 0)
		n := l.offer(authority.Call{Grant: &r})
		l.step(nil)
		answered(t, *l.replies[n].Grant, grant.Parked, grant.Over)
		l.mustPut(c.next)
		if a := l.replies[n].Grant; a.Result != c.result || a.Reason != c.why {
			t.Errorf("%s: %v %v, want %v %v", name, a.Result, a.Reason, c.result, c.why)
		}
	}
}

// A parked request of an incarnation that is fenced, discarded or superseded
// meanwhile is refused, though the units come.
func TestParkedMeetTheirFate(t *testing.T) {
	for state, why := range map[authority.MemberState]grant.Reason{
		authority.Fenced: grant.Fenced, authority.Discarded: grant.Discarded, authority.Superseded: grant.Superseded,
	} {
		l := newLab(t, policy(1, 10, 10, 3, 10*time.Second), 1)
		l.allowed(10)
		r := grantRequest(0, 1, 10, 9, 0)
		n := l.offer(authority.Call{Grant: &r})
		l.step(nil)
		l.member(0, state)
		l.advance(10 * time.Second)
		answered(t, *l.replies[n].Grant, grant.Refused, why)
		answered(t, l.ask(grantRequest(0, 2, 1, 1, 0)), grant.Refused, why)
	}
}

// Ledger time goes on from the largest durable instant: the time in which nobody
// led does not refill, and the machine's clocks may show anything.
func TestReloadAnchorsLedgerTime(t *testing.T) {
	l := newLab(t, policy(1, 1000, 0, 0, 0), 0)
	l.allowed(1000)
	l.advance(100 * time.Second)
	l.check("c", 1) // persists the instant
	before := l.level()
	for _, boot := range []grant.Instant{0, grant.Instant(1000 * time.Hour), grant.Instant(time.Second)} {
		l.now = l.now.Add(time.Hour)
		l.boot = boot - l.now
		l.load()
		if got := l.level(); got != before {
			t.Fatalf("level %d after a load, %d before: the time without a leader counted", got, before)
		}
	}
	l.advance(10 * time.Second)
	if got := l.level(); got != before+10 {
		t.Errorf("level %d 10 s after the load, want %d", got, before+10)
	}
}

// The slower of the two clocks counts, and a clock that stands still or jumps
// back refills nothing.
func TestSlowerClockCounts(t *testing.T) {
	l := newLab(t, policy(10, 1000, 0, 0, 0), 0)
	l.allowed(1000)
	r := l.reading()
	read := func(mono, raw time.Duration) grant.Units {
		n := l.offer(authority.Call{Get: &authority.GetTenant{Tenant: acme}})
		l.node.Step(authority.Reading{Mono: r.Mono.Add(mono), Raw: r.Raw.Add(raw)})
		l.collect()
		return l.replies[n].Tenant.Ordinary.Level
	}
	for _, c := range []struct {
		mono, raw time.Duration
		want      grant.Units
	}{{time.Second, time.Hour, 10}, {2 * time.Second, time.Second, 10}, {-time.Hour, 3 * time.Second, 10}, {2 * time.Second, 2 * time.Second, 20}} {
		if got := read(c.mono, c.raw); got != c.want {
			t.Errorf("MONOTONIC %v, RAW %v: level %d, want %d", c.mono, c.raw, got, c.want)
		}
	}
}

// A Check after its window: the decision is forgotten, the attempt is refused.
// Low-water marks outlive a crash.
func TestCheckAfterItsWindow(t *testing.T) {
	l := newLab(t, policy(1, 1000, 0, 0, 0), 0)
	l.known = append(l.known, authority.Member{Incarnation: inc(250), Owner: "asker", State: authority.Live})
	l.load()
	old := l.checkRequest("ten", 1)
	if a := l.send(old); a.Verdict != grant.Allow {
		t.Fatal(a.Verdict, a.Reason)
	}
	l.advance(l.cfg.DedupWindow + 2*time.Second)
	before := l.level()
	for range 2 {
		if a := l.send(old); a.Verdict != grant.Reject || a.Reason != grant.Stale {
			t.Errorf("after its window: %v %v, want rejected as stale", a.Verdict, a.Reason)
		}
		l.crash(time.Second)
	}
	if got := l.level(); got < before {
		t.Errorf("a late repeat took %d units", before-got)
	}
	if a := l.check("c", 1); a.Verdict != grant.Allow {
		t.Errorf("a newer attempt: %v %v", a.Verdict, a.Reason)
	}
}

// Delete and re-add of a tenant: spent stays spent, what is out still counts.
func TestDeleteAndReAdd(t *testing.T) {
	p := policy(1, 100, 10, 3, 10*time.Second)
	l := newLab(t, p, 4)
	for i := range 3 {
		isGrant(t, l.ask(grantRequest(i, 1, 10, 1, 0)), 10)
	}
	l.allowed(60)
	before := l.state()
	l.mustPut(nil)
	if a := l.check("c", 1); a.Verdict != grant.Deny || a.Reason != grant.UnknownTenant {
		t.Errorf("a deleted tenant: %v %v", a.Verdict, a.Reason)
	}
	answered(t, l.ask(grantRequest(3, 1, 1, 1, 0)), grant.Refused, grant.UnknownTenant)
	for range 3 {
		l.crash(time.Hour)
		l.advance(time.Second) // nothing refills a deleted tenant
	}
	l.mustPut(p)
	after := l.state()
	if after.Ordinary.Level != before.Ordinary.Level || after.Ordinary.Outstanding != before.Ordinary.Outstanding {
		t.Errorf("level %d and %d out before, %d and %d after", before.Ordinary.Level, before.Ordinary.Outstanding, after.Ordinary.Level, after.Ordinary.Outstanding)
	}
	if after.Version <= before.Version {
		t.Errorf("version %d after %d", after.Version, before.Version)
	}
	answered(t, l.ask(grantRequest(3, 2, 10, 1, 0)), grant.Empty, grant.NoRoom)
	isGrant(t, l.ask(grantRequest(0, 1, 10, 1, 0)), 10) // the old answer again
}

// A level lowered by a smaller burst does not come back with a larger one.
func TestRaisingTheBurstAddsNothing(t *testing.T) {
	l := newLab(t, policy(0, 100, 0, 0, 0), 0)
	l.mustPut(policy(0, 10, 0, 0, 0))
	l.mustPut(policy(0, 1000, 0, 0, 0))
	if got := l.level(); got != 10 {
		t.Errorf("level %d, want 10", got)
	}
	l.crash(time.Second)
	if got := l.level(); got != 10 {
		t.Errorf("level %d after a crash, want 10", got)
	}
}

// held > recorded: refused, and nothing granted on top of it.
func TestHeldMoreThanRecorded(t *testing.T) {
	l := newLab(t, policy(0, 100, 10, 3, 10*time.Second), 1)
	isGrant(t, l.ask(grantRequest(0, 1, 5, 1, 0)), 5)
	answered(t, l.ask(grantRequest(0, 2, 5, 1, 6)), grant.Refused, grant.HeldExceeds)
	isGrant(t, l.ask(grantRequest(0, 3, 10, 1, 5)), 5)
	l.advance(l.cfg.GrantLife(10*time.Second) + time.Second)
	answered(t, l.ask(grantRequest(0, 4, 5, 1, 1)), grant.Refused, grant.HeldExceeds)
	isGrant(t, l.ask(grantRequest(0, 5, 10, 1, 0)), 10)
}

// Among the parked the owner granted longest ago goes first, and nobody
// overtakes, however small.
func TestParkedOrder(t *testing.T) {
	l := newLab(t, policy(10, 10, 10, 4, 30*time.Second), 4)
	l.now = l.now.Add(time.Second) // a grant at ledger time 0 looks like none
	isGrant(t, l.ask(grantRequest(0, 1, 5, 5, 0)), 5)
	l.advance(time.Second)
	isGrant(t, l.ask(grantRequest(1, 1, 10, 10, 0)), 10)
	var order []int
	for _, who := range []int{1, 0, 2} { // arrival; 2 was never granted
		r := grantRequest(who, 2, 3, 3, 0)
		l.offer(authority.Call{Grant: &r})
		order = append(order, l.next)
	}
	l.step(nil)
	small := grantRequest(3, 1, 1, 1, 0)
	last := l.offer(authority.Call{Grant: &small})
	l.step(nil)
	for i, want := range []int{order[2], last, order[1], order[0]} {
		for tries := 0; l.replies[want].Grant.Result == grant.Parked; tries++ {
			if tries > 100 {
				t.Fatalf("number %d in order is not served in time", i)
			}
			l.advance(10 * time.Millisecond)
			for _, later := range []int{order[2], last, order[1], order[0]}[i+1:] {
				if l.replies[want].Grant.Result == grant.Parked && l.replies[later].Grant.Result != grant.Parked {
					t.Fatalf("number %d in order was overtaken by %d: %+v", i, later, l.replies[later].Grant)
				}
			}
		}
	}
}

// Expiry at the authority comes after the agent's, with every clock as wrong as
// it may be: see also authority's own test of GrantLife.
func TestAgentStopsFirst(t *testing.T) {
	for _, rho := range []int64{0, 1_000_000, 10_000_000} {
		for _, ttl := range []time.Duration{grant.MinTTL, 10 * time.Second, grant.MaxTTL} {
			cfg := DefaultConfig(1)
			cfg.Authority.RhoPPB = rho
			center := newClock(0, time.Hour, rho, rho)
			gateway := newClock(0, time.Hour, -rho, -rho)
			freed := center.When(center.Mono(0).Add(cfg.Authority.GrantLife(ttl)))
			stops := gateway.When(gateway.Mono(0).Add(ttl))
			if stops.Add(cfg.Authority.Tolerance) > freed {
				t.Errorf("rho %d ppb, ttl %v: the agent stops %v after the authority has freed the units", rho, ttl, stops.Sub(freed)+cfg.Authority.Tolerance)
			}
		}
	}
}

// A leader steps down at the moment a parked request could be served, and the
// commit of its last records fails: nobody hears of a grant.
func TestStepDownGrantsNothing(t *testing.T) {
	l := newLab(t, policy(1, 10, 10, 3, 30*time.Second), 1)
	l.allowed(10)
	r := grantRequest(0, 1, 10, 3, 0)
	n := l.offer(authority.Call{Grant: &r})
	l.step(nil)
	answered(t, *l.replies[n].Grant, grant.Parked, grant.Over)
	l.now = l.now.Add(4 * time.Second)
	l.node.Close(l.reading())
	l.collect()
	answered(t, *l.replies[n].Grant, grant.Busy, grant.Unavailable)
}
