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

// Store is what a store says of itself when it was opened.
type Store struct {
	// Identity was drawn when the store was created.
	Identity [16]byte
	// Opens counts the openings of the store, this one included, durably.
	Opens uint64
	// Empty: it holds no record of any partition.
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
	Opens uint64 `json:"opens"`
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
func (r *Registry) Home(ctx context.Context) (identity [16]byte, opens uint64, ok bool, err error) {
	h, _, err := r.readHome(ctx)
	if err != nil || h == nil {
		return identity, 0, false, err
	}
	if _, err := hex.Decode(identity[:], []byte(h.Store)); err != nil {
		return identity, 0, false, fmt.Errorf("membership: home record: %w", err)
	}
	return identity, h.Opens, true, nil
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

// CompareHome accepts the store when it is the home and newer than every state
// of it seen before, and then remembers its open counter. A store is also
// accepted when etcd knows of no home and the store holds nothing. Otherwise
// the error is ErrNotHome:
//
//   - another identity: a second node, or an empty or replaced disk;
//   - a counter not above the highest seen: a restored backup or a copy;
//   - no home known but a store with records: etcd's data was lost or replaced,
//     and with it the knowledge whether this store is the newest.
//
// It is a guard against mistakes of people, not a lock: a copy of the disk that
// is opened while the original serves is newer, and is accepted; Run then ends
// the original with ErrHomeMoved.
func (r *Registry) CompareHome(ctx context.Context, s Store) error {
	want := homeRecord{hex.EncodeToString(s.Identity[:]), s.Opens}
	h, rev, err := r.readHome(ctx)
	switch {
	case err != nil:
		return err
	case h == nil && !s.Empty:
		return fmt.Errorf("%w: etcd remembers no home, but store %s holds records and was opened %d times: etcd's data was lost or replaced. %s", ErrNotHome, want.Store, s.Opens, recoverHint)
	case h != nil && h.Store != want.Store:
		return fmt.Errorf("%w: it is store %s, but the home is store %s: a second node, or an empty or replaced disk. %s", ErrNotHome, want.Store, h.Store, recoverHint)
	case h != nil && s.Opens <= h.Opens:
		return fmt.Errorf("%w: store %s was opened %d times, but %d openings were seen: a restored backup or a copy. %s", ErrNotHome, want.Store, s.Opens, h.Opens, recoverHint)
	}
	return r.putHome(ctx, want, rev)
}

func (r *Registry) putHome(ctx context.Context, want homeRecord, rev int64) error {
	key := r.cfg.Prefix + "home"
	// Until the write is known, what Run sees of the key cannot be judged.
	r.mu.Lock()
	before := r.homeRev
	r.homeRev = 0
	r.mu.Unlock()
	done, err := r.client.Txn(ctx).
		If(clientv3.Compare(clientv3.ModRevision(key), "=", rev)).
		Then(clientv3.OpPut(key, want.bytes())).Commit()
	if err != nil {
		return fmt.Errorf("membership: write home: %w", r.plain(err))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !done.Succeeded {
		r.homeRev = before
		return fmt.Errorf("%w: another authority started at the same moment", ErrNotHome)
	}
	r.home, r.homeRev = want, done.Header.Revision
	return r.checkHome()
}

// AdoptHome makes the store the home whatever was known before. Only recovery
// may call it, for a store whose levels were all set to 0.
func (r *Registry) AdoptHome(ctx context.Context, s Store) error {
	_, rev, err := r.readHome(ctx)
	if err != nil && rev == 0 { // a record that cannot be read is replaced
		return err
	}
	return r.putHome(ctx, homeRecord{hex.EncodeToString(s.Identity[:]), s.Opens}, rev)
}

// homeChanged is called with r.mu held for what etcd tells of the home key.
func (r *Registry) homeChanged(kv *mvccpb.KeyValue, deleted bool) error {
	if kv.ModRevision > r.homeSeen {
		r.homeSeen, r.homeValue = kv.ModRevision, string(kv.Value)
		if deleted {
			r.homeValue = ""
		}
	}
	return r.checkHome()
}

// checkHome is called with r.mu held. Events up to the revision at which
// CompareHome wrote are history.
func (r *Registry) checkHome() error {
	if r.homeRev != 0 && r.homeSeen > r.homeRev && r.homeValue != r.home.bytes() {
		return ErrHomeMoved
	}
	return nil
}
