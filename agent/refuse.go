package agent

import (
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// refusal is a denial that Take may give by itself: the serialised side found
// that units would come too late for any request that costs at least cost, and
// that stays true until an instant. A flood over the limit then costs no lock.
type refusal struct {
	cost    Units
	until   grant.Instant // Ask decides from here on
	ready   grant.Instant // Retry-After reaches at least to here
	at      grant.Instant // when it was published
	backlog Units         // denied units that waited then
	base    int64         // Tenant.refusedUnits then
	unit    time.Duration // time in which one unit accrues, up
}

// retryAfter spreads the denials since the refusal was published over the
// refill, as backlog.join does under the lock.
func (r *refusal) retryAfter(now grant.Instant, denied Units) time.Duration {
	units := min(addUnits(r.backlog, max(denied, 0)), Units(longestSpread/r.unit)+1)
	spread := min(time.Duration(units)*r.unit-now.Sub(r.at), longestSpread)
	return max(time.Second, spread, r.ready.Sub(now))
}

// refuseFast is Take's denial, or ok false when Ask must decide.
func (t *Tenant) refuseFast(v *view, now Reading, price Units) (d Decision, ok bool) {
	r := t.refusal.Load()
	if r == nil || now.Mono >= r.until || price < r.cost || v.wallet.Balance() >= price {
		return d, false
	}
	if dear := &v.wallet.dearest; int64(price) > dear.Load() {
		dear.Store(int64(price)) // a lost race loses a hint
	}
	t.refusedCount.Add(1)
	denied := Units(t.refusedUnits.Add(int64(price)) - r.base)
	return Decision{
		Outcome: Denied, Reason: grant.Over, Path: Local, Cost: price, RetryAfter: r.retryAfter(now.Mono, denied),
		At: now.Mono, Start: now.Mono, Policy: v.policy, Version: v.version,
	}, true
}

// observeRefused takes what refuseFast denied into demand, heat and backlog.
func (t *Tenant) observeRefused(now Reading) {
	count, units := t.refusedCount.Load(), t.refusedUnits.Load()
	if count == t.seenRefused {
		return
	}
	fresh := Units(units - t.seenRefusedUnits)
	t.meter.add(now.Mono, fresh)
	t.heat.many(now.Mono, int(count-t.seenRefused), t.cfg.HotPerSecond)
	if t.policy != nil {
		full, _ := t.policy.Rate.AccrueFloor(longestSpread, 0)
		t.backlog.join(now.Mono, min(fresh, full), t.policy.Rate)
	}
	t.lastAsk = now.Mono
	t.seenRefused, t.seenRefusedUnits = count, units
}

// publishRefusal lets Take deny what route would deny, for as long as it would.
func (t *Tenant) publishRefusal(now Reading) {
	r := t.findRefusal(now)
	if old := t.refusal.Load(); old == nil && r == nil {
		return
	}
	t.refusal.Store(r)
}

func (t *Tenant) findRefusal(now Reading) *refusal {
	p := t.live(now)
	if p == nil || t.ord == nil || p.Mode != grant.Enforce || !t.heat.hot || !p.Grant.Enabled() || p.Rate.Zero() {
		return nil
	}
	r := &refusal{cost: 1, at: now.Mono, backlog: t.backlog.units, base: t.seenRefusedUnits}
	if wait := t.ord.waitFor(now.Mono, addUnits(t.queued(), 1), p.Rate); wait > t.cfg.Deadline &&
		t.up && t.mayAsk() && now.Mono >= t.ord.noRoom {
		r.ready = now.Mono.Add(wait)
		r.until = now.Mono.Add(wait - t.cfg.Deadline)
	} else if now.Mono < t.denied.until {
		r.cost, r.until, r.ready = max(t.denied.cost, 1), t.denied.until, t.denied.until
	} else {
		return nil
	}
	r.unit, _ = p.Rate.DurationCeil(1, 0)
	r.unit = min(max(r.unit, 1), longestSpread)
	return r
}
