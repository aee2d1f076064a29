package grant

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Limits on the numbers of a policy.
const (
	// MaxQuantum is the largest q: a wallet keeps its balance in 40 bits.
	MaxQuantum Units = 1<<40 - 1
	MinTTL           = 100 * time.Millisecond
	MaxTTL           = 24 * time.Hour
)

// Mode says what a verdict does.
type Mode uint8

const (
	// Enforce refuses what the bucket cannot pay. It is the zero value, so that
	// a forgotten mode is the strict one.
	Enforce Mode = iota
	// Shadow decides and records as Enforce does, but lets every request pass.
	Shadow
	// Off lets every request pass and deducts nothing.
	Off
)

var modeNames = [...]string{"enforce", "shadow", "off"}

func (m Mode) String() string {
	if int(m) < len(modeNames) {
		return modeNames[m]
	}
	return fmt.Sprintf("mode(%d)", uint8(m))
}

// ParseMode reads what Mode.String writes.
func ParseMode(s string) (Mode, error) {
	if i := slices.Index(modeNames[:], s); i >= 0 {
		return Mode(i), nil
	}
	return 0, fmt.Errorf("mode: %q; allowed are %s", s, strings.Join(modeNames[:], ", "))
}

// Class is what one kind of operation costs and which paths it may take.
type Class struct {
	Cost      Units // price of one operation, >= 0; zero asks without spending
	Central   bool  // always checked at the authority
	Emergency bool  // may spend emergency grants after loss of the centre
}

// GrantSettings bound what gateways hold: at most Owners*Quantum units of the
// tenant are unspent in wallets or in flight. A zero Quantum or zero Owners
// means no grants: every request is checked at the authority.
type GrantSettings struct {
	Quantum Units         // q: most units one owner holds, 0 to MaxQuantum
	Owners  int           // N: 0 to MaxOwners
	TTL     time.Duration // life of a grant from the first sending of its request, MinTTL to MaxTTL
}

// Enabled reports whether the settings allow any grant.
func (g GrantSettings) Enabled() bool { return g.Quantum > 0 && g.Owners > 0 }

// Slack is N*q. The product fits: MaxQuantum*MaxOwners < 2^53.
func (g GrantSettings) Slack() Units { return g.Quantum * Units(g.Owners) }

// Emergency is a second bucket of the tenant, handed out in advance as grants
// that are usable only after loss of the centre. Its bound adds
// Rate*T + Burst + Owners*Quantum to the tenant's.
type Emergency struct {
	Rate  Rate
	Burst Units
	Grant GrantSettings
}

// Policy is what one tenant may use. Two policies with equal content may share
// one value: a Policy is never changed after it was validated.
type Policy struct {
	Plan      string // name of the plan it was made from, for people; may be empty
	Rate      Rate   // r
	Burst     Units  // B; 0 admits nothing that costs
	Classes   map[RouteClass]Class
	Grant     GrantSettings
	Emergency *Emergency // nil: none
	Mode      Mode
}

// Account is the part of a policy that one bucket follows: the ordinary one or
// the emergency one.
type Account struct {
	Rate  Rate
	Burst Units
	Grant GrantSettings
}

// Account returns the settings of the ordinary bucket, or of the emergency
// bucket; the latter is all zero (admits nothing) when the policy has none.
func (p *Policy) Account(emergency bool) Account {
	if !emergency {
		return Account{p.Rate, p.Burst, p.Grant}
	}
	if p.Emergency == nil {
		return Account{}
	}
	return Account{p.Emergency.Rate, p.Emergency.Burst, p.Emergency.Grant}
}

// Price is the cost of count operations of the class. ok is false when the
// class is unknown or the product exceeds MaxUnits; the reason tells which.
func (p *Policy) Price(c RouteClass, count Units) (price Units, class Class, why Reason) {
	class, known := p.Classes[c]
	if !known {
		return 0, class, UnknownRoute
	}
	price, fits := MulUnits(class.Cost, count)
	if !fits {
		return 0, class, CostExceedsBurst
	}
	return price, class, None
}

// DearestClass is the largest cost of one operation of any class.
func (p *Policy) DearestClass() Units {
	var most Units
	for _, c := range p.Classes {
		most = max(most, c.Cost)
	}
	return most
}

// Problem is one fault of a policy: which field, what was given, what is allowed.
type Problem struct {
	Field   string // path within the policy, as in its YAML form: "grant.ttl"
	Given   string
	Allowed string
}

func (p Problem) Error() string {
	return fmt.Sprintf("%s: %s; allowed: %s", p.Field, p.Given, p.Allowed)
}

// Validate lists every fault of the policy, in a fixed order; none means that
// the policy can be kept exactly.
func (p *Policy) Validate() []Problem {
	var out []Problem
	bad := func(field string, given any, allowed string) {
		out = append(out, Problem{field, fmt.Sprint(given), allowed})
	}
	if len(p.Plan) > MaxClassLen {
		bad("plan", fmt.Sprintf("%d bytes", len(p.Plan)), fmt.Sprintf("at most %d bytes", MaxClassLen))
	} else if p.Plan != "" && validText("plan", p.Plan, MaxClassLen) != nil {
		bad("plan", fmt.Sprintf("%q", p.Plan), "UTF-8 without control characters")
	}
	account := func(prefix string, r Rate, burst Units, g GrantSettings) {
		switch {
		case r.Units < 0:
			bad(prefix+"rate", r.Units, "0 or more units")
		case r.Units > 0 && r.Per <= 0:
			bad(prefix+"rate", fmt.Sprintf("%d units per %v", r.Units, r.Per), "a period of at least 1ns")
		}
		if burst < 0 {
			bad(prefix+"burst", burst, "0 or more units")
		}
		if g.Quantum < 0 || g.Quantum > MaxQuantum {
			bad(prefix+"grant.quantum", g.Quantum, fmt.Sprintf("0 to %d units", MaxQuantum))
		}
		if g.Owners < 0 || g.Owners > MaxOwners {
			bad(prefix+"grant.owners", g.Owners, fmt.Sprintf("0 to %d", MaxOwners))
		}
		if g.Enabled() && (g.TTL < MinTTL || g.TTL > MaxTTL) {
			bad(prefix+"grant.ttl", g.TTL, fmt.Sprintf("%v to %v", MinTTL, MaxTTL))
		}
	}
	account("", p.Rate, p.Burst, p.Grant)
	if e := p.Emergency; e != nil {
		account("emergency.", e.Rate, e.Burst, e.Grant)
	}
	if len(p.Classes) > MaxClasses {
		bad("classes", fmt.Sprintf("%d classes", len(p.Classes)), fmt.Sprintf("at most %d", MaxClasses))
	}
	for _, name := range p.ClassNames() {
		c, field := p.Classes[name], "classes."+string(name)
		if err := name.Validate(); err != nil {
			bad(field, string(name), fmt.Sprintf("1 to %d letters, digits, '-', '_' and '.'", MaxClassLen))
		}
		if c.Cost < 0 {
			bad(field+".cost", c.Cost, "0 or more units")
		} else if c.Cost > p.Burst && p.Burst > 0 {
			bad(field+".cost", c.Cost, fmt.Sprintf("at most the burst of %d units: a dearer request could never be admitted", p.Burst))
		}
		if c.Emergency && p.Emergency == nil {
			bad(field+".emergency", "true", "only in a policy that has an emergency budget")
		} else if e := p.Emergency; e != nil && c.Emergency && c.Cost > e.Grant.Quantum {
			bad(field+".cost", c.Cost, fmt.Sprintf("at most emergency.grant.quantum of %d units for a class marked emergency", e.Grant.Quantum))
		}
	}
	if p.Mode > Off {
		bad("mode", p.Mode, strings.Join(modeNames[:], ", "))
	}
	return out
}

// ClassNames lists the classes in order.
func (p *Policy) ClassNames() []RouteClass {
	names := make([]RouteClass, 0, len(p.Classes))
	for n := range p.Classes {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}
