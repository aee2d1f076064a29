package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"
)

// turns collects the outcomes of one side.
type turns []turn

func (t turns) of(field func(turn) float64) series {
	s := make(series, len(t))
	for i := range t {
		s[i] = field(t[i])
	}
	return s
}

func rateOf(t turn) float64 { return t.Rate }

// side is one way to get a decision.
type side struct {
	name   string
	server *child
	ask    decide
}

// measureChecks compares durable central decisions with those of Redis, for one
// hot tenant and for many.
func measureChecks(ctx context.Context, r *run) (err error) {
	if err := r.build(ctx, "stipend-authority"); err != nil {
		return err
	}
	redis, err := startRedis(ctx, r)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, redis.close()) }()
	dir := filepath.Join(r.dir, "authority")
	authority, err := startAuthority(ctx, r, dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, authority.close()) }()
	gate, err := authority.openGateway(ctx, "gateway-1")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, gate.close()) }()

	names := make([]string, r.Tenants)
	for i := range names {
		names[i] = tenantName(i)
	}
	started := time.Now()
	idle, err := authority.usage()
	if err != nil {
		return err
	}
	if err := authority.putPolicies(ctx, names, noGrants); err != nil {
		return err
	}
	fmt.Fprintf(r.out, "Redis %s, appendfsync always; %d callers, each its next request after the last answer; %d turns of %v a side.\n",
		redis.version(ctx), r.Callers, r.Pairs, r.Turn)
	loaded, err := authority.usage()
	if err != nil {
		return err
	}
	fmt.Fprintf(r.out, "%d policies put in %.1f s; the authority's memory %d MiB before, %d MiB after.\n\n",
		len(names), time.Since(started).Seconds(), idle.RSS>>20, loaded.RSS>>20)

	sides := []side{
		{"link", authority.child, gate.decider()},
		{"unary", authority.child, authority.unaryDecider()},
		{"Redis", redis.child, redis.decider()},
	}
	t := newTable("load, side", "decisions/s", "ratio to Redis", "p50 ms", "p99 ms", "server CPU s/100k", "client CPU s/100k", "disk bytes each")
	for _, l := range []struct {
		name  string
		names []string
	}{
		{"one hot tenant", names[:1]},
		{fmt.Sprintf("%d tenants", len(names)), names},
	} {
		got := make([]turns, len(sides))
		for pair := range r.Pairs {
			for i, s := range sides {
				one, err := r.load(ctx, fmt.Sprintf("%s-%d-%d", s.name, len(l.names), pair), s.server, l.names, s.ask)
				if err != nil {
					return err
				}
				got[i] = append(got[i], one)
			}
		}
		base := got[len(sides)-1].of(rateOf)
		for i, s := range sides {
			ratio := "1"
			if i < len(sides)-1 {
				ratio = got[i].of(rateOf).over(base).text("%.2f")
			}
			milli := func(f func(turn) float64) string {
				return got[i].of(func(t turn) float64 { return f(t) / 1000 }).text("%.1f")
			}
			t.row(l.name+", "+s.name, got[i].of(rateOf).text("%.0f"), ratio,
				milli(func(t turn) float64 { return t.P50 }), milli(func(t turn) float64 { return t.P99 }),
				got[i].of(func(t turn) float64 { return t.Server }).text("%.2f"),
				got[i].of(func(t turn) float64 { return t.Client }).text("%.2f"),
				got[i].of(func(t turn) float64 { return t.Disk }).text("%.0f"))
		}
	}
	t.print(r.out)
	return nil
}
