package agent

import (
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// clamp is the latest reading seen: readings are taken before the caller's lock
// and may arrive out of order.
func (t *Tenant) clamp(now Reading) Reading {
	if now.Mono < t.now.Mono {
		return t.now
	}
	t.now = now
	return now
}

// heard notes that the authority lives.
func (t *Tenant) heard(now Reading) { t.lostAt, t.asked = now.Mono, false }

// sent notes that an answer is due.
func (t *Tenant) sent(now Reading) {
	if !t.asked {
		t.lostAt, t.asked = now.Mono, true
	}
}

// sample takes one round trip into the estimate: up at once, down slowly,
// because asking too late makes requests wait and asking early costs little.
func (t *Tenant) sample(d time.Duration) {
	d = min(max(d, time.Microsecond), time.Second)
	if d >= t.rtt {
		t.rtt = d
	} else {
		t.rtt -= (t.rtt - d) / 8
	}
}

// ordinary is the ordinary account, made at first need.
func (t *Tenant) ordinary() *account {
	if t.ord == nil {
		t.ord = t.newAccount(false)
		t.made = append([]*account{t.ord}, t.made...)
	}
	return t.ord
}

// keepReserve makes the emergency account.
func (t *Tenant) keepReserve() {
	t.reserve = t.newAccount(true)
	t.made = append(t.made, t.reserve)
}

func (t *Tenant) newAccount(emergency bool) *account {
	a := &account{emergency: emergency}
	a.wallet.Init(t.cfg.Tolerance)
	if t.closed {
		a.wallet.Close()
	}
	return a
}

// accounts lists what was made of the two, the ordinary one first.
func (t *Tenant) accounts() []*account { return t.made }

// queued is the sum of the prices of those who wait for units.
func (t *Tenant) queued() Units {
	var sum Units
	for i := range t.waiters {
		sum = addUnits(sum, t.waiters[i].price)
	}
	return sum
}

// observe takes what the fast path did since the last look into the estimates.
func (t *Tenant) observe(now Reading) {
	if now.Mono.Sub(t.dearestAt) >= dearWindow {
		t.dearest, t.newest, t.dearestAt = t.newest, 0, now.Mono
	}
	if t.ord == nil {
		t.meter.add(now.Mono, 0)
		return
	}
	t.observeRefused(now)
	w := &t.ord.wallet
	if dear := Units(w.dearest.Load()); dear > 0 {
		w.dearest.Store(0)
		t.newest, t.dearest = max(t.newest, dear), max(t.dearest, dear)
	}
	takes, spent := w.takes.Load(), w.spent()
	t.meter.add(now.Mono, spent-t.seenSpent)
	t.heat.many(now.Mono, int(takes-t.seenTakes), t.cfg.HotPerSecond)
	t.seenTakes, t.seenSpent = takes, spent
}

// run does everything that time or an input made due, in this order: what is
// out of time is answered before units are given away, units are given to
// those who wait before more are asked for.
func (t *Tenant) run(now Reading, fx *Effects) {
	t.observe(now)
	for _, a := range t.accounts() {
		a.wallet.Look(now) // drops what died
	}
	cooled := t.heat.cool(now.Mono, t.ttl())
	p := t.live(now)
	if t.heat.hot && p != nil {
		if p.Grant.Enabled() {
			t.ordinary()
		}
		if t.reserve == nil && hasReserve(p) {
			t.keepReserve()
		}
	}
	t.keep(fx, func(w *waiter) (Decision, bool) {
		if w.deadline > now.Mono {
			return Decision{}, false
		}
		return t.outOfTime(now, w), true
	})
	if len(t.waiters) > 0 && (cooled || p == nil || !t.mayAsk() || t.lost(now)) {
		t.reroute(now, fx)
	}
	t.serve(now, fx)
	t.dueChecks(now, fx)
	t.refill(now, fx)
	t.arm(now, p)
	t.publish(now)
	t.publishRefusal(now)
	t.schedule(now)
}

// arm lets Take report the low-water mark when a report can lead to a request.
func (t *Tenant) arm(now Reading, p *grant.Policy) {
	a := t.ord
	if a == nil {
		return
	}
	if p == nil || !t.heat.hot || a.open || !t.up || !t.mayAsk() || now.Mono < a.notBefore {
		a.wallet.Arm(-1)
		return
	}
	a.wallet.Arm(t.lowWater(p))
}

// schedule finds the next instant at which run has something to do.
func (t *Tenant) schedule(now Reading) {
	t.wake = grant.Never
	at := func(i grant.Instant) {
		if i > now.Mono && i < t.wake {
			t.wake = i
		}
	}
	for i := range t.waiters {
		at(t.waiters[i].deadline)
	}
	for i := range t.checks {
		at(t.checks[i].deadline)
		if t.up {
			at(t.checks[i].again)
		}
	}
	if len(t.waiters) > 0 {
		at(grant.Instant(t.until.Load()))
		if !t.up {
			at(t.lostAt.Add(t.cfg.LostAfter))
		}
	}
	for _, a := range t.accounts() {
		expiry := a.wallet.Expiry()
		if expiry != grant.Never {
			at(expiry)
		}
		switch {
		case a.open:
			at(a.ends())
			if t.up && t.mayAsk() {
				at(a.again)
			}
		case t.heat.hot && t.up && t.mayAsk():
			at(a.notBefore)
			if expiry != grant.Never && t.policy != nil {
				ahead := renewAhead(t.policy.Grant.TTL, t.rtt)
				if a.emergency && t.policy.Emergency != nil {
					ahead = t.policy.Emergency.Grant.TTL / 4
				}
				at(expiry.Add(-ahead))
			}
		}
	}
	if t.heat.hot {
		at(t.heat.cools(t.ttl()))
		if t.ord != nil {
			at(t.heat.window.Add(time.Second)) // look at what Take did
		}
	}
}
