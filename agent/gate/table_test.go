package gate

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"

	"github.com/stipend/stipend/proto/grant"
)

// The table finds what was put and not dropped, through growth and tombstones,
// as a map does; every probe ends.
func TestTableLikeMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tab, want := newTable(), map[grant.TenantID]*entry{}
		for range rapid.IntRange(1, 400).Draw(t, "steps") {
			id := grant.TenantID(fmt.Sprint("t", rapid.IntRange(0, 60).Draw(t, "id")))
			e := want[id]
			tab.mu.Lock()
			switch {
			case e == nil:
				e = &entry{id: id, place: -1}
				tab.put(e)
				want[id] = e
			case rapid.Bool().Draw(t, "drop"):
				tab.drop(e)
				delete(want, id)
			}
			tab.mu.Unlock()
			if tab.get(id) != want[id] || tab.live != len(want) || len(tab.all()) != len(want) {
				t.Fatalf("%s: %p, want %p; %d live, want %d", id, tab.get(id), want[id], tab.live, len(want))
			}
			if nilSlots := len(*tab.slots.Load()) - tab.used; 2*nilSlots < len(*tab.slots.Load()) {
				t.Fatalf("%d of %d slots are nil", nilSlots, len(*tab.slots.Load()))
			}
		}
		for id, e := range want {
			if tab.get(id) != e {
				t.Fatalf("%s is lost", id)
			}
		}
	})
}

// Forgetting drops the idle and only them, and tells those who hold the entry.
func TestTableForgets(t *testing.T) {
	tab := newTable()
	var all []*entry
	for i := range 100 {
		e := &entry{id: grant.TenantID(fmt.Sprint("t", i)), place: -1}
		tab.put(e)
		all = append(all, e)
	}
	locked := all[0]
	locked.mu.Lock()
	tab.mu.Lock()
	n := tab.forget(1<<20, func(e *entry) bool { return e != all[1] })
	tab.mu.Unlock()
	locked.mu.Unlock()
	if n != 98 || tab.get("t0") == nil || tab.get("t1") == nil || tab.get("t2") != nil {
		t.Errorf("%d forgotten", n)
	}
	for i, e := range all {
		if e.gone != (i > 1) {
			t.Errorf("t%d: gone %v", i, e.gone)
		}
	}
}

// The ceiling counts each attempt once, lets go of answered, unanswered and
// lost ones, and its list stays short.
func TestCalls(t *testing.T) {
	c := &calls{max: 10, share: 6, life: 100, open: map[uint64]*entry{}}
	a, b := &entry{}, &entry{}
	for seq := uint64(1); seq <= 6; seq++ {
		first, again := c.begin(a, seq, 0), c.begin(a, seq, 0)
		if !first || !again {
			t.Fatalf("attempt %d: %v, sent again: %v", seq, first, again)
		}
	}
	if c.begin(a, 7, 0) {
		t.Error("a tenant goes beyond its share")
	}
	for seq := uint64(11); seq <= 14; seq++ {
		c.begin(b, seq, 50)
	}
	if c.len() != 10 || c.begin(b, 15, 50) {
		t.Errorf("%d open of 10", c.len())
	}
	if !c.begin(b, 15, 101) || a.checks != 0 || b.checks != 5 {
		t.Errorf("the unanswered stay: %d and %d", a.checks, b.checks)
	}
	for seq := uint64(100); seq < 10_000; seq++ { // one old call stays at the head
		if !c.begin(a, seq, 102) {
			t.Fatalf("attempt %d refused", seq)
		}
		c.end(seq)
	}
	if len(c.order) > 4*c.max {
		t.Errorf("a list of %d", len(c.order))
	}
	c.reset()
	if c.len() != 0 || a.checks != 0 || b.checks != 0 {
		t.Error("something is left after the stream")
	}
}
