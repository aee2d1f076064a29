package agent

import (
	"fmt"
	"strings"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// Stats counts what happened and what is held now.
func (t *Tenant) Stats() Stats {
	s := Stats{Checks: t.attempts, Ignored: t.ignored}
	if t.ord != nil {
		t.ord.wallet.count(&s.AccountStats)
		s.Requests, s.Retries = t.ord.requests, t.ord.retries
	}
	if t.reserve != nil {
		t.reserve.wallet.count(&s.Reserve)
		s.Reserve.Requests, s.Reserve.Retries = t.reserve.requests, t.reserve.retries
	}
	s.Waiting = len(t.waiters) + len(t.checks)
	s.Hot = t.heat.hot
	return s
}

// Idle reports whether the tenant may be forgotten: nothing held, open or
// waiting, nothing remembered, cold, and not asked for within a second.
func (t *Tenant) Idle(now Reading) bool {
	for _, a := range t.accounts() {
		if a.open && now.Mono < a.ends() || a.wallet.Look(now) > 0 {
			return false
		}
	}
	return len(t.waiters) == 0 && len(t.checks) == 0 && now.Mono >= t.denied.until &&
		(!t.heat.hot || now.Mono >= t.heat.cools(t.ttl())) && now.Mono.Sub(t.lastAsk) >= time.Second
}

// State is the state in one stable form, for scripts and people. Times are
// counted from the latest reading.
func (t *Tenant) State() string {
	var b strings.Builder
	temper := "cold"
	if t.heat.hot {
		temper = "hot"
	}
	b.WriteString(temper)
	if t.policy != nil {
		fmt.Fprintf(&b, " policy=v%d", t.version)
		if t.live(t.now) == nil {
			b.WriteString("(old)")
		}
	}
	if !t.up {
		b.WriteString(" link=down")
	}
	if t.fate != grant.None {
		fmt.Fprintf(&b, " fate=%v", t.fate)
	}
	if t.draining {
		b.WriteString(" draining")
	}
	if t.closed {
		b.WriteString(" closed")
	}
	for _, a := range t.accounts() {
		name := "held"
		if a.emergency {
			name = "reserve"
		}
		fmt.Fprintf(&b, " %s=%d", name, a.wallet.Balance())
		if e := a.wallet.Expiry(); e != grant.Never {
			fmt.Fprintf(&b, "/%v", e.Sub(t.now.Mono))
		}
		if a.open {
			fmt.Fprintf(&b, " open(id=%d want=%d min=%d held=%d", a.req.ID, a.req.Want, a.req.Min, a.req.Held)
			if a.parked {
				b.WriteString(" parked")
			}
			if a.estimate > t.now.Mono {
				fmt.Fprintf(&b, " w=%v", a.estimate.Sub(t.now.Mono))
			}
			b.WriteString(")")
		}
		if a.noRoom > t.now.Mono {
			fmt.Fprintf(&b, " no-room=%v", a.noRoom.Sub(t.now.Mono))
		}
	}
	for _, w := range t.waiters {
		fmt.Fprintf(&b, " wait(%d price=%d left=%v)", w.ticket, w.price, w.deadline.Sub(t.now.Mono))
	}
	for _, c := range t.checks {
		fmt.Fprintf(&b, " check(%d seq=%d left=%v)", c.ticket, c.req.Attempt.Seq, c.deadline.Sub(t.now.Mono))
	}
	if t.denied.until > t.now.Mono {
		fmt.Fprintf(&b, " denied>=%d/%v", t.denied.cost, t.denied.until.Sub(t.now.Mono))
	}
	return b.String()
}

// Check tests the invariants. It must not run beside a Take.
func (t *Tenant) Check() error {
	fail := func(format string, args ...any) error {
		return fmt.Errorf("tenant %q: "+format+"; %s", append(append([]any{t.id}, args...), t.State())...)
	}
	for _, a := range t.accounts() {
		if err := a.check(t.now.Mono); err != nil {
			return fail("emergency=%v: %w", a.emergency, err)
		}
	}
	if t.ord != nil {
		if bit := t.ord.wallet.word.Load()&waitBit != 0; bit != (len(t.waiters) > 0) {
			return fail("invariant 4: waiters' bit %v, %d wait", bit, len(t.waiters))
		}
	}
	if n := len(t.waiters) + len(t.checks); n > t.cfg.MaxWaiters {
		return fail("invariant 5: %d wait", n)
	}
	tickets := make(map[uint64]bool)
	for _, w := range t.waiters {
		if tickets[w.ticket] {
			return fail("invariant 5: ticket %d waits twice", w.ticket)
		}
		tickets[w.ticket] = true
		if w.deadline <= t.now.Mono {
			return fail("invariant 3: ticket %d waits past its deadline", w.ticket)
		}
	}
	for i, c := range t.checks {
		if tickets[c.ticket] || i > 0 && t.checks[i-1].req.Attempt.Seq >= c.req.Attempt.Seq {
			return fail("invariant 5: ticket %d waits twice or out of order", c.ticket)
		}
		tickets[c.ticket] = true
		if c.deadline <= t.now.Mono {
			return fail("invariant 3: ticket %d waits past its deadline", c.ticket)
		}
	}
	if len(t.waiters) > 0 && t.wake > t.now.Mono && (!t.heat.hot || t.live(t.now) == nil || t.fate != grant.None || t.draining || t.closed) {
		return fail("invariant 6: somebody waits for units that are not asked for")
	}
	if v := t.view.Load(); v != nil && !t.heat.hot && v.policy.Mode != grant.Off {
		return fail("invariant 7: a cold tenant's wallet is open to Take")
	}
	return nil
}
