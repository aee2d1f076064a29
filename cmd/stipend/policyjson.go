package main

import (
	"github.com/stipend/stipend/cmd/internal/conf"
	"github.com/stipend/stipend/proto/grant"
)

// policyJSON is a policy in -o json: fields as in a policy file, rates and
// durations in its notation.
type policyJSON struct {
	Plan      string               `json:"plan,omitempty"`
	Mode      string               `json:"mode"`
	Rate      string               `json:"rate"`
	Burst     grant.Units          `json:"burst"`
	Grant     grantJSON            `json:"grant"`
	Classes   map[string]classJSON `json:"classes,omitempty"`
	Emergency *emergencyJSON       `json:"emergency,omitempty"`
}

type grantJSON struct {
	Quantum grant.Units `json:"quantum"`
	Owners  int         `json:"owners"`
	TTL     string      `json:"ttl"`
}

type classJSON struct {
	Cost      grant.Units `json:"cost"`
	Central   bool        `json:"central,omitempty"`
	Emergency bool        `json:"emergency,omitempty"`
}

type emergencyJSON struct {
	Rate  string      `json:"rate"`
	Burst grant.Units `json:"burst"`
	Grant grantJSON   `json:"grant"`
}

func toPolicyJSON(p *grant.Policy) *policyJSON {
	if p == nil {
		return nil
	}
	settings := func(g grant.GrantSettings) grantJSON {
		return grantJSON{g.Quantum, g.Owners, conf.FormatDuration(g.TTL)}
	}
	out := &policyJSON{
		Plan: p.Plan, Mode: p.Mode.String(), Rate: conf.FormatRate(p.Rate), Burst: p.Burst, Grant: settings(p.Grant),
	}
	if len(p.Classes) > 0 {
		out.Classes = make(map[string]classJSON, len(p.Classes))
		for name, c := range p.Classes {
			out.Classes[string(name)] = classJSON{c.Cost, c.Central, c.Emergency}
		}
	}
	if e := p.Emergency; e != nil {
		out.Emergency = &emergencyJSON{conf.FormatRate(e.Rate), e.Burst, settings(e.Grant)}
	}
	return out
}
