package pebblestore

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// engineFormat is the newest on-disk format of Pebble that a store is raised to:
// with sync offsets in the log, so that a damaged log is told from one that ends
// early (FormatWALSyncChunks), and checksums in the footers of files.
const engineFormat = pebble.FormatTableFormatV6

// options are for a database that is written all the time, mostly the same
// keys, beside decisions that are written once and deleted in order, and read
// only when a partition is loaded.
func (s *Store) options(create bool) *pebble.Options {
	return &pebble.Options{
		FS:                 s.fs,
		Lock:               s.lock,
		ErrorIfExists:      create,
		ErrorIfNotExists:   !create,
		FormatMajorVersion: engineFormat,
		Logger:             engineLogger{s},
		EventListener:      s.events(),

		// Rewrites and deletes of a key that is still in memory cost nothing in
		// the files. Four tables may wait for their turn, so that one slow flush
		// does not stop commits.
		MemTableSize:                uint64(s.cfg.MemTableBytes),
		MemTableStopWritesThreshold: 4,
		// Loads are rare: let level 0 grow to four layers before it is compacted,
		// and stop writes only when compaction has truly lost.
		L0CompactionThreshold: 4,
		L0StopWritesThreshold: 64,
		LBaseMaxBytes:         max(s.cfg.MemTableBytes, 16<<20),
		CacheSize:             s.cfg.CacheBytes,
		MaxOpenFiles:          512,
		CompactionConcurrencyRange: func() (low, high int) {
			return 1, 2
		},
		// The log is never compressed and every commit syncs it: nothing to set.
		// No minimum between syncs either: commits that arrive while one sync
		// runs share the next, which is all the grouping that pays.
	}
}

// engineLogger takes Pebble's log. Fatalf means that a write failed, or that
// Pebble's state is broken; Pebble goes on as if nothing happened if it returns,
// which write and engine catch.
type engineLogger struct{ s *Store }

func (l engineLogger) Infof(format string, args ...any) {
	l.s.log.Debug("pebble: " + fmt.Sprintf(format, args...))
}

func (l engineLogger) Errorf(format string, args ...any) {
	l.s.log.Error("pebble: " + fmt.Sprintf(format, args...))
}

func (l engineLogger) Fatalf(format string, args ...any) {
	cause := fmt.Errorf(format, args...)
	for _, a := range args {
		if err, ok := a.(error); ok {
			cause = err // keeps its class for describe
		}
	}
	l.s.halt(cause)
}

// maxBackgroundRow is how many failures of background work in a row end the process.
const maxBackgroundRow = 3

// events picks what an operator can act on.
func (s *Store) events() *pebble.EventListener {
	stallStart := time.Time{}
	return &pebble.EventListener{
		// A flush or compaction that failed is tried again from the log and the
		// old files; nothing acknowledged is at risk. But Pebble tries again at
		// once and for ever, in Open too, which then never returns. A full disk or
		// a third failure without a success between ends the process, as it would
		// if the log met the same disk first.
		BackgroundError: func(err error) {
			s.backgroundErrors.Add(1)
			row := s.backgroundRow.Add(1)
			s.log.Error("pebble: background work failed", "err", err, "in a row", row)
			if vfs.IsNoSpaceError(err) || row >= maxBackgroundRow {
				s.halt(err)
			}
		},
		FlushEnd: func(info pebble.FlushInfo) {
			if info.Err == nil {
				s.backgroundRow.Store(0)
			}
		},
		CompactionEnd: func(info pebble.CompactionInfo) {
			if info.Err == nil {
				s.backgroundRow.Store(0)
			}
		},
		DataCorruption: func(info pebble.DataCorruptionInfo) {
			_ = s.fail(fmt.Errorf("%w: %v", ErrCorrupt, info))
		},
		LowDiskSpace: func(info pebble.LowDiskSpaceInfo) {
			s.log.Warn("pebble: disk space is low", "info", info.String())
		},
		WriteStallBegin: func(info pebble.WriteStallBeginInfo) {
			s.stalls.Add(1)
			s.stalled.Store(true)
			stallStart = time.Now() // begin and end alternate
			s.log.Warn("pebble: commits wait for the disk to catch up", "reason", info.Reason)
		},
		WriteStallEnd: func() {
			s.stalled.Store(false)
			s.log.Info("pebble: commits go on", "waited", time.Since(stallStart))
		},
		FormatUpgrade: func(v pebble.FormatMajorVersion) {
			s.log.Debug("pebble: format raised", "version", uint64(v))
		},
		PossibleAPIMisuse: func(info pebble.PossibleAPIMisuseInfo) {
			s.log.Error("pebble: possible misuse", "info", info.String())
		},
	}
}

// Stats is a snapshot of counters since Open and of gauges.
type Stats struct {
	Commits     uint64        // acknowledged
	Records     uint64        // of them
	CommitBytes uint64        // of their batches
	CommitTime  time.Duration // sum over them; Commits*interval less than it means that they overlap

	LogBytes       uint64 // written to the write-ahead log
	LogSize        uint64 // live bytes of it: what a start must read
	DiskBytes      uint64 // all files of the store
	FreeBytes      uint64 // on its disk; zero when not known
	CompactionDebt uint64 // bytes to be rewritten until the files are in shape
	Written        uint64 // bytes written by flushes and compactions
	L0Sublevels    int    // layers of level 0; commits stop at 64
	Flushes        uint64
	Compactions    uint64

	BackgroundErrors uint64
	WriteStalls      uint64
	Stalled          bool // commits wait right now
	Failed           bool
}

// Stats reads all counters; it takes some locks of the engine and is meant for
// a scrape, not for every commit. After Close or a failure only the counters of
// this package are filled in.
func (s *Store) Stats() Stats {
	st := Stats{
		Commits:          s.commits.Load(),
		Records:          s.records.Load(),
		CommitBytes:      s.commitBytes.Load(),
		CommitTime:       time.Duration(s.commitNanos.Load()),
		BackgroundErrors: s.backgroundErrors.Load(),
		WriteStalls:      s.stalls.Load(),
		Stalled:          s.stalled.Load(),
		Failed:           s.failure() != nil,
	}
	if s.enter() != nil {
		return st
	}
	defer s.open.RUnlock()
	m := s.db.Metrics()
	st.LogBytes = m.WAL.BytesWritten
	st.LogSize = m.WAL.Size
	st.DiskBytes = m.DiskSpaceUsage()
	st.CompactionDebt = m.Compact.EstimatedDebt
	for i := range m.Levels { // Total counts the log among them
		st.Written += m.Levels[i].TableBytesFlushed + m.Levels[i].TableBytesCompacted
	}
	st.L0Sublevels = int(m.Levels[0].Sublevels)
	st.Flushes = uint64(m.Flush.Count)
	st.Compactions = uint64(m.Compact.Count)
	if usage, err := s.fs.GetDiskUsage(s.cfg.Dir); err == nil {
		st.FreeBytes = usage.AvailBytes
	}
	return st
}

// slowAfter is how long a write may hang before the log says so.
const slowAfter = 5 * time.Second

// watchDisk reports writes that hang, from a goroutine that ends with s.watch.
func (s *Store) watchDisk() {
	s.fs, s.watch = vfs.WithDiskHealthChecks(s.fs, slowAfter, nil, func(info vfs.DiskSlowInfo) {
		s.log.Warn("the disk is slow", "path", info.Path, "op", info.OpType.String(), "for", info.Duration)
	})
}

// orderedFS makes the entry of a manifest durable before that of the marker that
// names it. Pebble creates both and syncs their folder once; a crash between may
// leave the marker alone on a file system that does not keep the order of new
// entries, and Pebble then refuses the whole store.
type orderedFS struct{ vfs.FS }

func (f orderedFS) Unwrap() vfs.FS { return f.FS }

func (f orderedFS) Create(name string, category vfs.DiskWriteCategory) (vfs.File, error) {
	if strings.HasPrefix(f.PathBase(name), "marker.") {
		dir, err := f.OpenDir(f.PathDir(name))
		if err != nil {
			return nil, err
		}
		if err := errors.Join(dir.Sync(), dir.Close()); err != nil {
			return nil, err
		}
	}
	return f.FS.Create(name, category)
}
