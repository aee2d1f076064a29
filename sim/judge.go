package sim

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/stipend/stipend/agent"
	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/bounds"
	"github.com/stipend/stipend/proto/grant"
)

// Judge watches the world. It keeps books of its own and compares them with what
// the machines say; the first fault it finds ends the run.
type Judge struct {
	w       *World
	cfg     bounds.Config
	fault   error
	tenants map[grant.TenantID]*Case
	order   []*Case
	parts   map[grant.Partition]*docket

	// DeductedTwice and CreditedTwice count grant ids; one is a fault already.
	DeductedTwice, CreditedTwice int
	// FoundAgain counts acknowledged decisions that were looked for after a
	// load and found.
	FoundAgain int
}

// Case is what the Judge knows about one tenant.
type Case struct {
	ID         grant.TenantID
	version    uint64
	policy     *grant.Policy
	changes    []change
	admissions []admission
	grants     map[account]*ledgerOf
	checks     map[grant.Attempt]checked
	pending    []pendingPut

	Counts Counts
}

// Counts are outcomes of requests of one tenant.
type Counts struct {
	Admitted, Denied, Undecided, Rejected uint64
	UndecidedBy                           [grant.NumReasons]uint64
	ByPath                                [4]grant.Units // admitted, by agent.Path
	Units                                 grant.Units    // admitted
	Shadow                                uint64
	Waited                                uint64
	LongestWait                           time.Duration // agent's MONOTONIC past the start of the wait, of admitted
	GrantsCredited                        uint64
	Expired                               grant.Units // dropped by dead processes, units
}

type change struct {
	at     grant.Instant
	policy *grant.Policy // nil: deleted
}

type admission struct {
	at   grant.Instant
	cost grant.Units
}

// account names one wallet of one incarnation.
type account struct {
	inc       grant.Incarnation
	emergency bool
}

// ledgerOf is what was granted to one account.
type ledgerOf struct {
	granted map[grant.GrantID]granted
	newest  grant.GrantID // newest that was asked for
	request grant.GrantRequest
}

type granted struct {
	units    grant.Units
	ttl      time.Duration
	at       grant.Instant // of the step
	credited bool
}

type checked struct {
	at       grant.Instant
	cost     grant.Units
	admitted bool
}

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

type pendingPut struct {
	at     grant.Instant
	policy *grant.Policy
}

const ackedKept = 64

func newJudge(w *World) (*Judge, error) {
	j := &Judge{w: w, tenants: make(map[grant.TenantID]*Case), parts: make(map[grant.Partition]*docket)}
	j.cfg = bounds.Config{RhoPPB: w.cfg.Authority.RhoPPB, Tolerance: w.cfg.Authority.Tolerance + time.Millisecond, PolicyLag: w.cfg.PolicyLag}
	return j, j.cfg.Validate()
}

func (j *Judge) fail(err error) {
	if j.fault == nil {
		j.fault = err
	}
}

func (j *Judge) failf(format string, args ...any) { j.fail(fmt.Errorf(format, args...)) }

// Tenant is what is known about a tenant.
func (j *Judge) Tenant(id grant.TenantID) *Case {
	c := j.tenants[id]
	if c == nil {
		c = &Case{ID: id, grants: make(map[account]*ledgerOf), checks: make(map[grant.Attempt]checked)}
		j.tenants[id] = c
		j.order = append(j.order, c)
	}
	return c
}

func (j *Judge) part(p grant.Partition) *docket {
	d := j.parts[p]
	if d == nil {
		d = &docket{}
		j.parts[p] = d
	}
	return d
}

func (c *Case) of(inc grant.Incarnation, emergency bool) *ledgerOf {
	l := c.grants[account{inc, emergency}]
	if l == nil {
		l = &ledgerOf{granted: make(map[grant.GrantID]granted)}
		c.grants[account{inc, emergency}] = l
	}
	return l
}

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
			c.pending = append(c.pending, pendingPut{s.at, call.Put.Policy})
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
			c.changes = append(c.changes, change{put.at, put.policy})
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
	switch {
	case a.Incarnation != g.inc:
		j.failf("%s: credited a grant of another incarnation", g.Owner)
	case !ok:
		j.failf("%s: credited grant %d of %q, which was never durable", g.Owner, a.ID, e.id)
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
	if drops-dropsBefore < is-was { // not missed: it renews what is held
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

// inspect tests every invariant there is. It costs what the whole world costs.
func (j *Judge) inspect() {
	if j.w.Center.Alive() {
		for _, p := range j.w.Center.order {
			if err := j.w.Center.nodes[p].Check(); err != nil {
				j.fail(fmt.Errorf("partition %d: %w", p, err))
			}
		}
	}
	for _, g := range j.w.gateways {
		for _, e := range g.order {
			if g.Alive() && e.Wake() <= g.now().Mono {
				continue // a Tick is due at this very instant
			}
			if err := e.Check(); err != nil {
				j.fail(fmt.Errorf("%s: %w", g.Owner, err))
			}
			j.compare(e)
		}
		if g.Alive() && !g.paused {
			j.punctual(g)
		}
	}
	for _, c := range j.order {
		j.capHolds(c, false)
		j.capHolds(c, true)
	}
}

// punctual tests that nobody waits past its deadline.
func (j *Judge) punctual(g *Gateway) {
	now := g.now()
	for _, e := range g.order {
		for ticket, w := range e.waiters {
			if w.pauses == g.pauses && now.Mono > w.deadline+2 {
				j.failf("%s: ticket %d of %q still waits, %v after its deadline", g.Owner, ticket, e.id, now.Mono.Sub(w.deadline))
			}
		}
	}
}

// Close settles all books and judges every tenant over all of time so far.
func (j *Judge) Close() error {
	j.inspect()
	if j.fault != nil {
		return j.fault
	}
	for _, c := range j.order {
		v, err := j.Verdict(c.ID, math.MinInt64)
		if err != nil {
			return err
		}
		if !v.Held {
			return fmt.Errorf("tenant %q: the bound is broken: %v", c.ID, v)
		}
	}
	return nil
}

// Verdict judges the admissions of a tenant from an instant on; utilisation
// counts from then to now.
func (j *Judge) Verdict(id grant.TenantID, from grant.Instant) (bounds.Verdict, error) {
	c := j.Tenant(id)
	k, err := bounds.NewChecker(j.cfg)
	if err != nil {
		return bounds.Verdict{}, err
	}
	slices.SortStableFunc(c.admissions, func(a, b admission) int {
		switch {
		case a.at < b.at:
			return -1
		case a.at > b.at:
			return 1
		}
		return 0
	})
	changes, started := c.changes, false
	start := func(at grant.Instant) error {
		if started || at < from {
			return nil
		}
		started = true
		return k.Advance(from)
	}
	for _, a := range c.admissions {
		for len(changes) > 0 && changes[0].at <= a.at {
			if err := start(changes[0].at); from > math.MinInt64 && err != nil {
				return bounds.Verdict{}, err
			}
			if err := k.Change(changes[0].at, changes[0].policy); err != nil {
				return bounds.Verdict{}, fmt.Errorf("tenant %q: %w", id, err)
			}
			changes = changes[1:]
		}
		if a.at < from {
			continue
		}
		if from > math.MinInt64 {
			if err := start(a.at); err != nil {
				return bounds.Verdict{}, err
			}
		}
		if err := k.Admit(a.at, a.cost); err != nil {
			return bounds.Verdict{}, fmt.Errorf("tenant %q: %w", id, err)
		}
	}
	for _, ch := range changes {
		if err := k.Change(ch.at, ch.policy); err != nil {
			return bounds.Verdict{}, fmt.Errorf("tenant %q: %w", id, err)
		}
	}
	if err := k.Advance(j.w.now); err != nil {
		return bounds.Verdict{}, err
	}
	return k.Verdict()
}
