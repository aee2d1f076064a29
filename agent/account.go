package agent

import (
	"fmt"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// account is a wallet and the machine that refills it: at most one grant
// request is open. It stays open until it is closed by an answer or past its
// own expiry; a retry is the same bytes.
type account struct {
	wallet    Wallet
	emergency bool
	requests  uint64
	retries   uint64

	open    bool
	req     grant.GrantRequest
	first   Reading       // when req was first sent
	life    time.Duration // ttl of the policy known then
	tainted bool          // a guard distrusted the clocks since
	blurred bool          // its round trip says nothing: it was not decided at first
	tries   int           // sendings without a word since
	again   grant.Instant // when to send the same bytes again

	parked   bool          // the authority keeps it until there is refill
	parkedAt grant.Instant // when it said so first
	estimate grant.Instant // when it expects to serve; zero: not known

	notBefore grant.Instant // no new request before
	noRoom    grant.Instant // the Check path until
}

// ends is when the open request is past its own expiry.
func (a *account) ends() grant.Instant { return a.first.Mono.Add(a.life) }

// close ends the open request.
func (a *account) close() {
	a.open, a.parked, a.tainted, a.estimate, a.tries = false, false, false, 0, 0
}

// waitFor is the estimate of the time until units for a place in the queue are
// here, zero when nothing is known. upTo is the sum of the prices up to and
// including the place. What the parked request brings comes first, the rest at
// best at the tenant's rate.
func (a *account) waitFor(now grant.Instant, upTo Units, r grant.Rate) time.Duration {
	if a.estimate <= now {
		return 0
	}
	w := a.estimate.Sub(now)
	slice, _ := r.AccrueFloor(refillSlice, 0)
	brings := max(a.req.Min, min(a.req.Want, slice))
	if beyond := upTo - a.wallet.Balance() - brings; beyond > 0 {
		d, ok := r.DurationCeil(beyond, 0)
		if !ok || d > time.Hour {
			d = time.Hour
		}
		w += d
	}
	return w
}

// refillSlice is how much refill a parked request waits for at most, unless its
// oldest waiter needs more; the authority's number.
const refillSlice = 20 * time.Millisecond

// send puts the open request into the effects.
func (t *Tenant) send(now Reading, a *account, fx *Effects) {
	req := a.req
	req.Age = now.Mono.Sub(a.first.Mono)
	req.KnownVersion = t.known()
	fx.Grants = append(fx.Grants, req)
	t.sent(now)
}

// refill closes what is past its own expiry, repeats what went unanswered and
// asks for what is wanted, in both accounts.
func (t *Tenant) refill(now Reading, fx *Effects) {
	for _, a := range t.accounts() {
		if a.open && now.Mono >= a.ends() {
			a.close()
		}
		if !t.up || !t.mayAsk() {
			continue
		}
		if !a.open {
			t.ask(now, a, fx)
		} else if a.again <= now.Mono {
			a.retries++
			a.tries++
			a.again = now.Mono.Add(t.silence(a.tries))
			t.send(now, a, fx)
		}
	}
}

// mayAsk reports whether this incarnation still gets grants and wants them.
func (t *Tenant) mayAsk() bool { return t.fate == grant.None && !t.draining && !t.closed }

// ask opens a new request if the account wants units.
func (t *Tenant) ask(now Reading, a *account, fx *Effects) {
	p := t.live(now)
	if p == nil || now.Mono < a.notBefore {
		return
	}
	var want, need Units
	if a.emergency {
		want, need = t.wishReserve(now, a, p)
	} else {
		want, need = t.wish(now, a, p)
	}
	if want <= 0 {
		return
	}
	a.req = grant.GrantRequest{
		Tenant: t.id, Incarnation: t.inc, Emergency: a.emergency,
		ID:   grant.GrantID(t.cfg.NextSeq()),
		Want: want, Min: need,
		// Takes only lower it from here on: an upper bound of what may be unspent.
		Held: a.wallet.Balance(),
	}
	if room := p.Account(a.emergency).Grant.Quantum - a.req.Held; a.req.Want > room {
		a.req.Want = max(room, a.req.Min)
	}
	a.req.Sum = a.req.Fingerprint()
	a.open, a.blurred, a.first, a.life = true, false, now, p.Account(a.emergency).Grant.TTL
	a.again = now.Mono.Add(t.silence(0))
	a.requests++
	t.send(now, a, fx)
}

// silence is how long to wait for a word before the same bytes are sent again.
func (t *Tenant) silence(tries int) time.Duration {
	return min(t.cfg.RetryMost, max(2*t.rtt, t.cfg.RetryFirst)+t.backoff(tries))
}

// backoff draws a delay with full jitter below a ceiling that doubles.
func (t *Tenant) backoff(tries int) time.Duration {
	ceiling := t.cfg.RetryMost
	if tries < 16 {
		ceiling = min(ceiling, t.cfg.RetryFirst<<tries)
	}
	return 1 + time.Duration(t.cfg.Rand(int64(ceiling)))
}

// wish sizes a request of the ordinary account; want 0 asks for nothing. need
// is what the oldest waiter lacks, at least 1.
func (t *Tenant) wish(now Reading, a *account, p *grant.Policy) (want, need Units) {
	if !t.heat.hot || !p.Grant.Enabled() || p.Mode == grant.Off {
		return 0, 0
	}
	held := a.wallet.Balance()
	room := p.Grant.Quantum - held
	if room <= 0 {
		return 0, 0
	}
	need = 1
	ttl := p.Grant.TTL
	ahead := t.meter.over(max(4*t.rtt, min(ttl/10, time.Second)))
	low := t.lowWater(p)
	if len(t.waiters) > 0 {
		need = max(1, t.waiters[0].price-held)
	} else if held >= low && !t.renewing(now, a, ttl) || t.meter.level == 0 {
		return 0, 0
	}
	target := addUnits(t.queued(), max(ahead, low+1))
	return min(max(target-held, need), room), need
}

// lowWater is the balance below which to ask: what is spent while the answer is
// on its way, twice, and at least the largest recent price.
func (t *Tenant) lowWater(p *grant.Policy) Units {
	return min(max(t.meter.over(2*t.rtt), min(t.dearest, p.Grant.Quantum)), p.Grant.Quantum)
}

// renewing reports whether what is held would die soon with units left: any
// granted unit renews all of it.
func (t *Tenant) renewing(now Reading, a *account, ttl time.Duration) bool {
	left := a.wallet.Expiry().Sub(now.Mono)
	return a.wallet.Balance() > 0 && left <= renewAhead(ttl, t.rtt) && t.meter.over(left) < a.wallet.Balance()
}

// renewAhead is how long before the expiry a renewal is asked for.
func renewAhead(ttl, rtt time.Duration) time.Duration { return min(max(ttl/8, 4*rtt), ttl/2) }

// wishReserve keeps emergency units while the tenant is hot. A full reserve
// cannot be renewed, because a renewal needs room for one unit: an eighth is
// left free and each renewal takes one unit of it.
func (t *Tenant) wishReserve(now Reading, a *account, p *grant.Policy) (want, need Units) {
	if !t.heat.hot || !hasReserve(p) {
		return 0, 0
	}
	q, ttl, held := p.Emergency.Grant.Quantum, p.Emergency.Grant.TTL, a.wallet.Balance()
	aim := max(1, q-max(1, q/8))
	switch {
	case held <= aim/2:
		return aim - held, 1
	case held < q && a.wallet.Expiry().Sub(now.Mono) <= ttl/4:
		return max(1, aim-held), 1
	}
	return 0, 0
}

// Answer takes a grant answer.
func (t *Tenant) Answer(now Reading, ans grant.GrantAnswer, fx *Effects) {
	now = t.clamp(now)
	t.heard(now)
	t.learn(now, ans.Policy, fx)
	a := t.ord
	if ans.Emergency {
		a = t.reserve
	}
	if a == nil || !a.open || ans.ID != a.req.ID || ans.Incarnation != t.inc || ans.Tenant != t.id || t.closed {
		t.ignored++
		t.run(now, fx)
		return
	}
	if !a.blurred {
		t.sample(now.Mono.Sub(a.first.Mono))
		a.blurred = true // a parked request's next answer is not a round trip
	}
	switch ans.Result {
	case grant.Granted:
		t.granted(now, a, ans)
	case grant.Empty:
		t.empty(now, a, ans.Reason, fx)
	case grant.Refused:
		t.refused(now, a, ans.Reason, fx)
	case grant.Parked:
		if !a.parked {
			a.parked, a.parkedAt = true, now.Mono
		}
		a.tries, a.estimate = 0, 0
		if ans.Wait > 0 {
			a.estimate = now.Mono.Add(ans.Wait)
		}
		patience := min(max(ans.Wait, 0), a.life/3) + t.cfg.RetryMost
		a.again = now.Mono.Add(patience + time.Duration(t.cfg.Rand(int64(t.cfg.RetryMost))))
		if !a.emergency {
			t.lastOver = now.Mono
			t.denyHopeless(now, fx)
		}
	default: // Busy, or something newer than this code: nothing is known
		t.busy, t.busyAt = ans.Reason, now.Mono
		a.again = now.Mono.Add(t.backoff(a.tries))
		a.tries++
		a.parked, a.estimate = false, 0
	}
	t.run(now, fx)
}

// granted credits the units if they may be trusted, and closes the request.
func (t *Tenant) granted(now Reading, a *account, ans grant.GrantAnswer) {
	expiry := a.first.Mono.Add(min(ans.TTL, grant.MaxTTL) - t.shorter)
	tainted := a.tainted || moved(a.first.offset(), now.offset(), t.cfg.Tolerance)
	switch {
	case ans.Units <= 0 || ans.Units > a.req.Want:
		a.wallet.Miss(max(0, ans.Units), DropReplaced)
	case tainted:
		a.wallet.Miss(ans.Units, DropClock)
	case now.Mono >= expiry:
		a.wallet.Miss(ans.Units, DropReplaced)
	default:
		a.wallet.Credit(now, ans.Units, expiry, a.first.offset())
		t.denied = denial{}
	}
	if a.parked && !a.emergency {
		t.lastOver = now.Mono // it waited for refill until now: who goes without is over the limit
	}
	a.close()
	a.noRoom, a.notBefore = 0, 0
}

// empty closes the request; the reason says how to go on.
func (t *Tenant) empty(now Reading, a *account, why grant.Reason, fx *Effects) {
	waited := a.parked
	ttl := max(a.life, grant.MinTTL)
	a.close()
	switch {
	case why == grant.NoRoom:
		a.noRoom = now.Mono.Add(ttl / 4)
		a.notBefore = a.noRoom
	case why == grant.Over:
		if !a.emergency {
			t.lastOver = now.Mono
		}
		if !waited {
			a.notBefore = now.Mono.Add(t.backoff(0))
		}
	case why == grant.CostExceedsBurst:
		a.notBefore = now.Mono.Add(ttl / 4)
	default:
		a.notBefore = now.Mono.Add(t.backoff(2))
	}
	if !a.emergency {
		t.reroute(now, fx)
	}
}

// refused closes the request. Nothing is asked any more once the incarnation
// has met its fate.
func (t *Tenant) refused(now Reading, a *account, why grant.Reason, fx *Effects) {
	life := a.life
	a.close()
	switch why {
	case grant.HeldExceeds:
		a.wallet.DropAll(DropRefused)
	case grant.Fenced, grant.Superseded, grant.Discarded:
		t.meet(now, why, fx)
	case grant.UnknownTenant:
		a.notBefore = now.Mono.Add(max(life/4, time.Second))
		if !a.emergency {
			t.until.Store(0)
			t.reroute(now, fx)
		}
	default: // Conflict, Stale, Invalid: this agent and the ledger disagree
		a.notBefore = now.Mono.Add(max(life/4, time.Second))
		if !a.emergency {
			a.noRoom = a.notBefore
			t.reroute(now, fx)
		}
	}
}

// check tests the invariants of one account; see Tenant.
func (a *account) check(now grant.Instant) error {
	if err := a.wallet.Check(); err != nil {
		return err
	}
	if !a.open {
		return nil
	}
	switch {
	case a.req.Sum != a.req.Fingerprint():
		return fmt.Errorf("invariant 1: grant %d: the bytes changed since they were first sent", a.req.ID)
	case a.req.Want < a.req.Min || a.req.Min < 1 || a.req.Held < 0:
		return fmt.Errorf("invariant 1: grant %d: want %d, min %d, held %d", a.req.ID, a.req.Want, a.req.Min, a.req.Held)
	case a.wallet.Balance() > a.req.Held:
		return fmt.Errorf("invariant 2: grant %d: %d units held, %d reported", a.req.ID, a.wallet.Balance(), a.req.Held)
	case now >= a.ends():
		return fmt.Errorf("invariant 3: grant %d: open after its own expiry", a.req.ID)
	}
	return nil
}
