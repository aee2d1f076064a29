package bounds

import (
	"fmt"
	"math"
	"slices"

	"github.com/stipend/stipend/proto/grant"
)

// Judge is one Checker per tenant, for at most a stated number of them.
type Judge struct {
	cfg      Config
	limit    int
	fallback *grant.Policy
	tenants  map[grant.TenantID]*Checker
}

// NewJudge makes a Judge of at most maxTenants tenants. A tenant whose first
// call is an Admit is held to fallback for all of time; to nothing at all if
// fallback is nil.
func NewJudge(cfg Config, maxTenants int, fallback *grant.Policy) (*Judge, error) {
	if maxTenants < 1 {
		return nil, fmt.Errorf("bounds: max tenants: %d; allowed: 1 or more", maxTenants)
	}
	if _, err := NewChecker(cfg); err != nil {
		return nil, err
	}
	if _, err := cfg.termsOf(fallback); err != nil {
		return nil, err
	}
	return &Judge{cfg: cfg, limit: maxTenants, fallback: fallback, tenants: map[grant.TenantID]*Checker{}}, nil
}

func (j *Judge) checker(tenant grant.TenantID) (c *Checker, fresh bool, err error) {
	if c := j.tenants[tenant]; c != nil {
		return c, false, nil
	}
	if err := tenant.Validate(); err != nil {
		return nil, false, fmt.Errorf("bounds: %w", err)
	}
	if len(j.tenants) >= j.limit {
		return nil, false, fmt.Errorf("bounds: tenant %q is one too many; allowed: %d tenants", tenant, j.limit)
	}
	if c, err = NewChecker(j.cfg); err != nil {
		return nil, false, err
	}
	j.tenants[tenant] = c
	return c, true, nil
}

// Change is Checker.Change for the tenant.
func (j *Judge) Change(tenant grant.TenantID, at grant.Instant, p *grant.Policy) error {
	c, _, err := j.checker(tenant)
	if err != nil {
		return err
	}
	return named(tenant, c.Change(at, p))
}

// Admit is Checker.Admit for the tenant. Time is in order within each tenant.
func (j *Judge) Admit(tenant grant.TenantID, at grant.Instant, cost grant.Units) error {
	c, fresh, err := j.checker(tenant)
	if err != nil {
		return err
	}
	if fresh && j.fallback != nil {
		if err := c.Change(math.MinInt64, j.fallback); err != nil {
			return named(tenant, err)
		}
	}
	return named(tenant, c.Admit(at, cost))
}

// Advance is Checker.Advance for every tenant: it ends the span over which
// utilisation is measured. A tenant whose last admission is later keeps it.
func (j *Judge) Advance(at grant.Instant) error {
	for tenant, c := range j.tenants {
		if c.started && c.last > at {
			continue
		}
		if err := c.Advance(at); err != nil {
			return named(tenant, err)
		}
	}
	return nil
}

func named(tenant grant.TenantID, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("tenant %q: %w", tenant, err)
}

// Report is the verdict on one tenant.
type Report struct {
	Tenant grant.TenantID
	Verdict
	Err error // ErrOverflow: there is no verdict
}

// Reports lists all tenants in order of their id.
func (j *Judge) Reports() []Report {
	out := make([]Report, 0, len(j.tenants))
	for tenant, c := range j.tenants {
		v, err := c.Verdict()
		out = append(out, Report{tenant, v, named(tenant, err)})
	}
	slices.SortFunc(out, func(a, b Report) int {
		if a.Tenant < b.Tenant {
			return -1
		}
		return 1 // never equal
	})
	return out
}

// Held reports whether the bound held for every tenant, each with a verdict.
func (j *Judge) Held() bool {
	for _, c := range j.tenants {
		if v, err := c.Verdict(); err != nil || !v.Held {
			return false
		}
	}
	return true
}
