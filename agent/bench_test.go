package agent

import (
	"fmt"
	"math"
	"testing"
	"time"

	"golang.org/x/time/rate"

	"github.com/stipend/stipend/proto/grant"
)

// The benchmarks compare a decision from the wallet with a decision of
// golang.org/x/time/rate in the same run. Both sides look the tenant up in a
// table of 1,000, read the clock once and spend one unit. Take also prices the
// request and checks its class, the policy's age and the clocks' offset.

const benchTenants = 1000

func benchName(i int) string { return fmt.Sprintf("tenant-%04d", i) }

// benchTable holds tenants that are hot and hold units units each.
func benchTable(units Units) (map[grant.TenantID]*Tenant, time.Time) {
	base := time.Now()
	now := Reading{Wall: grant.Instant(base.UnixNano())}
	var seq uint64
	cfg := DefaultConfig()
	cfg.NextSeq = func() uint64 { seq++; return seq }
	cfg.Rand = func(int64) int64 { return 0 }
	policy := &grant.Policy{
		Rate: grant.Rate{Units: 1000, Per: time.Second}, Burst: 1000,
		Classes: map[grant.RouteClass]grant.Class{"read": {Cost: 1}, "write": {Cost: 5}, "search": {Cost: 20, Central: true}},
		Grant:   grant.GrantSettings{Quantum: grant.MaxQuantum, Owners: 1, TTL: grant.MaxTTL},
	}
	table := make(map[grant.TenantID]*Tenant)
	for i := range benchTenants {
		id := grant.TenantID(benchName(i))
		t := NewTenant(cfg, id, grant.Incarnation{1})
		var fx Effects
		t.Pushed(now, 1, policy, false, &fx)
		for range 3 {
			t.Ask(now, Ask{Ticket: uint64(len(fx.Checks)), Class: "read", Count: 1, Budget: time.Second}, &fx)
		}
		if units > 0 {
			t.ord.wallet.Credit(now, units, grant.Never, now.offset())
		}
		t.ord.wallet.Queue(false)
		t.until.Store(math.MaxInt64)
		table[id] = t
	}
	return table, base
}

func benchLimiters(burst int) map[grant.TenantID]*rate.Limiter {
	table := make(map[grant.TenantID]*rate.Limiter)
	for i := range benchTenants {
		table[grant.TenantID(benchName(i))] = rate.NewLimiter(1e-9, burst)
	}
	return table
}

func benchReading(base time.Time) Reading {
	t := time.Now()
	return Reading{Mono: grant.Instant(t.Sub(base)), Wall: grant.Instant(t.UnixNano())}
}

var benchID = grant.TenantID(benchName(500))

func BenchmarkTake(b *testing.B) {
	table, base := benchTable(grant.MaxQuantum)
	b.ReportAllocs()
	for b.Loop() {
		if _, ok := table[benchID].Take(benchReading(base), "read", 1); !ok {
			b.Fatal("not admitted")
		}
	}
}

func BenchmarkTakeDenied(b *testing.B) {
	table, base := benchTable(0)
	b.ReportAllocs()
	for b.Loop() {
		if _, ok := table[benchID].Take(benchReading(base), "read", 1); ok {
			b.Fatal("admitted")
		}
	}
}

func BenchmarkTakeParallel(b *testing.B) {
	table, base := benchTable(grant.MaxQuantum)
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			table[benchID].Take(benchReading(base), "read", 1)
		}
	})
}

func BenchmarkTakeDeniedParallel(b *testing.B) {
	table, base := benchTable(0)
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			table[benchID].Take(benchReading(base), "read", 1)
		}
	})
}

func BenchmarkAllowN(b *testing.B) {
	table := benchLimiters(math.MaxInt32)
	b.ReportAllocs()
	for b.Loop() {
		if !table[benchID].AllowN(time.Now(), 1) {
			b.Fatal("not admitted")
		}
	}
}

func BenchmarkAllowNDenied(b *testing.B) {
	table := benchLimiters(0)
	b.ReportAllocs()
	for b.Loop() {
		if table[benchID].AllowN(time.Now(), 1) {
			b.Fatal("admitted")
		}
	}
}

func BenchmarkAllowNParallel(b *testing.B) {
	table := benchLimiters(math.MaxInt32)
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			table[benchID].AllowN(time.Now(), 1)
		}
	})
}

// BenchmarkAskDenied is the slow path's answer to a caller over its limit while
// the authority's estimate stands.
func BenchmarkAskDenied(b *testing.B) {
	table, base := benchTable(0)
	t := table[benchID]
	var fx Effects
	now := benchReading(base)
	t.run(now, &fx)
	t.Answer(now, grant.GrantAnswer{Tenant: t.id, Incarnation: t.inc, ID: t.ord.req.ID, Result: grant.Parked, Wait: time.Hour}, &fx)
	b.ReportAllocs()
	for b.Loop() {
		if d := t.Ask(benchReading(base), Ask{Class: "read", Count: 1, Budget: time.Second}, &fx); d.Outcome != Denied {
			b.Fatalf("%+v", d)
		}
	}
}
