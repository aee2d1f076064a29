package demo

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/stipend/stipend/bounds"
	"github.com/stipend/stipend/bounds/trace"
	"github.com/stipend/stipend/proto/grant"
)

const (
	// rhoPPB is the authority's default bound on the rate error of clocks.
	rhoPPB = 1_000_000
	// patience is what a busy machine may add to d, from the load to the backend,
	// before a note says so.
	patience = 100 * time.Millisecond
	// tolerance is the agents' default: how late a wallet may notice a pause.
	tolerance = 100 * time.Millisecond
	// promised is the utilisation below which the demo fails, in parts per million.
	promised = bounds.FullPromisePPM
	// saturates: a trace of which one bucket for all would have refused less
	// than this share of the units has no utilisation worth judging.
	saturates = 0.05
)

// Excess is the most that any interval admitted over r*T, and what it may.
type Excess struct {
	Tenant   string        `json:"tenant"`
	Role     string        `json:"role"`
	Requests uint64        `json:"requests"`
	Admitted grant.Units   `json:"admitted"`
	Most     grant.Units   `json:"largest_excess"`
	Slack    grant.Units   `json:"burst_plus_nq"`  // B + N*q
	Within   time.Duration `json:"within_ns"`      // longest time from the decision to the record
	Allowed  grant.Units   `json:"excess_allowed"` // B + N*q + r*within
	Length   time.Duration `json:"in_ns"`
	Held     bool          `json:"held"`
	Over     grant.Units   `json:"over"`
	// The interval with the least room.
	WorstAdmitted grant.Units `json:"worst_admitted"`
	WorstAllowed  grant.Units `json:"worst_allowed"`
}

// judged is one set of records under the plan's policies.
type judged struct {
	held    bool
	tenants []Excess // those with admissions, worst first
	n       uint64
}

// judge tells whether the bound held, over every interval, for each tenant.
// The records come in order of time; within is how long before its record an
// admission of the tenant may have been decided.
func (p *plan) judge(skew time.Duration, within func(tenant grant.TenantID) time.Duration,
	each func(admit func(tenant grant.TenantID, at grant.Instant, cost grant.Units) error) error) (judged, error) {
	out := judged{held: true}
	known := map[grant.TenantID]*tenant{}
	for i := range p.tenants {
		known[p.tenants[i].id] = &p.tenants[i]
	}
	checkers := map[grant.TenantID]*bounds.Checker{}
	err := each(func(id grant.TenantID, at grant.Instant, cost grant.Units) error {
		c := checkers[id]
		if c == nil {
			var err error
			if c, err = bounds.NewChecker(bounds.Config{RhoPPB: rhoPPB, D: within(id), Skew: skew, Tolerance: tolerance}); err != nil {
				return err
			}
			if t := known[id]; t != nil { // without a policy it may admit nothing
				if err := c.Change(math.MinInt64, t.policy); err != nil {
					return err
				}
			}
			checkers[id] = c
		}
		return c.Admit(at, cost)
	})
	if err != nil {
		return out, err
	}
	for id, c := range checkers {
		v, err := c.Verdict()
		if err != nil {
			return out, err
		}
		t := known[id]
		if t == nil {
			t = &tenant{id: id, role: unverified, policy: &grant.Policy{}}
		}
		slack := t.policy.Burst
		if t.policy.Grant.Enabled() {
			slack += t.policy.Grant.Slack()
		}
		out.n += v.Admissions
		out.held = out.held && v.Held
		out.tenants = append(out.tenants, Excess{
			Tenant: string(id), Role: t.role.String(), Requests: v.Admissions, Admitted: v.Admitted, Most: v.Excess, Slack: slack,
			Within: within(id), Allowed: v.ExcessIn.Beyond, Length: v.ExcessIn.Length(), Held: v.Held, Over: v.Over(),
			WorstAdmitted: v.Worst.Admitted, WorstAllowed: v.Worst.Allowed,
		})
	}
	slices.SortFunc(out.tenants, func(a, b Excess) int {
		return cmp.Or(cmp.Compare(b.Over, a.Over), cmp.Compare(b.share(), a.share()), cmp.Compare(a.Tenant, b.Tenant))
	})
	return out, nil
}

func (e Excess) share() float64 { return float64(e.Most) / float64(max(e.Slack, 1)) }

// atBackend judges what reached the backend, by its clock. A request was
// decided after the load sent it and before the backend noted it, by one and
// the same clock: so the longest of these times bounds, for each tenant, how
// far a record may be from its decision. It holds d and whatever a busy machine
// adds, measured and not assumed.
func (p *plan) atBackend(records []forwarded) (judged, error) {
	longest := map[grant.TenantID]time.Duration{}
	for _, r := range records {
		id := p.tenants[r.tenant].id
		longest[id] = max(longest[id], r.at.Sub(r.sent))
	}
	within := func(id grant.TenantID) time.Duration { return longest[id] }
	return p.judge(0, within, func(admit func(grant.TenantID, grant.Instant, grant.Units) error) error {
		for _, r := range records {
			if err := admit(p.tenants[r.tenant].id, r.at, r.cost); err != nil {
				return err
			}
		}
		return nil
	})
}

// recorded is what the agents' own records hold beside the judgement.
type recorded struct {
	judged
	lost uint64 // admissions that a writer says it lost
	torn int    // files that end with their writer's death
}

// byAgents judges the agents' own records. They hold the instant of the
// decision; that of a Check is the arrival of its answer, later than its step in
// the ledger by less than d, for the agents forward nothing after that.
func (p *plan) byAgents(files []string, d time.Duration) (recorded, error) {
	var out recorded
	var readers []*trace.Reader
	defer func() {
		for _, r := range readers {
			r.Close()
		}
	}()
	for _, f := range files {
		r, err := trace.OpenFile(trace.Admissions, f, trace.Options{Window: 10 * time.Second})
		if err != nil {
			return out, fmt.Errorf("records of the agents: %w", err)
		}
		readers = append(readers, r)
	}
	records, err := trace.Merge(readers...)
	if err != nil {
		return out, err
	}
	within := func(grant.TenantID) time.Duration { return d }
	out.judged, err = p.judge(time.Millisecond, within, func(admit func(grant.TenantID, grant.Instant, grant.Units) error) error {
		for rec, err := range records {
			if err != nil {
				return err
			}
			if err := admit(rec.Tenant, rec.At, rec.Cost); err != nil {
				return err
			}
		}
		return nil
	})
	for _, r := range readers {
		s := r.Stats()
		out.lost += s.Lost
		if !s.Complete || s.Torn {
			out.torn++
		}
	}
	return out, err
}

// Use is the utilisation of the saturating tenant.
type Use struct {
	Judged   bool        `json:"judged"`
	Tenant   string      `json:"tenant"`
	Admitted grant.Units `json:"admitted"`
	Of       grant.Units `json:"of"`
	PPM      int64       `json:"ppm"`
	Kept     bool        `json:"kept"`
	What     string      `json:"what"` // of what, in words
}

// utilisation of the first tenant. Synthetic load: units admitted of r*T, from
// its first refusal (the burst is spent then) to the end of the load. A trace:
// of what one bucket for all requests would have admitted, where that refuses
// enough for the tenant to count as saturating.
func (p *plan) utilisation(records []forwarded, from, until grant.Instant) (Use, error) {
	u := Use{Tenant: string(p.tenants[0].id), Kept: true}
	if p.trace != nil {
		total := p.trace.reference + p.trace.refused
		if p.tenants[0].role != hot || float64(p.trace.refused) < saturates*float64(total) {
			u.What = "not judged: the load does not saturate a tenant's limit"
			if len(p.tenants) > 1 {
				u.What = "not judged: no tenant saturates its limit all the time"
			}
			return u, nil
		}
		for _, r := range records {
			if r.tenant == 0 {
				u.Admitted += r.cost
			}
		}
		u.Of, u.What = p.trace.reference, "what one bucket that sees every request would have admitted"
	} else {
		if from <= 0 || until <= from {
			return u, errors.New("the hot tenant was never refused: the load did not saturate it; is the machine too busy?")
		}
		for _, r := range records {
			if r.tenant == 0 && r.at >= from && r.at < until {
				u.Admitted += r.cost
			}
		}
		u.Of, _ = p.tenants[0].policy.Rate.AccrueFloor(until.Sub(from), 0)
		u.What = fmt.Sprintf("r*T, from the first refusal on (T = %.1fs)", until.Sub(from).Seconds())
	}
	u.Judged = true
	u.PPM = int64(float64(u.Admitted) / float64(max(u.Of, 1)) * 1e6)
	u.Kept = u.PPM >= promised
	return u, nil
}
