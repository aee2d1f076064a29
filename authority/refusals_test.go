package authority_test

import (
	"testing"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// Who asks why a tenant is refused must see it: Checks denied, and gateways whose
// grant has to wait, which then refuse by themselves.
func TestLastRefusalsShowWhoWaits(t *testing.T) {
	w := newWorld(t)
	a := w.join("a")
	w.put("t", withGrants(plain(1, time.Hour, 10), 10, 2, time.Minute))
	w.ask(grantOf("t", a, 1, 10, 1, 0))
	w.check("t", 1)
	w.advance(time.Second)
	w.ask(grantOf("t", a, 2, 5, 3, 0))
	got := w.state("t").LastRefusals
	if len(got) != 2 {
		t.Fatalf("%d refusals, want the Check and the grant: %+v", len(got), got)
	}
	if g := got[0]; g.Path != "grant" || g.Reason != grant.Over || g.Owner != "gw-a" || g.Cost != 3 || g.Ago != 0 {
		t.Errorf("newest: %+v", g)
	}
	if c := got[1]; c.Path != "check" || c.Reason != grant.Over || c.Class != "op" || c.Ago != time.Second {
		t.Errorf("the one before: %+v", c)
	}
}
