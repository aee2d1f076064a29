package storetest_test

import (
	"errors"
	"maps"
	"os"
	"os/exec"
	"slices"
	"sync"
	"testing"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/authority/storetest"
	"github.com/stipend/stipend/proto/grant"
)

// fake is the smallest store: maps, and a copy of them that is the disk. Each
// flaw is one way in which a store can be wrong.
type fake struct {
	mu     sync.Mutex
	memory [grant.Partitions]map[string]string
	disk   [grant.Partitions]map[string]string
	fail   *storetest.Outcome
	flaw   string
	count  int
	dead   bool
	kept   []authority.Record // of the caller, by flaw
}

var errFake = errors.New("commit failed")

func (f *fake) apply(m map[string]string, records []authority.Record) map[string]string {
	next := maps.Clone(m)
	if next == nil {
		next = make(map[string]string)
	}
	for _, r := range records {
		if r.Value == nil || f.flaw == "empty value deletes" && len(r.Value) == 0 {
			delete(next, string(r.Key))
		} else {
			next[string(r.Key)] = string(r.Value)
		}
	}
	return next
}

func (f *fake) Commit(p grant.Partition, records []authority.Record) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.dead {
		return errFake
	}
	if f.flaw == "one partition" {
		p = 0
	}
	f.count++
	if fail := f.fail; fail != nil {
		f.fail = nil
		switch {
		case f.flaw == "failure in part":
			records = records[:1]
		case f.flaw == "error swallowed":
			return nil
		case *fail == storetest.Lost:
			if f.flaw == "lost shows later" {
				f.kept = slices.Clone(records)
			}
			return errFake
		}
		f.memory[p] = f.apply(f.memory[p], records)
		f.disk[p] = f.apply(f.disk[p], records)
		return errFake
	}
	f.memory[p] = f.apply(f.memory[p], records)
	if f.kept != nil {
		f.memory[p] = f.apply(f.memory[p], f.kept)
		f.kept = nil
	}
	switch {
	case f.flaw == "unsynced" && f.count%50 == 0:
	case f.flaw == "deletes unsynced" && records != nil && records[0].Value == nil:
	case f.flaw == "writes the caller's key" && len(records) > 0 && len(records[0].Key) > 0:
		f.disk[p] = f.memory[p]
		records[0].Key[0] ^= 1
	case f.flaw == "large cut off" && len(records) > 500:
		f.memory[p] = f.apply(f.memory[p], nil)
		delete(f.memory[p], string(records[999].Key))
		f.disk[p] = f.memory[p]
	default:
		f.disk[p] = f.memory[p]
	}
	return nil
}

func (f *fake) Load(p grant.Partition, yield func(key, value []byte) error) error {
	f.mu.Lock()
	if f.flaw == "one partition" {
		p = 0
	}
	m := f.memory[p]
	f.mu.Unlock()
	keys := slices.Sorted(maps.Keys(m))
	if f.flaw == "no order" {
		slices.Reverse(keys)
	}
	for _, k := range keys {
		if err := yield([]byte(k), []byte(m[k])); err != nil {
			if f.flaw == "yield error swallowed" {
				return nil
			}
			return err
		}
	}
	return nil
}

type fakeHarness struct {
	flaw  string
	store *fake
}

func (h *fakeHarness) Open(testing.TB) authority.Store {
	next := &fake{flaw: h.flaw}
	if h.store != nil {
		next.disk = h.store.disk
		for p := range next.disk {
			next.memory[p] = maps.Clone(next.disk[p])
		}
	}
	h.store = next
	return next
}

func (h *fakeHarness) Close(t testing.TB) {
	h.store.disk = h.store.memory
	h.Crash(t)
}

func (h *fakeHarness) Crash(testing.TB) {
	h.store.mu.Lock()
	defer h.store.mu.Unlock()
	h.store.dead = true
}

func (h *fakeHarness) Fail(_ testing.TB, o storetest.Outcome) bool {
	h.store.fail = &o
	return true
}

func (h *fakeHarness) Reload(testing.TB) authority.Store { return h.store }

func run(t *testing.T, flaw string) {
	storetest.Run(t, func(*testing.T) storetest.Harness { return &fakeHarness{flaw: flaw} })
}

const flawVariable = "STIPEND_STORETEST_FLAW"

// TestFake: a right store passes the suite. With the variable set it runs the
// suite on a wrong one.
func TestFake(t *testing.T) { run(t, os.Getenv(flawVariable)) }

// TestSuiteFindsFlaws: every flaw fails the suite, each run in a process of its
// own because the suite fails its test.
func TestSuiteFindsFlaws(t *testing.T) {
	for _, flaw := range []string{
		"empty value deletes", "one partition", "failure in part", "error swallowed", "lost shows later", "unsynced",
		"deletes unsynced", "writes the caller's key", "large cut off", "no order", "yield error swallowed",
	} {
		t.Run(flaw, func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command(os.Args[0], "-test.run=^TestFake$", "-rapid.nofailfile")
			cmd.Env = append(os.Environ(), flawVariable+"="+flaw)
			out, err := cmd.CombinedOutput()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() != 1 {
				t.Fatalf("the suite passed a store with this flaw (%v):\n%s", err, out)
			}
		})
	}
}
