package sim

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

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
	pending    []change // landed unheard

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
	slices.SortStableFunc(c.admissions, func(a, b admission) int { return cmp.Compare(a.at, b.at) })
	changes := c.changes
	follow := func(until grant.Instant) error {
		for ; len(changes) > 0 && changes[0].at <= until; changes = changes[1:] {
			if err := k.Change(changes[0].at, changes[0].policy); err != nil {
				return err
			}
		}
		return nil
	}
	judge := func() error {
		if from > math.MinInt64 {
			if err := errors.Join(follow(from), k.Advance(from)); err != nil {
				return err
			}
		}
		for _, a := range c.admissions {
			if a.at < from {
				continue
			}
			if err := errors.Join(follow(a.at), k.Admit(a.at, a.cost)); err != nil {
				return err
			}
		}
		return errors.Join(follow(grant.Never), k.Advance(j.w.now))
	}
	if err := judge(); err != nil {
		return bounds.Verdict{}, fmt.Errorf("tenant %q: %w", id, err)
	}
	return k.Verdict()
}
