package sim

import (
	"sync"
	"testing"
	"time"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/authority/storetest"
	"github.com/stipend/stipend/proto/grant"
)

// harness runs the suite of the real stores against the simulated disk, which is
// not safe for concurrent use by itself.
type harness struct {
	mu   sync.Mutex
	disk *Disk
}

func (h *harness) Load(p grant.Partition, yield func(k, v []byte) error) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.disk.Load(p, yield)
}

func (h *harness) Commit(p grant.Partition, records []authority.Record) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.disk.Commit(p, records)
}

func (h *harness) Open(testing.TB) authority.Store   { return h }
func (h *harness) Close(testing.TB)                  {}
func (h *harness) Crash(testing.TB)                  {}
func (h *harness) Reload(testing.TB) authority.Store { return h }

func (h *harness) Fail(_ testing.TB, o storetest.Outcome) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.disk.Next(map[storetest.Outcome]Fate{storetest.Lost: Failed, storetest.Kept: Landed}[o])
	return true
}

// The simulated disk passes the suite of the real stores.
func TestDiskIsAStore(t *testing.T) {
	storetest.Run(t, func(t *testing.T) storetest.Harness {
		return &harness{disk: newWorld(t, DefaultConfig(1), 0).Disk}
	})
}

// A commit in flight at a crash lands whole or not at all, both happen, and
// nothing of it appears later.
func TestCrashDecidesACommitInFlight(t *testing.T) {
	w := newWorld(t, DefaultConfig(2), 0)
	landed := 0
	for range 100 {
		heard := false
		w.Disk.begin(3, []authority.Record{{Key: []byte("k"), Value: []byte("v")}, {Key: []byte("l"), Value: []byte("v")}}, func(error, bool) { heard = true })
		if w.Disk.crash(3) {
			landed++
		}
		have := len(w.Disk.records[3])
		run(t, w, time.Second)
		if heard || have != len(w.Disk.records[3]) || have == 1 {
			t.Fatalf("%d of 2 records at the crash, %d later, heard %v", have, len(w.Disk.records[3]), heard)
		}
		w.Disk.Next(Committed)
		if err := w.Disk.Commit(3, []authority.Record{{Key: []byte("k")}, {Key: []byte("l")}}); err != nil {
			t.Fatal(err)
		}
	}
	if landed < 20 || landed > 80 {
		t.Errorf("%d of 100 commits in flight landed", landed)
	}
}
