package main

import (
	"cmp"
	"fmt"
	"io"
	"iter"
	"slices"
	"time"

	"github.com/stipend/stipend/bounds"
	"github.com/stipend/stipend/bounds/trace"
	"github.com/stipend/stipend/cmd/internal/conf"
	"github.com/stipend/stipend/proto/grant"
)

// report collects what verify found.
type report struct {
	clock    string
	cfg      bounds.Config
	policies map[grant.TenantID]*grant.Policy
	fallback *grant.Policy
	byClass  bool // costs are those of the policies' classes
	top      int

	held     bool
	tenants  []bounds.Report // those with admissions, worst first
	n        uint64
	units    grant.Units
	unpriced uint64 // of a class that the tenant's policy does not have
	unknown  map[grant.TenantID]bool
	notes    []string
	first    grant.Instant
	last     grant.Instant
}

func (r *report) judge(j *bounds.Judge, records iter.Seq2[trace.Record, error]) error {
	r.unknown = map[grant.TenantID]bool{}
	for rec, err := range records {
		if err != nil {
			return err
		}
		p := r.fallback
		if p == nil {
			p = r.policies[rec.Tenant]
		}
		if p == nil {
			r.unknown[rec.Tenant] = true
		}
		if r.byClass && p != nil && len(p.Classes) > 0 {
			class, known := p.Classes[rec.Class]
			if !known {
				r.unpriced++
				continue
			}
			rec.Cost = class.Cost
		}
		if err := j.Admit(rec.Tenant, rec.At, rec.Cost); err != nil {
			return fmt.Errorf("line %d: %w", rec.Line, err)
		}
		if r.n == 0 {
			r.first = rec.At
		}
		r.last = max(r.last, rec.At)
		r.n++
	}
	if r.n > 0 {
		if err := j.Advance(r.last); err != nil {
			return err
		}
	}
	r.held = true
	for _, t := range j.Reports() {
		if t.Err != nil {
			return t.Err
		}
		if t.Admissions == 0 {
			continue
		}
		r.units += t.Admitted + t.OutsideUnits
		r.held = r.held && t.Held
		r.tenants = append(r.tenants, t)
	}
	slices.SortStableFunc(r.tenants, worstFirst)
	return nil
}

// worstFirst orders broken tenants by how far, then the others by which part
// of what they may admit at once they did.
func worstFirst(a, b bounds.Report) int {
	return cmp.Or(
		cmp.Compare(b.Over(), a.Over()),
		cmp.Compare(fullness(b), fullness(a)),
		cmp.Compare(b.Admitted, a.Admitted),
		cmp.Compare(a.Tenant, b.Tenant),
	)
}

func fullness(t bounds.Report) float64 {
	return float64(t.Excess) / float64(max(t.ExcessIn.Beyond, 1))
}

// note says what the input itself tells against the verdict.
func (r *report) note(file string, in *trace.Reader, decided bool) {
	s := in.Stats()
	say := func(format string, args ...any) {
		r.notes = append(r.notes, file+": "+fmt.Sprintf(format, args...))
	}
	if s.Lost > 0 {
		say("its writer lost %s; a missing admission can only make a broken bound look held", plural(s.Lost, "record"))
	}
	if s.Records > 0 && !s.Complete && in.Header().Clock != trace.Wall || s.Torn {
		say("still being written, or its writer died: what it had not yet flushed is missing")
	}
	if s.Bad > 0 {
		say("%s left out; the first: %v", plural(s.Bad, "malformed line"), s.FirstBad)
	}
	if s.Unmapped > 0 {
		say("%s left out: no --route fits", plural(s.Unmapped, "request"))
	}
	if s.Refused > 0 {
		say("%s had been refused by status and do not count", plural(s.Refused, "request"))
	}
}

func (r *report) finish() {
	if r.unpriced > 0 {
		r.notes = append(r.notes, fmt.Sprintf("%s left out: the tenant's policy has no such class", plural(r.unpriced, "request")))
	}
	if len(r.unknown) > 0 {
		names := make([]string, 0, len(r.unknown))
		for t := range r.unknown {
			names = append(names, fmt.Sprintf("%q", t))
		}
		slices.Sort(names)
		more := ""
		if len(names) > 5 {
			names, more = names[:5], " and others"
		}
		r.notes = append(r.notes, fmt.Sprintf("the policy file has no %s%s: without a policy nothing may be admitted", join(names), more))
	}
	for _, t := range r.tenants {
		if t.Outside > 0 {
			r.notes = append(r.notes, fmt.Sprintf("tenant %q: %s under mode off or shadow are outside the bound", t.Tenant, plural(t.Outside, "admission")))
		}
	}
}

func join(list []string) string {
	switch len(list) {
	case 0:
		return ""
	case 1:
		return "tenant " + list[0]
	}
	out := "tenants " + list[0]
	for _, s := range list[1:] {
		out += ", " + s
	}
	return out
}

type intervalJSON struct {
	Start    grant.Instant `json:"start_ns"`
	End      grant.Instant `json:"end_ns"`
	Length   string        `json:"length"`
	Admitted grant.Units   `json:"admitted"`
	Allowed  grant.Units   `json:"allowed"`
}

type tenantJSON struct {
	Tenant      string       `json:"tenant"`
	Held        bool         `json:"held"`
	Admissions  uint64       `json:"admissions"`
	Admitted    grant.Units  `json:"admitted"`
	Accrued     grant.Units  `json:"accrued"`         // r*T over the span
	Utilisation *int64       `json:"utilisation_ppm"` // null: nothing accrued
	Excess      grant.Units  `json:"largest_excess"`  // over r*T, to be compared with
	Beyond      grant.Units  `json:"excess_allowed"`  // B + N*q + (d+skew)*r
	Over        grant.Units  `json:"over"`
	Worst       intervalJSON `json:"worst_interval"`
}

func (r *report) write(w io.Writer, o *output) error {
	r.finish()
	if o.json() {
		return r.writeJSON(w)
	}
	if r.n == 0 {
		fmt.Fprintln(w, "bound held: there was no admission at all")
		lines(w, r.notes)
		return nil
	}
	word := "held"
	if !r.held {
		word = "BROKEN"
	}
	span := r.last.Sub(r.first)
	fmt.Fprintf(w, "bound %s: %s of %s, %s in %s\n", word, plural(r.n, "admission"), plural(len(r.tenants), "tenant"),
		plural(r.units, "unit"), conf.FormatDuration(span.Round(time.Microsecond)))
	worst := r.tenants[0]
	if !r.held {
		i := worst.Worst
		fmt.Fprintf(w, "\nworst interval: tenant %q, %s long\n  from      %s\n  to        %s\n  admitted  %d\n  allowed   %d\n  over by   %d\n",
			worst.Tenant, conf.FormatDuration(i.Length()), when(i.Start, r.clock), when(i.End, r.clock), i.Admitted, i.Allowed, worst.Over())
	} else {
		fmt.Fprintf(w, "largest excess over r*T: tenant %q, %d of %d units in %s\n", worst.Tenant, worst.Excess, worst.ExcessIn.Beyond, conf.FormatDuration(worst.ExcessIn.Length()))
	}
	fmt.Fprintln(w)
	t := newTable(w, "TENANT", "BOUND", "ADMISSIONS", "ADMITTED", "ALLOWED", "r*T", "USED", "EXCESS", r.beyondHead(), "OVER")
	shown := r.tenants
	if r.top > 0 && len(shown) > r.top {
		shown = shown[:r.top]
	}
	for _, one := range shown {
		used := "-"
		if one.UtilisationPPM >= 0 {
			used = percent(one.UtilisationPPM)
		}
		bound := "held"
		if !one.Held {
			bound = "BROKEN"
		}
		t.row(one.Tenant, bound, one.Admissions, one.Worst.Admitted, unitsOrMore(one.Worst.Allowed), unitsOrMore(one.Accrued), used,
			one.Excess, unitsOrMore(one.ExcessIn.Beyond), one.Over())
	}
	if err := t.flush(); err != nil {
		return err
	}
	if n := len(r.tenants) - len(shown); n > 0 {
		fmt.Fprintf(w, "and %s with more room; --top 0 shows all\n", plural(n, "tenant"))
	}
	fmt.Fprintln(w, "\nADMITTED and ALLOWED are of the worst interval; r*T and USED of the whole record.")
	if r.cfg.Skew > 0 {
		fmt.Fprintf(w, "Allowed for: clocks and times %s apart.\n", conf.FormatDuration(r.cfg.Skew))
	}
	if len(r.notes) > 0 {
		fmt.Fprintln(w)
		for _, s := range r.notes {
			fmt.Fprintf(w, "note: %s\n", wrap(s, 94, "      "))
		}
	}
	return nil
}

// beyondHead heads the column with what an excess is compared with.
func (r *report) beyondHead() string {
	if r.cfg.D+r.cfg.Skew > 0 {
		return "B+Nq+r*(d+skew)"
	}
	return "B+Nq"
}

func unitsOrMore(u grant.Units) string {
	if u == grant.MaxUnits {
		return "unlimited"
	}
	return fmt.Sprint(int64(u))
}

func (r *report) writeJSON(w io.Writer) error {
	out := struct {
		Held       bool         `json:"held"`
		Admissions uint64       `json:"admissions"`
		Units      grant.Units  `json:"units"`
		Clock      string       `json:"clock"`
		Skew       string       `json:"skew"`
		Tenants    []tenantJSON `json:"tenants"`
		Notes      []string     `json:"notes"`
	}{r.held, r.n, r.units, r.clock, conf.FormatDuration(r.cfg.Skew), []tenantJSON{}, r.notes}
	if out.Notes == nil {
		out.Notes = []string{}
	}
	for _, t := range r.tenants {
		one := tenantJSON{
			Tenant: string(t.Tenant), Held: t.Held, Admissions: t.Admissions, Admitted: t.Admitted, Accrued: t.Accrued,
			Excess: t.Excess, Beyond: t.ExcessIn.Beyond, Over: t.Over(),
			Worst: intervalJSON{t.Worst.Start, t.Worst.End, conf.FormatDuration(t.Worst.Length()), t.Worst.Admitted, t.Worst.Allowed},
		}
		if t.UtilisationPPM >= 0 {
			one.Utilisation = &t.UtilisationPPM
		}
		out.Tenants = append(out.Tenants, one)
	}
	return writeJSON(w, out)
}
