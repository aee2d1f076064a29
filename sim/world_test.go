package sim

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/stipend/stipend/bounds"
	"github.com/stipend/stipend/proto/grant"
)

// policy is r units per second with one class "c" of cost 1 and a few dearer ones.
func policy(r, burst, q grant.Units, owners int, ttl time.Duration) *grant.Policy {
	p := &grant.Policy{
		Rate: grant.Rate{Units: r, Per: time.Second}, Burst: burst,
		Grant:   grant.GrantSettings{Quantum: q, Owners: owners, TTL: ttl},
		Classes: map[grant.RouteClass]grant.Class{},
	}
	for name, cost := range map[grant.RouteClass]grant.Units{"c": 1, "two": 2, "five": 5, "ten": 10, "free": 0} {
		if cost <= burst {
			p.Classes[name] = grant.Class{Cost: cost}
		}
	}
	return p
}

// newWorld is a world with n gateways whose links are up.
func newWorld(t testing.TB, cfg Config, n int) *World {
	t.Helper()
	w, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	for i := range n {
		w.AddGateway(grant.Owner(fmt.Sprintf("gw%d", i)), 0)
	}
	run(t, w, 100*time.Millisecond)
	return w
}

func run(t testing.TB, w *World, d time.Duration) {
	t.Helper()
	if err := w.Run(d); err != nil {
		t.Fatal(err)
	}
}

// put sets a policy and waits for it.
func put(t testing.TB, w *World, id grant.TenantID, p *grant.Policy) {
	t.Helper()
	w.Center.Put(id, p, nil)
	run(t, w, 10*time.Millisecond)
	if w.Judge.Tenant(id).policy != p {
		t.Fatalf("the policy of %q is not in force", id)
	}
}

// held fails unless all books are in order and every bound held.
func held(t testing.TB, w *World) {
	t.Helper()
	if err := w.Judge.Close(); err != nil {
		t.Fatal(err)
	}
}

func verdict(t testing.TB, w *World, id grant.TenantID, from grant.Instant) bounds.Verdict {
	t.Helper()
	v, err := w.Judge.Verdict(id, from)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// A healthy world: the bound holds, the limit is used, and nobody over the limit
// hears anything but 429.
func TestSmallWorld(t *testing.T) {
	cfg := DefaultConfig(1)
	cfg.Paranoid = true
	w := newWorld(t, cfg, 3)
	put(t, w, "acme", policy(200, 100, 20, 4, 30*time.Second))
	w.Offer(Load{Tenant: "acme", Class: "c", Every: Poisson(400), At: Skewed(3, 5*time.Second)})
	run(t, w, 5*time.Second)
	from := w.Now()
	run(t, w, 20*time.Second)
	held(t, w)
	v, c := verdict(t, w, "acme", from), w.Judge.Tenant("acme").Counts
	if v.UtilisationPPM < 970_000 || c.Undecided > 0 {
		t.Errorf("utilisation %d ppm, %+v", v.UtilisationPPM, c)
	}
	t.Logf("%d events, utilisation %d ppm, %+v", w.Events(), v.UtilisationPPM, c)
}

// Same seed, same bytes; another seed, others.
func TestSameSeedSameBytes(t *testing.T) {
	once := func(seed uint64) (string, uint64) {
		var trace bytes.Buffer
		cfg := DefaultConfig(seed)
		cfg.Trace = &trace
		cfg.Net.BreakEvery = 2 * time.Second
		cfg.Disk.UnknownPPM = 20_000
		w := newWorld(t, cfg, 3)
		put(t, w, "acme", policy(100, 50, 10, 3, 10*time.Second))
		put(t, w, "beta", policy(10, 5, 1, 3, 10*time.Second))
		w.Offer(Load{Tenant: "acme", Class: "c", Every: Poisson(200), At: Evenly(3)})
		w.Offer(Load{Tenant: "beta", Class: "c", Every: Poisson(20), At: Evenly(3)})
		run(t, w, 5*time.Second)
		w.Center.Crash()
		run(t, w, time.Second)
		w.Center.Start()
		run(t, w, 5*time.Second)
		held(t, w)
		return trace.String(), w.Digest()
	}
	a, da := once(7)
	b, db := once(7)
	if a != b || da != db {
		t.Error("two runs of one seed differ")
	}
	if _, dc := once(8); dc == da {
		t.Error("two seeds gave the same run")
	}
}
