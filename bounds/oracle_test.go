package bounds

import (
	"math/big"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// oracle is the definition of the bound, tried on every pair of admissions in
// rationals of any size. It shares no arithmetic with Checker.
type oracle struct {
	cfg     Config
	changes []oracleChange
	events  []event
}

type oracleChange struct {
	at     grant.Instant
	policy *grant.Policy
}

type event struct {
	at   grant.Instant
	cost grant.Units
}

type oracleVerdict struct {
	judged  bool
	room    *big.Rat // least allowed - admitted
	excess  *big.Rat // most admitted - integral
	outside grant.Units
}

func (o *oracle) accounts(p *grant.Policy) []grant.Account {
	if p == nil {
		return nil
	}
	var out []grant.Account
	if o.cfg.Scope != EmergencyOnly {
		out = append(out, p.Account(false))
	}
	if o.cfg.Scope != OrdinaryOnly && p.Emergency != nil {
		out = append(out, p.Account(true))
	}
	return out
}

func (o *oracle) rate(p *grant.Policy) *big.Rat {
	sum := new(big.Rat)
	for _, a := range o.accounts(p) {
		if a.Rate.Units > 0 {
			r := big.NewRat(int64(a.Rate.Units), int64(a.Rate.Per))
			sum.Add(sum, r.Mul(r, big.NewRat(1e9+o.cfg.RhoPPB, 1e9)))
		}
	}
	return sum
}

func (o *oracle) burst(p *grant.Policy) *big.Rat {
	sum := new(big.Rat)
	for _, a := range o.accounts(p) {
		sum.Add(sum, big.NewRat(int64(a.Burst), 1))
	}
	return sum
}

func (o *oracle) slack(p *grant.Policy) *big.Rat {
	sum := new(big.Rat)
	for _, a := range o.accounts(p) {
		sum.Add(sum, big.NewRat(int64(a.Grant.Quantum)*int64(a.Grant.Owners), 1))
	}
	return sum
}

// life is ttl*(1+2*rho)/(1-rho)+tolerance, rounded up before the tolerance.
func (o *oracle) life(p *grant.Policy) time.Duration {
	var most int64
	for _, a := range o.accounts(p) {
		if a.Grant.Quantum > 0 && a.Grant.Owners > 0 {
			n := new(big.Int).Mul(big.NewInt(int64(a.Grant.TTL)), big.NewInt(1e9+2*o.cfg.RhoPPB))
			d := big.NewInt(1e9 - o.cfg.RhoPPB)
			n.Add(n, d).Sub(n, big.NewInt(1))
			most = max(most, n.Div(n, d).Int64()+int64(o.cfg.Tolerance))
		}
	}
	return time.Duration(most)
}

func num(i grant.Instant) *big.Int { return big.NewInt(int64(i)) }

func plus(i grant.Instant, ds ...time.Duration) *big.Int {
	n := num(i)
	for _, d := range ds {
		n.Add(n, big.NewInt(int64(d)))
	}
	return n
}

func bigMax(a, b *big.Rat) *big.Rat {
	if a.Cmp(b) >= 0 {
		return a
	}
	return b
}

// until is the end of change i, nil if it has none.
func (o *oracle) until(i int) *grant.Instant {
	if i+1 < len(o.changes) {
		return &o.changes[i+1].at
	}
	return nil
}

// allowed is what the interval from s to e may admit, and its integral alone;
// ok is false if it touches time outside the bound.
func (o *oracle) allowed(s, e grant.Instant) (all, integral *big.Rat, ok bool) {
	integral = new(big.Rat)
	burst, rate, slack := new(big.Rat), new(big.Rat), new(big.Rat)
	skew, reach := o.cfg.Skew, o.cfg.D+o.cfg.Skew
	for i, c := range o.changes {
		until := o.until(i)
		inForce := func(back ...time.Duration) bool {
			return plus(c.at, -skew).Cmp(num(e)) <= 0 && (until == nil || plus(*until, back...).Cmp(num(s)) >= 0)
		}
		if c.policy != nil && c.policy.Mode != grant.Enforce && inForce(reach, o.cfg.PolicyLag) {
			return nil, nil, false
		}
		if inForce(reach) {
			burst, rate = bigMax(burst, o.burst(c.policy)), bigMax(rate, o.rate(c.policy))
		}
		if inForce(reach, o.life(c.policy)) {
			slack = bigMax(slack, o.slack(c.policy))
		}
		from, to := max(c.at, s), e
		if until != nil {
			to = min(to, *until)
		}
		if from < to {
			length := new(big.Int).Sub(num(to), num(from))
			integral.Add(integral, new(big.Rat).Mul(o.rate(c.policy), new(big.Rat).SetInt(length)))
		}
	}
	all = new(big.Rat).Add(integral, burst)
	all.Add(all, slack)
	all.Add(all, rate.Mul(rate, new(big.Rat).SetInt64(int64(reach))))
	return all, integral, true
}

func (o *oracle) verdict() oracleVerdict {
	var v oracleVerdict
	var inside []event
	for _, a := range o.events {
		if _, _, ok := o.allowed(a.at, a.at); ok {
			inside = append(inside, a)
		} else {
			v.outside += a.cost
		}
	}
	for i := range inside {
		if i > 0 && inside[i-1].at == inside[i].at {
			continue
		}
		admitted := new(big.Rat)
		for k := i; k < len(inside); k++ {
			admitted.Add(admitted, new(big.Rat).SetInt64(int64(inside[k].cost)))
			if k+1 < len(inside) && inside[k+1].at == inside[k].at {
				continue // closed: all of the same instant
			}
			all, integral, ok := o.allowed(inside[i].at, inside[k].at)
			if !ok {
				continue
			}
			room := all.Sub(all, admitted)
			excess := new(big.Rat).Sub(admitted, integral)
			if !v.judged || room.Cmp(v.room) < 0 {
				v.room = room
			}
			if !v.judged || excess.Cmp(v.excess) > 0 {
				v.excess = excess
			}
			v.judged = true
		}
	}
	return v
}

// compare says how the checker's verdict differs from the definition, or "".
func (o *oracle) compare(c *Checker) string {
	want := o.verdict()
	got, err := c.Verdict()
	if err != nil {
		return err.Error()
	}
	if got.OutsideUnits != want.outside {
		return "units outside the bound differ"
	}
	if c.judged != want.judged {
		return "one judged something, the other nothing"
	}
	if !want.judged {
		return ""
	}
	if room := wideRat(c.worstRoom, c.den); room.Cmp(want.room) != 0 {
		return "room: got " + room.String() + ", want " + want.room.String()
	}
	if excess := wideRat(c.excessMax, c.den); excess.Cmp(want.excess) != 0 {
		return "excess: got " + excess.String() + ", want " + want.excess.String()
	}
	if got.Held != (want.room.Sign() >= 0) {
		return "held differs"
	}
	// The interval that is named must be as bad as it is said to be.
	all, _, ok := o.allowed(got.Worst.Start, got.Worst.End)
	if !ok {
		return "the worst interval touches time outside the bound"
	}
	admitted := new(big.Rat)
	for _, a := range o.events {
		if _, _, ok := o.allowed(a.at, a.at); ok && a.at >= got.Worst.Start && a.at <= got.Worst.End {
			admitted.Add(admitted, new(big.Rat).SetInt64(int64(a.cost)))
		}
	}
	if admitted.Cmp(new(big.Rat).SetInt64(int64(got.Worst.Admitted))) != 0 {
		return "the worst interval admitted " + admitted.String()
	}
	if room := new(big.Rat).Sub(all, admitted); room.Cmp(want.room) != 0 {
		return "the worst interval has room " + room.String() + ", want " + want.room.String()
	}
	floor := new(big.Int).Div(all.Num(), all.Denom())
	if floor.IsInt64() && floor.Int64() != int64(got.Worst.Allowed) || !floor.IsInt64() && got.Worst.Allowed != grant.MaxUnits {
		return "allowed differs: want " + floor.String()
	}
	return ""
}

func wideInt(w wide) *big.Int {
	n := new(big.Int)
	for i := 3; i >= 0; i-- {
		n.Lsh(n, 64).Or(n, new(big.Int).SetUint64(w[i]))
	}
	if w.negative() {
		n.Sub(n, new(big.Int).Lsh(big.NewInt(1), 256))
	}
	return n
}

func wideRat(a, b wide) *big.Rat { return new(big.Rat).SetFrac(wideInt(a), wideInt(b)) }
