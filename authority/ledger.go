package authority

import (
	"bytes"
	"container/heap"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// Ledger is the state machine of one partition: buckets, grants, Checks and
// policies of its tenants, in ledger time.
//
// Invariants, tested by Check:
//
//  1. Time: no instant kept is later than now, which never goes back.
//  2. Level: 0 <= level <= burst; a bucket without a record is full.
//  3. Outstanding: an account's figure is the sum over its owners; an owner's
//     is zero or has an expiry in the future.
//  4. Order: an owner has at most one parked request, and its id is greater
//     than that of the last closed one.
//  5. Credit: 0 <= Check credit <= level, and zero unless a Check was seen.
//  6. Decisions: the window's queue, in order of time, and its index hold the
//     same attempts. An attempt that is in neither and at or below its caller's
//     low-water mark is refused.
//  7. Counts: tenants' decisions, callers' live attempts, members' holdings and
//     the partition's totals are what counting again gives.
//  8. Timers: every tenant with something due is in the timer heap, no later
//     than it is due.
//
// The sum cap is checked where units are handed out, in decide: after a grant,
// the account's outstanding is at most N*q of the policy in force.
type Ledger struct {
	cfg       Config
	partition grant.Partition
	now       grant.Instant
	persisted grant.Instant // largest instant in a record

	tenants  map[grant.TenantID]*tenant
	policies map[string]*policy // by canonical bytes: equal policies are one value
	members  map[grant.Incarnation]*member
	timers   timerHeap

	decided map[grant.Attempt]decision
	window  []decidedBatch // in order of time
	callers map[grant.Incarnation]*caller
	idle    []idleCaller // callers without live decisions, in order of time
	gone    []goneMember // final members, in order of time
	stamp   grant.Instant

	confirmBy grant.Instant // members that the registry has not named by then are lost; 0: all are named

	versionFloor uint64
	recovered    *recovery

	buckets int // accounts with a record
	owners  int
	parked  int
	out     grant.Units // outstanding, all accounts
	arrival uint64      // counts parked requests

	// What the current step changed, in order of first touch.
	dirtyTenants  []*tenant
	dirtyAccounts []accountRef
	dirtyOwners   []ownerRef
	fresh         []freshDecision
	records       []Record
	forgot        bool // records has the deletion of something that may have come back
	replies       []Reply
	stats         Stats
}

// tenant is one tenant's state. Cold tenants are many: what only a busy one
// needs is behind pointers.
type tenant struct {
	id        grant.TenantID
	policy    *policy
	version   uint64
	ordinary  account
	reserve   *account // the emergency bucket, once there was one
	refused   *refusals
	timer     grant.Instant // when it is due in the timer heap
	slot      int32         // in the timer heap; -1: not there
	decisions int32         // live ones
	deleted   bool
	dirty     bool
}

// policy is a validated policy shared by all tenants whose content is equal.
type policy struct {
	*grant.Policy
	dearest grant.Units
	refs    int
	key     string
}

// account is one bucket and what was handed out of it.
type account struct {
	bucket    bucket
	ceiling   grant.Units // burst in force, or the last one while nothing is admitted
	hot       *hot        // nil: no owners, nothing parked
	granted   grant.Units // since the load
	checked   grant.Units
	emergency bool
	stored    bool // has a record; otherwise it is full
	dirty     bool
}

// hot is what an account with owners keeps.
type hot struct {
	owners      map[grant.Incarnation]*owner
	outstanding grant.Units
	nextExpiry  grant.Instant // of any outstanding unit; Never: none
	parked      []*parked     // in order of arrival
	credit      grant.Units   // part of the level that only Checks may take
	oddUnit     bool          // the half unit of credit that did not fit an integer
	checksUntil grant.Instant // the Check path is a claimant before
	checkNeed   grant.Units   // dearest Check denied for credit lately
	expired     grant.Units
	discarded   grant.Units
}

type owner struct {
	member      *member
	outstanding grant.Units // held as last reported + granted since
	expiry      grant.Instant
	granted     grant.Instant // ledger time of the last grant; 0: none yet
	last        closedGrant
	open        *parked
	dirty       bool
}

// closedGrant is the last closed grant id and its answer.
type closedGrant struct {
	id     grant.GrantID
	sum    grant.Fingerprint
	result grant.GrantResult
	reason grant.Reason
	units  grant.Units
	ttl    time.Duration
}

// parked is a grant request that waits for refill.
type parked struct {
	caller  Caller
	owner   *owner
	req     grant.GrantRequest
	since   grant.Instant
	ends    grant.Instant // answered empty from here on
	arrival uint64
}

type member struct {
	id    grant.Incarnation
	owner grant.Owner
	state MemberState
	holds map[*account]*tenant // accounts with an owner record of this member
}

// refusals are for people and for Retry-After: not part of any decision.
type refusals struct {
	ring      [6]refusal
	next      int
	backlog   grant.Units // units denied lately that are likely to come back
	backlogAt grant.Instant
	carry     int64
}

type refusal struct {
	at     grant.Instant
	reason grant.Reason
	grant  bool
	cost   grant.Units
	class  grant.RouteClass
	owner  grant.Owner
}

type accountRef struct {
	t *tenant
	a *account
}

type ownerRef struct {
	accountRef
	inc grant.Incarnation
	o   *owner // nil: the record is deleted
}

// recovery is set for good in a store that lost its predecessor.
type recovery struct {
	at       grant.Instant // ledger time of the first load: every bucket was empty then
	noGrants grant.Instant // grants are withheld before
}

func newLedger(cfg Config, p grant.Partition) *Ledger {
	return &Ledger{
		cfg:       cfg,
		partition: p,
		tenants:   make(map[grant.TenantID]*tenant),
		policies:  make(map[string]*policy),
		members:   make(map[grant.Incarnation]*member),
		decided:   make(map[grant.Attempt]decision),
		callers:   make(map[grant.Incarnation]*caller),
	}
}

// settings are what the account follows now. A deleted tenant, and an emergency
// bucket whose policy has none, keep their level and admit nothing.
func (l *Ledger) settings(t *tenant, a *account) grant.Account {
	if t.deleted || a.emergency && t.policy.Emergency == nil {
		return grant.Account{Burst: a.ceiling}
	}
	return t.policy.Account(a.emergency)
}

func (t *tenant) account(emergency bool) *account {
	if emergency {
		return t.reserve
	}
	return &t.ordinary
}

// accounts yields the tenant's buckets.
func (t *tenant) accounts(yield func(*account) bool) {
	if yield(&t.ordinary) && t.reserve != nil {
		yield(t.reserve)
	}
}

// intern returns the shared value for a policy's content.
func (l *Ledger) intern(p *grant.Policy) *policy {
	var e encoder
	appendPolicy(&e, p)
	if have := l.policies[string(e)]; have != nil {
		have.refs++
		return have
	}
	made := &policy{Policy: p, dearest: p.DearestClass(), refs: 1, key: string(e)}
	l.policies[made.key] = made
	return made
}

func (l *Ledger) unintern(p *policy) {
	if p.refs--; p.refs == 0 {
		delete(l.policies, p.key)
	}
}

// begin opens a step: it moves the time, lets go of what is old and serves what
// is due.
func (l *Ledger) begin(now grant.Instant) {
	l.now = max(l.now, now)
	l.forgetDecisions()
	l.forgetMembers()
	l.confirmMembers()
	for len(l.timers) > 0 && l.timers[0].timer <= l.now {
		t := l.timers[0]
		for a := range t.accounts {
			l.settle(t, a)
			l.serve(t, a)
		}
		l.arm(t)
	}
}

// settle brings an account to now: refill, Check credit, expiry.
func (l *Ledger) settle(t *tenant, a *account) grant.Account {
	set := l.settings(t, a)
	added := a.bucket.refill(l.now, set.Rate, set.Burst)
	if h := a.hot; h != nil {
		l.accrueCredit(t, a, set, added)
		if l.now >= h.nextExpiry {
			l.expire(t, a)
		}
	}
	return set
}

// expire takes units whose life is over for gone. Time has already refilled them.
func (l *Ledger) expire(t *tenant, a *account) {
	h := a.hot
	h.nextExpiry = grant.Never
	var leaving []grant.Incarnation
	for inc, o := range h.owners {
		if o.outstanding > 0 && o.expiry <= l.now {
			l.stats.Expired += o.outstanding
			h.expired += o.outstanding
			l.setOutstanding(h, o, 0)
		}
		if o.outstanding > 0 {
			h.nextExpiry = min(h.nextExpiry, o.expiry)
		} else if o.member.state > Live && o.open == nil {
			leaving = append(leaving, inc)
		}
	}
	// Their order reaches the records.
	slices.SortFunc(leaving, compareIncarnations)
	for _, inc := range leaving {
		l.release(t, a, inc)
	}
}

func compareIncarnations(a, b grant.Incarnation) int { return bytes.Compare(a[:], b[:]) }

func (l *Ledger) setOutstanding(h *hot, o *owner, u grant.Units) {
	h.outstanding += u - o.outstanding
	l.out += u - o.outstanding
	o.outstanding = u
}

// releaseIfGone forgets an owner unless something of it is still needed.
func (l *Ledger) releaseIfGone(t *tenant, a *account, inc grant.Incarnation) {
	if o := a.hot.owners[inc]; o != nil && o.member.state > Live && o.outstanding == 0 && o.open == nil {
		l.release(t, a, inc)
	}
}

// release forgets an owner that holds nothing and whose incarnation is not
// registered any more.
func (l *Ledger) release(t *tenant, a *account, inc grant.Incarnation) {
	o := a.hot.owners[inc]
	if o.last.id != 0 || o.dirty {
		l.dirtyOwners = append(l.dirtyOwners, ownerRef{accountRef{t, a}, inc, nil})
		l.forgot = true
	}
	o.dirty = false
	delete(a.hot.owners, inc)
	l.owners--
	delete(o.member.holds, a)
	if o.member.state == Lost && len(o.member.holds) == 0 {
		delete(l.members, inc)
	}
}

// touch marks a bucket whose level changed: it gets a record in this step.
func (l *Ledger) touch(t *tenant, a *account) {
	if !a.stored {
		a.stored = true
		l.buckets++
	}
	if !a.dirty {
		a.dirty = true
		l.dirtyAccounts = append(l.dirtyAccounts, accountRef{t, a})
	}
}

func (l *Ledger) touchTenant(t *tenant) {
	if !t.dirty {
		t.dirty = true
		l.dirtyTenants = append(l.dirtyTenants, t)
	}
}

// arm computes when the tenant needs the Ledger next, forgets what may be
// forgotten now, and keeps the timer heap.
func (l *Ledger) arm(t *tenant) {
	due := grant.Never
	for a := range t.accounts {
		due = min(due, l.due(t, a))
	}
	if t.deleted && l.mayPurge(t) {
		l.purge(t)
		return
	}
	switch {
	case due == grant.Never:
		if t.slot >= 0 {
			heap.Remove(&l.timers, int(t.slot))
		}
		t.timer = grant.Never
	case t.slot < 0:
		t.timer = due
		heap.Push(&l.timers, t)
	case due != t.timer:
		t.timer = due
		heap.Fix(&l.timers, int(t.slot))
	}
}

// due is the next instant at which the account needs a step. It forgets a
// bucket that is full and free of outstanding units and live decisions.
func (l *Ledger) due(t *tenant, a *account) grant.Instant {
	set := l.settings(t, a)
	due := grant.Never
	if h := a.hot; h != nil {
		due = min(due, h.nextExpiry)
		if len(h.parked) > 0 {
			due = min(due, l.parkedDue(t, a, set))
		} else if len(h.owners) == 0 {
			if h.expired == 0 && h.discarded == 0 {
				a.hot = nil
			}
		}
	}
	if !a.stored || t.decisions > 0 && !a.emergency || a.hot != nil && a.hot.outstanding > 0 {
		return due
	}
	fill, ok := a.bucket.until(set.Burst, set.Rate)
	if !ok {
		return due
	}
	full := a.bucket.last.Add(fill)
	if full > l.now || a.dirty {
		return min(due, max(full, l.now+1))
	}
	a.bucket.refill(l.now, set.Rate, set.Burst)
	a.stored = false
	l.buckets--
	l.records = append(l.records, Record{Key: bucketKey(t.id, a.emergency)})
	l.forgot = true
	return due
}

// mayPurge reports whether nothing of a deleted tenant is left that could mint
// units if the tenant were made anew.
func (l *Ledger) mayPurge(t *tenant) bool {
	for a := range t.accounts {
		if a.stored || a.dirty || a.hot != nil && (len(a.hot.owners) > 0 || len(a.hot.parked) > 0) {
			return false
		}
	}
	return t.decisions == 0
}

// purge forgets a deleted tenant. Its version number is never used again, so
// that no agent takes an old copy of a policy for the new tenant's.
func (l *Ledger) purge(t *tenant) {
	if t.slot >= 0 {
		heap.Remove(&l.timers, int(t.slot))
	}
	delete(l.tenants, t.id)
	l.unintern(t.policy)
	l.records = append(l.records, Record{Key: key(kindPolicy, []byte(t.id))})
	l.forgot = true
	if t.version > l.versionFloor {
		l.versionFloor = t.version
		e := newValue(12)
		e.uint(l.versionFloor)
		l.records = append(l.records, Record{key(kindVersion), e})
	}
}

// seal closes a step and returns what must be durable before its replies leave.
// No key stands in it twice.
func (l *Ledger) seal() []Record {
	l.sealTenants()
	l.sealDecisions()
	if l.buckets > 0 && l.now.Sub(l.persisted) >= l.cfg.PersistTimeEvery {
		l.persistTime()
	}
	records := l.records
	l.records = nil
	if !l.forgot {
		return records
	}
	l.forgot = false
	// Something was forgotten and then needed again in the same step: the later
	// word counts.
	latest := make(map[string]int, len(records))
	for i, r := range records {
		latest[string(r.Key)] = i
	}
	kept := records[:0]
	for i, r := range records {
		if latest[string(r.Key)] == i {
			kept = append(kept, r)
		}
	}
	return kept
}

func (l *Ledger) sealTenants() {
	for _, t := range l.dirtyTenants {
		t.dirty = false
		if l.tenants[t.id] == t {
			l.records = append(l.records, Record{key(kindPolicy, []byte(t.id)), encodePolicy(t)})
		}
	}
	for _, r := range l.dirtyAccounts {
		r.a.dirty = false
		l.records = append(l.records, Record{bucketKey(r.t.id, r.a.emergency), encodeBucket(&r.a.bucket, r.a.ceiling)})
		l.persisted = max(l.persisted, r.a.bucket.last)
	}
	for _, r := range l.dirtyOwners {
		k := ownerKey(r.t.id, r.a.emergency, r.inc)
		if r.o == nil {
			l.records = append(l.records, Record{Key: k})
		} else if r.o.dirty {
			r.o.dirty = false
			l.records = append(l.records, Record{k, encodeOwner(r.o)})
		}
	}
	clear(l.dirtyTenants)
	clear(l.dirtyAccounts)
	clear(l.dirtyOwners)
	l.dirtyTenants, l.dirtyAccounts, l.dirtyOwners = l.dirtyTenants[:0], l.dirtyAccounts[:0], l.dirtyOwners[:0]
}

// persistTime keeps ledger time from falling back at the next load.
func (l *Ledger) persistTime() {
	e := newValue(12)
	e.instant(l.now)
	l.records = append(l.records, Record{key(kindTime), e})
	l.persisted = l.now
}

// stepDown answers what is parked and persists the time, before another node
// leads the partition. The parked go first: if moving the time served one of
// them, its answer would leave although nobody waits for the last records.
func (l *Ledger) stepDown(now grant.Instant) {
	l.refuseParked(grant.Unavailable)
	l.begin(now)
	if l.now > l.persisted {
		l.persistTime()
	}
}

// wake is the next instant at which a step is due; Never: none.
func (l *Ledger) wake() grant.Instant {
	due := grant.Never
	if len(l.timers) > 0 {
		due = l.timers[0].timer
	}
	if len(l.window) > 0 {
		due = min(due, roundUp(l.window[0].at.Add(l.cfg.DedupWindow)))
	}
	if l.confirmBy > 0 {
		due = min(due, l.confirmBy)
	}
	if l.buckets > 0 {
		due = min(due, l.persisted.Add(l.cfg.PersistTimeEvery))
	}
	return due
}

// roundUp to whole seconds, so that old decisions leave in batches.
func roundUp(i grant.Instant) grant.Instant {
	const s = grant.Instant(time.Second)
	return (i + s) / s * s
}

// snapshotStats fills the gauges.
func (l *Ledger) snapshotStats() Stats {
	s := l.stats
	s.Tenants, s.Buckets, s.Owners, s.Parked = len(l.tenants), l.buckets, l.owners, l.parked
	s.Outstanding, s.Decisions, s.Now = l.out, len(l.decided), l.now
	return s
}

type timerHeap []*tenant

func (h timerHeap) Len() int           { return len(h) }
func (h timerHeap) Less(i, j int) bool { return h[i].timer < h[j].timer }
func (h timerHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].slot, h[j].slot = int32(i), int32(j)
}
func (h *timerHeap) Push(x any) {
	t := x.(*tenant)
	t.slot = int32(len(*h))
	*h = append(*h, t)
}
func (h *timerHeap) Pop() any {
	old := *h
	t := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	t.slot = -1
	return t
}

// sortedTenants lists the tenants in order of id.
func (l *Ledger) sortedTenants() []grant.TenantID { return slices.Sorted(maps.Keys(l.tenants)) }

func (l *Ledger) String() string {
	return fmt.Sprintf("partition %d at %v: %d tenants, %d buckets, %d owners, %d outstanding, %d parked, %d decisions",
		l.partition, time.Duration(l.now), len(l.tenants), l.buckets, l.owners, l.out, l.parked, len(l.decided))
}
