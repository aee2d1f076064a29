package sim

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

var (
	seedFlag      = flag.Uint64("seed", 0, "run only the history of this seed; 0: as many as -histories says")
	historiesFlag = flag.Int("histories", 40, "how many random histories to run")
	storyFlag     = flag.Bool("story", false, "write the trace of every history to the log")
)

// randomPolicy draws small numbers, so that limits are met all the time.
func randomPolicy(rng *rand.Rand) *grant.Policy {
	ttls := []time.Duration{time.Second, 2 * time.Second, 5 * time.Second, 20 * time.Second}
	p := policy([]grant.Units{0, 1, 5, 20, 50, 200}[rng.IntN(6)], 1+grant.Units(rng.IntN(60)), grant.Units(rng.IntN(30)), rng.IntN(6), ttls[rng.IntN(4)])
	if rng.IntN(3) == 0 {
		// Few periods: the checker's common denominator must stay small.
		p.Rate.Per = []time.Duration{7 * time.Millisecond, 300 * time.Millisecond, 3 * time.Second, time.Minute}[rng.IntN(4)]
		p.Rate.Units = p.Rate.Units * grant.Units(p.Rate.Per) / grant.Units(time.Second)
	}
	if c, ok := p.Classes["two"]; ok && rng.IntN(2) == 0 {
		c.Central = true
		p.Classes["two"] = c
	}
	switch rng.IntN(12) {
	case 0:
		p.Mode = grant.Shadow
	case 1:
		p.Mode = grant.Off
	}
	if rng.IntN(4) == 0 {
		p.Emergency = &grant.Emergency{Rate: grant.Rate{Units: 1, Per: time.Second}, Burst: 10,
			Grant: grant.GrantSettings{Quantum: 1 + grant.Units(rng.IntN(8)), Owners: 1 + rng.IntN(4), TTL: ttls[1+rng.IntN(3)]}}
		p.Classes["c"] = grant.Class{Cost: 1, Emergency: true}
	}
	return p
}

// history draws a world and what happens in it, all of it from the seed.
func history(t testing.TB, seed uint64) *World {
	cfg := DefaultConfig(seed)
	rng := rand.New(rand.NewPCG(seed, 99))
	cfg.Paranoid = true
	cfg.PolicyLag = 40 * time.Second
	cfg.LeaseTTL = []time.Duration{time.Second, 3 * time.Second, 10 * time.Second}[rng.IntN(3)]
	cfg.CommitEndsProcess = rng.IntN(2) == 0
	cfg.Authority.DedupWindow = []time.Duration{time.Second, 10 * time.Second}[rng.IntN(2)]
	cfg.Authority.PersistTimeEvery = []time.Duration{100 * time.Millisecond, 5 * time.Second}[rng.IntN(2)]
	switch rng.IntN(4) {
	case 0:
		cfg.Authority.MaxInbox, cfg.Authority.MaxParked, cfg.Authority.MaxBatch = 8, 3, 4
	case 1:
		cfg.Agent.MaxWaiters = 4
	}
	cfg.Net.Latency = []time.Duration{100 * time.Microsecond, 2 * time.Millisecond, 30 * time.Millisecond}[rng.IntN(3)]
	cfg.Net.Jitter = cfg.Net.Latency
	cfg.Agent.Deadline = []time.Duration{10 * time.Millisecond, 100 * time.Millisecond, time.Second}[rng.IntN(3)]
	cfg.Disk.Latency = []time.Duration{0, time.Millisecond, 20 * time.Millisecond}[rng.IntN(3)]
	if rng.IntN(2) == 0 {
		cfg.Net.LossPPM, cfg.Net.DupPPM, cfg.Net.LatePPM, cfg.Net.Late = 50_000, 100_000, 100_000, 8*time.Second
	}
	if rng.IntN(2) == 0 {
		cfg.Disk.UnknownPPM = 20_000
	}
	if *storyFlag {
		cfg.Trace = t.Output()
	}
	w, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	rho := cfg.Authority.RhoPPB
	w.Center.Clock.Drift(w.Now(), rng.Int64N(2*rho+1)-rho, rng.Int64N(2*rho+1)-rho)
	n := 2 + rng.IntN(4)
	for i := range n {
		w.AddGateway(grant.Owner(fmt.Sprintf("gw%d", i)), []int64{-rho, 0, rho}[rng.IntN(3)])
	}
	tenants := []grant.TenantID{"a", "b"}[:1+rng.IntN(2)]
	until := w.Now().Add(25 * time.Second)
	for _, id := range tenants {
		w.Center.Put(id, randomPolicy(rng), nil)
		for range 1 + rng.IntN(3) {
			rate := []float64{3, 20, 60}[rng.IntN(3)]
			pace := []Pace{Steady(rate), Poisson(rate), OnOff(rate, time.Second, false), Bursts(10, time.Second)}[rng.IntN(4)]
			place := []Place{On(rng.IntN(n)), Evenly(n), Hopping(n, time.Second), Skewed(n, 3*time.Second)}[rng.IntN(4)]
			class := []grant.RouteClass{"c", "c", "two", "five", "free"}[rng.IntN(5)]
			w.Offer(Load{Tenant: id, Class: class, Count: grant.Units(rng.IntN(4)), Every: pace, At: place, Until: until})
		}
		edits := rand.New(rand.NewPCG(seed, uint64(id[0])))
		if edits.IntN(3) > 0 {
			var edit func()
			edit = func() {
				if w.Now() > until {
					return
				}
				next := randomPolicy(edits)
				if edits.IntN(6) == 0 {
					next = nil
				}
				w.Center.Put(id, next, nil)
				w.After(time.Duration(edits.Int64N(int64(6*time.Second))), edit)
			}
			w.After(time.Duration(edits.Int64N(int64(6*time.Second))), edit)
		}
	}
	often := func(d time.Duration) time.Duration {
		if rng.IntN(3) == 0 {
			return 0
		}
		return d
	}
	w.Haunt(Faults{
		CenterCrash: often(6 * time.Second), StepDown: often(6 * time.Second), CenterPause: often(8 * time.Second), Kill: often(5 * time.Second), Pause: often(4 * time.Second),
		Sleep: often(4 * time.Second), Nap: often(time.Second), WallStep: often(3 * time.Second), Drift: often(2 * time.Second),
		Break: often(3 * time.Second), Hiccup: often(5 * time.Second), Fence: often(20 * time.Second), Drain: often(10 * time.Second), GiveUp: often(time.Second),
		DownMost: 2 * time.Second, PauseMost: []time.Duration{300 * time.Millisecond, 6 * time.Second}[rng.IntN(2)],
	}, tenants, until)
	return w
}

// Random histories: grants, Checks, policy edits, deletes, crashes, commits of
// unknown outcome, zombies, suspends, clock steps, over the real machines. The
// bound, the books, the sum cap, durability and all invariants hold.
func TestRandomHistories(t *testing.T) {
	first, last := uint64(1), uint64(*historiesFlag)
	if *seedFlag != 0 {
		first, last = *seedFlag, *seedFlag
	}
	var units grant.Units
	found := 0
	for seed := first; seed <= last; seed++ {
		w := history(t, seed)
		err := w.Run(32 * time.Second)
		if err == nil {
			err = w.Judge.Close()
		}
		if err != nil {
			t.Fatalf("%v\nreplay: go test ./sim -run 'TestRandomHistories$' -seed=%d -story", err, seed)
		}
		for _, c := range w.Judge.order {
			units += c.Counts.Units
		}
		found += w.Judge.FoundAgain
	}
	if *seedFlag == 0 && (units == 0 || found == 0) {
		t.Errorf("the histories admitted %d units and found %d decisions again after a load: they test nothing", units, found)
	}
	t.Logf("%d histories, %d units admitted, %d acknowledged decisions found again", last-first+1, units, found)
}
