package authority_test

import (
	"testing"
	"time"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

// A request is parked, its units accrue, and the leader steps down at that very
// moment: the parked hear "try again", because a grant would leave before its
// record is durable, and would stand if that commit failed.
func TestStepDownGrantsNothing(t *testing.T) {
	w := newWorld(t)
	a := w.join("a")
	w.put("t", &grant.Policy{
		Rate: grant.Rate{Units: 1, Per: time.Second}, Burst: 10,
		Grant: grant.GrantSettings{Quantum: 10, Owners: 2, TTL: 30 * time.Second},
	})
	w.ask(grantOf("t", a, 1, 10, 1, 0))
	if g := w.ask(grantOf("t", a, 2, 5, 3, 0)); g.Result != grant.Parked {
		t.Fatalf("got %v, want parked", g.Result)
	}
	w.now = w.now.Add(4 * time.Second) // the units are there, the Node was not woken yet
	w.node.Close(w.reading())          // and its records are lost
	for _, r := range w.node.Replies() {
		if r.Grant != nil && (r.Grant.Result != grant.Busy || r.Grant.Reason != grant.Unavailable) {
			t.Errorf("stepping down answered %v of %d units", r.Grant.Result, r.Grant.Units)
		}
	}
	w.load()
	r := w.call(authority.Call{Caller: "get", Get: &authority.GetTenant{Tenant: "t"}})
	if got := r[len(r)-1].Tenant.Ordinary.Outstanding; got != 10 {
		t.Errorf("%d outstanding after the load, want the 10 of the first grant", got)
	}
}
