package bounds

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// Question is what a planner wants to know beside the policy itself. Zero
// fields are not asked.
type Question struct {
	Over       []time.Duration // lengths T for which the largest A(T) is asked
	RoundTrip  time.Duration   // to the authority, one commit included
	Extra      grant.Units     // burst that gateways may add: asks for the largest q
	Alive      int             // gateways running: asks for the owners needed
	LostPerTTL int             // of them, lost or replaced within one ttl
}

// Row is one number of Table.
type Row struct {
	Name        string // short and stable, for scripts: "slack"
	Value       string // with its unit
	Formula     string
	Explanation string
}

// Table answers the question for a policy, as rows for people. rhoPPB and d
// are as in Envelope.
func Table(p *grant.Policy, rhoPPB int64, d time.Duration, q Question) ([]Row, error) {
	e := EnvelopeOf(p, rhoPPB, d)
	if err := e.Validate(); err != nil {
		return nil, err
	}
	if q.RoundTrip < 0 {
		return nil, fmt.Errorf("bounds: round trip: %v; allowed: 0s or more", q.RoundTrip)
	}
	var rows []Row
	add := func(name, value, formula, explanation string) {
		rows = append(rows, Row{name, value, formula, explanation})
	}
	orNone := func(d time.Duration, ok bool) string {
		if !ok {
			return "none"
		}
		return duration(d)
	}
	slackOf, mostOf := "N*q", "r*(1+rho)*(T+d) + B + N*q"
	if e.Emergency != (grant.Account{}) {
		slackOf, mostOf = "N*q + N_e*q_e", "(r+r_e)*(1+rho)*(T+d) + B + B_e + N*q + N_e*q_e"
	}
	add("slack", units(e.Slack()), slackOf, "what gateways may hold unspent; the burst grows by it")
	for _, t := range q.Over {
		m, err := e.Max(t)
		if err != nil {
			return nil, err
		}
		add("max("+duration(t)+")", units(m), mostOf, "most that any interval of this length admits")
	}
	if perSecond, ok := e.CoordinationPerSecond(); ok {
		add("coordination", strconv.FormatFloat(perSecond, 'g', 6, 64)+"/s", "r/q", "grants a second at full use")
	} else {
		add("coordination", "every request", "r/q", "no grants: each request is a check at the authority")
	}
	lasts, ok := e.GrantLasts()
	add("grant lasts", orNone(lasts, ok), "q/(r/N)", "how long a full grant serves one of N evenly loaded gateways")
	lost, refill, ok := e.DeployCost()
	add("deploy cost", units(lost), "N*q", "most that replacing every gateway at once burns")
	add("deploy time", orNone(refill, ok), "N*q/r", "time in which the bucket earns that again")
	if p != nil {
		promise := PromiseOf(p, q.RoundTrip)
		value := "none"
		if promise.Given {
			value = percent(promise.PPM)
		}
		add("utilisation", value, "1 - N*q/(r*ttl)", "share of the rate promised to a saturating tenant over 10 ttl or more")
		full := "no"
		if promise.Full() {
			full = "yes"
		}
		add("97 % promise", full, "N*q <= 0.03*r*ttl; min(q,B) >= 2*r*(round trip+commit); price <= min(q,B)", "whether all its conditions hold")
	}
	if q.Extra != 0 && p != nil {
		most, err := LargestQuantum(q.Extra, p.Grant.Owners)
		if err != nil {
			return nil, err
		}
		add("largest quantum", units(most), "floor(E/N)", fmt.Sprintf("largest q that adds at most %s to the burst", units(q.Extra)))
	}
	if q.Alive != 0 || q.LostPerTTL != 0 {
		n, err := OwnersNeeded(q.Alive, q.LostPerTTL)
		if err != nil {
			return nil, err
		}
		add("owners needed", strconv.Itoa(n), "alive + lost per ttl", "a lost gateway counts until its grants expire")
	}
	return rows, nil
}

// duration writes 1m0s as 1m, and 1h0m0s as 1h, as policy files do.
func duration(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}
