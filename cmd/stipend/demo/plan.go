package demo

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"iter"
	mathrand "math/rand/v2"
	"net/http"
	"net/url"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// gateways is how many agents there are.
const gateways = 3

// role says what a tenant is there to show.
type role uint8

const (
	hot        role = iota // saturates its limit on every gateway
	cold                   // now and then a request, far below its limit
	over                   // the abuser: far over a small limit
	replayed               // from a trace
	unverified             // no tenant at all: keys that nobody knows
	numRoles
)

var roleNames = [numRoles]string{"hot", "cold", "over its limit", "replayed", "unverified"}

func (r role) String() string { return roleNames[r] }

// route is one line of the gateways' table and of the backend's own.
type route struct {
	pattern string // of net/http's ServeMux
	class   grant.RouteClass
	counted bool // CountHeader holds the number of operations
}

// CountHeader carries the number of operations of a replayed request.
const countHeader = "Stipend-Count"

// tenant is one who shares a budget, and the keys that stand for it.
type tenant struct {
	id     grant.TenantID
	role   role
	policy *grant.Policy
	keys   []string
}

// arrival is one request of the load.
type arrival struct {
	at     time.Duration // since the start of the load
	tenant int           // index of plan.tenants; negative: an unknown key
	method string
	path   string
	// rawPath is the path as written, where it differs; as in url.URL.
	rawPath string
	count   int64 // of operations; 0: no header
	cost    grant.Units
	draw    uint64 // chooses gateway and key
}

// plan is everything a run needs to know beforehand.
type plan struct {
	tenants []tenant
	routes  []route
	// streams are open loops: arrivals in order of time, sent when they are due
	// whatever became of those before. Each may be ranged over once.
	streams []iter.Seq[arrival]
	length  time.Duration
	// shift is how long the same gateway gets most of the load.
	shift time.Duration
	// kill and restart are instants of the load; kill 0: nobody dies.
	kill, restart time.Duration
	summary       []string // what is about to happen, for people
	trace         *traced  // nil for the synthetic load
}

func newKey() string {
	var b [12]byte
	rand.Read(b[:]) // never fails: crypto/rand ends the process instead
	return "demo-" + hex.EncodeToString(b[:])
}

// favourite is the gateway that gets most of the load at the instant.
func (p *plan) favourite(at time.Duration) int { return int(at/p.shift) % gateways }

// gateway spreads 90/9/1 with the favourite moving.
func (p *plan) gateway(at time.Duration, draw uint64) int {
	g := p.favourite(at)
	switch n := draw % 100; {
	case n < 90:
		return g
	case n < 99:
		return (g + 1) % gateways
	}
	return (g + 2) % gateways
}

// Terms of the synthetic load. The hot tenant's policy keeps the 97 % promise:
// N*q = 120 = 0.03*r*ttl, and q lasts two round trips of 37 ms at full rate.
const (
	hotRate    = 400 // units/s
	hotBurst   = 200
	hotQuantum = 30
	owners     = gateways + 1 // one more than run: a dead one counts until its units expire
	hotOffered = 2 * hotRate  // units/s
	coldRate   = 10
	overRate   = 20
	overAsked  = 5 * overRate
	unknownAsk = 50 // requests/s with unknown keys
	coldCount  = 12
	grantLife  = 10 * time.Second
)

// synthetic is the main job: a hot tenant, cold ones and an abuser.
func synthetic(length time.Duration) *plan {
	classes := map[grant.RouteClass]grant.Class{"read": {Cost: 1}, "write": {Cost: 5}}
	p := &plan{
		routes:  []route{{pattern: "GET /", class: "read"}, {pattern: "POST /", class: "write"}},
		length:  length,
		shift:   max(length/7, time.Second),
		kill:    length * 2 / 5,
		restart: length / 2,
	}
	add := func(id string, r role, keys int, policy *grant.Policy) {
		t := tenant{id: grant.TenantID(id), role: r, policy: policy}
		for range keys {
			t.keys = append(t.keys, newKey())
		}
		p.tenants = append(p.tenants, t)
	}
	add("hot", hot, 5, &grant.Policy{
		Plan: "hot", Rate: perSecond(hotRate), Burst: hotBurst, Classes: classes,
		Grant: grant.GrantSettings{Quantum: hotQuantum, Owners: owners, TTL: grantLife},
	})
	add("greedy", over, 1, &grant.Policy{
		Plan: "small", Rate: perSecond(overRate), Burst: overRate, Classes: map[grant.RouteClass]grant.Class{"read": {Cost: 1}},
		Grant: grant.GrantSettings{Quantum: 1, Owners: owners, TTL: grantLife},
	})
	for i := range coldCount {
		add(fmt.Sprintf("cold-%02d", i+1), cold, 1, &grant.Policy{
			Plan: "cold", Rate: perSecond(coldRate), Burst: 2 * coldRate, Classes: classes,
		})
	}
	// One in ten is a write of 5: 1.4 units a request.
	p.streams = append(p.streams, p.steady(0, hotOffered/1.4, 10), p.steady(1, overAsked, 0), p.steady(-1, unknownAsk, 0))
	for i := range coldCount {
		p.streams = append(p.streams, p.steady(2+i, 0.5+float64(i)*0.1, 0))
	}
	p.summary = []string{
		fmt.Sprintf("hot      %d units/s offered to a limit of %d/s (burst B = %d, N = %d, q = %d, ttl %v), 5 keys,", hotOffered, hotRate, hotBurst, owners, hotQuantum, grantLife),
		fmt.Sprintf("         90/9/1 over the gateways, the favourite moving every %v", p.shift.Round(100*time.Millisecond)),
		fmt.Sprintf("cold     %d tenants, about one request a second each, checked one by one", coldCount),
		fmt.Sprintf("abuser   %d requests/s to a limit of %d/s, and %d/s with keys that nobody knows", overAsked, overRate, unknownAsk),
	}
	return p
}

func perSecond(n grant.Units) grant.Rate { return grant.Rate{Units: n, Per: time.Second} }

// steady is a Poisson stream of one tenant; one request in writes is a write, 0: none.
func (p *plan) steady(tenant int, rate float64, writes uint64) iter.Seq[arrival] {
	return func(yield func(arrival) bool) {
		rng := mathrand.New(mathrand.NewPCG(uint64(tenant+2), 20))
		at := time.Duration(0)
		for {
			at += time.Duration(rng.ExpFloat64() / rate * float64(time.Second))
			if at >= p.length {
				return
			}
			a := arrival{at: at, tenant: tenant, method: http.MethodGet, path: "/items", cost: 1, draw: rng.Uint64()}
			if writes > 0 && rng.Uint64N(writes) == 0 {
				a.method, a.cost = http.MethodPost, 5
			}
			if !yield(a) {
				return
			}
		}
	}
}

// table is a ServeMux of the routes, with the price of one operation.
type table struct{ mux *http.ServeMux }

type place struct{ route }

// ServeHTTP makes a place a handler, which is how ServeMux keeps it; it is
// never served.
func (*place) ServeHTTP(http.ResponseWriter, *http.Request) {}

func newTable(routes []route) *table {
	t := &table{http.NewServeMux()}
	for _, r := range routes {
		t.mux.Handle(r.pattern, &place{r})
	}
	return t
}

// of finds the route of a request.
func (t *table) of(method string, u *url.URL, host string) (route, bool) {
	h, _ := t.mux.Handler(&http.Request{Method: method, URL: u, Host: host})
	p, ok := h.(*place)
	if !ok {
		return route{}, false
	}
	return p.route, true
}
