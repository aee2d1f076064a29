package agent

import (
	"testing"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// The disk of the authority hangs: streams open, and nothing is answered on
// them. That is loss of the centre, also while the link is up, where one request
// at a time waits in vain and the others spend the emergency grants. With the
// first answer it ends.
func TestMuteCentreIsLoss(t *testing.T) {
	p := testPolicy()
	p.Classes["pay"] = grant.Class{Cost: 1, Emergency: true}
	p.Emergency = &grant.Emergency{Rate: grant.Rate{Units: 1, Per: time.Second}, Burst: 20,
		Grant: grant.GrantSettings{Quantum: 16, Owners: 2, TTL: time.Hour}}
	s := hot(t, p, 3, nil)
	s.answer(grant.GrantAnswer{ID: s.t.reserve.req.ID, Emergency: true, Result: grant.Granted, Units: 10, TTL: time.Hour})
	for range 3 {
		s.try("pay", 1, time.Second) // what is held
	}
	var paid []time.Duration
	pay := func() {
		for range 2 {
			if len(paid) == 8 {
				break // leave some
			}
			if d, _ := s.try("pay", 1, time.Second); d.Path == FromReserve {
				paid = append(paid, s.mono)
			}
		}
		s.pass(s.t.cfg.Deadline)
		s.resolved()
	}
	for range 3 {
		for range 4 { // up for 2 s
			pay()
			s.pass(500 * time.Millisecond)
		}
		s.t.Link(s.now(), false, &s.fx)
		s.pass(250 * time.Millisecond)
		pay()
		s.pass(250 * time.Millisecond)
		s.t.Link(s.now(), true, &s.fx)
	}
	if len(paid) == 0 || paid[0] < s.t.cfg.LostAfter || paid[0] > s.t.cfg.LostAfter+time.Second || len(paid) < 8 {
		t.Errorf("emergency grants were spent at %v", paid)
	}
	if s.t.reserve.wallet.Balance() == 0 {
		t.Fatal("none are left to tell that it ends")
	}
	d, ticket := s.try("read", 1, time.Second)
	want(t, d, Waiting, grant.None)
	s.checked(grant.CheckAnswer{Attempt: grant.Attempt{Seq: 1 << 40}, Verdict: grant.Undecided, Reason: grant.Overloaded})
	s.pass(s.t.cfg.Deadline)
	want(t, s.one(ticket), Undecided, grant.Deadline)
	paid = nil
	if pay(); len(paid) > 0 {
		t.Error("emergency grants were spent after an answer")
	}
}
