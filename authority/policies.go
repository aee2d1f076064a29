package authority

import (
	"slices"

	"github.com/stipend/stipend/bounds"
	"github.com/stipend/stipend/proto/grant"
)

// put sets or deletes the policy of one tenant. The bucket is the same one
// before and after: it is refilled at the old rate to now, and its level cut to
// the new burst. Raising the burst adds nothing at once.
func (l *Ledger) put(c Caller, p *PutPolicy) {
	res := &PutResult{Tenant: p.Tenant}
	l.apply(p, res)
	if c != nil {
		l.replies = append(l.replies, Reply{Caller: c, Put: res})
	}
}

func (l *Ledger) apply(p *PutPolicy, res *PutResult) {
	if err := p.Tenant.Validate(); err != nil {
		res.Reason = grant.Invalid
		res.Problems = []grant.Problem{{Field: "tenant", Given: err.Error(), Allowed: "1 to 256 bytes of UTF-8 without control characters"}}
		return
	}
	if p.Policy != nil {
		if res.Problems = p.Policy.Validate(); len(res.Problems) > 0 {
			res.Reason = grant.Invalid
			return
		}
	}
	t := l.tenants[p.Tenant]
	var version uint64
	if t != nil {
		version = t.version
	}
	if !p.AnyVersion && p.Expected != version && !(t != nil && t.deleted && p.Expected == 0) {
		res.Reason, res.Version = grant.VersionConflict, version
		return
	}
	if p.Policy == nil {
		l.remove(t, res)
		return
	}
	next := l.intern(p.Policy)
	res.Warnings = bounds.Warnings(p.Policy, l.cfg.RoundTrip)
	switch {
	case t == nil:
		if len(l.tenants) >= l.cfg.MaxTenants {
			l.unintern(next)
			res.Reason, res.Warnings = grant.Overloaded, nil
			return
		}
		t = l.create(p.Tenant, next)
	case t.policy == next && !t.deleted:
		l.unintern(next)
		res.Version, res.Unchanged = t.version, true
		return
	default:
		l.replace(t, next, false)
	}
	res.Version = t.version
}

// create makes a tenant with a full bucket; in a store that lost its
// predecessor with what has accrued since, as the tenant may have spent B there.
func (l *Ledger) create(id grant.TenantID, p *policy) *tenant {
	t := &tenant{id: id, policy: p, version: l.versionFloor + 1, slot: -1, timer: grant.Never}
	l.tenants[id] = t
	l.touchTenant(t)
	l.open(t, &t.ordinary)
	if p.Emergency != nil {
		t.reserve = &account{emergency: true}
		l.open(t, t.reserve)
	}
	l.arm(t)
	return t
}

func (l *Ledger) open(t *tenant, a *account) {
	set := l.settings(t, a)
	a.ceiling = set.Burst
	if l.recovered == nil {
		a.bucket = bucket{level: set.Burst, last: l.now}
		return
	}
	a.bucket = bucket{last: l.recovered.at}
	a.bucket.refill(l.now, set.Rate, set.Burst)
	l.touch(t, a)
}

// replace puts another policy, or the deletion of the one there is, in force.
func (l *Ledger) replace(t *tenant, next *policy, deleted bool) {
	var before [2]grant.Account
	i := 0
	for a := range t.accounts {
		before[i] = l.settle(t, a)
		i++
	}
	old := t.policy
	t.policy, t.deleted = next, deleted
	t.version++
	l.unintern(old)
	l.touchTenant(t)
	i = 0
	for a := range t.accounts {
		set := l.settings(t, a)
		a.bucket.change(before[i].Rate, set.Rate, set.Burst)
		a.ceiling = set.Burst
		if a.hot != nil {
			a.hot.credit = min(a.hot.credit, a.bucket.level)
		}
		// Without a record it would come back full, at the burst it has then.
		if a.stored || a.bucket.level != set.Burst {
			l.touch(t, a)
		}
		i++
	}
	if t.reserve == nil && next.Emergency != nil && !deleted {
		t.reserve = &account{emergency: true}
		l.open(t, t.reserve)
	}
	l.push(t)
	for a := range t.accounts {
		l.serve(t, a) // decided again under the policy of this moment
	}
	l.arm(t)
}

func (l *Ledger) remove(t *tenant, res *PutResult) {
	switch {
	case t == nil:
		res.Reason = grant.UnknownTenant
	case t.deleted:
		res.Version, res.Unchanged = t.version, true
	default:
		t.policy.refs++ // replace lets the old reference go
		l.replace(t, t.policy, true)
		res.Version = t.version
	}
}

// push tells the live owners of the tenant's units.
func (l *Ledger) push(t *tenant) {
	told := make(map[grant.Incarnation]bool)
	for a := range t.accounts {
		if a.hot == nil {
			continue
		}
		for inc, o := range a.hot.owners {
			if o.member.state == Live {
				told[inc] = true
			}
		}
	}
	order := make([]grant.Incarnation, 0, len(told))
	for inc := range told {
		order = append(order, inc)
	}
	slices.SortFunc(order, compareIncarnations)
	for _, inc := range order {
		l.replies = append(l.replies, Reply{Push: &PolicyPush{Incarnation: inc, VersionedPolicy: t.versioned()}})
	}
}

func (t *tenant) versioned() VersionedPolicy {
	return VersionedPolicy{Tenant: t.id, Version: t.version, Policy: t.policy.Policy, Deleted: t.deleted}
}

// list answers a page of policies in order of tenant.
func (l *Ledger) list(c Caller, q *ListPolicies) {
	page := &PolicyPage{}
	limit := min(max(q.Limit, 1), 1000)
	ids := l.sortedTenants()
	from, found := slices.BinarySearch(ids, q.After)
	if found {
		from++
	}
	for _, id := range ids[from:] {
		t := l.tenants[id]
		if t.deleted {
			continue
		}
		if len(page.Policies) == limit {
			page.More = true
			break
		}
		page.Policies = append(page.Policies, t.versioned())
	}
	l.replies = append(l.replies, Reply{Caller: c, List: page})
}

// get answers the inspection of one tenant.
func (l *Ledger) get(c Caller, q *GetTenant) {
	s := &TenantState{Partition: l.partition, VersionedPolicy: VersionedPolicy{Tenant: q.Tenant}}
	defer func() { l.replies = append(l.replies, Reply{Caller: c, Tenant: s}) }()
	t := l.tenants[q.Tenant]
	if t == nil {
		s.Reason = grant.UnknownTenant
		return
	}
	s.VersionedPolicy, s.LiveDecisions = t.versioned(), int(t.decisions)
	for a := range t.accounts {
		state := l.accountState(t, a)
		if a.emergency {
			s.Emergency = &state
		} else {
			s.Ordinary = state
		}
	}
	if r := t.refused; r != nil {
		for i := range r.ring {
			e := r.ring[(r.next-1-i+2*len(r.ring))%len(r.ring)]
			if e.reason == grant.None {
				break
			}
			path := "check"
			if e.grant {
				path = "grant"
			}
			s.LastRefusals = append(s.LastRefusals, Refusal{l.now.Sub(e.at), path, e.reason, e.cost, e.class, e.owner})
		}
	}
	l.arm(t)
}

func (l *Ledger) accountState(t *tenant, a *account) AccountState {
	set := l.settle(t, a)
	l.serve(t, a)
	s := AccountState{Level: a.bucket.level, Burst: set.Burst, Slack: set.Grant.Slack(), Granted: a.granted, Checked: a.checked}
	h := a.hot
	if h == nil {
		return s
	}
	s.Outstanding, s.CheckCredit, s.Expired, s.Discarded = h.outstanding, h.credit, h.expired, h.discarded
	for inc, o := range h.owners {
		s.Owners = append(s.Owners, OwnerState{o.member.owner, inc, o.member.state, o.outstanding, max(o.expiry.Sub(l.now), 0), o.last.id})
	}
	slices.SortFunc(s.Owners, func(a, b OwnerState) int {
		switch {
		case a.Owner < b.Owner:
			return -1
		case a.Owner > b.Owner:
			return 1
		}
		return compareIncarnations(a.Incarnation, b.Incarnation)
	})
	waiting := slices.SortedFunc(slices.Values(h.parked), before)
	for _, p := range waiting {
		s.Parked = append(s.Parked, ParkedState{p.owner.member.owner, p.req.Incarnation, p.req.ID, p.req.Min, p.req.Want, l.now.Sub(p.since), l.estimate(t, a, p)})
	}
	return s
}
