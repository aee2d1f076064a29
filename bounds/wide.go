package bounds

import (
	"errors"
	"math/bits"

	"github.com/stipend/stipend/proto/grant"
)

// ErrOverflow means that a figure does not fit the integers it is computed in.
// Nothing wraps: the figure is simply not known.
var ErrOverflow = errors.New("bounds: the numbers exceed what can be computed exactly")

const billion = 1_000_000_000

// wide is a signed integer of 256 bits in two's complement, low word first. A
// rate of 2^63-1 units per ns over the whole of time at a rho takes 158 bits,
// and the common denominator of two unlike rates up to 63 more, so 128 bits
// would refuse policies that load.
type wide [4]uint64

func wideOf(u uint64) wide { return wide{u} }

func (a wide) negative() bool { return a[3]>>63 == 1 }

func (a wide) zero() bool { return a == wide{} }

func (a wide) cmp(b wide) int {
	if a.negative() != b.negative() {
		if a.negative() {
			return -1
		}
		return 1
	}
	for i := 3; i >= 0; i-- {
		switch {
		case a[i] < b[i]:
			return -1
		case a[i] > b[i]:
			return 1
		}
	}
	return 0
}

// exact computes with wides and remembers whether anything overflowed; the
// results mean nothing once it did.
type exact struct{ overflow bool }

func (x *exact) add(a, b wide) wide {
	var s wide
	var c uint64
	for i := range s {
		s[i], c = bits.Add64(a[i], b[i], c)
	}
	if a.negative() == b.negative() && s.negative() != a.negative() {
		x.overflow = true
	}
	return s
}

func (x *exact) sub(a, b wide) wide {
	var s wide
	var c uint64
	for i := range s {
		s[i], c = bits.Sub64(a[i], b[i], c)
	}
	if a.negative() != b.negative() && s.negative() != a.negative() {
		x.overflow = true
	}
	return s
}

// times is a*u for a >= 0.
func (x *exact) times(a wide, u uint64) wide {
	var p wide
	var carry uint64
	for i := range a {
		hi, lo := bits.Mul64(a[i], u)
		var c uint64
		p[i], c = bits.Add64(lo, carry, 0)
		carry = hi + c
	}
	if carry != 0 || p.negative() {
		x.overflow = true
	}
	return p
}

// mul is a*b for a, b >= 0.
func (x *exact) mul(a, b wide) wide {
	var sum wide
	for i := 3; i >= 0; i-- {
		if sum[3] != 0 {
			x.overflow = true
		}
		sum = wide{0, sum[0], sum[1], sum[2]}
		x.overflow = x.overflow || sum.negative()
		sum = x.add(sum, x.times(a, b[i]))
	}
	return sum
}

// scale is a*f for any a and f >= 0.
func (x *exact) scale(a, f wide) wide {
	if !a.negative() {
		return x.mul(a, f)
	}
	return x.sub(wide{}, x.mul(x.sub(wide{}, a), f))
}

// divFloor is a/b rounded down and the rest, for a >= 0 and b > 0.
func (a wide) divFloor(b wide) (q, rest wide) {
	if b[1]|b[2]|b[3] == 0 {
		var r uint64
		for i := 3; i >= 0; i-- {
			q[i], r = bits.Div64(r, a[i], b[0])
		}
		return q, wideOf(r)
	}
	var x exact // cannot overflow: rest < b <= 2^255-1, and its double is compared unsigned
	for i := 255; i >= 0; i-- {
		rest = wide{
			rest[0]<<1 | a[i/64]>>(i%64)&1,
			rest[1]<<1 | rest[0]>>63,
			rest[2]<<1 | rest[1]>>63,
			rest[3]<<1 | rest[2]>>63,
		}
		if rest.negative() || rest.cmp(b) >= 0 {
			rest = x.sub(rest, b)
			q[i/64] |= 1 << (i % 64)
		}
	}
	return q, rest
}

// gcd is the greatest common divisor of a, b >= 0.
func gcd(a, b wide) wide {
	for !b.zero() {
		_, r := a.divFloor(b)
		a, b = b, r
	}
	return a
}

// unitsFloor is a/b rounded down towards minus infinity as units, for b > 0;
// ok is false when it does not fit.
func unitsFloor(a, b wide) (u grant.Units, ok bool) {
	var x exact
	if a.negative() {
		u, ok = unitsCeil(x.sub(wide{}, a), b)
		return -u, ok && !x.overflow
	}
	q, _ := a.divFloor(b)
	return grant.Units(q[0]), q[1]|q[2]|q[3] == 0 && q[0] <= uint64(grant.MaxUnits)
}

// unitsCeil is a/b rounded up, for a >= 0 and b > 0.
func unitsCeil(a, b wide) (u grant.Units, ok bool) {
	q, rest := a.divFloor(b)
	if !rest.zero() {
		var x exact
		q = x.add(q, wideOf(1))
	}
	return grant.Units(q[0]), q[1]|q[2]|q[3] == 0 && q[0] <= uint64(grant.MaxUnits)
}

// saturate turns a figure that is only reported into MaxUnits when it is more.
func saturate(u grant.Units, ok bool) grant.Units {
	if !ok {
		return grant.MaxUnits
	}
	return u
}

// fraction is num/den units per nanosecond in lowest terms, den > 0.
type fraction struct{ num, den wide }

// rateFraction is r*(1+rho).
func rateFraction(r grant.Rate, rhoPPB int64) fraction {
	if r.Zero() {
		return fraction{den: wideOf(1)}
	}
	var x exact // cannot overflow: both products are below 2^95
	num := x.times(wideOf(uint64(r.Units)), uint64(billion+rhoPPB))
	den := x.times(wideOf(uint64(r.Per)), billion)
	g := gcd(num, den)
	num, _ = num.divFloor(g)
	den, _ = den.divFloor(g)
	return fraction{num, den}
}

// plus is the sum of two fractions, in lowest terms.
func (f fraction) plus(g fraction, x *exact) fraction {
	den := lcm(f.den, g.den, x)
	ff, _ := den.divFloor(f.den)
	gf, _ := den.divFloor(g.den)
	num := x.add(x.mul(f.num, ff), x.mul(g.num, gf))
	if x.overflow || num.zero() {
		return fraction{den: wideOf(1)}
	}
	d := gcd(num, den)
	num, _ = num.divFloor(d)
	den, _ = den.divFloor(d)
	return fraction{num, den}
}

// lcm is the least common multiple of a, b > 0.
func lcm(a, b wide, x *exact) wide {
	f, _ := b.divFloor(gcd(a, b))
	return x.mul(a, f)
}
