package sim

import (
	"fmt"
	"time"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

// docket is what a partition was asked and has not been heard of.
type docket struct {
	granted grant.Units // deducted by commits that landed unheard
	acked   []acked     // lately, to be looked for after a load
}

// acked is an acknowledged decision.
type acked struct {
	at    grant.Instant
	grant *grant.GrantRequest
	check *grant.CheckRequest
	units grant.Units
}

const ackedKept = 64

// unheard is a step whose commit nobody heard succeed.
func (j *Judge) unheard(p grant.Partition, s step, landed bool) {
	j.w.note("unheard %d %v", p, landed)
	if !landed {
		return
	}
	j.part(p).granted += s.granted
	for _, call := range s.calls {
		if call.Check == nil {
			continue
		}
		c := j.Tenant(call.Check.Tenant)
		if _, known := c.checks[call.Check.Attempt]; !known {
			c.checks[call.Check.Attempt] = checked{at: s.at, cost: -1} // if it was allowed, then now
		}
	}
	for _, call := range s.calls {
		if call.Put != nil {
			c := j.Tenant(call.Put.Tenant)
			c.pending = append(c.pending, change{s.at, call.Put.Policy})
		}
	}
}

// released are the replies that a Node lets go after a step.
func (j *Judge) released(p grant.Partition, s step, replies []authority.Reply) {
	var fresh, anew, cost grant.Units
	for _, r := range replies {
		switch {
		case r.Grant != nil && r.Grant.Result == grant.Granted:
			units := j.grantReleased(p, s, r.Grant)
			if fresh += units; units == 0 {
				anew += j.forgotten(r.Grant)
			}
		case r.Check != nil && r.Check.Verdict == grant.Allow && !r.Check.Shadow && r.Check.Cost > 0:
			cost += j.checkReleased(p, s, r.Check)
		case r.Put != nil && r.Put.Reason == grant.None && !r.Put.Unchanged:
			for _, call := range s.calls {
				if call.Put != nil && call.Caller == r.Caller {
					j.changed(j.Tenant(r.Put.Tenant), r.Put.Version, s.at, call.Put.Policy)
				}
			}
		}
	}
	d := j.part(p)
	if fresh+anew < s.granted {
		var ids []string
		for _, r := range replies {
			if r.Grant != nil {
				ids = append(ids, fmt.Sprintf("%v %d of %v to %v", r.Grant.Result, r.Grant.Units, r.Grant.ID, r.Grant.Incarnation))
			}
		}
		j.DeductedTwice++
		j.failf("partition %d: a step deducted %d units for grants, %d of them for ids that had not been granted before: %v", p, s.granted, fresh, ids)
	}
	if fresh > s.granted { // granted by commits that landed unheard
		if d.granted -= fresh - s.granted; d.granted < 0 {
			j.failf("partition %d: grants of %d units were answered, %d deducted", p, fresh, s.granted)
		}
	}
	if cost != s.checked {
		j.failf("partition %d: a step deducted %d units for Checks and answered %d", p, s.checked, cost)
	}
}

// forgotten is the size of a grant whose id the ledger may have forgotten since,
// because its incarnation's lease ran out and nothing of it was outstanding. A
// copy of the request that the network kept until after the incarnation was
// registered again may then be granted anew: nobody is credited for it.
func (j *Judge) forgotten(a *grant.GrantAnswer) grant.Units {
	m := j.w.Registry.members[a.Incarnation]
	if m == nil || m.State != authority.Lost && m.lost < j.Tenant(a.Tenant).of(a.Incarnation, a.Emergency).granted[a.ID].at {
		return 0
	}
	return a.Units
}

func (j *Judge) grantReleased(p grant.Partition, s step, a *grant.GrantAnswer) (fresh grant.Units) {
	c := j.Tenant(a.Tenant)
	l := c.of(a.Incarnation, a.Emergency)
	if g, known := l.granted[a.ID]; known {
		if g.units != a.Units && j.forgotten(a) == 0 {
			j.failf("grant %d of %q was %d units, and then %d", a.ID, a.Tenant, g.units, a.Units)
		}
		return 0
	}
	j.w.note("grant %s %d %d %v", a.Tenant, a.ID, a.Units, a.Emergency)
	l.granted[a.ID] = granted{units: a.Units, ttl: a.TTL, at: s.at}
	if l.newest == a.ID {
		req := l.request
		j.acked(p, acked{at: s.at, grant: &req, units: a.Units})
	}
	j.capHolds(c, a.Emergency)
	return a.Units
}

func (j *Judge) checkReleased(p grant.Partition, s step, a *grant.CheckAnswer) (fresh grant.Units) {
	c := j.Tenant(a.Tenant)
	have, known := c.checks[a.Attempt]
	switch {
	case a.Replayed && !known:
		j.failf("attempt %v of %q was allowed before, says the ledger, and nobody saw it", a.Attempt, a.Tenant)
	case a.Replayed && have.cost < 0:
		have.cost = a.Cost
		c.checks[a.Attempt] = have
	case a.Replayed:
		if have.cost != a.Cost {
			j.failf("attempt %v of %q cost %d, and then %d", a.Attempt, a.Tenant, have.cost, a.Cost)
		}
	case known && have.cost >= 0:
		j.failf("attempt %v of %q was deducted twice", a.Attempt, a.Tenant)
	default:
		c.checks[a.Attempt] = checked{at: s.at, cost: a.Cost}
		fresh = a.Cost
	}
	for _, call := range s.calls {
		if fresh > 0 && call.Check != nil && call.Check.Attempt == a.Attempt {
			j.acked(p, acked{at: s.at, check: call.Check, units: a.Cost})
			break
		}
	}
	return fresh
}

func (j *Judge) acked(p grant.Partition, a acked) {
	d := j.part(p)
	if len(d.acked) >= ackedKept {
		copy(d.acked, d.acked[1:])
		d.acked = d.acked[:ackedKept-1]
	}
	d.acked = append(d.acked, a)
}

// changed is a policy that came into force with a step.
func (j *Judge) changed(c *Case, version uint64, at grant.Instant, p *grant.Policy) {
	j.w.note("policy %s v%d", c.ID, version)
	for _, put := range c.pending { // landed unheard, and replaced before anybody looked
		if c.version+1 < version && put.at < at {
			c.version++
			c.changes = append(c.changes, put)
		}
	}
	c.version, c.policy, c.pending = version, p, nil
	c.changes = append(c.changes, change{at, p})
}

// loaded looks at a Node that was just read from the disk: what policies it has,
// and whether every decision that was acknowledged lately is still there.
func (j *Judge) loaded(n *node) {
	d := j.part(n.p)
	for _, c := range j.order {
		if grant.PartitionOf(c.ID) != n.p {
			continue
		}
		j.review(n, c)
	}
	for _, a := range d.acked {
		j.probe(n, a)
	}
}

// review asks for the policy that a Node found on the disk.
func (j *Judge) review(n *node, c *Case) {
	asked := j.w.now
	j.w.Center.offer(n, authority.Call{Get: &authority.GetTenant{Tenant: c.ID}, Caller: &callback{func(r authority.Reply) {
		if r.Tenant.Reason == grant.Overloaded {
			j.w.After(time.Millisecond, func() {
				if j.w.Center.Alive() && j.w.Center.nodes[n.p] == n {
					j.review(n, c)
				}
			})
			return
		}
		j.reviewed(c, r.Tenant, asked)
	}}})
}

func (j *Judge) reviewed(c *Case, s *authority.TenantState, asked grant.Instant) {
	switch {
	case s.Reason == grant.Unavailable:
	case len(c.changes) > 0 && c.changes[len(c.changes)-1].at >= asked: // changed since, in the same step perhaps
	case s.Reason == grant.UnknownTenant && c.policy != nil:
		if n := len(c.pending); n > 0 && c.pending[n-1].policy == nil {
			j.changed(c, c.version, c.pending[n-1].at, nil) // deleted unheard, and forgotten
			return
		}
		j.failf("tenant %q is gone after a load", c.ID)
	case s.Reason == grant.None && s.Version < c.version:
		j.failf("tenant %q went back from version %d to %d", c.ID, c.version, s.Version)
	case s.Reason == grant.None && s.Version > c.version:
		at := j.w.now
		for _, put := range c.pending {
			if (put.policy == nil) == s.Deleted && (s.Deleted || fmt.Sprint(*put.policy) == fmt.Sprint(*s.Policy)) {
				at = put.at
			}
		}
		if len(c.changes) > 0 {
			at = max(at, c.changes[len(c.changes)-1].at)
		}
		p := s.Policy
		if s.Deleted {
			p = nil
		}
		j.changed(c, s.Version, at, p)
	}
}

// probe asks for an acknowledged decision again. It changes nothing if the
// decision is there, and shows if it is not.
func (j *Judge) probe(n *node, a acked) {
	age := j.w.now.Sub(a.at)
	if a.check != nil {
		if age > j.w.cfg.Authority.DedupWindow/2 {
			return
		}
		j.w.Center.offer(n, authority.Call{Check: a.check, Caller: &callback{func(r authority.Reply) {
			switch {
			case r.Check.Verdict == grant.Undecided:
			case r.Check.Verdict != grant.Allow || !r.Check.Replayed:
				j.failf("attempt %v was acknowledged and lost: %v %v", a.check.Attempt, r.Check.Verdict, r.Check.Reason)
			default:
				j.FoundAgain++
			}
		}}})
		return
	}
	c := j.Tenant(a.grant.Tenant)
	l := c.of(a.grant.Incarnation, a.grant.Emergency)
	state := j.w.Registry.State(a.grant.Incarnation)
	if age > l.granted[a.grant.ID].ttl/2 || l.newest != a.grant.ID || state.Final() {
		return
	}
	j.w.Center.offer(n, authority.Call{Grant: a.grant, Caller: &callback{func(r authority.Reply) {
		switch g := r.Grant; {
		case g.Result == grant.Busy, l.newest != a.grant.ID:
		case g.Result != grant.Granted || g.Units != a.units:
			j.failf("grant %d of %q was acknowledged and lost: %v %v", g.ID, g.Tenant, g.Result, g.Reason)
		default:
			j.FoundAgain++
		}
	}}})
}
