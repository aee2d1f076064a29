package authority

import (
	"math"
	"math/big"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stipend/stipend/proto/grant"
)

// TestBucketAgainstRationals: over any run of refills and spends the integer
// bucket holds floor(exact level), the carry being the rest.
func TestBucketAgainstRationals(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rate := grant.Rate{
			Units: grant.Units(rapid.OneOf(rapid.Int64Range(0, 1000), rapid.Just[int64](math.MaxInt64), rapid.Int64Range(1, math.MaxInt64)).Draw(t, "units")),
			Per:   time.Duration(rapid.OneOf(rapid.SampledFrom([]int64{1, 1e6, 1e9, 30e9, 1e18}), rapid.Int64Range(1, 1e18)).Draw(t, "per")),
		}
		burst := grant.Units(rapid.OneOf(rapid.Int64Range(0, 100), rapid.Just[int64](math.MaxInt64)).Draw(t, "burst"))
		b := bucket{level: burst}
		exact := new(big.Rat).SetInt64(int64(burst))
		limit := new(big.Rat).SetInt64(int64(burst))
		r := new(big.Rat)
		if rate.Units > 0 {
			r.SetFrac64(int64(rate.Units), int64(rate.Per))
		}
		now := grant.Instant(0)
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			dt := rapid.OneOf(rapid.Int64Range(-1e9, 1e9), rapid.Int64Range(0, 1e15)).Draw(t, "dt")
			at := now + grant.Instant(dt)
			b.refill(at, rate, burst)
			if at > now {
				now = at
				exact.Add(exact, new(big.Rat).Mul(r, new(big.Rat).SetInt64(dt)))
				if exact.Cmp(limit) > 0 {
					exact.Set(limit)
				}
			}
			have := new(big.Rat).SetInt64(int64(b.level))
			if rate.Units > 0 {
				have.Add(have, new(big.Rat).SetFrac64(b.carry, int64(rate.Per)))
			}
			if have.Cmp(exact) != 0 {
				t.Fatalf("level %d + %d/%d, exact %s", b.level, b.carry, rate.Per, exact.RatString())
			}
			spend := grant.Units(rapid.Int64Range(0, int64(b.level)).Draw(t, "spend"))
			b.level -= spend
			exact.Sub(exact, new(big.Rat).SetInt64(int64(spend)))

			// until says exactly when the next unit is there.
			if want := b.level + 1; b.level < burst {
				if d, ok := b.until(want, rate); ok && d < math.MaxInt64/2-time.Duration(now) && d > 0 {
					early, late := b, b
					early.refill(now+grant.Instant(d)-1, rate, burst)
					late.refill(now+grant.Instant(d), rate, burst)
					if early.level >= want || late.level < want {
						t.Fatalf("until(%d) = %v: level %d before, %d then", want, d, early.level, late.level)
					}
				}
			}
		}
	})
}

// TestBucketChangeNeverAdds: a change of rate and burst raises neither the level
// nor the fraction carried.
func TestBucketChangeNeverAdds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		from := grant.Rate{Units: 1, Per: time.Duration(rapid.Int64Range(1, 1e18).Draw(t, "from"))}
		to := grant.Rate{Units: 1, Per: time.Duration(rapid.Int64Range(1, 1e18).Draw(t, "to"))}
		b := bucket{level: grant.Units(rapid.Int64Range(0, 100).Draw(t, "level"))}
		b.carry = rapid.Int64Range(0, int64(from.Per)-1).Draw(t, "carry")
		before := new(big.Rat).SetFrac64(b.carry, int64(from.Per))
		level := b.level
		burst := grant.Units(rapid.Int64Range(0, 200).Draw(t, "burst"))
		b.change(from, to, burst)
		if b.level > level || b.level > burst || b.carry < 0 || b.carry >= int64(to.Per) {
			t.Fatalf("level %d -> %d of %d, carry %d of %d", level, b.level, burst, b.carry, to.Per)
		}
		if after := new(big.Rat).SetFrac64(b.carry, int64(to.Per)); after.Cmp(before) > 0 {
			t.Fatalf("carry grew from %s to %s", before.RatString(), after.RatString())
		}
	})
}

// TestGrantLifeCoversTheAgent: the agent's ttl, counted by a clock that runs
// slow by rho from an earlier instant, ends before the authority's, counted by a
// clock that runs fast by rho.
func TestGrantLifeCoversTheAgent(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := DefaultConfig()
		cfg.RhoPPB = rapid.Int64Range(0, 10_000_000).Draw(t, "rho")
		ttl := rapid.Int64Range(int64(grant.MinTTL), int64(grant.MaxTTL)).Draw(t, "ttl")
		one := big.NewRat(1, 1)
		rho := big.NewRat(cfg.RhoPPB, 1e9)
		agent := new(big.Rat).Quo(big.NewRat(ttl, 1), new(big.Rat).Sub(one, rho)) // real time the agent takes at most
		center := new(big.Rat).Quo(big.NewRat(int64(cfg.GrantLife(time.Duration(ttl))-cfg.Tolerance), 1), new(big.Rat).Add(one, rho))
		if center.Cmp(agent) < 0 {
			t.Fatalf("ttl %v at rho %d: the agent may spend for %s ns, the authority waits %s", ttl, cfg.RhoPPB, agent.FloatString(3), center.FloatString(3))
		}
	})
}
