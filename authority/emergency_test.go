package authority_test

import (
	"testing"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// An emergency grant expires, its bucket fills and is forgotten, and a policy
// without an emergency budget comes: what is left, the owner's last grant id,
// must load, and a budget that comes back later must not start full.
func TestEmergencyOwnerWithoutBucketLoads(t *testing.T) {
	w := newWorld(t)
	a := w.join("a")
	plain := &grant.Policy{Rate: grant.Rate{Units: 1, Per: time.Second}, Burst: 10}
	with := *plain
	with.Emergency = &grant.Emergency{Rate: grant.Rate{Units: 10, Per: time.Second}, Burst: 5,
		Grant: grant.GrantSettings{Quantum: 5, Owners: 2, TTL: time.Second}}
	w.put("t", &with)
	r := grantOf("t", a, 1, 5, 1, 0)
	r.Emergency = true
	r.Sum = r.Fingerprint()
	if g := w.ask(r); g.Result != grant.Granted || g.Units != 5 {
		t.Fatalf("got %v of %d", g.Result, g.Units)
	}
	w.advance(time.Minute)
	w.put("t", plain)
	w.advance(time.Second)
	w.load()
	w.put("t", &with)
	next := grantOf("t", a, 2, 5, 1, 0)
	next.Emergency = true
	next.Sum = next.Fingerprint()
	if g := w.ask(next); g.Result != grant.Parked {
		t.Errorf("got %v of %d units from a bucket that came back, want parked", g.Result, g.Units)
	}
	if again := w.ask(r); again.Result != grant.Refused || again.Reason != grant.Stale {
		t.Errorf("the old id again: %v %v, want refused as stale", again.Result, again.Reason)
	}
}
