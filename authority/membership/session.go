package membership

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

// FinalError refuses a change of an incarnation whose state is final.
type FinalError struct {
	Incarnation grant.Incarnation
	State       authority.MemberState
}

func (e *FinalError) Error() string {
	return fmt.Sprintf("incarnation %v is %v for good; start again under a new one", e.Incarnation, e.State)
}

// ErrUnknown says that the incarnation is not registered, or was forgotten.
var ErrUnknown = errors.New("incarnation is not known")

// ErrOwnerDiffers refuses an incarnation that was registered under another name.
var ErrOwnerDiffers = errors.New("the incarnation is registered under another owner name")

// Session is one registration, kept alive until Close.
type Session struct {
	// WasLost: the incarnation came back under its own id after its lease had ended.
	WasLost bool
	cancel  context.CancelFunc
}

// Close stops keeping the lease alive; the incarnation becomes Lost when the
// lease runs out, unless it registers again before.
func (s *Session) Close() { s.cancel() }

// renewPatience is how long etcd may take to register an incarnation that is
// live already, before it is served without. Less than an agent waits.
const renewPatience = time.Second

// Register registers the incarnation under a lease and makes an older one of
// the same owner Superseded, in one transaction. It returns after Run's
// callback has been told. An incarnation whose state is final gets a
// *FinalError; see also ErrOwnerDiffers, ErrFull and ErrNoSpace.
//
// Leases carry no safety: while etcd is away, an incarnation that was last told
// to be Live gets its session nevertheless, and is registered when etcd is back.
// A broken stream must not end what a lasting one survives.
func (r *Registry) Register(ctx context.Context, owner grant.Owner, inc grant.Incarnation) (*Session, error) {
	if err := owner.Validate(); err != nil {
		return nil, err
	}
	if inc == (grant.Incarnation{}) {
		return nil, errors.New("incarnation: all zero names nobody; draw 128 random bits")
	}
	attempt, cancel := context.WithCancel(ctx)
	live := r.live(owner, inc)
	if live {
		cancel()
		attempt, cancel = context.WithTimeout(ctx, renewPatience)
	}
	lease, rev, wasLost, err := r.register(attempt, owner, inc)
	if err == nil {
		err = r.handedOut(attempt, rev)
	}
	cancel()
	var final *FinalError
	switch {
	case err == nil:
	case !live, ctx.Err() != nil, errors.As(err, &final), errors.Is(err, ErrOwnerDiffers), errors.Is(err, ErrFull):
		return nil, err // a lease that was got runs out by itself
	default:
		r.log.Warn("membership: etcd does not answer; a live incarnation goes on without", "owner", owner, "incarnation", inc, "error", err)
		lease, wasLost = clientv3.NoLease, false
	}
	keep, cancel := context.WithCancel(r.lifetime)
	r.keepers.Go(func() { r.keep(keep, owner, inc, lease) })
	return &Session{WasLost: wasLost, cancel: cancel}, nil
}

// live reports whether the incarnation was last handed out as Live, by this name.
func (r *Registry) live(owner grant.Owner, inc grant.Incarnation) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.table[inc]
	return e != nil && e.shown == authority.Live && e.owner == owner
}

func (r *Registry) register(ctx context.Context, owner grant.Owner, inc grant.Incarnation) (lease clientv3.LeaseID, rev int64, wasLost bool, err error) {
	incKey, liveKey, ownerKey := r.incKey(inc), r.liveKey(inc), r.ownerKey(owner)
	for {
		view, err := r.client.Txn(ctx).Then(clientv3.OpGet(incKey), clientv3.OpGet(liveKey), clientv3.OpGet(ownerKey)).Commit()
		if err != nil {
			return 0, 0, false, fmt.Errorf("membership: read before registering: %w", err)
		}
		var incRev, ownerRev int64
		known := false
		if kvs := view.Responses[0].GetResponseRange().Kvs; len(kvs) > 0 {
			incRev, known = kvs[0].ModRevision, true
			name, fate, err := parseRecord(kvs[0].Value)
			switch {
			case fate.Final():
				return 0, 0, false, &FinalError{inc, fate}
			case err != nil:
				return 0, 0, false, fmt.Errorf("membership: record of %v: %w", inc, err)
			case name != owner:
				return 0, 0, false, ErrOwnerDiffers
			}
		}
		wasLost = known && len(view.Responses[1].GetResponseRange().Kvs) == 0
		if !known {
			if err := r.makeRoom(ctx); err != nil {
				return 0, 0, false, err
			}
		}
		// The order of the operations is the order of the events: the older
		// incarnation loses its name before the newer one appears.
		var ops []clientv3.Op
		conds := []clientv3.Cmp{clientv3.Compare(clientv3.ModRevision(incKey), "=", incRev)}
		if kvs := view.Responses[2].GetResponseRange().Kvs; len(kvs) > 0 {
			ownerRev = kvs[0].ModRevision
			older, err := grant.ParseIncarnation(string(kvs[0].Value))
			if err == nil && older != inc {
				more, cond, err := r.supersede(ctx, owner, older)
				if err != nil {
					return 0, 0, false, err
				}
				ops, conds = append(ops, more...), append(conds, cond)
			}
		}
		conds = append(conds, clientv3.Compare(clientv3.ModRevision(ownerKey), "=", ownerRev))
		if lease == 0 {
			if lease, err = r.newLease(ctx); err != nil {
				return 0, 0, false, err
			}
		}
		if !known {
			ops = append(ops, clientv3.OpPut(incKey, record{string(owner), authority.Live.String()}.bytes()))
		}
		ops = append(ops,
			clientv3.OpPut(liveKey, string(owner), clientv3.WithLease(lease)),
			clientv3.OpPut(ownerKey, inc.String()))
		done, err := r.client.Txn(ctx).If(conds...).Then(ops...).Commit()
		if err != nil {
			return 0, 0, false, fmt.Errorf("membership: register: %w", r.plain(err))
		}
		if done.Succeeded {
			return lease, done.Header.Revision, wasLost, nil
		}
		// Somebody changed a key in between: look again.
	}
}

func (r *Registry) newLease(ctx context.Context) (clientv3.LeaseID, error) {
	resp, err := r.client.Grant(ctx, int64(r.cfg.LeaseTTL/time.Second))
	if err != nil {
		return 0, fmt.Errorf("membership: lease: %w", r.plain(err))
	}
	return resp.ID, nil
}

// supersede returns what ends the older bearer of a name, and its condition.
func (r *Registry) supersede(ctx context.Context, owner grant.Owner, older grant.Incarnation) ([]clientv3.Op, clientv3.Cmp, error) {
	key := r.incKey(older)
	got, err := r.client.Get(ctx, key)
	if err != nil {
		return nil, clientv3.Cmp{}, fmt.Errorf("membership: read older incarnation: %w", err)
	}
	if len(got.Kvs) == 0 {
		return nil, clientv3.Compare(clientv3.ModRevision(key), "=", 0), nil
	}
	cond := clientv3.Compare(clientv3.ModRevision(key), "=", got.Kvs[0].ModRevision)
	if _, fate, _ := parseRecord(got.Kvs[0].Value); fate.Final() {
		return nil, cond, nil
	}
	return []clientv3.Op{
		clientv3.OpPut(key, record{string(owner), authority.Superseded.String()}.bytes()),
		clientv3.OpDelete(r.liveKey(older)),
	}, cond, nil
}

// keep keeps the lease alive until ctx ends. When it is lost while the stream
// still lives (etcd was away, or this process paused), or there was none to
// begin with, it registers anew.
func (r *Registry) keep(ctx context.Context, owner grant.Owner, inc grant.Incarnation, lease clientv3.LeaseID) {
	for {
		var err error
		if lease != clientv3.NoLease {
			var answers <-chan *clientv3.LeaseKeepAliveResponse
			answers, err = r.client.KeepAlive(ctx, lease)
			for range answers {
			}
			if ctx.Err() != nil {
				return
			}
			r.log.Warn("membership: lease lost under an open stream; registering again", "owner", owner, "incarnation", inc, "error", err)
		}
		for pause := 100 * time.Millisecond; ; pause = min(2*pause, 5*time.Second) {
			if !wait(ctx, pause/2+rand.N(pause/2)) {
				return
			}
			lease, _, _, err = r.register(ctx, owner, inc)
			var final *FinalError
			if errors.As(err, &final) || errors.Is(err, ErrOwnerDiffers) {
				return // its partitions have been told
			}
			if err == nil {
				break
			}
		}
	}
}

// Discard makes the incarnation's state final: it closed its wallets. It
// returns after Run's callback has been told; a repetition changes nothing. A
// superseded incarnation may still discard, which frees its room at once; one
// that was fenced gets a *FinalError, an unknown one ErrUnknown.
func (r *Registry) Discard(ctx context.Context, inc grant.Incarnation) error {
	return r.end(ctx, inc, authority.Discarded)
}

// Fence makes the incarnation's state final: an operator wants no more grants
// or checks for it. Otherwise as Discard.
func (r *Registry) Fence(ctx context.Context, inc grant.Incarnation) error {
	return r.end(ctx, inc, authority.Fenced)
}

func (r *Registry) end(ctx context.Context, inc grant.Incarnation, fate authority.MemberState) error {
	key := r.incKey(inc)
	for {
		got, err := r.client.Get(ctx, key)
		if err != nil {
			return fmt.Errorf("membership: read incarnation: %w", err)
		}
		if len(got.Kvs) == 0 {
			return ErrUnknown
		}
		owner, state, err := parseRecord(got.Kvs[0].Value)
		switch {
		case state == fate:
			return r.handedOut(ctx, got.Kvs[0].ModRevision)
		case state.Final() && state != authority.Superseded:
			return &FinalError{inc, state}
		case err != nil:
			return fmt.Errorf("membership: record of %v: %w", inc, err)
		}
		ownerKey := r.ownerKey(owner)
		done, err := r.client.Txn(ctx).
			If(clientv3.Compare(clientv3.ModRevision(key), "=", got.Kvs[0].ModRevision)).
			Then(
				clientv3.OpPut(key, record{string(owner), fate.String()}.bytes()),
				clientv3.OpDelete(r.liveKey(inc)),
				clientv3.OpTxn(
					[]clientv3.Cmp{clientv3.Compare(clientv3.Value(ownerKey), "=", inc.String())},
					[]clientv3.Op{clientv3.OpDelete(ownerKey)}, nil),
			).Commit()
		if err != nil {
			return fmt.Errorf("membership: %v: %w", fate, r.plain(err))
		}
		if done.Succeeded {
			return r.handedOut(ctx, done.Header.Revision)
		}
	}
}

func (r *Registry) incKey(i grant.Incarnation) string  { return r.cfg.Prefix + "inc/" + i.String() }
func (r *Registry) liveKey(i grant.Incarnation) string { return r.cfg.Prefix + "live/" + i.String() }
func (r *Registry) ownerKey(o grant.Owner) string      { return r.cfg.Prefix + "owner/" + string(o) }
