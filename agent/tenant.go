package agent

import (
	"math"
	"slices"
	"sync/atomic"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// Tenant is what one agent knows and holds of one tenant. Take and Low may be
// called at any time from any goroutine; all other methods are serialised by
// the caller. Not copied after first use.
//
// Invariants, tested by Check:
//
//  1. An open grant request is the bytes that were first sent; at most one is
//     open per account.
//  2. While a request is open its wallet holds at most what the request says.
//  3. After a step no request is open past its own expiry, and nobody waits
//     past a deadline.
//  4. The wallet's waiters' bit is set exactly while somebody waits for units.
//  5. At most Config.MaxWaiters wait, for units and for Checks together; a
//     ticket waits once; pending Checks stand in order of sequence.
//  6. Somebody waits for units only while units are asked for: the tenant is
//     hot, its policy copy live, no fate met, not draining and not closed,
//     unless a Tick is due.
//  7. Take sees the wallet only of a hot tenant, or one in mode off.
type Tenant struct {
	view  atomic.Pointer[view] // nil: Take decides nothing
	until atomic.Int64         // Reading.Mono when the policy copy runs out
	low   atomic.Bool

	refusal      atomic.Pointer[refusal] // nil: Take refuses nothing by itself
	refusedCount atomic.Uint64           // by Take, since the Tenant was made
	refusedUnits atomic.Int64

	cfg     Config
	id      grant.TenantID
	inc     grant.Incarnation
	ord     *account // nil until the tenant was hot: cold tenants are many
	reserve *account // nil until emergency grants are to be held
	made    []*account

	now     Reading // the latest seen
	wake    grant.Instant
	policy  *grant.Policy // last known; live says whether it may be used
	version uint64

	heat      heat
	meter     meter
	dearest   Units // largest price seen lately, over two windows
	newest    Units // of the window that began at dearestAt
	dearestAt grant.Instant
	seenTakes uint64 // of the ordinary wallet, accounted for in heat and meter
	seenSpent Units

	seenRefused      uint64 // of refusedCount and refusedUnits, the same
	seenRefusedUnits int64

	rtt     time.Duration
	lastAsk grant.Instant

	waiters []waiter // for units of the ordinary account, oldest first
	checks  []check  // in order of sequence
	denied  denial
	backlog backlog

	lastOver grant.Instant // the authority last said that the tenant is over its rate
	busy     grant.Reason  // why the authority last did not decide
	busyAt   grant.Instant

	shorter  time.Duration // off the life of what is credited
	up       bool
	lostAt   grant.Instant // since when nothing was heard that should have been
	asked    bool          // something was sent and nothing heard since lostAt
	fate     grant.Reason
	draining bool
	closed   bool

	attempts uint64 // Checks made
	ignored  uint64 // answers that were not for an open request
}

// waiter is a request on its way to a decision.
type waiter struct {
	ticket   uint64
	class    grant.RouteClass
	count    Units
	price    Units // by the policy of when it was placed
	start    Reading
	deadline grant.Instant
}

// denial is a Check's denial, remembered for costs >= cost.
type denial struct {
	cost  Units
	until grant.Instant
}

const (
	longAgo    = grant.Instant(math.MinInt64 / 2)
	evidence   = time.Second           // how long one word of saturation counts
	remembered = time.Second           // how long a denial is remembered at most
	firstRTT   = 10 * time.Millisecond // before the first sample
	dearWindow = 2 * time.Second       // largest prices are forgotten after one or two of these
)

// NewTenant makes the machine of one tenant for one incarnation of the agent.
// cfg must be valid.
func NewTenant(cfg Config, id grant.TenantID, inc grant.Incarnation) *Tenant {
	t := &Tenant{
		cfg: cfg, id: id, inc: inc, up: true, rtt: firstRTT, wake: grant.Never,
		now:      Reading{Mono: longAgo},
		lastOver: longAgo, busyAt: longAgo, lostAt: longAgo, lastAsk: longAgo,
	}
	return t
}

// Take is the fast path: no lock, no allocation. It admits from the wallet, or
// denies what is known to come too late; ok is false when the request must go
// through Ask instead.
func (t *Tenant) Take(now Reading, class grant.RouteClass, count Units) (d Decision, ok bool) {
	v := t.view.Load()
	if v == nil || int64(now.Mono) >= t.until.Load() || count < 0 {
		return d, false
	}
	c, known := v.class(class)
	if !known {
		return d, false
	}
	price := count
	if c.Cost != 1 {
		var fits bool
		if price, fits = grant.MulUnits(c.Cost, count); !fits {
			return d, false
		}
	}
	if v.policy.Mode == grant.Off {
		d.Path, d.Shadow = Unrestricted, true
	} else {
		if c.Central || price > v.policy.Burst {
			return d, false
		}
		if price > 0 && price <= v.policy.Grant.Quantum {
			if d, ok = t.refuseFast(v, now, price); ok {
				return d, true
			}
		}
		taken := v.wallet.Take(now, price)
		if taken.Why != NotRefused {
			return d, false
		}
		if taken.Low && !t.low.Load() {
			t.low.Store(true)
		}
		d.Remaining = taken.Left // Path is Local
	}
	d.Outcome, d.Cost = Admitted, price
	d.At, d.Start = now.Mono, now.Mono
	d.Policy, d.Version = v.policy, v.version
	return d, true
}

// Low reports, once, that a Take crossed the low-water mark: call Tick now.
func (t *Tenant) Low() bool { return t.low.Load() && t.low.Swap(false) }

// Ask decides one request, or lets it wait: a Decision with Outcome Waiting is
// followed by one Resolution of the ticket, or ended by GiveUp.
func (t *Tenant) Ask(now Reading, a Ask, fx *Effects) Decision {
	now = t.clamp(now)
	w := waiter{
		ticket: a.Ticket, class: a.Class, count: a.Count, start: now,
		deadline: now.Mono.Add(max(0, min(a.Budget, t.cfg.Deadline))),
	}
	if a.Count < 0 {
		return t.finish(now, &w, Decision{Outcome: Rejected, Reason: grant.Invalid})
	}
	t.lastAsk = now.Mono
	known := len(fx.Resolved)
	t.observe(now)
	t.heat.one(now.Mono, t.cfg.HotPerSecond)
	if t.policy != nil {
		if price, _, why := t.policy.Price(a.Class, a.Count); why == grant.None && price <= t.policy.Burst {
			t.meter.add(now.Mono, price)
			t.newest = max(t.newest, price)
			t.dearest = max(t.dearest, price)
		}
	}
	d := t.route(now, &w, fx)
	// A denial that changes nothing is common and must be cheap.
	if d.Outcome == Denied && now.Mono < t.wake && t.ord != nil && (t.ord.open || now.Mono < t.ord.notBefore) {
		return d
	}
	t.run(now, fx)
	if d.Outcome == Waiting {
		// run may have decided it already: then it is not told twice.
		if i := slices.IndexFunc(fx.Resolved[known:], func(r Resolution) bool { return r.Ticket == a.Ticket }); i >= 0 {
			d = fx.Resolved[known+i].Decision
			fx.Resolved = slices.Delete(fx.Resolved, known+i, known+i+1)
		}
	}
	return d
}

// route decides a request that does not wait yet, or lets it wait for units or
// for a Check.
func (t *Tenant) route(now Reading, w *waiter, fx *Effects) Decision {
	p := t.live(now)
	if p == nil {
		return t.central(now, w, fx)
	}
	price, class, why := p.Price(w.class, w.count)
	w.price = price
	switch {
	case why == grant.UnknownRoute:
		return t.finish(now, w, Decision{Outcome: Rejected, Reason: why})
	case p.Mode == grant.Off:
		return t.finish(now, w, Decision{Outcome: Admitted, Path: Unrestricted, Shadow: true})
	case why != grant.None || price > p.Burst:
		return t.finish(now, w, Decision{Outcome: Denied, Reason: grant.CostExceedsBurst})
	}
	if t.ord != nil && !class.Central && (price > 0 || t.heat.hot) && (price == 0 || len(t.waiters) == 0) {
		if left, ok := t.take(now, price); ok {
			return t.finish(now, w, Decision{Outcome: Admitted, Path: Local, Remaining: left})
		}
	}
	if now.Mono < t.denied.until && price >= t.denied.cost {
		return t.deny(now, w, t.denied.until.Sub(now.Mono))
	}
	switch {
	case class.Central, !t.heat.hot, !p.Grant.Enabled(), price > p.Grant.Quantum, !t.mayAsk(),
		t.ord != nil && now.Mono < t.ord.noRoom:
		return t.central(now, w, fx)
	case t.lost(now):
		return t.offline(now, w)
	case w.deadline <= now.Mono:
		return t.outOfTime(now, w)
	}
	a := t.ordinary()
	left := w.deadline.Sub(now.Mono)
	if wait := a.waitFor(now.Mono, addUnits(t.queued(), t.place(price, p.Rate, left)), p.Rate); wait > left {
		return t.deny(now, w, wait)
	}
	if t.mute(now) && len(t.waiters) > 0 {
		if d, ok := t.fromReserve(now, w); ok {
			return d
		}
	}
	if t.full() {
		return t.overfull(now, w)
	}
	t.waiters = append(t.waiters, *w)
	a.wallet.Queue(true)
	return t.finish(now, w, Decision{Outcome: Waiting})
}

// place is what a request must find room for to be let into the queue: its own
// price or the largest one seen lately, so that the queue does not stay just too
// full for dear requests because cheap ones fill every gap. What refills in half
// of the time it has is the most that is kept free.
func (t *Tenant) place(price Units, r grant.Rate, left time.Duration) Units {
	half, _ := r.AccrueFloor(left/2, 0)
	return max(price, min(t.dearest, half))
}

// take spends from the ordinary wallet for a request that nobody waits before.
func (t *Tenant) take(now Reading, price Units) (left Units, ok bool) {
	taken := t.ord.wallet.TakeFirst(now, price)
	if taken.Why != NotRefused {
		return 0, false
	}
	t.seenSpent += price
	return taken.Left, true
}

// finish completes a decision. In mode shadow, and off, nothing is refused for
// want of units or of an answer; the reason stays.
func (t *Tenant) finish(now Reading, w *waiter, d Decision) Decision {
	if d.Outcome == Denied || d.Outcome == Undecided {
		if p := t.live(now); p != nil && p.Mode != grant.Enforce {
			d.Outcome, d.Shadow, d.RetryAfter = Admitted, true, 0
		}
	}
	if d.Cost == 0 {
		d.Cost = w.price
	}
	d.At, d.Start, d.Policy, d.Version = now.Mono, w.start.Mono, t.policy, t.version
	return d
}

// deny refuses for want of units. Retry-After is what waits before the request,
// at the tenant's rate, at least wait and at least a second.
func (t *Tenant) deny(now Reading, w *waiter, wait time.Duration) Decision {
	d := Decision{Outcome: Denied, Reason: grant.Over}
	if t.policy != nil {
		if spread, ok := t.backlog.join(now.Mono, w.price, t.policy.Rate); ok {
			d.RetryAfter = max(time.Second, wait, spread)
		}
	} else {
		d.RetryAfter = max(time.Second, wait)
	}
	return t.finish(now, w, d)
}

// saturated reports recent evidence that the tenant is over its limit.
func (t *Tenant) saturated(now Reading) bool {
	if now.Mono.Sub(t.lastOver) <= evidence {
		return true
	}
	a := t.ord
	return a != nil && a.open && (a.estimate > now.Mono ||
		a.parked && t.up && now.Mono < a.parkedAt.Add(a.life/3+evidence))
}

// outOfTime is the answer at a deadline: 429 if the tenant is known to be over
// its limit, 503 only if nothing is known.
func (t *Tenant) outOfTime(now Reading, w *waiter) Decision {
	if t.saturated(now) {
		var wait time.Duration
		if t.ord != nil {
			wait = max(0, t.ord.estimate.Sub(now.Mono))
		}
		return t.deny(now, w, wait)
	}
	why := grant.Deadline
	switch {
	case !t.up:
		why = grant.Unavailable
	case now.Mono.Sub(t.busyAt) <= evidence && t.busy != grant.None:
		why = t.busy
	}
	return t.finish(now, w, Decision{Outcome: Undecided, Reason: why})
}

// overfull is the answer when too many wait.
func (t *Tenant) overfull(now Reading, w *waiter) Decision {
	if t.saturated(now) {
		return t.deny(now, w, 0)
	}
	return t.finish(now, w, Decision{Outcome: Undecided, Reason: grant.Overloaded})
}

func (t *Tenant) full() bool { return len(t.waiters)+len(t.checks) >= t.cfg.MaxWaiters }

// lost reports whether the centre is lost: the link is down and nothing was
// heard for a while. An answer, even "overloaded", is not loss.
func (t *Tenant) lost(now Reading) bool { return !t.up && t.mute(now) }

// mute reports whether nothing was heard for a while. With the link up, where
// it means that what was sent stays unanswered, one request at a time tries the
// centre in vain, as nothing else would tell that it is back.
func (t *Tenant) mute(now Reading) bool {
	return (t.asked || !t.up) && now.Mono.Sub(t.lostAt) >= t.cfg.LostAfter
}

// offline decides after loss of the centre, by the last prices known, however
// old: there is nobody to ask for others. What is held is spent until it is gone
// or expired, then come emergency grants, for the classes that may have them.
func (t *Tenant) offline(now Reading, w *waiter) Decision {
	if t.policy != nil {
		price, class, why := t.policy.Price(w.class, w.count)
		fits := why == grant.None && price > 0 && price <= t.policy.Burst
		if fits && t.ord != nil && !class.Central && t.live(now) == nil { // with a live copy it was tried before
			if left, ok := t.take(now, price); ok {
				w.price = price
				return t.finish(now, w, Decision{Outcome: Admitted, Path: Local, Remaining: left})
			}
		}
	}
	if d, ok := t.fromReserve(now, w); ok {
		return d
	}
	return t.finish(now, w, Decision{Outcome: Undecided, Reason: grant.Unavailable})
}

// fromReserve spends emergency grants, if the request may and there are any.
func (t *Tenant) fromReserve(now Reading, w *waiter) (d Decision, ok bool) {
	if t.policy == nil || t.reserve == nil {
		return d, false
	}
	price, class, why := t.policy.Price(w.class, w.count)
	if why != grant.None || !class.Emergency {
		return d, false
	}
	taken := t.reserve.wallet.TakeFirst(now, price)
	if taken.Why != NotRefused {
		return d, false
	}
	w.price = price
	return t.finish(now, w, Decision{Outcome: Admitted, Path: FromReserve, Remaining: taken.Left}), true
}

// reroute places everybody who waits for units anew, in order.
func (t *Tenant) reroute(now Reading, fx *Effects) {
	if len(t.waiters) == 0 {
		return
	}
	old := t.waiters
	t.waiters = nil
	t.ord.wallet.Queue(false)
	for i := range old {
		if d := t.route(now, &old[i], fx); d.Outcome != Waiting {
			fx.Resolved = append(fx.Resolved, Resolution{old[i].ticket, d})
		}
	}
}

// keep drops the waiters for which done returns a decision.
func (t *Tenant) keep(fx *Effects, done func(w *waiter) (Decision, bool)) {
	if len(t.waiters) == 0 {
		return
	}
	kept := t.waiters[:0]
	for i := range t.waiters {
		w := t.waiters[i]
		if d, ok := done(&w); ok {
			fx.Resolved = append(fx.Resolved, Resolution{w.ticket, d})
		} else {
			kept = append(kept, w)
		}
	}
	t.setWaiters(kept)
}

func (t *Tenant) setWaiters(w []waiter) {
	clear(w[len(w):cap(w)]) // names of classes must not be kept alive
	t.waiters = w
	if len(w) == 0 {
		t.waiters = nil
		if t.ord != nil {
			t.ord.wallet.Queue(false)
		}
	}
}

// denyHopeless answers at once those for whom the estimate is longer than the
// time they have.
func (t *Tenant) denyHopeless(now Reading, fx *Effects) {
	p := t.live(now)
	if p == nil || t.ord.estimate == 0 {
		return
	}
	var before Units
	t.keep(fx, func(w *waiter) (Decision, bool) {
		wait := t.ord.waitFor(now.Mono, addUnits(before, w.price), p.Rate)
		if wait > w.deadline.Sub(now.Mono) {
			return t.deny(now, w, wait), true
		}
		before = addUnits(before, w.price)
		return Decision{}, false
	})
}

// serve spends for those who wait, oldest first; nobody overtakes.
func (t *Tenant) serve(now Reading, fx *Effects) {
	n := 0
	for n < len(t.waiters) {
		w := &t.waiters[n]
		left, ok := t.take(now, w.price)
		if !ok {
			break
		}
		d := t.finish(now, w, Decision{Outcome: Admitted, Path: Local, Remaining: left})
		fx.Resolved = append(fx.Resolved, Resolution{w.ticket, d})
		n++
	}
	if n > 0 {
		t.setWaiters(slices.Delete(t.waiters, 0, n))
	}
}

// GiveUp ends the wait of a ticket whose caller's context ended. ok is false
// when it does not wait (any more).
func (t *Tenant) GiveUp(now Reading, ticket uint64, fx *Effects) (d Decision, ok bool) {
	now = t.clamp(now)
	if i := slices.IndexFunc(t.waiters, func(w waiter) bool { return w.ticket == ticket }); i >= 0 {
		w := t.waiters[i]
		t.setWaiters(slices.Delete(t.waiters, i, i+1))
		d, ok = t.outOfTime(now, &w), true
	} else if i := slices.IndexFunc(t.checks, func(c check) bool { return c.ticket == ticket }); i >= 0 {
		w := t.checks[i].waiter
		t.checks = slices.Delete(t.checks, i, i+1)
		d, ok = t.outOfTime(now, &w), true
	}
	t.run(now, fx)
	return d, ok
}

// Pushed takes a policy that the authority sent unasked.
func (t *Tenant) Pushed(now Reading, version uint64, p *grant.Policy, deleted bool, fx *Effects) {
	now = t.clamp(now)
	t.heard(now)
	if deleted {
		p = nil
	}
	if deleted || p != nil {
		if version != t.version || (p == nil) != (t.policy == nil) {
			t.adopt(now, version, p, fx)
		} else {
			t.learn(now, grant.PolicyCopy{Version: version}, fx)
		}
	}
	t.run(now, fx)
}

// Link tells that the stream to the tenant's authority came up or went down.
// Coming up re-sends what is open: the same bytes.
func (t *Tenant) Link(now Reading, up bool, fx *Effects) {
	now = t.clamp(now)
	if (up || t.up) && !t.asked {
		t.lostAt = now.Mono // a link that comes and goes, and is mute, is loss
	}
	t.up = up
	if up {
		for _, a := range t.accounts() {
			if a.open && now.Mono < a.ends() && t.mayAsk() {
				a.retries++
				a.tries, a.parked, a.estimate, a.blurred = 0, false, 0, true
				a.again = now.Mono.Add(t.silence(0))
				t.send(now, a, fx)
			}
		}
		t.repeatChecks(now, fx)
	}
	t.run(now, fx)
}

// Shorten makes all that is credited from here on live d shorter than its ttl:
// an agent that lets a nap of its tolerance pass must not spend longer than the
// authority waits, which allows for its own tolerance only. The largest d stays.
func (t *Tenant) Shorten(d time.Duration) { t.shorter = max(t.shorter, d) }

// Fate tells what the authority said of the whole incarnation: Fenced,
// Discarded or Superseded. Final.
func (t *Tenant) Fate(now Reading, why grant.Reason, fx *Effects) {
	now = t.clamp(now)
	t.meet(now, why, fx)
	t.run(now, fx)
}

func (t *Tenant) meet(now Reading, why grant.Reason, fx *Effects) {
	if t.fate != grant.Fenced { // the strongest stays
		t.fate = why
	}
	t.reroute(now, fx)
}

// Tick does what time asks for.
func (t *Tenant) Tick(now Reading, fx *Effects) { t.run(t.clamp(now), fx) }

// Wake is the monotonic instant of the next needed Tick, or grant.Never.
func (t *Tenant) Wake() grant.Instant { return t.wake }

// Distrust drops everything held and everything on its way: a guard saw that a
// clock stepped or the machine slept. Call Tick soon.
func (t *Tenant) Distrust(now Reading) {
	now = t.clamp(now)
	for _, a := range t.accounts() {
		a.wallet.DropAll(DropClock)
		a.tainted = a.open
	}
	for i := range t.checks {
		t.checks[i].tainted = true
	}
	t.wake = now.Mono
}

// Drain stops asking for grants: what is held is spent, after that Checks.
func (t *Tenant) Drain(now Reading, fx *Effects) {
	now = t.clamp(now)
	t.draining = true
	t.reroute(now, fx)
	t.run(now, fx)
}

// Close closes the wallets for good, before Discard is sent. Grant answers are
// ignored from here on. Call Tick soon: those who wait are sent to Checks.
func (t *Tenant) Close(now Reading) {
	now = t.clamp(now)
	t.closed = true
	for _, a := range t.accounts() {
		a.wallet.Close()
		a.close()
	}
	t.wake = now.Mono
}
