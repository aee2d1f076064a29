package membership

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// Store is what a store says of itself.
type Store struct {
	// Identity was drawn when the store was created or recovered.
	Identity [16]byte
	// Mark only grows in the life of an identity; it is durable in the store
	// before it is told here.
	Mark uint64
	// Empty: the store holds no record of any partition.
	Empty bool
}

// ErrNotHome refuses a store that is not the one that served last, or not its
// newest state. Its message says what to do.
var ErrNotHome = errors.New("this store is not at home")

// ErrHomeMoved ends a Registry's Run: another store was made the home, or the
// same one was opened elsewhere, while this process served.
var ErrHomeMoved = errors.New("membership: another store became the home: this process must not serve any longer")

type homeRecord struct {
	Store string `json:"store"` // identity in hexadecimal
	Mark  uint64 `json:"mark"`
}

func (h homeRecord) bytes() string {
	b, err := json.Marshal(h)
	if err != nil {
		panic(err) // a string and a number always encode
	}
	return string(b)
}

const recoverHint = "If that is meant, stop every authority and run `stipend recover`: all levels start at 0 and nothing is granted for the longest ttl"

// Home is the identity of the store that etcd takes for the home; ok is false
// when it knows of none.
func (r *Registry) Home(ctx context.Context) (identity [16]byte, mark uint64, ok bool, err error) {
	h, _, err := r.readHome(ctx)
	if err != nil || h == nil {
		return identity, 0, false, err
	}
	if _, err := hex.Decode(identity[:], []byte(h.Store)); err != nil {
		return identity, 0, false, fmt.Errorf("membership: home record: %w", err)
	}
	return identity, h.Mark, true, nil
}

func (r *Registry) readHome(ctx context.Context) (*homeRecord, int64, error) {
	got, err := r.client.Get(ctx, r.cfg.Prefix+"home")
	if err != nil {
		return nil, 0, fmt.Errorf("membership: read home: %w", err)
	}
	if len(got.Kvs) == 0 {
		return nil, 0, nil
	}
	h := new(homeRecord)
	if err := json.Unmarshal(got.Kvs[0].Value, h); err != nil || len(h.Store) != 32 {
		return nil, got.Kvs[0].ModRevision, fmt.Errorf("membership: home record %q in etcd cannot be read", got.Kvs[0].Value)
	}
	return h, got.Kvs[0].ModRevision, nil
}

// CompareHome accepts a store that is the home and not older than any state of
// it seen before. A store is also accepted when etcd knows of no home and the
// store holds nothing. Otherwise the error is ErrNotHome:
//
//   - another identity: a second node, or an empty or replaced disk;
//   - a mark below the highest seen: a restored backup or an old copy;
//   - no home known but a store with records: etcd's data was lost or replaced,
//     and with it the knowledge whether this store is the newest.
//
// Nothing is written: the caller raises the store's mark and calls ClaimHome
// before it serves.
func (r *Registry) CompareHome(ctx context.Context, s Store) error {
	mine := hex.EncodeToString(s.Identity[:])
	h, rev, err := r.readHome(ctx)
	switch {
	case err != nil:
		return err
	case h == nil && !s.Empty:
		return fmt.Errorf("%w: etcd remembers no home, but store %s holds records: etcd's data was lost or replaced. %s", ErrNotHome, mine, recoverHint)
	case h != nil && h.Store != mine:
		return fmt.Errorf("%w: it is store %s, but the home is store %s: a second node, or an empty or replaced disk. %s", ErrNotHome, mine, h.Store, recoverHint)
	case h != nil && s.Mark < h.Mark:
		return fmt.Errorf("%w: store %s bears mark %d, but mark %d was seen: a restored backup or an old copy. %s", ErrNotHome, mine, s.Mark, h.Mark, recoverHint)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.homeRev = rev
	return nil
}

// ClaimHome remembers the store's new mark, provided that nobody touched the
// home since CompareHome or the last ClaimHome of this Registry; otherwise the
// error is ErrHomeMoved. The first claim is made before serving, further ones
// every few seconds, each after the store made its mark durable: a copy of the
// disk is then older than what is remembered. Of two copies with the same mark
// the first to claim wins, and the other one's claim or Run fails.
func (r *Registry) ClaimHome(ctx context.Context, s Store) error {
	r.mu.Lock()
	rev := r.homeRev
	r.mu.Unlock()
	return r.putHome(ctx, s, rev)
}

// AdoptHome makes the store the home whatever was known before. Only recovery
// may call it, for a store whose levels were all set to 0.
func (r *Registry) AdoptHome(ctx context.Context, s Store) error {
	_, rev, err := r.readHome(ctx)
	if err != nil && rev == 0 { // a record that cannot be read is replaced
		return err
	}
	return r.putHome(ctx, s, rev)
}

func (r *Registry) putHome(ctx context.Context, s Store, rev int64) error {
	key, want := r.cfg.Prefix+"home", homeRecord{hex.EncodeToString(s.Identity[:]), s.Mark}.bytes()
	// Until the outcome is known, what Run sees of the key cannot be judged.
	r.mu.Lock()
	r.claiming = true
	r.mu.Unlock()
	done, err := r.client.Txn(ctx).
		If(clientv3.Compare(clientv3.ModRevision(key), "=", rev)).
		Then(clientv3.OpPut(key, want)).
		Else(clientv3.OpGet(key)).Commit()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.claiming = false
	switch {
	case err != nil:
		// The write may have arrived: its value is told from another's later.
		r.homeValue = want
		return fmt.Errorf("membership: write home: %w", r.plainLocked(err))
	case done.Succeeded:
		r.homeRev, r.homeValue, r.claimed = done.Header.Revision, want, true
		return r.checkHome()
	}
	// Our own write whose answer was lost?
	if kvs := done.Responses[0].GetResponseRange().Kvs; len(kvs) > 0 && r.homeValue != "" && string(kvs[0].Value) == r.homeValue {
		r.homeRev, r.claimed = kvs[0].ModRevision, true
		return fmt.Errorf("membership: write home: an earlier write arrived late; claim again")
	}
	return ErrHomeMoved
}

// homeChanged is called with r.mu held for what etcd tells of the home key.
func (r *Registry) homeChanged(kv *mvccpb.KeyValue, deleted bool) error {
	if kv.ModRevision > r.toldRev {
		r.toldRev, r.toldValue = kv.ModRevision, string(kv.Value)
		if deleted {
			r.toldValue = ""
		}
	}
	return r.checkHome()
}

// checkHome is called with r.mu held. What was told up to the revision of our
// own claim is history.
func (r *Registry) checkHome() error {
	if r.claimed && !r.claiming && r.toldRev > r.homeRev && r.toldValue != r.homeValue {
		return ErrHomeMoved
	}
	return nil
}
