package agent

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// TestWalletParallelTakes: what several cores take from one wallet is what was
// in it, unit for unit.
func TestWalletParallelTakes(t *testing.T) {
	const all = 400_000
	w := newWallet(t)
	w.Credit(at(0), all, 100, at(0).offset())
	var got atomic.Int64
	start := make(chan struct{})
	var takers sync.WaitGroup
	for range 4 {
		takers.Go(func() {
			<-start
			var mine int64
			for w.Take(at(1), 1).Why == NotRefused {
				mine++
			}
			got.Add(mine)
		})
	}
	close(start)
	takers.Wait()
	if got.Load() != all || w.spent() != all || w.takes.Load() != all {
		t.Fatalf("took %d, spent %d in %d takes, want %d", got.Load(), w.spent(), w.takes.Load(), all)
	}
}

// TestTakeBesideEverything: Take and Low run beside every other method. The
// units admitted, by either way, are the units counted as spent. Run with -race.
func TestTakeBesideEverything(t *testing.T) {
	s := hot(t, testPolicy(), 10, nil)
	base := s.now()
	var clock, taken atomic.Int64
	stop := make(chan struct{})
	var takers sync.WaitGroup
	for range 2 {
		takers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				d := grant.Instant(clock.Load())
				now := Reading{base.Mono + d, base.Wall + d}
				if d, ok := s.t.Take(now, "read", 1); ok && d.Path == Local {
					taken.Add(int64(d.Cost))
				} else {
					runtime.Gosched()
				}
				s.t.Low()
			}
		})
	}
	var asked int64
	policies := []*grant.Policy{testPolicy(), testPolicy()}
	policies[1].Classes["read"] = grant.Class{Cost: 2}
	for i := 0; i < 10_000 || taken.Load() < 500; i++ {
		d := grant.Instant(clock.Add(int64(time.Millisecond)))
		now := Reading{base.Mono + d, base.Wall + d}
		switch i % 97 {
		case 10:
			s.t.Distrust(now)
		case 20:
			s.version++
			s.t.Pushed(now, s.version, policies[i%2], false, &s.fx)
		case 30, 31:
			s.t.Link(now, i%97 == 31, &s.fx)
		case 40:
			s.t.Idle(now)
		default:
			d := s.t.Ask(now, Ask{Ticket: uint64(i), Class: "read", Count: 1, Budget: time.Second}, &s.fx)
			if d.Outcome == Admitted && d.Path == Local {
				asked += int64(d.Cost)
			}
		}
		if a := s.t.ord; a.open {
			s.t.Answer(now, grant.GrantAnswer{Tenant: testTenant, Incarnation: testInc, ID: a.req.ID,
				Result: grant.Granted, Units: a.req.Want, TTL: time.Second}, &s.fx)
		}
		s.t.Tick(now, &s.fx)
		for _, r := range s.fx.Resolved {
			if r.Decision.Outcome == Admitted && r.Decision.Path == Local {
				asked += int64(r.Decision.Cost)
			}
		}
		s.fx = Effects{}
		if i%16 == 0 {
			runtime.Gosched()
		}
	}
	close(stop)
	takers.Wait()
	if err := s.t.Check(); err != nil {
		t.Fatal(err)
	}
	if st := s.t.Stats(); int64(st.Spent) != taken.Load()+asked {
		t.Fatalf("spent %d, admitted %d by Take and %d by Ask", st.Spent, taken.Load(), asked)
	}
}
