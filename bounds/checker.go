package bounds

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// ErrOrder means that an admission or a change came out of order of time; it
// was not counted.
var ErrOrder = errors.New("out of order of time")

// Checker judges the admissions of one tenant in one pass. What an interval
// from s to e may admit is, for closed intervals,
//
//	integral of r*(1+rho) from s to e  +  (D+Skew) * max r*(1+rho)  +  max B
//	    over the policies in force between s-D-Skew and e+Skew
//	+ max N*q
//	    over the policies in force between s-D-Skew-ttl and e+Skew
//
// each policy with its own ttl, and in force at both of its ends. Intervals
// that touch time outside the bound (a mode other than enforce, extended by
// Skew on the left and D+Skew+PolicyLag on the right) are not judged, and
// admissions in it are only counted.
//
// The method: let phi be the integral of the rate so far less what was
// admitted so far. The excess of an interval over the rate is phi just before
// its first admission less phi just after its last, so the worst start for
// every end is the start of the greatest phi, and one number replaces all
// earlier starts. Starts that different policies count for are kept apart as
// segments; a policy change makes at most three, and one is dropped as soon as
// a later one is no better off. A segment's allowance above the rate changes
// only with the policies, so the one with the least room stays the same between
// changes, and an admission costs O(1).
//
// Numbers are kept multiplied by a common denominator of all rates met, which
// makes them integers. The obvious alternative, a leaky bucket with a remainder,
// has to round when a change brings another denominator.
//
// Invariants, tested by Check:
//
//  1. den > 0, and last never decreases.
//  2. From the oldest segment to the newest, most falls strictly and no term of
//     the class rises.
//  3. tight names the segment with the least room, allow - most.
//  4. live holds the version in force last, unless it is still in future.
type Checker struct {
	cfg   Config
	reach time.Duration // D+Skew

	den      wide // common denominator of all rates
	accrued  wide // integral of r*(1+rho) so far, outside time left out
	used     wide // admitted so far and judged
	usedInt  grant.Units
	perNS    wide     // rate in force
	rates    []change // not yet integrated, in order
	future   []version
	live     []version
	segments []segment
	tight    int
	class    class // of a start now

	started      bool
	first, last  grant.Instant
	lastChange   grant.Instant
	nextExpiry   grant.Instant // the class of starts changes after it
	stale        bool          // or has changed already
	outsideUntil grant.Instant // last instant outside the bound; valid if hasOutside
	hasOutside   bool

	judged    bool
	worst     Interval
	worstRoom wide
	excess    Interval
	excessMax wide

	admissions, outside uint64
	outsideUnits        grant.Units

	err error // sticky: what was met exceeds the integers
}

// version is a policy in force from and until, both included.
type version struct {
	terms
	perNS       wide
	from, until grant.Instant
}

type change struct {
	from  grant.Instant
	perNS wide
}

// class is what a start may count on above the rate.
type class struct {
	burst, slack uint64
	perNS        wide // largest rate, for D+Skew
}

func (c class) with(v *version, burst, slack bool) class {
	if burst {
		c.burst = max(c.burst, v.burst)
		if v.perNS.cmp(c.perNS) > 0 {
			c.perNS = v.perNS
		}
	}
	if slack {
		c.slack = max(c.slack, v.slack)
	}
	return c
}

// segment is a run of starts of one class, replaced by the worst of them.
type segment struct {
	class
	most  wide // greatest phi before a start
	start grant.Instant
	used  grant.Units // admitted before it
	allow wide        // B + N*q + (D+Skew)*max r
}

// NewChecker makes a Checker for a tenant without a policy: it may admit
// nothing until Change. A policy for all of time is a Change at the least Instant.
func NewChecker(cfg Config) (*Checker, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	none := version{terms: terms{rate: rateFraction(grant.Rate{}, 0)}, from: math.MinInt64, until: grant.Never}
	return &Checker{
		cfg: cfg, reach: cfg.D + cfg.Skew, den: wideOf(1), live: []version{none},
		last: math.MinInt64, lastChange: math.MinInt64, stale: true,
	}, nil
}

// Change says that p is in force from the instant on; nil is a deleted policy.
// Changes come in order, and before any admission later than at less Skew
// (else ErrOrder). The policy must validate, and is not kept.
func (c *Checker) Change(at grant.Instant, p *grant.Policy) error {
	if c.err != nil {
		return c.err
	}
	if at < c.lastChange || c.started && at.Add(-c.cfg.Skew) < c.last {
		return fmt.Errorf("bounds: policy change at %d: %w: the last change was at %d, the last admission at %d, and the skew is %v",
			at, ErrOrder, c.lastChange, c.last, c.cfg.Skew)
	}
	t, err := c.cfg.termsOf(p)
	if err != nil {
		return err
	}
	var x exact
	den := lcm(c.den, t.rate.den, &x)
	factor, _ := den.divFloor(c.den)
	c.rescale(factor, &x)
	c.den = den
	factor, _ = den.divFloor(t.rate.den)
	v := version{terms: t, perNS: x.mul(t.rate.num, factor), from: at, until: grant.Never}
	if x.overflow {
		c.err = fmt.Errorf("common denominator of the policies up to the one at %d: %w", at, ErrOverflow)
		return c.err
	}
	if n := len(c.future); n > 0 {
		c.future[n-1].until = at
	} else {
		c.live[len(c.live)-1].until = at
	}
	c.future = append(c.future, v)
	counted := v.perNS
	if v.outside {
		counted = wide{} // no interval spans this time, and utilisation leaves it out
	}
	c.rates = append(c.rates, change{at, counted})
	c.lastChange = at
	c.stale = true // until changed
	return nil
}

// rescale multiplies everything that is kept over den.
func (c *Checker) rescale(f wide, x *exact) {
	if f == wideOf(1) {
		return
	}
	for _, w := range [...]*wide{&c.accrued, &c.used, &c.perNS, &c.class.perNS, &c.worstRoom, &c.excessMax} {
		*w = x.scale(*w, f)
	}
	for i := range c.rates {
		c.rates[i].perNS = x.scale(c.rates[i].perNS, f)
	}
	for _, vs := range [...][]version{c.live, c.future} {
		for i := range vs {
			vs[i].perNS = x.scale(vs[i].perNS, f)
		}
	}
	for i := range c.segments {
		s := &c.segments[i]
		s.perNS, s.most, s.allow = x.scale(s.perNS, f), x.scale(s.most, f), x.scale(s.allow, f)
	}
}

// Advance moves the time to at without an admission. The first Advance or Admit
// starts the span over which utilisation is measured, the last ends it.
func (c *Checker) Advance(at grant.Instant) error {
	if c.err != nil {
		return c.err
	}
	if c.started && at < c.last {
		return fmt.Errorf("bounds: admission at %d: %w: the one before was at %d", at, ErrOrder, c.last)
	}
	if !c.started {
		c.started, c.first, c.last = true, at, at
	}
	var x exact
	for len(c.rates) > 0 && c.rates[0].from <= at {
		c.integrate(c.rates[0].from, &x)
		c.perNS = c.rates[0].perNS
		c.rates = c.rates[1:]
	}
	c.integrate(at, &x)
	for len(c.future) > 0 && c.future[0].from.Add(-c.cfg.Skew) <= at {
		c.activate(c.future[0], &x)
		c.future = c.future[1:]
	}
	if c.stale || at > c.nextExpiry {
		c.refresh(at)
	}
	if x.overflow {
		c.err = fmt.Errorf("units accrued until %d: %w", at, ErrOverflow)
	}
	return c.err
}

func (c *Checker) integrate(until grant.Instant, x *exact) {
	if until <= c.last {
		return
	}
	c.accrued = x.add(c.accrued, x.times(c.perNS, uint64(until)-uint64(c.last)))
	c.last = until
}

// activate counts a version for every interval that ends from now on.
func (c *Checker) activate(v version, x *exact) {
	c.live = append(c.live, v)
	c.stale = true
	if v.outside {
		c.segments = c.segments[:0]
		return
	}
	kept := c.segments[:0]
	for _, s := range c.segments {
		s.class = s.class.with(&v, true, true)
		s.allow = c.allowance(s.class, x)
		if n := len(kept); n > 0 && kept[n-1].class == s.class {
			continue // the older one has the greater phi
		}
		kept = append(kept, s)
	}
	c.segments = kept
	c.retighten(x)
}

func (c *Checker) allowance(k class, x *exact) wide {
	flat := x.add(wideOf(k.burst), wideOf(k.slack))
	return x.add(x.mul(flat, c.den), x.times(k.perNS, uint64(c.reach)))
}

func (c *Checker) retighten(x *exact) {
	c.tight = 0
	for i := range c.segments {
		if c.room(i, x).cmp(c.room(c.tight, x)) < 0 {
			c.tight = i
		}
	}
}

// room is allow - most: what decides which segment is broken first.
func (c *Checker) room(i int, x *exact) wide {
	return x.sub(c.segments[i].allow, c.segments[i].most)
}

// refresh drops the versions that no later start can count and takes the class
// of a start at the instant.
func (c *Checker) refresh(at grant.Instant) {
	c.class, c.nextExpiry, c.hasOutside, c.stale = class{}, grant.Never, false, false
	kept := c.live[:0]
	for _, v := range c.live {
		burstEnd := v.until.Add(c.reach)
		slackEnd := burstEnd.Add(v.life)
		outsideEnd := burstEnd.Add(c.cfg.PolicyLag)
		if v.outside && at <= outsideEnd {
			if !c.hasOutside || outsideEnd > c.outsideUntil {
				c.outsideUntil = outsideEnd
			}
			c.hasOutside = true
		}
		c.class = c.class.with(&v, at <= burstEnd, at <= slackEnd)
		for _, end := range [...]grant.Instant{burstEnd, slackEnd, outsideEnd} {
			if at <= end {
				c.nextExpiry = min(c.nextExpiry, end)
			}
		}
		if at <= slackEnd || v.outside && at <= outsideEnd {
			kept = append(kept, v)
		}
	}
	c.live = kept
}

// Admit counts an admission of cost >= 0 units at the instant, which is not
// before the one of the last call (else ErrOrder). A refused call changes
// nothing; ErrOverflow is final.
func (c *Checker) Admit(at grant.Instant, cost grant.Units) error {
	if c.err != nil {
		return c.err
	}
	if cost < 0 {
		return fmt.Errorf("bounds: admission at %d: cost %d; allowed: 0 or more units", at, cost)
	}
	if err := c.Advance(at); err != nil {
		return err
	}
	if cost > grant.MaxUnits-c.usedInt-c.outsideUnits {
		c.err = fmt.Errorf("units admitted until %d: %w", at, ErrOverflow)
		return c.err
	}
	c.admissions++
	if c.hasOutside && at <= c.outsideUntil {
		c.outside++
		c.outsideUnits += cost
		return nil
	}
	var x exact
	c.start(at, x.sub(c.accrued, c.used), &x)
	c.usedInt += cost
	c.used = x.add(c.used, x.times(c.den, uint64(cost)))
	c.judge(at, x.sub(c.accrued, c.used), &x)
	if x.overflow {
		c.err = fmt.Errorf("excess of the admission at %d: %w", at, ErrOverflow)
	}
	return c.err
}

// start makes the admission at the instant a start, with phi just before it.
func (c *Checker) start(at grant.Instant, phi wide, x *exact) {
	n := len(c.segments)
	if n == 0 || c.segments[n-1].class != c.class {
		c.segments = append(c.segments, segment{class: c.class, most: phi, start: at, used: c.usedInt, allow: c.allowance(c.class, x)})
		n++
	} else if phi.cmp(c.segments[n-1].most) < 0 {
		return
	}
	top := &c.segments[n-1]
	top.most, top.start, top.used = phi, at, c.usedInt
	for n > 1 && c.segments[n-2].most.cmp(phi) <= 0 {
		// The older start has admitted no more above the rate and is allowed no less.
		c.segments[n-2] = c.segments[n-1]
		n--
	}
	c.segments = c.segments[:n]
	if c.tight >= n-1 || c.room(n-1, x).cmp(c.room(c.tight, x)) < 0 {
		c.tight = n - 1
	}
}

// judge compares the intervals that end with the last admission.
func (c *Checker) judge(at grant.Instant, phi wide, x *exact) {
	room := x.add(c.room(c.tight, x), phi)
	if !c.judged || room.cmp(c.worstRoom) < 0 {
		c.worstRoom = room
		c.worst = c.interval(c.tight, at)
	}
	if over := x.sub(c.segments[0].most, phi); !c.judged || over.cmp(c.excessMax) > 0 {
		c.excessMax = over
		c.excess = c.interval(0, at)
	}
	c.judged = true
}

func (c *Checker) interval(i int, end grant.Instant) Interval {
	s := &c.segments[i]
	beyond, ok := unitsFloor(s.allow, c.den)
	return Interval{Start: s.start, End: end, Admitted: c.usedInt - s.used, Beyond: saturate(beyond, ok)}
}

// Check tests the invariants of the type.
func (c *Checker) Check() error {
	if c.err != nil {
		return nil
	}
	if c.den.cmp(wide{}) <= 0 {
		return fmt.Errorf("bounds: invariant 1: the denominator is %v", c.den)
	}
	var x exact
	for i := range c.segments {
		if i > 0 {
			a, b := c.segments[i-1], c.segments[i]
			if a.most.cmp(b.most) <= 0 || a.burst < b.burst || a.slack < b.slack || a.perNS.cmp(b.perNS) < 0 {
				return fmt.Errorf("bounds: invariant 2: segments %d and %d: %+v, %+v", i-1, i, a, b)
			}
		}
		if c.room(i, &x).cmp(c.room(c.tight, &x)) < 0 {
			return fmt.Errorf("bounds: invariant 3: segment %d has less room than segment %d", i, c.tight)
		}
	}
	if len(c.future) == 0 && (len(c.live) == 0 || c.live[len(c.live)-1].until != grant.Never) {
		return fmt.Errorf("bounds: invariant 4: no version is in force")
	}
	return nil
}
