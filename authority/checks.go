package authority

import (
	"time"

	"github.com/stipend/stipend/proto/grant"
)

const (
	// callerMemory is how long the low-water mark of an incarnation that is not
	// registered outlives its last live decision.
	callerMemory = 10 * time.Minute
	// backlogSpan caps the refill over which refused clients are spread.
	backlogSpan = 30 * time.Second
)

// attempt is one allowed Check as it is remembered.
type attempt struct {
	id   grant.Attempt
	sum  grant.Fingerprint
	cost grant.Units
}

type decision struct {
	t    *tenant
	sum  grant.Fingerprint
	cost grant.Units
}

// decidedBatch is what one step allowed one tenant: one record.
type decidedBatch struct {
	at    grant.Instant // ledger time of the step
	stamp grant.Instant // of the record's key
	t     *tenant
	ids   []grant.Attempt
}

type freshDecision struct {
	t *tenant
	attempt
}

// caller is who makes attempts: an agent's incarnation, or a unary client's.
type caller struct {
	low   uint64 // attempts at or below are refused: their decisions are forgotten
	live  int    // decisions in the window
	quiet grant.Instant
}

type idleCaller struct {
	at  grant.Instant
	inc grant.Incarnation
}

// check decides one request at the authority. Only an ALLOW that deducted is
// remembered, so a flood of refusals costs no writes.
func (l *Ledger) check(c Caller, req *grant.CheckRequest) {
	ans := &grant.CheckAnswer{Tenant: req.Tenant, Attempt: req.Attempt}
	l.judge(req, ans)
	l.stats.Checks[ans.Verdict]++
	l.stats.ChecksBy[ans.Reason]++
	if c == nil {
		return
	}
	ans.Policy = l.policyCopy(req.Tenant, req.KnownVersion)
	l.replies = append(l.replies, Reply{Caller: c, Check: ans})
}

func (l *Ledger) judge(req *grant.CheckRequest, ans *grant.CheckAnswer) {
	set := func(v grant.Verdict, why grant.Reason) { ans.Verdict, ans.Reason = v, why }
	switch {
	case req.Sum != req.Fingerprint():
		set(grant.Reject, grant.Conflict)
		return
	case req.Count < 0 || req.Attempt.Seq == 0 || req.Attempt.Incarnation == (grant.Incarnation{}):
		set(grant.Reject, grant.Invalid)
		return
	}
	if d, ok := l.decided[req.Attempt]; ok {
		if d.sum != req.Sum {
			set(grant.Reject, grant.Conflict)
			return
		}
		l.stats.Replays++
		set(grant.Allow, grant.None)
		ans.Cost, ans.Replayed, ans.Remaining = d.cost, true, d.t.ordinary.bucket.level
		return
	}
	by := l.callers[req.Attempt.Incarnation]
	if by != nil && req.Attempt.Seq <= by.low {
		set(grant.Reject, grant.Stale)
		return
	}
	m := l.members[req.Attempt.Incarnation]
	if m != nil && m.state == Fenced {
		set(grant.Reject, grant.Fenced)
		return
	}
	t := l.tenants[req.Tenant]
	if t == nil || t.deleted {
		set(grant.Deny, grant.UnknownTenant)
		return
	}
	cost, _, why := t.policy.Price(req.Class, req.Count)
	ans.Cost = cost
	if why == grant.None && cost > t.policy.Burst {
		why = grant.CostExceedsBurst
	}
	lenient := t.policy.Mode != grant.Enforce
	switch {
	case why == grant.UnknownRoute, why != grant.None && !lenient:
		set(grant.Deny, why)
		return
	case why != grant.None, t.policy.Mode == grant.Off:
		set(grant.Allow, why)
		ans.Shadow = true
		return
	}

	a := &t.ordinary
	follow := l.settle(t, a)
	l.serve(t, a)
	defer l.arm(t)
	have := a.bucket.level
	crowded := a.hot != nil && len(a.hot.parked) > 0
	if a.hot != nil {
		a.hot.checksUntil = max(a.hot.checksUntil, l.now.Add(checksSeen))
	}
	if crowded {
		have = a.hot.credit
	}
	ans.Remaining = have
	if cost == 0 {
		set(grant.Allow, grant.None)
		return
	}
	if cost > have {
		l.deny(t, a, follow, req, ans, have, m)
		if lenient {
			ans.Verdict, ans.Shadow = grant.Allow, true
		}
		return
	}
	if by == nil {
		// Registered ones are few, by the registry's bound: strangers that draw an
		// id for each call must not keep a new gateway from its Checks.
		if len(l.callers) >= l.cfg.MaxCallers && (m == nil || m.state != Live) {
			set(grant.Undecided, grant.Overloaded)
			return
		}
		by = new(caller)
		l.callers[req.Attempt.Incarnation] = by
	}
	a.bucket.level -= cost
	a.checked += cost
	l.stats.Checked += cost
	if a.hot != nil {
		a.hot.credit = max(a.hot.credit-cost, 0)
		a.hot.checkNeed = 0
	}
	ans.Remaining = have - cost
	l.touch(t, a)
	l.decided[req.Attempt] = decision{t, req.Sum, cost}
	by.live++
	t.decisions++
	l.fresh = append(l.fresh, freshDecision{t, attempt{req.Attempt, req.Sum, cost}})
	set(grant.Allow, grant.None)
}

// deny fills the answer of a Check that the bucket cannot pay. Clients that are
// refused together are spread over the refill of what waits before them.
func (l *Ledger) deny(t *tenant, a *account, set grant.Account, req *grant.CheckRequest, ans *grant.CheckAnswer, have grant.Units, m *member) {
	ans.Verdict, ans.Reason = grant.Deny, grant.Over
	l.stats.Denied += ans.Cost
	r := refusal{reason: grant.Over, cost: ans.Cost, class: req.Class}
	if m != nil {
		r.owner = m.owner
	}
	l.noteRefusal(t, r)

	missing := min(ans.Cost-have, grant.MaxUnits/4)
	var parked grant.Units
	if h := a.hot; h != nil && len(h.parked) > 0 {
		h.checkNeed = max(h.checkNeed, ans.Cost)
		parked = missing // the grants take as much of the refill
	}
	if d, ok := set.Rate.DurationCeil(missing+parked, a.bucket.carry); ok {
		ans.Affordable = min(d, longestWait)
	} else {
		ans.Affordable = longestWait
	}
	wait, ok := set.Rate.DurationCeil(missing+parked+t.refused.join(l.now, set.Rate, ans.Cost), a.bucket.carry)
	if ok {
		ans.RetryAfter = min(max(wait, 1), longestWait)
	}
	if a.hot != nil && ok {
		// Whoever comes back when told to, in whole seconds, must not find that
		// its share went to the grants a moment ago.
		back := (min(wait, backlogSpan) + time.Second - 1) / time.Second * time.Second
		a.hot.checksUntil = max(a.hot.checksUntil, l.now.Add(back+checksSeen))
	}
}

// noteRefusal remembers a refusal for people.
func (l *Ledger) noteRefusal(t *tenant, r refusal) {
	if t.refused == nil {
		t.refused = new(refusals)
	}
	r.at = l.now
	t.refused.ring[t.refused.next] = r
	t.refused.next = (t.refused.next + 1) % len(t.refused.ring)
}

// join puts cost behind the units that were refused lately and are likely to
// come back, and says how many those are. They drain at the tenant's rate.
func (r *refusals) join(now grant.Instant, rate grant.Rate, cost grant.Units) (before grant.Units) {
	drained, carry := rate.AccrueFloor(now.Sub(r.backlogAt), r.carry)
	r.backlog, r.carry, r.backlogAt = max(r.backlog-drained, 0), carry, now
	before = r.backlog
	limit, _ := rate.AccrueFloor(backlogSpan, 0)
	r.backlog = min(r.backlog+min(cost, limit), max(limit, cost), grant.MaxUnits/4)
	return before
}

// sealDecisions writes what the step allowed, one record a tenant.
func (l *Ledger) sealDecisions() {
	if len(l.fresh) == 0 {
		return
	}
	// Group by tenant, in order of first appearance.
	var order []*tenant
	groups := make(map[*tenant][]attempt)
	for _, f := range l.fresh {
		if _, seen := groups[f.t]; !seen {
			order = append(order, f.t)
		}
		groups[f.t] = append(groups[f.t], f.attempt)
	}
	for _, t := range order {
		g := groups[t]
		l.stamp = max(l.stamp+1, l.now)
		l.records = append(l.records, Record{decisionKey(l.stamp), encodeDecisions(t.id, l.now, g)})
		ids := make([]grant.Attempt, len(g))
		for i := range g {
			ids[i] = g[i].id
		}
		l.window = append(l.window, decidedBatch{l.now, l.stamp, t, ids})
	}
	clear(l.fresh)
	l.fresh = l.fresh[:0]
}

// forgetDecisions lets go of attempts whose window is over, oldest first, and
// raises their callers' low-water marks. It costs what leaves, never a scan.
func (l *Ledger) forgetDecisions() {
	if len(l.window) == 0 || l.window[0].at.Add(l.cfg.DedupWindow) > l.now {
		l.forgetCallers()
		return
	}
	var raised []grant.Incarnation // in order of first appearance
	seen := make(map[grant.Incarnation]bool)
	n := 0
	for n < len(l.window) && l.window[n].at.Add(l.cfg.DedupWindow) <= l.now {
		b := &l.window[n]
		n++
		l.records = append(l.records, Record{Key: decisionKey(b.stamp)})
		for _, id := range b.ids {
			delete(l.decided, id)
			by := l.callers[id.Incarnation]
			if by.live--; by.live == 0 {
				by.quiet = l.now
				l.idle = append(l.idle, idleCaller{l.now, id.Incarnation})
			}
			by.low = max(by.low, id.Seq)
			if !seen[id.Incarnation] {
				seen[id.Incarnation] = true
				raised = append(raised, id.Incarnation)
			}
		}
		b.t.decisions -= int32(len(b.ids))
		if b.t.decisions == 0 {
			l.arm(b.t)
		}
		*b = decidedBatch{}
	}
	if n == len(l.window) {
		// A map never shrinks: give the memory of a burst back.
		l.window, l.decided = nil, make(map[grant.Attempt]decision)
	} else {
		l.window = l.window[n:]
	}
	for _, inc := range raised {
		l.records = append(l.records, Record{key(kindLow, inc[:]), encodeLow(l.callers[inc].low, l.now)})
	}
	l.forgetCallers()
}

// forgetCallers drops the low-water marks of callers that have been quiet for
// long and are not registered.
func (l *Ledger) forgetCallers() {
	n := 0
	for n < len(l.idle) && l.idle[n].at.Add(callerMemory) <= l.now {
		c := l.idle[n]
		n++
		by := l.callers[c.inc]
		if by == nil || by.live > 0 || by.quiet != c.at {
			continue
		}
		if m := l.members[c.inc]; m != nil && m.state == Live {
			by.quiet = l.now
			l.idle = append(l.idle, idleCaller{l.now, c.inc})
			continue
		}
		delete(l.callers, c.inc)
		l.records = append(l.records, Record{Key: key(kindLow, c.inc[:])})
	}
	if n > 0 {
		l.idle = l.idle[n:]
	}
}
