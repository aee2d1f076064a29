package agent

import (
	"testing"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// bucketAuthority is an authority for one agent: a bucket, parking and Checks,
// with a delay each way. Its time is the stage's.
type bucketAuthority struct {
	s      *stage
	trip   time.Duration
	level  Units
	carry  int64
	at     time.Duration
	parked *grant.GrantRequest
	to     []delayed
	from   []delayed
	done   map[grant.GrantID]bool
}

type delayed struct {
	at      time.Duration
	grant   *grant.GrantRequest
	check   *grant.CheckRequest
	answer  *grant.GrantAnswer
	verdict *grant.CheckAnswer
}

func (b *bucketAuthority) reply(d delayed) {
	d.at = b.s.mono + b.trip
	b.from = append(b.from, d)
}

// serve grants what is parked when there is enough for it.
func (b *bucketAuthority) serve() {
	p := b.s.policy
	whole, carry := p.Rate.AccrueFloor(b.s.mono-b.at, b.carry)
	b.level, b.carry, b.at = min(b.level+whole, p.Burst), carry, b.s.mono
	if b.parked == nil {
		return
	}
	slice, _ := p.Rate.AccrueFloor(refillSlice, 0)
	if enough := max(b.parked.Min, min(b.parked.Want, slice)); b.level >= enough {
		units := min(b.level, b.parked.Want)
		b.level -= units
		b.reply(delayed{answer: &grant.GrantAnswer{ID: b.parked.ID, Result: grant.Granted, Units: units, TTL: p.Grant.TTL, Policy: b.s.copy(0)}})
		b.parked = nil
	}
}

// step moves the messages whose time has come.
func (b *bucketAuthority) step() {
	for i := range b.s.fx.Grants {
		b.to = append(b.to, delayed{at: b.s.mono + b.trip, grant: &b.s.fx.Grants[i]})
	}
	for i := range b.s.fx.Checks {
		b.to = append(b.to, delayed{at: b.s.mono + b.trip, check: &b.s.fx.Checks[i]})
	}
	b.s.fx.Grants, b.s.fx.Checks = nil, nil
	b.serve()
	p := b.s.policy
	for ; len(b.to) > 0 && b.to[0].at <= b.s.mono; b.to = b.to[1:] {
		if c := b.to[0].check; c != nil {
			price, _, _ := p.Price(c.Class, c.Count)
			v := grant.CheckAnswer{Attempt: c.Attempt, Verdict: grant.Deny, Reason: grant.Over, Cost: price, Policy: b.s.copy(c.KnownVersion)}
			if price <= b.level {
				b.level -= price
				v.Verdict, v.Reason = grant.Allow, grant.None
			} else {
				v.Affordable, _ = p.Rate.DurationCeil(price-b.level, b.carry)
			}
			b.reply(delayed{verdict: &v})
			continue
		}
		g := b.to[0].grant
		if b.done[g.ID] {
			continue
		}
		b.done[g.ID] = true
		b.parked = g
		if b.serve(); b.parked != nil {
			wait, _ := p.Rate.DurationCeil(max(g.Min, 2)-b.level, b.carry)
			b.reply(delayed{answer: &grant.GrantAnswer{ID: g.ID, Result: grant.Parked, Wait: wait, Policy: b.s.copy(g.KnownVersion)}})
		}
	}
	for ; len(b.from) > 0 && b.from[0].at <= b.s.mono; b.from = b.from[1:] {
		if d := b.from[0]; d.answer != nil {
			b.s.answer(*d.answer)
		} else {
			b.s.checked(*d.verdict)
		}
	}
}

// TestSaturatedUsesWhatItIsDue: a tenant that offers three times its rate, in
// cheap and dear requests, through one agent gets at least 97 % of r*T+B, its
// dear requests among them, and hears 429 for the rest, never 503; and it costs
// few messages.
func TestSaturatedUsesWhatItIsDue(t *testing.T) {
	p := testPolicy()
	s := newStage(t, nil)
	s.push(p)
	b := &bucketAuthority{s: s, trip: 2 * time.Millisecond, level: p.Burst, done: map[grant.GrantID]bool{}}
	var got Units
	outcomes := map[Outcome]int{}
	dear := map[uint64]bool{}
	dearAdmitted, asked := 0, 0
	count := func(ticket uint64, d Decision) {
		outcomes[d.Outcome]++
		if d.Outcome == Admitted {
			got += d.Cost
			if dear[ticket] {
				dearAdmitted++
			}
		}
		if d.Outcome == Undecided {
			t.Fatalf("after %v: %s; %s", s.mono, show(d), s.t.State())
		}
	}
	const length = 20 * time.Second
	for i := 0; s.mono < length; i++ {
		s.pass(time.Millisecond)
		b.step()
		if i%4 == 0 {
			class := grant.RouteClass("read")
			if i%100 == 0 {
				class = "dear"
			}
			asked++
			d, ticket := s.try(class, 1, time.Second)
			dear[ticket] = class == "dear"
			if d.Outcome != Waiting {
				count(ticket, d)
			}
		}
		for ticket, d := range s.resolved() {
			count(ticket, d)
		}
	}
	due := 100*Units(length/time.Second) + p.Burst
	if got < due*97/100 || got > due+p.Grant.Quantum {
		t.Errorf("used %d of %d units: %v; %+v", got, due, outcomes, s.t.Stats())
	}
	if dearAdmitted == 0 {
		t.Errorf("no dear request was admitted: %v", outcomes)
	}
	st := s.t.Stats()
	t.Logf("used %d of %d units, %d dear, %d asked, %d grant requests, %d repeats, %d checks", got, due, dearAdmitted, asked, st.Requests, st.Retries, st.Checks)
	if n := st.Requests + st.Retries + st.Checks; n > uint64(length/refillSlice)*3/2 {
		t.Errorf("%d messages in %v: %+v", n, length, st)
	}
}

// A credit clears a remembered denial, and so does a policy change.
func TestRememberedDenialIsCleared(t *testing.T) {
	for name, clear := range map[string]func(s *stage){
		"credit": func(s *stage) { s.grant(1) },
		"policy": func(s *stage) { s.push(testPolicy()) },
	} {
		s := hot(t, testPolicy(), 1, nil)
		s.try("read", 1, time.Second)
		s.open()
		_, ticket := s.try("central", 1, time.Second)
		s.checked(grant.CheckAnswer{Attempt: s.t.checks[0].req.Attempt, Verdict: grant.Deny, Reason: grant.Over, Cost: 2, Affordable: time.Second})
		want(t, s.one(ticket), Denied, grant.Over)
		d, _ := s.try("write", 1, time.Second)
		want(t, d, Denied, grant.Over)
		if d, _ := s.try("read", 1, time.Second); d.Outcome != Waiting {
			t.Fatalf("%s: cheaper than the refused one: %s", name, show(d))
		}
		clear(s)
		if d, _ := s.try("write", 1, time.Second); d.Outcome != Waiting {
			t.Errorf("%s: still remembered: %s", name, show(d))
		}
	}
}

// A request that was parked until its grant came is evidence: who goes without
// right after is over the limit, also when the last word is seconds old.
func TestGrantThatWaitedIsEvidence(t *testing.T) {
	s := hot(t, testPolicy(), 1, func(c *Config) { c.Deadline = 5 * time.Second })
	s.try("write", 1, time.Minute)
	s.answer(grant.GrantAnswer{ID: s.open().ID, Result: grant.Parked})
	s.pass(3 * time.Second)
	_, second := s.try("dear", 1, 100*time.Millisecond)
	s.grant(5)
	if m := s.resolved(); len(m) != 1 {
		t.Fatalf("resolved %v", m)
	}
	s.pass(100 * time.Millisecond)
	want(t, s.one(second), Denied, grant.Over)
}
