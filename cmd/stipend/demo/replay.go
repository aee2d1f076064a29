package demo

import (
	"cmp"
	"fmt"
	"iter"
	"math"
	mathrand "math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/stipend/stipend/bounds/trace"
	"github.com/stipend/stipend/proto/grant"
)

// Trace is real traffic to be replayed instead of the synthetic load.
type Trace struct {
	File string
	// Kind is trace.CSV, one hot tenant whose requests have costs, or
	// trace.Combined, one tenant for each client.
	Kind trace.Kind
	// Speed is by how much faster it is replayed; 0: so that it takes Config.Length.
	Speed float64
	// TimeColumn and CostColumns are those of a CSV; the cost is their sum.
	TimeColumn  string
	CostColumns []string
	// Window is by how much lines may be out of order.
	Window time.Duration
}

// maxTraced bounds the requests of a trace.
const maxTraced = 2_000_000

// traced is what became of a trace.
type traced struct {
	requests int
	units    grant.Units
	speed    float64
	span     time.Duration // of the original
	// reference is what one bucket would have admitted of the same requests, had
	// it decided all of them; refused what it would not have.
	reference, refused grant.Units
}

// seen is one request of a trace.
type seen struct {
	trace.Record
	method string
	url    *url.URL
}

// read takes the whole trace into memory, in order of time.
func (t Trace) read() ([]seen, error) {
	opts := trace.Options{Window: t.Window, MaxHeld: maxTraced, Admitted: func(int) bool { return true }}
	// What was asked for, in order of lines; records come in order of time.
	var asked []seen
	switch t.Kind {
	case trace.CSV:
		opts.Columns = trace.Columns{Time: t.TimeColumn, TenantIs: "hot", Cost: t.CostColumns}
	case trace.Combined:
		opts.Class = func(method, path string) (grant.RouteClass, bool) {
			u, err := url.ParseRequestURI(path)
			if err != nil || method == "" || u.Host != "" {
				return "", false
			}
			asked = append(asked, seen{method: method, url: u})
			return trace.DefaultClass, true
		}
	default:
		return nil, fmt.Errorf("%s: a file of %v cannot be replayed; allowed are csv and combined", t.File, t.Kind)
	}
	r, err := trace.OpenFile(t.Kind, t.File, opts)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	var out []seen
	for rec, err := range r.Records() {
		if err != nil {
			return nil, err
		}
		if len(out) == maxTraced {
			return nil, fmt.Errorf("%s has more than %d requests; cut it", t.File, maxTraced)
		}
		out = append(out, seen{Record: rec, method: http.MethodPost, url: &url.URL{Path: "/v1/complete"}})
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%s holds no request", t.File)
	}
	if t.Kind == trace.Combined {
		slices.SortFunc(out, func(a, b seen) int { return cmp.Compare(a.Line, b.Line) })
		for i := range out {
			out[i].method, out[i].url = asked[i].method, asked[i].url
		}
		slices.SortStableFunc(out, func(a, b seen) int { return cmp.Compare(a.At, b.At) })
	}
	return out, nil
}

// replay makes the plan of a trace.
func replay(t Trace, length time.Duration) (*plan, error) {
	all, err := t.read()
	if err != nil {
		return nil, err
	}
	span := all[len(all)-1].At.Sub(all[0].At)
	speed := t.Speed
	if speed == 0 {
		speed = max(1, span.Seconds()/length.Seconds())
	}
	if d := span.Seconds() / speed; d > (24 * time.Hour).Seconds() {
		return nil, fmt.Errorf("--speed %g: the replay would take %.0f hours; allowed is a speed of %.3g or more", speed, d/3600, span.Hours()/24)
	}
	at := func(s seen) time.Duration {
		return time.Duration(float64(s.At.Sub(all[0].At)) / speed)
	}
	length = at(all[len(all)-1]) + time.Second
	p := &plan{
		length: length, shift: max(length/7, time.Second), kill: length * 2 / 5, restart: length / 2,
		trace: &traced{requests: len(all), speed: speed, span: span},
	}
	if t.Kind == trace.CSV {
		p.oneTenant(all, at)
	} else {
		p.clients(all)
	}
	index := map[grant.TenantID]int{}
	for i, one := range p.tenants {
		index[one.id] = i
	}
	prices := newTable(p.routes)
	rng := mathrand.New(mathrand.NewPCG(1, uint64(len(all))))
	arrivals := make([]arrival, len(all))
	for i, s := range all {
		a := arrival{at: at(s), tenant: index[s.Tenant], method: s.method, path: s.url.Path, rawPath: s.url.RawPath, draw: rng.Uint64()}
		if r, ok := prices.of(a.method, s.url, ""); ok {
			a.cost = p.tenants[a.tenant].policy.Classes[r.class].Cost
			if r.counted {
				a.count, a.cost = int64(s.Cost), a.cost*s.Cost
			}
		}
		p.trace.units += a.cost
		arrivals[i] = a
	}
	p.streams = []iter.Seq[arrival]{slices.Values(arrivals)}
	p.trace.reference, p.trace.refused = reference(p.tenants[0].policy, arrivals)
	p.summary = append(p.summary,
		fmt.Sprintf("trace    %d requests of %s, %d times as fast: %v instead of %v", len(all), plural(len(p.tenants), "tenant"),
			int64(math.Round(speed)), length.Round(time.Second), span.Round(time.Second)),
		fmt.Sprintf("         90/9/1 over the gateways, the favourite moving every %v", p.shift.Round(100*time.Millisecond)))
	return p, nil
}

// oneTenant gives the one tenant of a CSV a policy that the trace overruns:
// six tenths of its mean rate, as large a quantum as its dearest request, and
// the ttl with which that keeps the 97 % promise.
func (p *plan) oneTenant(all []seen, at func(seen) time.Duration) {
	var total, dearest float64
	for _, s := range all {
		total += float64(s.Cost)
		dearest = max(dearest, float64(s.Cost))
	}
	rate := max(1, math.Ceil(0.6*total/max(at(all[len(all)-1]).Seconds(), 1)))
	quantum := max(dearest, math.Ceil(2*rate*0.010), 1)
	ttl := max(2, math.Ceil(owners*quantum/(0.03*rate)))
	policy := &grant.Policy{
		Plan: "traced", Rate: perSecond(grant.Units(rate)), Burst: grant.Units(max(dearest, rate/2)),
		Classes: map[grant.RouteClass]grant.Class{"tokens": {Cost: 1}},
		Grant: grant.GrantSettings{
			Quantum: grant.Units(quantum), Owners: owners,
			TTL: min(time.Duration(ttl*float64(time.Second)), grant.MaxTTL),
		},
	}
	p.routes = []route{{pattern: "POST /v1/complete", class: "tokens", counted: true}}
	p.tenants = []tenant{{id: "hot", role: hot, policy: policy, keys: []string{newKey(), newKey(), newKey()}}}
	p.summary = []string{fmt.Sprintf("hot      %d units in all, limit %d/s (burst B = %d, N = %d, q = %d, ttl %v)",
		int64(total), policy.Rate.Units, policy.Burst, owners, policy.Grant.Quantum, policy.Grant.TTL)}
}

// clients makes every client a tenant, all under the same policy.
func (p *plan) clients(all []seen) {
	policy := &grant.Policy{
		Plan: "client", Rate: perSecond(2), Burst: 10,
		Classes: map[grant.RouteClass]grant.Class{"asset": {Cost: 1}, "page": {Cost: 2}, "write": {Cost: 5}},
		Grant:   grant.GrantSettings{Quantum: 2, Owners: owners, TTL: grantLife},
	}
	p.routes = []route{
		{pattern: "GET /images/", class: "asset"}, {pattern: "GET /presentations/", class: "asset"}, {pattern: "GET /files/", class: "asset"},
		{pattern: "GET /", class: "page"}, {pattern: "POST /", class: "write"},
	}
	busy := map[grant.TenantID]int{}
	for _, s := range all {
		busy[s.Tenant]++
	}
	for id := range busy {
		p.tenants = append(p.tenants, tenant{id: id, role: replayed, policy: policy, keys: []string{newKey()}})
	}
	// The busiest first: it is the one that the progress line shows.
	slices.SortFunc(p.tenants, func(a, b tenant) int {
		return cmp.Or(cmp.Compare(busy[b.id], busy[a.id]), cmp.Compare(a.id, b.id))
	})
	p.summary = []string{fmt.Sprintf("clients  %d tenants, each limited to 2 units/s (burst B = 10, N = %d, q = 2, ttl %v)", len(busy), owners, grantLife)}
}

// reference decides the first tenant's arrivals by one bucket that sees all of
// them, without waiting.
func reference(p *grant.Policy, arrivals []arrival) (admitted, refused grant.Units) {
	level, carry, last := p.Burst, int64(0), time.Duration(0)
	for _, a := range arrivals {
		if a.tenant != 0 {
			continue
		}
		more, rest := p.Rate.AccrueFloor(a.at-last, carry)
		last, carry = a.at, rest
		if level += min(more, p.Burst); level >= p.Burst {
			level, carry = p.Burst, 0
		}
		if a.cost > level {
			refused += a.cost
			continue
		}
		level -= a.cost
		admitted += a.cost
	}
	return admitted, refused
}
