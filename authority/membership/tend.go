package membership

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

// tendEvery is how often etcd's health is asked and old incarnations forgotten.
const tendEvery = 10 * time.Second

// tend watches etcd's health and forgets incarnations past their retention.
func (r *Registry) tend(ctx context.Context) error {
	tick := time.NewTicker(tendEvery)
	defer tick.Stop()
	for {
		r.lookAtHealth(ctx)
		for _, inc := range r.outlived(time.Now()) {
			if err := r.forget(ctx, inc); err != nil && ctx.Err() == nil {
				r.log.Warn("membership: cannot forget an old incarnation", "incarnation", inc, "error", err)
				break // etcd is away; next time
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// lookAtHealth asks for alarms. An embedded server that is out of space is
// helped at once, since nobody else will: old revisions go, the file shrinks.
func (r *Registry) lookAtHealth(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, tendEvery/2)
	defer cancel()
	now := Status{}
	if _, err := r.client.Get(ctx, r.cfg.Prefix+"home", clientv3.WithCountOnly()); err != nil {
		now.Err = err.Error()
	}
	alarms, err := r.client.AlarmList(ctx)
	switch {
	case errors.Is(err, rpctypes.ErrPermissionDenied):
		// Only etcd's administrators may ask: what refused writes said stands.
		now.NoSpace = r.Status().NoSpace && r.writeProbe(ctx) != nil
	case err != nil:
		now.Err = err.Error()
	default:
		for _, a := range alarms.Alarms {
			now.NoSpace = now.NoSpace || a.Alarm == pb.AlarmType_NOSPACE
		}
	}
	if now.NoSpace && r.server != nil {
		if err := r.reclaim(ctx); err != nil {
			now.Err = err.Error()
		} else {
			now.NoSpace = false
		}
	}
	r.mu.Lock()
	before := r.status
	r.status = now
	r.mu.Unlock()
	switch {
	case ctx.Err() != nil && now.Err == "", before == now:
	case now.NoSpace:
		r.log.Error("membership: etcd is out of space; nobody can register", "error", now.Err)
	case now.Err != "":
		r.log.Warn("membership: etcd does not answer", "error", now.Err)
	default:
		r.log.Info("membership: etcd is well again")
	}
}

// writeProbe asks whether etcd takes writes again.
func (r *Registry) writeProbe(ctx context.Context) error {
	_, err := r.client.Put(ctx, r.cfg.Prefix+"probe", "")
	return err
}

func (r *Registry) reclaim(ctx context.Context) error {
	now, err := r.client.Get(ctx, r.cfg.Prefix, clientv3.WithCountOnly())
	if err != nil {
		return fmt.Errorf("read revision: %w", err)
	}
	if _, err := r.client.Compact(ctx, now.Header.Revision, clientv3.WithCompactPhysical()); err != nil {
		r.log.Debug("membership: compact", "error", err) // already compacted there
	}
	if err := r.server.etcd.Server.Backend().Defrag(); err != nil {
		return fmt.Errorf("defragment: %w", err)
	}
	if size := r.server.etcd.Server.Backend().Size(); size >= r.cfg.QuotaBytes {
		return fmt.Errorf("%d bytes are in use of a quota of %d", size, r.cfg.QuotaBytes)
	}
	if _, err := r.client.AlarmDisarm(ctx, &clientv3.AlarmMember{}); err != nil {
		return fmt.Errorf("disarm: %w", err)
	}
	return nil
}

// makeRoom forgets the oldest incarnation without a lease when the table is
// full: superseded and discarded ones first, then lost ones, fenced ones last.
// To forget a final state costs no bound: such a process could register again
// and get grants under the same sum cap as any newcomer.
func (r *Registry) makeRoom(ctx context.Context) error {
	r.mu.Lock()
	excess := len(r.table) - r.cfg.MaxIncarnations + 1
	r.mu.Unlock()
	if excess <= 0 {
		return nil
	}
	victims := r.evictable()
	if len(victims) == 0 {
		return ErrFull
	}
	for _, inc := range victims[:min(excess, len(victims))] {
		if err := r.forget(ctx, inc); err != nil {
			return err
		}
	}
	return nil
}

func (r *Registry) evictable() []grant.Incarnation {
	rank := map[authority.MemberState]int{authority.Lost: 1, authority.Fenced: 2}
	return r.leaseless(func(e *entry) bool { return true }, func(a, b *entry) int {
		return cmp.Or(cmp.Compare(rank[a.shown], rank[b.shown]), a.since.Compare(b.since))
	})
}

func (r *Registry) outlived(now time.Time) []grant.Incarnation {
	old := func(e *entry) bool { return now.Sub(e.since) > r.cfg.Retention }
	return r.leaseless(old, func(a, b *entry) int { return a.since.Compare(b.since) })
}

func (r *Registry) leaseless(keep func(*entry) bool, order func(a, b *entry) int) []grant.Incarnation {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []grant.Incarnation
	for inc, e := range r.table {
		if !e.lease && e.rev != 0 && keep(e) {
			out = append(out, inc)
		}
	}
	slices.SortFunc(out, func(a, b grant.Incarnation) int {
		return cmp.Or(order(r.table[a], r.table[b]), slices.Compare(a[:], b[:]))
	})
	return out
}

// forget removes the incarnation's keys unless it changed or came back.
func (r *Registry) forget(ctx context.Context, inc grant.Incarnation) error {
	r.mu.Lock()
	e := r.table[inc]
	if e == nil {
		r.mu.Unlock()
		return nil
	}
	rev, ownerKey := e.rev, r.ownerKey(e.owner)
	r.mu.Unlock()
	_, err := r.client.Txn(ctx).
		If(
			clientv3.Compare(clientv3.ModRevision(r.incKey(inc)), "=", rev),
			clientv3.Compare(clientv3.CreateRevision(r.liveKey(inc)), "=", 0)).
		Then(
			clientv3.OpDelete(r.incKey(inc)),
			clientv3.OpTxn(
				[]clientv3.Cmp{clientv3.Compare(clientv3.Value(ownerKey), "=", inc.String())},
				[]clientv3.Op{clientv3.OpDelete(ownerKey)}, nil),
		).Commit()
	if err != nil {
		return r.plain(err)
	}
	return nil
}
