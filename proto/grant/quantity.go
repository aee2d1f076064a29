package grant

import (
	"fmt"
	"math"
	"math/bits"
	"time"
)

// Units is the integer currency: a request of route class c costs cost(c).
// Never a float, never negative in a policy, a record or a message.
type Units int64

// MaxUnits is the largest quantity.
const MaxUnits Units = math.MaxInt64

// Instant is a reading of some clock in nanoseconds from that clock's own
// origin. Which clock is said where the value is kept; instants of different
// clocks are never compared.
type Instant int64

// Never is later than every instant that a clock shows.
const Never Instant = math.MaxInt64

// Sub is i-j, saturated at the ends of time.Duration.
func (i Instant) Sub(j Instant) time.Duration {
	d := i - j
	if (i < j) != (d < 0) { // overflow
		if i < j {
			return math.MinInt64
		}
		return math.MaxInt64
	}
	return time.Duration(d)
}

// Add is i+d, saturated at Never.
func (i Instant) Add(d time.Duration) Instant {
	s := i + Instant(d)
	if d > 0 && s < i {
		return Never
	}
	if d < 0 && s > i {
		return math.MinInt64
	}
	return s
}

// Rate is a rational number of units per time: Units per Per. The zero value
// is "no units, ever". A valid rate has Units >= 0, and Per >= 1 ns unless
// Units is 0.
type Rate struct {
	Units Units
	Per   time.Duration
}

// Zero reports whether the rate brings no units, ever.
func (r Rate) Zero() bool { return r.Units == 0 }

func (r Rate) String() string {
	if r.Zero() {
		return "0"
	}
	return fmt.Sprintf("%d per %v", r.Units, r.Per)
}

// PerSecond is the rate in units per second, for people and plots only.
func (r Rate) PerSecond() float64 {
	if r.Zero() {
		return 0
	}
	return float64(r.Units) / r.Per.Seconds()
}

// AccrueFloor is what accrues in dt, given carry/Per units left over from
// before: whole units rounded down and the new carry, 0 <= carry < Per. The
// product is taken in 128 bits; what exceeds MaxUnits is MaxUnits with carry 0.
// dt <= 0 accrues nothing and keeps the carry.
func (r Rate) AccrueFloor(dt time.Duration, carry int64) (whole Units, newCarry int64) {
	if r.Zero() || dt <= 0 {
		return 0, carry
	}
	hi, lo := bits.Mul64(uint64(r.Units), uint64(dt))
	lo, c := bits.Add64(lo, uint64(carry), 0)
	hi += c
	if hi >= uint64(r.Per) {
		return MaxUnits, 0
	}
	q, rem := bits.Div64(hi, lo, uint64(r.Per))
	if q > uint64(MaxUnits) {
		return MaxUnits, 0
	}
	return Units(q), int64(rem)
}

// DurationCeil is the shortest time in which u units accrue, given carry/Per
// units left over, rounded up to a nanosecond. ok is false when they never do:
// the rate is zero or the time exceeds time.Duration. u <= 0 takes no time.
func (r Rate) DurationCeil(u Units, carry int64) (d time.Duration, ok bool) {
	if u <= 0 {
		return 0, true
	}
	if r.Zero() {
		return 0, false
	}
	hi, lo := bits.Mul64(uint64(u), uint64(r.Per))
	lo, b := bits.Sub64(lo, uint64(carry), 0)
	hi -= b
	lo, c := bits.Add64(lo, uint64(r.Units-1), 0)
	hi += c
	if hi >= uint64(r.Units) {
		return 0, false
	}
	q, _ := bits.Div64(hi, lo, uint64(r.Units))
	if q > math.MaxInt64 {
		return 0, false
	}
	return time.Duration(q), true
}

// MulUnits is a*b for non-negative factors; ok is false on overflow.
func MulUnits(a, b Units) (p Units, ok bool) {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	return Units(lo), hi == 0 && lo <= uint64(MaxUnits)
}
