package main

import (
	"context"
	"errors"
	"fmt"
	"io"
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
	space := spaceOf(redis, authority)
	if err := space.start(ctx); err != nil {
		return err
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
				space.count(s.server, one.Done)
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
	return space.print(ctx, r.out)
}

// space compares what the decisions of all turns left on disk.
type space struct {
	redis                *redisServer
	authority            *authorityServer
	redisAt, authorityAt int64   // bytes of the folders at the start
	loggedAt             float64 // bytes of records
	redisN, authorityN   int     // decisions
}

func spaceOf(redis *redisServer, authority *authorityServer) *space {
	return &space{redis: redis, authority: authority}
}

func (s *space) start(ctx context.Context) (err error) {
	var errs [3]error
	s.redisAt, errs[0] = folderBytes(s.redis.dir)
	s.authorityAt, errs[1] = folderBytes(filepath.Join(s.authority.dir, "store"))
	s.loggedAt, errs[2] = s.authority.logged(ctx)
	return errors.Join(errs[:]...)
}

func (s *space) count(server *child, decisions int) {
	if server == s.redis.child {
		s.redisN += decisions
	} else {
		s.authorityN += decisions
	}
}

// settle is longer than the authority remembers an attempt: then it has deleted
// what the decisions left, and only the buckets stay.
const settle = 12 * time.Second

func (s *space) print(ctx context.Context, out io.Writer) error {
	select {
	case <-time.After(settle):
	case <-ctx.Done():
		return ctx.Err()
	}
	redisNow, err1 := folderBytes(s.redis.dir)
	authorityNow, err2 := folderBytes(filepath.Join(s.authority.dir, "store"))
	logged, err3 := s.authority.logged(ctx)
	if err := errors.Join(err1, err2, err3); err != nil {
		return err
	}
	fmt.Fprintln(out)
	t := newTable("bytes per decision, all turns", "authority", "Redis")
	each := func(bytes float64, n int) string { return fmt.Sprintf("%.1f", bytes/float64(n)) }
	t.row("records committed, deletes of the window included", each(logged-s.loggedAt, s.authorityN), "-")
	t.row(fmt.Sprintf("growth of the folder, %v after the last turn", settle),
		each(float64(authorityNow-s.authorityAt), s.authorityN), each(float64(redisNow-s.redisAt), s.redisN))
	t.row("decisions", fmt.Sprint(s.authorityN), fmt.Sprint(s.redisN))
	t.print(out)
	return nil
}
