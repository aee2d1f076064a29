package bounds

import (
	"fmt"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// Interval is a closed interval that starts and ends with an admission.
type Interval struct {
	Start, End grant.Instant
	Admitted   grant.Units // in it, both ends included
	Allowed    grant.Units // rounded down; MaxUnits stands for that or more
	// Beyond is the part of Allowed that does not grow with the interval, B +
	// N*q + (D+Skew)*r, rounded down; MaxUnits stands for that or more.
	Beyond grant.Units
}

// Length is the time from the first admission to the last.
func (i Interval) Length() time.Duration { return i.End.Sub(i.Start) }

func (i Interval) String() string {
	return fmt.Sprintf("%v from %d to %d: admitted %d, allowed %d", i.Length(), i.Start, i.End, i.Admitted, i.Allowed)
}

// Verdict is what a Checker found.
type Verdict struct {
	Held bool
	// Worst is the interval with the least room, Allowed - Admitted, and the
	// first of them: broken if Admitted is more. Zero if nothing was judged.
	Worst Interval
	// Excess is the most that any interval admitted over the integral of
	// r*(1+rho), rounded up, at least 0: to be compared with B + N*q, or under
	// D or Skew with ExcessIn.Beyond.
	Excess   grant.Units
	ExcessIn Interval // where; Allowed is not set

	First, Last grant.Instant // span of the admissions and of Advance
	Admissions  uint64        // all of them
	Admitted    grant.Units   // judged
	// Of the admissions, those in time under mode off or shadow.
	Outside      uint64
	OutsideUnits grant.Units
	// Accrued is the integral of r (rho and time outside left out) over the
	// span, rounded down; MaxUnits stands for that or more.
	Accrued grant.Units
	// UtilisationPPM is Admitted/Accrued in parts per million, rounded down.
	// The burst counts, so a short span may exceed 1,000,000. Negative: there
	// is none, for nothing accrued.
	UtilisationPPM int64
}

// Over is by how many units the worst interval exceeds what is allowed, at least 0.
func (v Verdict) Over() grant.Units { return max(0, v.Worst.Admitted-v.Worst.Allowed) }

func (v Verdict) String() string {
	word := "held"
	if !v.Held {
		word = fmt.Sprintf("broken by %s", units(v.Over()))
	}
	return fmt.Sprintf("%s; worst interval %v; largest excess over r*T %d", word, v.Worst, v.Excess)
}

// Verdict is the state so far; it may be asked at any time. The error is the
// ErrOverflow that ended the judgement.
func (c *Checker) Verdict() (Verdict, error) {
	if c.err != nil {
		return Verdict{}, c.err
	}
	v := Verdict{
		Held: true, UtilisationPPM: -1, Admissions: c.admissions, Admitted: c.usedInt,
		Outside: c.outside, OutsideUnits: c.outsideUnits,
	}
	if c.started {
		v.First, v.Last = c.first, c.last
	}
	var x exact
	if c.judged {
		room, ok := unitsFloor(c.worstRoom, c.den)
		v.Held = !c.worstRoom.negative()
		v.Worst, v.ExcessIn = c.worst, c.excess
		v.Worst.Allowed = grant.MaxUnits
		if ok && room <= grant.MaxUnits-v.Worst.Admitted {
			v.Worst.Allowed = v.Worst.Admitted + room
		}
		if !c.excessMax.negative() {
			v.Excess = saturate(unitsCeil(c.excessMax, c.den))
		}
	}
	if !c.accrued.zero() {
		withoutRho := x.times(c.accrued, billion)
		over := x.times(c.den, uint64(billion+c.cfg.RhoPPB))
		v.Accrued = saturate(unitsFloor(withoutRho, over))
		ppm, ok := unitsFloor(x.times(x.times(c.used, uint64(billion+c.cfg.RhoPPB)), 1_000_000), withoutRho)
		v.UtilisationPPM = int64(saturate(ppm, ok))
	}
	if x.overflow {
		return Verdict{}, fmt.Errorf("utilisation: %w", ErrOverflow)
	}
	return v, nil
}
