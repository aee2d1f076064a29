package doors

import (
	"net/http"
	"sync/atomic"
	"time"

	"github.com/stipend/stipend/agent"
	"github.com/stipend/stipend/agent/gate"
	"github.com/stipend/stipend/proto/grant"
)

// unverifiedPerSecond is how many unverified requests a second get a body and
// keep their connection; those beyond cost as little as can be.
const unverifiedPerSecond = 200

// Door is what all doors share.
type Door struct {
	gate     *gate.Gate
	identity *Identity
	routes   *Routes
	ceiling  window
	stats    stats
}

// New makes a door.
func New(g *gate.Gate, id *Identity, rs *Routes) *Door {
	return &Door{gate: g, identity: id, routes: rs}
}

type stats struct {
	unverified, flooded, unknownRoute, badCount, late, backendFull, backendFailed, forwarded atomic.Uint64
}

// Stats counts what the doors answered by themselves.
type Stats struct {
	Unverified    uint64 // 401
	Flooded       uint64 // of those, beyond the ceiling
	UnknownRoute  uint64 // 404
	BadCount      uint64 // 400
	Late          uint64 // admitted, but too late to forward, or a clock moved
	BackendFull   uint64 // 503 before a decision: in-flight and queue are full
	BackendFailed uint64 // 502 after an admission
	Forwarded     uint64 // let through
}

// Stats returns the counters.
func (d *Door) Stats() Stats {
	s := &d.stats
	return Stats{s.unverified.Load(), s.flooded.Load(), s.unknownRoute.Load(), s.badCount.Load(),
		s.late.Load(), s.backendFull.Load(), s.backendFailed.Load(), s.forwarded.Load()}
}

// window counts events of the running second. At the turn of a second a few
// may be counted in the wrong one: it is a coarse ceiling.
type window struct{ state atomic.Uint64 } // second << 32 | count

func (w *window) over(limit uint32) bool {
	now := uint64(time.Now().Unix()) << 32
	for {
		old := w.state.Load()
		if old&^0xffffffff != now {
			if w.state.CompareAndSwap(old, now|1) {
				return false
			}
			continue
		}
		if uint32(old) >= limit {
			return true
		}
		if w.state.CompareAndSwap(old, old+1) {
			return false
		}
	}
}

// who verifies the request r and classifies target, which is r itself except
// for forward-auth. It answers on w itself when ok is false.
func (d *Door) who(w http.ResponseWriter, r, target *http.Request) (req gate.Request, ok bool) {
	tenant, ok := d.identity.tenant(r.Header, r.RemoteAddr)
	if !ok {
		d.stats.unverified.Add(1)
		if d.ceiling.over(unverifiedPerSecond) {
			d.stats.flooded.Add(1)
			w.Header().Set("Connection", "close")
			w.Header().Set("Cache-Control", "no-store")
			w.WriteHeader(http.StatusUnauthorized)
			return req, false
		}
		plain(http.StatusUnauthorized, "unverified", "Present a valid API key as a bearer token or in X-API-Key.").write(w)
		return req, false
	}
	route, ok := d.routes.match(target)
	if !ok {
		d.stats.unknownRoute.Add(1)
		plain(http.StatusNotFound, grant.UnknownRoute.String(), "No route of this gateway matches the method and path.").write(w)
		return req, false
	}
	count := grant.Units(1)
	if route.CountHeader != "" {
		var err error
		if count, err = route.count(r.Header, d.identity.trusts(r.RemoteAddr)); err != nil {
			d.stats.badCount.Add(1)
			plain(http.StatusBadRequest, grant.Invalid.String(), err.Error()).write(w)
			return req, false
		}
	}
	return gate.Request{Tenant: tenant, Class: route.Class, Count: count}, true
}

// judge decides, and answers on w itself when ok is false.
func (d *Door) judge(w http.ResponseWriter, r *http.Request, req gate.Request) (agent.Decision, bool) {
	dec := d.gate.Decide(r.Context(), req)
	if dec.Outcome != agent.Admitted {
		refusal(dec).write(w)
		return dec, false
	}
	return dec, true
}

// tooLate is the answer to an admitted request that may not go out any more.
func (d *Door) tooLate() Problem {
	d.stats.late.Add(1)
	p := plain(http.StatusServiceUnavailable, grant.Deadline.String(),
		"The request was admitted, but held up for too long to be forwarded under its admission.")
	p.retryAfter = time.Second
	return p
}

// pass notes on h that the request goes through.
func (d *Door) pass(h http.Header, dec agent.Decision) {
	d.stats.forwarded.Add(1)
	if dec.Shadow && dec.Reason != grant.None {
		h.Set(ShadowHeader, dec.Reason.String())
	}
}

// Middleware lets only admitted requests reach next.
func (d *Door) Middleware(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		req, ok := d.who(w, r, r)
		if !ok {
			return
		}
		dec, ok := d.judge(w, r, req)
		if !ok {
			return
		}
		if !d.gate.Recheck(dec) {
			d.tooLate().write(w)
			return
		}
		d.pass(w.Header(), dec)
		next.ServeHTTP(w, r)
	})
}
