package bounds

import (
	"fmt"
	"math"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// Scope says which terms of a policy a Checker counts.
type Scope uint8

const (
	// Whole counts both accounts: for all admissions of a tenant.
	Whole Scope = iota
	// OrdinaryOnly leaves the emergency budget out: for admissions that did not
	// come from it.
	OrdinaryOnly
	// EmergencyOnly is for the admissions that did.
	EmergencyOnly
)

// Config holds what a Checker allows for beside the policy.
type Config struct {
	RhoPPB int64 // bound on the rate error of monotonic clocks, parts per billion: 0 to MaxRhoPPB
	// D is the longest time from the start of an attempt to the recorded
	// instant; 0 when the decision itself was recorded.
	D time.Duration
	// Skew is by how much timestamps of different recorders, or of a recorder
	// and the policy history, may differ. A log that truncates its timestamps
	// adds its resolution, a log that records the end of requests their longest
	// duration.
	Skew time.Duration
	// Tolerance is how much longer than its ttl a wallet may spend a grant
	// without noticing; it extends only the look back at N*q.
	Tolerance time.Duration
	// PolicyLag is how long a gateway may go on letting everything pass after a
	// policy left mode off or shadow; it extends only the time outside the bound.
	PolicyLag time.Duration
	Scope     Scope
}

// Validate names the first field out of range, the value given and what is allowed.
func (c Config) Validate() error {
	if err := validTerms(c.RhoPPB, c.D); err != nil {
		return err
	}
	// Half of time.Duration for each keeps D+Skew a duration.
	for _, f := range [...]struct {
		field string
		given time.Duration
	}{{"d", c.D}, {"skew", c.Skew}, {"tolerance", c.Tolerance}, {"policy_lag", c.PolicyLag}} {
		if f.given < 0 || f.given > math.MaxInt64/2 {
			return fmt.Errorf("bounds: %s: %v; allowed: 0s to %v", f.field, f.given, time.Duration(math.MaxInt64/2))
		}
	}
	if c.Scope > EmergencyOnly {
		return fmt.Errorf("bounds: scope: %d; allowed: 0 to %d", c.Scope, EmergencyOnly)
	}
	return nil
}

// terms are what one policy adds to the bound.
type terms struct {
	rate    fraction      // r*(1+rho), units per ns
	burst   uint64        // B: of two accounts it may exceed MaxUnits
	slack   uint64        // N*q
	life    time.Duration // for which a grant may be spent after the policy was replaced
	outside bool          // mode off or shadow
}

// termsOf takes the terms of a valid policy; nil admits nothing.
func (c Config) termsOf(p *grant.Policy) (terms, error) {
	t := terms{rate: rateFraction(grant.Rate{}, 0)}
	if p == nil {
		return t, nil
	}
	if problems := p.Validate(); len(problems) > 0 {
		return t, fmt.Errorf("bounds: policy: %w", problems[0])
	}
	t.outside = p.Mode != grant.Enforce
	var x exact
	for _, a := range [...]struct {
		counts  bool
		account grant.Account
	}{{c.Scope != EmergencyOnly, p.Account(false)}, {c.Scope != OrdinaryOnly, p.Account(true)}} {
		if !a.counts {
			continue
		}
		t.rate = t.rate.plus(rateFraction(a.account.Rate, c.RhoPPB), &x)
		t.burst += uint64(a.account.Burst)
		if n := slack(a.account.Grant); n > 0 {
			t.slack += uint64(n)
			t.life = max(t.life, c.life(a.account.Grant.TTL))
		}
	}
	if x.overflow {
		return t, fmt.Errorf("sum of the policy's two rates: %w", ErrOverflow)
	}
	return t, nil
}

// life is the longest real time in which units granted with the ttl may be
// spent: the agent stops after ttl by a clock that may be slow by rho. It is
// taken as the authority takes it, ttl*(1+2*rho)/(1-rho) up, plus Tolerance.
func (c Config) life(ttl time.Duration) time.Duration {
	var x exact // a ttl is at most 2^47 ns: nothing overflows
	d, _ := unitsCeil(x.times(wideOf(uint64(ttl)), uint64(billion+2*c.RhoPPB)), wideOf(uint64(billion-c.RhoPPB)))
	return time.Duration(d) + c.Tolerance
}
