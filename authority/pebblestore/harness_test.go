package pebblestore

import (
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"go.uber.org/goleak"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/authority/storetest"
)

func TestMain(m *testing.M) {
	switch role := os.Getenv(childVariable); role {
	case "":
		goleak.VerifyTestMain(m)
	case "leaky":
		os.Exit(m.Run())
	default:
		child(role)
	}
}

// childVariable tells this test binary, run again by a test, what to be.
const childVariable = "STIPEND_STORE_CHILD"

// testConfig is small, so that tables are flushed often, and silent.
func testConfig(fs vfs.FS, dir string) Config {
	cfg := DefaultConfig(dir)
	cfg.FS = fs
	cfg.MemTableBytes = 256 << 10
	cfg.CacheBytes = 1 << 20
	cfg.MinFreeBytes = 0
	cfg.Log = slog.New(slog.NewTextHandler(io.Discard, nil))
	return cfg
}

// disk wraps a file system: before every operation that changes something it
// asks a hook, and it can hold all of them back.
type disk struct {
	vfs.FS
	gate sync.RWMutex
	hook atomic.Pointer[func(errorfs.Op) error]
}

func newDisk(under vfs.FS) *disk {
	d := &disk{}
	d.FS = errorfs.Wrap(under, errorfs.InjectorFunc(d.before))
	return d
}

func (d *disk) before(op errorfs.Op) error {
	if op.Kind.ReadOrWrite() == errorfs.OpIsRead || op.Kind == errorfs.OpFileClose {
		return nil
	}
	d.gate.RLock()
	defer d.gate.RUnlock()
	if hook := d.hook.Load(); hook != nil {
		return (*hook)(op)
	}
	return nil
}

// ReuseForWrite is how Pebble recycles old logs. Package errorfs leaves the file
// it returns unwrapped.
func (d *disk) ReuseForWrite(oldname, newname string, category vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := d.FS.ReuseForWrite(oldname, newname, category)
	if err != nil {
		return nil, err
	}
	return errorfs.WrapFile(f, errorfs.InjectorFunc(func(op errorfs.Op) error {
		op.Path = newname
		return d.before(op)
	})), nil
}

func (d *disk) on(hook func(errorfs.Op) error) { d.hook.Store(&hook) }

func isSync(k errorfs.OpKind) bool { return k == errorfs.OpFileSync || k == errorfs.OpFileSyncData }

var errDisk = &os.PathError{Op: "write", Path: "injected", Err: syscall.EIO}

// failLog makes one operation on the write-ahead log fail: its write, so that
// the records are lost, or its sync, after the records were written.
func (d *disk) failLog(o storetest.Outcome) {
	d.on(func(op errorfs.Op) error {
		if strings.HasSuffix(op.Path, ".log") && (o == storetest.Kept && isSync(op.Kind) || o == storetest.Lost && op.Kind == errorfs.OpFileWrite) {
			return errDisk
		}
		return nil
	})
}

// memHarness runs a store on a disk in memory that loses what was not synced.
type memHarness struct {
	mem   *vfs.MemFS
	disk  *disk
	rng   *rand.Rand
	store *Store
	fate  storetest.Outcome // of the injected failure
}

func newMemHarness(t *testing.T) storetest.Harness {
	h := &memHarness{mem: vfs.NewCrashableMem(), rng: rand.New(rand.NewPCG(7, 7))}
	t.Cleanup(func() {
		if h.store != nil {
			h.Close(t)
		}
	})
	return h
}

func (h *memHarness) Open(t testing.TB) authority.Store {
	t.Helper()
	h.disk = newDisk(h.mem)
	h.store = openOrCreate(t, testConfig(h.disk, "data/store"))
	return h.store
}

func openOrCreate(t testing.TB, cfg Config) *Store {
	t.Helper()
	cfg.Fatal = func(error) {}
	open := Open
	if _, err := cfg.FS.Stat(cfg.Dir); err != nil {
		open = Create
	}
	s, err := open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func (h *memHarness) Close(t testing.TB) {
	t.Helper()
	if err := h.store.Close(); err != nil {
		t.Fatal(err)
	}
	h.store = nil
}

func (h *memHarness) Crash(t testing.TB) {
	t.Helper()
	h.crash(t, h.rng.IntN(3)*50)
}

func (h *memHarness) crash(t testing.TB, unsyncedPercent int) {
	t.Helper()
	h.mem = h.mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: unsyncedPercent, RNG: rand.New(rand.NewPCG(h.rng.Uint64(), 1))})
	h.Close(t) // ends the old process; what it still writes goes to the old disk
}

func (h *memHarness) Fail(_ testing.TB, o storetest.Outcome) bool {
	h.fate = o
	h.disk.failLog(o)
	return true
}

func (h *memHarness) Reload(t testing.TB) authority.Store {
	t.Helper()
	h.crash(t, map[storetest.Outcome]int{storetest.Lost: 0, storetest.Kept: 100}[h.fate])
	return h.Open(t)
}

// dirHarness runs a store in a real folder; a crash is the death of the process,
// which loses nothing that was handed to the kernel.
type dirHarness struct {
	root  string
	disk  *disk
	store *Store
	lives int
}

func newDirHarness(t *testing.T) storetest.Harness {
	h := &dirHarness{root: t.TempDir()}
	t.Cleanup(func() {
		if h.store != nil {
			h.Close(t)
		}
	})
	return h
}

func (h *dirHarness) dir() string { return filepath.Join(h.root, fmt.Sprint(h.lives)) }

func (h *dirHarness) Open(t testing.TB) authority.Store {
	t.Helper()
	h.disk = newDisk(vfs.Default)
	h.store = openOrCreate(t, testConfig(h.disk, h.dir()))
	return h.store
}

func (h *dirHarness) Close(t testing.TB) {
	t.Helper()
	if err := h.store.Close(); err != nil {
		t.Fatal(err)
	}
	h.store = nil
}

// Crash copies the folder while no new change may begin, and lets the old
// process go on with the old one.
func (h *dirHarness) Crash(t testing.TB) {
	t.Helper()
	old := h.dir()
	h.lives++
	h.disk.gate.Lock()
	err := os.CopyFS(h.dir(), os.DirFS(old))
	h.disk.gate.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	h.Close(t)
	if err := os.RemoveAll(old); err != nil {
		t.Fatal(err)
	}
}

func (h *dirHarness) Fail(_ testing.TB, o storetest.Outcome) bool {
	h.disk.failLog(o)
	return true
}

func (h *dirHarness) Reload(t testing.TB) authority.Store {
	t.Helper()
	h.Crash(t)
	return h.Open(t)
}

func TestConformance(t *testing.T) {
	t.Run("memory", func(t *testing.T) { storetest.Run(t, newMemHarness) })
	t.Run("folder", func(t *testing.T) { storetest.Run(t, newDirHarness) })
}
