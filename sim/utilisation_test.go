package sim

import (
	"testing"
	"time"

	"github.com/stipend/stipend/agent"
	"github.com/stipend/stipend/bounds"
	"github.com/stipend/stipend/proto/grant"
)

// A saturating tenant gets at least 97 % of r*T, however its load is spread or
// moves over gateways, for every policy that is promised it; once faults have
// stopped, and with 429 as the only refusal. The bound is judged beside it.
func TestUtilisation(t *testing.T) {
	const n = 5
	var seed uint64
	for _, p := range []*grant.Policy{
		policy(200, 100, 20, n, 20*time.Second),
		policy(1000, 30, 30, n, 10*time.Second),
		policy(50, 10, 2, n, 10*time.Second),
		policy(10, 10, 1, n, 20*time.Second),
	} {
		if promise := bounds.PromiseOf(p, 3*time.Millisecond); !promise.SlackFits || !promise.Covers {
			t.Fatalf("rate %v, q %d is not promised 97 %%: %+v", p.Rate, p.Grant.Quantum, promise)
		}
		r := p.Rate.PerSecond()
		for name, loads := range map[string][]Load{
			"one gateway":      {{Every: Steady(2 * r), At: On(0)}},
			"evenly":           {{Every: Poisson(2 * r), At: Evenly(n)}},
			"90/9/1, moving":   {{Every: Poisson(2 * r), At: Skewed(n, 3*time.Second)}},
			"hopping":          {{Every: Poisson(1.5 * r), At: Hopping(n, time.Second)}},
			"in turns":         {{Every: OnOff(2*r, time.Second, false), At: On(0)}, {Every: OnOff(2*r, time.Second, true), At: On(1)}},
			"in phase":         {{Every: Bursts(max(1, int(r/10)), 50*time.Millisecond), At: Evenly(n)}},
			"mixed costs":      {{Every: Poisson(r), At: Evenly(n)}, {Every: Poisson(r / 2), At: Hopping(n, 2*time.Second), Count: min(2, p.Grant.Quantum)}},
			"barely too much":  {{Every: Poisson(1.1 * r), At: Evenly(n)}},
			"one beside a few": {{Every: Poisson(2 * r), At: On(0)}, {Every: Poisson(1), At: Evenly(n)}},
		} {
			own := seed + uint64(len(name))
			t.Run(p.Rate.String()+" "+name, func(t *testing.T) {
				t.Parallel()
				cfg := DefaultConfig(own)
				w := newWorld(t, cfg, n)
				put(t, w, acme, p)
				for _, l := range loads {
					l.Tenant, l.Class = acme, "c"
					w.Offer(l)
				}
				// Faults first; what they broke is gone one ttl after they stopped.
				w.Haunt(Faults{CenterCrash: 4 * time.Second, Kill: 3 * time.Second, Pause: 2 * time.Second, Sleep: 3 * time.Second,
					WallStep: 2 * time.Second, Break: time.Second, Hiccup: 3 * time.Second, DownMost: time.Second, PauseMost: 2 * time.Second},
					[]grant.TenantID{acme}, w.Now().Add(10*time.Second))
				run(t, w, 14*time.Second)
				for _, g := range w.Gateways() {
					if !g.Up() {
						t.Fatalf("%s is not back", g.Owner)
					}
				}
				if u := utilisation(t, w, p.Grant.TTL, 10*p.Grant.TTL); u < 0.97 {
					t.Errorf("%.3f of the rate is used, promised are 0.97", u)
				}
			})
		}
		seed += 100
	}
}

// Case 23: two agents, 400/s and 200/s, each on and off every second in turn,
// limit 600: at least 95 % of the limit used, the busier one not below its share.
func TestCase23InTurns(t *testing.T) {
	w := newWorld(t, DefaultConfig(23), 2)
	put(t, w, acme, policy(300, 300, 30, 2, 10*time.Second))
	var got [2]grant.Units
	for i, rate := range []float64{400, 200} {
		w.Offer(Load{Tenant: acme, Class: "c", Every: OnOff(rate, time.Second, i == 1), At: On(i), Done: func(_ *Gateway, d agent.Decision) {
			if d.Outcome == agent.Admitted {
				got[i] += d.Cost
			}
		}})
	}
	run(t, w, 60*time.Second)
	held(t, w)
	// They are never on together: 400/s meet 300/s and a burst of what the other
	// left, 200/s all fit.
	if got[1] < 5700 || got[0] < 2*got[1]*95/100 {
		t.Errorf("%d and %d units of 12000 and 6000 asked for", got[0], got[1])
	}
}

// Nobody below the limit is refused: load at 90 % of the rate in even steps, on
// one gateway and spread.
func TestBelowTheLimit(t *testing.T) {
	for i, place := range []Place{On(0), Evenly(4), Hopping(4, time.Second)} {
		w := newWorld(t, DefaultConfig(uint64(40+i)), 4)
		put(t, w, acme, policy(200, 100, 20, 4, 20*time.Second))
		w.Offer(Load{Tenant: acme, Class: "c", Every: Steady(180), At: place})
		run(t, w, time.Minute)
		held(t, w)
		if c := w.Judge.Tenant(acme).Counts; c.Denied+c.Undecided > 0 {
			t.Errorf("load %d: %d denied and %d undecided of %d below the limit", i, c.Denied, c.Undecided, c.Admitted)
		}
	}
}
