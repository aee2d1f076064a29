package authority_test

import (
	"testing"
	"time"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

// Callers that draw an incarnation for each call fill the table of callers; a
// gateway that registers afterwards still gets its Checks.
func TestStrangersDoNotShutOutGateways(t *testing.T) {
	w := newWorld(t)
	w.cfg.MaxCallers = 3
	w.load()
	w.offer(authority.Call{Put: &authority.PutPolicy{Tenant: "t", Policy: &grant.Policy{
		Rate: grant.Rate{Units: 1, Per: time.Second}, Burst: 10, Classes: map[grant.RouteClass]grant.Class{"c": {Cost: 1}},
	}}})
	w.step()
	check := func(inc grant.Incarnation) *grant.CheckAnswer {
		req := &grant.CheckRequest{Tenant: "t", Class: "c", Count: 1, Attempt: grant.Attempt{Incarnation: inc, Seq: 1}}
		req.Sum = req.Fingerprint()
		w.offer(authority.Call{Caller: "c", Check: req})
		return w.step()[0].Check
	}
	for i := range byte(3) {
		if got := check(grant.Incarnation{1, i}); got.Verdict != grant.Allow {
			t.Fatalf("stranger %d: %v %v", i, got.Verdict, got.Reason)
		}
	}
	if got := check(grant.Incarnation{1, 3}); got.Verdict != grant.Undecided || got.Reason != grant.Overloaded {
		t.Errorf("a stranger beyond the bound: %v %v", got.Verdict, got.Reason)
	}
	gateway := grant.Incarnation{2}
	w.offer(authority.Call{Member: &authority.Member{Incarnation: gateway, Owner: "gw", State: authority.Live}})
	if got := check(gateway); got.Verdict != grant.Allow {
		t.Errorf("a registered gateway: %v %v", got.Verdict, got.Reason)
	}
}
