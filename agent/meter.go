package agent

import (
	"math/bits"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// meter estimates demand in units per second: a store that every asked unit
// fills and that drains to 1/e in a second, so that its level is the rate of a
// steady demand. Integers, because the size of a request must not depend on the
// machine's floating point.
type meter struct {
	level Units
	carry int64 // nanounits that have drained already
	at    grant.Instant
}

// add brings the level to now and puts u units in.
func (m *meter) add(now grant.Instant, u Units) {
	u = min(max(u, 0), grant.MaxQuantum)
	switch dt := now.Sub(m.at); {
	case dt > time.Second: // nothing was seen of how u came in: evenly
		m.level, m.carry = scaleFloor(u, time.Second, dt), 0
		m.at = now
		return
	case dt > 0:
		var drained Units
		drained, m.carry = grant.Rate{Units: m.level, Per: time.Second}.AccrueFloor(dt, m.carry)
		m.level -= drained
		m.at = now
	}
	m.level = min(m.level+u, grant.MaxQuantum)
}

// over is the demand of d, at most MaxQuantum, rounded down.
func (m *meter) over(d time.Duration) Units {
	return min(scaleFloor(m.level, d, time.Second), grant.MaxQuantum)
}

// scaleFloor is u*num/den rounded down, saturated at MaxUnits; u, num >= 0, den > 0.
func scaleFloor(u Units, num, den time.Duration) Units {
	hi, lo := bits.Mul64(uint64(u), uint64(num))
	if hi >= uint64(den) {
		return grant.MaxUnits
	}
	q, _ := bits.Div64(hi, lo, uint64(den))
	return Units(min(q, uint64(grant.MaxUnits)))
}

// addUnits is a+b, saturated; both >= 0.
func addUnits(a, b Units) Units {
	if b > grant.MaxUnits-a {
		return grant.MaxUnits
	}
	return a + b
}

// heat tells hot from cold: more than perSecond requests within one second
// make it hot, no such second for one ttl makes it cold.
type heat struct {
	hot    bool
	ring   []grant.Instant // cold: the last perSecond requests
	next   int
	window grant.Instant // hot: when counting began
	count  int           // requests since window
	busy   grant.Instant // hot: the last instant that ended a second of too many
}

// one counts a request that was seen itself. perSecond is Config.HotPerSecond.
func (h *heat) one(now grant.Instant, perSecond int) {
	if h.hot {
		h.many(now, 1, perSecond)
		return
	}
	if len(h.ring) == perSecond {
		if perSecond == 0 || now.Sub(h.ring[h.next]) < time.Second {
			*h = heat{hot: true, window: now, busy: now}
			return
		}
		h.ring[h.next] = now
		h.next = (h.next + 1) % perSecond
		return
	}
	h.ring = append(h.ring, now)
}

// many counts n requests that came since the last look.
func (h *heat) many(now grant.Instant, n, perSecond int) {
	if !h.hot {
		return
	}
	h.count += n
	age := max(now.Sub(h.window), time.Second)
	switch {
	case Units(h.count) > scaleFloor(Units(perSecond), age, time.Second):
		h.busy, h.window, h.count = now, now, 0
	case now.Sub(h.window) >= time.Second:
		h.window, h.count = now, 0
	}
}

// cools is when the heat ends unless it is renewed.
func (h *heat) cools(ttl time.Duration) grant.Instant {
	if !h.hot {
		return grant.Never
	}
	return h.busy.Add(max(ttl, time.Second))
}

// cool ends the heat when its time is over, and reports whether it did.
func (h *heat) cool(now grant.Instant, ttl time.Duration) bool {
	if !h.hot || now < h.cools(ttl) {
		return false
	}
	*h = heat{}
	return true
}

// backlog spreads the Retry-After of local denials: what was denied waits, in
// thought, in one queue that drains at the tenant's rate.
type backlog struct {
	units Units
	carry int64
	at    grant.Instant
}

// longestSpread caps the backlog, so that one caller in a loop does not send
// everybody else away for long.
const longestSpread = 30 * time.Second

// join adds a denied price and says after how long the queue will have drained
// through it: more than zero, at most longestSpread. ok is false at rate zero.
func (b *backlog) join(now grant.Instant, price Units, r grant.Rate) (d time.Duration, ok bool) {
	if r.Zero() {
		*b = backlog{at: now}
		return 0, false
	}
	var drained Units
	drained, b.carry = r.AccrueFloor(now.Sub(b.at), b.carry)
	b.at = now
	if drained >= b.units {
		b.units, b.carry = 0, 0
	} else {
		b.units -= drained
	}
	full, _ := r.AccrueFloor(longestSpread, 0)
	b.units = min(addUnits(b.units, price), max(full, price))
	d, fits := r.DurationCeil(b.units, b.carry)
	if !fits || d > longestSpread {
		d = longestSpread
	}
	return d, true
}
