package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/authority/pebblestore"
	"github.com/stipend/stipend/proto/grant"
)

// BenchmarkGrants is durable grants through partitions, their drive and a real
// store in a real folder, without gRPC: 64 incarnations ask again as soon as
// they are answered, for one hot tenant or for a tenant each.
func BenchmarkGrants(b *testing.B) {
	b.Run("hot", func(b *testing.B) { benchGrants(b, func(int) grant.TenantID { return "hot" }) })
	b.Run("each", func(b *testing.B) {
		benchGrants(b, func(i int) grant.TenantID { return grant.TenantID(fmt.Sprintf("tenant-%d", i)) })
	})
}

func benchGrants(b *testing.B, tenantOf func(int) grant.TenantID) {
	const askers = 64
	cfg := pebblestore.DefaultConfig(b.TempDir() + "/store")
	cfg.Log = slog.New(slog.DiscardHandler)
	store, err := pebblestore.Create(cfg)
	if err != nil {
		b.Fatal(err)
	}
	var parts []*partition
	for id := range grant.Partition(grant.Partitions) {
		p := newPartition(authority.DefaultConfig(), id, store, machineClock, func(*authority.PolicyPush) {})
		if err := p.load(); err != nil {
			b.Fatal(err)
		}
		parts = append(parts, p)
	}
	d := newDrive(machineClock, store.CommitParts, parts...)
	ctx, stop := context.WithCancel(b.Context())
	done := make(chan error, 1)
	go func() { done <- d.run(ctx) }()

	policy := &grant.Policy{
		Rate: grant.Rate{Units: 1 << 30, Per: time.Second}, Burst: 1 << 30, Classes: map[grant.RouteClass]grant.Class{"op": {Cost: 1}},
		Grant: grant.GrantSettings{Quantum: 1000, Owners: 1024, TTL: 10 * time.Second},
	}
	ask := func(t grant.TenantID, c authority.Call) authority.Reply {
		r := make(reply, 1)
		c.Caller = r
		parts[grant.PartitionOf(t)].offer(c)
		return <-r
	}
	incs := make([]grant.Incarnation, askers)
	for i := range askers {
		incs[i] = grant.NewIncarnation()
		t := tenantOf(i)
		ask(t, authority.Call{Member: &authority.Member{Incarnation: incs[i], Owner: grant.Owner(incs[i].String()), State: authority.Live}})
		ask(t, authority.Call{Put: &authority.PutPolicy{Tenant: t, Policy: policy, AnyVersion: true}})
	}
	var all sync.WaitGroup
	b.ReportAllocs()
	b.ResetTimer()
	for i := range askers {
		all.Go(func() {
			t := tenantOf(i)
			for n := i; n < b.N; n += askers {
				req := grant.GrantRequest{Tenant: t, Incarnation: incs[i], ID: grant.GrantID(n/askers + 1), Want: 1, Min: 1, KnownVersion: 1}
				req.Sum = req.Fingerprint()
				if a := ask(t, authority.Call{Grant: &req}); a.Grant.Result != grant.Granted {
					b.Errorf("%v %v", a.Grant.Result, a.Grant.Reason)
					return
				}
			}
		})
	}
	all.Wait()
	b.StopTimer()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "grants/s")
	st := store.Stats()
	b.ReportMetric(float64(st.CommitBytes)/float64(b.N), "log-B/grant")
	stop()
	if err := <-done; err != nil {
		b.Fatal(err)
	}
	if err := store.Close(); err != nil {
		b.Fatal(err)
	}
}
