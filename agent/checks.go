package agent

import (
	"cmp"
	"slices"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// check is a request that the authority decides.
type check struct {
	waiter
	req     grant.CheckRequest
	tries   int           // answers that decided nothing
	again   grant.Instant // when to send the same attempt again; grant.Never: it is on its way
	tainted bool          // a guard distrusted the clocks since it began
}

// checkTries is how often one attempt is sent again after the authority did
// not decide it.
const checkTries = 3

// central lets the authority decide the request.
func (t *Tenant) central(now Reading, w *waiter, fx *Effects) Decision {
	switch {
	case t.fate == grant.Fenced:
		return t.finish(now, w, Decision{Outcome: Undecided, Reason: grant.Fenced})
	case t.lost(now):
		return t.offline(now, w)
	case w.deadline <= now.Mono:
		return t.outOfTime(now, w)
	case t.mute(now) && len(t.checks) > 0:
		if d, ok := t.fromReserve(now, w); ok {
			return d
		}
	}
	if t.full() {
		return t.overfull(now, w)
	}
	c := check{waiter: *w, again: grant.Never}
	c.req = grant.CheckRequest{
		Tenant: t.id, Class: w.class, Count: w.count,
		Attempt: grant.Attempt{Incarnation: t.inc, Seq: t.cfg.NextSeq()},
	}
	c.req.Sum = c.req.Fingerprint()
	t.attempts++
	t.checks = append(t.checks, c)
	if t.up {
		t.sendCheck(now, &t.checks[len(t.checks)-1], fx)
	}
	return t.finish(now, w, Decision{Outcome: Waiting, Path: Central})
}

// sendCheck puts the attempt into the effects: the same bytes every time, but
// for the time that is left.
func (t *Tenant) sendCheck(now Reading, c *check, fx *Effects) {
	c.again = grant.Never
	req := c.req
	req.Budget = c.deadline.Sub(now.Mono)
	req.KnownVersion = t.known()
	fx.Checks = append(fx.Checks, req)
	t.sent(now)
}

// repeatChecks sends every attempt that still has time on a new stream.
func (t *Tenant) repeatChecks(now Reading, fx *Effects) {
	for i := range t.checks {
		if t.checks[i].deadline > now.Mono {
			t.sendCheck(now, &t.checks[i], fx)
		}
	}
}

// Checked takes the answer of a Check.
func (t *Tenant) Checked(now Reading, ans grant.CheckAnswer, fx *Effects) {
	now = t.clamp(now)
	t.heard(now)
	t.learn(now, ans.Policy, fx)
	i, ok := slices.BinarySearchFunc(t.checks, ans.Attempt.Seq, func(c check, seq uint64) int {
		return cmp.Compare(c.req.Attempt.Seq, seq)
	})
	if !ok || ans.Attempt.Incarnation != t.inc || ans.Tenant != t.id {
		t.ignored++ // an ALLOW in here is spent: nobody waits for it
		t.run(now, fx)
		return
	}
	c := &t.checks[i]
	if c.tries == 0 {
		t.sample(now.Mono.Sub(c.start.Mono))
	}
	d, final := t.checked(now, c, ans)
	if final {
		fx.Resolved = append(fx.Resolved, Resolution{c.ticket, d})
		t.checks = slices.Delete(t.checks, i, i+1)
	}
	if ans.Verdict == grant.Reject && ans.Reason == grant.Fenced {
		t.meet(now, grant.Fenced, fx)
	}
	t.run(now, fx)
}

// checked turns an answer into a decision; final is false if the attempt is to
// be sent again.
func (t *Tenant) checked(now Reading, c *check, ans grant.CheckAnswer) (d Decision, final bool) {
	d = Decision{Path: Central, Reason: ans.Reason, Cost: ans.Cost, Remaining: ans.Remaining}
	switch ans.Verdict {
	case grant.Allow:
		switch {
		case c.tainted || moved(c.start.offset(), now.offset(), t.cfg.Tolerance):
			d.Outcome, d.Reason, d.Remaining = Undecided, grant.ClockDistrust, 0
		case now.Mono >= c.deadline:
			d.Outcome, d.Reason, d.Remaining = Undecided, grant.Deadline, 0
		default:
			d.Outcome, d.Shadow = Admitted, ans.Shadow
		}
	case grant.Deny:
		d.Outcome, d.RetryAfter = Denied, ans.RetryAfter
		switch ans.Reason {
		case grant.UnknownTenant:
			d.Outcome, d.RetryAfter = Rejected, 0
			t.until.Store(0) // deleted: the copy is of no use
		case grant.UnknownRoute:
			d.Outcome, d.RetryAfter = Rejected, 0
		case grant.CostExceedsBurst:
			d.RetryAfter = 0
		case grant.Over:
			t.lastOver = now.Mono
			t.remember(now, ans)
		}
	case grant.Reject:
		d.Outcome = Undecided
		if ans.Reason == grant.Invalid {
			d.Outcome = Rejected
		}
	default: // Undecided, or something newer than this code
		if ans.Reason == grant.Deadline {
			d = t.outOfTime(now, &c.waiter)
			d.Path = Central
			return d, true
		}
		t.busy, t.busyAt = ans.Reason, now.Mono
		left := c.deadline.Sub(now.Mono)
		if c.tries >= checkTries || left < 2*time.Millisecond {
			d = t.outOfTime(now, &c.waiter)
			d.Path = Central
			return d, true
		}
		ceiling := min(left/2, t.cfg.RetryFirst<<c.tries)
		c.tries++
		c.again = now.Mono.Add(1 + time.Duration(t.cfg.Rand(int64(ceiling))))
		return d, false
	}
	return t.finish(now, &c.waiter, d), true
}

// remember keeps a denial for as long as the bucket cannot pay the cost, at
// most a second. Of two that are valid the cheaper one stays: it denies more.
func (t *Tenant) remember(now Reading, ans grant.CheckAnswer) {
	until := now.Mono.Add(min(ans.Affordable, remembered))
	if ans.Cost <= 0 || until <= now.Mono {
		return
	}
	if now.Mono < t.denied.until && t.denied.cost < ans.Cost {
		return
	}
	t.denied = denial{cost: ans.Cost, until: until}
}

// dueChecks repeats what the authority did not decide, and ends what is out of
// time.
func (t *Tenant) dueChecks(now Reading, fx *Effects) {
	kept := t.checks[:0]
	for i := range t.checks {
		c := t.checks[i]
		if c.deadline <= now.Mono {
			d := t.outOfTime(now, &c.waiter)
			d.Path = Central
			fx.Resolved = append(fx.Resolved, Resolution{c.ticket, d})
			continue
		}
		if t.up && c.again <= now.Mono {
			t.sendCheck(now, &c, fx)
		}
		kept = append(kept, c)
	}
	clear(t.checks[len(kept):])
	if t.checks = kept; len(kept) == 0 {
		t.checks = nil
	}
}
