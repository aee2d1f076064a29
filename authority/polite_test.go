package authority_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

// One caller of a central class beside gateways that take all of a tenant's
// refill: it is refused, comes back when its Retry-After says, and finds the
// units kept for it.
func TestPoliteCheckBesideParkedGrants(t *testing.T) {
	for _, c := range []struct {
		rate, burst, quantum grant.Units
		gateways             int
	}{{10, 10, 5, 1}, {10, 10, 5, 2}, {10, 100, 20, 4}, {100, 100, 30, 3}, {1000, 1000, 100, 8}, {3, 6, 2, 3}} {
		t.Run(fmt.Sprint(c), func(t *testing.T) { polite(t, c.rate, c.burst, c.quantum, c.gateways) })
	}
}

func polite(t *testing.T, rate, burst, quantum grant.Units, n int) {
	w := newWorld(t)
	put := &authority.PutPolicy{Tenant: "t", Policy: &grant.Policy{
		Rate: grant.Rate{Units: rate, Per: time.Second}, Burst: burst, Classes: map[grant.RouteClass]grant.Class{"c": {Cost: 1, Central: true}},
		Grant: grant.GrantSettings{Quantum: quantum, Owners: 2 * n, TTL: 10 * time.Second},
	}}
	w.offer(authority.Call{Put: put})
	ids := map[grant.Incarnation]grant.GrantID{}
	ask := func(inc grant.Incarnation) {
		ids[inc]++
		req := &grant.GrantRequest{Tenant: "t", Incarnation: inc, ID: ids[inc], Want: quantum, Min: 1}
		req.Sum = req.Fingerprint()
		w.offer(authority.Call{Caller: inc, Grant: req})
	}
	for i := range n {
		g := grant.Incarnation{1, byte(i)}
		w.live[g] = grant.Owner(fmt.Sprint("gw-", i))
		w.offer(authority.Call{Member: &authority.Member{Incarnation: g, Owner: w.live[g], State: authority.Live}})
		ask(g)
	}
	seq, allowed, granted := uint64(0), 0, grant.Units(0)
	next := grant.Instant(5 * time.Second)
	for w.now < grant.Instant(65*time.Second) {
		if w.now >= next {
			seq++
			req := &grant.CheckRequest{Tenant: "t", Class: "c", Count: 1, Attempt: grant.Attempt{Incarnation: grant.Incarnation{2}, Seq: seq}}
			req.Sum = req.Fingerprint()
			w.offer(authority.Call{Caller: "c", Check: req})
		}
		for _, r := range w.step() {
			switch {
			case r.Grant != nil && r.Grant.Result != grant.Parked:
				granted += r.Grant.Units
				ask(r.Grant.Incarnation) // its units are spent at once
			case r.Check != nil && r.Check.Verdict == grant.Allow:
				allowed++
				next = w.now.Add(time.Second)
			case r.Check != nil:
				seconds := (r.Check.RetryAfter + time.Second - 1) / time.Second
				next = w.now.Add(seconds*time.Second + 10*time.Millisecond) // a round trip
			}
		}
		w.now = w.now.Add(10 * time.Millisecond)
	}
	t.Log(allowed, "allowed of", seq, "granted", granted)
	if allowed < int(seq)/3 { // half at most: whoever was admitted is not told to come back
		t.Errorf("%d of %d Checks allowed", allowed, seq)
	}
}
