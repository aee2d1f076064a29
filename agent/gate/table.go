package gate

import (
	"hash/maphash"
	"sync"
	"sync/atomic"

	"github.com/stipend/stipend/agent"
	"github.com/stipend/stipend/proto/grant"
)

// entry is one tenant and what the shell keeps beside its machine.
type entry struct {
	id     grant.TenantID
	hash   uint64
	tenant *agent.Tenant
	lowSet atomic.Bool // a signal for the timer loop is under way

	mu      sync.Mutex
	gone    bool // forgotten: look the tenant up again
	waiters map[uint64]chan agent.Decision
	fx      agent.Effects
	spare   agent.Effects

	checks int // in flight; guarded by calls.mu

	wake  grant.Instant // guarded by alarms.mu, as is place
	place int           // in the heap; -1: not there
}

// table finds entries by tenant: open addressing with linear probing. Readers
// take no lock; writers are serialised by mu and never move an entry within a
// slot array that readers may see, so that a probe never misses one that was
// there all the time.
//
// Invariant: at least half of the slots are nil, so every probe ends.
type table struct {
	seed  maphash.Seed
	slots atomic.Pointer[[]atomic.Pointer[entry]]

	mu    sync.Mutex
	live  int
	used  int // live entries and tombstones
	sweep int // where the next search for idle entries begins
}

// tombstone takes the place of a forgotten entry. No tenant has an empty id.
var tombstone = &entry{}

func newTable() *table {
	t := &table{seed: maphash.MakeSeed()}
	s := make([]atomic.Pointer[entry], 64)
	t.slots.Store(&s)
	return t
}

func (t *table) get(id grant.TenantID) *entry {
	h := maphash.String(t.seed, string(id))
	s := *t.slots.Load()
	mask := uint64(len(s) - 1)
	for i := h & mask; ; i = (i + 1) & mask {
		e := s[i].Load()
		if e == nil {
			return nil
		}
		if e.hash == h && e.id == id {
			return e
		}
	}
}

// put adds an entry whose id is not there; t.mu is held.
func (t *table) put(e *entry) {
	s := *t.slots.Load()
	if 2*(t.used+1) > len(s) {
		size := 64
		for size < 4*(t.live+1) {
			size *= 2
		}
		bigger := make([]atomic.Pointer[entry], size)
		for i := range s {
			if o := s[i].Load(); o != nil && o != tombstone {
				place(bigger, o)
			}
		}
		t.slots.Store(&bigger)
		s, t.used = bigger, t.live
	}
	e.hash = maphash.String(t.seed, string(e.id))
	place(s, e)
	t.live++
	t.used++
}

func place(s []atomic.Pointer[entry], e *entry) {
	mask := uint64(len(s) - 1)
	i := e.hash & mask
	for s[i].Load() != nil {
		i = (i + 1) & mask
	}
	s[i].Store(e)
}

// drop forgets an entry; t.mu is held.
func (t *table) drop(e *entry) {
	s := *t.slots.Load()
	mask := uint64(len(s) - 1)
	for i := e.hash & mask; ; i = (i + 1) & mask {
		o := s[i].Load()
		if o == nil {
			return
		}
		if o == e {
			s[i].Store(tombstone)
			t.live--
			return
		}
	}
}

// all lists the entries of this moment.
func (t *table) all() []*entry {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]*entry, 0, t.live)
	s := *t.slots.Load()
	for i := range s {
		if e := s[i].Load(); e != nil && e != tombstone {
			out = append(out, e)
		}
	}
	return out
}

// forget drops idle entries among the next n slots and reports how many.
// idle is called with the entry's lock held; t.mu is held.
func (t *table) forget(n int, idle func(*entry) bool) (freed int) {
	s := *t.slots.Load()
	n = min(n, len(s))
	for range n {
		t.sweep = (t.sweep + 1) & (len(s) - 1)
		e := s[t.sweep].Load()
		if e == nil || e == tombstone || !e.mu.TryLock() {
			continue
		}
		if !e.gone && idle(e) {
			e.gone = true
			t.drop(e)
			freed++
		}
		e.mu.Unlock()
	}
	return freed
}
