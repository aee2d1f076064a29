package bounds

import (
	"fmt"
	"strings"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// FullPromisePPM is the utilisation that a policy meeting all conditions gets:
// 97 % of r*T for T >= 10 ttl, in parts per million.
const FullPromisePPM = 970_000

// Promise says which share of its rate a saturating tenant gets.
type Promise struct {
	// Given is false when no share is promised at all: a rate or burst of zero,
	// or no grants, where no unit can be lost but the rate reached depends on
	// how many Checks the authority serves.
	Given bool
	// PPM is 1 - N*q/(r*ttl) in parts per million, rounded down, 0 to 1,000,000.
	PPM int64
	// The three conditions of the 97 % promise.
	SlackFits bool // N*q <= 0.03*r*ttl
	Covers    bool // min(q,B) >= 2*r*(round trip + commit)
	// Dear names the classes that grants cannot pay (cost > min(q,B)), classes
	// marked central excepted.
	Dear []grant.RouteClass
}

// Full reports whether the 97 % promise holds for every class that is not
// marked central.
func (p Promise) Full() bool { return p.Given && p.SlackFits && p.Covers && len(p.Dear) == 0 }

// PromiseOf judges a valid policy, for a time of one round trip to the
// authority and one commit there.
func PromiseOf(p *grant.Policy, roundTripPlusCommit time.Duration) Promise {
	r, g := p.Rate, p.Grant
	if r.Zero() || p.Burst == 0 || !g.Enabled() {
		return Promise{}
	}
	out := Promise{Given: true, PPM: utilisationPPM(r, g)}
	var x exact // nothing overflows: the largest product is below 2^160
	slackPer := x.times(wideOf(uint64(g.Slack())), uint64(r.Per))
	earned := x.times(wideOf(uint64(r.Units)), uint64(g.TTL))
	out.SlackFits = x.times(slackPer, 100).cmp(x.times(earned, 3)) <= 0

	holds := min(g.Quantum, p.Burst)
	need := x.times(wideOf(uint64(r.Units)), uint64(max(roundTripPlusCommit, 0)))
	out.Covers = x.times(wideOf(uint64(holds)), uint64(r.Per)).cmp(x.times(need, 2)) >= 0
	for _, name := range p.ClassNames() {
		if c := p.Classes[name]; !c.Central && c.Cost > holds {
			out.Dear = append(out.Dear, name)
		}
	}
	return out
}

// utilisationPPM is 1 - N*q/(r*ttl), rounded down, at least 0.
func utilisationPPM(r grant.Rate, g grant.GrantSettings) int64 {
	var x exact
	lost := x.times(x.times(wideOf(uint64(g.Slack())), uint64(r.Per)), 1_000_000)
	ppm, ok := unitsCeil(lost, x.times(wideOf(uint64(r.Units)), uint64(g.TTL)))
	if !ok || ppm > 1_000_000 {
		return 0
	}
	return 1_000_000 - int64(ppm)
}

// Warnings says in sentences where a valid policy gets less than the full
// promise, in a fixed order; none means that the policy gets 97 % of its rate.
// For a policy that does not validate it lists the problems instead.
func Warnings(p *grant.Policy, roundTripPlusCommit time.Duration) []string {
	if p == nil {
		return []string{"no policy: nothing is admitted."}
	}
	var out []string
	for _, problem := range p.Validate() {
		out = append(out, problem.Error())
	}
	if len(out) > 0 {
		return out
	}
	say := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	switch p.Mode {
	case grant.Off:
		say("mode off: every request passes and nothing is deducted, so nothing is bounded until the mode is enforce.")
	case grant.Shadow:
		say("mode shadow: verdicts are recorded but every request passes, so nothing is bounded until the mode is enforce.")
	}
	switch {
	case p.Burst == 0:
		say("burst 0: the bucket can hold nothing, so every request that costs anything is refused.")
	case p.Rate.Zero() && p.Grant.Enabled():
		say("rate 0: nothing refills; the %s of the burst are all there is, and what expires in a gateway's wallet is lost for good (up to N*q = %s).",
			units(p.Burst), units(p.Grant.Slack()))
	case p.Rate.Zero():
		say("rate 0: nothing refills; the %s of the burst are all there is.", units(p.Burst))
	case p.Grant == (grant.GrantSettings{}):
		// Chosen: every request is checked, exactly. Cold tenants are many.
	case !p.Grant.Enabled():
		say("no grants (grant.quantum %d, grant.owners %d): every request is checked at the authority. N*q is 0 and no unit is stranded, "+
			"but no share of the rate is promised: it depends on how many checks the authority serves.", p.Grant.Quantum, p.Grant.Owners)
	default:
		warnPromise(p, roundTripPlusCommit, say)
	}
	warnEmergency(p, say)
	return out
}

func warnPromise(p *grant.Policy, rtt time.Duration, say func(string, ...any)) {
	g, promise := p.Grant, PromiseOf(p, rtt)
	holds := min(g.Quantum, p.Burst)
	if !promise.SlackFits {
		got := "no share of the rate is promised"
		if promise.PPM > 0 {
			got = fmt.Sprintf("the promise is %s of the rate instead of 97 %%", percent(promise.PPM))
		}
		say("grant: N*q = %d*%d = %s is more than 3 %% of what the rate brings in one ttl (%v): %s. A smaller quantum, fewer owners or a longer ttl raises it.",
			g.Owners, g.Quantum, units(g.Slack()), g.TTL, got)
	}
	if !promise.Covers {
		field := "grant.quantum"
		if p.Burst < g.Quantum {
			field = "burst"
		}
		promised := "the 97 % promise does not hold"
		if !promise.SlackFits {
			promised = "even that share is not promised"
		}
		need := "more units than there are"
		if n, ok := coverQuantum(p.Rate, rtt); ok {
			need = "at least " + units(n)
		}
		say("%s: min(quantum, burst) = %s does not last two round trips and commits (2*%v) at the full rate of %v: %s when one gateway carries the whole load. It takes %s.",
			field, units(holds), rtt, p.Rate, promised, need)
	}
	for _, name := range promise.Dear {
		say("classes.%s: its cost of %s is more than min(quantum, burst) = %s, so it is always checked at the authority and the promise does not cover it.",
			name, units(p.Classes[name].Cost), units(holds))
	}
}

func warnEmergency(p *grant.Policy, say func(string, ...any)) {
	e := p.Emergency
	if e == nil {
		return
	}
	used := false
	for _, c := range p.Classes {
		used = used || c.Emergency
	}
	switch {
	case !e.Grant.Enabled() || e.Burst == 0:
		say("emergency: a burst of %d, quantum of %d and %d owners hand out nothing in advance, so loss of the centre means 503.", e.Burst, e.Grant.Quantum, e.Grant.Owners)
		return
	case !used:
		say("emergency: no class is marked emergency, so nothing may spend the budget.")
	}
	if !e.Rate.Zero() {
		if ppm := utilisationPPM(e.Rate, e.Grant); ppm == 0 {
			say("emergency: the rate of %v does not bring N*q = %s within the ttl of %v, so not every gateway holds a full reserve all the time.",
				e.Rate, units(e.Grant.Slack()), e.Grant.TTL)
		}
	} else {
		say("emergency: rate 0: reserves that expire after %v are never replaced; %s are handed out once.", e.Grant.TTL, units(min(e.Burst, e.Grant.Slack())))
	}
}

// coverQuantum is the least min(q,B) for the 97 % promise: 2*r*rtt, up.
func coverQuantum(r grant.Rate, rtt time.Duration) (grant.Units, bool) {
	var x exact
	return unitsCeil(x.times(x.times(wideOf(uint64(r.Units)), uint64(rtt)), 2), wideOf(uint64(r.Per)))
}

func units(u grant.Units) string {
	if u == 1 {
		return "1 unit"
	}
	return fmt.Sprintf("%d units", u)
}

// percent writes parts per million as a percentage, rounded down to a hundredth.
func percent(ppm int64) string {
	s := fmt.Sprintf("%d.%02d", ppm/10_000, ppm%10_000/100)
	return strings.TrimSuffix(strings.TrimRight(s, "0"), ".") + " %"
}
