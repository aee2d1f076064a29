package authority

import (
	"math/bits"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// bucket is a token bucket in integers. carry is what accrued beyond whole
// units, in 1/Per of a unit, so that floor rounding loses nothing over time.
type bucket struct {
	level grant.Units
	carry int64
	last  grant.Instant // ledger time of the last refill
}

// refill brings the bucket to now at the given rate and says how many units
// came in. A now before the last one changes nothing: time is clamped at the
// door, so that no instant is ever credited twice.
func (b *bucket) refill(now grant.Instant, rate grant.Rate, burst grant.Units) (added grant.Units) {
	if now <= b.last {
		return 0
	}
	whole, carry := rate.AccrueFloor(now.Sub(b.last), b.carry)
	b.last = now
	room := burst - b.level
	if whole >= room {
		b.level, b.carry = burst, 0
		return room
	}
	b.level += whole
	b.carry = carry
	return whole
}

// change moves the bucket from one rate and burst to another. It was refilled
// at the old rate to now. Raising the burst adds nothing at once.
func (b *bucket) change(from, to grant.Rate, burst grant.Units) {
	b.level = min(b.level, burst)
	switch {
	case to.Zero() || from.Zero() || b.level == burst:
		b.carry = 0
	case from.Per != to.Per:
		hi, lo := bits.Mul64(uint64(b.carry), uint64(to.Per))
		q, _ := bits.Div64(hi, lo, uint64(from.Per)) // carry < from.Per: fits
		b.carry = int64(q)
	}
}

// until is the time from b.last until the level is at least want; ok is false
// when it never is.
func (b *bucket) until(want grant.Units, rate grant.Rate) (d time.Duration, ok bool) {
	return rate.DurationCeil(want-b.level, b.carry)
}
