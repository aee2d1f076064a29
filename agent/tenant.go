package agent

import "github.com/stipend/stipend/proto/grant"

// Tenant is what one agent knows and holds of one tenant. Take and Low may be
// called at any time from any goroutine; all other methods are serialised by
// the caller. Not copied after first use.
type Tenant struct {
	cfg Config
	id  grant.TenantID
	inc grant.Incarnation
}

// NewTenant makes the machine of one tenant for one incarnation of the agent.
// cfg must be valid.
func NewTenant(cfg Config, id grant.TenantID, inc grant.Incarnation) *Tenant {
	return &Tenant{cfg: cfg, id: id, inc: inc}
}

// Take is the fast path: no lock, no allocation. ok is false when the request
// must go through Ask instead; nothing happened then.
func (t *Tenant) Take(now Reading, class grant.RouteClass, count grant.Units) (d Decision, ok bool) {
	return Decision{}, false
}

// Low reports, once, that a Take crossed the low-water mark: call Tick now.
func (t *Tenant) Low() bool { return false }

// Ask decides one request, or lets it wait: a Decision with Outcome Waiting is
// followed by one Resolution of the ticket, or ended by GiveUp.
func (t *Tenant) Ask(now Reading, a Ask, fx *Effects) Decision {
	return Decision{Outcome: Undecided, Reason: grant.Unavailable, At: now.Mono, Start: now.Mono}
}

// GiveUp ends the wait of a ticket whose caller's context ended. ok is false
// when it does not wait (any more).
func (t *Tenant) GiveUp(now Reading, ticket uint64, fx *Effects) (d Decision, ok bool) {
	return Decision{}, false
}

// Answer takes a grant answer.
func (t *Tenant) Answer(now Reading, a grant.GrantAnswer, fx *Effects) {}

// Checked takes the answer of a Check.
func (t *Tenant) Checked(now Reading, a grant.CheckAnswer, fx *Effects) {}

// Pushed takes a policy that the authority sent unasked.
func (t *Tenant) Pushed(now Reading, version uint64, p *grant.Policy, deleted bool, fx *Effects) {}

// Link tells that the stream to the tenant's authority came up or went down.
// Coming up re-sends what is open.
func (t *Tenant) Link(now Reading, up bool, fx *Effects) {}

// Fate tells what the authority said of the whole incarnation: Fenced,
// Discarded or Superseded. Final.
func (t *Tenant) Fate(now Reading, why grant.Reason, fx *Effects) {}

// Tick does what time asks for.
func (t *Tenant) Tick(now Reading, fx *Effects) {}

// Wake is the monotonic instant of the next needed Tick, or grant.Never.
func (t *Tenant) Wake() grant.Instant { return grant.Never }

// Distrust drops everything held: a guard saw that a clock stepped or the
// machine slept.
func (t *Tenant) Distrust(now Reading) {}

// Drain stops asking for grants: what is held is spent, after that Checks.
func (t *Tenant) Drain(now Reading, fx *Effects) {}

// Close closes the wallets for good, before Discard is sent.
func (t *Tenant) Close(now Reading) {}

// Stats counts what happened and what is held now.
func (t *Tenant) Stats() Stats { return Stats{} }

// Idle reports whether the tenant may be forgotten: nothing held, open or
// waiting, nothing remembered, cold.
func (t *Tenant) Idle(now Reading) bool { return false }

// String is the state in one stable form, for scripts and people.
func (t *Tenant) State() string { return "" }

// Check tests the invariants.
func (t *Tenant) Check() error { return nil }
