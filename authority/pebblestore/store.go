package pebblestore

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

// Store is one open store. Its methods are safe for concurrent use.
type Store struct {
	cfg   Config
	fs    vfs.FS
	log   *slog.Logger
	watch io.Closer
	lock  *pebble.Lock
	db    *pebble.DB

	header Header

	markMu sync.Mutex
	mark   uint64

	// open is read-locked by every call, so that Close waits for them.
	open   sync.RWMutex
	closed bool

	// failed is set before anybody hears of the failure and never cleared.
	failed  atomic.Pointer[error]
	opening atomic.Bool // Pebble is being opened
	broken  chan struct{}
	serving atomic.Bool // a failure goes to Config.Fatal
	fatal   sync.Once

	commits, commitBytes, commitNanos, records atomic.Uint64
	backgroundErrors, backgroundRow, stalls    atomic.Uint64
	stalled                                    atomic.Bool
}

var _ authority.Store = (*Store)(nil)

// begin makes the value for one open, before anything is touched on disk.
func begin(cfg Config) (*Store, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	s := &Store{cfg: cfg, fs: orderedFS{vfs.Default}, log: cfg.Log, broken: make(chan struct{})}
	if cfg.FS != nil {
		s.fs = orderedFS{cfg.FS}
	}
	if s.log == nil {
		s.log = slog.Default()
	}
	if s.cfg.Fatal == nil {
		s.cfg.Fatal = exit(s.log)
	}
	return s, nil
}

// begun ends the opening: from here on a failure ends the process.
func (s *Store) begun() {
	s.serving.Store(true)
	if s.failure() != nil {
		s.tell()
	}
	if info, err := s.fs.Stat(s.cfg.Dir); s.cfg.FS == nil && err == nil && info.Mode().Perm()&0o077 != 0 {
		s.log.Warn("the store's folder is open to other users", "dir", s.cfg.Dir, "mode", info.Mode().Perm().String(), "advised", "0700")
	}
	s.log.Info("store open", "dir", s.cfg.Dir, "identity", s.header.Identity.String(), "mark", s.mark)
}

// Identity names the store; see Header.
func (s *Store) Identity() Identity { return s.header.Identity }

// Header is what the store says of itself.
func (s *Store) Header() Header { return s.header }

// Mark is a number that only grows in the life of an identity, as it is on
// disk: 1 at creation, raised by Advance and by nothing else. A cluster that
// remembers a larger one for this identity has seen a later state of the store
// than this disk holds: the disk was restored from a backup, or is a copy.
//
// Opening does not raise it. If it did, a restored disk under a supervisor that
// restarts it would, after some refusals, pass for the newest.
func (s *Store) Mark() uint64 {
	s.markMu.Lock()
	defer s.markMu.Unlock()
	return s.mark
}

// Advance makes Mark()+1 durable and returns it. The cluster must be told only
// afterwards, so that what it remembers is never ahead of the real disk. A
// backup is told from the store once the store has advanced after it was taken.
func (s *Store) Advance() (uint64, error) {
	if err := s.enter(); err != nil {
		return 0, fmt.Errorf("advance the store's mark: %w", err)
	}
	defer s.open.RUnlock()
	s.markMu.Lock()
	defer s.markMu.Unlock()
	b := s.db.NewBatch()
	err := b.Set(markKey, encodeMark(s.mark+1), nil)
	if err == nil {
		err = s.write(b)
	}
	if err != nil {
		return 0, fmt.Errorf("advance the store's mark: %w", err)
	}
	s.mark++
	return s.mark, nil
}

// Load implements authority.Store.
func (s *Store) Load(p grant.Partition, yield func(key, value []byte) error) error {
	if err := s.load(p, yield); err != nil {
		return fmt.Errorf("load partition %d: %w", p, err)
	}
	return nil
}

func (s *Store) load(p grant.Partition, yield func(key, value []byte) error) (err error) {
	if p >= grant.Partitions {
		return fmt.Errorf("allowed: 0 to %d", grant.Partitions-1)
	}
	if err := s.enter(); err != nil {
		return err
	}
	defer s.open.RUnlock()
	it, err := s.db.NewIter(&pebble.IterOptions{LowerBound: []byte{byte(p)}, UpperBound: []byte{byte(p) + 1}})
	if err != nil {
		return describe(err)
	}
	defer func() {
		if cerr := it.Close(); err == nil && cerr != nil {
			err = describe(cerr)
		}
		// What was read beside a failing commit may never have reached the disk.
		if failure := s.failure(); err == nil && failure != nil {
			err = failure
		}
	}()
	for ok := it.First(); ok; ok = it.Next() {
		value, err := it.ValueAndErr()
		if err != nil {
			return describe(err)
		}
		if err := yield(it.Key()[1:], value); err != nil {
			return err
		}
	}
	if err := it.Error(); err != nil {
		return describe(err)
	}
	return nil
}

// Part is what one partition commits.
type Part struct {
	Partition grant.Partition
	Records   []authority.Record
}

// Commit implements authority.Store: one batch, synced. After an error the
// store has failed and the process is ending.
func (s *Store) Commit(p grant.Partition, records []authority.Record) error {
	if err := s.CommitParts([]Part{{p, records}}); err != nil {
		return fmt.Errorf("partition %d: %w", p, err)
	}
	return nil
}

// CommitParts commits the records of several partitions as one batch: all or
// none of them. A partition is in it once at most. It costs as much as the
// commit of one partition with as many records.
func (s *Store) CommitParts(parts []Part) error {
	count, size := 0, batchHeader
	for _, part := range parts {
		if part.Partition >= grant.Partitions {
			return fmt.Errorf("commit to partition %d: allowed: 0 to %d", part.Partition, grant.Partitions-1)
		}
		count += len(part.Records)
		for _, r := range part.Records {
			size += recordHeader + len(r.Key) + len(r.Value)
		}
	}
	if err := s.enter(); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	defer s.open.RUnlock()
	if count == 0 {
		return nil
	}
	start := time.Now()
	b, err := s.batch(parts, size)
	size = b.Len()
	if err == nil {
		err = s.write(b)
	}
	took := time.Since(start)
	if err == nil {
		s.commits.Add(1)
		s.records.Add(uint64(count))
		s.commitBytes.Add(uint64(size))
		s.commitNanos.Add(uint64(took))
	} else {
		err = fmt.Errorf("commit: %w", err)
	}
	if s.cfg.OnCommit != nil {
		s.cfg.OnCommit(took, size, err)
	}
	return err
}

// Of Pebble's batch: its header; and of a record its kind, two lengths and the
// partition before its key.
const batchHeader, recordHeader = 12, 1 + 5 + 5 + 1

func (s *Store) batch(parts []Part, size int) (*pebble.Batch, error) {
	b := s.db.NewBatchWithSize(size)
	for _, part := range parts {
		for _, r := range part.Records {
			var op *pebble.DeferredBatchOp
			if r.Value == nil {
				op = b.DeleteDeferred(1 + len(r.Key))
			} else {
				op = b.SetDeferred(1+len(r.Key), len(r.Value))
				copy(op.Value, r.Value)
			}
			op.Key[0] = byte(part.Partition)
			copy(op.Key[1:], r.Key)
			if err := op.Finish(); err != nil {
				return b, s.fail(err)
			}
		}
	}
	return b, nil
}

// write commits a batch, synced, and does not trust Pebble's nil: Pebble tells
// of a failed write by Logger.Fatalf, which is expected never to return, and
// reports success if it does. A sync that succeeded after another one failed is
// a failure too, since the log may have a hole before it.
func (s *Store) write(b *pebble.Batch) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = s.fail(fmt.Errorf("panic in the storage engine: %v", r))
		}
	}()
	if err := b.Commit(pebble.Sync); err != nil {
		return s.fail(err)
	}
	if failure := s.failure(); failure != nil {
		return failure
	}
	// The batch is durable; its own buffers are all that Close could lose.
	_ = b.Close()
	return nil
}

// fail records the first failure, tells Config.Fatal of it once, and returns
// the error that callers get.
func (s *Store) fail(cause error) error {
	failure := fmt.Errorf("%w: %w", ErrFailed, describe(cause))
	if s.failed.CompareAndSwap(nil, &failure) {
		close(s.broken)
	}
	if s.serving.Load() {
		s.tell()
	}
	return s.failure()
}

func (s *Store) tell() { s.fatal.Do(func() { s.cfg.Fatal(s.failure()) }) }

// halt is fail for callers inside Pebble that must not go on. While Pebble is
// being opened the goroutine stays here, and engine tells the caller.
func (s *Store) halt(cause error) {
	_ = s.fail(cause)
	if s.opening.Load() {
		select {}
	}
}

func (s *Store) failure() error {
	if f := s.failed.Load(); f != nil {
		return *f
	}
	return nil
}

// enter admits a call, or says why not; after nil the caller must s.open.RUnlock.
func (s *Store) enter() error {
	if err := s.failure(); err != nil {
		return err
	}
	s.open.RLock()
	if s.closed {
		s.open.RUnlock()
		return ErrClosed
	}
	return nil
}

// Close waits for the calls in flight and gives the folder free. Everything
// acknowledged is on disk before, so that Close has nothing to make durable. A
// store that has failed is given up without touching its files.
func (s *Store) Close() error {
	if s.failure() != nil {
		s.abandon()
		return nil
	}
	s.open.Lock()
	defer s.open.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	err := errors.Join(s.db.Close(), s.lock.Close(), s.watch.Close())
	if err != nil {
		return fmt.Errorf("close store %s: %w", s.cfg.Dir, err)
	}
	s.log.Info("store closed", "dir", s.cfg.Dir)
	return nil
}

// abandon frees what can be freed after a failure, when Pebble may panic on
// anything; its errors tell nothing new.
func (s *Store) abandon() {
	s.serving.Store(false)
	s.open.Lock()
	defer s.open.Unlock()
	if s.closed {
		return
	}
	s.closed = true
	defer func() {
		_ = recover()
		if s.lock != nil {
			_ = s.lock.Close()
		}
		_ = s.watch.Close()
	}()
	if s.db != nil {
		_ = s.db.Close()
	}
}
