package gate_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"golang.org/x/time/rate"

	"github.com/stipend/stipend/agent"
	"github.com/stipend/stipend/agent/gate"
	"github.com/stipend/stipend/agent/link/linktest"
	"github.com/stipend/stipend/proto/grant"
)

// plenty is a policy whose wallet does not run dry while a benchmark runs.
func plenty() *grant.Policy {
	p := policy()
	p.Rate = grant.Rate{Units: 1 << 38, Per: time.Second}
	p.Burst, p.Grant.Quantum = 1<<40, 1<<39
	return p
}

func running(tb testing.TB, p *grant.Policy) *gate.Gate {
	a := linktest.New()
	a.Put("acme", p)
	cfg := config(a)
	cfg.Log = slog.New(slog.DiscardHandler)
	g, err := gate.New(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx) }()
	tb.Cleanup(func() { cancel(); <-done; a.Close() })
	// Until the wallet serves: the tenant must have become hot.
	until := time.Now().Add(10 * time.Second)
	for n := 0; n < 1000 && time.Now().Before(until); {
		d := g.Decide(ctx, gate.Request{Tenant: "acme", Class: "read", Count: 1})
		if d.Path == agent.Local && d.Outcome != agent.Undecided {
			n++
		} else {
			n = 0
		}
	}
	return g
}

// BenchmarkDecide compares the decision of a hot tenant, look-up, clock, wallet
// and counters included, to a bare token bucket in the process.
func BenchmarkDecide(b *testing.B) {
	r := gate.Request{Tenant: "acme", Class: "read", Count: 1}
	ctx := context.Background()
	run := func(name string, f func()) {
		b.Run(name+"/alone", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				f()
			}
		})
		b.Run(name+"/contended", func(b *testing.B) {
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					f()
				}
			})
		})
	}
	g := running(b, plenty())
	run("admit", func() {
		if d := g.Decide(ctx, r); d.Outcome != agent.Admitted {
			b.Errorf("%+v", d)
		}
	})
	lim := rate.NewLimiter(rate.Limit(1e12), 1<<40)
	run("x-time-rate", func() {
		if !lim.AllowN(time.Now(), 1) {
			b.Error("refused")
		}
	})
	over := plenty()
	over.Rate, over.Burst, over.Grant.Quantum = grant.Rate{Units: 1, Per: time.Hour}, 10, 1
	over.Classes = map[grant.RouteClass]grant.Class{"read": {Cost: 1}}
	g2 := running(b, over)
	run("deny", func() { g2.Decide(ctx, r) })
}

// The fast path allocates nothing.
func TestDecideAllocates(t *testing.T) {
	g := running(t, plenty())
	ctx := context.Background()
	r := gate.Request{Tenant: "acme", Class: "read", Count: 1}
	local := 0
	n := testing.AllocsPerRun(10_000, func() {
		if g.Decide(ctx, r).Path == agent.Local {
			local++
		}
	})
	if n != 0 || local < 9000 {
		t.Errorf("%v allocations a decision; %d of 10001 were local", n, local)
	}
}

// BenchmarkDecideRatio is the time of an admission, and of a denial, as a share
// of AllowN's in the same run. Blocks of each take turns and the fastest block of
// each counts, so that a busy machine blurs it little.
func BenchmarkDecideRatio(b *testing.B) {
	const block = 20_000
	r := gate.Request{Tenant: "acme", Class: "read", Count: 1}
	ctx := context.Background()
	lim := rate.NewLimiter(rate.Limit(1e12), 1<<40)
	theirs := func() { lim.AllowN(time.Now(), 1) }
	over := policy()
	over.Rate, over.Burst, over.Grant.Quantum = grant.Rate{Units: 1, Per: time.Hour}, 10, 1
	over.Classes = map[grant.RouteClass]grant.Class{"read": {Cost: 1}}
	for _, c := range []struct {
		name string
		p    *grant.Policy
	}{{"admit", plenty()}, {"deny", over}} {
		g := running(b, c.p)
		ours := func() { g.Decide(ctx, r) }
		for _, workers := range []int{1, 2} {
			b.Run(fmt.Sprintf("%s/%d", c.name, workers), func(b *testing.B) {
				timed := func(f func()) time.Duration {
					var wg sync.WaitGroup
					start := time.Now()
					for range workers {
						wg.Go(func() {
							for range block {
								f()
							}
						})
					}
					wg.Wait()
					return time.Since(start)
				}
				best := [2]time.Duration{time.Hour, time.Hour}
				for b.Loop() {
					best[0] = min(best[0], timed(ours))
					best[1] = min(best[1], timed(theirs))
				}
				b.ReportMetric(float64(best[0])/float64(best[1]), "ratio")
				b.ReportMetric(float64(best[0].Nanoseconds())/block, "ns/decision")
				b.ReportMetric(float64(best[1].Nanoseconds())/block, "ns/AllowN")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}
