package authority

import (
	"fmt"
	"slices"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

const (
	// slice is how much refill a parked grant waits for at most, unless its
	// oldest waiter needs more: smaller grants would cost an RPC each.
	slice = 20 * time.Millisecond
	// checksSeen is how long after the last Check the Check path still counts
	// as a claimant beside parked grants; after a refusal it counts that long
	// beyond the second in which its caller was told to come back.
	checksSeen = time.Second
	// longestWait caps every estimate that leaves the Ledger.
	longestWait = time.Hour
)

// grant answers one grant request. The rules stand in the order of the
// contract: a repeated id is settled before anything else can refuse it.
func (l *Ledger) grant(caller Caller, req *grant.GrantRequest) {
	switch {
	case req.Sum != req.Fingerprint():
		l.answer(caller, req, refused(grant.Conflict))
		return
	case req.ID == 0 || req.Min < 1 || req.Want < req.Min || req.Held < 0 || req.Age < 0:
		l.answer(caller, req, refused(grant.Invalid))
		return
	}
	t := l.tenants[req.Tenant]
	if t == nil || t.account(req.Emergency) == nil {
		l.answer(caller, req, refused(grant.UnknownTenant))
		return
	}
	a := t.account(req.Emergency)
	l.settle(t, a)
	l.serve(t, a) // whoever waited until now goes first
	defer l.arm(t)

	var o *owner
	if a.hot != nil {
		o = a.hot.owners[req.Incarnation]
	}
	if o != nil {
		if o.open != nil {
			switch open := o.open; {
			case req.ID == open.req.ID && req.Sum == open.req.Sum:
				open.caller = caller // the newest sending gets the answer
				l.answerParked(t, a, open)
				return
			case req.ID == open.req.ID:
				l.answer(caller, req, refused(grant.Conflict))
				return
			case req.ID < open.req.ID:
				l.answer(caller, req, refused(grant.Stale))
				return
			}
			// A greater id: its sender has given the parked one up.
			l.unpark(t, a, o.open, closedGrant{result: grant.Empty, reason: grant.Stale})
		}
		switch {
		case o.last.id == 0 || req.ID > o.last.id:
		case req.ID < o.last.id:
			l.answer(caller, req, refused(grant.Stale))
			return
		case req.Sum != o.last.sum:
			l.answer(caller, req, refused(grant.Conflict))
			return
		default:
			l.stats.Replays++
			l.answer(caller, req, o.last)
			return
		}
	}

	m := l.members[req.Incarnation]
	switch {
	case m == nil:
		l.answer(caller, req, closedGrant{result: grant.Busy, reason: grant.UnknownSession})
		return
	case m.state.Final():
		l.answer(caller, req, refused(finalReason(m.state)))
		return
	}
	var recorded grant.Units
	if o != nil {
		recorded = o.outstanding
	}
	if req.Held > recorded {
		l.answer(caller, req, refused(grant.HeldExceeds))
		return
	}
	if o == nil {
		if a.hot == nil {
			a.hot = &hot{owners: make(map[grant.Incarnation]*owner), nextExpiry: grant.Never}
		}
		o = &owner{member: m}
		a.hot.owners[req.Incarnation] = o
		m.holds[a] = t
		l.owners++
	}
	// The report is newer than the record: nothing was granted since it was
	// sent, and a wallet's balance only falls.
	l.setOutstanding(a.hot, o, req.Held)

	p := &parked{caller: caller, owner: o, req: *req, since: l.now}
	set := l.settings(t, a)
	ttl := set.Grant.TTL
	p.ends = min(l.now.Add(ttl/3), l.now.Add(ttl/2-req.Age))
	outcome, wait := l.decide(t, a, p, set, len(a.hot.parked) > 0)
	if wait && p.ends <= l.now {
		outcome, wait = closedGrant{result: grant.Empty, reason: grant.Over}, false
	}
	if !wait {
		l.close(t, a, o, p, outcome)
		return
	}
	if n := len(a.hot.parked); l.parked >= l.cfg.MaxParked || n > 0 && n >= l.cfg.MaxParked-l.parked {
		l.answer(caller, req, closedGrant{result: grant.Busy, reason: grant.Overloaded})
		return
	}
	l.arrival++
	p.arrival = l.arrival
	o.open = p
	a.hot.parked = append(a.hot.parked, p)
	l.parked++
	l.serve(t, a) // it may be the one granted longest ago
	if o.open == p {
		// The gateway refuses requests now, by itself: for people this is where
		// the tenant's refusals begin.
		l.noteRefusal(t, refusal{reason: grant.Over, grant: true, cost: req.Min, owner: m.owner})
		l.answerParked(t, a, p)
	}
}

func refused(why grant.Reason) closedGrant { return closedGrant{result: grant.Refused, reason: why} }

func finalReason(s MemberState) grant.Reason {
	switch s {
	case Superseded:
		return grant.Superseded
	case Discarded:
		return grant.Discarded
	}
	return grant.Fenced
}

// decide finds what a request gets under the policy of this moment, or that it
// must wait for refill. behind says that others wait before it.
//
// The sum cap: what one owner may add is bounded by N*q less everything that
// all owners may hold, so the bound does not depend on how N and q changed.
func (l *Ledger) decide(t *tenant, a *account, p *parked, set grant.Account, behind bool) (outcome closedGrant, wait bool) {
	req, h, o := &p.req, a.hot, p.owner
	empty := func(why grant.Reason) (closedGrant, bool) {
		return closedGrant{result: grant.Empty, reason: why}, false
	}
	switch {
	case t.deleted:
		return refused(grant.UnknownTenant), false
	case o.member.state.Final():
		return refused(finalReason(o.member.state)), false
	case !set.Grant.Enabled() || t.policy.Mode == grant.Off:
		return empty(grant.NoRoom)
	case l.recovered != nil && l.now < l.recovered.noGrants:
		return empty(grant.NoRoom)
	case l.now >= p.since.Add(set.Grant.TTL/2-req.Age):
		return empty(grant.Over) // what is left of its life would be too short
	case req.Min > set.Burst:
		return empty(grant.CostExceedsBurst)
	}
	most := h.most(o, req, set)
	if most < req.Min {
		return empty(grant.NoRoom)
	}
	have := l.available(a, set)
	if behind || have < enough(req.Min, most, set) {
		return closedGrant{}, true
	}
	return closedGrant{result: grant.Granted, units: min(most, have), ttl: set.Grant.TTL}, false
}

// most is the largest grant that a request may get, whatever the level: its want,
// the owner's quantum and the sum cap.
func (h *hot) most(o *owner, req *grant.GrantRequest, set grant.Account) grant.Units {
	room := set.Grant.Slack() - (h.outstanding - o.outstanding) - req.Held
	return min(req.Want, set.Grant.Quantum-req.Held, room)
}

// enough is what a grant waits for: what its oldest waiter lacks, or a slice of
// refill if that is more and wanted.
func enough(need, most grant.Units, set grant.Account) grant.Units {
	worth, _ := set.Rate.AccrueFloor(slice, 0)
	return min(max(need, min(most, worth)), set.Burst)
}

// available is what grants may take: the level less the Checks' credit. A full
// bucket holds nothing back, since refill that finds it full is lost.
func (l *Ledger) available(a *account, set grant.Account) grant.Units {
	if a.bucket.level >= set.Burst {
		return a.bucket.level
	}
	return a.bucket.level - a.hot.credit
}

// close settles a request for good: it deducts what is granted, remembers the
// answer and sends it.
func (l *Ledger) close(t *tenant, a *account, o *owner, p *parked, outcome closedGrant) {
	outcome.id, outcome.sum = p.req.ID, p.req.Sum
	o.last = outcome
	if outcome.result == grant.Granted {
		h := a.hot
		a.bucket.level -= outcome.units
		h.credit = min(h.credit, a.bucket.level)
		a.granted += outcome.units
		l.stats.Granted += outcome.units
		life := l.now.Add(l.cfg.GrantLife(outcome.ttl))
		if p.req.Held > 0 {
			// Should this answer be lost, what is held lives on by its old
			// expiry, which a shorter ttl must not cut.
			life = max(life, o.expiry)
		}
		o.expiry, o.granted = life, l.now
		l.setOutstanding(h, o, p.req.Held+outcome.units)
		if set := l.settings(t, a); h.outstanding > set.Grant.Slack() {
			panic(fmt.Sprintf("authority: tenant %q: %d units outstanding after a grant, more than N*q = %d", t.id, h.outstanding, set.Grant.Slack()))
		}
		h.nextExpiry = min(h.nextExpiry, life)
		l.touch(t, a)
		l.touchOwner(t, a, p.req.Incarnation, o)
	} else {
		l.noteRefusal(t, refusal{reason: outcome.reason, grant: true, cost: p.req.Min, owner: o.member.owner})
	}
	l.answer(p.caller, &p.req, outcome)
}

func (l *Ledger) touchOwner(t *tenant, a *account, inc grant.Incarnation, o *owner) {
	if !o.dirty {
		o.dirty = true
		l.dirtyOwners = append(l.dirtyOwners, ownerRef{accountRef{t, a}, inc, o})
	}
}

// serve decides again, from the first rule, whatever is parked: the owner
// granted longest ago goes first, and nobody overtakes.
func (l *Ledger) serve(t *tenant, a *account) {
	h := a.hot
	if h == nil || len(h.parked) == 0 {
		return
	}
	for i := 0; i < len(h.parked); {
		if p := h.parked[i]; p.ends <= l.now {
			l.unpark(t, a, p, closedGrant{result: grant.Empty, reason: grant.Over})
			l.releaseIfGone(t, a, p.req.Incarnation)
			continue
		}
		i++
	}
	for len(h.parked) > 0 {
		p := h.head()
		outcome, wait := l.decide(t, a, p, l.settings(t, a), false)
		if wait {
			return
		}
		l.unpark(t, a, p, outcome)
		l.releaseIfGone(t, a, p.req.Incarnation)
	}
}

// before orders parked requests: owners granted longest ago, then arrival.
func before(p, q *parked) int {
	a, b := p.owner.granted, q.owner.granted
	if a != b {
		if a < b {
			return -1
		}
		return 1
	}
	if p.arrival < q.arrival {
		return -1
	}
	return 1
}

func (h *hot) head() *parked { return slices.MinFunc(h.parked, before) }

func (l *Ledger) unpark(t *tenant, a *account, p *parked, outcome closedGrant) {
	h := a.hot
	i := slices.Index(h.parked, p)
	h.parked = slices.Delete(h.parked, i, i+1)
	l.parked--
	o := p.owner
	o.open = nil
	l.close(t, a, o, p, outcome)
}

// refuseParked answers everything that is parked without closing its id.
func (l *Ledger) refuseParked(why grant.Reason) {
	for _, id := range l.sortedTenants() {
		t := l.tenants[id]
		for a := range t.accounts {
			if a.hot == nil {
				continue
			}
			for _, p := range a.hot.parked {
				l.answer(p.caller, &p.req, closedGrant{result: grant.Busy, reason: why})
				p.owner.open = nil
			}
			l.parked -= len(a.hot.parked)
			a.hot.parked = nil
			a.hot.credit, a.hot.oddUnit, a.hot.checkNeed = 0, false, 0
			l.arm(t)
		}
	}
}

// accrueCredit gives the Check path half of the refill while grants are parked
// and Checks were seen lately. Credit that nobody uses returns to the grants. It
// outlives a moment without parked grants, such as a lone gateway makes with
// every grant: Checks may then take the whole level, grants not the credit.
func (l *Ledger) accrueCredit(t *tenant, a *account, set grant.Account, added grant.Units) {
	h := a.hot
	switch {
	case !l.checksActive(h):
		h.credit, h.oddUnit, h.checkNeed = 0, false, 0
		return
	case len(h.parked) == 0:
		return
	}
	half := added / 2
	if added%2 == 1 {
		if h.oddUnit {
			half++
		}
		h.oddUnit = !h.oddUnit
	}
	h.credit = min(h.credit+half, l.creditCap(t, h, set), a.bucket.level)
}

func (l *Ledger) checksActive(h *hot) bool {
	return l.now < h.checksUntil
}

func (l *Ledger) creditCap(t *tenant, h *hot, set grant.Account) grant.Units {
	return min(max(set.Grant.Quantum, t.policy.dearest, h.checkNeed), set.Burst)
}

// parkedDue is when the first of the parked can be served, or gives up, or when
// the Checks' credit returns.
func (l *Ledger) parkedDue(t *tenant, a *account, set grant.Account) grant.Instant {
	h := a.hot
	due := grant.Never
	for _, p := range h.parked {
		due = min(due, p.ends)
	}
	if l.checksActive(h) { // then the credit, now or by then, returns
		due = min(due, h.checksUntil)
	}
	if d, ok := l.waitFor(t, a, set, h.enoughFor(h.head(), set)-l.available(a, set)); ok {
		due = min(due, a.bucket.last.Add(d))
	}
	return max(due, l.now+1)
}

// enoughFor is what a parked request waits for; 0 when it has no room and needs
// no units to be told so.
func (h *hot) enoughFor(p *parked, set grant.Account) grant.Units {
	most := h.most(p.owner, &p.req, set)
	if most < p.req.Min {
		return 0
	}
	return enough(p.req.Min, most, set)
}

// waitFor is the time until grants have got more units, of which the Checks
// take as many until their credit is full.
func (l *Ledger) waitFor(t *tenant, a *account, set grant.Account, more grant.Units) (time.Duration, bool) {
	if h := a.hot; more > 0 && l.checksActive(h) {
		more += min(more, l.creditCap(t, h, set)-h.credit) + 1
		if more < 0 { // overflow
			more = grant.MaxUnits
		}
	}
	// A full bucket holds nothing back.
	return set.Rate.DurationCeil(min(more, set.Burst-a.bucket.level), a.bucket.carry)
}

// answerParked acknowledges a waiting request with the time until its turn.
func (l *Ledger) answerParked(t *tenant, a *account, p *parked) {
	l.reply(p.caller, &p.req, closedGrant{result: grant.Parked, reason: grant.Over}, l.estimate(t, a, p))
}

// estimate is the time until the turn of a parked request comes.
func (l *Ledger) estimate(t *tenant, a *account, p *parked) time.Duration {
	set, h := l.settings(t, a), a.hot
	need := h.enoughFor(p, set)
	for _, q := range h.parked {
		if q != p && before(q, p) < 0 && need < grant.MaxUnits/4 {
			need += min(h.enoughFor(q, set), grant.MaxUnits/4)
		}
	}
	need -= l.available(a, set)
	if need > 0 && l.checksActive(h) {
		need += min(need, l.creditCap(t, h, set)-h.credit)
	}
	wait, ok := set.Rate.DurationCeil(need, a.bucket.carry)
	if !ok || wait > longestWait {
		return longestWait
	}
	return wait
}

// answer sends a reply that does not wait.
func (l *Ledger) answer(caller Caller, req *grant.GrantRequest, c closedGrant) {
	l.reply(caller, req, c, 0)
}

func (l *Ledger) reply(caller Caller, req *grant.GrantRequest, c closedGrant, wait time.Duration) {
	l.stats.Grants[c.result]++
	l.stats.GrantsBy[c.reason]++
	if caller == nil {
		return
	}
	ans := &grant.GrantAnswer{
		Tenant: req.Tenant, Incarnation: req.Incarnation, Emergency: req.Emergency, ID: req.ID,
		Result: c.result, Reason: c.reason, Units: c.units, TTL: c.ttl, Wait: wait,
		Policy: l.policyCopy(req.Tenant, req.KnownVersion),
	}
	l.replies = append(l.replies, Reply{Caller: caller, Grant: ans})
}

// policyCopy is the policy that goes with an answer; its body only if the agent
// does not have it.
func (l *Ledger) policyCopy(id grant.TenantID, known uint64) grant.PolicyCopy {
	t := l.tenants[id]
	if t == nil || t.deleted {
		return grant.PolicyCopy{}
	}
	if t.version == known {
		return grant.PolicyCopy{Version: known}
	}
	return grant.PolicyCopy{Version: t.version, Policy: t.policy.Policy}
}
