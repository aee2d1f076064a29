package pebblestore

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/stipend/stipend/proto/grant"
)

// Why a folder is refused or a call fails; the text that wraps them says what
// was found and what to do.
var (
	ErrMissing    = errors.New("no store here")
	ErrExists     = errors.New("the folder is not empty")
	ErrForeign    = errors.New("the folder holds something else")
	ErrUnfinished = errors.New("the creation of the store did not finish")
	ErrNewer      = errors.New("the store was written by a newer version")
	ErrConstants  = errors.New("the store has other partition constants")
	ErrCorrupt    = errors.New("the store is damaged")
	ErrLocked     = errors.New("another process has the store open")
	ErrDiskFull   = errors.New("the disk is full")
	ErrFailed     = errors.New("the store has failed; only a new start of the process may use it")
	ErrClosed     = errors.New("the store is closed")
)

// Config says where a store is and how it is run.
type Config struct {
	Dir string // folder of the store, its own; created with permissions 0700
	// FS holds Dir; nil: the operating system's file system.
	FS vfs.FS
	// MemTableBytes is how much is written before it is sorted into files: 256
	// KiB to 1 GiB. The records of a busy tenant are rewritten all the time, and
	// only the last version in a table reaches the files: larger is less writing.
	// The log that a start reads is at most about four times as long.
	MemTableBytes int64
	// CacheBytes of blocks in memory, 1 MiB to 4 GiB. Only loads read.
	CacheBytes int64
	// MinFreeBytes on the disk, below which the store is not opened. Zero: any.
	MinFreeBytes int64
	// Log takes what matters for operation; nil: slog.Default().
	Log *slog.Logger
	// Fatal is called once, with the cause, when a commit failed or the disk fails
	// behind Pebble's back, and must not return: nil logs and ends the process
	// with code 1. It must not call the store. A Fatal that returns is for tests:
	// calls that were already inside Pebble may then never return.
	Fatal func(error)
	// OnCommit, if set, is told of every commit: how long it took, the bytes of
	// its batch, and its error. It is called by the committing goroutine.
	OnCommit func(d time.Duration, bytes int, err error)
}

// DefaultConfig is what the daemon starts from.
func DefaultConfig(dir string) Config {
	return Config{
		Dir:           dir,
		MemTableBytes: 64 << 20,
		CacheBytes:    32 << 20,
		MinFreeBytes:  256 << 20,
	}
}

// Validate names every field out of range.
func (c Config) Validate() error {
	check := func(field string, given, low, high int64) error {
		if given < low || given > high {
			return fmt.Errorf("%s: %d; allowed: %d to %d", field, given, low, high)
		}
		return nil
	}
	var dir error
	if c.Dir == "" {
		dir = errors.New("dir: is empty; allowed: the path of a folder")
	}
	return errors.Join(dir,
		check("mem_table_bytes", c.MemTableBytes, 256<<10, 1<<30),
		check("cache_bytes", c.CacheBytes, 1<<20, 4<<30),
		check("min_free_bytes", c.MinFreeBytes, 0, 1<<50),
	)
}

// NoGrantsMin and NoGrantsMax bound the duration given to Recover.
const (
	NoGrantsMin = grant.MinTTL
	NoGrantsMax = 2 * grant.MaxTTL
)

// Create makes a new store in a folder that does not exist or is empty
// (lost+found aside) and leaves it open. Anything else there is ErrExists. A
// crash before it returns leaves a folder that Open refuses as ErrMissing or
// ErrUnfinished, or a complete store.
func Create(cfg Config) (*Store, error) {
	s, err := create(cfg, Header{Identity: newIdentity(), Created: time.Now()}, 0)
	if err != nil {
		return nil, err
	}
	s.begun()
	return s, nil
}

// Open opens a store that Create or Recover made. It changes nothing that
// another Open could see: Identity and Mark are as they were on disk.
func Open(cfg Config) (*Store, error) {
	s, err := open(cfg)
	if err != nil {
		return nil, err
	}
	s.begun()
	return s, nil
}

func open(cfg Config) (*Store, error) {
	s, err := begin(cfg)
	if err != nil {
		return nil, err
	}
	found, names, err := inspect(s.fs, cfg.Dir)
	switch {
	case err != nil:
		return nil, err
	case found == folderMissing || found == folderEmpty:
		return nil, fmt.Errorf("store %s: %w: on the first start of a new installation create it (--init, once); if a store was here, the disk was lost or is not mounted: mount it, or run `stipend recover`", cfg.Dir, ErrMissing)
	case found == folderUnfinished:
		return nil, s.unfinished()
	case found == folderForeign:
		return nil, fmt.Errorf("store %s: %w (%s): name the store's own folder", cfg.Dir, ErrForeign, strings.Join(names, ", "))
	}
	if err := s.openDB(false); err != nil {
		return nil, err
	}
	if err := s.readMeta(); err != nil {
		s.abandon()
		return nil, err
	}
	return s, nil
}

// Recover turns whatever is at Dir into a store of a new identity whose
// partitions hand out nothing that its lost predecessor might have handed out
// too: all buckets start at level 0 and no grants are made for noGrantsFor,
// which must be at least the longest ttl of any policy ever in force there
// (NoGrantsMin to NoGrantsMax). A folder that is missing or empty becomes a new
// store; a store (a restored backup, say) keeps its records. The new identity
// and the record RecoveryKey of every partition are one synced batch; a crash
// before it returns leaves the old store or the recovered one, and recovering
// again is harmless.
//
// A store that is damaged is not recovered in place: move its folder away and
// recover into an empty one; its policies must then be put again.
//
// It does not make the store anybody's home: the caller does, after it returns.
func Recover(cfg Config, noGrantsFor time.Duration) (Header, error) {
	if noGrantsFor < NoGrantsMin || noGrantsFor > NoGrantsMax {
		return Header{}, fmt.Errorf("no_grants_for: %v; allowed: %v to %v", noGrantsFor, NoGrantsMin, NoGrantsMax)
	}
	s, err := begin(cfg)
	if err != nil {
		return Header{}, err
	}
	found, _, err := inspect(s.fs, cfg.Dir)
	if err != nil {
		return Header{}, err
	}
	h := Header{Identity: newIdentity(), Created: time.Now()}
	if found == folderMissing || found == folderEmpty {
		s, err = create(cfg, h, noGrantsFor)
	} else if s, err = open(cfg); err == nil {
		h.Replaces = s.header.Identity
		if err = s.writeMeta(h, s.Mark()+1, noGrantsFor); err != nil {
			s.abandon()
		}
	}
	if err != nil {
		return Header{}, fmt.Errorf("recover: %w", err)
	}
	return s.Header(), s.Close()
}

func create(cfg Config, h Header, noGrantsFor time.Duration) (*Store, error) {
	s, err := begin(cfg)
	if err != nil {
		return nil, err
	}
	found, names, err := inspect(s.fs, cfg.Dir)
	if err != nil {
		return nil, err
	}
	if found == folderUnfinished {
		return nil, s.unfinished()
	}
	if found != folderMissing && found != folderEmpty {
		return nil, fmt.Errorf("store %s: %w (%s): a new store needs a folder of its own", cfg.Dir, ErrExists, strings.Join(names, ", "))
	}
	if err := makeFolder(s.fs, cfg.Dir); err != nil {
		return nil, fmt.Errorf("store %s: %w", cfg.Dir, err)
	}
	// Opened twice: Pebble raises a new database to the wanted format only after
	// it began the first log, and a log of the oldest format has no sync offsets.
	if err := s.openDB(true); err != nil {
		return nil, err
	}
	if err := s.reopenDB(); err != nil {
		return nil, err
	}
	if err := s.writeMeta(h, 1, noGrantsFor); err != nil {
		s.abandon()
		return nil, err
	}
	return s, nil
}

func (s *Store) unfinished() error {
	return fmt.Errorf("store %s: %w: nothing was ever committed to it; remove the folder's content and create it again (--init on a first start)", s.cfg.Dir, ErrUnfinished)
}

// openDB locks the folder and opens Pebble in it. While the store opens, a
// failure that Pebble calls fatal is returned, not handed to Config.Fatal:
// nobody has been answered yet.
func (s *Store) openDB(create bool) (err error) {
	dir := s.cfg.Dir
	if usage, err := s.fs.GetDiskUsage(dir); err == nil && usage.AvailBytes < uint64(s.cfg.MinFreeBytes) {
		return fmt.Errorf("store %s: %w: %d bytes free, at least %d needed: make room and start again", dir, ErrDiskFull, usage.AvailBytes, s.cfg.MinFreeBytes)
	}
	s.watchDisk()
	if s.lock, err = pebble.LockDirectory(dir, s.fs); err != nil {
		_ = s.watch.Close()
		return fmt.Errorf("store %s: %w: %w", dir, ErrLocked, err)
	}
	return s.engine(func() (*pebble.DB, error) { return pebble.Open(dir, s.options(create)) })
}

func (s *Store) reopenDB() error {
	return s.engine(func() (*pebble.DB, error) {
		if err := s.db.Close(); err != nil {
			return nil, err
		}
		return pebble.Open(s.cfg.Dir, s.options(false))
	})
}

// engine does something that opens Pebble, which may fail in three ways: by an
// error, by a panic, and by never returning, after it called Fatalf or while it
// repeats a write that fails. The last is what the goroutine is for: it and the
// lock of the folder are then left to the end of the process.
func (s *Store) engine(do func() (*pebble.DB, error)) error {
	type result struct {
		db  *pebble.DB
		err error
	}
	done := make(chan result, 1)
	s.opening.Store(true)
	defer s.opening.Store(false)
	go func() {
		var r result
		defer func() {
			if p := recover(); p != nil {
				r.err = fmt.Errorf("%v", p)
			}
			done <- r
		}()
		r.db, r.err = do()
	}()
	var r result
	select {
	case r = <-done:
	case <-s.broken:
		s.db, s.lock, s.closed = nil, nil, true
		return fmt.Errorf("store %s: %w", s.cfg.Dir, s.failure())
	}
	s.db = r.db
	if failure := s.failure(); r.err == nil && failure != nil {
		r.err = failure
	}
	if r.err != nil {
		s.abandon()
		return fmt.Errorf("store %s: %w", s.cfg.Dir, describe(r.err))
	}
	return nil
}

// readMeta reads header and mark of a database that Pebble has opened.
func (s *Store) readMeta() error {
	raw, err := s.get(headerKey)
	if err == nil && raw == nil {
		return s.headerless()
	}
	if err == nil {
		s.header, err = decodeHeader(raw)
	}
	if err == nil {
		raw, err = s.get(markKey)
	}
	if err == nil {
		s.mark, err = decodeMark(raw)
	}
	if err != nil {
		return fmt.Errorf("store %s: %w", s.cfg.Dir, err)
	}
	return nil
}

// headerless tells a creation that was cut off, which leaves an empty database,
// from the database of another program.
func (s *Store) headerless() error {
	it, err := s.db.NewIter(nil)
	if err != nil {
		return fmt.Errorf("store %s: %w", s.cfg.Dir, err)
	}
	empty := !it.First()
	if err := errors.Join(it.Error(), it.Close()); err != nil {
		return fmt.Errorf("store %s: %w", s.cfg.Dir, describe(err))
	}
	if empty {
		return s.unfinished()
	}
	return fmt.Errorf("store %s: %w: a Pebble database without a store header: name the store's own folder", s.cfg.Dir, ErrForeign)
}

// writeMeta replaces header and mark, and leaves the recovery records if
// noGrantsFor is positive, as one synced batch.
func (s *Store) writeMeta(h Header, mark uint64, noGrantsFor time.Duration) error {
	h.Created = h.Created.Round(0).UTC()
	b := s.db.NewBatch()
	err := errors.Join(b.Set(headerKey, h.encode(), nil), b.Set(markKey, encodeMark(mark), nil))
	for p := range grant.Partition(grant.Partitions) {
		if noGrantsFor > 0 {
			err = errors.Join(err, b.Set(append([]byte{byte(p)}, RecoveryKey...), RecoveryValue(noGrantsFor), nil))
		}
	}
	if err == nil {
		err = s.write(b)
	}
	if err != nil {
		return fmt.Errorf("store %s: write header: %w", s.cfg.Dir, err)
	}
	s.header, s.mark = h, mark
	return nil
}

func (s *Store) get(key []byte) ([]byte, error) {
	v, closer, err := s.db.Get(key)
	if errors.Is(err, pebble.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, describe(err)
	}
	return slices.Clone(v), closer.Close()
}

// describe puts Pebble's errors into the classes of this package.
func describe(err error) error {
	switch {
	case vfs.IsNoSpaceError(err):
		return fmt.Errorf("%w: make room and start again: %w", ErrDiskFull, err)
	case pebble.IsCorruptionError(err), errors.Is(err, pebble.ErrDBNotPristine):
		return fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return err
}

// What a folder looks like before Pebble touches it.
type folder uint8

const (
	folderMissing    folder = iota
	folderEmpty             // lost+found and a left-over lock aside
	folderUnfinished        // Pebble began to create a database and did not get to its first manifest
	folderForeign
	folderStore
)

func inspect(fsys vfs.FS, dir string) (folder, []string, error) {
	names, err := fsys.List(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return folderMissing, nil, nil
	}
	if err != nil {
		return folderMissing, nil, fmt.Errorf("store %s: %w", dir, err)
	}
	names = slices.DeleteFunc(names, func(n string) bool { return n == "lost+found" || n == "LOCK" })
	slices.Sort(names)
	begins := func(prefixes ...string) func(string) bool {
		return func(n string) bool {
			return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(n, p) })
		}
	}
	kind := folderForeign
	switch creating := begins("MANIFEST-", "OPTIONS-", "marker.", "temporary."); {
	case len(names) == 0:
		kind = folderEmpty
	case slices.ContainsFunc(names, begins("marker.manifest.")):
		kind = folderStore
	case !slices.ContainsFunc(names, func(n string) bool { return !creating(n) }):
		kind = folderUnfinished
	}
	if len(names) > 3 {
		names = append(names[:3:3], "...")
	}
	return kind, names, nil
}

// makeFolder creates dir and its missing parents for this user only and syncs
// every folder that got a new entry.
func makeFolder(fsys vfs.FS, dir string) error {
	var parents []string // of new folders, the deepest first
	for d := dir; ; {
		_, err := fsys.Stat(d)
		if err == nil {
			break
		}
		parent := fsys.PathDir(d)
		if !errors.Is(err, fs.ErrNotExist) || parent == d {
			return err
		}
		parents = append(parents, cmp.Or(parent, "."))
		d = parent
	}
	if err := fsys.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	for _, d := range parents {
		f, err := fsys.OpenDir(d)
		if err != nil {
			return err
		}
		if err := errors.Join(f.Sync(), f.Close()); err != nil {
			return err
		}
	}
	return nil
}

func exit(log *slog.Logger) func(error) {
	return func(err error) {
		log.Error("the store has failed and the process ends: what is not known to be on disk must not be answered; start again to read what is", "err", err)
		os.Exit(1)
	}
}
