package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/stipend/stipend/authority/membership"
	"github.com/stipend/stipend/authority/pebblestore"
	"github.com/stipend/stipend/proto/grant"
)

// openStore opens the store that is at home here, or creates it on a first
// start: when its folder holds nothing and etcd remembers no home. The mark of
// an opened store is compared with the one that etcd remembers, raised, and
// claimed, before anything is served from it.
func openStore(ctx context.Context, cfg pebblestore.Config, registry *membership.Registry) (*pebblestore.Store, error) {
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
	case nothing:
		store, err = pebblestore.Create(cfg)
	default:
		store, err = pebblestore.Open(cfg)
	}
	if err != nil {
		return nil, err
	}
	if err := claim(ctx, store, registry, true); err != nil {
		return nil, errors.Join(err, store.Close())
	}
	return store, nil
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
// restored backup keeps its records. It returns the identity of the new home.
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
