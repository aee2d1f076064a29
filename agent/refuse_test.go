package agent

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stipend/stipend/proto/grant"
)

// saturated is a hot tenant without units whose parked request is far off.
func saturated(tb rapid.TB, wait time.Duration) *stage {
	s := newStage(tb, nil)
	s.push(testPolicy())
	s.heat()
	s.try("read", 1, time.Second)
	s.answer(grant.GrantAnswer{ID: s.open().ID, Result: grant.Parked, Wait: wait})
	s.resolved()
	return s
}

// Take denies by itself what Ask would deny, and only that: in every state
// reached here a denial of Take is a denial of Ask at the same instant.
func TestTakeRefusesWhatAskWouldRefuse(t *testing.T) {
	fast := 0
	rapid.Check(t, func(t *rapid.T) {
		wait := time.Duration(rapid.Int64Range(0, int64(300*time.Millisecond)).Draw(t, "wait"))
		s := saturated(t, wait)
		for range rapid.IntRange(1, 10).Draw(t, "steps") {
			switch rapid.IntRange(0, 4).Draw(t, "op") {
			case 0:
				s.pass(time.Duration(rapid.Int64Range(0, int64(100*time.Millisecond)).Draw(t, "dt")))
			case 1:
				if s.t.ord.open {
					s.answer(grant.GrantAnswer{ID: s.open().ID, Result: grant.Parked, Wait: time.Duration(rapid.Int64Range(0, int64(time.Second)).Draw(t, "wait"))})
				}
			case 2:
				if s.t.ord.open {
					s.grant(min(grant.Units(rapid.Int64Range(1, 5).Draw(t, "units")), s.open().Want))
				}
			case 3:
				s.try("write", 1, time.Second)
			}
			class := rapid.SampledFrom([]grant.RouteClass{"read", "write", "dear", "central"}).Draw(t, "class")
			d, ok := s.t.Take(s.now(), class, 1)
			if !ok || d.Outcome != Denied {
				continue
			}
			fast++
			s.nextAsk++
			again := s.t.Ask(s.now(), Ask{Ticket: s.nextAsk, Class: class, Count: 1, Budget: time.Hour}, &s.fx)
			if again.Outcome != Denied || again.Reason != grant.Over {
				t.Fatalf("Take denies %s, Ask says %s; %s", class, show(again), s.t.State())
			}
		}
	})
	if fast == 0 {
		t.Error("Take never denied: the test shows nothing")
	}
}

// A flood that Take denies is demand all the same, spreads its Retry-After, and
// ends with the first unit.
func TestTakeRefusesAFlood(t *testing.T) {
	s := saturated(t, 10*time.Second)
	before := s.t.meter.level
	last := time.Duration(0)
	for i := range 3000 { // 30 s of refill at 100 units/s
		d, ok := s.t.Take(s.now(), "read", 1)
		if !ok || d.Outcome != Denied || d.Reason != grant.Over || d.Cost != 1 || d.Version != s.version {
			t.Fatalf("request %d: %v %s", i, ok, show(d))
		}
		if d.RetryAfter < last || d.RetryAfter > longestSpread {
			t.Fatalf("request %d: Retry-After %v after %v", i, d.RetryAfter, last)
		}
		last = d.RetryAfter
	}
	if last < 25*time.Second {
		t.Errorf("3,000 units denied at 100/s, the last one is told %v", last)
	}
	if d, ok := s.t.Take(s.now(), "central", 1); ok {
		t.Errorf("a central class was decided here: %s", show(d))
	}
	s.t.Tick(s.now(), &s.fx)
	if got := s.t.meter.level - before; got < 2000 {
		t.Errorf("3,000 denied units raised the demand by %d", got)
	}
	s.grant(2)
	s.resolved()
	if d, _ := s.try("read", 1, time.Second); d.Outcome == Denied {
		t.Errorf("denied beside a unit: %s", show(d))
	}
}

// A change of the policy ends what was concluded under the old one.
func TestTakeRefusesUntilThePolicyChanges(t *testing.T) {
	s := saturated(t, 10*time.Second)
	if d, _ := s.t.Take(s.now(), "read", 1); d.Outcome != Denied {
		t.Fatal("not saturated")
	}
	p := testPolicy()
	p.Mode = grant.Shadow
	s.push(p)
	if d, ok := s.t.Take(s.now(), "read", 1); ok && d.Outcome == Denied {
		t.Errorf("mode shadow: %s", show(d))
	}
}
