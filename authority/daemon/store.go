package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/authority/membership"
	"github.com/stipend/stipend/authority/pebblestore"
	"github.com/stipend/stipend/proto/grant"
)

// ErrNoStore refuses a start that is neither told to be the first one nor finds
// a store that served before: a new installation and a disk that was lost with
// etcd's data look the same, and a new store's buckets are full.
var ErrNoStore = errors.New("no store")

// ErrInit refuses Config.Init where a store is at home.
var ErrInit = errors.New("there is a store already: leave out --init")

const firstOrLost = "If this is the first start of a new installation, add --init once. If a disk was lost or replaced, run stipend recover."

func noStore(dir string) error {
	return fmt.Errorf("%w in %s. %s", ErrNoStore, dir, firstOrLost)
}

// refuseNothing is openStore's refusal before anything is created: a mistyped
// data folder stays missing, and no empty etcd is left in it.
func refuseNothing(cfg Config) error {
	if cfg.Init || len(cfg.Etcd.Endpoints) > 0 {
		return nil
	}
	for _, dir := range []string{cfg.store().Dir, cfg.etcd().Dir} {
		if nothing, err := vacant(dir); err != nil || !nothing {
			return err
		}
	}
	return noStore(cfg.store().Dir)
}

// openStore opens the store that is at home here, or creates it on a first
// start: when first is said, its folder holds nothing and etcd remembers no
// home. A first start that was cut off before the store became the home is begun
// again in the same way. The mark of an opened store is compared with the one
// that etcd remembers, raised, and claimed, before anything is served from it.
func openStore(ctx context.Context, cfg pebblestore.Config, registry *membership.Registry, first bool) (*pebblestore.Store, error) {
	home, _, known, err := registry.Home(ctx)
	if err != nil {
		return nil, err
	}
	nothing, err := vacant(cfg.Dir)
	if err != nil {
		return nil, err
	}
	var store *pebblestore.Store
	switch {
	case nothing && known:
		return nil, fmt.Errorf("%w: %s holds no store, but etcd remembers store %v as the home: the disk is empty, replaced or not mounted. "+
			"If it is lost, stop every authority and run `stipend recover`", membership.ErrNotHome, cfg.Dir, pebblestore.Identity(home))
	case nothing && !first:
		return nil, noStore(cfg.Dir)
	case nothing:
		store, err = pebblestore.Create(cfg)
	case known && first:
		return nil, fmt.Errorf("%w, which is for the first start of a new installation only (%s)", ErrInit, cfg.Dir)
	default:
		store, err = pebblestore.Open(cfg)
	}
	if err != nil {
		return nil, err
	}
	if !known && !first {
		err = refuseUnclaimed(store, cfg.Dir)
	}
	if err == nil {
		err = claim(ctx, store, registry, true)
	}
	if err != nil {
		return nil, errors.Join(err, store.Close())
	}
	return store, nil
}

// refuseUnclaimed refuses an empty store under an etcd that knows no home; one
// with records is refused by claim.
func refuseUnclaimed(store *pebblestore.Store, dir string) error {
	nothing, err := empty(store)
	if err != nil || !nothing {
		return err
	}
	return fmt.Errorf("%w in %s that ever served: it is empty, and etcd remembers no home. %s", ErrNoStore, dir, firstOrLost)
}

// claim raises the store's mark and tells etcd of it.
func claim(ctx context.Context, store *pebblestore.Store, registry *membership.Registry, compare bool) error {
	s := membership.Store{Identity: store.Identity(), Mark: store.Mark()}
	if compare {
		var err error
		if s.Empty, err = empty(store); err != nil {
			return err
		}
		if err := registry.CompareHome(ctx, s); err != nil {
			return err
		}
	}
	var err error
	if s.Mark, err = store.Advance(); err != nil {
		return err
	}
	return registry.ClaimHome(ctx, s)
}

// keepMark claims again and again, so that a copy of the disk is soon older
// than what etcd remembers. It returns an error only when another store became
// the home: etcd being away stops nobody from serving.
func (d *daemon) keepMark(ctx context.Context) error {
	tick := time.NewTicker(d.cfg.Store.MarkEvery)
	defer tick.Stop()
	for well := true; ; {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		attempt, cancel := context.WithTimeout(ctx, d.cfg.Store.MarkEvery)
		err := claim(attempt, d.store, d.registry, false)
		cancel()
		switch {
		case errors.Is(err, membership.ErrHomeMoved), errors.Is(err, pebblestore.ErrFailed):
			return err
		case err != nil && well && ctx.Err() == nil:
			d.log.Warn("cannot tell etcd the store's mark; serving goes on", "error", err)
		case err == nil && !well:
			d.log.Info("etcd knows the store's mark again")
		}
		well = err == nil
	}
}

var errNotEmpty = errors.New("a record")

func empty(store *pebblestore.Store) (bool, error) {
	for p := range grant.Partition(grant.Partitions) {
		err := store.Load(p, func(_, _ []byte) error { return errNotEmpty })
		if errors.Is(err, errNotEmpty) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
	}
	return true, nil
}

// vacant says that the store's folder is missing or holds nothing.
func vacant(dir string) (bool, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("store: %w", err)
	}
	for _, e := range entries {
		if e.Name() != "lost+found" && e.Name() != "LOCK" {
			return false, nil
		}
	}
	return true, nil
}

// Recover makes whatever store is at cfg.Data the home, with the authority
// stopped: all levels start at 0, and nothing is granted for noGrantsFor, which
// must be at least the longest ttl of any policy ever in force. A missing or
// empty folder becomes a new store, without the policies of the lost one; a
// restored backup keeps its records, and a noGrantsFor below the longest ttl of
// its policies is refused. It returns the identity of the new home.
func Recover(ctx context.Context, cfg Config, noGrantsFor time.Duration) (identity string, err error) {
	if err := cfg.Validate(); err != nil {
		return "", err
	}
	// etcd first: a running authority holds its lock, and then nothing is touched.
	registry, err := membership.Open(ctx, cfg.etcd())
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, registry.Close()) }()
	if err := compareTTL(cfg, noGrantsFor); err != nil {
		return "", err
	}
	if _, err := pebblestore.Recover(cfg.store(), noGrantsFor); err != nil {
		return "", err
	}
	store, err := pebblestore.Open(cfg.store())
	if err != nil {
		return "", err
	}
	s := membership.Store{Identity: store.Identity(), Mark: store.Mark()}
	if err := store.Close(); err != nil {
		return "", err
	}
	if err := registry.AdoptHome(ctx, s); err != nil {
		return "", err
	}
	return pebblestore.Identity(s.Identity).String(), nil
}

// compareTTL refuses to recover a store whose policies have a longer ttl than
// nothing will be granted for. It finds no policy that is gone from the store:
// those the operator must know.
func compareTTL(cfg Config, noGrantsFor time.Duration) error {
	nothing, err := vacant(cfg.store().Dir)
	if err != nil || nothing {
		return err
	}
	store, err := pebblestore.Open(cfg.store())
	if err != nil {
		return err
	}
	longest, tenant, err := longestTTL(cfg.Ledger, store)
	if err := errors.Join(err, store.Close()); err != nil {
		return err
	}
	if noGrantsFor < longest {
		return fmt.Errorf("%v without grants is too short: the policy of tenant %q in this store has a ttl of %v; at least that, or the longest ttl of any policy that was ever in force",
			noGrantsFor, tenant, longest)
	}
	return nil
}

// longestTTL is the longest life of a grant by any policy in the store, of
// ordinary and emergency grants, and a tenant that has it.
func longestTTL(cfg authority.Config, store authority.Store) (ttl time.Duration, tenant grant.TenantID, err error) {
	now := machineClock()
	for id := range grant.Partition(grant.Partitions) {
		n := authority.NewNode(cfg, id)
		if err := n.Load(store, now); err != nil {
			return 0, "", fmt.Errorf("load: %w", err)
		}
		for page := (&authority.PolicyPage{More: true}); page.More; {
			page = listed(n, now, page.Policies)
			for _, p := range page.Policies {
				for _, a := range []grant.Account{p.Policy.Account(false), p.Policy.Account(true)} {
					if a.Grant.Enabled() && a.Grant.TTL > ttl {
						ttl, tenant = a.Grant.TTL, p.Tenant
					}
				}
			}
		}
	}
	return ttl, tenant, nil
}

// listed is the page of policies after another one, of a Node that serves
// nobody else: what it would record is for nobody.
func listed(n *authority.Node, now authority.Reading, before []authority.VersionedPolicy) *authority.PolicyPage {
	list := &authority.ListPolicies{Limit: 1000}
	if len(before) > 0 {
		list.After = before[len(before)-1].Tenant
	}
	n.Offer(authority.Call{List: list}) // alone in the inbox: there is room
	if len(n.Step(now)) > 0 {
		n.Done(nil)
	}
	for _, r := range n.Replies() {
		if r.List != nil {
			return r.List
		}
	}
	panic("daemon: a Node did not answer ListPolicies")
}
