package pebblestore

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/authority/storetest"
	"github.com/stipend/stipend/proto/grant"
)

func mustCreate(t testing.TB, cfg Config) *Store {
	t.Helper()
	s, err := Create(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func mustClose(t testing.TB, s *Store) {
	t.Helper()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

func record(k, v string) []authority.Record {
	return []authority.Record{{Key: []byte(k), Value: []byte(v)}}
}

// refused checks that both ways of opening fail with the right class and leave a
// text that says what to do.
func refused(t *testing.T, cfg Config, open, create error, advice string) {
	t.Helper()
	s, err := Open(cfg)
	if err == nil {
		mustClose(t, s)
	}
	if !errors.Is(err, open) || !strings.Contains(err.Error(), advice) || !strings.Contains(err.Error(), cfg.Dir) {
		t.Errorf("Open: %v; want %q, the folder and %q", err, open, advice)
	}
	if s, err := Create(cfg); !errors.Is(err, create) {
		if err == nil {
			mustClose(t, s)
		}
		t.Errorf("Create: %v; want %q", err, create)
	}
}

// TestRefusals: a folder that is not exactly a store of this version is not
// opened, and nothing that exists is created over.
func TestRefusals(t *testing.T) {
	file := func(name string) func(t *testing.T, dir string) {
		return func(t *testing.T, dir string) {
			if err := os.WriteFile(filepath.Join(dir, name), []byte("x"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	// rewrite makes a store and then puts another header into it.
	rewrite := func(key []byte, change func(raw []byte) []byte) func(t *testing.T, dir string) {
		return func(t *testing.T, dir string) {
			s := mustCreate(t, testConfig(nil, dir))
			raw, err := s.get(key)
			if err != nil {
				t.Fatal(err)
			}
			if raw = change(raw); raw == nil {
				err = s.db.Delete(key, pebble.Sync)
			} else {
				err = s.db.Set(key, raw, pebble.Sync)
			}
			if err != nil {
				t.Fatal(err)
			}
			mustClose(t, s)
		}
	}
	for _, test := range []struct {
		name         string
		prepare      func(t *testing.T, dir string)
		open, create error
		advice       string
	}{
		{"foreign file", file("notes.txt"), ErrForeign, ErrExists, "notes.txt"},
		{"other database", file("CURRENT"), ErrForeign, ErrExists, "CURRENT"},
		{"cut-off creation", file("MANIFEST-000001"), ErrUnfinished, ErrUnfinished, "remove the folder's content"},
		{"database of another program", func(t *testing.T, dir string) {
			db, err := pebble.Open(dir, &pebble.Options{Logger: engineLogger{&Store{log: testConfig(nil, dir).Log}}})
			if err == nil {
				err = errors.Join(db.Set([]byte("k"), []byte("v"), pebble.Sync), db.Close())
			}
			if err != nil {
				t.Fatal(err)
			}
		}, ErrForeign, ErrExists, "without a store header"},
		{"database without content", func(t *testing.T, dir string) {
			db, err := pebble.Open(dir, &pebble.Options{Logger: engineLogger{&Store{log: testConfig(nil, dir).Log}}})
			if err == nil {
				err = db.Close()
			}
			if err != nil {
				t.Fatal(err)
			}
		}, ErrUnfinished, ErrExists, "remove the folder's content"},
		{"newer format", rewrite(headerKey, func(raw []byte) []byte {
			binary.BigEndian.PutUint32(raw[8:], Format+1)
			return append(raw, "what a later version adds"...)
		}), ErrNewer, ErrExists, "run the newer version"},
		{"format zero", rewrite(headerKey, func(raw []byte) []byte {
			binary.BigEndian.PutUint32(raw[8:], 0)
			return resum(raw)
		}), ErrCorrupt, ErrExists, "format 0"},
		{"other number of partitions", rewrite(headerKey, func(raw []byte) []byte {
			binary.BigEndian.PutUint16(raw[52:], 32)
			return resum(raw)
		}), ErrConstants, ErrExists, "32 partitions"},
		{"other hash", rewrite(headerKey, func(raw []byte) []byte {
			raw[55] = 'F'
			return resum(raw)
		}), ErrConstants, ErrExists, "Fnv1a64"},
		{"no identity", rewrite(headerKey, func(raw []byte) []byte {
			clear(raw[12:28])
			return resum(raw)
		}), ErrCorrupt, ErrExists, "identity is zero"},
		{"damaged header", rewrite(headerKey, func(raw []byte) []byte {
			raw[20] ^= 4
			return raw
		}), ErrCorrupt, ErrExists, "checksum"},
		{"lost header", rewrite(headerKey, func([]byte) []byte { return nil }), ErrForeign, ErrExists, "without a store header"},
		{"lost mark", rewrite(markKey, func([]byte) []byte { return nil }), ErrCorrupt, ErrExists, "mark"},
		{"damaged mark", rewrite(markKey, func(raw []byte) []byte {
			raw[7]++
			return raw
		}), ErrCorrupt, ErrExists, "mark"},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			test.prepare(t, dir)
			refused(t, testConfig(nil, dir), test.open, test.create, test.advice)
			refused(t, testConfig(nil, dir), test.open, test.create, test.advice) // the refusal changed nothing
		})
	}
	t.Run("missing", func(t *testing.T) {
		for _, dir := range []string{t.TempDir(), filepath.Join(t.TempDir(), "not", "there")} {
			s, err := Open(testConfig(nil, dir))
			if err == nil {
				mustClose(t, s)
			}
			if !errors.Is(err, ErrMissing) || !strings.Contains(err.Error(), "recover") {
				t.Errorf("Open: %v", err)
			}
			if names, _ := os.ReadDir(dir); len(names) > 0 {
				t.Errorf("Open left %v in an empty folder", names)
			}
		}
	})
	t.Run("full disk", func(t *testing.T) {
		mem := vfs.NewMem()
		mem.TestingSetDiskUsage(vfs.DiskUsage{AvailBytes: 1000, TotalBytes: 2000, UsedBytes: 1000})
		cfg := testConfig(mem, storeDir)
		cfg.MinFreeBytes = 1001
		if _, err := Create(cfg); !errors.Is(err, ErrDiskFull) || !strings.Contains(err.Error(), "1000 bytes free") {
			t.Errorf("Create: %v", err)
		}
	})
}

// TestCreate: a store is made in a new or an empty folder, for this user only,
// with a new identity each time; it is not made twice; it is open for one only.
func TestCreate(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	cfg := testConfig(nil, dir)
	before := time.Now()
	s := mustCreate(t, cfg)
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("folder has mode %v (%v), want 0700", info.Mode(), err)
	}
	if c := s.Header().Created; c.Before(before.Add(-time.Second)) || c.After(time.Now()) {
		t.Errorf("created %v", c)
	}
	refused(t, cfg, ErrLocked, ErrExists, "another process")
	id := s.Identity()
	mustClose(t, s)
	if err := s.Commit(0, record("k", "v")); !errors.Is(err, ErrClosed) {
		t.Errorf("Commit after Close: %v", err)
	}

	mounted := t.TempDir() // a fresh ext4 volume is not quite empty
	if err := os.Mkdir(filepath.Join(mounted, "lost+found"), 0o700); err != nil {
		t.Fatal(err)
	}
	s = mustCreate(t, testConfig(nil, mounted))
	if s.Identity() == id {
		t.Error("two stores have one identity")
	}
	mustClose(t, s)
	if s, err := Open(testConfig(nil, mounted)); err != nil {
		t.Error(err)
	} else {
		mustClose(t, s)
	}
}

// TestConfigValidate: an error names field, value and what is allowed.
func TestConfigValidate(t *testing.T) {
	_, err := Create(Config{MemTableBytes: 5, CacheBytes: 1 << 40, MinFreeBytes: -1})
	for _, want := range []string{"dir: is empty", "mem_table_bytes: 5; allowed: 262144 to", "cache_bytes: 1099511627776", "min_free_bytes: -1"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not say %q", err, want)
		}
	}
	if err := DefaultConfig("d").Validate(); err != nil {
		t.Error(err)
	}
	for _, d := range []time.Duration{0, -1, NoGrantsMax + 1} {
		if _, err := Recover(testConfig(vfs.NewMem(), storeDir), d); err == nil || !strings.Contains(err.Error(), "no_grants_for") {
			t.Errorf("Recover for %v: %v", d, err)
		}
	}
}

// TestMarkTellsABackup: a disk that was copied, before the store advanced for
// the last time, shows a mark below the remembered one however often it is
// opened, while the store itself never does.
func TestMarkTellsABackup(t *testing.T) {
	mem := vfs.NewCrashableMem()
	s := mustCreate(t, testConfig(mem, storeDir))
	backups := []*vfs.MemFS{}
	remembered := s.Mark()
	for range 5 {
		backups = append(backups, mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 100, RNG: rand.New(rand.NewPCG(1, 1))}))
		m, err := s.Advance()
		if err != nil || m <= remembered || m != s.Mark() {
			t.Fatalf("advanced to %d (%v) from %d", m, err, remembered)
		}
		remembered = m
	}
	crashed := mem.CrashClone(vfs.CrashCloneCfg{})
	mustClose(t, s)
	for i, disk := range append(backups, crashed) {
		for range 10 {
			s, err := Open(testConfig(disk, storeDir))
			if err != nil {
				t.Fatal(err)
			}
			if older := s.Mark() < remembered; older != (i < len(backups)) {
				t.Errorf("disk %d: mark %d, remembered %d", i, s.Mark(), remembered)
			}
			mustClose(t, s)
		}
	}
}

// TestFailureIsFinal: after a failed commit the store answers nothing more, no
// reads either, though Pebble would show the records; Fatal hears of it once,
// with the cause; and a new start finds what the disk holds.
func TestFailureIsFinal(t *testing.T) {
	for _, outcome := range []storetest.Outcome{storetest.Lost, storetest.Kept} {
		t.Run(outcome.String(), func(t *testing.T) {
			mem := vfs.NewCrashableMem()
			d := newDisk(mem)
			cfg := testConfig(d, storeDir)
			var heard, told []error
			cfg.Fatal = func(err error) { heard = append(heard, err) }
			cfg.OnCommit = func(_ time.Duration, _ int, err error) { told = append(told, err) }
			s := mustCreate(t, cfg)
			if err := s.Commit(5, record("k", "before")); err != nil {
				t.Fatal(err)
			}
			d.failLog(outcome)
			err := s.Commit(5, record("k", "after"))
			if !errors.Is(err, ErrFailed) || !errors.Is(err, syscall.EIO) {
				t.Errorf("Commit: %v", err)
			}
			d.on(func(errorfs.Op) error { return nil }) // the disk works again; the store must not
			if err := s.Commit(6, record("k", "other")); !errors.Is(err, ErrFailed) {
				t.Errorf("Commit after a failure: %v", err)
			}
			if err := s.Commit(6, nil); !errors.Is(err, ErrFailed) {
				t.Errorf("empty Commit after a failure: %v", err)
			}
			if err := s.Load(5, func(_, _ []byte) error { t.Error("a record was read"); return nil }); !errors.Is(err, ErrFailed) {
				t.Errorf("Load after a failure: %v", err)
			}
			if _, err := s.Advance(); !errors.Is(err, ErrFailed) {
				t.Errorf("Advance after a failure: %v", err)
			}
			if len(heard) != 1 || !errors.Is(heard[0], syscall.EIO) {
				t.Errorf("Fatal heard %v", heard)
			}
			if len(told) != 2 || told[0] != nil || told[1] == nil {
				t.Errorf("OnCommit was told %v", told)
			}
			if st := s.Stats(); !st.Failed || st.Commits != 1 {
				t.Errorf("stats: %+v", st)
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			for percent, want := range map[int]string{0: "before", 100: map[storetest.Outcome]string{storetest.Lost: "before", storetest.Kept: "after"}[outcome]} {
				clone := mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: percent, RNG: rand.New(rand.NewPCG(1, 1))})
				s, err := Open(testConfig(clone, storeDir))
				if err != nil {
					t.Fatal(err)
				}
				got, err := content(s)
				if err != nil || got["5/k"] != want || len(got) != 1 {
					t.Errorf("%d %% kept: %v, %v; want %q", percent, got, err, want)
				}
				mustClose(t, s)
			}
		})
	}
}

// TestLoadBesideAFailure: a load that a failure overtakes fails too.
func TestLoadBesideAFailure(t *testing.T) {
	d := newDisk(vfs.NewCrashableMem())
	cfg := testConfig(d, storeDir)
	cfg.Fatal = func(error) {}
	s := mustCreate(t, cfg)
	defer s.Close()
	if err := s.Commit(1, record("k", "v")); err != nil {
		t.Fatal(err)
	}
	d.failLog(storetest.Kept)
	if err := s.Load(1, func(_, _ []byte) error {
		if s.Commit(2, record("k", "v")) == nil {
			t.Error("the commit succeeded")
		}
		return nil
	}); !errors.Is(err, ErrFailed) {
		t.Errorf("Load: %v", err)
	}
	if err := s.Load(1, func(_, _ []byte) error { return nil }); !errors.Is(err, ErrFailed) {
		t.Errorf("Load: %v", err)
	}
}

// TestFailureReachesEveryCaller: of callers that commit at once when the log
// fails, none hears success for a record that a new start does not find.
func TestFailureReachesEveryCaller(t *testing.T) {
	mem := vfs.NewCrashableMem()
	d := newDisk(mem)
	cfg := testConfig(d, storeDir)
	cfg.Fatal = func(error) {}
	s := mustCreate(t, cfg)
	var mu sync.Mutex
	left := 20
	d.on(func(op errorfs.Op) error {
		mu.Lock()
		defer mu.Unlock()
		if isSync(op.Kind) {
			if left--; left < 0 {
				return errDisk
			}
		}
		return nil
	})
	acked := make(map[string]string)
	var all sync.WaitGroup
	for p := range grant.Partition(grant.Partitions) {
		all.Go(func() {
			for n := range 1000 {
				if s.Commit(p, record(fmt.Sprint(n), "v")) != nil {
					return
				}
				mu.Lock()
				acked[fmt.Sprintf("%d/%d", p, n)] = "v"
				mu.Unlock()
			}
		})
	}
	all.Wait()
	mustClose(t, s)
	if len(acked) == 0 || len(acked) == 1000*grant.Partitions {
		t.Fatalf("%d commits acknowledged", len(acked))
	}
	s, err := Open(testConfig(mem.CrashClone(vfs.CrashCloneCfg{}), storeDir))
	if err != nil {
		t.Fatal(err)
	}
	defer mustClose(t, s)
	got, err := content(s)
	if err != nil {
		t.Fatal(err)
	}
	for k := range acked {
		if got[k] == "" {
			t.Errorf("%s was acknowledged and is lost", k)
		}
	}
}

// TestDiskFull: when the disk is full, in the log or in the files behind it, the
// process is told to end, with that reason; what was acknowledged is there.
func TestDiskFull(t *testing.T) {
	for _, suffix := range []string{".log", ".sst"} {
		t.Run(suffix, func(t *testing.T) {
			mem := vfs.NewCrashableMem()
			d := newDisk(mem)
			cfg := testConfig(d, storeDir)
			heard := make(chan error, 1)
			cfg.Fatal = func(err error) { heard <- err }
			s := mustCreate(t, cfg)
			if err := s.Commit(0, record("k", "acknowledged")); err != nil {
				t.Fatal(err)
			}
			d.on(func(op errorfs.Op) error {
				if strings.HasSuffix(op.Path, suffix) && (op.Kind == errorfs.OpFileWrite || op.Kind == errorfs.OpCreate) {
					return &os.PathError{Op: "write", Path: op.Path, Err: syscall.ENOSPC}
				}
				return nil
			})
			if suffix == ".log" {
				if err := s.Commit(0, record("x", "y")); !errors.Is(err, ErrDiskFull) {
					t.Errorf("Commit: %v", err)
				}
			} else if _, err := s.db.AsyncFlush(); err != nil {
				t.Fatal(err)
			}
			err := <-heard
			if !errors.Is(err, ErrFailed) || !errors.Is(err, ErrDiskFull) || !strings.Contains(err.Error(), "make room") {
				t.Errorf("Fatal heard %v", err)
			}
			d.on(func(errorfs.Op) error { return nil })
			mustClose(t, s)
			s, err = Open(testConfig(mem.CrashClone(vfs.CrashCloneCfg{}), storeDir))
			if err != nil {
				t.Fatal(err)
			}
			defer mustClose(t, s)
			if got, err := content(s); err != nil || got["0/k"] != "acknowledged" || len(got) != 1 {
				t.Errorf("%v, %v", got, err)
			}
		})
	}
}

// TestDamagedLog: a changed byte in the log, before the last block of 32 KiB
// that was synced, is an error and not taken for the end of the log, which would
// silently forget acknowledged commits. In the last block the engine cannot tell
// it from a write that a crash cut off; then the mark is older than the last one
// that Advance returned, if the damage is before it.
func TestDamagedLog(t *testing.T) {
	dir := t.TempDir()
	s := mustCreate(t, testConfig(nil, dir))
	for n := 1; n <= 400; n++ {
		p, records := batchOf(n)
		if err := s.Commit(p, records); err != nil {
			t.Fatal(err)
		}
	}
	remembered, err := s.Advance()
	if err != nil {
		t.Fatal(err)
	}
	mustClose(t, s)
	logs, err := filepath.Glob(filepath.Join(dir, "*.log"))
	if err != nil || len(logs) != 1 {
		t.Fatalf("logs: %v, %v", logs, err)
	}
	whole, err := os.ReadFile(logs[0])
	if err != nil {
		t.Fatal(err)
	}
	end := len(whole)
	for end > 0 && whole[end-1] == 0 {
		end-- // preallocated
	}
	const block = 32 << 10
	if end < 3*block {
		t.Fatalf("the log has %d bytes", end)
	}
	for at := 500; at < end-500; at += 3001 {
		copyDir := t.TempDir()
		if err := os.CopyFS(copyDir, os.DirFS(dir)); err != nil {
			t.Fatal(err)
		}
		damaged := append([]byte(nil), whole...)
		damaged[at] ^= 0x10
		if err := os.WriteFile(filepath.Join(copyDir, filepath.Base(logs[0])), damaged, 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := Open(testConfig(nil, copyDir))
		switch lastBlock := at/block == end/block; {
		case err != nil && !errors.Is(err, ErrCorrupt):
			t.Errorf("byte %d of %d changed: %v", at, end, err)
		case err == nil && !lastBlock:
			t.Errorf("byte %d of %d changed, and the store opens", at, end)
		case err == nil && s.Mark() >= remembered:
			t.Errorf("byte %d of %d changed, and the mark is %d of %d", at, end, s.Mark(), remembered)
		}
		if err == nil {
			mustClose(t, s)
		}
	}
}

// TestStats: the counters count acknowledged commits, and the gauges are alive.
func TestStats(t *testing.T) {
	cfg := testConfig(nil, t.TempDir())
	var bytes, calls int
	cfg.OnCommit = func(d time.Duration, n int, err error) {
		if calls++; d > 0 && err == nil {
			bytes += n
		}
	}
	s := mustCreate(t, cfg)
	for n := 1; n <= 40; n++ {
		p, records := batchOf(n)
		if err := s.Commit(p, records); err != nil {
			t.Fatal(err)
		}
	}
	st := s.Stats()
	if st.Commits != 40 || calls != 40 || st.Records != 130 || st.CommitBytes != uint64(bytes) || st.CommitTime <= 0 {
		t.Errorf("%d calls, %d bytes: %+v", calls, bytes, st)
	}
	if st.LogBytes < st.CommitBytes || st.LogSize == 0 || st.DiskBytes == 0 || st.FreeBytes == 0 || st.Failed || st.Stalled {
		t.Errorf("%+v", st)
	}
	if err := s.Commit(grant.Partitions, record("k", "v")); err == nil {
		t.Error("a commit to no partition succeeded")
	}
	if err := s.Load(grant.Partitions, nil); err == nil {
		t.Error("a load of no partition succeeded")
	}
	mustClose(t, s)
	if st := s.Stats(); st.Commits != 40 || st.DiskBytes != 0 {
		t.Errorf("after Close: %+v", st)
	}
}
