package bounds

import (
	"fmt"
	"math"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// MaxRhoPPB is the largest rho that an Envelope or a Checker takes: 10 %.
const MaxRhoPPB = billion / 10

// Envelope is the promise of one policy as a value: the terms of
//
//	A(T) <= r*(1+rho)*(T+d) + B + N*q
//
// where r, B and N*q are the sums over the ordinary and the emergency account.
// It does not know modes: under off and shadow nothing is promised.
type Envelope struct {
	Ordinary  grant.Account
	Emergency grant.Account // zero: none

	RhoPPB int64         // bound on the rate error of monotonic clocks, parts per billion
	D      time.Duration // longest time from the start of an attempt to its forwarding; 0: counted at the decision
}

// EnvelopeOf takes the terms of a policy. A nil policy admits nothing.
func EnvelopeOf(p *grant.Policy, rhoPPB int64, d time.Duration) Envelope {
	e := Envelope{RhoPPB: rhoPPB, D: d}
	if p != nil {
		e.Ordinary, e.Emergency = p.Account(false), p.Account(true)
	}
	return e
}

// Validate names the first field out of range, the value given and what is allowed.
func (e Envelope) Validate() error {
	p := grant.Policy{Rate: e.Ordinary.Rate, Burst: e.Ordinary.Burst, Grant: e.Ordinary.Grant}
	if e.Emergency != (grant.Account{}) {
		p.Emergency = &grant.Emergency{Rate: e.Emergency.Rate, Burst: e.Emergency.Burst, Grant: e.Emergency.Grant}
	}
	if problems := p.Validate(); len(problems) > 0 {
		return fmt.Errorf("bounds: %w", problems[0])
	}
	return validTerms(e.RhoPPB, e.D)
}

func validTerms(rhoPPB int64, d time.Duration) error {
	if rhoPPB < 0 || rhoPPB > MaxRhoPPB {
		return fmt.Errorf("bounds: rho_ppb: %d; allowed: 0 to %d", rhoPPB, int64(MaxRhoPPB))
	}
	if d < 0 {
		return fmt.Errorf("bounds: d: %v; allowed: 0s or more", d)
	}
	return nil
}

// Max is the largest A(T): what may be admitted in any closed interval of
// length T >= 0, rounded down to whole units. The error is ErrOverflow when it
// exceeds MaxUnits, or names a field out of range.
func (e Envelope) Max(t time.Duration) (grant.Units, error) {
	if err := e.Validate(); err != nil {
		return 0, err
	}
	if t < 0 {
		return 0, fmt.Errorf("bounds: T: %v; allowed: 0s or more", t)
	}
	var x exact
	r := rateFraction(e.Ordinary.Rate, e.RhoPPB).plus(rateFraction(e.Emergency.Rate, e.RhoPPB), &x)
	whole, _ := x.times(r.num, uint64(t)+uint64(e.D)).divFloor(r.den)
	for _, a := range [...]grant.Account{e.Ordinary, e.Emergency} {
		whole = x.add(whole, wideOf(uint64(a.Burst)))
		whole = x.add(whole, wideOf(uint64(slack(a.Grant))))
	}
	u, ok := unitsFloor(whole, wideOf(1))
	if !ok || x.overflow {
		return 0, fmt.Errorf("largest A(%v): %w", t, ErrOverflow)
	}
	return u, nil
}

// slack is N*q, and 0 when one of them is 0.
func slack(g grant.GrantSettings) grant.Units {
	if !g.Enabled() {
		return 0
	}
	return g.Slack()
}

// Slack is N*q: what gateways may hold unspent, emergency grants included. It
// cannot overflow for an envelope that validates.
func (e Envelope) Slack() grant.Units { return slack(e.Ordinary.Grant) + slack(e.Emergency.Grant) }

// LargestQuantum is the largest q for which N owners add at most extra units
// to the burst: floor(E/N).
func LargestQuantum(extra grant.Units, owners int) (grant.Units, error) {
	if extra < 0 {
		return 0, fmt.Errorf("bounds: extra burst: %d; allowed: 0 or more units", extra)
	}
	if owners < 1 || owners > grant.MaxOwners {
		return 0, fmt.Errorf("bounds: owners: %d; allowed: 1 to %d", owners, grant.MaxOwners)
	}
	return min(extra/grant.Units(owners), grant.MaxQuantum), nil
}

// CoordinationPerSecond is r/q, the grants per second at full use, for people
// and plots; ok is false without grants.
func (e Envelope) CoordinationPerSecond() (perSecond float64, ok bool) {
	if !e.Ordinary.Grant.Enabled() {
		return 0, false
	}
	return e.Ordinary.Rate.PerSecond() / float64(e.Ordinary.Grant.Quantum), true
}

// GrantLasts is how long a full grant serves one gateway when the rate is
// spread evenly over N of them: q/(r/N), rounded down. ok is false when it
// lasts for ever, is beyond time.Duration, or there are no grants.
func (e Envelope) GrantLasts() (d time.Duration, ok bool) {
	if !e.Ordinary.Grant.Enabled() || e.Ordinary.Rate.Zero() {
		return 0, false
	}
	var x exact
	n := x.times(wideOf(uint64(e.Ordinary.Grant.Slack())), uint64(e.Ordinary.Rate.Per))
	q, _ := n.divFloor(wideOf(uint64(e.Ordinary.Rate.Units)))
	if q[1]|q[2]|q[3] != 0 || q[0] > math.MaxInt64 {
		return 0, false
	}
	return time.Duration(q[0]), true
}

// DeployCost is what replacing every gateway at once may burn: N*q units, and
// the time N*q/r in which the bucket earns them again. That is the same number
// as GrantLasts, met from the other side: N wallets of q at rate r.
func (e Envelope) DeployCost() (lost grant.Units, refill time.Duration, ok bool) {
	refill, ok = e.GrantLasts()
	return slack(e.Ordinary.Grant), refill, ok
}

// OwnersNeeded is the N that serves every gateway: those alive, and those lost
// within one ttl, which count until their grants expire. A rolling deploy loses
// each gateway once.
func OwnersNeeded(alive, lostPerTTL int) (int, error) {
	if alive < 0 || lostPerTTL < 0 {
		return 0, fmt.Errorf("bounds: owners alive, lost per ttl: %d, %d; allowed: 0 or more", alive, lostPerTTL)
	}
	if alive > grant.MaxOwners || lostPerTTL > grant.MaxOwners-alive {
		return 0, fmt.Errorf("bounds: owners: %d alive and %d lost per ttl; allowed: %d together", alive, lostPerTTL, grant.MaxOwners)
	}
	return alive + lostPerTTL, nil
}
