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
	// arrival of a request's first byte at the backend until the backend looks
	// at its clock: what the scheduler of a busy machine may add.
	backendSkew = 100 * time.Millisecond
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
	Allowed  grant.Units   `json:"excess_allowed"` // with what forwarding adds, r*d
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
func (p *plan) judge(cfg bounds.Config, each func(admit func(tenant grant.TenantID, at grant.Instant, cost grant.Units) error) error) (judged, error) {
	out := judged{held: true}
	j, err := bounds.NewJudge(cfg, len(p.tenants)+1000, nil)
	if err != nil {
		return out, err
	}
	roles := map[grant.TenantID]*tenant{}
	for i := range p.tenants {
		t := &p.tenants[i]
		roles[t.id] = t
		if err := j.Change(t.id, math.MinInt64, t.policy); err != nil {
			return out, err
		}
	}
	if err := each(j.Admit); err != nil {
		return out, err
	}
	for _, r := range j.Reports() {
		if r.Err != nil {
			return out, r.Err
		}
		if r.Admissions == 0 {
			continue
		}
		t := roles[r.Tenant]
		if t == nil { // nobody of the plan: the checker let it have nothing
			t = &tenant{id: r.Tenant, role: unverified, policy: &grant.Policy{}}
		}
		slack := t.policy.Burst
		if t.policy.Grant.Enabled() {
			slack += t.policy.Grant.Slack()
		}
		out.n += r.Admissions
		out.held = out.held && r.Held
		out.tenants = append(out.tenants, Excess{
			Tenant: string(r.Tenant), Role: t.role.String(), Requests: r.Admissions, Admitted: r.Admitted, Most: r.Excess, Slack: slack,
			Allowed: r.ExcessIn.Beyond, Length: r.ExcessIn.Length(), Held: r.Held, Over: r.Over(),
			WorstAdmitted: r.Worst.Admitted, WorstAllowed: r.Worst.Allowed,
		})
	}
	slices.SortStableFunc(out.tenants, func(a, b Excess) int {
		return cmp.Or(cmp.Compare(b.Over, a.Over), cmp.Compare(b.share(), a.share()), cmp.Compare(a.Tenant, b.Tenant))
	})
	return out, nil
}

func (e Excess) share() float64 { return float64(e.Most) / float64(max(e.Slack, 1)) }

// atBackend judges what reached the backend, by the backend's clock.
func (p *plan) atBackend(records []forwarded, d time.Duration) (judged, error) {
	cfg := bounds.Config{RhoPPB: rhoPPB, D: d, Skew: backendSkew, Tolerance: tolerance}
	return p.judge(cfg, func(admit func(grant.TenantID, grant.Instant, grant.Units) error) error {
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
// decision; that of a Check is the arrival of its answer, at most the deadline
// later than its step in the ledger.
func (p *plan) byAgents(files []string, deadline time.Duration) (recorded, error) {
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
	cfg := bounds.Config{RhoPPB: rhoPPB, D: deadline, Skew: time.Millisecond, Tolerance: tolerance}
	out.judged, err = p.judge(cfg, func(admit func(grant.TenantID, grant.Instant, grant.Units) error) error {
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
