package sim

import (
	"fmt"
	"time"

	"github.com/stipend/stipend/agent"
	"github.com/stipend/stipend/proto/grant"
)

// asked is a grant request that a gateway sends.
func (j *Judge) asked(g *Gateway, e *entry, r *grant.GrantRequest, now agent.Reading) error {
	i := index(r.Emergency)
	a := &e.accounts[i]
	l := j.Tenant(e.id).of(g.inc, r.Emergency)
	switch {
	case r.ID < a.sent:
		return fmt.Errorf("%s: grant request %d of %q after %d", g.Owner, r.ID, e.id, a.sent)
	case r.ID == a.sent && r.Sum != l.request.Sum:
		return fmt.Errorf("%s: grant request %d of %q was sent again with other bytes", g.Owner, r.ID, e.id)
	case r.ID > a.sent:
		a.sent, a.open, a.first = r.ID, true, now
		a.first.Mono, a.first.Wall = a.first.Mono-grant.Instant(r.Age), a.first.Wall-grant.Instant(r.Age)
		l.newest, l.request = r.ID, *r
	}
	return nil
}

func index(emergency bool) int {
	if emergency {
		return 1
	}
	return 0
}

// credited is a grant answer that reached a tenant.
func (j *Judge) credited(g *Gateway, e *entry, a *grant.GrantAnswer, before, after agent.Stats, now agent.Reading) {
	i := index(a.Emergency)
	was, is := before.Granted, after.Granted
	other, otherIs := before.Reserve.Granted, after.Reserve.Granted
	drops, dropsBefore := sumDrops(after.Dropped), sumDrops(before.Dropped)
	if a.Emergency {
		was, is, other, otherIs = other, otherIs, was, is
		drops, dropsBefore = sumDrops(after.Reserve.Dropped), sumDrops(before.Reserve.Dropped)
	}
	account := &e.accounts[i]
	if a.ID == account.sent && a.Result.Closes() {
		account.open = false
	}
	if other != otherIs {
		j.failf("%s: an answer for one account of %q changed the other", g.Owner, e.id)
	}
	if is == was {
		return
	}
	c := j.Tenant(e.id)
	l := c.of(a.Incarnation, a.Emergency)
	known, ok := l.granted[a.ID]
	missed := drops-dropsBefore >= is-was // counted, and dropped as a whole
	switch {
	case a.Incarnation != g.inc:
		j.failf("%s: credited a grant of another incarnation", g.Owner)
	case !ok:
		j.failf("%s: credited grant %d of %q, which was never durable", g.Owner, a.ID, e.id)
	case missed:
	case known.credited:
		j.CreditedTwice++
		j.failf("%s: credited grant %d of %q twice", g.Owner, a.ID, e.id)
	case is-was != known.units:
		j.failf("%s: credited %d units of grant %d of %q, which has %d", g.Owner, is-was, a.ID, e.id, known.units)
	}
	known.credited = true
	l.granted[a.ID] = known
	c.Counts.GrantsCredited++
	account.credited += is - was
	if !missed { // it renews what is held
		account.expiry = account.first.Mono.Add(a.TTL)
		account.offset = account.first.Wall - account.first.Mono
	}
}

func sumDrops(d [agent.NumDrops]grant.Units) (sum grant.Units) {
	for _, u := range d {
		sum += u
	}
	return sum
}

// live is what an account may still spend, as the world sees it.
func (j *Judge) live(g *Gateway, e *entry, i int) grant.Units {
	a := &e.accounts[i]
	held := e.Stats().Held
	if i == 1 {
		held = e.Stats().Reserve.Held
	}
	if now := g.now(); now.Mono >= a.expiry || j.moved(now, a.offset) {
		return 0
	}
	return held
}

// moved reports whether wall and monotonic time moved apart since the offset.
func (j *Judge) moved(now agent.Reading, offset grant.Instant) bool {
	d, tolerance := now.Wall-now.Mono-offset, grant.Instant(j.w.cfg.Agent.Tolerance)
	return d > tolerance || -d > tolerance
}

// flying is what was granted to an account and may yet be credited.
func (j *Judge) flying(g *Gateway, e *entry, l *ledgerOf, i int) grant.Units {
	a := &e.accounts[i]
	if !a.open || g.closed {
		return 0
	}
	have, ok := l.granted[a.sent]
	if now := g.now(); !ok || have.credited || now.Mono >= a.first.Mono.Add(have.ttl) || j.moved(now, a.first.Wall-a.first.Mono) {
		return 0
	}
	return have.units
}

// capHolds tests the sum cap of one account.
func (j *Judge) capHolds(c *Case, emergency bool) {
	var sum grant.Units
	i := index(emergency)
	for _, g := range j.w.gateways {
		e := g.tenants[c.ID]
		if e == nil {
			continue
		}
		l := c.grants[account{g.inc, emergency}]
		if l == nil {
			continue
		}
		sum += j.live(g, e, i) + j.flying(g, e, l, i)
	}
	if sum == 0 {
		return
	}
	var most grant.Units
	for k := len(c.changes) - 1; k >= 0; k-- {
		p := c.changes[k].policy
		if p != nil {
			a := p.Account(emergency).Grant
			until := j.w.now
			if k+1 < len(c.changes) {
				until = c.changes[k+1].at
			}
			life := j.w.cfg.Authority.GrantLife(max(a.TTL, 0))
			if a.Enabled() && until.Add(life+life/50+j.w.cfg.Authority.Tolerance) >= j.w.now {
				most = max(most, a.Slack())
			}
		}
	}
	if sum > most {
		var who []string
		for _, g := range j.w.gateways {
			if e, l := g.tenants[c.ID], c.grants[account{g.inc, emergency}]; e != nil && l != nil {
				who = append(who, fmt.Sprintf("%s %d+%d until %v", g.Owner, j.live(g, e, i), j.flying(g, e, l, i), e.accounts[i].expiry.Sub(g.now().Mono)))
			}
		}
		j.failf("tenant %q, emergency %v: %d units live and in flight, N*q is %d: %v", c.ID, emergency, sum, most, who)
	}
}

// waits is a request that the agent let wait.
func (j *Judge) waits(id grant.TenantID) { j.Tenant(id).Counts.Waited++ }

// resolved is the end of a wait.
func (j *Judge) resolved(g *Gateway, e *entry, w waiter, now agent.Reading, d agent.Decision) {
	if late := now.Mono - w.deadline; late > 2 && w.pauses == g.pauses {
		j.failf("%s: a request of %q waited %v past its deadline", g.Owner, e.id, time.Duration(late))
	}
	if d.Outcome == agent.Admitted {
		c := j.Tenant(e.id)
		c.Counts.LongestWait = max(c.Counts.LongestWait, now.Mono.Sub(d.Start))
	}
	if d.Outcome == agent.Waiting {
		j.failf("%s: a ticket of %q is resolved as waiting", g.Owner, e.id)
	}
}

// answered counts a decision that the shell made.
func (j *Judge) answered(g *Gateway, id grant.TenantID, d agent.Decision) {
	c := &j.Tenant(id).Counts
	switch d.Outcome {
	case agent.Admitted:
		c.Admitted++
		c.Units += d.Cost
		c.ByPath[d.Path] += d.Cost
		if d.Shadow {
			c.Shadow++
		}
	case agent.Denied:
		c.Denied++
	case agent.Undecided:
		c.Undecided++
		c.UndecidedBy[d.Reason]++
	case agent.Rejected:
		c.Rejected++
	}
	j.w.note("%s %s %v %v %d %v", g.Owner, id, d.Outcome, d.Reason, d.Cost, d.Path)
}

// decided is a decision that reached the client.
func (j *Judge) decided(g *Gateway, e *entry, d agent.Decision, attempt *grant.Attempt) {
	j.answered(g, e.id, d)
	if d.Outcome != agent.Admitted {
		return
	}
	c := j.Tenant(e.id)
	switch {
	case d.Cost == 0:
	case d.Shadow:
		c.admissions = append(c.admissions, admission{j.w.now, d.Cost})
	case d.Path == agent.Local, d.Path == agent.FromReserve:
		a := &e.accounts[index(d.Path == agent.FromReserve)]
		a.spent += d.Cost
		switch now := g.now(); {
		case now.Mono >= a.expiry:
			j.failf("%s: spent units of %q %v after they expired", g.Owner, e.id, now.Mono.Sub(a.expiry))
		case j.moved(now, a.offset):
			j.failf("%s: spent units of %q although the clocks moved since they were asked for", g.Owner, e.id)
		}
		if a.spent > a.credited {
			j.failf("%s: spent %d units of %q, was credited %d", g.Owner, a.spent, e.id, a.credited)
		}
		c.admissions = append(c.admissions, admission{j.w.now, d.Cost})
	case d.Path == agent.Central:
		if attempt == nil {
			j.failf("%s: admitted a request of %q centrally without an answer", g.Owner, e.id)
			return
		}
		have, ok := c.checks[*attempt]
		switch {
		case !ok || have.cost < 0:
			j.failf("%s: admitted attempt %v of %q, which the ledger never allowed", g.Owner, *attempt, e.id)
		case have.admitted:
			j.failf("%s: admitted attempt %v of %q twice", g.Owner, *attempt, e.id)
		case have.cost != d.Cost:
			j.failf("%s: admitted attempt %v of %q at %d, deducted %d", g.Owner, *attempt, e.id, d.Cost, have.cost)
		}
		have.admitted = true
		c.checks[*attempt] = have
		c.admissions = append(c.admissions, admission{have.at, d.Cost})
	default:
		j.failf("%s: admitted a request of %q by path %v and not as shadow", g.Owner, e.id, d.Path)
	}
}

// died closes the books of a tenant of a process that ended.
func (j *Judge) died(e *entry) {
	j.compare(e)
	j.Tenant(e.id).Counts.Expired += sumDrops(e.Stats().Dropped) + e.Stats().Held
}

// compare sets what a tenant says against what the world saw.
func (j *Judge) compare(e *entry) {
	s := e.Stats()
	for i, a := range [2]agent.AccountStats{s.AccountStats, s.Reserve} {
		if a.Spent != e.accounts[i].spent || a.Granted != e.accounts[i].credited || a.Granted != a.Spent+a.Held+sumDrops(a.Dropped) {
			j.failf("tenant %q, account %d: the agent counts %d granted, %d spent, %d held, %v dropped; the world saw %d credited and %d spent",
				e.id, i, a.Granted, a.Spent, a.Held, a.Dropped, e.accounts[i].credited, e.accounts[i].spent)
		}
	}
}
