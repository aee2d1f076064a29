package trace

import (
	"fmt"
	"strconv"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// access turns a line of an access log into a record; counts is false when it
// was refused or is not mapped.
func (r *Reader) access(line string) (rec Record, counts bool, f *fault) {
	if f := r.format.parse(line); f != nil {
		return rec, false, f
	}
	c := &r.opts.Columns
	// get stops at the first fault; a column without a name is empty.
	get := func(name string) (v string) {
		if f == nil && name != "" {
			v, f = r.format.field(name)
		}
		return v
	}
	stamp, status, duration := get(c.Time), get(c.Status), get(c.Duration)
	rec = Record{Tenant: c.TenantIs, Owner: c.OwnerIs, Class: c.ClassIs, Path: Unstated, Stage: Forwarded}
	if c.Tenant != "" {
		rec.Tenant = grant.TenantID(get(c.Tenant))
	}
	if c.Owner != "" {
		rec.Owner = grant.Owner(get(c.Owner))
	}
	if c.Class != "" {
		rec.Class = grant.RouteClass(get(c.Class))
	}
	if f != nil {
		return rec, false, f
	}
	if f = r.stamp(&rec, stamp, duration); f != nil {
		return rec, false, f
	}
	if c.Status != "" {
		code, err := strconv.Atoi(status)
		if err != nil || code < 0 || code > 999 {
			return rec, false, &fault{"status", short(status), "0 to 999"}
		}
		if !r.opts.Admitted(code) {
			r.stats.Refused++
			return rec, false, nil
		}
	}
	if r.opts.Class != nil {
		method, path := get(c.Method), get(c.Path)
		if f != nil {
			return rec, false, f
		}
		var known bool
		if rec.Class, known = r.opts.Class(method, path); !known {
			r.stats.Unmapped++
			return rec, false, nil
		}
	}
	if counts, f = r.cost(&rec); f != nil || !counts {
		return rec, false, f
	}
	return rec, true, rec.validate()
}

func (r *Reader) stamp(rec *Record, stamp, duration string) *fault {
	at, form, res, f := parseTime(stamp, r.opts.Columns.TimeForm, r.opts.Location)
	if f != nil {
		return f
	}
	if r.opts.Columns.Duration != "" {
		ns, durationRes, ok := parseNumber(duration, r.opts.Columns.DurationUnit)
		if !ok {
			return &fault{r.opts.Columns.Duration, short(duration), "a duration from 0 on, decimals allowed, no exponent"}
		}
		at = at.Add(-time.Duration(ns))
		res = res + durationRes // the difference of two truncated numbers
	}
	if r.resolution == 0 {
		r.resolution = res
	}
	r.opts.Columns.TimeForm = form // AnyTime is decided by the first line
	rec.At = at
	return nil
}

// cost is the sum of the columns, or the price of the class.
func (r *Reader) cost(rec *Record) (known bool, f *fault) {
	if len(r.opts.Columns.Cost) == 0 {
		rec.Cost = 1
		if r.opts.Price != nil {
			if rec.Cost, known = r.opts.Price(rec.Class); !known {
				r.stats.Unmapped++
			}
			return known, nil
		}
		return true, nil
	}
	for _, name := range r.opts.Columns.Cost {
		text, f := r.format.field(name)
		if f != nil {
			return false, f
		}
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil || n < 0 {
			return false, &fault{name, short(text), fmt.Sprintf("whole units, 0 to %d", grant.MaxUnits)}
		}
		if grant.Units(n) > grant.MaxUnits-rec.Cost {
			return false, &fault{name, short(text), fmt.Sprintf("a sum of the cost columns of at most %d", grant.MaxUnits)}
		}
		rec.Cost += grant.Units(n)
	}
	return true, nil
}
