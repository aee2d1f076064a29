package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/authority/pebblestore"
	"github.com/stipend/stipend/proto/grant"
)

// grantSettings let every caller have one unit after the other at once.
var grantSettings = grant.GrantSettings{Quantum: 1000, Owners: 1024, TTL: 10 * time.Second}

// asker asks for grant after grant for one incarnation and one tenant.
type asker struct {
	tenant grant.TenantID
	inc    grant.Incarnation
	last   grant.GrantID
}

// next asks for one unit and says that the one before was spent.
func (a *asker) next() grant.GrantRequest {
	a.last++
	r := grant.GrantRequest{Tenant: a.tenant, Incarnation: a.inc, ID: a.last, Want: 1, Min: 1, KnownVersion: 1}
	r.Sum = r.Fingerprint()
	return r
}

// partitionTenants names one tenant for each of n callers, the cth of partition
// c mod 64, so that the callers' commits meet only in the store.
func partitionTenants(n int) []grant.TenantID {
	out := make([]grant.TenantID, n)
	left := n
	for i := 0; left > 0; i++ {
		t := grant.TenantID(tenantName(i))
		for c := int(grant.PartitionOf(t)); c < n; c += grant.Partitions {
			if out[c] == "" {
				out[c] = t
				left--
				break
			}
		}
	}
	return out
}

// ledgerCaller is a Node of its own over a store: it makes the records of a
// grant.
type ledgerCaller struct {
	asker
	partition grant.Partition
	node      *authority.Node
	records   []authority.Record // of the last step
}

func newLedgerCaller(t grant.TenantID, store authority.Store) (*ledgerCaller, error) {
	c := &ledgerCaller{asker: asker{tenant: t, inc: grant.NewIncarnation()}, partition: grant.PartitionOf(t)}
	c.node = authority.NewNode(authority.DefaultConfig(), c.partition)
	if err := c.node.Load(store, authority.Reading{}); err != nil {
		return nil, err
	}
	m := authority.Member{Incarnation: c.inc, Owner: "gateway", State: authority.Live}
	for _, call := range []authority.Call{
		{Member: &m},
		{Put: &authority.PutPolicy{Tenant: t, Policy: benchPolicy(grantSettings), AnyVersion: true}},
	} {
		if err := c.step(0, call, store); err != nil {
			return nil, err
		}
		c.node.Replies()
	}
	return c, nil
}

func (c *ledgerCaller) step(at time.Duration, call authority.Call, store authority.Store) error {
	if _, ok := c.node.Offer(call); !ok {
		return errors.New("the inbox is full")
	}
	now := grant.Instant(at)
	c.records = c.node.Step(authority.Reading{Mono: now, Raw: now})
	if len(c.records) == 0 {
		return nil
	}
	err := store.Commit(c.partition, c.records)
	c.node.Done(err)
	return err
}

// grant makes one grant durable.
func (c *ledgerCaller) grant(at time.Duration, store authority.Store) error {
	req := c.next()
	if err := c.step(at, authority.Call{Caller: c, Grant: &req}, store); err != nil {
		return err
	}
	for _, r := range c.node.Replies() {
		if a := r.Grant; a != nil {
			if a.Result != grant.Granted {
				return fmt.Errorf("grant %d of %s: %v %v", a.ID, a.Tenant, a.Result, a.Reason)
			}
			return nil
		}
	}
	return fmt.Errorf("grant %d of %s: no reply", c.last, c.tenant)
}

// measureGrants compares durable grants, inside the authority and asked through
// its links, with Pebble committing the same bytes.
func measureGrants(ctx context.Context, r *run) (err error) {
	if r.Callers > grant.Partitions {
		return missingError(fmt.Sprintf("more than %d callers", grant.Partitions))
	}
	if err := r.build(ctx, "stipend-authority"); err != nil {
		return err
	}
	tenants := partitionTenants(r.Callers)

	cfg := pebblestore.DefaultConfig(filepath.Join(r.dir, "ledger"))
	cfg.Log = slog.New(slog.DiscardHandler)
	store, err := pebblestore.Create(cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	callers := make([]*ledgerCaller, r.Callers)
	for i := range callers {
		if callers[i], err = newLedgerCaller(tenants[i], store); err != nil {
			return err
		}
		if err := callers[i].grant(time.Second, store); err != nil {
			return err
		}
	}
	raw, err := openRaw(filepath.Join(r.dir, "raw"), callers)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, raw.db.Close()) }()

	daemon, err := startAuthority(ctx, r, filepath.Join(r.dir, "authority-of-grants"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, daemon.close()) }()
	hot := grant.TenantID("hot")
	names := []string{string(hot)}
	for _, t := range tenants {
		names = append(names, string(t))
	}
	if err := daemon.putPolicies(ctx, names, grantSettings); err != nil {
		return err
	}
	gates := make([]*gateway, r.Callers)
	spread, shared := make([]*asker, r.Callers), make([]*asker, r.Callers)
	for i := range gates {
		if gates[i], err = daemon.openGateway(ctx, fmt.Sprintf("gateway-%d", i)); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, gates[i].close()) }()
		spread[i] = &asker{tenant: tenants[i], inc: gates[i].inc}
		shared[i] = &asker{tenant: hot, inc: gates[i].inc}
	}

	one, err := daemon.openGateway(ctx, "gateway-of-all")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, one.close()) }()
	alone := make([]*asker, r.Callers)
	for i := range alone {
		alone[i] = &asker{tenant: tenants[i], inc: one.inc}
	}
	inside, err := r.testBinary(ctx, "authority/daemon")
	if err != nil {
		return err
	}

	self, err := thisProcess()
	if err != nil {
		return err
	}
	network := func(g func(int) *gateway, a []*asker) func() (turn, error) {
		return func() (turn, error) {
			return r.load(ctx, "grants", daemon.child, names[:1], func(ctx context.Context, c int, _ string) error { return g(c).grant(ctx, a[c]) })
		}
	}
	own := func(c int) *gateway { return gates[c] }
	process := func(name string) func() (turn, error) {
		return func() (turn, error) {
			m, err := r.bench(ctx, inside, "BenchmarkGrants/"+name, r.Turn.String())
			return turn{Rate: m["grants/s"]}, err
		}
	}
	sides := []struct {
		name string
		take func() (turn, error)
	}{
		{"Pebble alone: a synced batch of the same bytes each", func() (turn, error) {
			return r.load(ctx, "raw", self, names[:1], func(_ context.Context, c int, _ string) error { return raw.commit(c) })
		}},
		{"authority without gRPC, one hot tenant", process("hot")},
		{"authority without gRPC, a tenant each", process("each")},
		{"authority, one link for all tenants", network(func(int) *gateway { return one }, alone)},
		{"authority, a link each, one hot tenant", network(own, shared)},
		{"authority, a link each, a tenant each", network(own, spread)},
	}
	got := make([]turns, len(sides))
	for range r.Pairs {
		for i, s := range sides {
			one, err := s.take()
			if err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
			got[i] = append(got[i], one)
		}
	}
	fmt.Fprintf(r.out, "A grant commits %d records, %d bytes of keys and values; %d callers, %d turns of %v a side.\n\n", len(raw.templates[0]), raw.bytes, r.Callers, r.Pairs, r.Turn)
	t := newTable("durable grants", "grants/s", "ratio to Pebble", "p50 ms", "p99 ms", "server CPU s/100k", "client CPU s/100k")
	for i, s := range sides {
		cell := func(format string, f func(turn) float64) string {
			all := got[i].of(f)
			if all.median() == 0 {
				return "-" // not measured inside another process
			}
			return all.text(format)
		}
		ratio := "1"
		if i > 0 {
			ratio = got[i].of(rateOf).over(got[0].of(rateOf)).text("%.2f")
		}
		server := "-"
		if i > 0 {
			server = cell("%.2f", func(t turn) float64 { return t.Server })
		}
		t.row(s.name, cell("%.0f", rateOf), ratio, cell("%.1f", func(t turn) float64 { return t.P50 / 1000 }), cell("%.1f", func(t turn) float64 { return t.P99 / 1000 }),
			server, cell("%.2f", func(t turn) float64 { return t.Client }))
	}
	t.print(r.out)
	return nil
}

// grant asks the authority for one grant and waits for it.
func (w *gateway) grant(ctx context.Context, a *asker) error {
	req := a.next()
	answers := w.grantsOf(a.tenant)
	if why := w.link.Grant(&req); why != grant.None {
		return fmt.Errorf("link: %v", why)
	}
	select {
	case got := <-answers:
		if got.ID != req.ID || got.Result != grant.Granted {
			return fmt.Errorf("grant %d of %s, asked for %d: %v %v", got.ID, got.Tenant, req.ID, got.Result, got.Reason)
		}
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// rawPebble commits batches of the shape of a grant's, with Pebble's defaults.
type rawPebble struct {
	db        *pebble.DB
	templates [][]authority.Record // by caller
	counts    []uint64
	bytes     int // of keys and values of one batch
}

func openRaw(dir string, callers []*ledgerCaller) (*rawPebble, error) {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	db, err := pebble.Open(dir, &pebble.Options{Logger: noLogger{}, FormatMajorVersion: pebble.FormatNewest})
	if err != nil {
		return nil, err
	}
	raw := &rawPebble{db: db, counts: make([]uint64, len(callers))}
	for _, c := range callers {
		var copied []authority.Record
		for _, rec := range c.records {
			copied = append(copied, authority.Record{Key: slices.Concat([]byte{byte(c.partition)}, rec.Key), Value: slices.Clone(rec.Value)})
		}
		raw.templates = append(raw.templates, copied)
	}
	for _, rec := range raw.templates[0] {
		raw.bytes += len(rec.Key) + len(rec.Value)
	}
	return raw, nil
}

func (w *rawPebble) commit(caller int) error {
	w.counts[caller]++
	b := w.db.NewBatch()
	for _, rec := range w.templates[caller] {
		if rec.Value == nil {
			if err := b.Delete(rec.Key, nil); err != nil {
				return err
			}
			continue
		}
		if len(rec.Value) >= 8 {
			binary.BigEndian.PutUint64(rec.Value[len(rec.Value)-8:], w.counts[caller])
		}
		if err := b.Set(rec.Key, rec.Value, nil); err != nil {
			return err
		}
	}
	if err := b.Commit(pebble.Sync); err != nil {
		return err
	}
	return b.Close()
}

// noLogger lets Pebble say only what ends the run.
type noLogger struct{}

func (noLogger) Infof(string, ...any)  {}
func (noLogger) Errorf(string, ...any) {}
func (noLogger) Fatalf(format string, args ...any) {
	panic("versus: pebble: " + fmt.Sprintf(format, args...))
}
