package agent

import (
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stipend/stipend/proto/grant"
)

// The property test: one Tenant against a dumb authority over a network that
// loses, repeats, delays and reorders, on a machine that naps or whose clock
// steps. What must hold in every history:
//
//   - what the wallet could spend is never more than what the authority takes
//     for outstanding, by real time;
//   - the units admitted are the units counted as spent, and granted = spent +
//     held + dropped;
//   - an id is credited at most once: never more than its one grant;
//   - a ticket is resolved exactly once, never admitted at or after its
//     deadline, and by its deadline if Tick is called at Wake;
//   - an ALLOW that was on its way while the clocks moved does not admit;
//   - the invariants of Tenant.Check.

// modelAccount is what the dumb authority keeps of one account.
type modelAccount struct {
	last        grant.GrantRequest
	answer      grant.GrantAnswer // of last; Result 0: parked
	outstanding Units
	expires     time.Duration // real time
	granted     map[grant.GrantID]Units
	total       Units
}

type world struct {
	*stage
	napped   time.Duration // real time is mono plus all naps
	accounts [2]*modelAccount
	requests []grant.GrantRequest
	answers  []grant.GrantAnswer
	checks   []grant.CheckRequest
	verdicts []grant.CheckAnswer
	allowed  map[uint64]bool

	asked    map[uint64]asked // open tickets
	punctual bool
	admitted [2]Units // from the wallet, from the reserve
	sent     [2]sent
}

// sent is the request that was sent last for an account.
type sent struct {
	id     grant.GrantID
	expiry time.Duration // its own, in mono
	closed bool
	bytes  grant.Fingerprint
}

type asked struct {
	deadline, wall time.Duration
}

func (w *world) real() time.Duration { return w.mono + w.napped }

func (w *world) outstanding(i int, real time.Duration) Units {
	if real >= w.accounts[i].expires {
		return 0
	}
	return w.accounts[i].outstanding
}

// collect takes the effects into the network and tests them.
func (w *world) collect(t *rapid.T) {
	for _, g := range w.fx.Grants {
		i, a := 0, w.t.ord
		if g.Emergency {
			i, a = 1, w.t.reserve
		}
		switch last := &w.sent[i]; {
		case g.ID == last.id:
			if g.Sum != last.bytes {
				t.Fatalf("id %d was sent with other bytes", g.ID)
			}
		case last.id != 0 && !last.closed && w.mono < last.expiry:
			t.Fatalf("id %d was sent while %d is neither closed nor past its expiry", g.ID, last.id)
		default:
			*last = sent{id: g.ID, expiry: w.mono - g.Age + a.life, bytes: g.Sum}
		}
	}
	w.requests = append(w.requests, w.fx.Grants...)
	w.checks = append(w.checks, w.fx.Checks...)
	for _, r := range w.fx.Resolved {
		a, open := w.asked[r.Ticket]
		if !open {
			t.Fatalf("ticket %d was resolved but does not wait: %s", r.Ticket, show(r.Decision))
		}
		delete(w.asked, r.Ticket)
		w.decided(t, r.Decision, a)
	}
	w.fx = Effects{}
}

func (w *world) decided(t *rapid.T, d Decision, a asked) {
	when := time.Duration(d.At) - testStart
	if d.Outcome != Admitted || d.Shadow {
		if w.punctual && when > a.deadline {
			t.Fatalf("resolved %v after its deadline: %s", when-a.deadline, show(d))
		}
		return
	}
	switch d.Path {
	case Local, FromReserve:
		i := 0
		if d.Path == FromReserve {
			i = 1
		}
		w.admitted[i] += d.Cost
		if before := d.Cost + d.Remaining; d.Cost > 0 && before > w.outstanding(i, when+w.napped) {
			t.Fatalf("account %d: spent of %d units, %d are outstanding", i, before, w.outstanding(i, when+w.napped))
		}
	case Central:
		if moved := w.wall - a.wall; moved > 100*time.Millisecond || moved < -100*time.Millisecond {
			t.Fatalf("an ALLOW admitted although the clocks moved by %v", moved)
		}
	}
	if when >= a.deadline && a.deadline > 0 {
		t.Fatalf("admitted %v after the deadline: %s", when-a.deadline, show(d))
	}
}

// decide is the authority's answer to one arriving request.
func (w *world) decide(t *rapid.T, req grant.GrantRequest) {
	i := 0
	if req.Emergency {
		i = 1
	}
	acc := w.accounts[i]
	ans := grant.GrantAnswer{Tenant: req.Tenant, Incarnation: req.Incarnation, Emergency: req.Emergency, ID: req.ID, Policy: w.copy(req.KnownVersion)}
	if req.Sum != req.Fingerprint() {
		t.Fatalf("request %+v: wrong fingerprint", req)
	}
	switch {
	case req.ID == acc.last.ID && req.Sum != acc.last.Sum:
		t.Fatalf("id %d with other bytes: %+v, before %+v", req.ID, req, acc.last)
	case req.ID == acc.last.ID && acc.answer.Result != 0:
		ans = acc.answer
	case req.ID < acc.last.ID:
		ans.Result, ans.Reason = grant.Refused, grant.Stale
	case req.Held > w.outstanding(i, w.real()):
		acc.last = req
		ans.Result, ans.Reason = grant.Refused, grant.HeldExceeds
		acc.answer = ans
	default:
		acc.last, acc.answer = req, grant.GrantAnswer{}
		acc.outstanding = req.Held
		switch rapid.SampledFrom([]string{"grant", "grant", "grant", "park", "busy", "no-room", "over", "broke"}).Draw(t, "fate") {
		case "grant":
			ans.Result, ans.TTL = grant.Granted, w.policy.Account(req.Emergency).Grant.TTL
			ans.Units = Units(rapid.Int64Range(int64(req.Min), int64(req.Want)).Draw(t, "units"))
			acc.granted[req.ID] += ans.Units
			acc.total += ans.Units
			acc.outstanding += ans.Units
			expires := w.real() + ans.TTL + 100*time.Millisecond
			if req.Held > 0 {
				expires = max(expires, acc.expires)
			}
			acc.expires, acc.answer = expires, ans
		case "park":
			ans.Result, ans.Wait = grant.Parked, time.Duration(rapid.Int64Range(0, 500).Draw(t, "wait"))*time.Millisecond
		case "busy":
			ans.Result, ans.Reason = grant.Busy, rapid.SampledFrom([]grant.Reason{grant.Overloaded, grant.Unavailable, grant.UnknownSession}).Draw(t, "busy")
		case "no-room":
			ans.Result, ans.Reason = grant.Empty, grant.NoRoom
			acc.answer = ans
		case "over":
			ans.Result, ans.Reason = grant.Empty, grant.Over
			acc.answer = ans
		case "broke":
			ans.Result, ans.Reason = grant.Refused, grant.Conflict
			acc.answer = ans
		}
	}
	w.answers = append(w.answers, ans)
}

func (w *world) deliver(m grant.GrantAnswer) {
	i := 0
	if m.Emergency {
		i = 1
	}
	if m.Result.Closes() && m.ID == w.sent[i].id {
		w.sent[i].closed = true
	}
	w.t.Answer(w.now(), m, &w.fx)
}

func (w *world) verdict(t *rapid.T, req grant.CheckRequest) {
	ans := grant.CheckAnswer{Tenant: req.Tenant, Attempt: req.Attempt, Cost: 1, Policy: w.copy(req.KnownVersion)}
	if w.allowed[req.Attempt.Seq] {
		ans.Verdict, ans.Replayed = grant.Allow, true
	} else {
		ans.Verdict = rapid.SampledFrom([]grant.Verdict{grant.Allow, grant.Allow, grant.Deny, grant.Undecided, grant.Reject}).Draw(t, "verdict")
	}
	switch ans.Verdict {
	case grant.Allow:
		w.allowed[req.Attempt.Seq] = true
	case grant.Deny:
		ans.Reason = grant.Over
		ans.Affordable = time.Duration(rapid.Int64Range(0, 3000).Draw(t, "affordable")) * time.Millisecond
	case grant.Undecided:
		ans.Reason = grant.Overloaded
	case grant.Reject:
		ans.Reason = grant.Stale
	}
	w.verdicts = append(w.verdicts, ans)
}

// pick takes one message out of a queue, or leaves a copy behind.
func pick[M any](t *rapid.T, queue *[]M) (m M, ok bool) {
	q := *queue
	if len(q) == 0 {
		return m, false
	}
	i := rapid.IntRange(0, len(q)-1).Draw(t, "which")
	m = q[i]
	if !rapid.Bool().Draw(t, "again") {
		*queue = append(q[:i:i], q[i+1:]...)
	}
	return m, true
}

func (w *world) property(t *rapid.T) {
	w.collect(t)
	if err := w.t.Check(); err != nil {
		t.Fatal(err)
	}
	st := w.t.Stats()
	for i, s := range []AccountStats{st.AccountStats, st.Reserve} {
		var dropped Units
		for _, d := range s.Dropped {
			dropped += d
		}
		if s.Granted != s.Spent+s.Held+dropped || s.Spent != w.admitted[i] {
			t.Fatalf("account %d: granted %d, spent %d (admitted %d), held %d, dropped %v", i, s.Granted, s.Spent, w.admitted[i], s.Held, s.Dropped)
		}
		if s.Granted > w.accounts[i].total {
			t.Fatalf("account %d: %d units credited or missed, %d granted", i, s.Granted, w.accounts[i].total)
		}
	}
	for i, a := range []*account{w.t.ord, w.t.reserve} {
		if a == nil {
			continue
		}
		// Alive by the clocks of this moment, not what a later step will drop.
		word := a.wallet.word.Load()
		if u := wordUnits(word); u > w.outstanding(i, w.real()) && a.wallet.slots[word&1].dead(w.now(), 100*time.Millisecond) == NotRefused {
			t.Fatalf("account %d could spend %d units, %d are outstanding", i, u, w.outstanding(i, w.real()))
		}
	}
	if w.punctual {
		for ticket, a := range w.asked {
			if w.mono > a.deadline {
				t.Fatalf("ticket %d waits %v past its deadline", ticket, w.mono-a.deadline)
			}
		}
	}
}

func TestRandomHistories(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := &world{allowed: map[uint64]bool{}, asked: map[uint64]asked{}, punctual: true}
		w.stage = &stage{tb: t, wall: 1000 * time.Hour}
		for i := range w.accounts {
			w.accounts[i] = &modelAccount{granted: map[grant.GrantID]Units{}}
		}
		cfg := w.testConfig()
		cfg.MaxWaiters = rapid.SampledFrom([]int{3, 1000}).Draw(t, "waiters")
		cfg.Deadline = rapid.SampledFrom([]time.Duration{5 * time.Millisecond, 50 * time.Millisecond, time.Second}).Draw(t, "deadline")
		cfg.LostAfter = 500 * time.Millisecond
		cfg.Rand = func(n int64) int64 { return rapid.Int64Range(0, n-1).Draw(t, "jitter") }
		naps := rapid.Bool().Draw(t, "naps") // or steps: a step may hide a nap
		w.t = NewTenant(cfg, testTenant, testInc)
		newPolicy := func() *grant.Policy {
			p := testPolicy()
			p.Grant.TTL = time.Duration(rapid.SampledFrom([]int64{200, 1000, 5000}).Draw(t, "ttl")) * time.Millisecond
			p.Grant.Quantum = Units(rapid.SampledFrom([]int64{1, 10, 20}).Draw(t, "q"))
			p.Mode = rapid.SampledFrom([]grant.Mode{grant.Enforce, grant.Enforce, grant.Enforce, grant.Shadow, grant.Off}).Draw(t, "mode")
			p.Classes["pay"] = grant.Class{Cost: 1, Emergency: true}
			p.Emergency = &grant.Emergency{Rate: grant.Rate{Units: 1, Per: time.Second}, Burst: 20,
				Grant: grant.GrantSettings{Quantum: 8, Owners: 2, TTL: 2 * time.Second}}
			return p
		}
		w.version, w.policy = 1, newPolicy()
		w.ticked = func() { w.property(t) }
		try := func(t *rapid.T) {
			class := grant.RouteClass(rapid.SampledFrom([]string{"read", "read", "read", "write", "dear", "pay", "central"}).Draw(t, "class"))
			budget := time.Duration(rapid.SampledFrom([]int64{0, 10, 10_000}).Draw(t, "budget")) * time.Millisecond
			count := Units(rapid.SampledFrom([]int64{1, 1, 1, 0, 2}).Draw(t, "count"))
			w.collect(t)
			d, ticket := w.try(class, count, budget)
			a := asked{deadline: w.mono + min(budget, cfg.Deadline), wall: w.wall}
			if d.Outcome == Waiting {
				w.asked[ticket] = a
			} else {
				a.deadline = 0 // decided at once
				if d.Outcome == Admitted && !d.Shadow {
					w.decided(t, d, a)
				}
			}
		}
		actions := map[string]func(*rapid.T){
			"try":  try,
			"try2": func(t *rapid.T) { try(t); try(t); try(t) },
			"time": func(t *rapid.T) {
				w.pass(time.Duration(rapid.SampledFrom([]int64{1, 3, 20, 80, 300, 1500, 12_000}).Draw(t, "ms")) * time.Millisecond)
			},
			"brink": func(t *rapid.T) { // the last moment of what is held
				if w.t.ord == nil {
					return
				}
				if d := w.t.ord.wallet.Expiry().Sub(w.now().Mono) - 1; d > 0 && d < time.Minute {
					w.pass(d)
				}
			},
			"stall": func(t *rapid.T) { // the shell is late, and an answer comes first
				d := time.Duration(rapid.Int64Range(1, 400).Draw(t, "ms")) * time.Millisecond
				w.punctual = false
				w.mono += d
				if m, ok := pick(t, &w.verdicts); ok {
					w.t.Checked(w.now(), m, &w.fx)
				}
				if m, ok := pick(t, &w.answers); ok {
					w.deliver(m)
				}
				w.t.Tick(w.now(), &w.fx)
				w.collect(t)
				w.punctual = true
			},
			"nap or step": func(t *rapid.T) {
				d := time.Duration(rapid.SampledFrom([]int64{20, 60, 90, 101, 3000}).Draw(t, "ms")) * time.Millisecond
				if naps {
					w.napped += d
				} else if rapid.Bool().Draw(t, "back") {
					d = -d
				}
				w.wall += d
			},
			"request": func(t *rapid.T) {
				if m, ok := pick(t, &w.requests); ok {
					w.decide(t, m)
				}
			},
			"answer": func(t *rapid.T) {
				if m, ok := pick(t, &w.answers); ok {
					w.deliver(m)
				}
			},
			"both": func(t *rapid.T) { // the usual case: there and back
				for n := len(w.requests); n > 0; n-- {
					w.decide(t, w.requests[0])
					w.requests = w.requests[1:]
				}
				w.pass(time.Millisecond)
				for n := len(w.answers); n > 0; n-- {
					w.deliver(w.answers[0])
					w.answers = w.answers[1:]
				}
			},
			"check": func(t *rapid.T) {
				if m, ok := pick(t, &w.checks); ok {
					w.verdict(t, m)
				}
			},
			"verdict": func(t *rapid.T) {
				if m, ok := pick(t, &w.verdicts); ok {
					w.t.Checked(w.now(), m, &w.fx)
				}
			},
			"lose": func(t *rapid.T) { w.requests, w.verdicts = nil, nil },
			"link": func(t *rapid.T) { w.t.Link(w.now(), rapid.Bool().Draw(t, "up"), &w.fx) },
			"policy": func(t *rapid.T) {
				w.version++
				w.policy = newPolicy()
				if rapid.Bool().Draw(t, "pushed") {
					w.t.Pushed(w.now(), w.version, w.policy, false, &w.fx)
				}
			},
			"give up": func(t *rapid.T) {
				for ticket := range w.nextAsk + 1 {
					if _, open := w.asked[ticket]; open {
						d, ok := w.t.GiveUp(w.now(), ticket, &w.fx)
						if !ok {
							for _, r := range w.fx.Resolved {
								ok = ok || r.Ticket == ticket
							}
							if !ok {
								t.Fatalf("ticket %d is lost", ticket)
							}
							return
						}
						delete(w.asked, ticket)
						if d.Outcome == Admitted && !d.Shadow || d.Outcome == Waiting {
							t.Fatalf("given up: %s", show(d))
						}
						return
					}
				}
			},
			"distrust": func(t *rapid.T) {
				w.t.Distrust(w.now())
				w.t.Tick(w.now(), &w.fx)
			},
			"": w.property,
		}
		for range 4 { // histories long enough for several lives of a grant
			t.Repeat(actions)
		}
	})
}

// A failed run prints the stage's state.
func (w *world) String() string { return fmt.Sprintf("%v %s", w.mono, w.t.State()) }
