package main

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/stipend/stipend/bounds"
	"github.com/stipend/stipend/cmd/internal/conf"
	"github.com/stipend/stipend/proto/grant"
)

func newBounds(o *output) *cobra.Command {
	var f policyFlags
	var tenant string
	over := durationsFlag{list: []time.Duration{time.Second, time.Minute, time.Hour}}
	var extra int64
	var alive, lost int
	var rho int64
	d, roundTrip := durationFlag(0), durationFlag(5*time.Millisecond)
	c := &cobra.Command{
		Use:   "bounds",
		Short: "The numbers that a policy promises",
		Long: `What a policy promises, as numbers: the most that any interval admits, what
gateways hold, how often they ask, what a deploy costs and which share of its
rate a saturating tenant gets.

The numbers hold for clocks as bad as --rho-ppb says; its default is that of the
authority and of stipend verify.`,
		Example: `  stipend bounds --rate 10000/s --burst 2000 --owners 32 --quantum 100 --ttl 11s
  stipend bounds --rate 10000/s --burst 2000 --owners 32 --quantum 100 --ttl 11s --over 1s,10m

  # which q adds at most 200 units to the burst?
  stipend bounds --rate 10000/s --burst 2000 --owners 32 --quantum 100 --ttl 11s --extra 200

  # how many owners do 20 gateways need, when a rollout replaces 4 within one ttl?
  stipend bounds --rate 10000/s --burst 2000 --owners 24 --quantum 100 --ttl 11s --alive 20 --lost-per-ttl 4

  stipend bounds --policy policies.yaml --tenant acme -o json`,
		Args: exactly(0, "flags only"),
		RunE: func(c *cobra.Command, _ []string) error {
			byNumbers, err := f.numbers()
			if err != nil {
				return err
			}
			var p *grant.Policy
			if byNumbers {
				p, err = f.policy()
			} else {
				p, err = f.one(tenant)
			}
			if err != nil {
				return err
			}
			for _, t := range over.list {
				if t < 0 {
					return badInputf("--over: %v; allowed: 0s or more", t)
				}
			}
			q := bounds.Question{Over: over.list, RoundTrip: time.Duration(roundTrip), Extra: grant.Units(extra), Alive: alive, LostPerTTL: lost}
			rows, err := bounds.Table(p, rho, time.Duration(d), q)
			if err != nil {
				return badInput(err)
			}
			warnings := bounds.Warnings(p, q.RoundTrip)
			if o.json() {
				return writeBoundsJSON(c.OutOrStdout(), p, rho, time.Duration(d), q, rows, warnings)
			}
			return writeBounds(c.OutOrStdout(), p, rho, time.Duration(d), rows, warnings)
		},
	}
	fs := c.Flags()
	f.register(fs)
	fs.StringVar(&tenant, "tenant", "", "tenant of the policy file")
	fs.Var(&over, "over", "interval lengths T, with commas, for which the largest A(T) is stated")
	fs.Int64Var(&rho, "rho-ppb", defaultRhoPPB, "rho: bound on the rate error of monotonic clocks, in parts per billion")
	fs.Var(&d, "forward-delay", "d: longest time from the start of an attempt to forwarding; 0 counts at the decision")
	fs.Var(&roundTrip, "round-trip", "time to the authority and back, one commit included")
	fs.Int64Var(&extra, "extra", 0, "units that gateways may add to the burst: asks for the largest q")
	fs.IntVar(&alive, "alive", 0, "gateways running: asks for the owners needed")
	fs.IntVar(&lost, "lost-per-ttl", 0, "of them, lost or replaced within one ttl")
	return c
}

func writeBounds(w io.Writer, p *grant.Policy, rho int64, d time.Duration, rows []bounds.Row, warnings []string) error {
	fmt.Fprintln(w, policyLine(p))
	fmt.Fprintf(w, "clocks wrong by at most rho = %d ppb (%s), forward delay d = %s\n", rho, rhoPercent(rho), conf.FormatDuration(d))
	fmt.Fprintln(w)
	t := newTable(w)
	for _, r := range rows {
		for i, formula := range strings.Split(r.Formula, "; ") {
			if i == 0 {
				t.row(r.Name, r.Value, formula)
			} else {
				t.row("", "", formula)
			}
		}
		t.row("", "", "  "+sentence(r.Explanation))
	}
	if err := t.flush(); err != nil {
		return err
	}
	for _, s := range warnings {
		fmt.Fprintf(w, "\nwarning: %s\n", wrap(s, 90, "         "))
	}
	return nil
}

// rhoPercent writes parts per billion as a percentage, exactly.
func rhoPercent(ppb int64) string {
	s := fmt.Sprintf("%d.%07d", ppb/1e7, ppb%1e7)
	return strings.TrimSuffix(strings.TrimRight(s, "0"), ".") + " %"
}

// policyLine is a policy on one line.
func policyLine(p *grant.Policy) string {
	var b strings.Builder
	fmt.Fprintf(&b, "rate r = %s, burst B = %d, ", conf.FormatRate(p.Rate), p.Burst)
	if p.Grant.Enabled() {
		fmt.Fprintf(&b, "owners N = %d, quantum q = %d, ttl %s", p.Grant.Owners, p.Grant.Quantum, conf.FormatDuration(p.Grant.TTL))
	} else {
		b.WriteString("no grants: every request is checked at the authority")
	}
	if p.Mode != grant.Enforce {
		fmt.Fprintf(&b, ", mode %v", p.Mode)
	}
	return b.String()
}

func sentence(s string) string {
	if s == "" {
		return ""
	}
	return strings.ToUpper(s[:1]) + s[1:] + "."
}

type boundsJSON struct {
	Policy *policyJSON  `json:"policy"`
	RhoPPB int64        `json:"rho_ppb"`
	Delay  string       `json:"forward_delay"` // d
	Slack  grant.Units  `json:"slack"`
	Max    []maxJSON    `json:"max"`
	PerSec *float64     `json:"grants_per_second"` // null without grants
	Lasts  *string      `json:"grant_lasts"`       // null: for ever, or no grants
	Lost   grant.Units  `json:"deploy_cost"`
	Share  *int64       `json:"utilisation_ppm"` // null: nothing is promised
	Full   bool         `json:"promise_97"`
	MostQ  *grant.Units `json:"largest_quantum,omitempty"`
	Owners *int         `json:"owners_needed,omitempty"`
	Rows   []rowJSON    `json:"rows"`
	Warn   []string     `json:"warnings"`
}

type maxJSON struct {
	Over  string      `json:"over"`
	Units grant.Units `json:"units"`
}

type rowJSON struct {
	Name        string `json:"name"`
	Value       string `json:"value"`
	Formula     string `json:"formula"`
	Explanation string `json:"explanation"`
}

func writeBoundsJSON(w io.Writer, p *grant.Policy, rho int64, d time.Duration, q bounds.Question, rows []bounds.Row, warnings []string) error {
	e := bounds.EnvelopeOf(p, rho, d)
	promise := bounds.PromiseOf(p, q.RoundTrip)
	out := boundsJSON{Policy: toPolicyJSON(p), RhoPPB: rho, Delay: conf.FormatDuration(d), Slack: e.Slack(), Max: []maxJSON{}, Full: promise.Full(), Warn: warnings}
	for _, t := range q.Over {
		m, err := e.Max(t)
		if err != nil {
			return badInput(err)
		}
		out.Max = append(out.Max, maxJSON{conf.FormatDuration(t), m})
	}
	if v, ok := e.CoordinationPerSecond(); ok {
		out.PerSec = &v
	}
	if v, ok := e.GrantLasts(); ok {
		s := conf.FormatDuration(v)
		out.Lasts = &s
	}
	out.Lost, _, _ = e.DeployCost()
	if promise.Given {
		out.Share = &promise.PPM
	}
	if q.Extra != 0 {
		if most, err := bounds.LargestQuantum(q.Extra, p.Grant.Owners); err == nil {
			out.MostQ = &most
		}
	}
	if q.Alive != 0 || q.LostPerTTL != 0 {
		if n, err := bounds.OwnersNeeded(q.Alive, q.LostPerTTL); err == nil {
			out.Owners = &n
		}
	}
	for _, r := range rows {
		out.Rows = append(out.Rows, rowJSON(r))
	}
	if out.Warn == nil {
		out.Warn = []string{}
	}
	return writeJSON(w, out)
}
